"""Commands about what tasks left behind: outputs, cp."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli.launch import progress_bar
from diamond.cli.session import connect, emit, say
from diamond.core.errors import InvalidInput

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
                say(f"{render.clean(task.name)} has no outputs" + ("." if task.state.is_final else " yet."))
                say("List them in the task file, e.g.  outputs: [model.pt, results/*]")
            else:
                rows = [
                    (
                        render.size(item.size_bytes),
                        render.clean(item.path),
                        "" if item.stored else "on the endpoint only",
                    )
                    for item in found
                ]
                render.print_table((">SIZE", "PATH", ""), rows, flexible=("PATH",))
                print(f"fetch them with: diamond outputs {task.id} --to DIR") if sys.stdout.isatty() else None
            return
        with progress_bar("Fetching") as progress:
            got = client.tasks.download(task.id, to, progress=progress)
        left = [item.path for item in found if not item.stored]
        _report(task.id, got, left, as_json)


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
                    raise InvalidInput(f"{path!r} names {len(chosen)} files", hint="standard output takes one")
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
    _report(task.id, done, [], as_json)


def _report(task_id: str, got: list[Download], left: list[str], as_json: bool) -> None:
    if as_json:
        files = [{"path": d.path, "dest": str(d.dest), "size_bytes": d.size_bytes, "fetched": d.fetched} for d in got]
        emit({"task_id": task_id, "files": files, "on_endpoint_only": left})
        return
    for item in got:
        note = "" if item.fetched else "  (unchanged)"
        print(f"{render.size(item.size_bytes):>10}  {render.clean(item.dest)}{note}")
    if left:
        names = ", ".join(render.clean(path) for path in left[:5])
        say(
            f"{len(left)} too large to be kept at the server: {names}. They are on the endpoint: diamond show {task_id}"
        )
    if not got and not left:
        say("The task has no outputs.")
