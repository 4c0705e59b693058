"""Hands jobs to sbatch: a few at once, the most important first, and with patience when Slurm cannot take them.

Decides who is next and when; what a job is and what an answer means for it is the driver's business. A refusal that
holds for everybody (no controller) stops everybody; one that holds for a queue (as many jobs as allowed) stops that
queue. After a stop one job goes first, and the others follow when it was taken: no storm.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.slurm.pace import Backoff

log = logging.getLogger(__name__)

NUM_WORKERS = 4
EVERYBODY = ("", "", "")
Queue = tuple[str, str, str]


def queue_of(job: Submission) -> Queue:
    """What Slurm's submit limits go by."""
    return (job.partition or job.slurm.partition or "-", job.slurm.account or "-", job.slurm.qos or "-")


@dataclass
class _Hold:
    """A stop, and how it is felt out of."""

    backoff: Backoff = field(default_factory=Backoff)
    until: float = 0.0
    probing: bool = False  # one job is on its way to see whether the others may follow
    why: str = ""

    def lets_through(self, now: float) -> bool:
        return self.backoff.failures == 0 or (now >= self.until and not self.probing)


class Lines:
    """Who goes next. Not thread-safe: guarded by `Submitter`'s condition."""

    def __init__(self) -> None:
        self._lines: dict[Queue, list[tuple[int, int, str]]] = {}
        self._holds: dict[Queue, _Hold] = {EVERYBODY: _Hold()}
        self._members: dict[str, Queue] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, name: str, queue: Queue, *, priority: int, order: int) -> None:
        if name not in self._members:
            self._members[name] = queue
            heapq.heappush(self._lines.setdefault(queue, []), (-priority, order, name))
            self._holds.setdefault(queue, _Hold())

    def remove(self, name: str) -> None:
        self._members.pop(name, None)

    def pick(self, now: float) -> tuple[str | None, Queue, float | None]:
        """The next job and its queue; or None, and when to look again (None: when something changes)."""
        everybody = self._holds[EVERYBODY]
        if not everybody.lets_through(now):
            return None, EVERYBODY, None if everybody.probing else everybody.until
        soonest: float | None = None
        best: tuple[tuple[int, int, str], Queue] | None = None
        for queue, line in self._lines.items():
            while line and self._members.get(line[0][2]) != queue:
                heapq.heappop(line)
            hold = self._holds[queue]
            if not line:
                continue
            if not hold.lets_through(now):
                if not hold.probing:
                    soonest = hold.until if soonest is None else min(soonest, hold.until)
            elif best is None or line[0] < best[0]:
                best = (line[0], queue)
        if best is None:
            return None, EVERYBODY, soonest
        (_, _, name), queue = best
        heapq.heappop(self._lines[queue])
        del self._members[name]
        for hold in (everybody, self._holds[queue]):
            hold.probing = hold.backoff.failures > 0
        return name, queue, None

    def back(self, queue: Queue) -> None:
        """Whoever was picked from this queue is done, whatever came of it."""
        for hold in (self._holds[EVERYBODY], self._holds[queue]):
            hold.probing = False

    def taken(self, queue: Queue) -> None:
        """Slurm answered about a job of this queue, and not to say that it cannot take any."""
        for hold in (self._holds[EVERYBODY], self._holds.setdefault(queue, _Hold())):
            hold.backoff.succeeded()
            hold.why = ""

    def held(self, queue: Queue, why: str, now: float, *, everybody: bool) -> None:
        """Slurm cannot take jobs, of this queue or at all."""
        for key in (EVERYBODY, queue):
            hold = self._holds.setdefault(key, _Hold())
            if (key == EVERYBODY) == everybody:
                hold.why = why
                # Several that were under way at once are one failure.
                if now >= hold.until:
                    hold.until = now + hold.backoff.failed()

    def why(self, queue: Queue) -> str:
        """What keeps this queue waiting; empty when nothing does."""
        return self._holds[EVERYBODY].why or (self._holds[queue].why if queue in self._holds else "")


class Submitter:
    """The threads that run sbatch; `work(name)` submits one job. Thread-safe."""

    def __init__(self, work: Callable[[str], None]) -> None:
        self._work = work
        self._lines = Lines()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"sbatch-{number}", daemon=True) for number in range(NUM_WORKERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def add(self, job: Submission, order: int) -> None:
        with self._changed:
            self._lines.add(job.name, queue_of(job), priority=job.priority, order=order)
            self._changed.notify()

    def remove(self, name: str) -> None:
        with self._changed:
            self._lines.remove(name)

    def taken(self, job: Submission) -> None:
        with self._changed:
            self._lines.taken(queue_of(job))

    def held(self, job: Submission, why: str, *, everybody: bool) -> None:
        with self._changed:
            self._lines.held(queue_of(job), why, time.monotonic(), everybody=everybody)

    def why(self, job: Submission) -> str:
        with self._changed:
            return self._lines.why(queue_of(job))

    def close(self, within_s: float) -> None:
        """Start nothing more and wait a while for what is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                now = time.monotonic()
                name, queue, look_at = self._lines.pick(now)
                if name is None:
                    self._changed.wait(None if look_at is None else max(0.01, look_at - now))
                    continue
            try:
                self._work(name)
            except Exception:  # the thread serves everybody
                log.exception("submitting %s: unexpected error", name)
            with self._changed:
                self._lines.back(queue)
                self._changed.notify_all()


def still_submitting(names: Iterable[str]) -> set[str]:
    """Which of these jobs an sbatch of an earlier life of this agent is still submitting, on this machine."""
    wanted = {f"--job-name={name}".encode(): name for name in names}
    found: set[str] = set()
    if not wanted:
        return found
    uid = os.getuid()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid != uid:
                continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read(1 << 20).split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if any(word.endswith(b"sbatch") for word in words[:3]):  # a site's wrapper is run by an interpreter
            found |= {wanted[word] for word in words if word in wanted}
    return found
