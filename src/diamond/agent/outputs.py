"""What a job leaves behind: finds the files its `outputs` patterns name, and brings them to the server.

Only files inside the job's work directory; links that lead out of it are refused with a note. Must not change the
run directory, nor decide what the job's result is.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from diamond.agent.link import Backoff, Link
from diamond.core.bundles import check_relative_path
from diamond.core.errors import DiamondError, InvalidInput, Unauthenticated
from diamond.core.tasks import Output

MAX_OUTPUTS = 10_000
_PIECE_BYTES = 4 * 1024 * 1024
_PACK_BYTES = 4 * 1024 * 1024
_SMALL_BYTES = 256 * 1024
_ASK_AT_ONCE = 1000
_MAGIC = re.compile(r"[*?\[]")
_MAX_NOTES = 5


class OutputsStopped(Exception):
    """The agent stops; the outputs are collected at its next start."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Files to keep, by their path below work/, and what is to be said about the rest."""

    files: dict[str, Path]
    notes: tuple[str, ...] = ()


def find(work: Path, patterns: tuple[str, ...]) -> Found:
    """Resolve `outputs` patterns. A pattern that names a folder means everything in it; ``**`` crosses folders."""
    root = Path(os.path.realpath(work))
    files: dict[str, Path] = {}
    notes: list[str] = []
    for raw in patterns:
        try:
            pattern = check_relative_path(raw, "output")
        except InvalidInput as error:
            notes.append(error.message)
            continue
        before = len(files)
        refused = 0
        for relative in _matches(root, pattern):
            real = Path(os.path.realpath(root / relative))
            if root not in (real, *real.parents):
                refused += 1
            elif _is_file(real):
                files.setdefault(relative, real)
            if len(files) > MAX_OUTPUTS:
                notes.append(f"more than {MAX_OUTPUTS} output files; the rest are left on the endpoint")
                return Found(files=files, notes=tuple(notes))
        if refused:
            notes.append(f"output {pattern!r}: {refused} left out, being links that lead out of the work directory")
        elif len(files) == before and not any(_covers(pattern, path) for path in files):
            notes.append(f"output {pattern!r} matches no file")
    shown = notes[:_MAX_NOTES] + [f"and {len(notes) - _MAX_NOTES} more"] * (len(notes) > _MAX_NOTES)
    return Found(files=dict(sorted(files.items())), notes=tuple(shown))


def _covers(pattern: str, path: str) -> bool:
    return bool(_translate(pattern).match(path)) or path.startswith(pattern + "/")


def _matches(root: Path, pattern: str) -> Iterator[str]:
    if not _MAGIC.search(pattern):
        start = root / pattern
        if start.is_dir():
            real = Path(os.path.realpath(start))
            inside = root in (real, *real.parents)
            yield from _below(start, pattern) if inside else [pattern]
        elif start.exists() or start.is_symlink():
            yield pattern
        return
    wanted = _translate(pattern)
    for folder, folders, names in os.walk(root):  # does not follow links: one to / would list the whole machine
        here = os.path.relpath(folder, root)
        for name in sorted(folders + names):
            path = name if here == "." else f"{here}/{name}"
            if wanted.fullmatch(path):
                full = root / path
                if full.is_dir() and not full.is_symlink():
                    yield from _below(full, path)
                else:
                    yield path


def _below(folder: Path, prefix: str) -> Iterator[str]:
    for here, folders, names in os.walk(folder):
        folders.sort()
        inner = os.path.relpath(here, folder)
        for name in sorted(names + [one for one in folders if os.path.islink(os.path.join(here, one))]):
            yield f"{prefix}/{name}" if inner == "." else f"{prefix}/{inner}/{name}"


def _translate(pattern: str) -> re.Pattern[str]:
    """A shell pattern in which ``*`` stays within a folder and ``**`` does not."""
    text = ""
    for part in pattern.split("/"):
        if part == "**":
            text += "(?:[^/]+/)*"
        else:
            inner = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
            text += inner.replace(".*", "[^/]*") + "/"
    text = text.removesuffix("/") if not pattern.endswith("**") else text.removesuffix("(?:[^/]+/)*") + ".+"
    return re.compile(text, re.DOTALL)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


class Collector:
    """Brings outputs to the server. Thread-safe."""

    def __init__(self, *, link: Link, stop: threading.Event) -> None:
        self._link = link
        self._stop = stop

    def collect(self, work: Path, patterns: tuple[str, ...], max_bytes: int) -> tuple[tuple[Output, ...], str]:
        """The outputs, uploaded as far as `max_bytes` reach, and notes for the job's detail.

        Waits for a server that is away. Files that were uploaded before are not sent again.

        Raises:
            OutputsStopped: the agent stops.
        """
        found = find(work, patterns)
        notes = list(found.notes)
        outputs: list[Output] = []
        left = max_bytes
        for path, real in found.files.items():
            try:
                size, digest = self._hash(real, left)
            except OSError as error:
                notes.append(f"output {path!r}: {error.strerror}")
                continue
            outputs.append(Output(path=path, size_bytes=size, sha256=digest))
            if digest:
                left -= size
        too_large = [output for output in outputs if not output.sha256]
        if too_large:
            notes.append(
                f"{len(too_large)} output files stay on the endpoint: policy.toml: "
                f"max_output_bytes = {max_bytes} was reached"
            )
        stored = self._upload({output.sha256: found.files[output.path] for output in outputs if output.sha256})
        if stored is None:
            raise OutputsStopped
        lost = sum(bool(output.sha256) and output.sha256 not in stored for output in outputs)
        if lost:
            notes.append(f"{lost} output files changed while they were read, or were refused by the server")
        return tuple(replace(output, stored=output.sha256 in stored) for output in outputs), "; ".join(notes)

    def _hash(self, path: Path, left: int) -> tuple[int, str]:
        with _open(path) as fd:
            size = os.fstat(fd).st_size
            if size > left:
                return size, ""
            digest = hashlib.sha256()
            offset = 0
            while piece := os.pread(fd, _PIECE_BYTES, offset):
                digest.update(piece)
                offset += len(piece)
                if self._stop.is_set():
                    raise OutputsStopped
            return offset, digest.hexdigest()

    def _upload(self, files: dict[str, Path]) -> set[str] | None:
        """The digests the server now has; None when the agent stops first."""
        stored: set[str] = set()
        names = list(files)
        for start in range(0, len(names), _ASK_AT_ONCE):
            batch = names[start : start + _ASK_AT_ONCE]
            received = self._patiently(lambda batch=batch: self._missing(batch))  # type: ignore[misc]
            if received is None:
                return None
            stored |= set(batch) - set(received)
            pack: list[tuple[str, bytes]] = []
            for hexdigest, have in received.items():
                data = _small(files[hexdigest])
                if data is not None:
                    pack.append((hexdigest, data))
                    if sum(len(one) for _, one in pack) < _PACK_BYTES:
                        continue
                elif not self._put(hexdigest, files[hexdigest], have, stored):
                    return None
                if not self._send_pack(pack, stored):
                    return None
                pack = []
            if not self._send_pack(pack, stored):
                return None
        return stored

    def _missing(self, hexdigests: list[str]) -> dict[str, int]:
        answer = self._link.call("POST", "/blobs/missing", {"digests": [f"sha256:{one}" for one in hexdigests]})
        return {str(one["digest"]).removeprefix("sha256:"): int(one["received"]) for one in answer["missing"]}

    def _put(self, hexdigest: str, path: Path, have: int, stored: set[str]) -> bool:
        try:
            with _open(path) as fd:
                total = os.fstat(fd).st_size
                while True:
                    piece = os.pread(fd, _PIECE_BYTES, have)
                    query = {"offset": have, "total": total}
                    answer = self._patiently(
                        lambda piece=piece, query=query: self._link.send_bytes(  # type: ignore[misc]
                            "PUT", f"/blobs/sha256:{hexdigest}", piece, query=query
                        )
                    )
                    if answer is None:
                        return False
                    if answer.get("complete"):
                        stored.add(hexdigest)
                        return True
                    now = int(answer["received"])
                    if not piece and now >= have:
                        return True  # the file is at its end and the server still not content: it changed
                    have = now
        except OSError:
            return True
        except _Refused:
            return True

    def _send_pack(self, pack: list[tuple[str, bytes]], stored: set[str]) -> bool:
        if not pack:
            return True
        # A file that changed since it was hashed would spoil the whole pack.
        good = [(name, data) for name, data in pack if hashlib.sha256(data).hexdigest() == name]
        body = b"".join(name.encode() + len(data).to_bytes(8, "big") + data for name, data in good)
        try:
            if self._patiently(lambda: self._link.send_bytes("POST", "/blobs/pack", body)) is None:
                return False
        except _Refused:
            return True
        stored |= {name for name, _ in good}
        return True

    def _patiently(self, action: Callable[[], dict[str, int]]) -> dict[str, int] | None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                return action()
            except DiamondError as error:
                if not error.transient and not isinstance(error, Unauthenticated):
                    raise _Refused(str(error)) from error
                self._stop.wait(backoff.next_s())
        return None


class _Refused(Exception):
    """The server will never take this one."""


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _small(path: Path) -> bytes | None:
    try:
        with _open(path) as fd:
            return os.pread(fd, _SMALL_BYTES + 1, 0) if os.fstat(fd).st_size <= _SMALL_BYTES else None
    except OSError:
        return b""
