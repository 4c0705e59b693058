"""Enrolment on the machine that shall run tasks: one code in, a home that holds all an agent needs out.

May be repeated with the same code until it has worked: the token is made and kept before the server hears of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import platform
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import diamond
from diamond.agent.asked import forget_owner
from diamond.agent.config import AgentConfig, instance_of, own_file, token_file
from diamond.agent.credentials import pending_token
from diamond.agent.link import CONNECT_TIMEOUT_S, Link
from diamond.agent.schedulers.choice import choose
from diamond.core.codec import decode, encode
from diamond.core.enrolment import CA_PATH, ENDPOINT_NAME, Enrolled, NewAgent, plain_code, token_hash
from diamond.core.errors import (
    Conflict,
    InstallationProblem,
    InvalidInput,
    ProtocolError,
    ServerUnreachable,
    Unauthenticated,
)
from diamond.core.home import Home
from diamond.core.rundir import write_atomic
from diamond.core.tls import blind_context, check_pin, explain, first_certificate

_MAX_CA_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    home: Path
    config: AgentConfig
    is_changed: bool  # an agent that runs here must be started anew to follow it


def enrol(
    server: str,
    code: str,
    *,
    pin: str = "",
    ca_file: Path | None = None,
    home: Path | None = None,
    name: str | None = None,
    scheduler: str | None = None,
    take_over: bool = False,
) -> Enrolment:
    """Exchange a code for the right to speak for an endpoint, and keep what that needs.

    Args:
        pin: SHA-256 of the server's private authority, as the enrolment line gives it.
        ca_file: that authority's certificate itself, instead.
        home: the agent's folder; None: `agents/NAME` in Diamond's home.
        name: refuse the code of any other endpoint.
        scheduler: what runs the jobs; None: as before, or what is found.
        take_over: another home spoke for this endpoint and is lost; what it ran is given up.

    Raises:
        DiamondError: the server cannot be reached or trusted, or does not accept the code; or this machine belongs to a
            cluster that Diamond cannot submit to, and `scheduler` does not say that it is to be used by itself.
    """
    server = server.rstrip("/")
    if not plain_code(code):
        raise InvalidInput(
            "this is not an enrolment code", hint="it looks like XXXX-XXXX-XXXX; copy it again", field="--code"
        )
    authority = _authority(server, pin, ca_file)
    link = Link(server, "", ca_pem=authority)
    with contextlib.ExitStack() as stack:
        stack.callback(link.release)
        asked = NewAgent(code=code, token_sha256="0" * 64, instance="agt_00000000", look=True)
        found = decode(Enrolled, link.call("POST", "/enrolment", encode(asked)))
        if not ENDPOINT_NAME.fullmatch(found.endpoint_name):  # it becomes the name of a folder
            raise ProtocolError(f"the server calls the endpoint {found.endpoint_name[:80]!r}")
        if name is not None and name != found.endpoint_name:
            raise InvalidInput(f"the code is for endpoint {found.endpoint_name}, not {name[:80]!r}", field="--name")
        folder = (home or Home.find().agent(found.endpoint_name)).expanduser().absolute()
        known = AgentConfig.load(folder)
        wanted = scheduler if scheduler is not None else known.scheduler if known else ""
        if wanted != "slurm":  # its module may be loaded when the agent starts
            choose(wanted or "auto", folder)  # before the code is spent
        key = hashlib.sha256(plain_code(code).encode()).hexdigest()[:16]
        config = AgentConfig(
            server=server,
            name=found.endpoint_name,
            endpoint_id=found.endpoint_id,
            private_ca=authority is not None,
            scheduler=wanted,
            enrolled_with=key,
        )
        _make(folder, known, config)
        # Named by the code: a token left by another attempt may be one that was revoked since. One that is in use
        # already is the outcome of the very same exchange.
        is_repeated = known is not None and known.enrolled_with == key and token_file(folder).exists()
        waiting = token_file(folder) if is_repeated else folder / f"token.{key}"
        message = NewAgent(
            code=code,
            token_sha256=token_hash(pending_token(waiting)),
            instance=instance_of(folder),
            hostname=platform.node(),
            take_over=take_over,
        )
        try:
            link.call("POST", "/enrolment", encode(message))
        except Unauthenticated:
            if not is_repeated:  # the code is spent or void, and with it the token made for it
                waiting.unlink(missing_ok=True)
            raise
    is_changed = _differs(folder, known, config, authority)
    if authority is not None:
        write_atomic(folder / "ca.pem", authority.encode())
    config.save(folder)
    forget_owner(folder)
    _keep_own_file(folder)
    os.replace(waiting, token_file(folder))
    return Enrolment(home=folder, config=config, is_changed=is_changed)


def running_file() -> Path | None:
    """The one-file agent this process runs from; None for an installed package."""
    path = Path(diamond.__file__)
    return next((parent for parent in path.parents if parent.is_file()), None)


def _make(folder: Path, known: AgentConfig | None, config: AgentConfig) -> None:
    if known is not None and known.endpoint_id not in ("", config.endpoint_id):
        raise Conflict(
            f"{folder} belongs to another endpoint, {known.name} of {known.server}, perhaps removed since",
            hint="choose another folder with --home; if that endpoint is gone for good, stop its agent and remove the "
            f"folder: python3 {folder}/diamond-agent.pyz stop; rm -r {folder}",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(folder, 0o700)
    except OSError as error:
        raise InstallationProblem(
            f"{folder}: {error.strerror}", hint="choose another folder with --home, or set DIAMOND_HOME"
        ) from error


def _differs(folder: Path, known: AgentConfig | None, config: AgentConfig, authority: str | None) -> bool:
    if known is None:
        return False
    if (known.server, known.private_ca, known.scheduler) != (config.server, config.private_ca, config.scheduler):
        return True
    with contextlib.suppress(OSError):
        return authority is not None and (folder / "ca.pem").read_text() != authority
    return True


def _keep_own_file(folder: Path) -> None:
    """The file this was run from may lie anywhere and go away; the home keeps its own copy."""
    source, target = running_file(), own_file(folder)
    if source is None or (target.exists() and source.samefile(target)):
        return
    write_atomic(target, source.read_bytes(), mode=0o700)


def _authority(server: str, pin: str, ca_file: Path | None) -> str | None:
    if ca_file is not None:
        try:
            pem = first_certificate(ca_file.expanduser().read_text())
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{ca_file} is not a certificate: {error}", field="--ca") from error
    elif pin:
        pem = first_certificate(fetch_authority(server))
    else:
        return None
    if pin:
        check_pin(pem, pin)
    return pem


def fetch_authority(server: str) -> str:
    """The certificate that the server says is its authority's. To be checked against a pin before it is believed.

    Raises:
        InvalidInput: the address is not one of HTTPS.
        ServerUnreachable: no answer.
        InstallationProblem: the server has no authority of its own.
    """
    parts = urllib.parse.urlsplit(server)
    if parts.scheme != "https" or not parts.hostname:
        raise InvalidInput(f"{server!r} with a pin must be an https:// address", field="URL")
    connection = http.client.HTTPSConnection(
        parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S, context=blind_context()
    )
    try:
        connection.request("GET", parts.path.rstrip("/") + CA_PATH)
        answer = connection.getresponse()
        body = answer.read(_MAX_CA_BYTES).decode("ascii", errors="replace")
    except (OSError, http.client.HTTPException) as error:
        message, hint = explain(error, server) or (f"no answer from {server}: {error or type(error).__name__}", "")
        raise ServerUnreachable(message, hint=hint) from error
    finally:
        connection.close()
    if answer.status != 200 or "BEGIN CERTIFICATE" not in body:
        raise InstallationProblem(
            f"{server} has no authority of its own (answer {answer.status})",
            hint="is this the address of the Diamond server that printed the line? get a new one with "
            "`diamond endpoint enroll NAME`",
        )
    return body
