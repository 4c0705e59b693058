"""An image archive without the names in it.

Engines give an image that they load the names its archive asks for, and take them away from whatever had them: an
archive from elsewhere could so put itself in the place of any image here. What is loaded is therefore a copy that asks
for none.
"""

from __future__ import annotations

import io
import json
import lzma
import posixpath
import tarfile
import zlib
from pathlib import Path
from typing import Any

from diamond.agent.builders.base import BuildProblem

_MAX_LIST_BYTES = 64 * 1024 * 1024
_BROKEN = (tarfile.TarError, EOFError, KeyError, TypeError, ValueError, AttributeError, RecursionError)


def strip_names(archive: Path, target: Path) -> None:
    """Write what is in `archive` (as `podman save` or `docker save` make it) to `target`, uncompressed, nameless.

    Raises:
        BuildProblem: it is no such archive, or one that would be read differently from what it seems to hold.
    """
    try:
        with tarfile.open(archive) as source, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as copy:
            _copy(source, copy)
    except (*_BROKEN, zlib.error, lzma.LZMAError) as error:
        raise BuildProblem(
            f"{archive.name} is not an archive of an image ({type(error).__name__}: {str(error)[:200]})",
            hint="write it with `podman save` or `docker save`",
            code="base",
        ) from error


def _copy(source: tarfile.TarFile, copy: tarfile.TarFile) -> None:
    links: set[str] = set()
    for member in source:
        name = posixpath.normpath("/" + member.name).lstrip("/")
        parts = name.split("/")
        if any("/".join(parts[:count]) in links for count in range(1, len(parts))):
            raise ValueError(f"{name[:200]} lies behind a link")
        if member.issym():
            links.add(name)
        member.pax_headers = {}  # could say another name to other programs
        if name == "repositories":  # names as engines of long ago wrote them
            continue
        if name in _LISTS:
            if not member.isreg() or member.size > _MAX_LIST_BYTES:
                raise ValueError(f"{name} is not a file that lists images")
            file = source.extractfile(member)
            assert file is not None
            data = json.dumps(_LISTS[name](json.load(file))).encode()
            plain = tarfile.TarInfo(name)
            plain.size, plain.mode = len(data), 0o644
            copy.addfile(plain, io.BytesIO(data))
        elif member.isreg():
            member.type = tarfile.REGTYPE  # whatever way of saving holes it was written with
            copy.addfile(member, source.extractfile(member))
        elif member.isdir() or member.issym() or member.islnk():
            if member.islnk() and posixpath.normpath("/" + member.linkname).lstrip("/") in (*_LISTS, "repositories"):
                raise ValueError(f"{name[:200]} is another name of a list")
            copy.addfile(member)
        else:
            raise ValueError(f"{name[:200]} is no file")


def _of_docker(found: Any) -> Any:
    return [{**image, "RepoTags": None} for image in found]


def _of_oci(found: Any) -> Any:
    kept = {key: value for key, value in found.items() if key != "annotations"}
    kept["manifests"] = [
        {key: value for key, value in one.items() if key != "annotations"} for one in found.get("manifests") or []
    ]
    return kept


_LISTS = {"manifest.json": _of_docker, "index.json": _of_oci}
