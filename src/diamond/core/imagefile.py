"""An image as one file: what an export writes and an import takes, on any installation. Owns the format.

An uncompressed tar whose members stand in one order: `diamond-image.json` (this module's `Contents`), lock, SBOM and
definition, the files the recipe brings in, and the image itself last. Every member but the first is named in the first
with its size and SHA-256. The payload is a file other tools know: a .sif, an OCI archive, or a tar of a root folder.

Reading trusts nothing: a member that is not named, of another kind than a plain file, of another size or with other
contents is refused before anything is sent anywhere. The standard library's tar reader is not used for that, since it
would follow what headers say about memory and names.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from diamond import __version__
from diamond.core.bundles import Manifest, check_manifest, is_digest
from diamond.core.codec import decode, encode
from diamond.core.errors import DigestMismatch, InvalidInput, TooLarge
from diamond.core.images import DEFINITION_FILE, LOCK_FILE, SBOM_FILE, ImageFacts, Lock
from diamond.core.recipes import BUILDERS, Recipe, parse_image_name

Progress = Callable[[int, int, int], None]  # bytes done, bytes there are, members done
FORMAT = 1
CONTENTS_FILE = "diamond-image.json"
MAX_CONTENTS_BYTES = 16 * 1024 * 1024
MAX_TEXT_BYTES = 64 * 1024 * 1024  # of lock, SBOM and definition, each
MAX_MEMBERS = 100_100
TEXT_MEMBERS = (LOCK_FILE, SBOM_FILE, DEFINITION_FILE)
PAYLOAD_NAMES = {
    "apptainer": "image.sif",
    "podman": "oci-archive.tar",
    "docker": "oci-archive.tar",
    "charliecloud": "image.tar",
    "venv": "image.tar",
}
_BLOCK = 512
_CHUNK = 1024 * 1024
FILES = "files/"  # blobs of the recipe's own files, by digest
_WRITE_AGAIN = "export the image again; a file that was edited or packed anew is not taken"


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str
    size_bytes: int
    sha256: str  # hexadecimal


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What `diamond-image.json` says.

    Attributes:
        members: everything that follows it, in order; the last is the payload.
        bundles: what the recipe's `files` refer to, by their references; their blobs are members.
    """

    format: int = FORMAT
    name: str
    recipe: Recipe
    facts: ImageFacts
    members: tuple[Member, ...]
    bundles: dict[str, Manifest] = field(default_factory=dict)
    made_by: str = f"diamond {__version__}"

    @property
    def payload(self) -> Member:
        return self.members[-1]


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An export that was looked through: its texts are verified, its large members not yet."""

    path: Path
    contents: Contents
    texts: dict[str, bytes]  # of TEXT_MEMBERS, those there are
    offsets: dict[str, int]  # where each member's bytes begin
    size_bytes: int
    mtime_ns: int
    inode: int

    @property
    def lock(self) -> Lock:
        return decode(Lock, _json(self.texts.get(LOCK_FILE, b"{}"), LOCK_FILE))


def payload_name(builder: str) -> str:
    return PAYLOAD_NAMES.get(builder, "image.tar")


def header(member: Member, mtime: float) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.size, info.mtime, info.mode = member.size_bytes, int(mtime), 0o644
    return info.tobuf(format=tarfile.GNU_FORMAT)


def padding(size_bytes: int) -> bytes:
    return b"\0" * (-size_bytes % _BLOCK)


def contents_block(contents: Contents) -> bytes:
    """The first member, complete: the same for the same contents, so that a broken export can be continued."""
    data = json.dumps(encode(contents), sort_keys=True, indent=1).encode()
    if len(data) > MAX_CONTENTS_BYTES:
        raise TooLarge("the recipe's list of files is too long for an export", hint="bring in an archive instead")
    own = Member(name=CONTENTS_FILE, size_bytes=len(data), sha256="")
    return header(own, contents.facts.built_at) + data + padding(len(data))


END = b"\0" * (2 * _BLOCK)


def look_through(file: BinaryIO, where: Path, *, mtime_ns: int = 0, inode: int = 0) -> ImageFile:
    """Look through an export: order, names, kinds and sizes of its members, and contents of the small ones.

    Args:
        where: what to call it in messages, and where it lies, if it does.

    Raises:
        InvalidInput: it is not such a file, or not a whole one.
    """
    whole = file.seek(0, os.SEEK_END)
    file.seek(0)
    contents = _contents(file, where)
    offsets, texts = _members(file, where, contents, whole)
    return ImageFile(
        path=where, contents=contents, texts=texts, offsets=offsets,
        size_bytes=whole, mtime_ns=mtime_ns, inode=inode,
    )  # fmt: skip


def check_contents(file: BinaryIO, image: ImageFile, progress: Progress | None = None) -> None:
    """Hash every member that `look_through` did not. Raises DigestMismatch."""
    members = [member for member in image.contents.members if member.name not in image.texts]
    total = sum(member.size_bytes for member in members)
    done = 0
    for number, member in enumerate(members):
        file.seek(image.offsets[member.name])

        def tell(here: int, before: int = done, files: int = number) -> None:
            if progress:
                progress(before + here, total, files)

        if hash_of(file, member.size_bytes, tell) != member.sha256:
            raise DigestMismatch(
                f"{image.path}: {member.name!r} has other contents than its SHA-256 says", hint=_WRITE_AGAIN
            )
        done += member.size_bytes


def blob_member(digest: str, size_bytes: int) -> Member:
    """The member of one of the recipe's files."""
    sha256 = digest.removeprefix("sha256:")
    return Member(name=FILES + sha256, size_bytes=size_bytes, sha256=sha256)


def text_member(name: str, data: bytes) -> Member:
    return Member(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _contents(file: BinaryIO, where: Path) -> Contents:
    no_export = InvalidInput(
        f"{where} is not an image that Diamond exported",
        hint="import takes files that `diamond image export` wrote; an image of another tool is a base: write "
        "base: /path/on/the/endpoint/image.sif (or oci-archive:/path) in a recipe",
        field="FILE",
    )
    try:
        name, size = _next(file, where)
    except InvalidInput as error:  # a short file, another format, a tar that begins with a folder
        raise no_export from error
    if name != CONTENTS_FILE:
        raise no_export
    if size > MAX_CONTENTS_BYTES:
        raise TooLarge(f"{where}: {CONTENTS_FILE} is {size} bytes long; at most {MAX_CONTENTS_BYTES} are allowed")
    raw = _json(_exactly(file, size, where), CONTENTS_FILE)
    _exactly(file, len(padding(size)), where)
    if not isinstance(raw, Mapping) or raw.get("format") != FORMAT:
        version = raw.get("format") if isinstance(raw, Mapping) else None
        raise InvalidInput(
            f"{where} is an export of format {str(version)[:20]!r}; this Diamond reads format {FORMAT}",
            hint="use the version of Diamond that made it, or a newer one",
            field="FILE",
        )
    try:
        found = decode(Contents, raw)
        parse_image_name(found.name)
        _check(found)
    except (InvalidInput, ValueError) as error:
        raise InvalidInput(f"{where}: {CONTENTS_FILE} makes no sense: {error}", hint=_WRITE_AGAIN) from error
    return found


def _check(contents: Contents) -> None:
    names = [member.name for member in contents.members]
    if not names or len(names) > MAX_MEMBERS or len(set(names)) != len(names):
        raise ValueError("its list of members is empty, too long, or names one twice")
    if contents.facts.builder not in BUILDERS or names[-1] != payload_name(contents.facts.builder):
        raise ValueError(f"the builder {contents.facts.builder[:40]!r} does not fit the payload {names[-1][:80]!r}")
    for member in contents.members:
        is_file = member.name.startswith(FILES) and member.name == FILES + member.sha256
        if not is_file and member.name not in (*TEXT_MEMBERS, names[-1]):
            raise ValueError(f"a member {member.name[:80]!r} has no place in it")
        if not is_digest(f"sha256:{member.sha256}") or not 0 <= member.size_bytes < 2**50:
            raise ValueError(f"size or SHA-256 of {member.name[:80]!r} is impossible")
    blobs = {f"sha256:{m.sha256}": m.size_bytes for m in contents.members if m.name.startswith(FILES)}
    for ref, manifest in contents.bundles.items():
        check_manifest(manifest)
        if manifest.ref != ref:
            raise ValueError(f"the list of files {ref[:80]!r} has other contents than its name says")
        for item in manifest.files:
            if not item.link_to and blobs.get(item.digest) != item.size_bytes:
                raise ValueError(f"the file {item.path[:80]!r} of the recipe is not in it")


def _members(file: BinaryIO, where: Path, contents: Contents, whole: int) -> tuple[dict[str, int], dict[str, bytes]]:
    offsets: dict[str, int] = {}
    texts: dict[str, bytes] = {}
    for member in contents.members:
        name, size = _next(file, where)
        if (name, size) != (member.name, member.size_bytes):
            raise InvalidInput(f"{where}: {name[:80]!r} stands where {member.name!r} should", hint=_WRITE_AGAIN)
        offsets[name] = file.tell()
        if name in TEXT_MEMBERS:
            if size > MAX_TEXT_BYTES:
                raise TooLarge(f"{where}: {name} is {size} bytes long; at most {MAX_TEXT_BYTES} are allowed")
            texts[name] = _exactly(file, size, where)
            if hashlib.sha256(texts[name]).hexdigest() != member.sha256:
                raise DigestMismatch(f"{where}: {name} has other contents than its SHA-256 says", hint=_WRITE_AGAIN)
        if offsets[name] + size > whole:
            raise InvalidInput(f"{where} ends in the middle of {name}", hint="copy it again: it is not all there")
        file.seek(offsets[name] + size + len(padding(size)))
    if _exactly(file, _BLOCK, where) != b"\0" * _BLOCK:
        raise InvalidInput(f"{where}: there is more in it than {CONTENTS_FILE} names", hint=_WRITE_AGAIN)
    return offsets, texts


def _next(file: BinaryIO, where: Path) -> tuple[str, int]:
    """Name and size of the member that begins here. Plain files only: no links, folders, devices or long names."""
    block = _exactly(file, _BLOCK, where)
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise InvalidInput(
            f"{where} is not an image that Diamond exported", hint="an export is a tar file", field="FILE"
        ) from error
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.linkname or info.size < 0:
        raise InvalidInput(f"{where}: {info.name[:80]!r} is not a plain file", hint=_WRITE_AGAIN)
    return info.name, info.size


def _exactly(file: BinaryIO, size: int, where: Path) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise InvalidInput(f"{where} ends too early", hint="copy it again: it is not all there", field="FILE")
    return data


def _json(data: bytes, name: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} is not JSON", hint=_WRITE_AGAIN) from error


def hash_of(file: BinaryIO, size: int, tell: Callable[[int], None]) -> str:
    hasher = hashlib.sha256()
    done = 0
    while done < size and (chunk := file.read(min(_CHUNK, size - done))):
        hasher.update(chunk)
        done += len(chunk)
        tell(done)
    return hasher.hexdigest()


def members_of(texts: Mapping[str, bytes], blobs: Mapping[str, int], payload: Member) -> tuple[Member, ...]:
    """All members in their order: texts, the recipe's files (size by digest), the payload."""
    found: Sequence[Member] = [text_member(name, texts[name]) for name in TEXT_MEMBERS if name in texts]
    return (*found, *(blob_member(digest, size) for digest, size in sorted(blobs.items())), payload)
