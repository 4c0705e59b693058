"""A folder on this machine as a bundle manifest: which files belong to it, and what their digests are.

Owns ignore rules, the refusal of what cannot travel (sockets, links that lead out, names that are not text) and the
cache of digests. Must not talk to the server: `diamond.sdk.bundles` does.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diamond.core.bundles import MAX_FILES, BundleFile, Manifest, check_link, check_manifest, check_relative_path
from diamond.core.errors import Conflict, DiamondError, InvalidInput, TooLarge
from diamond.core.home import Home
from diamond.core.rundir import write_atomic

if TYPE_CHECKING:
    import pathspec

MAX_TOTAL_BYTES = 10 * 1024**3
IGNORE_FILES = (".diamondignore", ".gitignore")  # in order of weight
# Rebuilt at every import with times inside, so they would make an unchanged folder look new.
DEFAULT_IGNORES = ("__pycache__/",)
MAX_IGNORE_BYTES = 1024 * 1024
Progress = Callable[[int, int, int], None]
_CHUNK = 1024 * 1024
_CACHE_FROM_BYTES = 64 * 1024
_CACHE_ENTRIES = 50_000
# A file written just now may be written again within the same tick of its clock (git's "racily clean").
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """One file as it was found: where, and by what to tell that it has changed since."""

    path: str  # inside the bundle
    source: str  # absolute, on this machine
    size_bytes: int
    mtime_ns: int
    inode: int
    executable: bool
    link_to: str = ""
    offset: int = 0  # of something inside a larger file: where it begins
    whole_bytes: int = 0  # … and the size of that file


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A manifest together with where its bytes lie on this machine."""

    root: str
    manifest: Manifest
    sources: dict[str, LocalFile]  # by digest


def scan(path: str | os.PathLike[str], *, progress: Progress | None = None, home: Home | None = None) -> Scan:
    """Read a folder (or a single file) into a manifest.

    The same contents give the same manifest on any machine. ``.gitignore`` and ``.diamondignore`` are honoured in
    every folder; where they disagree ``.diamondignore`` wins. ``.git`` is never taken. Empty folders are not kept.

    Args:
        path: folder or file; a link to one is followed.
        progress: called with (bytes read, bytes in all, files read).
        home: where digests of large files are remembered; None: Diamond's home.

    Raises:
        InvalidInput: naming the file that cannot be taken, and why.
        TooLarge: more than 10 GiB or 100,000 files; names the largest folders.
        Conflict: a file changed while it was read.
    """
    root = os.path.realpath(os.path.expanduser(os.fspath(path)))
    try:
        found = os.stat(root)
    except OSError as error:
        raise InvalidInput(
            f"{os.fspath(path)}: {error.strerror}", hint="give the path of a file or folder on this machine"
        ) from error
    is_file = stat.S_ISREG(found.st_mode)
    if not is_file and not stat.S_ISDIR(found.st_mode):
        raise InvalidInput(f"{root} is {_kind(found.st_mode)}", hint="only files and folders can be sent")
    files = [_local(os.path.basename(root), root, found)] if is_file else sorted(_walk(root), key=lambda f: f.path)
    _guard(files, root)
    cache = HashCache((home or Home.find()).path / "cache" / "hashes.json")
    total = sum(item.size_bytes for item in files)
    done = 0
    entries: list[BundleFile] = []
    sources: dict[str, LocalFile] = {}
    for number, item in enumerate(files):
        if item.link_to:
            entries.append(BundleFile(path=item.path, link_to=item.link_to))
            continue
        digest = cache.get(item)
        if digest is None:
            digest = _hash(item, partial(_tell, progress, done, total, number))
            cache.put(item, digest)
        done += item.size_bytes
        sources.setdefault(digest, item)
        entries.append(
            BundleFile(path=item.path, size_bytes=item.size_bytes, digest=digest, executable=item.executable)
        )
        if progress:
            progress(done, total, number + 1)
    cache.save()
    manifest = Manifest(files=tuple(entries), is_file=is_file)
    check_manifest(manifest)
    return Scan(root=root, manifest=manifest, sources=sources)


def _tell(progress: Progress | None, before: int, total: int, files: int, here: int) -> None:
    if progress:
        progress(before + here, total, files)


def open_unchanged(item: LocalFile) -> int:
    """A descriptor to read `item` from, after checking that it is still what was hashed.

    Raises:
        Conflict: it changed, or is gone.
    """
    try:
        fd = os.open(item.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _changed(item) from error
    except OSError as error:
        raise InvalidInput(
            f"{item.source} cannot be read: {error.strerror}",
            hint="make it readable, or list it in .diamondignore",
        ) from error
    if not _same(os.fstat(fd), item):
        os.close(fd)
        raise _changed(item)
    return fd


def _walk(root: str) -> Iterator[LocalFile]:
    from pathspec import GitIgnoreSpec  # 8 ms that only sending files needs

    rules = [_Rules(base="", specs=[None, GitIgnoreSpec.from_lines(DEFAULT_IGNORES)])]
    folders: list[tuple[str, list[_Rules]]] = [("", rules)]
    while folders:
        inside, above = folders.pop()
        here = os.path.join(root, inside) if inside else root
        try:
            with os.scandir(here) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise InvalidInput(
                f"the folder {_shown(here)} cannot be read: {error.strerror}",
                hint="make it readable, or list it in .diamondignore",
            ) from error
        own = _Rules.of(here, inside, {entry.name for entry in children})
        active = [*above, own] if own else above
        for entry in children:
            path = f"{inside}/{entry.name}" if inside else entry.name
            if entry.name == ".git":
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if _ignored(active, path, is_folder):
                continue
            if is_folder:
                folders.append((path, active))
            else:
                yield _entry(root, path, entry)


def _entry(root: str, path: str, entry: os.DirEntry[str]) -> LocalFile:
    try:
        check_relative_path(path, "the file name")
        found = entry.stat(follow_symlinks=False)
    except InvalidInput as error:
        raise InvalidInput(
            f"{_shown(os.path.join(root, path))}: {error.message}",
            hint="rename the file, or list it in .diamondignore",
        ) from error
    except OSError as error:
        raise InvalidInput(f"{_shown(entry.path)} cannot be read: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        return LocalFile(
            path=path,
            source=entry.path,
            size_bytes=0,
            mtime_ns=found.st_mtime_ns,
            inode=found.st_ino,
            executable=False,
            link_to=_link_target(root, path),
        )
    if not stat.S_ISREG(found.st_mode):
        raise InvalidInput(
            f"{_shown(entry.path)} is {_kind(found.st_mode)}, which cannot be sent",
            hint="remove it, or list it in .diamondignore",
        )
    return _local(path, entry.path, found)


def _local(path: str, source: str, found: os.stat_result) -> LocalFile:
    return LocalFile(
        path=path,
        source=source,
        size_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        inode=found.st_ino,
        executable=bool(found.st_mode & stat.S_IXUSR),
    )


def _link_target(root: str, path: str) -> str:
    target = os.readlink(os.path.join(root, path))
    if os.path.isabs(target) and os.path.commonpath([root, os.path.normpath(target)]) == root:
        target = os.path.relpath(target, os.path.dirname(os.path.join(root, path)))
    try:
        target.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"symbolic link {path!r}: its target is not valid Unicode") from error
    check_link(path, target, "")
    return target


class _Rules:
    """The ignore files of one folder, each as a spec over paths relative to it."""

    def __init__(self, *, base: str, specs: list[pathspec.GitIgnoreSpec | None]) -> None:
        self.base = base
        self.specs = specs

    @staticmethod
    def of(here: str, inside: str, names: set[str]) -> _Rules | None:
        specs = [_read_spec(os.path.join(here, name)) if name in names else None for name in IGNORE_FILES]
        return _Rules(base=f"{inside}/" if inside else "", specs=specs) if any(specs) else None


def _read_spec(path: str) -> pathspec.GitIgnoreSpec | None:
    from pathspec import GitIgnoreSpec

    try:
        with open(path, "rb") as file:
            text = file.read(MAX_IGNORE_BYTES).decode("utf-8", errors="surrogateescape")
        return GitIgnoreSpec.from_lines(text.splitlines())
    except IsADirectoryError:
        return None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{path} has a line that is not a pattern: {error}") from error


def _ignored(rules: list[_Rules], path: str, is_folder: bool) -> bool:
    """The nearest file that says anything decides; any .diamondignore comes before every .gitignore."""
    for kind in range(len(IGNORE_FILES)):
        for rule in reversed(rules):
            spec = rule.specs[kind]
            if spec is None:
                continue
            verdict = spec.check_file(path.removeprefix(rule.base) + ("/" if is_folder else "")).include
            if verdict is not None:
                return verdict
    return False


def _hash(item: LocalFile, progress: Callable[[int], None]) -> str:
    fd = open_unchanged(item)
    hasher = hashlib.sha256()
    read = 0
    with os.fdopen(fd, "rb", buffering=0) as file:
        try:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
                read += len(chunk)
                progress(read)
        except OSError as error:
            raise InvalidInput(f"{item.source} cannot be read: {error.strerror}") from error
        if read != item.size_bytes or not _same(os.fstat(file.fileno()), item):
            raise _changed(item)
    return "sha256:" + hasher.hexdigest()


def _same(found: os.stat_result, item: LocalFile) -> bool:
    size = item.whole_bytes or item.size_bytes
    return (found.st_size, found.st_mtime_ns, found.st_ino) == (size, item.mtime_ns, item.inode)


def _changed(item: LocalFile) -> DiamondError:
    return Conflict(
        f"{item.source} changed while it was being read",
        hint="wait until nothing writes to it, or list it in .diamondignore",
    )


def _guard(files: list[LocalFile], root: str) -> None:
    total = sum(item.size_bytes for item in files)
    if total <= MAX_TOTAL_BYTES and len(files) <= MAX_FILES:
        return
    weights: Counter[str] = Counter()
    by_count = total <= MAX_TOTAL_BYTES
    for item in files:
        top = item.path.split("/")[0] + ("/" if "/" in item.path else "")
        weights[top] += 1 if by_count else item.size_bytes
    largest = ", ".join(
        f"{name} ({weight} files)" if by_count else f"{name} ({weight / 1024**3:.1f} GiB)"
        for name, weight in weights.most_common(5)
    )
    what = f"{len(files)} files" if by_count else f"{total / 1024**3:.1f} GiB"
    limit = f"{MAX_FILES} files" if by_count else f"{MAX_TOTAL_BYTES // 1024**3} GiB"
    raise TooLarge(
        f"{root} holds {what}; at most {limit} can be sent with a task. The largest parts: {largest}",
        hint="list data, environments and checkpoints in .diamondignore, or give a smaller workdir",
    )


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFSOCK: "a socket",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "not a regular file")


def _shown(path: str) -> str:
    return path if path.isprintable() else repr(path)


class HashCache:
    """Digests of large files that have not changed since. Losing it costs time only, so no failure is reported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            raw = json.loads(path.read_bytes())
            self._files: dict[str, list[object]] = dict(raw["files"]) if raw.get("version") == 1 else {}
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            self._files = {}

    def get(self, item: LocalFile) -> str | None:
        known = self._files.get(item.source)
        if not isinstance(known, list) or known[:3] != [item.size_bytes, item.mtime_ns, item.inode]:
            return None
        return str(known[3])

    def put(self, item: LocalFile, digest: str) -> None:
        if item.size_bytes < _CACHE_FROM_BYTES or time.time_ns() - item.mtime_ns < _SETTLED_NS:
            return
        self._files.pop(item.source, None)  # to the end: the oldest entries go first
        self._files[item.source] = [item.size_bytes, item.mtime_ns, item.inode, digest]
        self._changed = True

    def save(self) -> None:
        if not self._changed:
            return
        kept = dict(list(self._files.items())[-_CACHE_ENTRIES:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(self._path, json.dumps({"version": 1, "files": kept}).encode())
        except (OSError, ValueError):
            return


__all__ = ["HashCache", "LocalFile", "Progress", "Scan", "open_unchanged", "scan"]
