"""Exports on this machine: written so that a broken one can be continued, and read for sending.

The format is in `diamond.core.imagefile`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from diamond.core.bundles import BundleFile, Manifest
from diamond.core.errors import DigestMismatch, InvalidInput
from diamond.core.imagefile import (
    CONTENTS_FILE,
    END,
    FILES,
    MAX_CONTENTS_BYTES,
    MAX_TEXT_BYTES,
    TEXT_MEMBERS,
    Contents,
    ImageFile,
    Member,
    check_contents,
    contents_block,
    hash_of,
    header,
    look_through,
    members_of,
    padding,
    payload_name,
)
from diamond.core.images import PAYLOAD_FILE
from diamond.sdk.folders import LocalFile, Progress, Scan

__all__ = [
    "CONTENTS_FILE",
    "END",
    "MAX_CONTENTS_BYTES",
    "MAX_TEXT_BYTES",
    "TEXT_MEMBERS",
    "Contents",
    "ImageFile",
    "Member",
    "contents_block",
    "file_scans",
    "header",
    "members_of",
    "padding",
    "payload_name",
    "payload_scan",
    "read",
    "verify",
    "write",
]


def write(
    target: Path,
    contents: Contents,
    texts: Mapping[str, bytes],
    fetch: Callable[[Member, Path, int, Callable[[int], None]], str],
    progress: Progress | None = None,
) -> None:
    """Write an export; it appears at `target` complete, or not at all. An earlier try is continued.

    Args:
        texts: contents of the text members.
        fetch: brings a member's bytes to the end of a file: (member, file, where it begins there, how far it is) ->
            their SHA-256. Continues what already stands there.
    """
    if target.is_dir():
        raise InvalidInput(f"{target} is a folder", hint="give the name of a file in it", field="FILE")
    begin = contents_block(contents)
    part = target.with_name(f".{target.name[:180]}.{hashlib.sha256(begin).hexdigest()[:12]}.part")
    total = sum(member.size_bytes for member in contents.members)
    done = 0
    try:
        with open(part, "ab"):
            pass
        position = _settle(part, 0, begin)
        for number, member in enumerate(contents.members):
            position = _settle(part, position, header(member, contents.facts.built_at))

            def tell(here: int, before: int = done, files: int = number) -> None:
                if progress:
                    progress(before + here, total, files)

            if member.name in texts:
                _settle(part, position, texts[member.name])
            else:
                _fetched(part, position, member, fetch, tell)
            position = _settle(part, position + member.size_bytes, padding(member.size_bytes))
            done += member.size_bytes
            tell(member.size_bytes, done - member.size_bytes, number + 1)
        _settle(part, position, END)
        os.replace(part, target)
    except OSError as error:
        raise InvalidInput(f"{target} cannot be written: {error.strerror}", field="FILE") from error


def _settle(part: Path, position: int, data: bytes) -> int:
    """Have `data` at `position`; what an earlier try left there stays if it is the same. Where it ends."""
    with open(part, "r+b") as file:
        file.seek(position)
        there = file.read(len(data))
        if there != data:
            file.seek(position)
            file.truncate()
            file.write(data)
    return position + len(data)


def _fetched(
    part: Path,
    position: int,
    member: Member,
    fetch: Callable[[Member, Path, int, Callable[[int], None]], str],
    tell: Callable[[int], None],
) -> None:
    end = position + member.size_bytes
    if part.stat().st_size > end:  # an earlier try came beyond it
        with open(part, "rb") as file:
            file.seek(position)
            if hash_of(file, member.size_bytes, tell) == member.sha256:
                return
        os.truncate(part, position)
    for _ in range(2):
        if fetch(member, part, position, tell) == member.sha256:
            return
        os.truncate(part, position)  # the rest of a broken try, perhaps
    raise DigestMismatch(
        f"{member.name!r} arrived twice with other contents than its SHA-256 says ({member.sha256[:12]}…)",
        hint="the file may have changed at the server; look into its log",
    )


def read(path: str | os.PathLike[str]) -> ImageFile:
    """Look through an export on this machine.

    Raises:
        InvalidInput: it is not such a file, or not a whole one.
    """
    where = Path(path).expanduser()
    try:
        with open(where, "rb") as file:
            found = os.fstat(file.fileno())
            return look_through(file, where, mtime_ns=found.st_mtime_ns, inode=found.st_ino)
    except OSError as error:
        raise InvalidInput(
            f"{where}: {error.strerror}", hint="give the path of an exported image", field="FILE"
        ) from error


def verify(image: ImageFile, progress: Progress | None = None) -> None:
    """Hash every member that `read` did not. Raises DigestMismatch."""
    with open(image.path, "rb") as file:
        check_contents(file, image, progress)


def payload_scan(image: ImageFile) -> Scan:
    """The payload as a bundle of one file, read from inside the export."""
    member = image.contents.payload
    digest = f"sha256:{member.sha256}"
    entry = BundleFile(path=PAYLOAD_FILE, size_bytes=member.size_bytes, digest=digest)
    manifest = Manifest(files=(entry,), is_file=True)
    return Scan(root=str(image.path), manifest=manifest, sources={digest: _local(image, member)})


def file_scans(image: ImageFile) -> dict[str, Scan]:
    """The bundles of the recipe's own files, by their references."""
    members = {f"sha256:{m.name.removeprefix(FILES)}": m for m in image.contents.members if m.name.startswith(FILES)}
    found = {}
    for ref, manifest in image.contents.bundles.items():
        sources = {item.digest: _local(image, members[item.digest]) for item in manifest.files if not item.link_to}
        found[ref] = Scan(root=str(image.path), manifest=manifest, sources=sources)
    return found


def _local(image: ImageFile, member: Member) -> LocalFile:
    return LocalFile(
        path=member.name,
        source=str(image.path.absolute().resolve()),
        size_bytes=member.size_bytes,
        mtime_ns=image.mtime_ns,
        inode=image.inode,
        executable=False,
        offset=image.offsets[member.name],
        whole_bytes=image.size_bytes,
    )
