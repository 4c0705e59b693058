"""A job: one submission of a task to one scheduler. A task has a history of them."""

from __future__ import annotations

from dataclasses import dataclass

from diamond.core.images import ImageUse
from diamond.core.reasons import Reason
from diamond.core.states import JobState


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a job stands, as its endpoint last reported. Times are Unix seconds (UTC)."""

    id: str
    task_id: str
    attempt: int
    endpoint: str
    state: JobState
    reason: Reason | None = None
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    scheduler_id: str | None = None  # the scheduler's own name for it: a Slurm job id, a local pid
    hosts: tuple[str, ...] = ()
    run_dir: str = ""  # on the endpoint
    partition: str = ""
    continues: str | None = None  # the job whose work directory this one goes on in
    image: ImageUse | None = None  # what it runs in; None: the endpoint's own system
    pending_reason: str = ""
    expected_start_at: float | None = None
    created_at: float = 0.0
    queued_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
