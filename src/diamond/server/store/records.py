"""The files of one job's curves: a state, one file of (step, time, value) records per key, and how they are thinned.

`state.json` says how many records of each file count; what lies beyond them is invisible and overwritten. Neither is
synced: while the streams hold every line, whatever a power failure damaged is derived from them anew.

Once old lines were let go of, or points thinned out, that is no longer possible. So before that happens everything is
*packed*: the records of all keys go into one new file, which is synced once and never changed, and `kept.json`, synced
as well, says what counted then. What comes after goes into new files of each key. Whatever a power failure damages from
then on goes back to the last pack, and what came since is still in the streams.

Packs, and the files beside them, are numbered by the state's `version`. Old ones go when nothing refers to them any
more, so a reader without a lock finds either the file it looks for, or that it has to look at the state again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from diamond.server.store.files import sync_folder, write_all

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RECORD_BYTES = 24
STATE = "state.json"
KEPT = "kept.json"
LEAST_LEFT = 64  # of each key's points, however little room there is: some for each octave of age
Spans = list[tuple[int, int]]


@dataclass(slots=True)
class Key:
    """One key's records: `count` are kept, of `total` that were logged.

    The first `packed` of them lie in the pack, from its record `at` on; the others in the key's own file.
    `spans` say how sparse what is old has become, from the oldest on: so many records stand for so many that were
    logged. Those after the last span are complete.
    """

    count: int = 0
    step: float = 0.0
    t: float = 0.0
    value: float = 0.0
    total: int = 0
    packed: int = 0
    at: int = 0
    spans: Spans = field(default_factory=list)

    @property
    def own_bytes(self) -> int:
        return (self.count - self.packed) * RECORD_BYTES

    def to_list(self) -> list[Any]:
        return [self.count, self.step, self.t, self.value, self.total, self.packed, self.at, self.spans]

    @staticmethod
    def of(raw: list[Any]) -> Key:
        count, step, t, value = raw[:4]  # all there was, before curves were ever thinned
        total, packed, at, spans = raw[4:8] if len(raw) > 4 else (count, 0, 0, ())
        spans = [(int(held), int(logged)) for held, logged in spans]
        return Key(int(count), float(step), float(t), float(value), int(total), int(packed), int(at), spans)


@dataclass(slots=True)
class StreamState:
    """How far one stream was read.

    Attributes:
        torn: the rest of the current line is to be skipped.
        crowded_out: values, among the dropped, whose key was one too many.
        squeezed: whether points went because a storage quota was used up, and not only for the cap of the job.
    """

    consumed: int = 0
    lines: int = 0
    dropped: int = 0
    torn: bool = False
    crowded_out: int = 0
    squeezed: bool = False
    keys: dict[str, Key] = field(default_factory=dict)


class States(dict[str, StreamState]):
    """What counts, by stream. `version` names the pack and the files that came after it; 0: nothing was packed."""

    version: int = 0


_PLAIN = tuple(each.name for each in fields(StreamState) if each.name != "keys")


class Damaged(Exception):
    """A file of records is shorter than the state says: the machine lost power."""


def path_of(folder: str, stream: str, key: str, version: int = 0) -> str:
    # A hash, since keys hold slashes; not a number, so that a rebuild gives every key its old file.
    name = f"{folder}/{stream}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    return f"{name}.{version}.f64" if version else f"{name}.f64"


def _pack_path(folder: str, version: int) -> str:
    return f"{folder}/pack.{version}.f64"


def bytes_held(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def is_damaged(folder: str, states: States, stream: str) -> bool:
    """Whether records of this stream that count are not there."""
    end = max((entry.at + entry.packed for entry in states[stream].keys.values()), default=0)
    return bytes_held(_pack_path(folder, states.version)) < end * RECORD_BYTES or any(
        is_short(folder, states, stream, key) for key in states[stream].keys
    )


def is_short(folder: str, states: States, stream: str, key: str) -> bool:
    """Whether the key's own file lacks records that count."""
    entry = states[stream].keys[key]
    return bytes_held(path_of(folder, stream, key, states.version)) < entry.own_bytes


# ---- what counts -----------------------------------------------------------------------------------------------------


def load(folder: str) -> States:
    """What counts; after a power failure, what did when it was packed last; nothing if there was none."""
    states = _read(f"{folder}/{STATE}")
    return states if states is not None else load_kept(folder)


def load_surely(folder: str) -> States:
    """`load`, for whoever is going to write: a power failure may have brought back a state older than the last pack,
    and lines that it had not seen may be gone. The caller holds the lock."""
    states, kept = load(folder), load_kept(folder)
    return kept if kept.version > states.version else states


def load_kept(folder: str) -> States:
    """What counted when it was packed last; nothing if there was none, which means that the streams have it all."""
    return _read(f"{folder}/{KEPT}") or States()


def save(folder: str, states: States) -> None:
    _write(f"{folder}/{STATE}", states, synced=False)


def _read(path: str) -> States | None:
    try:
        with open(path, "rb") as file:
            raw: dict[str, Any] = json.load(file)
        states = States()
        states.version = int(raw.pop("version", 0))
        for stream, values in raw.items():
            states[stream] = StreamState(
                **{name: values[name] for name in _PLAIN if name in values},
                keys={str(key): Key.of(entry) for key, entry in values["keys"].items()},
            )
        return states
    except (FileNotFoundError, ValueError, TypeError, AttributeError, KeyError):
        return None


def _write(path: str, states: States, *, synced: bool) -> None:
    document: dict[str, Any] = {
        stream: {
            **{name: getattr(state, name) for name in _PLAIN},
            "keys": {key: entry.to_list() for key, entry in state.keys.items()},
        }
        for stream, state in states.items()
    }
    document["version"] = states.version
    temporary = f"{path}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(fd, json.dumps(document).encode())
            if synced:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def append(path: str, entry: Key, column: array[float]) -> None:
    """Put records behind those that count, in place of what a killed process left there."""
    counted = entry.own_bytes
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        held = os.fstat(fd).st_size
        if held < counted:
            raise Damaged
        if held > counted:
            os.ftruncate(fd, counted)
        os.lseek(fd, counted, os.SEEK_SET)
        write_all(fd, memoryview(column).cast("B"))
    finally:
        os.close(fd)
    entry.count += len(column) // 3
    entry.total += len(column) // 3
    entry.step, entry.t, entry.value = column[-3:]


def read(folder: str, states: States, stream: str, key: str) -> NDArray[np.float64]:
    """A key's records as rows (step, time, value); fewer than count, where a file is shorter.

    Raises:
        FileNotFoundError: a file is not there, or no longer: it has been packed since.
    """
    import numpy as np

    entry = states[stream].keys[key]
    pieces = []
    # Not memmap: a file that gets shorter meanwhile would end the process with SIGBUS.
    if entry.packed:
        with open(_pack_path(folder, states.version), "rb") as file:
            file.seek(entry.at * RECORD_BYTES)
            pieces.append(np.fromfile(file, dtype=np.float64, count=3 * entry.packed))
    if entry.count > entry.packed:
        path = path_of(folder, stream, key, states.version)
        pieces.append(np.fromfile(path, dtype=np.float64, count=3 * (entry.count - entry.packed)))
    whole = [piece[: len(piece) // 3 * 3] for piece in pieces]
    return np.concatenate([*whole, np.empty(0)]).reshape(-1, 3)


# ---- letting go of what is old ---------------------------------------------------------------------------------------


def num_points(states: States) -> int:
    return sum(entry.count for state in states.values() for entry in state.keys.values())


def pack(folder: str, states: States, room_bytes: int) -> None:
    """Make what counts durable, thinned to at most so many bytes: afterwards no line that was taken in is needed.

    Those keys with most points lose some, the others none. The caller holds the lock. A process killed anywhere in here
    has packed, or has not.

    Raises:
        Damaged: records that count are not there.
    """
    counts = [entry.count for state in states.values() for entry in state.keys.values()]
    level = max(LEAST_LEFT, _level(counts, room_bytes // RECORD_BYTES))
    new = States()
    new.version = max(states.version, load_kept(folder).version) + 1
    path, at = _pack_path(folder, new.version), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for stream, state in states.items():
            new[stream] = replace(state, keys={})
            for key, entry in state.keys.items():
                rows, spans = _all_of(folder, states, stream, key), entry.spans
                if len(rows) > level:
                    rows, spans = sparser(rows, spans, level)
                write_all(fd, rows.tobytes())
                new[stream].keys[key] = replace(entry, count=len(rows), packed=len(rows), at=at, spans=spans)
                at += len(rows)
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    sync_folder(folder)
    _write(f"{folder}/{KEPT}", new, synced=True)
    sync_folder(folder)
    save(folder, new)
    _collect(folder, new)
    states.version = new.version
    for stream, state in states.items():
        state.keys = new[stream].keys


def _all_of(folder: str, states: States, stream: str, key: str) -> NDArray[np.float64]:
    try:
        rows = read(folder, states, stream, key)
    except FileNotFoundError:
        raise Damaged from None
    if len(rows) < states[stream].keys[key].count:
        raise Damaged
    return rows


def _collect(folder: str, states: States) -> None:
    """Remove files of records that neither this state nor the last pack refers to, which are of one version."""
    for name in os.listdir(folder):
        if name.endswith(".f64") and not name.endswith(f".{states.version}.f64"):
            with suppress(FileNotFoundError):
                os.unlink(f"{folder}/{name}")


def salvage(folder: str, states: States, stream: str) -> None:
    """Count only what is there: better a part of a curve than none."""
    held = bytes_held(_pack_path(folder, states.version)) // RECORD_BYTES
    for key, entry in states[stream].keys.items():
        if is_short(folder, states, stream, key) or held < entry.at + entry.packed:
            entry.packed = max(0, min(entry.packed, held - entry.at))
            entry.count, entry.spans = entry.packed, []


def sparser(records: NDArray[np.float64], spans: Spans, most: int) -> tuple[NDArray[np.float64], Spans]:
    """At most `most` of the records (`LEAST_LEFT` or more), in their order, and the spans that tell which they are.

    The newest stay complete; of those twice as old every second one is left, of those four times as old every fourth,
    and so on: each octave of age has about as many points. Kept whatever happens: the first and the last, those with
    the smallest and the largest value, and the first that is no number.
    """
    import numpy as np

    ordinals = _ordinals(len(records), spans)
    age = ordinals[-1] + 1 - ordinals
    must = _indispensable(records[:, 2])
    complete = float(most)  # how many of the newest stay
    for _ in range(8):
        complete = most / (2 + max(0.0, math.log2(age[0] / (2 * complete))))
    while True:
        stride = np.exp2(np.floor(np.log2(np.maximum(age / complete, 1.0))))
        cell = np.floor(ordinals / stride)
        keep = np.ones(len(records), dtype=bool)
        keep[1:] = (cell[1:] != cell[:-1]) | (stride[1:] != stride[:-1]) | (np.diff(ordinals) > 0.75 * stride[1:])
        keep[must] = True
        if keep.sum() <= most or complete < 1:
            return np.ascontiguousarray(records[keep]), _spans(ordinals[keep], stride[keep])
        complete *= 0.8


def _indispensable(values: NDArray[np.float64]) -> list[int]:
    import numpy as np

    finite = np.isfinite(values)
    must = [0, len(values) - 1]
    if finite.any():
        must += [int(np.where(finite, values, np.inf).argmin()), int(np.where(finite, values, -np.inf).argmax())]
    if not finite.all():
        must.append(int(finite.argmin()))
    return must


def _ordinals(count: int, spans: Spans) -> NDArray[np.float64]:
    """About which of all that were logged these are: evenly spread within each span, and all of what came after."""
    import numpy as np

    pieces, at = [], 0.0
    for held, logged in spans:
        pieces.append(at + np.arange(held) * (logged / held))
        at += logged
    pieces.append(at + np.arange(count - sum(held for held, _ in spans)))
    return np.concatenate(pieces)


def _spans(ordinals: NDArray[np.float64], stride: NDArray[np.float64]) -> Spans:
    """Those of one stride make a span; the newest, which are complete, need none."""
    import numpy as np

    edges = [0, *(np.flatnonzero(np.diff(stride)) + 1).tolist()]
    if stride[-1] != 1:
        edges.append(len(stride))
    starts = np.append(ordinals, ordinals[-1] + 1)
    return [
        (following - edge, round(float(starts[following] - starts[edge])))
        for edge, following in itertools.pairwise(edges)
    ]


def _level(counts: list[int], room: int) -> int:
    """The largest number of points for each key with which all of them have room."""
    left = room
    for number, count in enumerate(sorted(counts)):
        share = left // (len(counts) - number)
        if count > share:
            return share
        left -= count
    return max(counts, default=0)
