"""Unpacks an image archive (as `podman save`, `docker save` and `skopeo` write them) into a folder, without root.

For builders whose own tools only take images from registries. Layers are applied in order, with what they take away
again. What may be in an archive is checked in `tars.py`, what is done with it in `unpacking.py`.
"""

from __future__ import annotations

import json
import os
import platform
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from diamond.agent.builders.base import BuildProblem
from diamond.agent.builders.room import LIMITS, Limits, Room, show
from diamond.agent.builders.tars import NO_TAR, BadArchive, members, open_tar
from diamond.agent.builders.unpacking import Unpacker

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}
_MAX_LINKS = 40
_MAX_FILES = 100_000  # beside its layers an archive holds a few papers
_MAX_LAYERS = 1000  # engines stop at 127
_MAX_PAPER_BYTES = 16 * 1024 * 1024
_MAX_NESTED = 8


def unpack_image(archive: Path, target: Path, limits: Limits = LIMITS) -> list[str]:
    """Make the folder `target` from it; the image's own variables, as NAME=value.

    Raises:
        BuildProblem: it is no such archive, one for another kind of machine, too large, or made to do harm.
    """
    try:
        room = Room(archive, target.parent, limits)
        with open_tar(archive, room.max_bytes) as outer:
            image = _Archive(outer)
            config, layers = image.docker() if image.has("manifest.json") else image.oci()
            _check_machine(config, archive)
            if len(layers) > _MAX_LAYERS:
                raise BadArchive(f"it has {len(layers)} layers; {_MAX_LAYERS} are allowed")
            target.mkdir()
            with Unpacker(target, room, whiteouts=True) as unpacker:
                for layer in layers:
                    with image.open(layer) as file, open_tar(file, room.max_bytes) as inner:
                        unpacker.apply(inner)
            return [str(line) for line in (config.get("config") or {}).get("Env") or []]
    except BadArchive as error:
        raise BuildProblem(
            f"{archive} is not an archive of an image that is unpacked here: {error}", hint=_HINT, code="base"
        ) from error
    except NO_TAR as error:
        raise BuildProblem(
            f"{archive} is not an archive of an image that can be read here ({type(error).__name__}: {error})",
            hint=_HINT,
            code="base",
        ) from error
    except OSError as error:
        raise BuildProblem(f"{archive} cannot be read: {error.strerror or error}", hint=_HINT, code="base") from error


def unpack_folder(
    archive: Path, target: Path, *, closed: bool = False, leave: Collection[str] = (), limits: Limits = LIMITS
) -> None:
    """Unpack a tar of plain files, such as one of a root file system, into the folder `target`, which is there.

    Args:
        closed, leave: as `Unpacker` takes them.

    Raises:
        BadArchive, or another of tars.NO_TAR: it is no such archive, or one made to do harm.
        BuildProblem: it is too large, or there is no room.
        OSError: it cannot be read.
    """
    room = Room(archive, target, limits)
    with open_tar(archive, room.max_bytes) as tar, Unpacker(target, room, closed=closed, leave=leave) as unpacker:
        unpacker.apply(tar)


_HINT = "write it with `podman save` or `docker save`; its layers may be plain or compressed with gzip"


class _Archive:
    """Files in a tar by name; layers may be given as links to one another."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members: dict[str, tarfile.TarInfo] = {}
        for count, member in enumerate(members(tar)):
            if count >= _MAX_FILES:
                raise BadArchive(f"{show(member.name)} is one more than the {_MAX_FILES:,} files it may have")
            self._members[member.name.removeprefix("./")] = member

    def has(self, name: str) -> bool:
        return name in self._members

    def open(self, name: str) -> IO[bytes]:
        member = self._members[name]
        for _ in range(_MAX_LINKS):
            if not member.issym():
                break
            name = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
            member = self._members[name]
        else:
            raise ValueError(f"{name} is a link that leads nowhere")
        file = self._tar.extractfile(member)
        if file is None:
            raise ValueError(f"{name} is not a file")
        return file

    def json(self, name: str) -> Any:
        with self.open(name) as file:
            data = file.read(_MAX_PAPER_BYTES + 1)
        if len(data) > _MAX_PAPER_BYTES:
            raise BadArchive(f"{show(name)} is longer than {_MAX_PAPER_BYTES // 1024**2} MiB")
        return json.loads(data)

    def docker(self) -> tuple[dict[str, Any], list[str]]:
        """The image's configuration and the names of its layers, lowest first."""
        first = self.json("manifest.json")[0]
        return self.json(first["Config"]), list(first["Layers"])

    def oci(self) -> tuple[dict[str, Any], list[str]]:
        manifest = self._manifest(self.json("index.json"))
        return self.json(_blob(manifest["config"])), [_blob(layer) for layer in manifest["layers"]]

    def _manifest(self, index: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        if depth > _MAX_NESTED:
            raise BadArchive("its lists of images lead to one another")
        listed = index["manifests"]
        wanted = _MACHINES.get(platform.machine(), platform.machine())
        fitting = [one for one in listed if (one.get("platform") or {}).get("architecture") == wanted]
        found: dict[str, Any] = self.json(_blob((fitting or listed)[0]))
        return self._manifest(found, depth + 1) if "manifests" in found else found


def _blob(entry: dict[str, Any]) -> str:
    algorithm, _, digest = str(entry["digest"]).partition(":")
    return f"blobs/{algorithm}/{digest}"


def _check_machine(config: dict[str, Any], archive: Path) -> None:
    wanted = _MACHINES.get(platform.machine(), platform.machine())
    if (found := config.get("architecture", wanted)) != wanted:
        raise BuildProblem(
            f"the image in {archive} is for {found}, and this machine is {wanted}",
            hint=f"save the image for linux/{wanted}",
            code="base",
        )
