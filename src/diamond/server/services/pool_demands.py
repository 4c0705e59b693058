"""What the planner should know of a pool's tasks: how large each may be, how fast it is, how much is left of it.

Trainings say so themselves (`core.training`); before they have, tasks of the pool with the same code, or the same
command, or the same name, speak for them: past ones, else those that run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode
from diamond.core.pools import PoolPlace, PoolSpec
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.core.training import Measure
from diamond.planner.pools import trained
from diamond.planner.pools.pace import ENDING_S, HANDOVER_S, RESTART_S, even_sizes, free_bounds
from diamond.planner.pools.profiles import Prior, Profiles
from diamond.planner.pools.snapshot import Demand, Shape, Speed, Work
from diamond.planner.pools.speeds import Linear
from diamond.planner.pools.trained import AtBestBatch, Growth, Live, Window
from diamond.server.services import pool_batches, pool_fits, pools
from diamond.server.services.context import Context
from diamond.server.services.pool_state import Member, State
from diamond.server.store.models import JobRow, TaskRow
from diamond.server.store.pool_models import PoolRow

_LONGEST_RESTART_S = 3600.0
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_MOST_LEARNT = 20  # tasks taken in by one round


@dataclass(frozen=True)
class Known:
    """What a task said of itself, over all its jobs.

    Attributes:
        windows: what it did at each size, the newest last.
        is_movable: it saves its state when it is asked to, so it may be given another size.
        noise_scale: of its gradient, as it was last measured; while noise hides the gradient, what it is at least.
        job_id: of the job that said `latest`.
    """

    windows: tuple[Window, ...] = ()
    latest: Measure | None = None
    restart_s: float | None = None
    is_movable: bool = False
    noise_scale: float | None = None
    job_id: str = ""

    @property
    def is_measured(self) -> bool:
        return bool(self.windows)

    @property
    def samples(self) -> int:
        """Trained on so far."""
        return (self.latest.samples_done or 0) if self.latest is not None else 0


def known_of(ctx: Context, state: State) -> dict[str, Known]:
    """By task. Reads what jobs sent, outside of any transaction."""
    return {member.task.id: _known(ctx, member.spec, member.jobs) for member in state.members}


def _known(ctx: Context, spec: TaskSpec, jobs: list[JobRow]) -> Known:
    windows: dict[tuple[int, int], Window] = {}
    latest: Measure | None = None
    noise_scale: float | None = None
    job_id = ""
    restarts: list[float] = []
    before: JobRow | None = None
    for job in jobs:
        seen = ctx.measures.of_job(job.id)
        for row in seen.sizes.values():
            if row.global_batch and row.step_s:
                key = (row.nodes, row.world)
                windows.pop(key, None)
                windows[key] = Window(
                    row.nodes, row.world, row.global_batch, row.step_s, row.per_rank or None, row.comm_s
                )
        if seen.latest is not None:
            latest, job_id = seen.latest, job.id
            noise_scale = _noise_scale(latest, noise_scale)
        if seen.first is not None and job.started_at is not None:
            # A move takes more than a start: to save and end before it, and to be given the other slots.
            moved = before is not None and before.ended_at is not None and before.desired == Desired.YIELD
            ended_at = before.ended_at if before is not None and before.ended_at and moved else None
            since = (ended_at if ended_at is not None else job.started_at - HANDOVER_S) - ENDING_S
            restarts.append(seen.first.began_s - _ahead_s(seen.latest, job, ctx.clock()) - since)
        before = job
    sane = [one for one in restarts if 0.0 <= one <= _LONGEST_RESTART_S]
    is_elastic = spec.resources.is_elastic or spec.resources.range is None
    return Known(
        windows=tuple(windows.values()),
        latest=latest,
        restart_s=max(sane[-3:]) if sane else None,
        is_movable=is_elastic and latest is not None and spec.ranks_per_node > 0,
        noise_scale=noise_scale,
        job_id=job_id,
    )


def _noise_scale(latest: Measure, before: float | None) -> float | None:
    """Where noise hides the gradient, it is larger than it was, if anything."""
    if latest.noise_scale_least is not None:
        return max(latest.noise_scale_least, before or 0.0)
    return latest.noise_scale if latest.noise_scale is not None else before


def _ahead_s(latest: Measure | None, job: JobRow, now: float) -> float:
    """How far the clock where a job runs is ahead of ours, as far as it shows: what was measured is not to come yet."""
    return max(0.0, latest.t - (job.ended_at or now)) if latest is not None else 0.0


def demands(state: State, known: dict[str, Known], now: float) -> list[Demand]:
    """One for every task that runs, or waits and may begin."""
    profiles, live = pool_fits.profiles_of(state.pool), _live(state, known)
    return [
        _demand(state, member, known.get(member.task.id, Known()), profiles, live, now)
        for member in state.members
        if member.live is not None or (member.task.desired == "run" and member.is_due(now))
    ]


def _live(state: State, known: dict[str, Known]) -> Live:
    found = Live(state.spec.kind)
    for member in state.members:
        if (one := known.get(member.task.id)) is not None and one.windows:
            found.add(keys_of(member.task.name, member.spec), one.windows, one.restart_s)
    return found


def _demand(state: State, member: Member, known: Known, profiles: Profiles, live: Live, now: float) -> Demand:
    task, spec = member.task, member.spec
    keys = keys_of(task.name, spec)
    prior = profiles.similar(keys, None if known.windows else live.pasts)
    low, high = bounds(state.spec, spec, known, prior)
    kind = state.spec.kind
    batch = None if known.windows else live.batch(keys, _past_batches(state.pool, keys))
    speed = pool_fits.speed(kind, known.windows, prior, batch, _growth(member, known, kind))
    return Demand(
        id=task.id,
        submitted_at=task.created_at,
        speed=speed,
        min_gpus=low,
        max_gpus=high,
        sizes=even_sizes(low, high, state.spec.slots_per_node) if low != high else None,
        movable=_is_movable(member, known, prior),
        priority=task.priority,
        owner=task.owner_id,
        left=None if isinstance(speed, Linear) else _left(known, prior, speed),
        done=_done(known, speed),
        attained_s=sum(_slot_seconds(job, now) for job in member.jobs),
        running_s=sum(_seconds(job, now) for job in member.jobs),
        restarts=max(0, len([job for job in member.jobs if job.started_at]) - 1),
        restart_s=_first(known.restart_s, prior.restart_s if prior else None, RESTART_S),
    )


def bounds(pool: PoolSpec, spec: TaskSpec, known: Known, prior: Prior | None) -> tuple[int, int]:
    """At least and at most so many slots, by what is known of the task."""
    if not pools.is_free(spec):
        return pools.sizes(pool, spec)
    tried = max((window.slots for window in known.windows), default=0)
    most = pool.slots_per_node * pool.most_nodes
    return free_bounds(tried, pool.slots_per_node, most, is_known=trained.is_known(prior))


def widest(pool: PoolSpec, spec: TaskSpec) -> tuple[int, int]:
    """At least and at most so many slots, as soon as enough is known of the task."""
    if not pools.is_free(spec):
        return pools.sizes(pool, spec)
    return 1, pool.slots_per_node * pool.most_nodes


def keys_of(name: str, spec: TaskSpec) -> list[str]:
    """What past tasks are known by: the same code, command and variables; the same command but for numbers in it; the
    same name."""
    code = json.dumps([spec.run, spec.workdir, sorted(spec.envs.items()), sorted(spec.file_mounts.items())])
    return [f"code {_digest(code)}", f"run {_digest(_NUMBER.sub('#', spec.run))}", f"name {name[:200]}"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _past_batches(pool: PoolRow, keys: list[str]) -> dict[str, int]:
    batches = (pool.profiles or {}).get("batches", {})
    return {key: batches[key] for key in keys if isinstance(batches.get(key), int) and batches[key] >= 1}


def _growth(member: Member, known: Known, kind: str) -> Growth | None:
    """Of a training whose batch Diamond chooses. Until the job that runs has said which it has, none is its own."""
    place, live = member.place, member.live
    told = live is not None and live.id == known.job_id
    where = Shape(kind, len(place.nodes), place.slots) if place is not None and told else None
    return pool_batches.growth_of(member.spec, known.latest, known.noise_scale, where)


def _left(known: Known, prior: Prior | None, speed: Speed) -> Work | None:
    """As the training itself says, else as others like it suggest."""
    latest = known.latest
    if latest is not None and (total := latest.samples_in_all) is not None:
        left = _work(max(0, total - (latest.samples_done or 0)), speed)
        return Work(left, left, left)
    return prior.left(_done(known, speed)) if prior is not None else None


def _done(known: Known, speed: Speed) -> float:
    return _work(known.samples, speed)


def _work(samples: int, speed: Speed) -> float:
    return speed.work(samples) if isinstance(speed, AtBestBatch) else float(samples)


def _is_movable(member: Member, known: Known, prior: Prior | None) -> bool:
    """Whether it could make room for others; of one that waits, once it runs.

    Of one that was never measured that is not known, unless others like it were. Whoever was taken for movable, and is
    not, could keep a larger one waiting for ever.
    """
    if member.place is not None:
        return known.is_movable and not member.is_moving  # asked in vain, it is left alone
    may = member.spec.resources.is_elastic or pools.is_free(member.spec)
    return known.is_movable or (may and trained.is_known(prior))


def _seconds(job: JobRow, now: float) -> float:
    return max(0.0, (job.ended_at or now) - job.started_at) if job.started_at is not None and job.place else 0.0


def _slot_seconds(job: JobRow, now: float) -> float:
    return _seconds(job, now) * decode(PoolPlace, job.place).slots if job.place else 0.0


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None and math.isfinite(value))


# ---- learning --------------------------------------------------------------------------------------------------------


def learn(ctx: Context, session: Session, state: State) -> None:
    """Take in tasks of the pool that have succeeded since this was last done."""
    pool = state.pool
    since = str((pool.profiles or {}).get("since", ""))
    query = (
        sa.select(TaskRow)
        .where(TaskRow.pool_id == pool.id, TaskRow.kind == "command", TaskRow.state == TaskState.SUCCEEDED.value)
        .where(TaskRow.ended_at > float((pool.profiles or {}).get("until", 0.0)))
        .order_by(TaskRow.ended_at)
        .limit(_MOST_LEARNT)
        .options(undefer(TaskRow.spec))
    )
    ended = [task for task in session.scalars(query) if task.id != since]
    if not ended:
        return
    profiles = pool_fits.read_profiles(pool)
    batches = dict((pool.profiles or {}).get("batches", {}))
    for task in ended:
        spec = decode(TaskSpec, task.spec)
        jobs = list(session.scalars(sa.select(JobRow).where(JobRow.task_id == task.id).order_by(JobRow.attempt)))
        known = _known(ctx, spec, [job for job in jobs if JobState(job.state).is_final])
        if known.windows:
            keys = keys_of(task.name, spec)
            profiles.learn(
                keys,
                trained.measurements(state.spec.kind, known.windows),
                total_work=float(known.samples) or None,
                restart_s=known.restart_s,
            )
            batches.update(dict.fromkeys(keys, known.windows[-1].global_batch))
    last = ended[-1]
    pool.profiles = {
        "past": json.loads(profiles.to_json()),
        "batches": dict(list(batches.items())[-3000:]),
        "until": last.ended_at,
        "since": last.id,
    }
