"""Append-only byte streams of jobs (log, metrics, util, train), kept as segment files.

Owns everything under its root: ``<job_id[-2:]>/<job_id>/<stream>/<start offset, 16 digits>.seg``. What is held is
read off the file names and file sizes alone, so no index can disagree with the bytes. Must not know the database,
HTTP, or what the bytes mean, and never waits for the disk (no fsync): the endpoint keeps the complete file and
resends whatever a power failure took.

Writers hold a flock on one lock file per job, which excludes threads and processes alike and dies with its holder.
Readers take no lock, except where a hole must be told apart from a directory that changed while it was listed.

Which segment is the newest is remembered, and believed while that segment is there and has room: another follows only
one that is full. So a directory is listed once, not for every few bytes that an agent sends or a page asks for.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from diamond.core.ids import ID_PATTERN
from diamond.core.wire import STREAMS
from diamond.server.store.files import bytes_in, locked, storage_full, write_all

MIB = 1024 * 1024
LOCK_NAME = ".lock"
_SUFFIX = ".seg"
_SQUEEZED = "!squeezed"  # sorts before every segment
_MAX_REMEMBERED = 20_000


def job_folder(root: str, job_id: str) -> str:
    """The folder of one job below `root`, which no job id can leave."""
    if not ID_PATTERN.fullmatch(job_id):
        raise ValueError(f"not a job id: {job_id!r}")
    return f"{root}/{job_id[-2:]}/{job_id}"


def check_stream(stream: str) -> str:
    if stream not in STREAMS:
        raise ValueError(f"not a stream: {stream!r}; there are {', '.join(STREAMS)}")
    return stream


@dataclass(frozen=True, slots=True)
class Slice:
    """Some bytes of a stream.

    Attributes:
        data: the bytes; in a log, a marker line stands where bytes were dropped. Markers are not counted in offsets.
        next_offset: where the next read goes on.
        dropped: how many bytes between `offset` and `next_offset` are no longer held.
        offset: where this slice begins.
    """

    data: bytes
    next_offset: int
    dropped: int
    offset: int


class StreamStore:
    """Byte streams addressed by absolute offsets. Safe for any number of threads and processes.

    Every append is idempotent, and a process killed at any instruction leaves a prefix of what it was appending.
    `log` is capped, and so is `train`, of which the newest counts. Of the other two, curves are made: whoever makes
    them drops the lines that are no longer needed for it (`drop`). All that use one root must agree on `segment_bytes`
    while they do.
    """

    def __init__(self, root: Path, *, segment_bytes: int = 8 * MIB, cap_bytes: int = 256 * MIB) -> None:
        if segment_bytes < 1 or cap_bytes < 2 * segment_bytes:
            raise ValueError("the cap must hold at least two segments: the first and the newest are always kept")
        self._root = str(root)
        self._segment_bytes = segment_bytes
        self._cap_bytes = {"log": cap_bytes, "train": 3 * segment_bytes}
        # Smaller ones where the oldest are dropped all the time.
        self._smaller = {stream: min(segment_bytes, MIB) for stream in ("metrics", "util")}
        self._newest: dict[str, int] = {}  # by folder: where its newest segment starts

    def append(self, job_id: str, stream: str, offset: int, data: bytes) -> int:
        """Store `data`, which begins at `offset` of the stream; returns how many bytes the stream now spans.

        Bytes already held are ignored. Beyond the end nothing is stored: the sender resumes from the answer.

        Raises:
            StorageFull: nothing of `data` was kept; the same call succeeds once there is space.
        """
        if offset < 0:
            raise ValueError(f"negative offset: {offset}")
        job = job_folder(self._root, job_id)
        folder = f"{job}/{check_stream(stream)}"
        # A gap at a job without a folder must not create one: agents go on sending for deleted jobs.
        create = offset == 0 and len(data) > 0
        with (
            storage_full(f"the {stream} of {job_id}"),
            locked(f"{job}/{LOCK_NAME}", create=create) as held,
        ):
            if held and (added := self._append_to_newest(folder, stream, offset, data)) is not None:
                return added
            starts = _starts(folder)
            size = _end(folder, starts)
            if not held or offset > size or offset + len(data) <= size:
                return size
            if not starts:
                with suppress(FileExistsError):
                    os.mkdir(folder)
            size = self._extend(folder, starts, size, memoryview(data)[size - offset :], self._segment_of(stream))
            if size > (cap := self._cap_bytes.get(stream, size)):
                _enforce_cap(folder, starts, size, cap)
            self._remember(folder, starts[-1])
            return size

    def _append_to_newest(self, folder: str, stream: str, offset: int, data: bytes) -> int | None:
        """`append` where the newest segment is known and has room for it all; None where that is not so."""
        start = self._newest.get(folder)
        if start is None:
            return None
        try:
            fd = os.open(_segment(folder, start), os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return None  # deleted
        try:
            held = os.fstat(fd).st_size
            size, end = start + held, offset + len(data)
            if held >= (segment_bytes := self._segment_of(stream)):
                return None
            if offset > size or end <= size:
                return size
            if end > start + segment_bytes or end > self._cap_bytes.get(stream, end):
                return None
            try:
                write_all(fd, memoryview(data)[size - offset :])
            except OSError:
                os.ftruncate(fd, held)
                raise
            return end
        finally:
            os.close(fd)

    def _segment_of(self, stream: str) -> int:
        return self._smaller.get(stream, self._segment_bytes)

    def _segment_in(self, folder: str) -> int:
        return self._segment_of(folder.rpartition("/")[2])

    def _remember(self, folder: str, start: int) -> None:
        if len(self._newest) >= _MAX_REMEMBERED:
            self._newest.clear()
        self._newest[folder] = start

    def size(self, job_id: str, stream: str) -> int:
        """The offset one past the last byte, dropped bytes included; 0 for what was never written."""
        return self._size(f"{job_folder(self._root, job_id)}/{check_stream(stream)}")

    def sizes(self, job_ids: Iterable[str]) -> dict[str, dict[str, int]]:
        """`size` of every stream of many jobs."""
        answer = {}
        for job_id in job_ids:
            job = job_folder(self._root, job_id)
            answer[job_id] = {stream: self._size(f"{job}/{stream}") for stream in STREAMS}
        return answer

    def _size(self, folder: str) -> int:
        if (start := self._newest.get(folder)) is not None:
            with suppress(FileNotFoundError):
                if (held := os.stat(_segment(folder, start)).st_size) < self._segment_in(folder):
                    return start + held
        while True:
            try:
                # Names sort like their offsets; every agent that connects asks for all its jobs, so only one is parsed.
                newest = max(name for name in os.listdir(folder) if name.endswith(_SUFFIX))
            except (FileNotFoundError, ValueError):
                return 0
            start = int(newest[: -len(_SUFFIX)])
            try:
                held = os.stat(f"{folder}/{newest}").st_size
            except FileNotFoundError:
                continue  # dropped or deleted after it was listed: list again
            self._remember(folder, start)
            return start + held

    def gap(self, job_id: str, stream: str) -> tuple[int, int] | None:
        """Where the first hole begins and ends. It grows as a capped log does: what was learnt of it may be old."""
        folder = f"{job_folder(self._root, job_id)}/{check_stream(stream)}"
        while True:
            try:
                starts = _starts(folder)
                for start, following in pairwise(starts):
                    end = start + os.stat(_segment(folder, start)).st_size
                    if end != following:
                        return end, following
                return None
            except FileNotFoundError:
                continue  # dropped or deleted after it was listed: list again

    def read(self, job_id: str, stream: str, offset: int, limit: int) -> Slice:
        """At most `limit` bytes from `offset` on.

        A read ends where a hole begins. One that starts inside a hole goes on behind it, says in `dropped` how many
        bytes it skipped and, in a log, begins with the marker, which comes on top of `limit`. Going on from
        `next_offset`, a reader meets each hole once.
        """
        if offset < 0 or limit < 0:
            raise ValueError(f"negative offset or limit: {offset}, {limit}")
        job = job_folder(self._root, job_id)
        folder = f"{job}/{check_stream(stream)}"
        if (quick := self._read_newest(folder, offset, limit)) is not None:
            return quick
        while True:
            try:
                found = self._read(folder, stream, offset, limit, trust_holes=False)
                if found is None:
                    # Segments added while a directory is listed may be missed, which looks like a hole. Under the
                    # lock the listing is exact.
                    with locked(f"{job}/{LOCK_NAME}", create=False):
                        found = self._read(folder, stream, offset, limit, trust_holes=True)
                if found is not None:
                    return found
            except FileNotFoundError:
                continue  # dropped or deleted after it was listed: list again

    def _read_newest(self, folder: str, offset: int, limit: int) -> Slice | None:
        """`read` of what lies in the newest segment, where that is known; None where it is not."""
        start = self._newest.get(folder)
        if start is None or offset < start:
            return None
        try:
            fd = os.open(_segment(folder, start), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            held = os.fstat(fd).st_size
            if held >= self._segment_in(folder):
                return None
            data = os.pread(fd, min(limit, held - (offset - start)), offset - start) if offset < start + held else b""
            return Slice(data, offset + len(data), 0, offset)
        finally:
            os.close(fd)

    def read_tail(self, job_id: str, stream: str, max_bytes: int) -> Slice:
        """The last `max_bytes` of the stream, markers of the holes among them on top."""
        if max_bytes < 0:
            raise ValueError(f"negative size: {max_bytes}")
        end = self.size(job_id, stream)
        start = position = max(0, end - max_bytes)
        pieces = []
        dropped = 0
        while position < end:
            piece = self.read(job_id, stream, position, end - position)
            if piece.next_offset == position:
                break  # deleted meanwhile
            pieces.append(piece.data)
            dropped += piece.dropped
            position = piece.next_offset
        return Slice(b"".join(pieces), position, dropped, start)

    def held_bytes(self, job_id: str, stream: str | None = None) -> int:
        """What is held on disk, of one stream or of all: without what was dropped."""
        job = job_folder(self._root, job_id)
        return bytes_in(job if stream is None else f"{job}/{check_stream(stream)}")

    def drop(self, job_id: str, stream: str, *, before: int, leave_bytes: int) -> None:
        """Let go of the oldest bytes before an offset, as long as more than `leave_bytes` are held. Offsets stay.

        Only whole segments go, and never the newest. Ascending, so that there is no hole among what is held.
        """
        job = job_folder(self._root, job_id)
        folder = f"{job}/{check_stream(stream)}"
        with locked(f"{job}/{LOCK_NAME}", create=False) as held:
            starts = _starts(folder) if held else []
            end = _end(folder, starts)
            while len(starts) > 1 and starts[1] <= before and end - starts[0] > leave_bytes:
                os.unlink(_segment(folder, starts.pop(0)))

    def squeeze(self, job_id: str) -> None:
        """Keep no more of a job's log than its first and its newest segment, and of its measures the newest.

        Who reads the log is told that a storage quota is why.
        """
        job = job_folder(self._root, job_id)
        with locked(f"{job}/{LOCK_NAME}", create=False) as held:
            if not held:
                return
            for stream, kept in (("log", 1), ("train", 0)):
                folder = f"{job}/{stream}"
                starts = _starts(folder)
                if stream == "log" and len(starts) > 2:
                    with storage_full(f"the log of {job_id}"), open(f"{folder}/{_SQUEEZED}", "wb"):
                        pass
                for start in starts[kept:-1]:
                    os.unlink(_segment(folder, start))

    def delete(self, job_id: str) -> bool:
        """Remove all streams of a job; whether there were any. Idempotent; works on a full disk; one that was
        interrupted is repeated."""
        job = job_folder(self._root, job_id)
        with locked(f"{job}/{LOCK_NAME}", create=False) as held:
            if not held:
                return False
            for stream in STREAMS:
                folder = f"{job}/{stream}"
                # Newest first: a reader beside this sees a stream that gets shorter, not one with holes.
                for start in reversed(_starts(folder)):
                    os.unlink(_segment(folder, start))
                with suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{_SQUEEZED}")
                with suppress(FileNotFoundError):
                    os.rmdir(folder)
            os.unlink(f"{job}/{LOCK_NAME}")
            # An append that came in since has its own lock file there by now, and keeps the folder.
            with suppress(OSError):
                os.rmdir(job)
        return True

    def _extend(self, folder: str, starts: list[int], size: int, data: memoryview, segment_bytes: int) -> int:
        """Write `data` at the end, adding new segments to `starts`; on an error, leave everything as it was."""
        old_size, old_segments = size, len(starts)
        try:
            while data:
                if not starts or size - starts[-1] >= segment_bytes:
                    starts.append(size)
                piece = data[: segment_bytes - (size - starts[-1])]
                fd = os.open(_segment(folder, starts[-1]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    write_all(fd, piece)
                finally:
                    os.close(fd)
                size += len(piece)
                data = data[len(piece) :]
        except OSError:
            for start in reversed(starts[old_segments:]):
                with suppress(FileNotFoundError):
                    os.unlink(_segment(folder, start))
            if old_segments:
                os.truncate(_segment(folder, starts[old_segments - 1]), old_size - starts[old_segments - 1])
            raise
        return size

    def _read(self, folder: str, stream: str, offset: int, limit: int, *, trust_holes: bool) -> Slice | None:
        """One attempt; None where a hole was met that may not be one."""
        starts = _starts(folder)
        index = bisect_right(starts, offset) - 1
        position = offset
        pieces = []
        if index < 0 or offset >= starts[index] + os.stat(_segment(folder, starts[index])).st_size:
            index += 1
            if index == len(starts) or limit == 0:
                return Slice(b"", offset, 0, offset)
            if not trust_holes:
                return None
            position = starts[index]
            if stream == "log":
                is_squeezed = os.path.exists(f"{folder}/{_SQUEEZED}")
                pieces.append(self._marker(position - offset, starts[-1], is_squeezed=is_squeezed))
        dropped = position - offset
        while limit > 0:
            piece = _read_segment(_segment(folder, starts[index]), position - starts[index], limit)
            pieces.append(piece)
            position += len(piece)
            limit -= len(piece)
            index += 1
            if index == len(starts) or starts[index] != position:
                break
        return Slice(b"".join(pieces), position, dropped, offset)

    def _marker(self, dropped: int, newest_start: int, *, is_squeezed: bool = False) -> bytes:
        # Below the cap only a machine that lost power can have left a hole.
        cap = self._cap_bytes["log"]
        passed = newest_start + self._segment_bytes > cap
        why = f"this log passed the {_human(cap)} cap" if passed else "the server's machine went down"
        if is_squeezed:
            why = "the storage quota of its owner or project is used up (`diamond quota`)"
        return (
            f"\n[diamond: {_human(dropped, '.1f')} of log were dropped here: {why}. "
            "The complete file is in the job's run directory on the endpoint.]\n"
        ).encode()


def _enforce_cap(folder: str, starts: list[int], size: int, cap_bytes: int) -> None:
    """Drop the oldest segments but the first, where set-up errors are. Ascending, so there is one hole at most."""
    while len(starts) > 2:
        held = os.stat(_segment(folder, starts[0])).st_size + size - starts[1]
        if held <= cap_bytes:
            return
        os.unlink(_segment(folder, starts.pop(1)))


def _segment(folder: str, start: int) -> str:
    return f"{folder}/{start:016d}{_SUFFIX}"


def _starts(folder: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name[: -len(_SUFFIX)]) for name in names if name.endswith(_SUFFIX))


def _end(folder: str, starts: list[int]) -> int:
    return starts[-1] + os.stat(_segment(folder, starts[-1])).st_size if starts else 0


def _read_segment(path: str, offset: int, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        # Not `limit` at once: a caller may ask for "everything", and pread allocates what it is asked for.
        return os.pread(fd, min(limit, max(0, os.fstat(fd).st_size - offset)), offset)
    finally:
        os.close(fd)


def _human(count: int, digits: str = ".4g") -> str:
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:{digits}} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
