"""How a task moves on when its job does: the only code that changes a task's state after creation.

Runs inside the caller's write transaction; takes facts, never asks an endpoint.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.durations import format_duration
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.states import Desired, JobState, TaskState, may_follow
from diamond.core.tasks import RetryPolicy
from diamond.server.store.db import record_event
from diamond.server.store.models import JobRow, TaskRow


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


def follow_job(session: Session, task: TaskRow, job: JobRow, now: float) -> None:
    """Let the task follow its newest job, which just advanced."""
    state = JobState(job.state)
    if job.attempt != task.attempt:
        return
    if task.started_at is None and job.started_at is not None:
        task.started_at = job.started_at
    if not state.is_final:
        if move(session, task, state.task_state, now) and state is not JobState.QUEUED:
            task.pending_reason = ""
        return
    reason = Reason(job.reason or Reason.LOST)
    if task.desired == Desired.CANCEL and reason is not Reason.COMPLETED:
        reason = Reason.CANCELLED
    if not _retry(session, task, job, reason, now):
        end_task(session, task, job.ended_at or now, reason=reason, detail=job.detail, exit_code=job.exit_code, at=now)


def _retry(session: Session, task: TaskRow, job: JobRow, reason: Reason, now: float) -> bool:
    policy = decode(RetryPolicy, task.spec.get("retry", {}))
    if task.desired == Desired.CANCEL or reason not in policy.on or task.attempt > policy.max_retries:
        return False
    delay_s = policy.delay_s(task.attempt)
    task.reason, task.detail, task.exit_code = reason.value, job.detail, job.exit_code
    task.next_attempt_at = now + delay_s
    task.pending_reason = (
        f"attempt {task.attempt} ended with {reason}; "
        f"attempt {task.attempt + 1} of {policy.max_retries + 1} follows in {format_duration(delay_s)}"
    )
    data = {"reason": reason.value, "detail": job.detail, "next_attempt_at": task.next_attempt_at}
    return move(session, task, TaskState.PENDING, now, data)


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
    task.reason, task.detail, task.exit_code = reason.value, detail, exit_code
    task.ended_at, task.next_attempt_at, task.pending_reason = ended_at, None, ""
    outcome = TaskState(MEANINGS[reason].outcome)
    data = {"reason": reason.value, "detail": detail, "exit_code": exit_code}
    move(session, task, outcome, at if at is not None else ended_at, data)
