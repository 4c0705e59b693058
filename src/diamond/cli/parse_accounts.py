"""Arguments of the commands about people and their credentials. Parses only; the work is imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
UserName = Annotated[str, typer.Argument(metavar="NAME", help="The user.")]
Scopes = Annotated[
    str | None,
    typer.Option(
        "--scopes", help="What it may be used for, by commas: read, launch, agent, admin. [default: read,launch,agent]"
    ),
]

token_app = typer.Typer(help="What your programs show to be let in.", no_args_is_help=True, rich_markup_mode=None)
session_app = typer.Typer(help="Browsers that are signed in as you.", no_args_is_help=True, rich_markup_mode=None)
user_app = typer.Typer(
    help="People with an account, and what signs you in.", no_args_is_help=True, rich_markup_mode=None
)


def login(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Address of the server; left out: the last one.")
    ] = None,
    scopes: Scopes = None,
    name: Annotated[str | None, typer.Option("--name", help="What the token is called in your list of them.")] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not try to open one here.")] = False,
    ca: Annotated[
        Path | None,
        typer.Option("--ca", metavar="FILE", help="Certificate of the private authority behind the server."),
    ] = None,
    pin: Annotated[str, typer.Option("--pin", help="SHA-256 of that authority, instead of the file.")] = "",
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Use the token on standard input, and ask nobody.")
    ] = False,
    json: Json = False,
) -> None:
    """Sign in to a server from this terminal.

    Shows an address and a code to enter there, in a browser on any machine, and waits until that was approved.
    """
    from diamond.cli import login as act

    act.login(
        url,
        scopes=scopes,
        name=name,
        browser=not no_browser,
        ca_file=ca,
        pin=pin,
        token_stdin=token_stdin,
        as_json=json,
    )


def logout(json: Json = False) -> None:
    """Sign out: revoke the token of `login` and forget it."""
    from diamond.cli import login as act

    act.logout(as_json=json)


def whoami(json: Json = False) -> None:
    """Say who you are to the server."""
    from diamond.cli import login as act

    act.whoami(as_json=json)


@token_app.command("create")
def token_create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for.")],
    scopes: Scopes = None,
    expires: Annotated[str, typer.Option("--expires", help="How long it works: 30d, 12h, …, or never.")] = "90d",
    json: Json = False,
) -> None:
    """Make a token. Its value is shown once."""
    from diamond.cli import tokens as act

    act.create(name, scopes=scopes, expires=expires, as_json=json)


@token_app.command("ls")
def token_ls(json: Json = False) -> None:
    """List your tokens (also: token list)."""
    from diamond.cli import tokens as act

    act.ls(as_json=json)


token_app.command("list", hidden=True)(token_ls)


@token_app.command("revoke")
def token_revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="As `token ls` shows it.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Make a token useless at once."""
    from diamond.cli import tokens as act

    act.revoke(token, yes=yes, as_json=json)


@session_app.command("ls")
def session_ls(json: Json = False) -> None:
    """List them (also: session list)."""
    from diamond.cli import tokens as act

    act.sessions(as_json=json)


session_app.command("list", hidden=True)(session_ls)


@session_app.command("end")
def session_end(
    session: Annotated[str, typer.Argument(metavar="ID", help="As `session ls` shows it.")], json: Json = False
) -> None:
    """Sign a browser out."""
    from diamond.cli import tokens as act

    act.end_session(session, as_json=json)


@user_app.command("ls")
def user_ls(json: Json = False) -> None:
    """List users (also: user list)."""
    from diamond.cli import users as act

    act.ls(as_json=json)


user_app.command("list", hidden=True)(user_ls)


@user_app.command("show")
def user_show(name: UserName, json: Json = False) -> None:
    """Show an account and what signs it in."""
    from diamond.cli import users as act

    act.show(name, as_json=json)


@user_app.command("identities")
def user_identities(json: Json = False) -> None:
    """List what signs you in besides a password."""
    from diamond.cli import users as act

    act.identities(as_json=json)


@user_app.command("unlink")
def user_unlink(
    identity: Annotated[str, typer.Argument(metavar="ID", help="As `user identities` shows it.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Keep an identity from signing you in."""
    from diamond.cli import users as act

    act.unlink(identity, yes=yes, as_json=json)


@user_app.command("invite")
def user_invite(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="What they could be called; they choose.")
    ] = None,
    email: Annotated[str, typer.Option("--email", help="Their address; nothing is sent to it.")] = "",
    project: Annotated[str, typer.Option("--project", help="They join this project.")] = "",
    role: Annotated[str, typer.Option("--role", help="Their role there: owner, member or viewer.")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="As an administrator of the installation.")] = False,
    json: Json = False,
) -> None:
    """Get an address where somebody makes their account.

    For administrators; owners of a project may where the operator lets them.
    """
    from diamond.cli import users as act

    act.invite(name, email=email, project=project, role=role, is_admin=admin, as_json=json)


@user_app.command("invitations")
def user_invitations(json: Json = False) -> None:
    """List open invitations."""
    from diamond.cli import users as act

    act.invitations(as_json=json)


@user_app.command("withdraw")
def user_withdraw(
    invitation: Annotated[str, typer.Argument(metavar="ID", help="As `user invitations` shows it.")], json: Json = False
) -> None:
    """Make an invitation useless."""
    from diamond.cli import users as act

    act.withdraw(invitation, as_json=json)


@user_app.command("disable")
def user_disable(name: UserName, yes: Yes = False, json: Json = False) -> None:
    """Close an account: sessions, tokens and tasks end."""
    from diamond.cli import users as act

    act.disable(name, yes=yes, as_json=json)


@user_app.command("enable")
def user_enable(name: UserName, json: Json = False) -> None:
    """Open a closed account again."""
    from diamond.cli import users as act

    act.enable(name, as_json=json)


@user_app.command("reset")
def user_reset(
    name: UserName,
    revoke_tokens: Annotated[
        bool, typer.Option("--revoke-tokens", help="Their tokens die too, when it is used.")
    ] = False,
    json: Json = False,
) -> None:
    """Get an address where a user sets a new password."""
    from diamond.cli import users as act

    act.reset(name, revoke_tokens=revoke_tokens, as_json=json)


@user_app.command("admin")
def user_admin(
    name: UserName,
    off: Annotated[bool, typer.Option("--off", help="Make them an ordinary user again.")] = False,
    json: Json = False,
) -> None:
    """Make somebody an administrator."""
    from diamond.cli import users as act

    act.admin(name, is_admin=not off, as_json=json)


def register(app: typer.Typer) -> None:
    for command in (login, logout, whoami):
        app.command()(command)
    app.add_typer(token_app, name="token")
    app.add_typer(session_app, name="session")
    app.add_typer(user_app, name="user")
