"""Commands about what tasks left behind: outputs, cp."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli.describe import work_dir
from diamond.cli.launch import progress_bar
from diamond.cli.session import connect, emit, leave, program, say
from diamond.core.errors import InvalidInput
from diamond.core.tasks import Task

if TYPE_CHECKING:
    from diamond.sdk.downloads import Download


def outputs(ref: str | None, *, to: Path | None, as_json: bool) -> None:
    with connect(patient=True) as client:
        task = client.tasks.resolve(ref)
        found = client.tasks.outputs(task.id)
        if to is None:
            if as_json:
                emit({"task_id": task.id, "outputs": found})
            elif not found:
                _say_none(task)
            else:
                rows = [
                    (
                        render.size(item.size_bytes),
                        render.clean(item.path),
                        "" if item.stored else "on the endpoint only",
                    )
                    for item in found
                ]
                render.print_table((">SIZE", "PATH", ""), rows, flexible={"PATH": 10})
                _say_unmatched(task)
                if not all(item.stored for item in found) and (folder := work_dir(task)):
                    say(f"Those on the endpoint are in {folder}")
                if sys.stdout.isatty() and any(item.stored for item in found):
                    say(f"fetch them with: {program()} outputs {task.id} --to DIR")
            return
        with progress_bar("Fetching") as progress:
            got = client.tasks.download(task.id, to, progress=progress)
    left = [item.path for item in found if not item.stored]
    _report(task, got, left, as_json)
    if not as_json:
        _say_unmatched(task) if found else _say_none(task)
    if not got and task.spec and task.spec.outputs:
        leave(1)


def _say_none(task: Task) -> None:
    patterns = task.spec.outputs if task.spec else ()
    if patterns and task.state.is_final:
        say(f"no file matched: {render.clean(', '.join(patterns))}")
    elif patterns:
        say(f"{render.clean(task.name)} is {task.state}; its outputs are kept when it ends.")
    else:
        say(f"{render.clean(task.name)} has no outputs.")
        say("List them in the task file, e.g.  outputs: [model.pt, results/*]")


def _say_unmatched(task: Task) -> None:
    if unmatched := re.findall(r"output '([^']*)' matches no file", task.detail):
        say(f"no file matched: {render.clean(', '.join(unmatched))}")


def cp(source: str, dest: str, *, as_json: bool) -> None:
    ref, colon, path = source.partition(":")
    if not colon or not path:
        raise InvalidInput(
            f"{source[:80]!r} is not TASK:PATH", hint="e.g. diamond cp mytask:model.pt .", field="TASK:PATH"
        )
    with connect(patient=True) as client:
        task = client.tasks.resolve(ref or None)
        from diamond.sdk.downloads import choose

        chosen = choose(client.tasks.outputs(task.id), [path])
        single = len(chosen) == 1 and chosen[0].path == path.strip("/").removeprefix("./")
        with progress_bar("Fetching") as progress:
            if dest == "-":
                if len(chosen) != 1:
                    raise InvalidInput(
                        f"{path!r} names {render.count(len(chosen), 'file')}", hint="standard output takes one"
                    )
                with tempfile.TemporaryDirectory() as folder:
                    got = client.tasks.download_file(task.id, chosen[0].path, Path(folder) / "file", progress=progress)
                    with open(got.dest, "rb") as file:
                        shutil.copyfileobj(file, sys.stdout.buffer)
                return
            if single:
                target = Path(dest).expanduser()
                if target.is_dir() or dest.endswith("/"):
                    target = target / os.path.basename(chosen[0].path)
                done = [client.tasks.download_file(task.id, chosen[0].path, target, progress=progress)]
            else:
                done = client.tasks.download(task.id, dest, paths=[path], progress=progress)
    _report(task, done, [], as_json)


def _report(task: Task, got: list[Download], left: list[str], as_json: bool) -> None:
    if as_json:
        files = [{"path": d.path, "dest": str(d.dest), "size_bytes": d.size_bytes, "fetched": d.fetched} for d in got]
        emit({"task_id": task.id, "files": files, "on_endpoint_only": left})
        return
    for item in got:
        note = "" if item.fetched else "  (unchanged)"
        print(f"{render.size(item.size_bytes):>10}  {render.clean(item.dest)}{note}")
    if left:
        names = ", ".join(render.clean(path) for path in left[:5]) + (", …" if len(left) > 5 else "")
        were = render.count(len(left), "file was", "files were")
        say(f"{were} kept on the endpoint (too large, or vanished): {names}")
        if folder := work_dir(task):
            say(f"  in {folder}")
