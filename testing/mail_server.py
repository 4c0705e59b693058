"""A mail server in a process of its own: STARTTLS, a password, and every mail as a file. Mail for `nobody@` is refused.

As a program: ``python -m testing.mail_server FOLDER PORT CERT KEY USER PASSWORD``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import subprocess
import sys
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from testing.postgres import free_port
from testing.waiting import eventually


class MailServer:
    """Use as a context manager. `mails` are those it has taken, in order."""

    def __init__(self, folder: Path, cert: Path, key: Path, *, user: str = "diamond") -> None:
        self.folder, self.port = folder, free_port()
        self.user, self.password = user, secrets.token_hex(8)
        folder.mkdir(parents=True)
        self._argv = [str(folder), str(self.port), str(cert), str(key), user, self.password]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MailServer:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "testing.mail_server", *self._argv],
                cwd=Path(__file__).parents[1], stdout=log, stderr=log,
            )  # fmt: skip
        eventually(self._answers, what="the mail server answers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as found:
                return found.recv(3) == b"220"
        except OSError:
            return False

    @property
    def mails(self) -> list[EmailMessage]:
        found = sorted(self.folder.glob("*.eml"))
        return [cast(EmailMessage, message_from_bytes(path.read_bytes(), policy=policy.default)) for path in found]


async def _serve(folder: Path, port: int, cert: str, key: str, user: str, password: str) -> None:
    from aiosmtpd.smtp import SMTP, AuthResult, LoginPassword

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    count = 0

    class Handler:
        async def handle_RCPT(  # noqa: N802
            self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
        ) -> str:
            if address.startswith("nobody@"):
                return "550 there is nobody here by that name"
            envelope.rcpt_tos.append(address)
            return "250 OK"

        async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
            nonlocal count
            count += 1
            path = folder / f"{count:06}.eml"
            path.with_suffix(".part").write_bytes(
                b"X-To: " + ",".join(envelope.rcpt_tos).encode() + b"\r\n" + envelope.content
            )
            os.replace(path.with_suffix(".part"), path)
            return "250 taken"

    def check(_server: Any, _session: Any, _envelope: Any, _mechanism: str, given: Any) -> AuthResult:
        known = isinstance(given, LoginPassword) and (given.login, given.password) == (user.encode(), password.encode())
        return AuthResult(success=known, handled=False)

    def session() -> SMTP:
        options: dict[str, Any] = {"tls_context": context, "require_starttls": True, "hostname": "mail"}
        return SMTP(Handler(), authenticator=check, auth_required=True, **options)

    server = await asyncio.get_running_loop().create_server(session, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7]))
