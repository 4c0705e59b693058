"""Chains: a task that outlasts the walltime runs as several jobs, one after the other, in one work directory.

The next job is asked for while the one before still runs, where the endpoint allows it, so that the waiting in the
cluster's queue happens meanwhile. What became of a link, and whether another follows, is decided in `lifecycle`.
"""

from __future__ import annotations

import math

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.ids import new_id
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState
from diamond.core.tasks import TaskSpec
from diamond.server.services import lifecycle, quotas, snapshots
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, JobRow, TaskRow, table_of

_REVISIONS = "revisions"
_BUMP = (
    sa.update(table_of(EndpointRow))
    .where(EndpointRow.id == sa.bindparam("endpoint"))
    .values(revision=EndpointRow.revision + 1)
    .returning(EndpointRow.revision)
)


def time_left(session: Session, task: TaskRow, spec: TaskSpec) -> int | None:
    """Seconds the task may still run: max_duration bounds the task, not each job."""
    if spec.max_duration is None:
        return None
    spent = sa.select(sa.func.sum(JobRow.ended_at - JobRow.started_at)).where(JobRow.task_id == task.id)
    return spec.max_duration - math.ceil(session.execute(spent).scalar_one() or 0)


def queue_ahead(ctx: Context, session: Session, task: TaskRow, job: JobRow) -> bool:
    """Ask for the job after this one, which has just begun to run; True when one was added."""
    if not job.chained or job.state != JobState.RUNNING.value or task.desired == Desired.CANCEL:
        return False
    if job.attempt != task.attempt or job.time_limit_s is None or job.place:  # in a pool, a round decides
        return False
    endpoint = session.get(EndpointRow, job.endpoint_id)
    facts = snapshots.facts_of(endpoint) if endpoint is not None else None
    if endpoint is None or facts is None or not facts.queues_ahead:
        return False
    if not snapshots.usable(session, task.owner_id, task.project_id, [endpoint]):
        return False  # shared no more: the one that runs is the last
    if session.scalars(sa.select(JobRow.id).where(JobRow.task_id == task.id, JobRow.attempt > job.attempt)).first():
        return False
    left_s = time_left(session, task, decode(TaskSpec, task.spec))
    after_s = None if left_s is None else left_s - job.time_limit_s
    if after_s is not None and after_s <= 0:
        return False
    if quotas.out_of_hours(ctx, session, task, job.num_gpus):
        return False
    session.add(
        JobRow(
            id=new_id("job"),
            task_id=task.id,
            endpoint_id=job.endpoint_id,
            attempt=job.attempt + 1,
            state=JobState.PLANNED.value,
            desired=Desired.RUN.value,
            revision=next_revision(session, job.endpoint_id),
            time_limit_s=job.time_limit_s if after_s is None else min(job.time_limit_s, after_s),
            partition=job.partition,
            gpu_type=job.gpu_type,
            chained=True,
            continues=job.id,
            after=job.id,
            image=job.image,
            num_nodes=job.num_nodes,
            num_gpus=job.num_gpus,
            stored_bytes=0,
            created_at=ctx.clock(),
            detail="",
            pending_reason="",
            run_dir="",
            hosts=[],
        )
    )
    return True


def drop(ctx: Context, session: Session, jobs: list[JobRow]) -> set[str]:
    """Give up jobs that were queued in advance and are not needed; returns the topics to wake."""
    topics: set[str] = set()
    for job in jobs:
        if JobState(job.state).is_final:
            continue
        if job.delivered_at is None:
            job.state, job.reason, job.ended_at = JobState.CANCELLED.value, Reason.CANCELLED.value, ctx.clock()
            job.detail = "not needed"
        elif job.desired != Desired.CANCEL:
            job.desired = Desired.CANCEL.value
            job.revision = next_revision(session, job.endpoint_id)
            topics.add(f"endpoint:{job.endpoint_id}")
    return topics


def next_revision(session: Session, endpoint_id: str) -> int:
    """The endpoint's next desired-state number; its row stays locked until the commit, so they appear in order.

    One transaction needs one: what it changes becomes visible together.
    """
    taken: dict[str, int] = session.info.setdefault(_REVISIONS, {})
    if endpoint_id not in taken:
        # On the connection: what else this transaction has not written yet need not be written for it.
        taken[endpoint_id] = int(session.connection().execute(_BUMP, {"endpoint": endpoint_id}).scalar_one())
    return taken[endpoint_id]


def follow(ctx: Context, session: Session, task: TaskRow, job: JobRow) -> set[str]:
    """Let the task follow its job, with the link behind it asked for or given up as need be; topics to wake."""
    topics = drop(ctx, session, lifecycle.follow_job(session, task, job, ctx.clock()))
    newest: JobRow | None = job
    if job.attempt != task.attempt:
        # The task may just have moved on to a job that was told to run before the one in front of it had ended.
        session.flush()
        asked = sa.select(JobRow).where(JobRow.task_id == task.id, JobRow.attempt == task.attempt)
        newest = session.scalars(asked).one_or_none()
    if newest is not None and queue_ahead(ctx, session, task, newest):
        topics.add(f"endpoint:{newest.endpoint_id}")
    return topics
