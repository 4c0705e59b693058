"""Removing tasks that have ended: their rows, events, logs and curves.

What they used stays counted, and the audit log says who removed what. Files that were uploaded for them, and their
outputs, lie in the content-addressed store, where the same bytes may be another's: they are collected some days later,
if nothing refers to them by then (`collection`), and count as stored by the task's owner until they are.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import Conflict, Forbidden, InvalidInput
from diamond.core.states import JobState, TaskState
from diamond.server.services import audit, collection, holdings, lifecycle, tasks, usage
from diamond.server.services.context import Context
from diamond.server.store.models import EventRow, IdempotencyRow, JobRow, TaskRow, UserRow


def remove(ctx: Context, user_id: str, task_id: str) -> None:
    """Forget a task of one's own that has ended.

    Raises:
        NotFound: there is no such task.
        Forbidden: it is another's.
        Conflict: it, or a job of it, is still live.
    """
    usage.charge_ended(ctx)  # what its jobs used is counted before they are gone
    with ctx.db.write() as session:
        seen = tasks.find(session, user_id, task_id)
        if seen.owner_id != user_id:
            owner = session.get_one(UserRow, seen.owner_id).name
            raise Forbidden(f"task {task_id} is {owner}'s: you can look at it, not remove it", hint=f"ask {owner}")
        if seen.kind != "command":
            raise InvalidInput(f"task {task_id} looks after an image", hint="remove the image instead")
        session.expire(seen)
        row = tasks.find(session, user_id, task_id, for_update=True, whole=True)
        jobs = session.scalars(sa.select(JobRow).where(JobRow.task_id == task_id).with_for_update()).all()
        ended = TaskState(row.state).is_final and all(JobState(job.state).is_final for job in jobs)
        if not ended or any(job.charged_at is None for job in jobs):
            raise Conflict(
                f"task {task_id} is {row.state}: only what has ended can be removed"
                if not TaskState(row.state).is_final
                else f"task {task_id} has ended a moment ago, and its endpoint is not done with it",
                hint="stop it and wait for its end",
            )
        job_ids, name = [job.id for job in jobs], row.name
        named = json.dumps([row.spec, row.outputs])
        _keep_counting(ctx, session, row, sum(job.stored_bytes + job.stream_bytes for job in jobs))
        for model in (JobRow, IdempotencyRow, EventRow):
            session.execute(
                sa.delete(model).where(model.task_id == task_id), execution_options={"synchronize_session": False}
            )
        now = ctx.clock()
        lifecycle.record(session, row, collection.REMOVED, now, {"name": name, "jobs": job_ids})
        audit.record(session, now, "task.removed", task_id, name=name)
        session.expunge_all()
        session.execute(sa.delete(TaskRow).where(TaskRow.id == task_id))
    # After the commit: files without a task are only waste, a task without its files would be a lie.
    for job_id in job_ids:
        ctx.streams.delete(job_id)
        ctx.series.delete(job_id)
    # So that they stay for as long as others': a backup that has the task in its tables may still have to copy them.
    ctx.blobs.claim(collection.digests_in(ctx, named))
    ctx.hub.notify(f"task:{task_id}", "events")


def _keep_counting(ctx: Context, session: Session, row: TaskRow, counted: int) -> None:
    """Outputs counted as the task's, in its project; from now on they are files that its owner has here, as uploaded
    ones are, and count until they are collected. Otherwise who removes tasks could fill the disk without end. Logs and
    curves count no longer: they go at once."""
    now = ctx.clock()
    sizes = {digest: ctx.blobs.size(digest) for digest in collection.stored_outputs(row)}
    given = holdings.give_in(session, row.owner_id, sizes, now)
    sums = {(row.owner_id, row.project_id or ""): -counted}
    sums[row.owner_id, ""] = sums.get((row.owner_id, ""), 0) + sum(sizes[digest] for digest in given)
    usage.count_stored(session, sums, now)
