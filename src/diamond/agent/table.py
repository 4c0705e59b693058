"""The jobs this agent has in hand, and what the server knows of each. Shared by the loop and the reporter.

Owns no thread, no file and no connection. A job enters when its order is accepted and leaves when the server has
acknowledged its final state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

from diamond.agent.schedulers.base import Observed, Submission, final_state
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.states import Desired, JobState
from diamond.core.wire import JobOrder, JobReport


class Phase(IntEnum):
    """How far the agent has brought a job."""

    ACCEPTED = 0  # journaled; its directory is not complete
    READY = 1  # its directory is complete; not handed over
    SUBMITTED = 2  # the scheduler has it
    COLLECTING = 3  # over; its outputs are on their way
    OVER = 4  # has its result


class Tracked:
    """One job. The table's lock guards `report`, `result`, `acked`, `told` and `is_orphan`; the rest is the loop's."""

    def __init__(self, order: JobOrder, run_dir: Path, phase: Phase = Phase.ACCEPTED) -> None:
        self.order = order
        self.run_dir = run_dir
        self.phase = phase
        self.is_cancelled = order.desired == Desired.CANCEL
        self.report: JobReport | None = None  # the newest state to tell
        self.told: JobReport | None = None  # the newest the server has acknowledged
        self.result: JobReport | None = None
        # Bytes the server holds of each stream; a missing key means that only the server knows.
        self.acked: dict[str, int] = dict(order.received)
        self.is_orphan = False  # the server does not know the job (any more)
        self.quiet_until = 0.0  # monotonic; the server could not digest what was said of it

    @property
    def job_id(self) -> str:
        return self.order.job_id

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
                job.report = report
                self._place(job)
        self.on_news()

    def set_result(self, job: Tracked, result: JobReport) -> None:
        """The final word; the first one stays."""
        with self.lock:
            if job.result is None:
                job.result = result
                job.phase = Phase.OVER
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
    return JobReport(
        job_id=job.job_id,
        state=seen.state,
        reason=seen.reason,
        detail=seen.detail,
        exit_code=seen.exit_code,
        signal=seen.signal,
        scheduler_id=seen.scheduler_id,
        hosts=seen.hosts,
        run_dir=str(job.run_dir),
        pending_reason=seen.pending_reason,
        queued_at=seen.queued_at,
        started_at=seen.started_at,
        ended_at=seen.ended_at,
    )


def finishing(report: JobReport) -> JobReport:
    """What is said while a job's outputs are on their way: that it is over, not yet how."""
    return replace(report, state=JobState.FINISHING, reason=None, detail="", exit_code=None, signal=None)


def verdict(job: Tracked, reason: Reason, detail: str) -> JobReport:
    """The result of a job that never ran, or of which nothing is left."""
    return JobReport(
        job_id=job.job_id,
        state=final_state(reason),
        reason=reason,
        detail=detail,
        run_dir=str(job.run_dir),
        ended_at=time.time(),
    )


def submission_of(job: Tracked, time_limit_s: int | None) -> Submission:
    """What the order asks, in the words of schedulers."""
    spec, needs = job.order.spec, job.order.spec.resources
    return Submission(
        name=job.job_id,
        run_dir=job.run_dir,
        script=RunDir(job.run_dir).script,
        cpus=needs.cpus_min,
        gpus=needs.gpus,
        gpu_type=needs.gpu_type,
        mem_bytes=needs.mem_bytes_min,
        time_limit_s=time_limit_s,
        priority=spec.priority,
        num_nodes=spec.num_nodes,
    )
