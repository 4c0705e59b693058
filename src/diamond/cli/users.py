"""Commands about people's accounts: for administrators; owners of projects invite, everybody has identities."""

from __future__ import annotations

import time

from diamond.cli import render
from diamond.cli.session import confirm, connect, emit, program, say
from diamond.core.accounts import User
from diamond.core.errors import Conflict


def ls(*, as_json: bool) -> None:
    with connect() as client:
        found = client.accounts.users()
    if as_json:
        emit({"users": found})
        return
    now = time.time()
    rows = [
        (
            render.clean(user.name),
            _standing(user),
            render.clean(user.full_name),
            render.clean(user.email),
            ", ".join(_ways_in(user)) or "none",
            render.ago(user.seen_at, now),
        )
        for user in found
    ]
    heads = ("NAME", "STATE", "FULL NAME", "E-MAIL", "SIGNS IN BY", "SEEN")
    flexible = {"FULL NAME": 12, "E-MAIL": 12}
    render.print_table(heads, rows, flexible=flexible, droppable=("E-MAIL", "FULL NAME", "SIGNS IN BY"))


def _standing(user: User) -> str:
    return "closed" if user.disabled_at else "admin" if user.is_admin else "user"


def _ways_in(user: User) -> list[str]:
    known = ["password"] if user.has_password else []
    return known + sorted({render.clean(one.provider) for one in user.identities})


def show(name: str, *, as_json: bool) -> None:
    with connect() as client:
        user = client.accounts.user(name)
    if as_json:
        emit(user)
        return
    rows = [
        ("user", f"{user.name} ({user.id})"),
        ("state", _standing(user) + (f" since {render.clock(user.disabled_at)}" if user.disabled_at else "")),
        ("full name", user.full_name),
        ("e-mail", user.email),
        ("password", "yes" if user.has_password else "none"),
        *(("identity", f"{one.provider}: {one.label}") for one in user.identities),
        ("made", render.clock(user.created_at)),
        ("seen", render.ago(user.seen_at)),
    ]
    for head, text in rows:
        if text:
            print(f"{head:<10} {render.clean(text)}")


def identities(*, as_json: bool) -> None:
    with connect() as client:
        me = client.accounts.me()
        url = client.url
    if as_json:
        emit({"identities": me.identities})
        return
    if not me.identities:
        say(f"No identity of a provider signs you in. Link one in a browser: {render.clean(url)}/settings")
        return
    now = time.time()
    rows = [
        (one.id, render.clean(one.provider), render.clean(one.label), render.ago(one.created_at, now),
         render.ago(one.used_at, now) if one.used_at else "never")
        for one in me.identities
    ]  # fmt: skip
    render.print_table(
        ("ID", "PROVIDER", "WHO THERE", "LINKED", "USED"), rows, flexible={"WHO THERE": 12}, droppable=("LINKED",)
    )


def unlink(identity_id: str, *, yes: bool, as_json: bool) -> None:
    with connect() as client:
        if not confirm("Unlink it? It signs you in no more, and your browsers are signed out.", yes=yes or as_json):
            raise Conflict("nothing was changed", hint="-y does it without asking")
        client.accounts.unlink(identity_id)
    if as_json:
        emit({"unlinked": identity_id})
    else:
        print("That identity no longer signs you in.")


def invite(name: str | None, *, email: str, project: str, role: str, is_admin: bool, as_json: bool) -> None:
    with connect() as client:
        made = client.accounts.invite(name=name or "", email=email, project=project, role=role, is_admin=is_admin)
    if as_json:
        emit(made)
        return
    what = "as an administrator" if made.is_admin else f"into {made.project}" if made.project else ""
    say(f"An invitation {what + ', ' if what else ''}valid until {render.clock(made.expires_at)}. Give this address to "
        "that person alone; it is shown this once:")  # fmt: skip
    print(render.clean(made.url), flush=True)
    say(f"  withdraw it:  {program()} user withdraw {made.id}")


def invitations(*, as_json: bool) -> None:
    with connect() as client:
        found = client.accounts.invitations()
    if as_json:
        emit({"invitations": found})
        return
    if not found:
        say(f"No open invitations. {program()} user invite makes one.")
        return
    now = time.time()
    rows = [
        (
            one.id,
            render.clean(one.name or one.email),
            "admin" if one.is_admin else render.clean(f"{one.project} ({one.role})" if one.project else ""),
            render.clean(one.invited_by),
            f"in {render.format_duration(max(0.0, one.expires_at - now)).split()[0]}",
        )
        for one in found
    ]
    heads = ("ID", "FOR", "INTO", "BY", "EXPIRES")
    render.print_table(heads, rows, flexible={"FOR": 12, "INTO": 12}, droppable=("BY",))


def withdraw(invitation_id: str, *, as_json: bool) -> None:
    with connect() as client:
        client.accounts.withdraw(invitation_id)
    if as_json:
        emit({"withdrawn": invitation_id})
    else:
        print("The invitation is withdrawn.")


def disable(name: str, *, yes: bool, as_json: bool) -> None:
    question = f"Close the account of {name}? They are signed out everywhere, and their live tasks are stopped."
    if not confirm(question, yes=yes or as_json):
        raise Conflict("nothing was changed", hint="-y does it without asking")
    with connect() as client:
        closed = client.accounts.disable(name)
    if as_json:
        emit(closed)
        return
    also = f" {render.count(closed.stopped, 'task')} stopped." if closed.stopped else ""
    print(f"The account of {render.clean(name)} is closed.{also}")
    say(f"  what they own stays; to open it again:  {program()} user enable {name}")


def enable(name: str, *, as_json: bool) -> None:
    with connect() as client:
        user = client.accounts.enable(name)
    if as_json:
        emit(user)
    else:
        print(f"The account of {render.clean(user.name)} is open. Sessions and tokens it had stay dead.")


def reset(name: str, *, revoke_tokens: bool, as_json: bool) -> None:
    with connect() as client:
        made = client.accounts.reset(name, revoke_tokens=revoke_tokens)
    if as_json:
        emit(made)
        return
    say(f"With this address {render.clean(made.user)} sets a new password, once, until "
        f"{render.clock(made.expires_at)}. Give it to them alone; it is shown this once:")  # fmt: skip
    print(render.clean(made.url), flush=True)


def admin(name: str, *, is_admin: bool, as_json: bool) -> None:
    with connect() as client:
        user = client.accounts.set_admin(name, is_admin)
    if as_json:
        emit(user)
    else:
        print(f"{render.clean(user.name)} is {'an administrator' if user.is_admin else 'an ordinary user'} now.")
