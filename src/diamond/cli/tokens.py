"""Commands about one's own credentials: token create, ls and revoke; session ls and end."""

from __future__ import annotations

import time

from diamond.cli import render
from diamond.cli.session import confirm, connect, emit, program, say
from diamond.core.accounts import Token, parse_scopes
from diamond.core.durations import parse_duration
from diamond.core.errors import Conflict, InvalidInput
from diamond.core.logins import DEFAULT_SCOPES

DEFAULT_LIFETIME = "90d"
NEVER = "never"


def create(name: str, *, scopes: str | None, expires: str, as_json: bool) -> None:
    wanted = parse_scopes(scopes, "--scopes") if scopes is not None else DEFAULT_SCOPES
    lifetime_s = lifetime(expires)
    with connect() as client:
        made = client.tokens.create(name, scopes=wanted, expires_in_s=lifetime_s)
    if as_json:
        emit(made)
        return
    until = f"until {render.clock(made.expires_at)}" if made.expires_at else "until it is revoked"
    say(f"Token {render.clean(made.name)} ({made.id}) for {', '.join(made.scopes)}, {until}.")
    say("It is shown this once; whoever has it acts for you:")
    print(render.clean(made.value), flush=True)
    say(f"  use it:  set DIAMOND_TOKEN, or {program()} login URL --token-stdin")
    say(f"  end it:  {program()} token revoke {made.id}")


def lifetime(text: str) -> float | None:
    """Seconds; None for `never`."""
    if text.strip().lower() == NEVER:
        return None
    try:
        return float(parse_duration(text))
    except ValueError as error:
        raise InvalidInput(f"{error}", hint="e.g. 30d, 12h, or never", field="--expires") from error


def ls(*, as_json: bool) -> None:
    with connect() as client:
        found = client.tokens.list()
    if as_json:
        emit({"tokens": found})
        return
    if not found:
        say(f"No tokens. {program()} token create NAME makes one.")
        return
    now = time.time()
    rows = [
        (
            token.id,
            render.clean(token.name or "(made by the server)") + (" *" if token.current else ""),
            ",".join(token.scopes),
            _expiry(token, now),
            render.ago(token.used_at, now),
            render.clean(token.used_from if token.used_at else ""),
            render.ago(token.created_at, now),
        )
        for token in found
    ]
    heads = ("ID", "NAME", "SCOPES", "EXPIRES", "USED", "FROM", "MADE")
    render.print_table(heads, rows, flexible={"NAME": 12}, droppable=("MADE", "FROM", "SCOPES"))
    if any(token.current for token in found):
        say("* the one this command uses")


def _expiry(token: Token, now: float) -> str:
    if token.expires_at is None:
        return "never"
    left_s = token.expires_at - now
    return "expired" if left_s <= 0 else f"in {render.format_duration(left_s).split()[0]}"


def revoke(token_id: str, *, yes: bool, as_json: bool) -> None:
    question = f"Revoke the token {token_id}? Programs that use it are cut off at once."
    if not confirm(question, yes=yes or as_json):
        raise Conflict("nothing was changed", hint="-y does it without asking")
    with connect() as client:
        gone = client.tokens.revoke(token_id)
    if as_json:
        emit(gone)
    else:
        print(f"Token {render.clean(gone.name or gone.id)} is revoked.")


def sessions(*, as_json: bool) -> None:
    with connect() as client:
        found = client.accounts.sessions()
    if as_json:
        emit({"sessions": found})
        return
    if not found:
        say("No browser is signed in as you.")
        return
    now = time.time()
    rows = [
        (
            one.id,
            render.clean(one.method),
            render.clean(one.address),
            render.ago(one.used_at, now),
            render.ago(one.created_at, now),
            render.clean(one.browser),
        )
        for one in found
    ]
    heads = ("ID", "BY", "FROM", "USED", "BEGAN", "BROWSER")
    render.print_table(heads, rows, flexible={"BROWSER": 12}, droppable=("BROWSER", "BEGAN", "BY"))


def end_session(session_id: str, *, as_json: bool) -> None:
    with connect() as client:
        client.accounts.end_session(session_id)
    if as_json:
        emit({"ended": session_id})
    else:
        print("That browser is signed out.")
