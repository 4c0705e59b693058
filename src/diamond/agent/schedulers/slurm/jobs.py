"""The jobs the Slurm driver has in hand, and how one is put into words. Shared by its threads, under one lock."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from pathlib import Path

from diamond.agent.schedulers.base import Observed, Submission, final_state
from diamond.agent.schedulers.causes import KillCause, load_cause
from diamond.agent.schedulers.slurm import spool
from diamond.agent.schedulers.slurm.hostlist import expand
from diamond.agent.schedulers.slurm.pace import Backoff
from diamond.agent.schedulers.slurm.queue import Row, Status
from diamond.agent.schedulers.slurm.result import Last, end_of
from diamond.core.reasons import Reason
from diamond.core.states import JobState

log = logging.getLogger(__name__)

HANDING_OVER = "being handed to Slurm"
LOOKING = "looking in Slurm's queue whether it was handed over"
_EXPECTED_MOVES_S = 60.0  # an estimate that moved less is the same estimate: each change is a message to the server


class Phase(Enum):
    """How far the driver has brought a job."""

    READY = "ready"  # may be given to sbatch
    SUBMITTING = "submitting"  # an sbatch is under way
    UNSURE = "unsure"  # nobody knows whether Slurm has it: only a look at the queue may decide
    PLACED = "placed"  # Slurm gave it a number
    OVER = "over"


class SlurmJob:
    """A job in the driver's memory. Guarded by the table's lock; times are monotonic unless they end in `_at`."""

    def __init__(self, spooled: spool.Spooled, phase: Phase) -> None:
        self.spooled = spooled
        self.phase = phase
        self.cause: KillCause | None = load_cause(spooled.submission.run_dir)
        self.observed = Observed(
            state=JobState.QUEUED,
            pending_reason=HANDING_OVER if phase is Phase.READY else LOOKING,
            scheduler_id=spooled.slurm_id or None,
            queued_at=spooled.queued_at,
        )
        self.write_lock = threading.Lock()  # of its slurm.json
        self.row: Row | None = None
        self.status: Status | None = None
        self.since = time.monotonic()
        self.sure_after = time.monotonic()  # only a query begun later can tell that Slurm does not have the job
        self.began_unix_at: float | None = None  # when it was first known to run
        self.saw_start = 0.0  # when its `started` was seen
        self.saw_end = 0.0  # when its exit.json was seen
        self.ended = 0.0  # when Slurm was first seen to call it over
        self.gone = 0.0  # when Slurm was first seen not to know it
        self.num_gone = 0
        self.num_back = 0  # queries that showed it waiting again though it had begun
        self.cancel_due = 0.0
        self.cancel_backoff = Backoff(first_s=3.0)
        self.was_requeued = False
        self.without_dependency = False
        self.place = ""

    def begins_anew(self) -> None:
        """Slurm put it back into its queue. What the run before left behind says nothing about the next."""
        self.was_requeued = True
        self.began_unix_at, self.status, self.place = None, None, ""
        self.saw_start = self.saw_end = self.ended = 0.0
        self.num_back = 0
        self.since = time.monotonic()

    @property
    def name(self) -> str:
        return self.spooled.submission.name

    @property
    def submission(self) -> Submission:
        return self.spooled.submission

    @property
    def run_dir(self) -> Path:
        return self.spooled.submission.run_dir

    @property
    def slurm_id(self) -> str:
        return self.spooled.slurm_id

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def is_running(self) -> bool:
        return self.observed.state is JobState.RUNNING


class Jobs:
    """The table. `changed` is set when `observe` has news."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_name: dict[str, SlurmJob] = {}
        self.changed_at = time.monotonic()
        self.has_news = False
        self._unwritten: list[SlurmJob] = []
        self.on_over: Callable[[SlurmJob], None] = lambda job: None

    def live(self) -> list[SlurmJob]:
        with self.lock:
            return [job for job in self.by_name.values() if not job.is_over]

    def show(self, job: SlurmJob, seen: Observed) -> None:
        """Make this what is said of a job; the same again is no news."""
        if seen != job.observed:
            if seen.state != job.observed.state:
                self.changed_at = time.monotonic()
            job.observed = seen
            self.has_news = True

    def waits(self, job: SlurmJob, why: str, row: Row | None = None) -> None:
        """It is in a queue: Slurm's, or the one before it."""
        text = f"{why}; {job.place}" if job.place else why
        self.show(
            job,
            Observed(
                state=JobState.QUEUED,
                pending_reason=text,
                scheduler_id=job.slurm_id or None,
                partition=row.partition if row is not None else job.observed.partition,
                expected_start_at=_steady(job.observed.expected_start_at, row.start_at if row is not None else None),
                queued_at=job.spooled.queued_at,
            ),
        )

    def runs(self, job: SlurmJob, row: Row | None, text: str = "") -> None:
        if job.began_unix_at is None:
            job.began_unix_at = (row.start_at if row is not None else None) or time.time()
        known = job.observed
        self.show(
            job,
            Observed(
                state=JobState.RUNNING,
                pending_reason=text,
                scheduler_id=job.slurm_id or None,
                hosts=expand(row.nodes) if row is not None else known.hosts,
                partition=row.partition if row is not None else known.partition,
                queued_at=job.spooled.queued_at,
                started_at=job.began_unix_at,
            ),
        )

    def conclude(self, job: SlurmJob) -> None:
        """It is over, and what Slurm and the job left behind say how."""
        known = job.observed
        last = Last(
            submission=job.submission,
            row=job.row,
            status=job.status,
            scheduler_id=job.slurm_id,
            queued_at=job.spooled.queued_at,
            started_at=job.began_unix_at,
            hosts=(expand(job.row.nodes) if job.row is not None else ()) or known.hosts,
            partition=job.row.partition if job.row is not None else known.partition,
        )
        try:
            seen = end_of(last)
        except Exception as error:  # what a job leaves behind can be anything
            log.exception("job %s: what it left cannot be made sense of", job.name)
            self.never_ran(job, Reason.LOST, f"what it left cannot be made sense of: {type(error).__name__}")
            return
        self.over(job, seen)

    def never_ran(self, job: SlurmJob, reason: Reason, detail: str) -> None:
        self.over(
            job,
            Observed(
                state=final_state(reason),
                reason=reason,
                detail=detail,
                scheduler_id=job.slurm_id or None,
                partition=job.observed.partition,
                queued_at=job.spooled.queued_at,
                ended_at=time.time(),
            ),
        )

    def over(self, job: SlurmJob, seen: Observed) -> None:
        job.phase = Phase.OVER
        job.spooled = replace(job.spooled, result=seen)
        self._unwritten.append(job)
        self.show(job, seen)
        self.on_over(job)

    def write_results(self) -> None:
        """Put down how jobs ended: Slurm forgets that within minutes. Without the lock, since disks take their time."""
        with self.lock:
            pending, self._unwritten = self._unwritten, []
        for job in pending:
            self.write(job)

    def write(self, job: SlurmJob) -> None:
        with job.write_lock:
            if self.by_name.get(job.name) is job:
                spool.note(job.spooled)

    def forget(self, names: Iterable[str]) -> None:
        with self.lock:
            ended = [job for name in names if (job := self.by_name.get(name)) is not None and job.is_over]
            for job in ended:
                del self.by_name[job.name]
        for job in ended:
            with job.write_lock:
                spool.remove(job.run_dir)

    def take_news(self) -> bool:
        with self.lock:
            news, self.has_news = self.has_news, False
            return news


def _steady(before: float | None, now: float | None) -> float | None:
    if before is None or now is None:
        return now
    return before if abs(now - before) < _EXPECTED_MOVES_S else now


class Looker:
    """Cheap looks at run directories between two queries: one `stat` a live job tells its start or its end at once.

    A job that Slurm was given a moment ago is looked at more often: somebody may be watching it start. On a slow file
    system the looks become rarer, so that they take no more than a tenth of the time.
    """

    EVERY_S = 0.2
    QUICK_S = 0.03
    FRESH_S = 10.0

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._all_at = float("-inf")
        self.num_looks = 0

    def look(self) -> float:
        """Look at every live job whose turn it is; returns the seconds until the next time."""
        began = time.monotonic()
        at_all = began - self._all_at >= self.EVERY_S - self.QUICK_S / 2
        if at_all:
            self._all_at = began
        with self._jobs.lock:
            telling = [job for job in self._jobs.by_name.values() if _tells(job)]
            fresh = [job for job in telling if not job.is_running and began - job.since < self.FRESH_S]
            wanted = [(job, str(job.run_dir) + "/", job.is_running) for job in (telling if at_all else fresh)]
        found: list[tuple[SlurmJob, bool, float]] = []
        for job, folder, running in wanted:
            mtime = _mtime(folder + ("exit.json" if running else "started"))
            if mtime is not None:
                found.append((job, running, mtime))
        self.num_looks += len(wanted)
        with self._jobs.lock:
            for job, running, mtime in found:
                if _tells(job):
                    self._note(job, running, mtime)
        return max(self.QUICK_S if fresh else self.EVERY_S, 10 * (time.monotonic() - began))

    def look_at(self, job: SlurmJob) -> None:
        """At one, under the table's lock."""
        if _tells(job) and not job.is_running and (mtime := _mtime(f"{job.run_dir}/started")) is not None:
            self._note(job, False, mtime)

    def _note(self, job: SlurmJob, running: bool, mtime: float) -> None:
        if running:
            job.saw_end = time.monotonic()
        else:
            job.saw_start = time.monotonic()
            job.began_unix_at = job.began_unix_at or mtime
            self._jobs.runs(job, job.row)


def _tells(job: SlurmJob) -> bool:
    """Whether a look can tell anything new. A `started` may be the mark of a cancel, or of a run that is over."""
    if job.is_over or job.cause is not None or job.was_requeued:
        return False
    return not job.saw_end if job.is_running else not job.saw_start


def _mtime(path: str) -> float | None:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return None
