"""What trainings measured of themselves, read from the `train` streams of their jobs.

Each process remembers what it has read, so that a page that is open reads only what came since. What is remembered of
a job is small, and what one look reads is bounded, whatever a job writes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from diamond.core import training
from diamond.core.training import Measure, Size, Throughput
from diamond.server.store.streams import MIB, StreamStore

_STREAM = "train"
_MAX_REMEMBERED = 5_000
_HEAD_BYTES = 1 * MIB
_TAIL_BYTES = 3 * MIB
_BATCH_BYTES = 1 * MIB


@dataclass(frozen=True, kw_only=True)
class JobMeasures:
    """What was read of one job: how far, its first and its newest measure, and what it did at each size."""

    consumed: int = 0
    first: Measure | None = None
    latest: Measure | None = None
    sizes: dict[Size, Throughput] = field(default_factory=dict)


class MeasureStore:
    """One per process. Safe for threads: two that read the same job at once find the same."""

    def __init__(self, streams: StreamStore) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._known: dict[str, JobMeasures] = {}

    def of_job(self, job_id: str) -> JobMeasures:
        """All that is known of a job by now."""
        size = self._streams.size(job_id, _STREAM)
        with self._lock:
            known = self._known.get(job_id, JobMeasures())
        if size < known.consumed:  # a backup was restored, or the job removed
            known = JobMeasures()
        if size == known.consumed:
            return known
        found = _read_on(self._streams, job_id, size, known)
        with self._lock:
            self._known.pop(job_id, None)
            if len(self._known) >= _MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[job_id] = found
        return found


def _read_on(streams: StreamStore, job_id: str, size: int, known: JobMeasures) -> JobMeasures:
    """With what came since. Where that is very much, its beginning and its end."""
    stretches = [(known.consumed, size)]
    if size - known.consumed > _HEAD_BYTES + _TAIL_BYTES:
        stretches = [(known.consumed, known.consumed + _HEAD_BYTES), (size - _TAIL_BYTES, size)]
    first, latest, sizes, consumed = known.first, known.latest, dict(known.sizes), known.consumed
    for begin, end in stretches:
        position = begin
        while position < end:
            piece = streams.read(job_id, _STREAM, position, min(_BATCH_BYTES, end - position))
            if piece.next_offset == position:
                break
            whole = piece.data.rfind(b"\n") + 1
            for measure in training.measures_in(piece.data[:whole]):
                first, latest = first or measure, measure
                training.note(sizes, measure)
            rest = len(piece.data) - whole
            if rest > training.MAX_LINE_BYTES:
                rest = 0  # too long to be a line of ours
            position = consumed = piece.next_offset - rest
            if piece.next_offset >= end:
                break  # the end of the last line is still to come
    return JobMeasures(consumed=consumed, first=first, latest=latest, sizes=sizes)
