"""A pool as it stands in the database: its pilots, its tasks and their jobs. Reads, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode
from diamond.core.pools import PoolPlace, PoolSpec
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.server.store.models import JobRow, TaskRow
from diamond.server.store.pool_models import PoolRow

_FINAL_TASKS = [state.value for state in TaskState if state.is_final]
_MOST_TASKS = 5000


def began_at(job: JobRow, now: float) -> float | None:
    """When it started: now at the latest. A clock there that was ahead of ours may have said otherwise."""
    return min(job.started_at, now) if job.started_at is not None else None


@dataclass(frozen=True)
class Held:
    """A pilot that waits for its node, or holds it."""

    task: TaskRow
    job: JobRow | None

    @property
    def is_held(self) -> bool:
        return self.job is not None and self.job.state == JobState.RUNNING.value

    @property
    def is_ending(self) -> bool:
        return self.task.desired != Desired.RUN or (self.job is not None and self.job.state == JobState.FINISHING.value)

    def ends_at(self) -> float | None:
        if self.job is None or self.job.started_at is None or self.job.time_limit_s is None:
            return None
        return self.job.started_at + self.job.time_limit_s


@dataclass(frozen=True)
class Member:
    """A task that wants slots of the pool. `jobs`: all of them, the oldest first."""

    task: TaskRow
    spec: TaskSpec
    jobs: list[JobRow] = field(default_factory=list)

    @property
    def live(self) -> JobRow | None:
        newest = self.jobs[-1] if self.jobs else None
        return newest if newest is not None and not JobState(newest.state).is_final else None

    @property
    def place(self) -> PoolPlace | None:
        return decode(PoolPlace, self.live.place) if self.live is not None and self.live.place else None

    @property
    def is_moving(self) -> bool:
        """Whether it was asked to save its state and stop."""
        return self.live is not None and self.live.desired == Desired.YIELD

    def is_due(self, now: float) -> bool:
        """Whether it waits, and may begin now."""
        at = self.task.next_attempt_at
        return self.task.state == TaskState.PENDING.value and (at is None or at <= now)


@dataclass(frozen=True)
class State:
    pool: PoolRow
    spec: PoolSpec
    pilots: list[Held]
    members: list[Member]

    def used(self) -> dict[str, int]:
        """Slots that jobs have, by pilot."""
        found: dict[str, int] = {}
        for member in self.members:
            for node in member.place.nodes if member.place is not None else ():
                found[node.pilot] = found.get(node.pilot, 0) + node.slots
        return found


def read(session: Session, pool: PoolRow, *, lock: bool = False) -> State:
    """`lock`: the tasks, for whoever is about to change them."""
    live = (TaskRow.pool_id == pool.id, TaskRow.state.not_in(_FINAL_TASKS))
    oldest = sa.select(TaskRow.id).where(*live, TaskRow.kind == "command").order_by(TaskRow.id).limit(_MOST_TASKS)
    query = (
        sa.select(TaskRow)
        .where(*live, sa.or_(TaskRow.kind == "pilot", TaskRow.id.in_(oldest)))  # of pilots, all
        .order_by(TaskRow.id)
        .options(undefer(TaskRow.spec), undefer(TaskRow.work))
    )
    tasks = session.scalars(query.with_for_update() if lock else query).all()
    by_task: dict[str, list[JobRow]] = {task.id: [] for task in tasks}
    jobs = sa.select(JobRow).where(JobRow.task_id.in_(list(by_task))).order_by(JobRow.task_id, JobRow.attempt)
    for job in session.scalars(jobs.with_for_update() if lock else jobs):
        by_task[job.task_id].append(job)
    pilots = [Held(task, by_task[task.id][-1] if by_task[task.id] else None) for task in tasks if task.kind == "pilot"]
    members = [Member(task, decode(TaskSpec, task.spec), by_task[task.id]) for task in tasks if task.kind == "command"]
    return State(pool, decode(PoolSpec, pool.spec), pilots, members)
