"""Unpacks an image archive (as `podman save`, `docker save` and `skopeo` write them) into a folder, without root.

For builders whose own tools only take images from registries. Layers are applied in order, with what they take away
again; owners are given up, since an ordinary user has only one, and so are devices.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import platform
import shutil
import stat
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Any

from diamond.agent.builders.base import BuildProblem

_GONE = ".wh."
_ALL_GONE = ".wh..wh..opq"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}
_MAX_LINKS = 40
_NO_ARCHIVE = (
    *(tarfile.TarError, EOFError, KeyError, IndexError, TypeError, ValueError, AttributeError),
    *(RecursionError, zlib.error, lzma.LZMAError),
)


def unpack_image(archive: Path, target: Path) -> list[str]:
    """Make the folder `target` from it; the image's own variables, as NAME=value.

    Raises:
        BuildProblem: it is no such archive, or for another kind of machine.
    """
    try:
        with tarfile.open(archive) as outer:
            image = _Archive(outer)
            config, layers = image.docker() if image.has("manifest.json") else image.oci()
            _check_machine(config, archive)
            target.mkdir()
            for layer in layers:
                with image.open(layer) as file, tarfile.open(fileobj=file, mode="r|*") as inner:
                    _apply(inner, target)
            return [str(line) for line in (config.get("config") or {}).get("Env") or []]
    except _NO_ARCHIVE as error:
        raise BuildProblem(
            f"{archive} is not an archive of an image that can be read here ({type(error).__name__}: {error})",
            hint="write it with `podman save` or `docker save`; its layers may be plain or compressed with gzip",
            code="base",
        ) from error


class _Archive:
    """Files in a tar by name; layers may be given as links to one another."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members = {member.name.removeprefix("./"): member for member in tar}

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
            return json.load(file)

    def docker(self) -> tuple[dict[str, Any], list[str]]:
        """The image's configuration and the names of its layers, lowest first."""
        first = self.json("manifest.json")[0]
        return self.json(first["Config"]), list(first["Layers"])

    def oci(self) -> tuple[dict[str, Any], list[str]]:
        manifest = self._manifest(self.json("index.json"))
        return self.json(_blob(manifest["config"])), [_blob(layer) for layer in manifest["layers"]]

    def _manifest(self, index: dict[str, Any]) -> dict[str, Any]:
        listed = index["manifests"]
        wanted = _MACHINES.get(platform.machine(), platform.machine())
        fitting = [one for one in listed if (one.get("platform") or {}).get("architecture") == wanted]
        found: dict[str, Any] = self.json(_blob((fitting or listed)[0]))
        return self._manifest(found) if "manifests" in found else found


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


def _apply(layer: tarfile.TarFile, root: Path) -> None:
    made: set[Path] = set()  # by this layer: what it takes away are only files of those below it
    for member in layer:
        parts = [part for part in PurePosixPath(member.name).parts if part not in ("/", ".")]
        if ".." in parts:
            raise ValueError(f"{member.name} leads out of the image")
        if not parts:
            continue
        parent = _resolve(root, "/".join(parts[:-1]))
        _make_folders(root, parent)
        name = parts[-1]
        if name == _ALL_GONE:
            for entry in parent.iterdir():
                if entry not in made:
                    _remove(entry)
        elif name.startswith(_GONE):
            _remove(parent / name[len(_GONE) :])
        else:
            _make(layer, member, parent / name, root)
            made.update((parent / name, parent, *parent.parents))


def _make(layer: tarfile.TarFile, member: tarfile.TarInfo, path: Path, root: Path) -> None:
    mode = stat.S_IMODE(member.mode) & 0o1777  # rights of another account mean nothing here
    if member.isdir():
        if not path.is_dir() or path.is_symlink():
            _remove(path)
            path.mkdir()
        path.chmod(mode | 0o700)
    elif member.isreg():
        _remove(path)
        with path.open("xb") as file:
            source = layer.extractfile(member)
            assert source is not None
            shutil.copyfileobj(source, file, 1024 * 1024)
        path.chmod(mode | 0o600)
        os.utime(path, (member.mtime, member.mtime))
    elif member.issym():
        _remove(path)
        path.symlink_to(member.linkname)
    elif member.islnk():
        linked = _resolve(root, os.path.dirname(member.linkname)) / os.path.basename(member.linkname)
        if linked != path:
            _remove(path)
            os.link(linked, path, follow_symlinks=False)


def _resolve(root: Path, name: str) -> Path:
    """Where a path of the image is in the folder, every link on the way read as the image would read it."""
    todo = [part for part in reversed(name.split("/")) if part not in ("", ".")]
    here: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            del here[-1:]
            continue
        path = root.joinpath(*here, part)
        if not path.is_symlink():
            here.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise ValueError(f"{name} has too many links")
        to = os.readlink(path)
        if to.startswith("/"):
            here = []
        todo.extend(one for one in reversed(to.split("/")) if one not in ("", "."))
    return root.joinpath(*here)


def _make_folders(root: Path, folder: Path) -> None:
    """With no link among them: `folder` comes from `_resolve`."""
    here = root
    for part in folder.relative_to(root).parts:
        here = here / part
        if not here.is_dir():
            with contextlib.suppress(FileNotFoundError):
                here.unlink()
            here.mkdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
