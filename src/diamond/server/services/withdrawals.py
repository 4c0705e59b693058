"""Taking back jobs that may no longer be where they are: a member was put out, an endpoint is shared no more.

Only those that no agent was told of: their tasks wait again, and go elsewhere if they can. What an agent knows of goes
on. The planner does this whenever something changed, and nothing is handed to an agent before it was done.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session, aliased, undefer

from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.server.services import access, image_work, lifecycle, snapshots
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, JobRow, TaskRow

_BRINGS = ("build", "import", "link")  # the other kinds of work on images are about what lies there already


def run(ctx: Context) -> None:
    """Take back all there are."""
    with ctx.db.read() as session:  # nearly always there is nothing to do, and writers queue
        if session.execute(_ANY_ASTRAY).first() is None:
            return
    with ctx.db.write() as session:
        snapshots.endpoints(session, lock=True)
        topics = take_back(ctx, session)
    ctx.hub.notify(*topics)


def take_back(ctx: Context, session: Session, endpoint_id: str | None = None) -> set[str]:
    """The same in a transaction that has locked the endpoint (None: all of them); topics to wake after the commit."""
    found = session.execute(_ALL_ASTRAY) if endpoint_id is None else session.execute(_ASTRAY, {"endpoint": endpoint_id})
    topics: set[str] = set()
    for job, task, endpoint in found.all():
        if task.kind not in ("command", "pilot") and may_work(session, task, endpoint):
            continue
        if job.attempt == task.attempt:
            _give_up(session, task, job, endpoint, ctx.clock())
        else:
            session.delete(job)  # asked for in advance: the one before it goes on, and what follows is decided then
        topics |= {f"task:{task.id}", "planning", "events"}
    return topics


# Built once, since every agent that is told something asks: putting a query together costs more than running it.
_FOUND = (
    sa.select(JobRow, TaskRow, EndpointRow)
    .join(TaskRow, TaskRow.id == JobRow.task_id)
    .join(EndpointRow, EndpointRow.id == JobRow.endpoint_id)
    .where(JobRow.state == JobState.PLANNED.value, JobRow.delivered_at.is_(None), sa.not_(access.job_belongs()))
)
# By endpoint, as the index is: SQLite would otherwise walk all jobs there ever were.
_EACH = aliased(EndpointRow)
_ANY_ASTRAY = _FOUND.where(JobRow.endpoint_id.in_(sa.select(_EACH.id))).with_only_columns(JobRow.id).limit(1)
_ALL_ASTRAY = (
    _FOUND.order_by(TaskRow.id)
    .options(undefer(TaskRow.spec), undefer(TaskRow.work))
    .with_for_update(of=(TaskRow, JobRow))
)
_ASTRAY = _ALL_ASTRAY.where(JobRow.endpoint_id == sa.bindparam("endpoint"))


def may_work(session: Session, task: TaskRow, endpoint: EndpointRow) -> bool:
    """Whether work on images may be done there: bringing one is for those who may have images there."""
    order = image_work.order_of(task)
    if order is None or order.action not in _BRINGS:
        return True
    return bool(snapshots.usable_for_images(session, image_work.asker_of(task), [endpoint]))


def _give_up(session: Session, task: TaskRow, job: JobRow, endpoint: EndpointRow, now: float) -> None:
    why = f"endpoint {endpoint.name} is no longer shared with its project, or its owner no longer a member there"
    job.state, job.reason, job.ended_at, job.detail = JobState.CANCELLED.value, Reason.CANCELLED.value, now, why
    if job.chained and job.continues:
        detail = f"its files are at an endpoint where it may not go on: {why}"
        lifecycle.end_task(session, task, now, reason=Reason.LOST, detail=detail)
        return
    task.pending_reason, task.expected_start_at, task.next_attempt_at = why, None, None
    lifecycle.move(session, task, TaskState.PENDING, now, {"detail": why, "next": "it waits for another endpoint"})
    if task.kind == "command":  # work on images has its place from the start
        task.endpoint_id = None
