"""What users and projects use: what they hold now, what their jobs used this month, and what they have stored.

What a job used is added to the day's row of `usage` in the transaction that marks the job as charged, some time after
its end; until then it is added up from the job itself. Both are read in one statement, so that the sum is exact at
every moment, whatever crashed in between.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from diamond.core.faults import fault_point
from diamond.core.images import ReplicaState
from diamond.core.quotas import Use, by_day, day_of, month_of
from diamond.core.states import FINAL_JOB_STATES, FINAL_TASK_STATES, JobState, TaskState
from diamond.server.services.context import Context
from diamond.server.store.identity_models import UsageRow
from diamond.server.store.models import ImageRow, JobRow, ReplicaRow, TaskRow

FINAL = [state.value for state in FINAL_JOB_STATES]
_LIVE_TASKS = [state.value for state in TaskState if state not in FINAL_TASK_STATES]
_BEFORE_START = [JobState.PLANNED.value, JobState.STAGING.value, JobState.QUEUED.value]
_BATCH = 500
Key = tuple[str, str, int]  # user, project, day


# ---- whose ---------------------------------------------------------------------------------------------------------


def of_live_jobs(column: Any) -> sa.ColumnElement[str]:
    """A column of their tasks, so that no index of it can be used: from a user's many tasks there is no short way to
    the few jobs that are live, while from those it is one step to their tasks."""
    return sa.func.coalesce(column, "")


def of_user(user_id: str) -> dict[str, sa.ColumnElement[bool]]:
    """Conditions that select what is a user's, by table."""
    return {
        "tasks": TaskRow.owner_id == user_id,
        "jobs": of_live_jobs(TaskRow.owner_id) == user_id,
        "images": ImageRow.owner_id == user_id,
        "usage": UsageRow.user_id == user_id,
    }


def of_project(project_id: str) -> dict[str, sa.ColumnElement[bool]]:
    return {
        "tasks": TaskRow.project_id == project_id,
        "jobs": of_live_jobs(TaskRow.project_id) == project_id,
        "images": ImageRow.project_id == project_id,
        "usage": UsageRow.project_id == project_id,
    }


Whose = dict[str, sa.ColumnElement[bool]]


# ---- how much ------------------------------------------------------------------------------------------------------


def unfinished(session: Session, whose: Whose) -> int:
    query = sa.select(sa.func.count()).select_from(TaskRow)
    return session.execute(
        query.where(whose["tasks"], TaskRow.state.in_(_LIVE_TASKS), TaskRow.kind == "command")
    ).scalar_one()


def held(session: Session, whose: Whose) -> tuple[int, int]:
    """Nodes and GPUs of the jobs that run or are in a cluster's queue, where they may start at any moment.

    A link of a chain that waits for the one before it takes that one's place.
    """
    behind = sa.and_(JobRow.after.is_not(None), JobRow.state.in_(_BEFORE_START))
    query = (
        sa.select(sa.func.coalesce(sa.func.sum(JobRow.num_nodes), 0), sa.func.coalesce(sa.func.sum(JobRow.num_gpus), 0))
        .join(TaskRow, TaskRow.id == JobRow.task_id)
        .where(JobRow.charged_at.is_(None), JobRow.state.not_in(FINAL), sa.not_(behind), whose["jobs"])
    )
    nodes, gpus = session.execute(query).one()
    return int(nodes), int(gpus)


def gpu_hours(session: Session, whose: Whose, now: float) -> float:
    """Used since the month began, by what ended and by what runs."""
    since, until = month_of(now)
    nothing = sa.cast(sa.null(), sa.Double)
    counted = sa.select(sa.func.coalesce(sa.func.sum(UsageRow.gpu_seconds), 0.0), nothing, nothing, nothing).where(
        whose["usage"], UsageRow.day >= day_of(since), UsageRow.day < day_of(until)
    )
    uncounted = (
        sa.select(sa.cast(JobRow.num_gpus, sa.Double), JobRow.created_at, JobRow.started_at, JobRow.ended_at)
        .join(TaskRow, TaskRow.id == JobRow.task_id)
        .where(JobRow.charged_at.is_(None), JobRow.started_at.is_not(None), JobRow.num_gpus > 0, whose["jobs"])
    )
    seconds = 0.0
    for amount, created_at, started_at, ended_at in session.execute(counted.union_all(uncounted)):
        if created_at is None:
            seconds += amount
        else:
            start, end = ran(created_at, started_at, ended_at, now)
            seconds += amount * max(0.0, end - max(start, since))
    return seconds / 3600


def ran(created_at: float, started_at: float | None, ended_at: float | None, now: float) -> tuple[float, float]:
    """From when to when a job ran. An endpoint's clock is believed only between its order and now."""
    if started_at is None:
        return now, now
    start = min(max(started_at, created_at), now)
    return start, max(start, min(now if ended_at is None else ended_at, now))


def stored(session: Session, whose: Whose) -> int:
    """Bytes of images at endpoints, and of what came to the server."""
    images = (
        sa.select(sa.func.coalesce(sa.func.sum(ReplicaRow.size_bytes), 0))
        .join(ImageRow, ImageRow.id == ReplicaRow.image_id)
        .where(whose["images"], ImageRow.removed_at.is_(None), ReplicaRow.state == ReplicaState.READY.value)
    )
    counted = sa.select(sa.func.coalesce(sa.func.sum(UsageRow.stored_bytes), 0)).where(whose["usage"])
    uncounted = (
        sa.select(sa.func.coalesce(sa.func.sum(JobRow.stored_bytes + JobRow.stream_bytes), 0))
        .join(TaskRow, TaskRow.id == JobRow.task_id)
        .where(JobRow.charged_at.is_(None), whose["jobs"])
    )
    parts = sa.select(images.scalar_subquery(), counted.scalar_subquery(), uncounted.scalar_subquery())
    return max(0, sum(int(part) for part in session.execute(parts).one()))


def use(session: Session, whose: Whose, now: float) -> Use:
    nodes, gpus = held(session, whose)
    return Use(
        tasks=unfinished(session, whose),
        nodes=nodes,
        gpus=gpus,
        gpu_hours=gpu_hours(session, whose, now),
        storage_bytes=stored(session, whose),
    )


# ---- adding up -----------------------------------------------------------------------------------------------------


_ENDED = (JobRow.charged_at.is_(None), JobRow.state.in_(FINAL))
_ANY_ENDED = sa.select(JobRow.id).where(*_ENDED).limit(1)


def charge_ended(ctx: Context) -> int:
    """Add what jobs that ended have used to their users' days, each once; how many those were. May be repeated."""
    with ctx.db.read() as session:  # nearly always there is little to do, and writers queue
        if session.scalars(_ANY_ENDED).first() is None:
            return 0
    total = 0
    while True:
        with ctx.db.write() as session:
            found = session.execute(
                sa.select(JobRow, TaskRow.owner_id, TaskRow.project_id)
                .join(TaskRow, TaskRow.id == JobRow.task_id)
                .where(*_ENDED)
                .limit(_BATCH)
                .with_for_update(of=JobRow, skip_locked=True)  # another process charges those
            ).all()
            now = ctx.clock()
            sums: defaultdict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
            for job, user_id, project_id in found:
                job.charged_at = now
                start, end = ran(job.created_at, job.started_at, job.ended_at, now)
                for day, seconds in by_day(start, end).items():
                    row = sums[user_id, project_id or "", day]
                    row[0] += seconds * job.num_nodes
                    row[1] += seconds * job.num_gpus
                if job.stored_bytes or job.stream_bytes:
                    sums[user_id, project_id or "", day_of(now)][2] += job.stored_bytes + job.stream_bytes
            session.flush()
            fault_point("server.charging")
            _add(session, sums)
        total += len(found)
        if len(found) < _BATCH:
            return total


def _add(session: Session, sums: dict[Key, list[float]]) -> None:
    insert: Any = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    for (user_id, project_id, day), (nodes, gpus, stored_bytes) in sorted(sums.items()):  # in order: no deadlock
        row = insert(UsageRow).values(
            user_id=user_id,
            project_id=project_id,
            day=day,
            node_seconds=nodes,
            gpu_seconds=gpus,
            stored_bytes=int(stored_bytes),
        )
        added = {name: getattr(UsageRow, name) + row.excluded[name] for name in _SUMMED}
        session.execute(row.on_conflict_do_update(index_elements=["user_id", "project_id", "day"], set_=added))


_SUMMED = ("node_seconds", "gpu_seconds", "stored_bytes")


def count_stored(session: Session, sums: dict[tuple[str, str], int], now: float) -> None:
    """Bytes that came, or (negative) went, by user and project ("" for none)."""
    day = day_of(now)
    _add(session, {(*whose, day): [0.0, 0.0, num_bytes] for whose, num_bytes in sums.items() if num_bytes})


def note_stored(ctx: Context, user_id: str, num_bytes: int) -> None:
    """Somebody brought bytes that the server did not have."""
    if num_bytes > 0:
        with ctx.db.write() as session:
            _add(session, {(user_id, "", day_of(ctx.clock())): [0.0, 0.0, num_bytes]})
