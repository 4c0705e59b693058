"""One attempt of a task: what readers of its log and its curves need to know."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from diamond.core.errors import NotFound
from diamond.core.states import JobState, TaskState
from diamond.server.services import tasks
from diamond.server.services.context import Context
from diamond.server.store.models import JobRow


class Attempt(NamedTuple):
    """A task's state and newest attempt, and one of its jobs: what readers of logs and curves need to know."""

    task_state: TaskState
    newest: int
    job_id: str
    number: int
    job_state: JobState


_JOB = sa.select(JobRow.id, JobRow.attempt, JobRow.state).where(
    JobRow.task_id == sa.bindparam("task"), JobRow.attempt == sa.bindparam("attempt")
)


def find(ctx: Context, user_id: str, task_id: str, number: int | None = None) -> Attempt:
    """The newest attempt, or that of `number`. A task that has none yet has the job "" and the number 0.

    Raises:
        NotFound: there is no such task or attempt.
    """
    with ctx.db.read() as session:
        row = tasks.find(session, user_id, task_id)
        state, wanted = TaskState(row.state), row.attempt if number is None else number
        job = session.execute(_JOB, {"task": task_id, "attempt": wanted}).one_or_none()
    if job is not None:
        return Attempt(state, row.attempt, str(job[0]), int(job[1]), JobState(job[2]))
    if number is not None:
        raise NotFound(
            f"task {task_id} has no attempt {number}",
            hint=f"it has had {row.attempt}; they count from 1",
            field="attempt",
        )
    return Attempt(state, row.attempt, "", 0, JobState.PLANNED)
