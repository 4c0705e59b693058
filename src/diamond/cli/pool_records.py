"""`diamond pool record`: what went on in a pool, as a file that `diamond simulate` reads."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path

from diamond.cli import render
from diamond.cli.session import connect, emit, program, say
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.core.states import TaskState


def record(name: str, *, output: Path | None, as_json: bool) -> None:
    with connect() as client:
        found = client.pools.record(name)
    text = json.dumps(encode(found), separators=(",", ":"), allow_nan=False) + "\n"
    if output is None:
        emit(found) if as_json else print(text, end="")
        return
    _write(output, text)
    if as_json:
        emit({"file": str(output), "tasks": len(found.tasks), "nodes": len(found.nodes)})
        return
    say(f"{render.count(len(found.tasks), 'task')} on {render.count(len(found.nodes), 'node')}: {render.clean(output)}")
    if any(task.state == TaskState.SUCCEEDED for task in found.tasks):
        say(f"  replay it:    {program()} simulate {shlex.quote(render.clean(output))}")
    else:
        say("  nothing in it has succeeded: it can be replayed once something has, recorded again")


def _write(output: Path, text: str) -> None:
    """Whole or not at all: beside its place first."""
    beside = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, output)
    except OSError as error:
        raise InvalidInput(f"{output}: {error.strerror}", hint="name another file", field="--output") from error
    finally:
        with suppress(OSError):
            beside.unlink()
