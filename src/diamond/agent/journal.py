"""The agent's memory across restarts: journal.jsonl, one JSON record a line, only ever appended to.

Phases of a job, in order: accepted (with the order), submitting, submitted, finished (with the result),
delivered. What happened before a crash is read back at the start, and the file is rewritten without what no longer
matters. Plain appends and one rename, since agent homes are often on NFS, where SQLite's locks are not to be trusted.

Must not decide anything: it remembers what the loop did.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diamond.agent.machine import FULL_ERRORS
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, StorageFull, Unavailable
from diamond.core.rundir import write_atomic
from diamond.core.wire import JobOrder, JobReport

log = logging.getLogger(__name__)

PHASES = ("accepted", "submitting", "submitted", "finished", "delivered")
KEEP_DELIVERED_S = 86400.0
_COMPACT_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """Where a job stood when it was last heard of. `order` may be gone once the job is delivered."""

    job_id: str
    phase: str
    order: JobOrder | None = None
    result: JobReport | None = None
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """One step of one job."""

    job_id: str
    phase: str
    order: JobOrder | None = None
    result: JobReport | None = None

    def line(self, at: float) -> bytes:
        raw: dict[str, Any] = {"job": self.job_id, "phase": self.phase, "at": round(at, 3)}
        if self.order is not None:
            raw["order"] = encode(self.order)
        if self.result is not None:
            raw["result"] = encode(self.result)
        return json.dumps(raw, separators=(",", ":")).encode() + b"\n"


class Journal:
    """Thread-safe. The file belongs to one process (see agent.lock)."""

    def __init__(self, path: Path) -> None:
        """Read back what is there and rewrite it shorter."""
        self._path = path
        self._lock = threading.Lock()
        self._jobs: dict[str, Remembered] = {}
        good_bytes = self._read()
        self._fd = self._open(good_bytes)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = 0
        self.compact(force=True)

    def remembered(self) -> dict[str, Remembered]:
        with self._lock:
            return dict(self._jobs)

    def append(self, records: Iterable[Record], *, sync: bool = True) -> None:
        """Write records, all or none. With `sync` they also survive a power cut.

        Raises:
            StorageFull: no room; nothing was written, the same call may work later.
            Unavailable: the file cannot be written for another reason.
        """
        records = list(records)
        if not records:
            return
        now = time.time()
        data = b"".join(record.line(now) for record in records)
        with self._lock:
            try:
                self._write(data)
                if sync:
                    os.fsync(self._fd)
            except OSError as error:
                # Half a record followed by whole ones would spoil those: go back to the last good end.
                self._cut(self._size)
                kind = StorageFull if error.errno in FULL_ERRORS else Unavailable
                raise kind(f"{self._path}: {error.strerror}", hint="free space on the endpoint") from error
            self._size += len(data)
            for record in records:
                self._apply(record, now)

    def compact(self, *, force: bool = False) -> None:
        """Rewrite the file without what no longer matters, if it has grown (or `force`). Never raises for space."""
        with self._lock:
            if not force and self._size < max(self._compact_at, _COMPACT_BYTES):
                return
            oldest = time.time() - KEEP_DELIVERED_S
            self._jobs = {
                job_id: job for job_id, job in self._jobs.items() if job.phase != "delivered" or job.at >= oldest
            }
            lines = []
            for job in self._jobs.values():
                record = Record(job_id=job.job_id, phase=job.phase, order=job.order, result=job.result)
                lines.append(record.line(job.at))
            try:
                write_atomic(self._path, b"".join(lines))
            except OSError as error:
                log.warning("journal: not compacted: %s", error)
                return
            os.close(self._fd)
            self._fd = self._open(None)
            self._size = os.fstat(self._fd).st_size
            self._compact_at = 4 * self._size

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)

    def _read(self) -> int:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        good = 0
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                log.warning("journal: the last record was cut short by a crash; ignored")
                break
            good += len(line)
            try:
                raw = json.loads(line)
                order = decode(JobOrder, raw["order"]) if raw.get("order") else None
                result = decode(JobReport, raw["result"]) if raw.get("result") else None
                record = Record(job_id=str(raw["job"]), phase=str(raw["phase"]), order=order, result=result)
                self._apply(record, float(raw["at"]))
            except (ValueError, KeyError, TypeError, AttributeError, DiamondError) as error:
                log.warning("journal: a record makes no sense and is ignored: %s", error)
        return good

    def _apply(self, record: Record, at: float) -> None:
        if record.phase not in PHASES:
            return
        before = self._jobs.get(record.job_id) or Remembered(job_id=record.job_id, phase=record.phase)
        order = record.order or before.order
        self._jobs[record.job_id] = replace(
            before,
            phase=record.phase,
            # A delivered job's spec is of no more use; without it a day of results stays small.
            order=None if record.phase == "delivered" else order,
            result=record.result or before.result,
            at=at,
        )

    def _open(self, good_bytes: int | None) -> int:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if good_bytes is not None and os.fstat(fd).st_size > good_bytes:
            os.ftruncate(fd, good_bytes)
        return fd

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _cut(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            log.error("journal: cannot undo a half-written record: %s", error)
