"""Metric curves of jobs: one file of (step, time, value) records per key, derived from the job's byte streams.

Owns everything under its root: ``<job_id[-2:]>/<job_id>/state.json`` and one ``<stream>-<hash of key>.f64`` per key.
The streams are the truth: whatever here is found damaged is rebuilt from them. Must not know the database or HTTP,
and must not import numpy before a curve is asked for.

Not every line is taken in when it comes: that is far more work than to keep it, and few curves are ever looked at.
Whoever looks has what has gathered taken in first, which is little, since what gathers is bounded (`gather`).

Ingesting writes records first and the state, which says how many of them count, last (by rename). Records beyond the
count are invisible and overwritten by the next ingest, so a process killed anywhere neither loses nor doubles a point.
Readers for whom there is nothing to take in take no lock: they read the state, then that many records.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import unicodedata
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diamond.core.errors import StorageFull
from diamond.server.store.curves import Curve, downsample
from diamond.server.store.files import locked, storage_full, write_all
from diamond.server.store.streams import LOCK_NAME, MIB, StreamStore, check_stream, job_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_KEYS = 512
MAX_KEY_CHARS = 200
SOURCES = ("metrics", "util")
_BATCH_BYTES = 4 * MIB  # also the longest line that is understood
_GATHERED_BYTES = 64 * 1024  # a few hundred lines: some milliseconds for the reader who meets them
_RECORD_BYTES = 24
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """One key of a job. `last_t` is NaN if the line carried no time; `last_value` may be NaN or infinite."""

    key: str
    stream: str
    count: int
    last_step: float
    last_t: float
    last_value: float


@dataclass(frozen=True, slots=True)
class Ingested:
    """What one ingest added: lines understood, points stored, and lines or values it could not use."""

    lines: int
    points: int
    dropped: int


@dataclass(slots=True)
class _StreamState:
    """How far one stream was read. `torn`: the rest of the current line is to be skipped."""

    consumed: int = 0
    lines: int = 0
    dropped: int = 0
    torn: bool = False
    keys: dict[str, list[float]] = field(default_factory=dict)  # count, last step, last time, last value


_FIELDS = tuple(each.name for each in fields(_StreamState))


class _Damaged(Exception):
    """A record file is shorter than the state says: the machine lost power."""


def warm_up() -> None:
    """Load what curves need (a tenth of a second), so that the first chart does not wait for it."""
    import numpy  # noqa: F401


class SeriesStore:
    """Curves over the `metrics` and `util` streams of a `StreamStore`. Safe for any number of threads and processes."""

    def __init__(self, root: Path, streams: StreamStore) -> None:
        self._root = str(root)
        self._streams = streams

    def gather(self, job_id: str, stream: str, begin: int, size: int) -> None:
        """The stream got bytes from `begin` on and now spans `size`: take in what is there whenever much has gathered.

        Raises:
            StorageFull: as `ingest`.
        """
        if begin // _GATHERED_BYTES != size // _GATHERED_BYTES:
            self.ingest(job_id, stream)

    def ingest(self, job_id: str, stream: str) -> Ingested:
        """Take in the complete lines the stream got since the last call. Idempotent.

        Raises:
            StorageFull: nothing of the failing batch of lines counts; the same call succeeds once there is space.
        """
        folder = job_folder(self._root, job_id)
        _check_source(stream)
        if self._streams.size(job_id, stream) == 0:
            return Ingested(0, 0, 0)
        with storage_full(f"the curves of {job_id}"), locked(f"{folder}/{LOCK_NAME}"):
            try:
                return self._catch_up(job_id, stream)
            except _Damaged:
                return self._rebuild(job_id, stream)

    def keys(self, job_id: str) -> list[SeriesInfo]:
        """Every key of the job, by name; one that both streams have appears once for each."""
        found = [
            SeriesInfo(key, stream, int(count), step, t, value)
            for stream, state in self._current(job_id).items()
            for key, (count, step, t, value) in state.keys.items()
        ]
        return sorted(found, key=lambda info: (info.key, info.stream))

    def dropped(self, job_id: str) -> dict[str, int]:
        """Per stream, how many lines were malformed and how many values had an unusable key or no number."""
        return {stream: state.dropped for stream, state in self._current(job_id).items()}

    def curve(
        self,
        job_id: str,
        key: str,
        *,
        max_points: int = 2000,
        x: Literal["step", "time"] = "step",
        x_min: float | None = None,
        x_max: float | None = None,
        stream: str | None = None,
    ) -> Curve:
        """At most `max_points` points of one key with x_min <= x <= x_max; no points for a key that is not there.

        Args:
            stream: which one, where both have the key; without it, `metrics` comes first.
        """
        if max_points < 1 or x not in ("step", "time"):
            raise ValueError(f"cannot draw {max_points} points over {x!r}")
        records = self._records(job_id, key, SOURCES if stream is None else (_check_source(stream),))
        return downsample(records, key, max_points=max_points, x=x, x_min=x_min, x_max=x_max)

    def delete(self, job_id: str) -> bool:
        """Remove all curves of a job, its streams stay; whether there were any. Idempotent; works on a full disk."""
        folder = job_folder(self._root, job_id)
        with locked(f"{folder}/{LOCK_NAME}", create=False) as held:
            if not held:
                return False
            names = [name for name in os.listdir(folder) if name.endswith(".f64") or name == f"{_STATE}.tmp"]
            # The state first: without it the records mean nothing. The lock last: until then this call owns the rest.
            for name in (_STATE, *names, LOCK_NAME):
                with suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{name}")
            # An ingest that came in since has its own lock file there by now, and keeps the folder.
            with suppress(OSError):
                os.rmdir(folder)
        return True

    def _current(self, job_id: str) -> dict[str, _StreamState]:
        """What counts, with all that has gathered taken in."""
        folder = job_folder(self._root, job_id)
        states = _load(folder)
        behind = [
            stream
            for stream in SOURCES
            if self._streams.size(job_id, stream) > (states[stream].consumed if stream in states else 0)
        ]
        for stream in behind:
            with suppress(StorageFull):  # a full disk must not forbid looking at what is there
                self.ingest(job_id, stream)
        return _load(folder) if behind else states

    def _catch_up(self, job_id: str, stream: str) -> Ingested:
        """Take in what is new, one batch after the other. The caller holds the lock."""
        folder = job_folder(self._root, job_id)
        states = _load(folder)
        state = states.setdefault(stream, _StreamState())
        lines, dropped, points = state.lines, state.dropped, 0
        while True:
            piece = self._streams.read(job_id, stream, state.consumed, _BATCH_BYTES)
            if piece.next_offset <= state.consumed:
                break
            end = piece.data.rfind(b"\n") + 1
            if (piece.dropped or not end) and not state.torn:
                ends_here = not piece.dropped and len(piece.data) < _BATCH_BYTES
                if ends_here and self._streams.read(job_id, stream, piece.next_offset, 1).dropped == 0:
                    break  # the end of this line is still to come
                # Too long to be a line, or cut off by a hole, which a machine that lost power leaves.
                state.torn = True
                state.dropped += 1
            if end:
                begin = piece.data.find(b"\n") + 1 if state.torn else 0
                room = MAX_KEYS - sum(len(each.keys) for each in states.values())
                for key, column in _parse(piece.data[begin:end], state, room).items():
                    _store(_record_path(folder, stream, key), state.keys.setdefault(key, [0, 0, 0, 0]), column)
                    points += len(column) // 3
                state.torn = False
            state.consumed = piece.next_offset - (len(piece.data) - end if end else 0)
            _save(folder, states)
        return Ingested(state.lines - lines, points, state.dropped - dropped)

    def _rebuild(self, job_id: str, stream: str) -> Ingested:
        """Derive the curves of one stream anew from its first byte. The caller holds the lock."""
        folder = job_folder(self._root, job_id)
        states = _load(folder)
        states.pop(stream, None)
        _save(folder, states)
        return self._catch_up(job_id, stream)

    def _records(self, job_id: str, key: str, sources: Iterable[str]) -> NDArray[np.float64]:
        """The records of a key as rows (step, time, value)."""
        import numpy as np

        folder = job_folder(self._root, job_id)
        states = self._current(job_id)
        for stream in sources:
            if stream not in states or key not in states[stream].keys:
                continue
            path, count = _record_path(folder, stream, key), int(states[stream].keys[key][0])
            if _bytes_held(path) < count * _RECORD_BYTES:
                self._mend(job_id, stream)
            with suppress(FileNotFoundError):
                # Not memmap: a file that gets shorter meanwhile would end the process with SIGBUS.
                flat = np.fromfile(path, dtype=np.float64, count=3 * count)
                return flat[: len(flat) // 3 * 3].reshape(-1, 3)
        return np.empty((0, 3))

    def _mend(self, job_id: str, stream: str) -> None:
        """Rebuild if records are missing; decided under the lock, since another process may just be doing it."""
        folder = job_folder(self._root, job_id)
        with (
            suppress(StorageFull),  # a full disk must not forbid looking at what is there
            storage_full(f"the curves of {job_id}"),
            locked(f"{folder}/{LOCK_NAME}", create=False),
        ):
            for key, entry in _load(folder).get(stream, _StreamState()).keys.items():
                if _bytes_held(_record_path(folder, stream, key)) < entry[0] * _RECORD_BYTES:
                    self._rebuild(job_id, stream)
                    break


def _check_source(stream: str) -> str:
    if check_stream(stream) not in SOURCES:
        raise ValueError(f"no curves are drawn from {stream!r}")
    return stream


def _parse(raw: bytes, state: _StreamState, room: int) -> dict[str, array[float]]:
    """Records of each key in these complete lines; counts lines and what is unusable into `state`."""
    # Bytes that are not UTF-8 become lone surrogates, which are no part of JSON and are refused in keys.
    lines = raw.decode(errors="surrogateescape").split("\n")
    # One line at a time: the decoder's errors count the lines before them, which is quadratic over a whole batch.
    decode = json.JSONDecoder().raw_decode
    columns: dict[str, array[float]] = {}
    extend: dict[str, Callable[[Iterable[float]], None]] = {}
    dropped = 0
    for line in map(str.strip, lines):
        if not line:
            continue
        try:
            record, end = decode(line)
            if end != len(line) or type(record) is not dict:
                raise ValueError("not one object")
            step, t = record.pop("step", None), record.pop("t", None)
            step = float(state.lines) if step is None else _finite(step)
            t = math.nan if t is None else _finite(t)
        except (ValueError, OverflowError, RecursionError):
            dropped += 1
            continue
        state.lines += 1
        for key, value in record.items():
            if type(value) is not float:
                value = _as_float(value)
                if value is None:
                    dropped += 1
                    continue
            add = extend.get(key)
            if add is None:
                if key not in state.keys:
                    if room == 0 or not _is_usable(key):
                        dropped += 1
                        continue
                    room -= 1
                columns[key] = array("d")
                add = extend[key] = columns[key].extend
            add((step, t, value))
    state.dropped += dropped
    return columns


def _finite(value: object) -> float:
    # Exact types: to Python, true is a number.
    if type(value) is float or type(value) is int:
        number = float(value)
        if math.isfinite(number):
            return number
    raise ValueError("not a finite number")


def _as_float(value: object) -> float | None:
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return None
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def _is_usable(key: str) -> bool:
    # Lone surrogates (Cs), which JSON can spell, could not be sent on as UTF-8.
    return 0 < len(key) <= MAX_KEY_CHARS and not any(unicodedata.category(char) in ("Cc", "Cs") for char in key)


def _record_path(folder: str, stream: str, key: str) -> str:
    # A hash, since keys hold slashes; not a number, so that a rebuild gives every key its old file.
    return f"{folder}/{stream}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.f64"


def _bytes_held(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _store(path: str, entry: list[float], column: array[float]) -> None:
    """Put records behind those that count, in place of what a killed ingest left there."""
    counted = int(entry[0]) * _RECORD_BYTES
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        held = os.fstat(fd).st_size
        if held < counted:
            raise _Damaged
        if held > counted:
            os.ftruncate(fd, counted)
        os.lseek(fd, counted, os.SEEK_SET)
        write_all(fd, memoryview(column).cast("B"))
    finally:
        os.close(fd)
    entry[:] = [entry[0] + len(column) // 3, *column[-3:]]


def _load(folder: str) -> dict[str, _StreamState]:
    """What counts; nothing if the state is missing or, after a power failure, unreadable: the streams have it all."""
    try:
        with open(f"{folder}/{_STATE}", "rb") as file:
            return {stream: _StreamState(**values) for stream, values in json.load(file).items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def _save(folder: str, states: dict[str, _StreamState]) -> None:
    # Not asdict: it copies every entry first.
    raw = json.dumps(states, default=lambda state: {name: getattr(state, name) for name in _FIELDS}).encode()
    temporary = f"{folder}/{_STATE}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(fd, raw)
        finally:
            os.close(fd)
        os.rename(temporary, f"{folder}/{_STATE}")
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
