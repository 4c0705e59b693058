"""The jobs this agent has in hand, and what the server knows of each. Shared by the loop and the reporter.

Owns no thread, no file and no connection. A job enters when its order is accepted and leaves when the server has
acknowledged its final state.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

from diamond.agent.image_policy import runs_beside
from diamond.agent.schedulers.base import Observed, Submission, final_state
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, clean, moment, read_exit, whole
from diamond.core.states import Desired, JobState
from diamond.core.wire import JobOrder, JobReport

MAX_DETAIL = 4000  # what the server keeps of one
_EAGER_S = 3.0


class Phase(IntEnum):
    """How far the agent has brought a job."""

    ACCEPTED = 0  # journaled; its directory is not complete
    READY = 1  # its directory is complete; not handed over
    SUBMITTED = 2  # the scheduler has it
    COLLECTING = 3  # over; its outputs are on their way
    OVER = 4  # has its result


class Told(IntEnum):
    """How much of a result is told. Less, one step at a time, when the server refuses it: a job must be able to end."""

    ALL = 0
    LESS = 1  # how it ended, without its outputs
    LEAST = 2  # that, without what is left of its streams


class Tracked:
    """One job. The table's lock guards `report`, `result`, `acked`, `told` and `is_orphan`; the rest is the loop's."""

    def __init__(self, order: JobOrder, run_dir: Path, phase: Phase = Phase.ACCEPTED) -> None:
        self.order = order
        self.run_dir = run_dir
        self.phase = phase
        self.is_cancelled = order.desired == Desired.CANCEL
        self.yields = order.desired == Desired.YIELD  # it is to save and stop, and to go on in another job
        self.report: JobReport | None = None  # the newest state to tell
        self.told: JobReport | None = None  # the newest the server has acknowledged
        self.result: JobReport | None = None
        # Bytes the server holds of each stream; a missing key means that only the server knows.
        self.acked: dict[str, int] = dict(order.received)
        self.is_orphan = False  # the server does not know the job (any more)
        self.eager_until = 0.0  # monotonic; it has just begun: its first line is news
        self.quiet_until = 0.0  # monotonic; the server could not digest what was said of it
        self.room_bytes = 2**30  # of a stream in one report; the reporter lowers it for a job that is slow to read
        # How the server took its result; the reporter's own.
        self.tell = Told.ALL
        self.num_refused = 0
        self.refusal = ""

    @property
    def job_id(self) -> str:
        return self.order.job_id

    @property
    def stages_slowly(self) -> bool:
        """Whether its directory needs more than a few small files: something fetched, or an image looked at."""
        return bool(self.order.spec.bundle_refs or self.order.spec.secrets or self.order.image is not None)

    @property
    def has_streams(self) -> bool:
        """Whether its stream files may grow, or hold bytes the server has not."""
        state = self.report.state if self.report is not None else JobState.PLANNED
        return self.result is not None or state in (JobState.RUNNING, JobState.FINISHING)

    @property
    def has_news(self) -> bool:
        return self.result is not None or self.report is not self.told


class JobTable:
    """Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.on_news: Callable[[], None] = lambda: None
        self._jobs: dict[str, Tracked] = {}
        self._live: dict[str, Tracked] = {}  # those with news or streams: what a report is made of

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: str) -> Tracked | None:
        with self.lock:
            return self._jobs.get(job_id)

    def is_running(self, job_id: str) -> bool:
        """Whether the scheduler was last seen running it."""
        with self.lock:
            job = self._jobs.get(job_id)
            return (
                job is not None
                and job.result is None
                and job.phase == Phase.SUBMITTED
                and job.report is not None
                and job.report.state is JobState.RUNNING
            )

    def all(self) -> list[Tracked]:
        with self.lock:
            return list(self._jobs.values())

    def live(self) -> list[Tracked]:
        """Jobs there may be something to report of."""
        with self.lock:
            return list(self._live.values())

    def add(self, jobs: Iterable[Tracked]) -> None:
        with self.lock:
            for job in jobs:
                self._jobs[job.job_id] = job
                self._place(job)
        self.on_news()

    def set_report(self, job: Tracked, report: JobReport) -> None:
        with self.lock:
            if job.result is None:
                if report.state is JobState.RUNNING and not job.eager_until:
                    job.eager_until = time.monotonic() + _EAGER_S
                job.report = report
                self._place(job)
        self.on_news()

    def set_result(self, job: Tracked, result: JobReport) -> None:
        """The final word; the first one stays."""
        with self.lock:
            if job.result is None:
                job.result = result
                job.phase = Phase.OVER
                job.quiet_until = 0.0
                self._place(job)
        self.on_news()

    def resync(self, job: Tracked, order: JobOrder) -> None:
        """The server said anew what it holds: believe it, and tell it everything again."""
        with self.lock:
            job.acked = dict(order.received)
            job.told = None
            job.is_orphan = False
            self._place(job)
        self.on_news()

    def acknowledge(self, job: Tracked, report: JobReport | None, received: dict[str, int]) -> None:
        with self.lock:
            job.acked |= received
            if report is not None and job.report is report:
                job.told = report
            self._place(job)

    def orphan(self, job: Tracked) -> None:
        with self.lock:
            job.is_orphan = True
            self._place(job)

    def remove(self, jobs: Iterable[Tracked]) -> None:
        with self.lock:
            for job in jobs:
                self._jobs.pop(job.job_id, None)
                self._live.pop(job.job_id, None)

    def _place(self, job: Tracked) -> None:
        if job.job_id in self._jobs and not job.is_orphan and (job.has_news or job.has_streams):
            self._live[job.job_id] = job
        else:
            self._live.pop(job.job_id, None)


def report_of(job: Tracked, seen: Observed) -> JobReport:
    """What the scheduler says, in the words of the wire."""
    state, reason, detail = seen.state, seen.reason, seen.detail
    if reason is not None and (chained := _chain_reason(job, reason)) is not None:
        reason, detail = chained
        state = final_state(reason)
    return JobReport(
        job_id=job.job_id,
        state=state,
        reason=reason,
        detail=detail[:MAX_DETAIL],
        exit_code=seen.exit_code,
        signal=seen.signal,
        scheduler_id=seen.scheduler_id,
        hosts=seen.hosts,
        run_dir=str(job.run_dir),
        pending_reason=seen.pending_reason,
        partition=seen.partition,
        expected_start_at=seen.expected_start_at,
        queued_at=seen.queued_at,
        started_at=seen.started_at,
        ended_at=seen.ended_at,
    )


def _chain_reason(job: Tracked, reason: Reason) -> tuple[Reason, str] | None:
    """How a link of a chain ended, where that differs from what its exit status alone says."""
    run_dir = RunDir(job.run_dir)
    if job.order.place is not None and job.order.chained and reason is Reason.PREEMPTED:
        return Reason.CONTINUED, "it gave up its place in the pool before it began"
    if job.order.continues and os.path.lexists(run_dir.not_needed):
        return Reason.CANCELLED, "not needed: the job before it finished the task"
    if job.order.chained and reason in (Reason.COMPLETED, Reason.EXIT_NONZERO, Reason.SIGNALLED):
        record = read_exit(run_dir)
        if record is not None and record.more:
            return Reason.CONTINUED, "its state is saved; it goes on in the next job"
    return None


def finishing(report: JobReport) -> JobReport:
    """What is said while a job's outputs are on their way: that it is over, not yet how."""
    return replace(report, state=JobState.FINISHING, reason=None, detail="", exit_code=None, signal=None)


def verdict(job: Tracked, reason: Reason, detail: str) -> JobReport:
    """The result of a job that never ran, or of which nothing is left."""
    return JobReport(
        job_id=job.job_id,
        state=final_state(reason),
        reason=reason,
        detail=detail[:MAX_DETAIL],
        run_dir=str(job.run_dir),
        ended_at=time.time(),
    )


def reduced(result: JobReport, why: str) -> JobReport:
    """The least that ends a job: for a server that refused the whole, with what every server takes."""
    detail = f"the server refused the full report ({clean(why, 300)}); its outputs stay on the endpoint"
    return JobReport(
        job_id=result.job_id,
        state=result.state,
        reason=result.reason,
        detail=f"{clean(result.detail, 500)}; {detail}" if result.detail else detail,
        exit_code=_sane_number(result.exit_code),
        signal=_sane_number(result.signal),
        run_dir=clean(result.run_dir, 1000),
        queued_at=_sane_time(result.queued_at),
        started_at=_sane_time(result.started_at),
        ended_at=_sane_time(result.ended_at),
    )


def _sane_number(raw: int | None) -> int | None:
    try:
        return whole(raw, 0, 255)
    except ValueError:
        return None


def _sane_time(raw: float | None) -> float | None:
    try:
        return moment(raw)
    except ValueError:
        return None


def submission_of(job: Tracked, time_limit_s: int | None) -> Submission:
    """What the order asks, in the words of schedulers."""
    spec, needs = job.order.spec, job.order.spec.resources
    return Submission(
        name=job.job_id,
        run_dir=job.run_dir,
        script=RunDir(job.run_dir).script,
        cpus=needs.cpus_min,
        gpus=needs.gpus,
        gpu_type=job.order.gpu_type or needs.gpu_type,
        mem_bytes=needs.mem_bytes_min,
        time_limit_s=time_limit_s,
        priority=spec.priority,
        num_nodes=spec.num_nodes,
        warn_s=spec.slurm.warning,
        partition=job.order.partition,
        after=job.order.after,
        slurm=spec.slurm,
        on_login=runs_beside(job.order),
        user=job.order.user,
        place=job.order.place,
    )
