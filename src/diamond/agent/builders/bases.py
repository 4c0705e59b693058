"""What a recipe's base is on this machine, for builders that make containers out of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from diamond.agent.builders.base import BuildContext, BuildProblem
from diamond.agent.builders.room import LIMITS
from diamond.agent.builders.tars import NO_TAR, members, open_tar

_SQUASH = (".sqfs", ".squashfs", ".squash")


@dataclass(frozen=True, kw_only=True)
class Base:
    """Attributes:
    kind: "registry"; of files and folders "folder", "rootfs" (a tar of one), "docker" and "oci" (archives of an
        image with its layers), "sif", "squash"; "image" for one of Diamond's own.
    where: the reference as a registry knows it, or the path.
    """

    kind: str
    where: str

    @property
    def path(self) -> Path:
        return Path(self.where)


def find_base(ctx: BuildContext) -> Base:
    """Raises BuildProblem when there is no such base here, or when it is none for a container."""
    text = ctx.recipe.base
    if text.startswith("docker://"):
        return Base(kind="registry", where=text.removeprefix("docker://"))
    if text.startswith("image:"):
        if not ctx.work.base_path:
            raise BuildProblem(f"the base {text} is not at this endpoint", hint="build or copy it there first")
        return Base(kind="image", where=ctx.work.base_path)
    for kind in ("oci", "docker"):
        if text.startswith(f"{kind}-archive:"):
            return Base(kind=kind, where=_existing(text.removeprefix(f"{kind}-archive:")))
    if text.startswith("/"):
        return _of_path(_existing(text))
    raise BuildProblem(
        f"{text} is no base for a container", hint="write docker://…, a path on the endpoint or image:NAME; or use venv"
    )


def base_key(base: Base, ctx: BuildContext) -> str:
    """Changes when the base does; empty where its name says it all."""
    if base.kind == "registry":
        return ""
    if base.kind == "image":
        return ctx.work.base_digest
    return tree_key(base.path) if base.kind == "folder" else file_key(base.path)


def file_key(path: Path) -> str:
    facts = path.stat()
    return f"file:{facts.st_size}:{facts.st_mtime_ns}"


def tree_key(folder: Path) -> str:
    """Of names, sizes and times: reading gigabytes to find that nothing changed would cost more than it saves."""
    digest = hashlib.sha256()
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            facts = os.lstat(path)
            said = f"{os.path.relpath(path, folder)}\0{facts.st_mode}\0{facts.st_size}\0{facts.st_mtime_ns}\n"
            digest.update(said.encode(errors="surrogateescape"))
    return f"folder:{digest.hexdigest()}"


def not_for(base: Base, builder: str) -> BuildProblem:
    """What to say of a base that is there and that this builder cannot read."""
    if base.kind == "sif":
        hint = "build with Apptainer, or name what the .sif file was made from (docker://…)"
    elif base.kind == "image":
        hint = "an image of Diamond is a base for the builder that made it; or build on what it was built on"
    else:
        hint = "give it as docker://…, as an archive of an image or as a folder"
    return BuildProblem(f"{builder} cannot build on {base.where}", hint=hint, code="base")


def _existing(path: str) -> str:
    if not os.path.exists(path):
        raise BuildProblem(
            f"there is no {path} on this endpoint", hint="a base that is a path must be there already", code="base"
        )
    if not os.access(path, os.R_OK):
        raise BuildProblem(f"{path} on this endpoint cannot be read", hint="ask its owner for access", code="base")
    return path


def _of_path(path: str) -> Base:
    if os.path.isdir(path):
        return Base(kind="folder", where=path)
    if path.endswith(".sif"):
        return Base(kind="sif", where=path)
    if path.endswith(_SQUASH):
        return Base(kind="squash", where=path)
    return Base(kind=archive_kind(Path(path)), where=path)


def archive_kind(path: Path) -> str:
    """ "docker" or "oci" for an image with its layers, "rootfs" for a tar of its files."""
    try:
        with open_tar(path, LIMITS.bytes_of(path.stat().st_size)) as archive:
            # These lie at the top of an archive, and one of them within the first few members unless it is a root
            # file system, of which nobody wants to read all to find out.
            for number, member in enumerate(members(archive)):
                name = member.name.removeprefix("./")
                if name == "manifest.json":
                    return "docker"
                if name == "oci-layout":
                    return "oci"
                if number >= 10_000 or name.split("/")[0] in ("bin", "etc", "usr", "lib"):
                    break
    except (*NO_TAR, OSError) as error:
        raise BuildProblem(
            f"{path} is neither a folder nor an archive that can be read ({error})",
            hint="give a tar of a root file system, an archive of an image, or a folder",
            code="base",
        ) from error
    return "rootfs"
