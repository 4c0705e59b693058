"""An image archive without the names in it.

Engines give an image that they load the names its archive asks for, and take them away from whatever had them: an
archive from elsewhere could so put itself in the place of any image here. What is loaded is therefore a copy that asks
for none.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from diamond.agent.builders.base import BuildProblem
from diamond.agent.builders.room import LIMITS, Limits, Room, show
from diamond.agent.builders.tars import NO_TAR, BadArchive, members, open_tar, parts_of

_MAX_LIST_BYTES = 64 * 1024 * 1024


def strip_names(archive: Path, target: Path, limits: Limits = LIMITS) -> None:
    """Write what is in `archive` (as `podman save` or `docker save` make it) to `target`, uncompressed, nameless.

    Raises:
        BuildProblem: it is no such archive, one that would be read differently from what it seems to hold, or one that
            becomes too large.
    """
    room = Room(archive, target.parent, limits)
    try:
        with (
            open_tar(archive, room.max_bytes) as source,
            tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as copy,
        ):
            _copy(source, copy, room)
    except NO_TAR as error:
        said = str(error) if isinstance(error, BadArchive) else f"{type(error).__name__}: {str(error)[:200]}"
        raise BuildProblem(
            f"{archive.name} is not an archive of an image ({said})",
            hint="write it with `podman save` or `docker save`",
            code="base",
        ) from error
    except OSError as error:
        raise room.explain(error, archive.name) from error


def _copy(source: tarfile.TarFile, copy: tarfile.TarFile, room: Room) -> None:
    links: set[str] = set()
    for member in members(source):
        room.enter(member.name)
        parts = parts_of(member.name)
        if not parts:
            if member.isdir():
                continue
            raise BadArchive(f"{show(member.name)} is no name of a file")
        name = "/".join(parts)
        if any("/".join(parts[:count]) in links for count in range(1, len(parts))):
            raise BadArchive(f"{show(name)} lies behind a link")
        if name == "repositories":  # names as engines of long ago wrote them
            continue
        if name in _LISTS:
            if not member.isreg() or member.size > _MAX_LIST_BYTES:
                raise BadArchive(f"{name} is not a file that lists images")
            file = source.extractfile(member)
            assert file is not None
            data = json.dumps(_LISTS[name](json.load(file))).encode()
            room.take(name, len(data))
            copy.addfile(_plain(name, tarfile.REGTYPE, 0o644, len(data)), io.BytesIO(data))
        elif member.isreg():  # whatever way of saving holes it was written with
            room.take(name, member.size)
            copy.addfile(_plain(name, tarfile.REGTYPE, member.mode, member.size), source.extractfile(member))
        elif member.isdir():
            copy.addfile(_plain(name, tarfile.DIRTYPE, member.mode))
        elif member.issym():
            links.add(name)
            copy.addfile(_plain(name, tarfile.SYMTYPE, 0o777, target=_inside(member, parts)))
        elif member.islnk():
            target = "/".join(parts_of(member.linkname, member.name))
            if not target or target in (*_LISTS, "repositories"):
                raise BadArchive(f"{show(name)} is another name of a list")
            if any(target == link or target.startswith(f"{link}/") for link in links):
                raise BadArchive(f"{show(name)} is another name of a link")
            copy.addfile(_plain(name, tarfile.LNKTYPE, member.mode, target=target))
        else:
            raise BadArchive(f"{show(name)} is no file")


def _plain(name: str, kind: bytes, mode: int, size: int = 0, target: str = "") -> tarfile.TarInfo:
    """A header made from nothing: what else the archive's own said might mean another name to another program."""
    plain = tarfile.TarInfo(name)
    plain.type, plain.mode, plain.size, plain.linkname = kind, mode & 0o777, size, target
    return plain


def _inside(member: tarfile.TarInfo, parts: tuple[str, ...]) -> str:
    """Where a symbolic link leads, which is inside: engines make layers that are alike links to one another."""
    steps = [part for part in member.linkname.split("/") if part not in ("", ".")]
    up = next((count for count, part in enumerate(steps) if part != ".."), len(steps))
    if member.linkname.startswith("/") or up >= len(parts) or not steps[up:]:
        raise BadArchive(f"{show(member.name)} is a link to {show(member.linkname)}, which leads out of the archive")
    parts_of("/".join(steps[up:]), member.name)
    return "/".join(steps)


def _of_docker(found: Any) -> Any:
    return [{**image, "RepoTags": None} for image in found]


def _of_oci(found: Any) -> Any:
    kept = {key: value for key, value in found.items() if key != "annotations"}
    kept["manifests"] = [
        {key: value for key, value in one.items() if key != "annotations"} for one in found.get("manifests") or []
    ]
    return kept


_LISTS = {"manifest.json": _of_docker, "index.json": _of_oci}
