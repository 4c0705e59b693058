"""Commands about secrets: set, ls, rm. A value is typed without echo, piped in or read from a file; never an argument,
which every user of a machine can read in its process list."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from diamond.cli import render
from diamond.cli.session import confirm, connect, emit, leave, say
from diamond.core.errors import InvalidInput
from diamond.core.secrets import MAX_VALUE_BYTES, MIN_MASKED_BYTES, check_secret_name, check_value, is_maskable


def set_secret(name: str, *, project: str | None, file: Path | None, as_json: bool) -> None:
    check_secret_name(name, "NAME")
    value = check_value(_value(name, file), "--file" if file else "value")
    with connect() as client:
        found = client.secrets.set(name, value, project=project)
    if as_json:
        emit(found)
    else:
        whose = f" of project {render.clean(found.project)}" if found.project else ""
        print(f"set {render.clean(found.name)}{whose}; tasks use it with  secrets: [{render.clean(found.name)}]")
    if not is_maskable(value):
        say(f"  It has less than {MIN_MASKED_BYTES} bytes: too short to be hidden in logs.")


def _value(name: str, file: Path | None) -> str:
    if file is not None:
        try:
            with file.expanduser().open("rb") as source:
                raw = source.read(MAX_VALUE_BYTES + 1)
        except OSError as error:
            raise InvalidInput(f"{file}: {error.strerror}", field="--file") from error
        return _text(raw, "--file")
    if sys.stdin.isatty():
        return str(typer.prompt(f"Value of {name} (not shown)", hide_input=True, err=True))
    # `echo value | diamond secret set NAME`: the end of the line belongs to echo. A file is taken byte for byte.
    return _text(sys.stdin.buffer.read(MAX_VALUE_BYTES + 2), "value").removesuffix("\n").removesuffix("\r")


def _text(raw: bytes, field: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidInput("is not text in UTF-8", hint="encode it first, e.g. with base64", field=field) from None


def ls(*, as_json: bool) -> None:
    with connect() as client:
        found = client.secrets.list()
    if as_json:
        emit({"secrets": found})
        return
    if not found:
        say("No secrets. `diamond secret set NAME` keeps one, encrypted, for tasks to use by name.")
        return
    rows = [
        (
            render.clean(secret.name),
            render.clean(secret.project or "(your own)"),
            render.ago(secret.updated_at),
            render.ago(secret.used_at) if secret.used_at else "never",
            render.clean(secret.created_by),
        )
        for secret in found
    ]
    render.print_table(
        ("NAME", "OF", "SET", "USED", "BY"), rows, flexible={"NAME": 12, "OF": 10}, droppable=("BY", "USED")
    )


def remove(name: str, *, project: str | None, yes: bool, as_json: bool) -> None:
    question = f"Remove the secret {name}? Tasks that name it and have not begun will fail."
    if not as_json and not confirm(question, yes=yes):
        say("Nothing was removed; -y removes without asking.")
        leave(1)
    with connect() as client:
        client.secrets.remove(name, project=project)
    if as_json:
        emit({"removed": name, "project": project})
    else:
        print(f"removed {render.clean(name)}")
