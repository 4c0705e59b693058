"""Curves of programs that only print: reads a job's log and appends what `diamond.core.curves` finds to metrics.jsonl.

Each point once, whatever happens to this process: before lines are appended, curves.json says (by rename) which ones,
how long the file was and how far the log is read with them. After a restart they are looked for behind that place, and
appended if they are not there. Nothing is synced to the disk for it: what a machine loses with its power, it loses of
the log as well.

The program may append to the same file. Both open it for appending and write whole lines at once, so lines do not mix.
Without patterns, curves are made only of programs that log no metrics themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diamond.agent.tail import read_from
from diamond.core.curves import Reader, Record
from diamond.core.faults import fault_point
from diamond.core.ids import is_id
from diamond.core.rundir import RunDir, read_json
from diamond.core.wire import JobOrder

_PERIOD_S = 1.0
_HOLD_S = 3.0  # a program that logs metrics has begun to by then
_PIECE_BYTES = 64 * 1024
_LOOK_BYTES = 1024 * 1024  # of one job, at one look
_LAST_LOOK_S = 0.25  # at a time, of a job that is over: its end waits for it
_LAST_BYTES = 64 * 1024 * 1024  # read of a log when its job is over; more would keep everybody waiting
_STATE_BYTES = 4 * 1024 * 1024
_MAX_NAMED = 3  # patterns, in a note
_REST = 9  # times as long as a look took: this is a tenth of the thread's time at most
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Progress:
    """How far one job's output is read."""

    def __init__(self, order: JobOrder, run_dir: RunDir) -> None:
        spec = order.spec
        self.run_dir = run_dir
        self.is_automatic = spec.curves is None
        self.reader = Reader(spec.curves, ranked=spec.ranks_per_node > 0 and spec.ranks_per_node * spec.num_nodes > 1)
        self.looked_at = time.monotonic()
        self.offset = 0
        self.own_bytes = 0  # of metrics.jsonl, written here
        self.is_over = False
        self.is_read = False  # to the end of the output of a job that is over
        self.is_idle = False  # the program logs metrics itself
        self.held_since: float | None = None
        self.pending = b""  # lines that curves.json promises
        self.pending_at = 0  # how long metrics.jsonl was then
        self._promise_text = ""  # of curves.json, as long as it could not be written
        self._resume(order)

    def _resume(self, order: JobOrder) -> None:
        if not os.path.lexists(self.run_dir.curves):
            if is_id(order.continues, "job"):
                before = read_json(RunDir(self.run_dir.path.parent / order.continues).curves, _STATE_BYTES)
                self.reader.restore(_mapping(before.get("reader")), as_next=True)
            return
        raw = read_json(self.run_dir.curves, _STATE_BYTES)
        offset, own, at, lines = (raw.get(key) for key in ("offset", "own_bytes", "at", "lines"))
        numbers = (offset, own, at)
        if any(type(one) is not int or not 0 <= one < 2**62 for one in numbers) or not (
            isinstance(lines, str) and lines.isascii()
        ):
            # It cannot be read, so nobody knows what was told: a gap is better than points that come twice.
            self.offset = _size(self.run_dir.stream("log"))
            self.own_bytes = _size(self.run_dir.stream("metrics"))
            self.reader.pass_over()
            return
        self.offset, self.own_bytes, self.pending_at = int(offset or 0), int(own or 0), int(at or 0)
        self.is_idle = raw.get("is_idle") is True
        self.pending = lines.encode()
        self.reader.restore(_mapping(raw.get("reader")))

    def is_foreign(self) -> bool:
        """Whether somebody else has written metrics."""
        return _size(self.run_dir.stream("metrics")) > self.own_bytes

    def look(self, room: int) -> bool:
        """Take in up to `room` bytes; whether there is more. Raises OSError: nothing is lost, it may work later."""
        self.settle()
        while room > 0 and not self.is_idle:
            piece = read_from(self.run_dir.stream("log"), self.offset + self.reader.num_unread, _PIECE_BYTES)
            is_last = piece.is_end and self.is_over
            if not piece.data and not (is_last and self.reader.num_unread):
                return False
            before = (self.reader.state(), self.reader.num_unread)
            found = self.reader.feed(piece.data, time.time(), is_last=is_last)
            offset = self.offset + before[1] + len(piece.data) - self.reader.num_unread
            if found and not self._may_tell():
                self._forget_since(before[0])
                return False
            self.offset = offset
            if found:
                self._tell(found)
            room -= len(piece.data)
            if piece.is_end:
                return False
        return not self.is_idle

    def _may_tell(self) -> bool:
        """Programs that log metrics print them, too; whether this is one shows within moments."""
        if not self.is_automatic:
            return True
        if self.is_foreign():
            self.is_idle = True
            return False
        now = time.monotonic()
        self.held_since = now if self.held_since is None else self.held_since
        return self.is_over or self.own_bytes > 0 or now - self.held_since >= _HOLD_S

    def _forget_since(self, state: dict[str, Any]) -> None:
        """Read the same bytes again later."""
        reader = self.reader.renewed()
        reader.restore(state)
        self.reader = reader

    def _tell(self, records: list[Record]) -> None:
        self._promise(records)
        self.settle()

    def _promise(self, records: list[Record]) -> None:
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        at = _size(self.run_dir.stream("metrics"))
        raw = {
            "offset": self.offset,
            "own_bytes": self.own_bytes + len(lines),
            "at": at,
            "lines": lines,
            "is_idle": self.is_idle,
            "reader": self.reader.state(),
        }
        # Lines are ASCII, as JSON writes them: a character is a byte.
        self.pending, self.pending_at, self.own_bytes = lines.encode(), at, self.own_bytes + len(lines)
        self._promise_text = json.dumps(raw, separators=(",", ":"))

    def settle(self) -> None:
        """Append what was promised, but for what is there. Raises OSError."""
        if not self.pending:
            return
        if self._promise_text:
            self._write_promise()
            fault_point("agent.curves_promised")
        path = self.run_dir.stream("metrics")
        there = read_from(path, self.pending_at, 2 * _STATE_BYTES).data
        rest, lead = self.pending, b""
        if there and self.pending not in there:
            ends = [0, *(found.end() for found in re.finditer(b"\n", self.pending))]
            held = bisect_left(ends, True, key=lambda end: self.pending[:end] not in there) - 1
            rest = self.pending[ends[held] :]
            lead = b"" if there.endswith(b"\n") else b"\n"  # a full disk took part of a line
        elif there:
            rest = b""
        if rest:
            fd = os.open(path, _APPEND, 0o600)
            try:
                done = os.write(fd, lead + rest)
            finally:
                os.close(fd)
            if done < len(lead + rest):
                raise OSError("the disk took only part of the lines")
        self.pending = b""
        fault_point("agent.curves_told")

    def _write_promise(self) -> None:
        beside = self.run_dir.curves.with_name(".curves.json.new")
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(self._promise_text)
        os.replace(beside, self.run_dir.curves)
        self._promise_text = ""


class PlainCurves:
    """For one thread."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Progress] = {}
        self._rest_until = float("-inf")

    def gather(self, order: JobOrder, path: Path, *, is_over: bool) -> bool:
        """Take in what a job has printed since; of one that is over, whether that was all."""
        if order.spec.curves == () or order.work is not None:
            return True
        job = self._jobs.get(order.job_id)
        began = time.monotonic()
        if job is None:
            job = self._jobs[order.job_id] = _Progress(order, RunDir(path))
        if not is_over and (began - job.looked_at < _PERIOD_S or began < self._rest_until):
            return True
        if is_over and not job.is_over:
            job.is_over = True
            self._skip(job)
        job.looked_at = began
        more = False
        # A full disk, or a folder that is gone, delays curves; it keeps no job from ending.
        with contextlib.suppress(OSError):
            more = job.look(_LOOK_BYTES)
            while more and is_over and time.monotonic() - began < _LAST_LOOK_S:
                more = job.look(_LOOK_BYTES)
            job.is_read = is_over and not more
        self._rest_until = time.monotonic() + _REST * (time.monotonic() - began)
        return not (is_over and more)

    @staticmethod
    def _skip(job: _Progress) -> None:
        left = _size(job.run_dir.stream("log")) - job.offset
        if left > _LAST_BYTES:
            job.reader = job.reader.renewed()
            job.reader.restore({"skipping": True})
            job.reader.pass_over()
            job.offset += left - _LAST_BYTES

    def note(self, job_id: str) -> str:
        """What is to be said of a job's patterns once its output is read: which matched no line. May be empty."""
        job = self._jobs.get(job_id)
        unmatched = job.reader.unmatched() if job is not None and job.is_read else []
        if not unmatched:
            return ""
        named = ", ".join(f"'{text}'" for text in unmatched[:_MAX_NAMED])
        more = f" and {len(unmatched) - _MAX_NAMED} more" if len(unmatched) > _MAX_NAMED else ""
        kind = "curve pattern" if len(unmatched) == 1 else "curve patterns"
        return f"{kind} {named}{more} matched no line of the output; compare with the log, where capitals count"

    def forget(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self._jobs.pop(job_id, None)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _mapping(raw: object) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else {}
