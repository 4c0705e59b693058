"""A pool over time: who had how many of its slots from when to when, what it held, and whether that was fair. Reads,
decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.errors import NotFound
from diamond.core.pools import PoolNode, PoolPlace, PoolTask
from diamond.core.projects import Role
from diamond.core.states import Desired, JobState
from diamond.server.services import access, pool_state, pool_views, pools
from diamond.server.services.context import Context
from diamond.server.store.models import JobRow, TaskRow
from diamond.server.store.pool_models import PoolRow

_MOST_JOBS = 4000  # the newest
_MOST_ENDED = 50  # of which it is worked out how fair their time was


@dataclass(frozen=True, kw_only=True)
class Who:
    """A task of the pool, as far as the viewer may know it. `number`: among all of the pool's tasks, from 1."""

    number: int
    task_id: str
    name: str
    submitted_at: float
    ended_at: float | None


@dataclass(frozen=True, kw_only=True)
class Stay:
    """A job's time in the pool. `started_at`: None while it is brought there, which holds its slots already."""

    number: int
    slots: int
    nodes: tuple[PoolNode, ...]
    started_at: float | None
    ended_at: float | None
    is_live: bool
    is_moving: bool


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A pilot's time with its node."""

    slots: int
    started_at: float
    ended_at: float | None


@dataclass(frozen=True, kw_only=True)
class History:
    """What overlaps the time from `since` to `now`.

    Attributes:
        tasks: all that had slots in that time, or are not done, by number.
        decided_at: when the newest decision was made; what is predicted begins there.
        actual: of tasks that ended and were measured, finish-time fairness as `fairness` has it, by number.
    """

    since: float
    now: float
    decided_at: float
    may_change: bool
    tasks: dict[int, Who] = field(default_factory=dict)
    stays: tuple[Stay, ...] = ()
    holds: tuple[Hold, ...] = ()
    actual: dict[int, float] = field(default_factory=dict)

    def number_of(self, task: PoolTask) -> int | None:
        """None for one that is not in this history."""
        return task.number if task.number in self.tasks else None


@dataclass(frozen=True, kw_only=True)
class InPool:
    """That a task is in a pool. `id`: "" where the user does not see that; `task`: how it stands, while it lives."""

    id: str
    name: str
    kind: str
    task: PoolTask | None = None


def read(ctx: Context, user_id: str, ref: str, span_s: float) -> History:
    """The last `span_s` seconds of a pool, less where it is younger.

    Raises:
        NotFound: there is none that this user sees.
    """
    now = ctx.clock()
    with ctx.db.read() as session:
        pool = pools.find(session, user_id, ref)
        since = min(max(now - span_s, pool.created_at), now)
        tasks = _tasks(session, user_id, pool, since)
        jobs = _jobs(session, pool, since)
        made = History(
            since=since,
            now=now,
            decided_at=float(pool.plan.get("at", 0.0)),
            may_change=_may_change(session, user_id, pool),
            tasks={who.number: who for who in tasks.values()},
            stays=tuple(
                _stay(job, tasks[job.task_id].number, now)
                for job, kind in jobs
                if kind == "command" and job.place and job.task_id in tasks
            ),
            holds=tuple(
                Hold(slots=pools.spec_of(pool).slots_per_node, started_at=began_at, ended_at=job.ended_at)
                for job, kind in jobs
                if kind == "pilot" and (began_at := pool_state.began_at(job, now)) is not None
            ),
        )
        ended = sorted((who.ended_at, task_id) for task_id, who in tasks.items() if who.ended_at is not None)
        chosen = {task_id: tasks[task_id] for _, task_id in ended[-_MOST_ENDED:]}
        theirs = {task_id: [job.id for job in _all_jobs(session, task_id)] for task_id in chosen}
    for task_id, who in chosen.items():
        if (found := _actual(ctx, made, who, theirs[task_id])) is not None:
            made.actual[who.number] = found
    return made


def fairness(task: PoolTask, decided_at: float) -> float | None:
    """From submission to the predicted end, over what the task would take alone on its equal share; an estimate.

    1 is what fixed equal shares would give; below it the task gains by the pool.
    """
    done, whole = task.step, task.until
    if task.until_samples and task.samples is not None:  # its steps are not all of one size
        done, whole = task.samples, task.until_samples
    if not task.goodput or not task.alone or task.predicted_end_at is None or not whole or done is None:
        return None
    if done >= whole:
        return None
    left = task.goodput * (task.predicted_end_at - decided_at)
    alone_s = left * whole / (whole - done) / task.alone
    return (task.predicted_end_at - task.submitted_at) / alone_s if alone_s > 0 else None


def of_task(ctx: Context, user_id: str, task_id: str) -> InPool | None:
    """The pool that a task is in, or holds a node of; None where there is none.

    Whether the user sees the task is the caller's to have asked.
    """
    with ctx.db.read() as session:
        columns = sa.select(TaskRow.pool_id, TaskRow.kind, TaskRow.ended_at).where(TaskRow.id == task_id)
        pool_id, kind, ended_at = session.execute(columns).one_or_none() or (None, "", None)
        row = session.get(PoolRow, pool_id) if pool_id else None
        if row is None:
            return None
        try:
            pools.find(session, user_id, row.id)
        except NotFound:
            return InPool(id="", name=row.name, kind=kind)
    if kind != "command" or ended_at is not None:
        return InPool(id=row.id, name=row.name, kind=kind)
    tasks = pools.get(ctx, user_id, row.id).tasks
    return InPool(id=row.id, name=row.name, kind=kind, task=next((t for t in tasks if t.task_id == task_id), None))


def _may_change(session: Session, user_id: str, pool: PoolRow) -> bool:
    return pool.owner_id == user_id or access.role_in(session, user_id, pool.project_id) is Role.OWNER


def _tasks(session: Session, user_id: str, pool: PoolRow, since: float) -> dict[str, Who]:
    """By id."""
    lately = sa.or_(TaskRow.ended_at.is_(None), TaskRow.ended_at >= since)
    query = sa.select(TaskRow.id, TaskRow.created_at, TaskRow.ended_at).where(TaskRow.pool_id == pool.id, lately)
    rows = {task_id: (created_at, ended_at) for task_id, created_at, ended_at in session.execute(query)}
    return {
        task_id: Who(**shown._asdict(), submitted_at=rows[task_id][0], ended_at=rows[task_id][1])
        for task_id, shown in pool_views.of_pool(session, user_id, pool).items()
        if task_id in rows
    }


def _jobs(session: Session, pool: PoolRow, since: float) -> list[tuple[JobRow, str]]:
    """With the kind of their tasks, the oldest first."""
    query = (
        sa.select(JobRow, TaskRow.kind)
        .join(TaskRow, TaskRow.id == JobRow.task_id)
        .where(TaskRow.pool_id == pool.id, sa.or_(JobRow.ended_at.is_(None), JobRow.ended_at >= since))
        .order_by(JobRow.created_at.desc())
        .limit(_MOST_JOBS)
    )
    return [(job, kind) for job, kind in reversed(session.execute(query).all())]


def _all_jobs(session: Session, task_id: str) -> Iterable[JobRow]:
    return session.scalars(sa.select(JobRow).where(JobRow.task_id == task_id).order_by(JobRow.attempt))


def _stay(job: JobRow, number: int, now: float) -> Stay:
    place = decode(PoolPlace, job.place)
    return Stay(
        number=number,
        slots=place.slots,
        nodes=place.nodes,
        started_at=pool_state.began_at(job, now),
        ended_at=job.ended_at,
        is_live=not JobState(job.state).is_final,
        is_moving=job.desired == Desired.YIELD,
    )


def _actual(ctx: Context, history: History, who: Who, jobs: list[str]) -> float | None:
    """Fairness of a task that has ended. How fast it would have been on its equal share is taken from the measured size
    that is nearest to that, in proportion."""
    assert who.ended_at is not None
    measured = [ctx.measures.of_job(job_id) for job_id in jobs]
    latest = next((one.latest for one in reversed(measured) if one.latest is not None), None)
    sizes = {row.world: row.samples_per_s for one in measured for row in one.sizes.values() if row.samples_per_s}
    if latest is None or not latest.samples_done or not sizes:
        return None
    share = _equal_share(history, who)
    if share is None:
        return None
    nearest = min(sizes, key=lambda world: (abs(world - share), world))
    rate = sizes[nearest] * share / nearest
    # What a program says of itself may be so absurd that nothing can be divided by it.
    ratio = (who.ended_at - who.submitted_at) * rate / latest.samples_done
    return ratio if 0.0 < ratio < math.inf else None


def _equal_share(history: History, who: Who) -> float | None:
    """Slots that were held over tasks that wanted some, in the mean over the task's time, at least 1; None where that
    began before what is known."""
    begin, end = who.submitted_at, who.ended_at
    if end is None or begin < history.since or end <= begin:
        return None
    held = sum(hold.slots * _overlap(hold.started_at, hold.ended_at, begin, end) for hold in history.holds)
    there = sum(_overlap(one.submitted_at, one.ended_at, begin, end) for one in history.tasks.values())
    return max(1.0, held / there) if there > 0 else None


def _overlap(began: float, ended: float | None, begin: float, end: float) -> float:
    return max(0.0, min(end, ended if ended is not None else end) - max(begin, began))
