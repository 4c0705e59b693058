"""`diamond import`: an existing batch script as a task file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from diamond.cli import render
from diamond.cli.session import emit, program, say
from diamond.core.errors import Conflict, InvalidInput
from diamond.core.rundir import write_atomic


def import_sbatch(file: str, out: Path | None, *, force: bool, as_json: bool) -> None:
    from diamond.sdk import sbatch

    task = sbatch.load(file, to=out)
    text = sbatch.to_yaml(task, source="standard input" if file == "-" else os.path.basename(file))
    if out is not None:
        _write(out.expanduser(), text, source=file, force=force)
    if as_json:
        emit({"task": task.fields, "notes": list(task.notes), "yaml": text, "written": str(out) if out else None})
        return
    if out is None:
        sys.stdout.write(text)
        say(f"{render.count(len(task.to_check), 'thing')} to check, in the comments at the top; -o FILE writes a file")
        return
    for line in sbatch.note_lines(list(task.to_check)):
        say(f"  {render.clean(line)}")
    say(
        f"Wrote {render.clean(str(out))}. Check the above, then:  {program()} launch {render.clean(str(out))} --dry-run"
    )


def _write(out: Path, text: str, *, source: str, force: bool) -> None:
    """Never over the script itself, and over another file only by `force`."""
    try:
        if source != "-" and out.exists() and out.samefile(Path(source).expanduser()):
            raise InvalidInput(
                "that is the script itself", hint="give another name, e.g. -o task.yaml", field="--output"
            )
        if force:
            write_atomic(out, text.encode(), mode=0o666)
        else:
            with open(out, "x", encoding="utf-8", newline="") as file:
                file.write(text)
    except FileExistsError as error:
        raise Conflict(f"{out} is there already", hint="use --force to replace it, or -o with another name") from error
    except OSError as error:
        raise InvalidInput(f"{out}: {error.strerror or error}", field="--output") from error
