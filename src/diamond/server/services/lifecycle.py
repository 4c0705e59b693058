"""How a task moves on when its job does: the only code that changes a task's state after creation.

Runs inside the caller's write transaction; takes facts, never asks an endpoint.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.durations import format_duration
from diamond.core.images import ReplicaState
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.states import Desired, JobState, TaskState, may_follow
from diamond.core.tasks import RetryPolicy
from diamond.server.store import acting
from diamond.server.store.db import record_event
from diamond.server.store.models import JobRow, ReplicaRow, TaskRow, UserRow

_IDLE_S = 10
_IDLE_LINKS = 3
_LINKS = (Reason.CONTINUED, Reason.TIME_LIMIT)
_LOSSES = (Reason.NODE_FAIL, Reason.PREEMPTED)


def record(session: Session, task: TaskRow, kind: str, now: float, data: dict[str, Any] | None = None) -> None:
    record_event(
        session,
        at=now,
        kind=kind,
        owner_id=task.owner_id,
        task_id=task.id,
        endpoint_id=task.endpoint_id,
        data=data or {},
    )


def move(session: Session, task: TaskRow, state: TaskState, now: float, data: dict[str, Any] | None = None) -> bool:
    """Change the state if that is legal; an illegal change is an old message and is ignored."""
    if not may_follow(TaskState(task.state), state):
        return False
    task.state = state.value
    record(session, task, "task.state", now, {"state": state.value, "attempt": task.attempt, **(data or {})})
    return True


def follow_job(session: Session, task: TaskRow, job: JobRow, now: float) -> list[JobRow]:
    """Let the task follow its newest job, which just advanced. Returns jobs that nobody needs any more."""
    state = JobState(job.state)
    if job.attempt != task.attempt:
        return []
    if task.started_at is None and job.started_at is not None:
        task.started_at = job.started_at
    if not state.is_final:
        if move(session, task, state.task_state, now) and state is not JobState.QUEUED:
            task.pending_reason, task.expected_start_at = "", None
        return []
    reason = Reason(job.reason or Reason.LOST)
    if task.desired == Desired.CANCEL and reason is not Reason.COMPLETED:
        reason = Reason.CANCELLED
    successor = _successor(session, task)
    if reason is Reason.IMAGE_MISSING and _fetch_image_again(session, task, job, now):
        return [successor] if successor is not None else []
    if _go_on(session, task, job, reason, successor, now):
        return follow_job(session, task, successor, now) if successor is not None else []
    if reason is Reason.CONTINUED:  # it goes on too often
        reason = Reason.EXIT_NONZERO
    if not _retry(session, task, job, reason, now):
        end_task(session, task, job.ended_at or now, reason=reason, detail=job.detail, exit_code=job.exit_code, at=now)
    return [successor] if successor is not None else []


def _successor(session: Session, task: TaskRow) -> JobRow | None:
    """The job that was queued behind the newest one, in advance."""
    return session.scalars(
        sa.select(JobRow).where(JobRow.task_id == task.id, JobRow.attempt > task.attempt).with_for_update()
    ).one_or_none()


def _go_on(session: Session, task: TaskRow, job: JobRow, reason: Reason, successor: JobRow | None, now: float) -> bool:
    """Whether the task goes on in its next job: a chain's next link, or the one that waits behind a job that was shot.

    A program that asks to go on again and again without doing anything is not obeyed for ever.
    """
    if task.desired == Desired.CANCEL or not MEANINGS[reason].resumes:
        return False
    # In a pool a task outlives the nodes it was on.
    links = (*_LINKS, *_LOSSES) if job.place else _LINKS
    is_link = job.chained and reason in links
    if is_link and _is_idling(session, task):
        job.detail = f"it asked to go on {_IDLE_LINKS} times in a row without having run for long"
        return False
    if not is_link:
        if successor is None or not _may_retry(task, reason):
            return False
        task.failures += 1
    data = {"reason": reason.value, "detail": job.detail, "next": "another job continues it"}
    if successor is None:
        task.next_attempt_at = now
        task.pending_reason = f"job {job.attempt} ended with {reason}; the next one continues it"
        return move(session, task, TaskState.PENDING, now, data)
    if not move(session, task, TaskState.PENDING, now, data):
        return False
    task.attempt = successor.attempt
    task.pending_reason = successor.pending_reason
    return move(session, task, TaskState.QUEUED, now)


def _fetch_image_again(session: Session, task: TaskRow, job: JobRow, now: float) -> bool:
    """The image was not where it should be: what is known of it is wrong. Once, the task waits for it to be brought
    again; a place that loses it twice is not trusted."""
    if task.image_id is None:
        return False
    where = [ReplicaRow.image_id == task.image_id, ReplicaRow.endpoint_id == job.endpoint_id]
    lost = session.scalars(sa.select(ReplicaRow).where(*where, ReplicaRow.state == ReplicaState.READY.value)).all()
    for replica in lost:
        if replica.ready_at is None or replica.ready_at <= job.created_at:  # it may have been brought again meanwhile
            replica.state, replica.settled_at = ReplicaState.GONE.value, now
            replica.detail = f"job {job.id} did not find it: {job.detail}"[:1000]
    missed = sa.select(sa.func.count()).select_from(JobRow)
    session.flush()
    times = session.execute(
        missed.where(JobRow.task_id == task.id, JobRow.reason == Reason.IMAGE_MISSING.value)
    ).scalar_one()
    if times > 1 or task.desired == Desired.CANCEL:
        return False
    task.next_attempt_at = now
    task.work = None
    task.pending_reason = "its image was not where it should be on the endpoint; it is brought there again"
    data = {"reason": Reason.IMAGE_MISSING.value, "detail": job.detail, "next": "the image is brought again"}
    return move(session, task, TaskState.PENDING, now, data)


def _is_idling(session: Session, task: TaskRow) -> bool:
    jobs = sa.select(JobRow).where(JobRow.task_id == task.id, JobRow.attempt <= task.attempt)
    rows = session.scalars(jobs.order_by(JobRow.attempt.desc()).limit(_IDLE_LINKS)).all()
    return len(rows) == _IDLE_LINKS and all(map(_did_nothing, rows))


def _did_nothing(job: JobRow) -> bool:
    ran_s = (job.ended_at or 0) - (job.started_at or 0)
    if job.place:  # unless it was asked to make room
        return job.desired == Desired.RUN and job.reason in (Reason.CONTINUED, *_LOSSES) and ran_s < _IDLE_S
    return job.reason == Reason.CONTINUED and ran_s < min(_IDLE_S, (job.time_limit_s or 0) / 10)


def _may_retry(task: TaskRow, reason: Reason) -> bool:
    policy = decode(RetryPolicy, task.spec.get("retry", {}))
    return task.desired != Desired.CANCEL and reason in policy.on and task.failures < policy.max_retries


def _retry(session: Session, task: TaskRow, job: JobRow, reason: Reason, now: float) -> bool:
    if not _may_retry(task, reason):
        return False
    policy = decode(RetryPolicy, task.spec.get("retry", {}))
    task.failures += 1
    delay_s = policy.delay_s(task.failures)
    task.reason, task.detail, task.exit_code = reason.value, job.detail, job.exit_code
    task.next_attempt_at = now + delay_s
    task.pending_reason = (
        f"attempt {task.attempt} ended with {reason}; "
        f"retry {task.failures} of {policy.max_retries} follows in {format_duration(delay_s)}"
    )
    data = {"reason": reason.value, "detail": job.detail, "next_attempt_at": task.next_attempt_at}
    return move(session, task, TaskState.PENDING, now, data)


def as_project_owner(session: Session, task: TaskRow, user_id: str) -> str:
    """Who stops a task, as its owner is told; empty when that is its owner."""
    if task.owner_id == user_id:
        return ""
    return f"{session.get_one(UserRow, user_id).name}, an owner of its project"


def as_administrator(task: TaskRow) -> str:
    """The same of an administrator, who is whoever asks now."""
    actor = acting.current()
    return "" if actor.user_id == task.owner_id else f"{actor.name}, an administrator"


def ask_to_stop(session: Session, task: TaskRow, now: float, by: str) -> None:
    """The task shall be stopped. Its detail says by whom, from now until it has ended; `by` never has an address."""
    task.desired = Desired.CANCEL.value
    task.detail = f"stopped by {by}" if by else ""
    record(session, task, "task.cancel_requested", now, {"by": by} if by else None)


def end_task(
    session: Session,
    task: TaskRow,
    ended_at: float,
    *,
    reason: Reason,
    detail: str = "",
    exit_code: int | None = None,
    at: float | None = None,
) -> None:
    """The task is over, for this reason."""
    if reason is Reason.CANCELLED and task.desired == Desired.CANCEL:
        detail = "; ".join(filter(None, (task.detail, detail)))  # `ask_to_stop` wrote down who wanted it
    task.reason, task.detail, task.exit_code = reason.value, detail, exit_code
    task.ended_at, task.next_attempt_at, task.pending_reason, task.expected_start_at = ended_at, None, "", None
    outcome = TaskState(MEANINGS[reason].outcome)
    data = {"reason": reason.value, "detail": detail, "exit_code": exit_code}
    move(session, task, outcome, at if at is not None else ended_at, data)
