"""Commands about an endpoint's agent and its right to speak: endpoint create, enroll, rotate, revoke and rm."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diamond.cli import render
from diamond.cli.session import confirm, connect, emit, program, say
from diamond.core.endpoints import Endpoint
from diamond.core.enrolment import Enrolment, enrolment_lines
from diamond.core.errors import Conflict, InvalidInput
from diamond.core.rundir import write_atomic


def create(name: str, *, url: str | None, token_file: Path | None, as_json: bool) -> None:
    if token_file:
        _create_with_token(name, token_file, url=url, as_json=as_json)
        return
    _check_url(url)
    with connect() as client:
        endpoint, made = client.endpoints.create_with_code(name)
        reached = client.url
    _show_line(made, _address(made, url, reached), endpoint=endpoint, as_json=as_json)


def enroll(name: str, *, url: str | None, as_json: bool) -> None:
    _check_url(url)
    with connect() as client:
        made = client.endpoints.enrol(name)
        reached = client.url
    _show_line(made, _address(made, url, reached), as_json=as_json)


def _address(made: Enrolment, url: str | None, reached: str) -> str:
    chosen = (url or made.url or reached).rstrip("/")
    _check_url(chosen)  # also what the server said of itself: it is printed, to be pasted
    return chosen


def _check_url(url: str | None) -> None:
    # Before the endpoint is made: a mistake must not leave half of what was asked for.
    parts = urlsplit(url or "http://x")
    is_one_word = (url or "x").isprintable() and " " not in (url or "")  # urlsplit itself drops line breaks
    # A password in it would stand in histories and process lists.
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or not is_one_word:
        raise InvalidInput(
            f"{(url or '')[:80]!r} is not the address of a server",
            hint="write e.g. https://diamond.example.org:7421",
            field="--url",
        )


def _show_line(made: Enrolment, url: str, *, endpoint: Endpoint | None = None, as_json: bool) -> None:
    line, without_curl = enrolment_lines(made, url)
    warnings = _warnings(made, url)
    if as_json:
        said: dict[str, Any] = {"enrolment": made, "url": url, "line": line, "line_without_curl": without_curl}
        emit({**({"endpoint": endpoint} if endpoint else {}), **said, "warnings": warnings})
        return
    if endpoint:
        say(f"Endpoint {render.clean(made.endpoint)} is registered.")
    until = time.strftime("%H:%M", time.localtime(made.expires_at))
    say(f"Paste this on its login node (or the machine that shall run the tasks); it works once, until {until}:")
    say()
    print(line, flush=True)
    say()
    say("Without curl:")
    say(f"  {without_curl}")
    say(f"Where `diamond` is installed:  {_installed(made, url)}")
    for warning in warnings:
        say(f"{render.paint('warning:', '33;1')} {warning}")


def _installed(made: Enrolment, url: str) -> str:
    argv = ["diamond", "agent", "enroll", url, "--code", made.code, *(["--pin", made.pin] if made.pin else [])]
    return shlex.join([*argv, "--start"])


def _warnings(made: Enrolment, url: str) -> list[str]:
    from diamond.sdk.transport import is_loopback

    parts = urlsplit(url)
    found = []
    if is_loopback(url):
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found.append(
            f"{url} means the machine it is used on, so a cluster cannot reach it. Start the server where the cluster "
            f"can: `diamond serve --multi-user --tls --host 0.0.0.0` with DIAMOND_PUBLIC_URL=https://THIS-HOST:{port}, "
            f"then `diamond endpoint enroll {made.endpoint}`; or keep a tunnel open: ssh -R {port}:127.0.0.1:{port} "
            "LOGIN-NODE"
        )
    elif parts.scheme == "http":
        found.append(
            "over plain HTTP whoever listens in can take the agent's token; start the server with --tls, or put a TLS "
            "proxy in front of it"
        )
    if parts.scheme == "https" and made.names and (parts.hostname or "").lower() not in made.names:
        found.append(
            f"the server's certificate does not name {parts.hostname}, so agents will refuse it: start the server with "
            f"DIAMOND_PUBLIC_URL={url}"
        )
    return found


def _create_with_token(name: str, token_file: Path, *, url: str | None, as_json: bool) -> None:
    if token_file.exists():
        raise InvalidInput(
            f"{token_file} exists", hint="give another file, so that no token is lost", field="--token-file"
        )
    if not token_file.absolute().parent.is_dir():
        # Before the endpoint is made: its token can be had only once.
        raise InvalidInput(f"there is no folder {token_file.absolute().parent}", field="--token-file")
    with connect() as client:
        from diamond.sdk.transport import is_loopback

        endpoint, token = client.endpoints.create(name)
        reached = (url or client.url).rstrip("/")
    write_atomic(token_file, token.encode())
    if as_json:
        emit({"endpoint": endpoint, "token": None, "token_file": str(token_file)})
        return
    # The file's name alone: that is how it is called there, wherever it lies here.
    argv = ["diamond", "agent", "run", "--server", reached, "--token-file", token_file.name]
    say(f"Endpoint {render.clean(name)} is registered. On the machine that shall run the tasks:")
    say(f"  1. copy the token file {token_file} there (it is secret)")
    say(f"  2. run:  {shlex.join(argv)} --home ~/.diamond/agents/{shlex.quote(name)}")
    if is_loopback(reached):
        say(f"Another machine cannot reach {reached}; `{program()} endpoint create` without --token-file says more.")


def rotate(name: str, *, url: str | None, as_json: bool) -> None:
    _check_url(url)
    with connect() as client:
        found = client.endpoints.rotate(name)
        reached = client.url
    if found.enrolment is not None:
        if not as_json:
            say(f"The agent of {render.clean(name)} is offline; it takes a new token when it comes back with the old.")
            say("To replace the token without waiting, enrol it anew; the old one dies when this is used:")
        _show_line(found.enrolment, _address(found.enrolment, url, reached), as_json=as_json)
        return
    if as_json:
        emit(found)
    elif found.rotated:
        print(f"The agent of {render.clean(name)} has a new token; the old one is dead.")
    else:
        say(f"The agent of {render.clean(name)} was asked, but has not answered yet; its old token works until it has.")


def revoke(name: str, *, yes: bool, as_json: bool) -> None:
    question = f"Cut off the agent of {name}? Its jobs go on, but nobody hears of them until it is enrolled anew."
    if not confirm(question, yes=yes or as_json):
        raise Conflict("nothing was changed", hint="-y does it without asking")
    with connect() as client:
        died = client.endpoints.revoke(name)
    if as_json:
        emit({"revoked": died})
        return
    print(f"{render.count(died, 'token')} of {render.clean(name)} revoked. Jobs that run there go on.")
    say(f"  to let an agent speak for it again:  {program()} endpoint enroll {name}")


def remove(name: str, *, force: bool, yes: bool, as_json: bool) -> None:
    if not confirm(f"Remove endpoint {name}?", yes=yes or force or as_json):
        raise Conflict("nothing was changed", hint="-y does it without asking")
    with connect() as client:
        given_up = client.endpoints.remove(name, force=force)
    if as_json:
        emit({"removed": name, "given_up": given_up})
        return
    also = f"; {render.count(given_up, 'live job')} given up" if given_up else ""
    print(f"Endpoint {render.clean(name)} is gone{also}. Its finished tasks keep their record.")
    say("  an agent that still runs there is refused from now on; on its login node:  diamond-agent.pyz stop")
