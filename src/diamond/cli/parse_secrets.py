"""Arguments of the commands about secrets. Parses only; the work is imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="What tasks call it: letters, digits, - and _.")]
Project = Annotated[str | None, typer.Option("--project", help="Of this project, instead of your own.")]

secret_app = typer.Typer(
    help="Values that tasks use by name, kept encrypted.", no_args_is_help=True, rich_markup_mode=None
)


@secret_app.command("set")
def secret_set(
    name: Name,
    project: Project = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Take the value from this file, byte for byte.", metavar="FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Keep a value: asked for without echo, or from standard input."""
    from diamond.cli import secrets as act

    act.set_secret(name, project=project, file=file, as_json=json)


@secret_app.command("ls")
def secret_ls(json: Json = False) -> None:
    """List secrets, without their values (also: secret list)."""
    from diamond.cli import secrets as act

    act.ls(as_json=json)


secret_app.command("list", hidden=True)(secret_ls)


@secret_app.command("rm")
def secret_rm(
    name: Name,
    project: Project = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove a secret. Jobs that run keep what they have."""
    from diamond.cli import secrets as act

    act.remove(name, project=project, yes=yes, as_json=json)


@secret_app.command("rotate-key")
def secret_rotate_key(
    prune: Annotated[bool, typer.Option("--prune", help="Instead drop old keys that nothing needs any more.")] = False,
    database_url: Annotated[
        str | None, typer.Option("--database-url", help="As it was given to the server; left out: as its own.")
    ] = None,
    json: Json = False,
) -> None:
    """Encrypt all secrets with a new key. On the server's machine.

    The server may run meanwhile. The key before stays until the next change, or until --prune.
    """
    from diamond.cli import serve as act

    act.rotate_key(prune=prune, database_url=database_url, as_json=json)


def register(app: typer.Typer) -> None:
    app.add_typer(secret_app, name="secret")
