"""A pool's run written down, for the simulator: who had what when, and what was measured. Without names and code."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode
from diamond.core.errors import Forbidden
from diamond.core.pool_records import (
    LONGEST_S,
    MOST_WORK,
    JobRecord,
    NodeRecord,
    PoolRecord,
    TaskRecord,
    WindowRecord,
)
from diamond.core.pools import PoolPlace, PoolSpec
from diamond.core.projects import Role
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.core.training import Measure
from diamond.server.services import access, pools
from diamond.server.services.context import Context
from diamond.server.services.pool_state import Member, State
from diamond.server.store.models import EventRow, JobRow, TaskRow
from diamond.server.store.pool_models import PoolRow

_MOST_TASKS = 5000  # the newest
_A_QUERY = 500


def record(ctx: Context, user_id: str, ref: str) -> PoolRecord:
    """What went on in a pool until now, by its id or name.

    It tells of all tasks in the pool, also of those that the user does not see: only who runs the pool may have it.

    Raises:
        NotFound: there is none that this user sees.
        Forbidden: the user sees it, and neither it nor its project is theirs.
    """
    with ctx.db.read() as session:
        row = _owned(session, user_id, ref)
        spec = pools.spec_of(row)
        pilots, members = _all(session, row)
        asked = _asked_to_stop(session, [member.task.id for member in members])
    moments = [member.task.created_at for member in members]
    moments += [job.started_at for job in pilots if job.started_at is not None]
    clock = _Clock(min(moments, default=ctx.clock()), ctx.clock())
    return PoolRecord(
        slot_kind=spec.kind,
        slots_per_node=spec.slots_per_node,
        most_nodes=spec.most_nodes,
        recorded_at=clock.since(clock.now),
        nodes=tuple(_node(job, spec, clock) for job in pilots if job.started_at is not None),
        tasks=_Tasks(ctx, row, spec, clock, asked).of(members),
    )


class _Clock:
    """Moments as seconds since the first."""

    def __init__(self, first: float, now: float) -> None:
        self.first, self.now = first, now

    def since(self, at: float) -> float:
        return min(max(0.0, round(at - self.first, 3)), LONGEST_S)

    def maybe(self, at: float | None) -> float | None:
        return None if at is None else self.since(at)

    def during(self, job: JobRow, at: float) -> float | None:
        """What a program says of itself, if it can be: its own clock may be wrong, and it may say anything."""
        began, ended = job.started_at, job.ended_at or self.now
        return self.since(at) if began is not None and began <= at <= ended else None


def _owned(session: Session, user_id: str, ref: str) -> PoolRow:
    row = pools.find(session, user_id, ref)
    if row.owner_id != user_id and access.role_in(session, user_id, row.project_id) is not Role.OWNER:
        raise Forbidden(
            f"pool {row.name!r} is another's: you can run tasks in it, not have a record of all that ran there",
            hint="ask its owner, or an owner of its project",
        )
    return row


def _all(session: Session, row: PoolRow) -> tuple[list[JobRow], list[Member]]:
    """Jobs of its pilots, and its tasks with theirs; also of those that are over, the oldest first."""
    newest = sa.select(TaskRow).where(TaskRow.pool_id == row.id).order_by(TaskRow.id.desc()).limit(_MOST_TASKS)
    tasks = session.scalars(newest.options(undefer(TaskRow.spec))).all()[::-1]
    jobs: dict[str, list[JobRow]] = {task.id: [] for task in tasks}
    for begin in range(0, len(tasks), _A_QUERY):
        some = [task.id for task in tasks[begin : begin + _A_QUERY]]
        query = sa.select(JobRow).where(JobRow.task_id.in_(some)).order_by(JobRow.task_id, JobRow.attempt)
        for job in session.scalars(query):
            jobs[job.task_id].append(job)
    pilots = [job for task in tasks if task.kind == "pilot" for job in jobs[task.id]]
    members = [Member(task, decode(TaskSpec, task.spec), jobs[task.id]) for task in tasks if task.kind == "command"]
    return pilots, members


def _asked_to_stop(session: Session, task_ids: list[str]) -> dict[str, list[float]]:
    """By task, when its jobs were asked to save and stop."""
    found: dict[str, list[float]] = {}
    for begin in range(0, len(task_ids), _A_QUERY):
        some = task_ids[begin : begin + _A_QUERY]
        query = sa.select(EventRow.task_id, EventRow.at).where(EventRow.task_id.in_(some))
        for task_id, at in session.execute(query.where(EventRow.kind == "task.resizing")):
            found.setdefault(str(task_id), []).append(at)
    return found


def _node(job: JobRow, spec: PoolSpec, clock: _Clock) -> NodeRecord:
    assert job.started_at is not None
    ended_at = job.ended_at if JobState(job.state).is_final else None
    return NodeRecord(
        began_at=clock.since(job.started_at),
        ended_at=clock.maybe(ended_at),
        slots=spec.slots_per_node,
        walltime_s=float(job.time_limit_s) if job.time_limit_s is not None else None,
        reason=job.reason or "",
    )


class _Tasks:
    """Tasks as they are written down. Who owns what, and what is alike, becomes a number by order of appearance."""

    def __init__(
        self, ctx: Context, pool: PoolRow, spec: PoolSpec, clock: _Clock, asked: dict[str, list[float]]
    ) -> None:
        self._ctx, self._pool, self._spec, self._clock, self._asked = ctx, pool, spec, clock, asked
        self._owners: dict[str, int] = {}
        self._keys: dict[str, int] = {}

    def of(self, members: list[Member]) -> tuple[TaskRecord, ...]:
        return tuple(self._task(number, member) for number, member in enumerate(members, start=1))

    def _task(self, number: int, member: Member) -> TaskRecord:
        # Loaded where a pool is recorded: its models take a while to load, and many servers have no pool.
        from diamond.server.services import pool_demands

        task, spec = member.task, member.spec
        known = pool_demands.known_of(self._ctx, State(self._pool, self._spec, [], [member]))[task.id]
        is_free = pools.is_free(spec)
        least, most = pool_demands.widest(self._spec, spec)
        latest = known.latest
        jobs = tuple(self._job(job) for job in member.jobs if job.place)
        return TaskRecord(
            id=number,
            least=least,
            most=max(least, most),
            is_free=is_free,
            sizes="even" if least < most else "one",
            can_move=(spec.resources.is_elastic or spec.resources.range is None) and spec.ranks_per_node > 0,
            priority=task.priority,
            owner=_numbered(self._owners, task.owner_id),
            like=tuple(_numbered(self._keys, key) for key in pool_demands.keys_of(task.name, spec)),
            submitted_at=self._clock.since(task.created_at),
            ended_at=self._clock.maybe(task.ended_at) if TaskState(task.state).is_final else None,
            state=task.state,
            total_samples=_sane(latest.samples_in_all) if latest is not None else None,
            global_batch=(latest.global_batch or None) if latest is not None else None,
            windows=tuple(
                WindowRecord(nodes=one.nodes, slots=one.slots, global_batch=one.global_batch, step_s=one.step_s)
                for one in known.windows
                if 1 <= one.nodes <= one.slots <= self._spec.slots_per_node * self._spec.most_nodes
            ),
            restart_s=known.restart_s,
            saves_s=latest.saves.interval_s if latest is not None and latest.saves is not None else None,
            jobs=jobs,
        )

    def _job(self, job: JobRow) -> JobRecord:
        seen, clock = self._ctx.measures.of_job(job.id), self._clock
        place = decode(PoolPlace, job.place)
        first, latest = seen.first, seen.latest
        ended_at = job.ended_at or clock.now
        asked = [at for at in self._asked.get(job.task_id, ()) if job.created_at <= at <= ended_at]
        first_at = clock.during(job, first.began_s) if first is not None else None
        last_at = clock.during(job, latest.t) if latest is not None else None
        return JobRecord(
            asked_at=clock.since(job.created_at),
            started_at=clock.maybe(job.started_at),
            ended_at=clock.maybe(job.ended_at),
            slots=place.slots,
            nodes=len(place.nodes),
            first_at=first_at,
            first_samples=_before(first) if first and first_at is not None else None,
            last_at=last_at,
            last_samples=_sane(latest.samples_done) if latest and last_at is not None else None,
            told_at=clock.during(job, first.t) if first is not None and first_at is not None else None,
            stop_asked_at=clock.maybe(max(asked, default=None)),
            reason=job.reason or "",
        )


def _numbered(known: dict[str, int], key: str) -> int:
    return known.setdefault(key, len(known) + 1)


def _before(first: Measure) -> float | None:
    """Samples that were done when the first window began."""
    done = first.samples_done
    return _sane(max(0, done - first.steps * (first.global_batch or 0))) if done is not None else None


def _sane(samples: int | None) -> float | None:
    return float(samples) if samples is not None and samples <= MOST_WORK else None
