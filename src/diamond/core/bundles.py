"""Bundles: a folder (or file) as a content-addressed manifest, and the rules its paths must obey.

A manifest lists every file with its digest, so a file that did not change is never sent again, whoever
sent it first. Client, server and agent all check the paths: a manifest that could write outside its target
is refused by each of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from diamond.core.codec import encode
from diamond.core.errors import InvalidInput, TooLarge

DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")
_REF_PREFIX = "bundle:"
MAX_FILES = 100_000
MAX_PATH_BYTES = 4096
MAX_COMPONENT_BYTES = 255


@dataclass(frozen=True, kw_only=True)
class BundleFile:
    """One entry: a regular file, or a symbolic link that stays inside the bundle."""

    path: str
    size_bytes: int = 0
    digest: str = ""  # sha256:…; empty for a link
    executable: bool = False
    link_to: str = ""  # relative target; empty for a regular file


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a bundle, sorted by path. A single file is a bundle with `is_file` and one entry."""

    files: tuple[BundleFile, ...]
    is_file: bool = False

    def canonical(self) -> bytes:
        """The bytes the digest is taken of: the same for the same contents, on any machine."""
        return json.dumps(encode(self), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.canonical()).hexdigest()

    @property
    def ref(self) -> str:
        return _REF_PREFIX + self.digest

    @property
    def total_bytes(self) -> int:
        return sum(item.size_bytes for item in self.files)


def is_bundle_ref(text: str) -> bool:
    return text.startswith(_REF_PREFIX) and is_digest(text.removeprefix(_REF_PREFIX))


def digest_of_ref(ref: str) -> str:
    assert is_bundle_ref(ref), ref
    return ref.removeprefix(_REF_PREFIX)


def is_digest(text: str) -> bool:
    return bool(DIGEST_PATTERN.fullmatch(text))


def check_relative_path(raw: object, what: str) -> str:
    """A path that stays below the directory it is taken from, in normal form.

    Raises:
        InvalidInput: for absolute paths, ``..``, ``~``, control characters and names no file system takes.
    """
    shown = repr(str(raw)[:80])
    if not isinstance(raw, str) or not raw.strip():
        raise InvalidInput(f"{what} must be a relative path, not {shown}")
    if any(ord(c) < 32 or ord(c) == 127 for c in raw):
        raise InvalidInput(f"{what} {shown} contains control characters", hint="rename the file")
    if raw.startswith(("/", "~", "\\")):
        raise InvalidInput(
            f"{what} {shown} must be relative to the work directory",
            hint="Diamond never writes outside a task's own directory; write e.g. data/ instead of /data",
        )
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidInput(f"{what} {shown} must not contain '..'", hint="give a path below the work directory")
    if not parts:
        raise InvalidInput(f"{what} {shown} names no file")
    path = "/".join(parts)
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} {shown} is not valid Unicode", hint="rename the file") from error
    if len(encoded) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_COMPONENT_BYTES for part in parts):
        raise TooLarge(f"{what} {shown} is too long for a file system")
    return path


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest that could write or point outside the directory it is unpacked into.

    Raises:
        InvalidInput: naming the entry.
    """
    if len(manifest.files) > MAX_FILES:
        raise TooLarge(
            f"a bundle of {len(manifest.files)} files; at most {MAX_FILES} are allowed",
            hint="list data folders in .diamondignore, or pack them into one archive",
            field="files",
        )
    if manifest.is_file and (len(manifest.files) != 1 or manifest.files[0].link_to):
        raise InvalidInput("a single-file bundle has exactly one regular file", field="files")
    previous = ""
    names: set[str] = set()
    for number, item in enumerate(manifest.files):
        where = f"files[{number}]"
        if check_relative_path(item.path, "path") != item.path:
            raise InvalidInput(f"path {item.path[:80]!r} is not in normal form", field=where)
        if item.path <= previous:
            raise InvalidInput("paths must be sorted and unique", field=where)
        previous = item.path
        names.add(item.path)
        _check_entry(item, where)
    for number, item in enumerate(manifest.files):
        parents = _parents(item.path)
        if any(parent in names for parent in parents):
            # A file below a link would be written through it; a file below a file cannot exist.
            raise InvalidInput(f"path {item.path[:80]!r} lies below another entry", field=f"files[{number}]")


def _check_entry(item: BundleFile, where: str) -> None:
    if item.link_to:
        if item.digest or item.size_bytes:
            raise InvalidInput("a link has neither digest nor size", field=where)
        check_link(item.path, item.link_to, where)
    elif not is_digest(item.digest):
        raise InvalidInput(f"digest {item.digest[:80]!r} is not sha256:<64 hex digits>", field=where)
    elif not 0 <= item.size_bytes < 2**50:
        raise InvalidInput(f"size_bytes {item.size_bytes} is impossible", field=where)


def check_link(path: str, target: str, where: str) -> None:
    """A link may point only to something inside its own bundle."""
    depth = path.count("/")
    problem = target.startswith("/") or "\x00" in target or len(target) > MAX_PATH_BYTES
    named = False
    for part in target.split("/"):
        depth += -1 if part == ".." else (0 if part in ("", ".") else 1)
        # ".." after a name may climb out of wherever a *link* of that name leads.
        problem = problem or depth < 0 or (named and part == "..")
        named = named or part not in ("", ".", "..")
    if problem:
        raise InvalidInput(
            f"symbolic link {path[:80]!r} points outside the folder ({target[:80]!r})",
            hint="copy the file into the folder, or list the link in .diamondignore",
            field=where,
        )


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]
