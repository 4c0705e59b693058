"""Arguments of the commands about templates. Parses only; the work is imported late."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Its id, or the name of one of yours.")]

template_app = typer.Typer(
    help="Tasks to begin with, ours and saved ones.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@template_app.command("ls")
def template_ls(
    search: Annotated[str, typer.Option("--search", help="Only those with this in name or description.")] = "",
    json: Json = False,
) -> None:
    """List templates (also: template list)."""
    from diamond.cli import templates as act

    act.ls(search=search, as_json=json)


template_app.command("list", hidden=True)(template_ls)


@template_app.command("show")
def template_show(name: Name, json: Json = False) -> None:
    """Print one as a task file:  diamond template show NAME > task.yaml"""
    from diamond.cli import templates as act

    act.show(name, as_json=json)


@template_app.command("save")
def template_save(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A task file; its files are uploaded.")],
    name: Annotated[str, typer.Option("--name", help="What to call it.")],
    description: Annotated[str, typer.Option("--description", help="What it does, and what it needs.")] = "",
    visibility: Annotated[
        str | None, typer.Option("--visibility", help="private (the default), project or public.")
    ] = None,
    project: Annotated[str | None, typer.Option("--project", help="Whose members are meant.")] = None,
    json: Json = False,
) -> None:
    """Keep a task file as a template."""
    from diamond.cli import templates as act

    act.save(file, name=name, description=description, visibility=visibility, project=project, as_json=json)


@template_app.command("rm")
def template_rm(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove a template. Tasks that were begun with it stay."""
    from diamond.cli import templates as act

    act.remove(name, yes=yes, as_json=json)


def register(app: typer.Typer) -> None:
    app.add_typer(template_app, name="template")
