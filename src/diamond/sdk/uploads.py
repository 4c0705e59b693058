"""The local files a spec or a recipe names, on their way to the server: read, sent, and replaced by references.

A place is named as its field is: ``workdir``, ``file_mounts.data``, ``image.files./opt/tool``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from diamond.core.bundles import is_bundle_ref
from diamond.core.errors import InvalidInput
from diamond.core.recipes import Recipe
from diamond.core.tasks import TaskSpec
from diamond.sdk.bundles import Bundles
from diamond.sdk.folders import Progress, Scan

Described = TypeVar("Described", TaskSpec, Recipe)


def sources(described: TaskSpec | Recipe) -> dict[str, str]:
    """What stands at each place: paths on this machine, or references of what was sent."""
    if isinstance(described, Recipe):
        return {f"files.{target}": source for target, source in described.files.items()}
    found = {"workdir": described.workdir} if described.workdir else {}
    found |= {f"file_mounts.{target}": source for target, source in described.file_mounts.items()}
    if described.image is not None:
        found |= {f"image.{place}": source for place, source in sources(described.image).items()}
    return found


def with_refs(described: Described, refs: Mapping[str, str]) -> Described:
    """The same with other sources."""
    if isinstance(described, Recipe):
        files = {target: refs[f"files.{target}"] for target in described.files}
        return dataclasses.replace(described, files=files)
    image = described.image
    if image is not None:
        image = with_refs(image, {k.removeprefix("image."): ref for k, ref in refs.items() if k.startswith("image.")})
    mounts = {target: refs[f"file_mounts.{target}"] for target in described.file_mounts}
    return dataclasses.replace(described, workdir=refs.get("workdir"), file_mounts=mounts, image=image)


def sent(
    bundles: Bundles, described: Described, progress: Progress | None = None, scan_progress: Progress | None = None
) -> Described:
    """Upload every local file; what is returned has references in place of local paths.

    Raises:
        InvalidInput: a file cannot be taken; names the field.
    """
    scans = _scans(bundles, described, scan_progress)
    return with_refs(
        described, sources(described) | {k: bundles.upload(v, progress=progress).ref for k, v in scans.items()}
    )


def named(bundles: Bundles, described: Described, scan_progress: Progress | None = None) -> Described:
    """As `sent` would return, without sending anything."""
    scans = _scans(bundles, described, scan_progress)
    return with_refs(described, sources(described) | {place: scan.manifest.ref for place, scan in scans.items()})


def _scans(bundles: Bundles, described: TaskSpec | Recipe, progress: Progress | None) -> dict[str, Scan]:
    found: dict[str, Scan] = {}
    for place, source in sources(described).items():
        if is_bundle_ref(source):
            continue
        try:
            found[place] = bundles.scan(source, progress=progress)
        except InvalidInput as error:
            raise type(error)(error.message, hint=error.hint, field=place) from error
        if place == "workdir" and found[place].manifest.is_file:
            raise InvalidInput(f"{source} is a file; the workdir is a folder", field="workdir")
    return found


def all_sent(bundles: Bundles, specs: Sequence[TaskSpec], progress: Progress | None = None) -> list[TaskSpec]:
    """As `sent` for each; a folder that several of them name is read and uploaded once.

    Raises:
        InvalidInput: naming the spec by its number, as `specs[3].workdir`.
    """
    refs: dict[str, str] = {}
    ready = []
    for number, spec in enumerate(specs):
        given = sources(spec)
        if not given:
            ready.append(spec)
            continue
        known = {target: refs[source] for target, source in given.items() if source in refs}
        try:
            done = sent(bundles, with_refs(spec, {**given, **known}), progress)
        except InvalidInput as error:
            raise type(error)(error.message, hint=error.hint, field=f"specs[{number}].{error.field}") from error
        refs |= {source: sources(done)[target] for target, source in given.items()}
        ready.append(done)
    return ready
