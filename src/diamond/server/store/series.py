"""Metric curves of jobs: one file of (step, time, value) records per key, derived from the job's byte streams.

Owns everything under its root, ``<job_id[-2:]>/<job_id>/``; what lies there is in `records`. Must not know the database
or HTTP, and must not import numpy before a curve is asked for.

Not every line is taken in when it comes: that is far more work than to keep it, and few curves are ever looked at.
Whoever looks has what has gathered taken in first, which is little, since what gathers is bounded (`gather`).

What a job may keep is bounded. As long as there is room its streams are kept whole, and whatever is found damaged here
is rebuilt from them. A stream that outgrows its window loses the lines that were taken in longest ago, of which the
points stay; points that outgrow their room are thinned, older ones first (`records.sparser`). No number that somebody
may read off a curve goes with that: the first and the last value, the smallest, the largest, and how many there were.

Ingesting writes records first and the state, which says how many of them count, last (by rename). Records beyond the
count are invisible and overwritten by the next ingest, so a process killed anywhere neither loses nor doubles a point.
Readers for whom there is nothing to take in take no lock: they read the state, then that many records.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diamond.core.errors import StorageFull
from diamond.server.store import records
from diamond.server.store.curves import Curve, downsample
from diamond.server.store.files import bytes_in, locked, storage_full
from diamond.server.store.points import MAX_KEYS, parse
from diamond.server.store.records import Damaged, Key, States, StreamState
from diamond.server.store.streams import LOCK_NAME, MIB, StreamStore, check_stream, job_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SOURCES = ("metrics", "util")
_BATCH_BYTES = 4 * MIB  # also the longest line that is understood
_GATHERED_BYTES = 64 * 1024  # a few hundred lines: some milliseconds for the reader who meets them
MIN_WINDOW_BYTES = 2 * MIB  # of lines that are kept of one stream
_LOOKS = 5  # at a state whose files were replaced meanwhile


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """One key of a job. `last_t` is NaN if the line carried no time; `last_value` may be NaN or infinite.

    Attributes:
        count: how many values were logged, also where not all of them are kept any more.
        thinned: whether some of the older ones were let go of.
    """

    key: str
    stream: str
    count: int
    last_step: float
    last_t: float
    last_value: float
    thinned: bool = False


@dataclass(frozen=True, slots=True)
class Unusable:
    """What of a stream is in no curve: `dropped` lines and values, of which `crowded_out` under a key too many.

    `squeezed`: points were thinned out because a storage quota was used up.
    """

    dropped: int = 0
    crowded_out: int = 0
    squeezed: bool = False


@dataclass(frozen=True, slots=True)
class Ingested:
    """What one ingest added: lines understood, points stored, and lines or values it could not use."""

    lines: int
    points: int
    dropped: int


def warm_up() -> None:
    """Load what curves need (a tenth of a second), so that the first chart does not wait for it."""
    import numpy  # noqa: F401


class SeriesStore:
    """Curves over the `metrics` and `util` streams of a `StreamStore`. Safe for any number of threads and processes."""

    def __init__(self, root: Path, streams: StreamStore, *, cap_bytes: int = 64 * MIB) -> None:
        """`cap_bytes`: how much of one job's curves is kept, a quarter of it lines of each stream, the rest points."""
        if cap_bytes < 4 * MIN_WINDOW_BYTES:
            raise ValueError(f"a cap of {cap_bytes} bytes holds no curves")
        self._root = str(root)
        self._streams = streams
        self._cap_bytes = cap_bytes

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
            return self._ingest(job_id, stream)

    def keys(self, job_id: str) -> list[SeriesInfo]:
        """Every key of the job, by name; one that both streams have appears once for each."""
        found = [
            SeriesInfo(key, stream, entry.total, entry.step, entry.t, entry.value, entry.count < entry.total)
            for stream, state in self._current(job_id).items()
            for key, entry in state.keys.items()
        ]
        return sorted(found, key=lambda info: (info.key, info.stream))

    def dropped(self, job_id: str) -> dict[str, int]:
        """Per stream, how many lines were malformed and how many values had an unusable key or no number."""
        return {stream: what.dropped for stream, what in self.unusable(job_id).items()}

    def unusable(self, job_id: str) -> dict[str, Unusable]:
        """Per stream, what of it is in no curve."""
        return {
            stream: Unusable(state.dropped, state.crowded_out, state.squeezed)
            for stream, state in self._current(job_id).items()
        }

    def held_bytes(self, job_id: str) -> int:
        """What the curves of a job take on disk, its streams not counted."""
        return bytes_in(job_folder(self._root, job_id))

    def squeeze(self, job_id: str, room_bytes: int) -> None:
        """Keep no more than so much of a job's points and lines, since there is no room for more.

        Raises:
            StorageFull: nothing changed; thinning needs room for what it leaves before it lets go of what there was.
        """
        folder = job_folder(self._root, job_id)
        with (
            storage_full(f"the curves of {job_id}"),
            locked(f"{folder}/{LOCK_NAME}", create=False) as held,
        ):
            if not held:
                return
            for stream in SOURCES:
                if self._streams.size(job_id, stream):
                    self._ingest(job_id, stream)
            states = records.load_surely(folder)
            for stream in states:
                self._trim(job_id, states, stream, room_bytes, is_squeezed=True)

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
        sources = SOURCES if stream is None else (_check_source(stream),)
        rows, is_thinned = self._records(job_id, key, sources)
        curve = downsample(rows, key, max_points=max_points, x=x, x_min=x_min, x_max=x_max)
        return replace(curve, thinned=True) if is_thinned else curve

    def delete(self, job_id: str) -> bool:
        """Remove all curves of a job, its streams stay; whether there were any. Idempotent; works on a full disk."""
        folder = job_folder(self._root, job_id)
        with locked(f"{folder}/{LOCK_NAME}", create=False) as held:
            if not held:
                return False
            names = [name for name in os.listdir(folder) if name.endswith((".f64", ".tmp"))]
            # What says which records count first: without it they mean nothing. The lock last: until then this call
            # owns the rest.
            for name in (records.STATE, records.KEPT, *names, LOCK_NAME):
                with suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{name}")
            # An ingest that came in since has its own lock file there by now, and keeps the folder.
            with suppress(OSError):
                os.rmdir(folder)
        return True

    def _current(self, job_id: str) -> States:
        """What counts, with all that has gathered taken in."""
        folder = job_folder(self._root, job_id)
        states = records.load(folder)
        behind = [
            stream
            for stream in SOURCES
            if self._streams.size(job_id, stream) > (states[stream].consumed if stream in states else 0)
        ]
        for stream in behind:
            with suppress(StorageFull):  # a full disk must not forbid looking at what is there
                self.ingest(job_id, stream)
        return records.load(folder) if behind else states

    def _ingest(self, job_id: str, stream: str) -> Ingested:
        """`ingest`, by whoever holds the lock."""
        try:
            return self._catch_up(job_id, stream)
        except Damaged:
            self._rebuild(job_id)
            return self._catch_up(job_id, stream)

    def _catch_up(self, job_id: str, stream: str) -> Ingested:
        """Take in what is new, one batch after the other. The caller holds the lock."""
        folder = job_folder(self._root, job_id)
        states = records.load_surely(folder)
        state = states.setdefault(stream, StreamState())
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
                points += _take_in(folder, states, stream, piece.data[begin:end])
                state.torn = False
            state.consumed = piece.next_offset - (len(piece.data) - end if end else 0)
            records.save(folder, states)
            self._trim(job_id, states, stream, self._cap_bytes)
        return Ingested(state.lines - lines, points, state.dropped - dropped)

    def _trim(self, job_id: str, states: States, stream: str, cap_bytes: int, *, is_squeezed: bool = False) -> None:
        """Let go of what is more than the cap: thin the points, and drop lines whose points are safe."""
        folder = job_folder(self._root, job_id)
        window = max(cap_bytes // 4, MIN_WINDOW_BYTES)
        is_full = records.num_points(states) * records.RECORD_BYTES > cap_bytes // 2
        # What was not taken in cannot go: it is no more than the longest line.
        needed = self._streams.size(job_id, stream) - states[stream].consumed
        is_long = self._streams.held_bytes(job_id, stream) - needed > window
        if is_full:
            for state in states.values():
                state.squeezed = state.squeezed or is_squeezed
        if is_full or is_long:
            # With room to spare, so that points are not thinned again for the very next lines.
            records.pack(folder, states, cap_bytes * 3 // 8 if is_full else cap_bytes // 2)
        if is_long:
            self._streams.drop(job_id, stream, before=states[stream].consumed, leave_bytes=window // 2)

    def _rebuild(self, job_id: str) -> None:
        """Derive what is damaged anew: from the first byte of its stream, or from where the last checkpoint was.

        The caller holds the lock.
        """
        folder = job_folder(self._root, job_id)
        states, kept = records.load_surely(folder), records.load_kept(folder)
        damaged = [stream for stream in states if records.is_damaged(folder, states, stream)]
        for stream in damaged:
            is_packed = kept.version == states.version and stream in kept
            states[stream] = kept[stream] if is_packed else StreamState()
            records.salvage(folder, states, stream)
        records.save(folder, states)
        for stream in damaged:
            self._catch_up(job_id, stream)

    def _records(self, job_id: str, key: str, sources: Iterable[str]) -> tuple[NDArray[np.float64], bool]:
        """The records of a key as rows (step, time, value), and whether there were more of them once."""
        import numpy as np

        folder = job_folder(self._root, job_id)
        states = self._current(job_id)
        for _ in range(_LOOKS):
            stream = next((each for each in sources if each in states and key in states[each].keys), None)
            if stream is None:
                break
            entry = states[stream].keys[key]
            with suppress(FileNotFoundError):
                rows = records.read(folder, states, stream, key)
                if len(rows) == entry.count:
                    return rows, entry.count < entry.total
            # They were lost, or have just been packed, which another look at the state tells.
            self._mend(job_id)
            states = records.load(folder)
        return np.empty((0, 3)), False

    def _mend(self, job_id: str) -> None:
        """Rebuild if records are missing; decided under the lock, since another process may just be doing it."""
        folder = job_folder(self._root, job_id)
        with (
            suppress(StorageFull),  # a full disk must not forbid looking at what is there
            storage_full(f"the curves of {job_id}"),
            locked(f"{folder}/{LOCK_NAME}", create=False),
        ):
            states = records.load(folder)
            if any(records.is_damaged(folder, states, stream) for stream in states):
                self._rebuild(job_id)


def _take_in(folder: str, states: States, stream: str, raw: bytes) -> int:
    """Store the points of complete lines; how many those were. `states` says so, and is not yet saved."""
    state = states[stream]
    room = MAX_KEYS - sum(len(each.keys) for each in states.values())
    found = parse(raw, state.lines, state.keys, room)
    for key, column in found.columns.items():
        entry = state.keys.setdefault(key, Key())
        records.append(records.path_of(folder, stream, key, states.version), entry, column)
    state.lines += found.lines
    state.dropped += found.dropped
    state.crowded_out += found.crowded_out
    return sum(len(column) // 3 for column in found.columns.values())


def _check_source(stream: str) -> str:
    if check_stream(stream) not in SOURCES:
        raise ValueError(f"no curves are drawn from {stream!r}")
    return stream
