"""Commands about templates: ls, show, save, rm."""

from __future__ import annotations

import sys

from diamond.cli import render
from diamond.cli.session import confirm, connect, emit, leave, program, say


def ls(*, search: str, as_json: bool) -> None:
    with connect() as client:
        found = client.templates.list(search=search)
    if as_json:
        emit({"templates": found})
        return
    if not found:
        say("No template has that in its name or description." if search else "No templates.")
        return
    rows = [
        (
            render.clean(each.id),
            render.clean(each.name),
            "Diamond" if each.builtin else render.clean(each.owner),
            "everybody" if each.visibility == "public" else render.clean(each.project or str(each.visibility)),
            render.clean(each.description.split("\n")[0]),
        )
        for each in found
    ]
    render.print_table(
        ("ID", "NAME", "OF", "FOR", "DESCRIPTION"),
        rows,
        flexible={"DESCRIPTION": 20, "NAME": 16},
        droppable=("DESCRIPTION", "FOR"),
    )


def show(name: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.templates.get(name)
    if as_json:
        emit(found)
        return
    text = found.text if not sys.stdout.isatty() else render.clean_block(found.text)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    if sys.stdout.isatty():
        say(f"  {program()} template show {render.clean(name)} > task.yaml && {program()} launch task.yaml")


def save(file: str, *, name: str, description: str, visibility: str | None, project: str | None, as_json: bool) -> None:
    from diamond.sdk import taskfile

    spec = taskfile.load(file).spec()
    with connect() as client:
        made = client.templates.save(name, spec, description=description, visibility=visibility, project=project)
    if as_json:
        emit(made)
    else:
        print(f"saved {render.clean(made.name)} as {made.id}")


def remove(name: str, *, yes: bool, as_json: bool) -> None:
    if not as_json and not confirm(f"Remove the template {name}?", yes=yes):
        say("Nothing was removed; -y removes without asking.")
        leave(1)
    with connect() as client:
        client.templates.remove(name)
    if as_json:
        emit({"removed": name})
    else:
        print(f"removed {render.clean(name)}")
