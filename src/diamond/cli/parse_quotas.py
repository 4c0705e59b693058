"""Arguments of `diamond quota`. Parses only; the work is imported late."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Kind = Annotated[str, typer.Argument(metavar="KIND", help="user, project, every-user or every-project.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of the user or project; none for every-….")]

quota_app = typer.Typer(
    help="How much you and your projects may have, and how much you have.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@quota_app.callback()
def quota(ctx: typer.Context, json: Json = False) -> None:
    """How much you and your projects may have, and how much you have.

    Without a command: how you stand.
    """
    if ctx.invoked_subcommand is None:
        from diamond.cli import quotas as act

        act.mine(as_json=json)


@quota_app.command("ls")
def quota_ls(json: Json = False) -> None:
    """List every limit that was set (administrators)."""
    from diamond.cli import quotas as act

    act.ls(as_json=json)


@quota_app.command("show")
def quota_show(kind: Kind, name: Name = None, json: Json = False) -> None:
    """Show how a user or project stands (administrators)."""
    from diamond.cli import quotas as act

    act.show(kind, name, as_json=json)


@quota_app.command("set")
def quota_set(
    kind: Kind,
    name: Name = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Unfinished at once; `none` for no limit.")] = None,
    nodes: Annotated[str | None, typer.Option("--nodes", help="Held at once.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="Held at once.")] = None,
    gpu_hours: Annotated[str | None, typer.Option("--gpu-hours", help="Of a calendar month.")] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="Of images, uploads and outputs: 500GiB.")] = None,
    json: Json = False,
) -> None:
    """Set limits (administrators).

    Of a user or project, or, as the default, of all users or projects that have none of their own.

    What no option names stays as it is. What runs goes on, even if it is more than what is allowed from now on.
    """
    from diamond.cli import quotas as act

    changes = {"tasks": tasks, "nodes": nodes, "gpus": gpus, "gpu_hours": gpu_hours, "storage_bytes": storage}
    act.change(kind, name, changes, as_json=json)


@quota_app.command("clear")
def quota_clear(kind: Kind, name: Name = None, json: Json = False) -> None:
    """Go back to the default (administrators)."""
    from diamond.cli import quotas as act

    act.clear(kind, name, as_json=json)


def register(app: typer.Typer) -> None:
    app.add_typer(quota_app, name="quota")
