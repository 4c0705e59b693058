"""How a task's training stands: what its jobs measured, and what follows from it. Reads, never writes."""

from __future__ import annotations

import math
from dataclasses import replace

import sqlalchemy as sa

from diamond.core import training
from diamond.core.codec import decode
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.core.training import Measure, Size, Throughput, Training
from diamond.server.services import chains, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import JobRow

_MAX_JOBS = 200  # of a task, the newest
_LONGEST_STARTUP_S = 24 * 3600.0

_JOBS = (
    sa.select(JobRow.id, JobRow.state, JobRow.started_at, JobRow.time_limit_s, JobRow.chained)
    .where(JobRow.task_id == sa.bindparam("task"))
    .order_by(JobRow.attempt.desc())
    .limit(_MAX_JOBS)
)


def of_task(ctx: Context, user_id: str, task_id: str) -> Training:
    """How the training of a task stands; empty where there is none.

    Raises:
        NotFound: there is no such task.
    """
    with ctx.db.read() as session:
        task = tasks.find(session, user_id, task_id)
        state = TaskState(task.state)
        is_over = state.is_final
        jobs = session.execute(_JOBS, {"task": task_id}).all()
        left_in_all_s = chains.time_left(session, task, decode(TaskSpec, task.spec)) if jobs and not is_over else None
    read = [(job, ctx.measures.of_job(job.id)) for job in jobs]  # the newest first
    source, found = next(((job, seen) for job, seen in read if seen.latest is not None), (None, None))
    if source is None or found is None or found.latest is None:
        return Training()
    table: dict[Size, Throughput] = {}
    for _, seen in reversed(read):
        for row in seen.sizes.values():
            training.merge(table, row)
    answer = Training(latest=found.latest, by_size=tuple(training.ordered(table)))
    if is_over:
        return replace(answer, stage="over")

    now = ctx.clock()
    running = next((job for job in reversed(jobs) if job.state == JobState.RUNNING.value), None)
    startup_s = _startup_s(found.first, source.started_at)
    walltime_s: float | None = (running or source).time_limit_s
    left_s = 0.0
    if running is not None:
        ends_at = math.inf if walltime_s is None else (running.started_at or now) + walltime_s
        if running.id == source.id:
            if walltime_s is None and found.latest.ends_at is not None and running.started_at:
                # The endpoint's own rules limit jobs for which no limit was asked.
                ends_at = found.latest.ends_at
                walltime_s = max(0.0, ends_at - running.started_at)
            left_s = max(0.0, ends_at - found.latest.t)
        else:  # it has begun, and its program has not
            left_s = max(0.0, ends_at - (running.started_at or now) - startup_s)
    remaining_s = found.latest.remaining_s
    over_s = None
    if remaining_s is not None and left_in_all_s is not None:
        ran_s = max(0.0, found.latest.t - (running.started_at or now)) if running is not None else 0.0
        over_s = remaining_s + ran_s - left_in_all_s
    return replace(
        answer,
        remaining_s=remaining_s,
        jobs_expected=training.jobs_expected(found.latest, walltime_s=walltime_s, startup_s=startup_s, left_s=left_s),
        walltime_s=walltime_s,
        chained=(running or source).chained,
        over_s=over_s if over_s is not None and over_s > 0 else None,
        stage="running" if running is not None else "ending" if state is TaskState.FINISHING else "waiting",
    )


def _startup_s(first: Measure | None, started_at: float | None) -> float:
    """What passed from the start of a job until its first step."""
    if first is None or started_at is None:
        return 0.0
    found = first.began_s - started_at
    return found if 0 <= found <= _LONGEST_STARTUP_S else 0.0
