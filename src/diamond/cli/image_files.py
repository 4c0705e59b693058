"""`diamond image export` and `import`: an image as a file on this machine."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from diamond.cli import image_page, render
from diamond.cli.image_build import see_through
from diamond.cli.launch import progress_bar
from diamond.cli.session import connect, emit, leave, program, say
from diamond.core.errors import InvalidInput
from diamond.core.tasks import Task


def export(ref: str, file: Path, *, infra: str | None, force: bool, as_json: bool) -> None:
    if file.expanduser().exists() and not force:
        raise InvalidInput(f"{file} is there already", hint="give --force to replace it", field="FILE")
    # Before the endpoint hands over gigabytes that could not be written.
    folder = file.expanduser().absolute().parent
    if file.expanduser().is_dir() or not folder.is_dir():
        what = f"{file} is a folder" if folder.is_dir() else f"there is no folder {folder}"
        hint = (
            "give the name of a file in it"
            if folder.is_dir()
            else f"make it first: mkdir -p {shlex.quote(str(folder))}"
        )
        raise InvalidInput(what, hint=hint, field="FILE")
    if not os.access(folder, os.W_OK):
        raise InvalidInput(f"you may not write into {folder}", hint="name a file in another folder", field="FILE")

    def tell(task: Task) -> None:
        if not as_json:
            say(f"{render.clean(task.endpoint or 'the endpoint')} hands it over: {program()} logs -f {task.id}")

    with connect(patient=True) as client, progress_bar("Fetching") as fetching:
        found = client.images.export(ref, file, endpoint=infra, progress=fetching, on_task=tell)
    contents = found.contents
    if as_json:
        emit({"file": str(file), "size_bytes": found.size_bytes, "contents": contents})
        return
    print(f"{file}  {render.size(found.size_bytes)}")
    say(f"  {render.clean(contents.name)}, {contents.facts.builder}, {image_page.short_digest(contents.facts.digest)}")
    say(f"  take it in elsewhere: {program()} image import {file.name}")


def import_(file: Path, *, name: str | None, infra: str | None, detach: bool, as_json: bool) -> None:
    with connect(patient=True) as client:
        with progress_bar("Verifying") as verifying, progress_bar("Uploading") as sending:
            made = client.images.import_(file, endpoint=infra, name=name, progress=sending, verify_progress=verifying)
        leave(see_through(client, made, detach=detach, as_json=as_json))
