"""Pilots: tasks of one node that hold it for a pool. Asked for, let go, and how many there should be.

A pilot's task has the kind "pilot" and in `work` its order, {"pilot": a PilotOrder}. Its spec asks for the share of the
node that the pool uses, and it counts against its owner's quotas as any task does; what runs inside counts no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode, encode
from diamond.core.ids import new_id
from diamond.core.pools import PilotOrder, PoolSpec
from diamond.core.reasons import Reason
from diamond.core.resources import Resources
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import RetryPolicy, TaskSpec
from diamond.planner.pools.pace import leave_s
from diamond.server.services import chains, lifecycle
from diamond.server.services.context import Context
from diamond.server.services.pool_state import Held, State
from diamond.server.store.models import TaskRow
from diamond.server.store.pool_models import PoolRow

# Before a pilot ends, its tasks save and move; the next one should hold its node by then.
LEAD_SHARE, LEAST_LEAD_S = 0.15, 60.0
_SOON_OVER_S, _FIRST_WAIT_S, _LONGEST_WAIT_S, _MOST_FAILED = 30.0, 5.0, 900.0, 16
_MOST_WHY = 300


def lead_s(walltime_s: float) -> float:
    """How long before its end a pilot counts as gone, and is replaced."""
    return min(max(LEAD_SHARE * walltime_s, LEAST_LEAD_S), walltime_s / 2)


def is_usable(pilot: Held, now: float) -> bool:
    """Whether it holds a node that tasks may have."""
    ends_at = pilot.ends_at()
    limit_s = pilot.job.time_limit_s if pilot.job is not None else None
    return pilot.is_held and not pilot.is_ending and (ends_at is None or ends_at - now > leave_s(limit_s or 0))


def order_of(task: TaskRow) -> PilotOrder | None:
    raw = (task.work or {}).get("pilot")
    return decode(PilotOrder, raw) if raw else None


def is_lasting(pilot: Held, now: float) -> bool:
    """Whether it holds a node, or will, for a while yet."""
    ends_at = pilot.ends_at()
    limit_s = pilot.job.time_limit_s if pilot.job is not None else None
    return not pilot.is_ending and (ends_at is None or ends_at - now > lead_s(limit_s or 0))


def wanted_nodes(state: State, slots: int) -> int:
    """How many nodes the pool should hold for tasks that could use so many slots."""
    if state.pool.closed_at is not None:
        return 0
    nodes = math.ceil(slots / state.spec.slots_per_node)
    return min(max(nodes, state.spec.least_nodes), state.spec.most_nodes)


def task_spec(spec: PoolSpec) -> TaskSpec:
    """What a pilot of the pool asks for: the share of a node that the pool uses."""
    needs = Resources(
        infra=spec.endpoint,
        accelerators=spec.accelerators,
        cpus=str(_cpus(spec) * spec.slots_per_node),
        memory=_memory(spec),
    )
    return TaskSpec(
        name=f"pilot of {spec.name}"[:128],
        run="# Diamond itself: holds a node of a pool",
        ranks_per_node=0,
        resources=needs,
        retry=RetryPolicy(max_retries=0),
        max_duration=spec.walltime,
        slurm=spec.slurm,
    )


def ask_for(ctx: Context, session: Session, pool: PoolRow, spec: PoolSpec) -> TaskRow:
    """One pilot more. It is still to be placed."""
    now = ctx.clock()
    order = PilotOrder(pool_id=pool.id, slots=spec.slots_per_node, cpus=_cpus(spec), has_gpus=spec.has_gpus)
    asked = task_spec(spec)
    task = TaskRow(
        id=new_id("tsk"),
        owner_id=pool.owner_id,
        name=asked.name,
        spec=encode(asked),
        state=TaskState.PENDING.value,
        desired=Desired.RUN.value,
        kind="pilot",
        work={"pilot": encode(order)},
        pool_id=pool.id,
        image_id=None,
        priority=0,
        created_at=now,
        attempt=0,
        failures=0,
        detail="",
        pending_reason="",
        outputs=[],
        project_id=pool.project_id,
        visibility="private",
    )
    session.add(task)
    session.flush()
    lifecycle.record(session, task, "task.created", now, {"name": task.name, "kind": task.kind, "pool": pool.name})
    return task


@dataclass(frozen=True, kw_only=True)
class Pause:
    """That no pilot is asked for now: the last ones, one after the other, were over at once.

    Attributes:
        failed: how many; `since`: when the last one was over; `until`: when the next one is asked for.
        why: how that one ended, in words.
    """

    failed: int
    since: float
    until: float
    why: str


def pause(session: Session, pool: PoolRow, now: float) -> Pause | None:
    """Whether a pilot is asked for only later: after ones that ended at once, ever later."""
    newest = (
        sa.select(sa.func.coalesce(TaskRow.ended_at, 0.0), TaskRow.started_at, TaskRow.reason, TaskRow.detail)
        .where(TaskRow.pool_id == pool.id, TaskRow.kind == "pilot", TaskRow.ended_at.is_not(None))
        .order_by(TaskRow.ended_at.desc())
        .limit(_MOST_FAILED)
    )
    failed: list[tuple[float, str]] = []
    for ended_at, started_at, reason, detail in session.execute(newest):
        if reason == Reason.CANCELLED or float(ended_at) - float(started_at or ended_at) >= _SOON_OVER_S:
            break
        failed.append((float(ended_at), ": ".join(filter(None, [reason, detail]))))
    if not failed:
        return None
    since, why = failed[0]
    until = since + min(_FIRST_WAIT_S * 2 ** len(failed), _LONGEST_WAIT_S)
    return Pause(failed=len(failed), since=since, until=until, why=why[:_MOST_WHY]) if now < until else None


def let_go(ctx: Context, session: Session, pilot: Held, why: str) -> set[str]:
    """End a pilot; topics to wake. Those inside are warned by it and save their state."""
    task, job, now = pilot.task, pilot.job, ctx.clock()
    if task.desired == Desired.CANCEL:
        return set()
    lifecycle.ask_to_stop(session, task, now, "")
    task.detail = why
    if job is None or JobState(job.state).is_final:
        lifecycle.end_task(session, task, now, reason=Reason.CANCELLED, detail="")
        return {f"task:{task.id}", "events"}
    return {f"task:{task.id}", "events"} | chains.drop(ctx, session, [job])


def _cpus(spec: PoolSpec) -> int:
    return Resources(cpus=spec.cpus).cpus_min


def _memory(spec: PoolSpec) -> str | None:
    if spec.memory is None:
        return None
    return f"{float(spec.memory.rstrip('+')) * spec.slots_per_node:g}"
