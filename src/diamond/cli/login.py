"""Commands by which a terminal comes to act for somebody, and stops: login, logout, whoami."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from diamond.cli import render
from diamond.cli.session import confirm, connect, emit, program, say
from diamond.cli.startup import skip_httpx_cli
from diamond.core.accounts import parse_scopes
from diamond.core.errors import (
    Conflict,
    DiamondError,
    InstallationProblem,
    InvalidInput,
    NotFound,
    ServerUnreachable,
    Unauthenticated,
)
from diamond.core.home import ClientConfig, Home
from diamond.core.logins import DEFAULT_SCOPES
from diamond.core.rundir import write_atomic
from diamond.core.tls import check_pin, client_context, is_unknown_authority, parse_pin

if TYPE_CHECKING:
    from diamond.core.accounts import Scope
    from diamond.sdk.client import Client
    from diamond.sdk.logins import PendingLogin

_MAX_TOKEN = 512


def login(
    url: str | None,
    *,
    scopes: str | None,
    name: str | None,
    browser: bool,
    ca_file: Path | None,
    pin: str,
    token_stdin: bool,
    as_json: bool,
) -> None:
    home = Home.find()
    saved = ClientConfig.load(home)
    wanted = parse_scopes(scopes, "--scopes") if scopes is not None else DEFAULT_SCOPES
    server = _address(url or (saved.url if saved else ""))
    given = _token_from_stdin() if token_stdin else ""
    _check_writable(home)
    skip_httpx_cli()
    ca = _authority(server, saved, home, ca_file=ca_file, pin=pin, ask=not (as_json or token_stdin))
    if server.startswith("http://") and not _is_loopback(server):
        say(f"{render.paint('warning:', '33;1', sys.stderr)} over plain HTTP whoever listens in can take your token")
    if _needs_none(saved, server, ca):
        raise Conflict(
            f"there is nothing to sign in to: {server} is for one user, whose token is here already",
            hint=f"see: {program()} whoami",
        )
    if given:
        config = ClientConfig(url=server, token=given, ca=ca, user=_user_of(server, given, ca))
    else:
        config = _by_code(server, ca, wanted, name or f"diamond login on {platform.node() or 'a computer'}",
                          browser=browser, as_json=as_json)  # fmt: skip
    config.save(home)
    _after(home, saved, config, as_json=as_json)


def _needs_none(saved: ClientConfig | None, server: str, ca: str) -> bool:
    """Whether this is the home of a server for one user. A lesser token would only be in the way."""
    if saved is None or saved.user or not saved.token or saved.url != server:
        return False
    with _reach(server, saved.token, ca) as client, suppress(Unauthenticated, NotFound):
        return not client.accounts.sign_in_methods().multi_user and bool(client.accounts.me())
    return False


def _by_code(
    server: str, ca: str, scopes: tuple[Scope, ...], name: str, *, browser: bool, as_json: bool
) -> ClientConfig:
    with _reach(server, "", ca) as client:
        _check_set_up(client)
        pending = client.logins.begin(name, scopes=scopes)
        try:
            _show_code(client.logins.url_of(pending), pending, scopes, browser=browser, as_json=as_json)
            with _waiting(as_json) as tell:
                answer = client.logins.wait(pending, tell=tell)
        except KeyboardInterrupt:
            # Nobody shall approve by mistake what nobody waits for.
            with suppress(DiamondError, KeyboardInterrupt):
                client.logins.poll(pending, cancel=True)
            raise
    return ClientConfig(url=server, token=pending.token, ca=ca, user=answer.user)


def _show_code(url: str, pending: PendingLogin, scopes: tuple[Scope, ...], *, browser: bool, as_json: bool) -> None:
    url, code = render.clean(url), render.clean(pending.user_code)
    valid_s = pending.started.expires_in_s
    if as_json:
        said = {"verification_url": url, "user_code": code, "expires_in_s": valid_s, "scopes": scopes}
        emit({"type": "code", **said}, line=True)
        return
    say(f"Open this page in a browser, on any machine:  {render.paint(url, '1', sys.stderr)}")
    say(f"and enter this code:  {render.paint(code, '1', sys.stderr)}")
    say(f"  It asks for: {', '.join(scopes)}. The code works for {render.format_duration(valid_s).split()[0]}.")
    if browser and _has_browser():
        import webbrowser

        with suppress(webbrowser.Error, OSError):
            webbrowser.open(url)


def _has_browser() -> bool:
    """Whether a browser would open in front of the person: not on a node reached by ssh, nor inside the terminal."""
    here = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return here and sys.stdin.isatty() and not os.environ.get("SSH_CONNECTION")


@contextmanager
def _waiting(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Shows that something is waited for, and what is amiss with it."""
    if as_json or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        told = ""

        def tell(trouble: str) -> None:
            nonlocal told
            if trouble != told and not as_json:
                say(f"{render.clean(trouble)}; trying again …" if trouble else "the server answers again")
            told = trouble

        if not as_json:
            say("Waiting until it is approved …")
        yield tell
        return
    from rich.console import Console
    from rich.text import Text

    waiting = "Waiting until it is approved; Ctrl-C cancels"
    with Console(stderr=True, no_color=not render.use_colour(sys.stderr) or None).status(Text(waiting)) as status:
        yield lambda trouble: status.update(Text(f"{render.clean(trouble)}; trying again" if trouble else waiting))


def _check_set_up(client: Client) -> None:
    try:
        methods = client.accounts.sign_in_methods()
    except NotFound as error:
        raise InvalidInput(
            f"{client.url} has no accounts to sign in to", hint="is it a Diamond server of this version?", field="URL"
        ) from error
    if methods.setup_needed:
        raise Conflict(
            f"nobody can sign in at {client.url} yet: it has no administrator",
            hint=f"its operator opens {client.url}/setup with the code that the server printed when it started",
        )


def _token_from_stdin() -> str:
    token = sys.stdin.readline(_MAX_TOKEN + 2).strip()
    if not token or len(token) > _MAX_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput(
            "standard input holds no token", hint="e.g.  diamond login URL --token-stdin < file", field="--token-stdin"
        )
    return token


def _user_of(server: str, token: str, ca: str) -> str:
    with _reach(server, token, ca) as client:
        return client.accounts.me().name


def _after(home: Home, before: ClientConfig | None, now: ClientConfig, *, as_json: bool) -> None:
    """What is said, and what becomes of the token that was there before."""
    if before and before.user and before.url == now.url and before.token not in ("", now.token):
        with suppress(DiamondError), _reach(before.url, before.token, before.ca) as client:
            client.tokens.revoke_current()
    hidden = [key for key in ("DIAMOND_URL", "DIAMOND_TOKEN") if os.environ.get(key)]
    if as_json:
        emit({"type": "signed_in", "user": now.user, "url": now.url, "file": str(home.client_file)}, line=True)
    else:
        print(f"Signed in at {render.clean(now.url)} as {render.clean(now.user)}.")
        say(f"  kept in {home.client_file}; {program()} logout ends it")
        if before and before.url and before.url != now.url:
            say(f"  commands here no longer speak to {render.clean(before.url)}")
    if hidden:
        say(f"{render.paint('warning:', '33;1', sys.stderr)} {' and '.join(hidden)} will be used instead: unset it")


def _address(text: str) -> str:
    """The server's address as it was meant; HTTPS unless it is this machine."""
    if not text:
        raise InvalidInput("which server?", hint="name it once: diamond login https://diamond.example.org", field="URL")
    if "://" not in text:
        text = f"https://{text}"
        text = text.replace("https", "http", 1) if _is_loopback(text) else text
    parts = urlsplit(text)
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    # A password in it would stand in histories and process lists; urlsplit itself drops line breaks.
    if not is_good or "@" in parts.netloc or not text.isprintable() or " " in text or parts.query or parts.fragment:
        raise InvalidInput(
            f"{text[:80]!r} is not the address of a server", hint="write e.g. https://diamond.example.org", field="URL"
        )
    return text.rstrip("/")


def _is_loopback(url: str) -> bool:
    from diamond.sdk.transport import is_loopback

    return is_loopback(url)


def _check_writable(home: Home) -> None:
    """Before somebody approves what could then not be kept."""
    try:
        home.make()
        writable = os.access(home.path, os.W_OK | os.X_OK)
        reason = "it cannot be written"
    except OSError as error:
        writable, reason = False, error.strerror or str(error)
    if not writable:
        raise InstallationProblem(
            f"the token cannot be kept in {home.path}: {reason}", hint="set DIAMOND_HOME to a folder of yours"
        )


@contextmanager
def _reach(server: str, token: str, ca: str) -> Iterator[Client]:
    from diamond.sdk.client import Client

    with Client(url=server, token=token, ca_file=ca, retries=1) as client:
        yield client


def _authority(
    server: str, saved: ClientConfig | None, home: Home, *, ca_file: Path | None, pin: str, ask: bool
) -> str:
    """The file with the one authority to trust for this server; empty: the system's will do."""
    if not server.startswith("https://"):
        if ca_file or pin:
            raise InvalidInput("is for https:// addresses", field="--ca" if ca_file else "--pin")
        return ""
    if ca_file is not None:
        client_context(ca_file)  # raises when it holds no certificate
        return _keep_authority(server, home, ca_file.read_text())
    if not pin:
        known = os.environ.get("DIAMOND_CA", "") or (saved.ca if saved and saved.url == server else "")
        # Whoever runs the server here has its authority before their eyes: nobody needs to tell them its pin.
        for ca in dict.fromkeys((known, known or home.own_authority())):
            try:
                with _reach(server, "", ca) as client:
                    client.health(retries=0)
                return ca
            except ServerUnreachable as error:
                if not is_unknown_authority(error):
                    raise
                unknown = error
    from diamond.sdk.authorities import fetch_authority

    if pin:
        parse_pin(pin)
    pem, found = fetch_authority(server)
    if pin:
        check_pin(pem, pin)
    else:
        host = urlsplit(server).hostname
        say(f"The certificate of {host} was not signed by an authority trusted here. It names its own:")
        say(f"  {found}")
        say("Compare that with what the server's operator says; somebody in between would show another.")
        if not ask or not confirm("Is it the same?", yes=False):
            raise ServerUnreachable(
                unknown.message,
                hint=f"once its operator has told you the pin: {program()} login {server} --pin sha256:…   "
                "or with the authority's certificate: --ca FILE",
            )
    return _keep_authority(server, home, pem)


def _keep_authority(server: str, home: Home, pem: str) -> str:
    parts = urlsplit(server)
    path = home.authority_file(parts.hostname or "", parts.port or 443)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(path, pem.encode())
    return str(path)


def logout(*, as_json: bool) -> None:
    home = Home.find()
    if os.environ.get("DIAMOND_TOKEN"):
        raise Conflict(
            "DIAMOND_TOKEN is set, so there is nothing to sign out of",
            hint="unset it; `diamond token revoke` makes a token useless",
        )
    saved = ClientConfig.load(home)
    if saved is None or not saved.user or not saved.token:
        raise Conflict(
            "you are not signed in here" if saved is None or not saved.token else
            "the token here was made by the server on this machine, not by `diamond login`",
            hint=f"{program()} login URL signs you in",
        )  # fmt: skip
    revoked, why = True, ""
    skip_httpx_cli()
    try:
        with _reach(saved.url, saved.token, saved.ca) as client:
            client.tokens.revoke_current()
    except Unauthenticated:
        pass  # dead already
    except DiamondError as error:
        revoked, why = False, error.message
    # The address and whom to trust stay, so that `diamond login` alone is enough next time.
    replace(saved, token="", user="").save(home)
    if as_json:
        emit({"url": saved.url, "user": saved.user, "revoked": revoked, "why": why})
        return
    print(f"Signed out of {render.clean(saved.url)}.")
    if not revoked:
        say(f"{render.paint('warning:', '33;1', sys.stderr)} the token could not be revoked ({render.clean(why)}); it "
            "is gone from here, and works for whoever has a copy until it expires")  # fmt: skip


def whoami(*, as_json: bool) -> None:
    with connect() as client:
        me = client.accounts.me()
        token = next((one for one in client.tokens.list() if one.current), None)
        url = client.url
    if as_json:
        emit({"user": me, "url": url, "token": token})
        return
    print(render.clean(me.name))
    known = ", ".join(part for part in (me.full_name, me.email) if part)
    say(f"  at {render.clean(url)}{f' ({render.clean(known)})' if known else ''}")
    if me.is_admin:
        say("  administrator of this installation")
    if token is not None:
        until = f"until {render.clock(token.expires_at)}" if token.expires_at else "until it is revoked"
        say(f"  with the token {render.clean(token.name or token.id)} for {', '.join(token.scopes)}, {until}")
