"""How people come into a real server with accounts, in the way they do: the printed code, then invitations."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pwdlib import PasswordHash
from pwdlib.hashers.argon2 import Argon2Hasher

from diamond.core.home import ClientConfig, Home
from diamond.core.tls import client_context
from diamond.server.services import passwords
from testing.waiting import eventually

PASSWORD = "correct horse battery staple"  # noqa: S105 - of people in tests
_SETUP_CODE = re.compile(r"setup code: (\S+)")


def cheap_hasher() -> PasswordHash:
    """The same hashes with little work, for suites that check passwords by the hundred."""
    return PasswordHash((Argon2Hasher(time_cost=1, memory_cost=1024, parallelism=1),))


@contextmanager
def cheap_passwords() -> Iterator[None]:
    """Ended before whatever comes next: what is left behind would weaken the passwords of another suite."""
    hasher = cheap_hasher()
    nobodys = hasher.hash("of nobody")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passwords, "_hasher", lambda: hasher)
        patch.setattr(passwords, "_nobodys", lambda: nobodys)
        yield


def printed_code(log: Path) -> str:
    """The setup code that the newest start of a server printed."""
    found = eventually(lambda: _SETUP_CODE.findall(log.read_text(errors="replace")), what="the setup code is printed")
    return str(found[-1])


def set_up(url: str, code: str, name: str, *, ca: Path | None = None) -> str:
    """Become the first administrator; a token of theirs."""
    return _come_in(f"{url}/api/v1/setup", code, name, ca)


def invite(admin: ClientConfig, name: str, **invitation: Any) -> str:
    """Somebody new is invited and comes; a token of theirs."""
    ca = Path(admin.ca) if admin.ca else None
    headers = {"Authorization": f"Bearer {admin.token}"}
    made = httpx.post(
        f"{admin.url}/api/v1/invitations", json=invitation, headers=headers, verify=_trust(ca), timeout=30
    )
    assert made.status_code == 201, made.text
    return _come_in(f"{admin.url}/api/v1/invitations/accept", made.json()["code"], name, ca)


def _come_in(url: str, code: str, name: str, ca: Path | None) -> str:
    body = {"code": code, "name": name, "password": PASSWORD, "token_name": "tests"}
    done = httpx.post(url, json=body, verify=_trust(ca), timeout=30)
    assert done.status_code == 201, done.text
    return str(done.json()["token"])


def _trust(ca: Path | None) -> ssl.SSLContext | bool:
    return client_context(ca) if ca is not None else True


def save(home: Home, url: str, token: str, *, ca: Path | None = None) -> ClientConfig:
    config = ClientConfig(url=url, token=token, ca=str(ca) if ca else "")
    config.save(home)
    return config
