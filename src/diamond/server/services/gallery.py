"""The templates that come with Diamond: folders of data, each with `about.txt`, `task.yaml` and the files of the task.

Everybody may use them, so what is in them is a secret to nobody (`has`). Must not need a database.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import diamond
from diamond.core.bundles import BundleFile, Manifest
from diamond.server.services.context import Context
from diamond.texts import tasktext

_HERE = Path(diamond.__file__).parent / "gallery"
_OURS = ("about.txt", "task.yaml")


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """`text` and `spec` name the files by the bundle they make."""

    key: str
    name: str
    description: str
    text: str
    spec: dict[str, Any]
    manifest: Manifest | None
    files: dict[str, bytes]  # by digest


@cache
def all_of_them() -> dict[str, BuiltIn]:
    """By key, in the order in which they are shown."""
    found = [_load(folder) for folder in sorted(_HERE.iterdir()) if (folder / "task.yaml").is_file()]
    return {each.key: each for each in found}


def _load(folder: Path) -> BuiltIn:
    title, _, description = (folder / "about.txt").read_text("utf-8").partition("\n")
    text = (folder / "task.yaml").read_text("utf-8")
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in _OURS and path.suffix != ".pyc"
    }
    manifest = None
    if contents:
        entries = (BundleFile(path=path, size_bytes=len(data), digest=_digest(data)) for path, data in contents.items())
        manifest = Manifest(files=tuple(sorted(entries, key=lambda entry: entry.path)))
        text = f"{text.rstrip()}\nworkdir: {manifest.ref}\n"
    return BuiltIn(
        key=folder.name,
        name=title.strip(),
        description=description.strip(),
        text=text,
        spec=tasktext.read(text, folder.name).raw,
        manifest=manifest,
        files={_digest(data): data for data in contents.values()},
    )


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@cache
def _digests() -> frozenset[str]:
    ours = all_of_them().values()
    return frozenset(digest for each in ours for digest in each.files) | {
        each.manifest.digest for each in ours if each.manifest
    }


def has(digest: str) -> bool:
    """Whether these are bytes of ours, which everybody may have."""
    return digest in _digests()


def put_in_place(ctx: Context, built_in: BuiltIn) -> None:
    """See to it that its files are in the store, where agents take them from. Safe to repeat."""
    if built_in.manifest is None:
        return
    blobs = {**built_in.files, built_in.manifest.digest: built_in.manifest.canonical()}
    for digest in ctx.blobs.claim(blobs):
        ctx.blobs.put_bytes(digest, blobs[digest])
