"""Rounds: who of a pool's tasks gets how many slots, how many nodes the pool holds, and carrying that out.

A round reads the pool, asks the planner without holding anything, and then changes a few things in one transaction:
tasks that should have other slots are asked to save and stop (`Desired.YIELD`), tasks that wait get a job where there
is room, pilots are asked for and let go. What was decided is kept in the pool's row until it is carried out, so that a
task which stopped to grow gets what it stopped for; a new decision is made when that is done, something has changed,
or some time has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode
from diamond.core.ids import new_id
from diamond.core.pools import PoolNode, PoolPlace
from diamond.core.resources import Resources
from diamond.core.states import Desired, JobState
from diamond.core.tasks import TaskSpec
from diamond.planner.pools.even import evened
from diamond.planner.pools.pace import DECIDE_S, LOOK_S, ROUND_S, SOON_S
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.snapshot import Decision, Demand, Node, Placement, Shape, Snapshot
from diamond.server.services import (
    audit,
    lifecycle,
    pilots,
    planning,
    pool_batches,
    pool_demands,
    pool_placing,
    pools,
    quotas,
    snapshots,
)
from diamond.server.services.chains import next_revision
from diamond.server.services.context import Context
from diamond.server.services.pool_demands import Known
from diamond.server.services.pool_state import Member, State, read
from diamond.server.store.models import EndpointRow, JobRow, UserRow
from diamond.server.store.pool_models import PoolDecisionRow, PoolRow

log = logging.getLogger(__name__)

PATIENCE_S = 300.0  # for a task that was asked to save and stop; then others are not kept waiting for it
_MOST_NEW = 32  # pilots asked for at once


@dataclass
class Round:
    """One look at a pool, and what is to be done about it."""

    state: State
    known: dict[str, Known]
    demands: list[Demand] = field(default_factory=list)
    topics: set[str] = field(default_factory=set)


def run(ctx: Context) -> float | None:
    """A round of every pool; when to look again, None: when something changes."""
    with ctx.db.read() as session:
        rows = list(pools.open_pools(session))
    later = [at for row in rows if (at := _tried(ctx, row.id)) is not None]
    return min(later, default=None)


def _tried(ctx: Context, pool_id: str) -> float | None:
    try:
        return _one(ctx, pool_id)
    except Exception:  # one pool must not keep all others from going on
        log.exception("a round of pool %s failed; it is tried again", pool_id)
        return ctx.clock() + LOOK_S


def _one(ctx: Context, pool_id: str) -> float | None:
    now = ctx.clock()
    with ctx.db.read() as session:
        state = read(session, session.get_one(PoolRow, pool_id, options=[undefer(PoolRow.profiles)]))
        barred = _barred(session, state)
    known = pool_demands.known_of(ctx, state)
    demands = [one for one in pool_demands.demands(state, known, now) if one.id not in barred]
    plan = state.pool.plan
    decision = None
    if state.pool.closed_at is None and _is_time(state, plan, demands, now):
        snapshot = _snapshot(state, demands, now)
        decision = evened(Goodput().allocate(snapshot), snapshot)
    with ctx.db.write() as session:
        # In the order that holds everywhere: pilots count against quotas, and images may have to be brought.
        quotas.lock(session, sorted({state.pool.owner_id, *(member.task.owner_id for member in state.members)}))
        snapshots.endpoints(session, lock=True)
        asked = sa.select(PoolRow).where(PoolRow.id == pool_id).options(undefer(PoolRow.profiles))
        row = session.scalars(asked.with_for_update()).one()
        fresh = Round(read(session, row, lock=True), known, demands)
        _close_orphan(session, fresh, now)
        if decision is not None:
            row.plan = _kept(fresh, decision, sorted(node.name for node in _nodes(state, now)), now)
        _carry_out(ctx, session, fresh, now)
        _hold_nodes(ctx, session, fresh, now)
        pool_demands.learn(ctx, session, fresh.state)  # of tasks that ended, for those like them
        busy = bool(fresh.state.members or fresh.state.pilots)
    if fresh.topics:
        ctx.hub.notify(*fresh.topics, f"pool:{pool_id}", "planning")
    if not busy:
        return None
    if _in_transit(fresh.state, now):
        return now + SOON_S
    if fresh.state.pool.closed_at is None and row.plan.get("about") != _about(fresh.state, demands, now):
        return now + SOON_S / 2  # something has changed just after a decision
    return now + LOOK_S


def _barred(session: Session, state: State) -> set[str]:
    """Tasks that wait and whose owners may not run in the pool any more: they left its project, or the endpoint's own
    policy does not have them."""
    endpoint = session.get_one(EndpointRow, state.pool.endpoint_id)
    return {
        member.task.id
        for member in state.members
        if member.live is None
        and (
            not snapshots.usable(session, member.task.owner_id, member.task.project_id, [endpoint])
            or snapshots.barred(session, member.task.owner_id, [endpoint])
        )
    }


def _close_orphan(session: Session, fresh: Round, now: float) -> None:
    """A pool ends with its owner's account, and when its owner may hold no nodes there any more."""
    pool = fresh.state.pool
    endpoint, owner = session.get_one(EndpointRow, pool.endpoint_id), session.get_one(UserRow, pool.owner_id)
    lost = owner.disabled_at is not None or not snapshots.usable(session, owner.id, pool.project_id, [endpoint])
    if pool.closed_at is None and lost:
        pool.closed_at = now
        audit.record(session, now, "pool.closed", pool.id, name=pool.name)


# ---- deciding --------------------------------------------------------------------------------------------------------


def _snapshot(state: State, demands: list[Demand], now: float) -> Snapshot:
    nodes = _nodes(state, now)
    there = {node.name for node in nodes}
    placed = {
        member.task.id: _placement(member.place)
        for member in state.members
        if member.place is not None and all(node.pilot in there for node in member.place.nodes)
    }
    return Snapshot(now=now, nodes=tuple(nodes), demands=tuple(demands), placed=placed, seconds=DECIDE_S)


def _nodes(state: State, now: float) -> list[Node]:
    return [
        Node(name=pilot.job.id, gpu_type=state.spec.kind, gpus=state.spec.slots_per_node)
        for pilot in state.pilots
        if pilot.job is not None and pilots.is_usable(pilot, now)
    ]


def _placement(place: PoolPlace) -> Placement:
    return tuple((node.pilot, node.slots) for node in place.nodes)


def _is_time(state: State, plan: dict[str, Any], demands: list[Demand], now: float) -> bool:
    """Whether to decide anew: something is different from what was decided on, or some time has passed."""
    age = now - float(plan.get("at", 0.0))
    about = _about(state, demands, now)
    if age < 0.0:  # the clock was put back
        return True
    if plan.get("about") != about:
        # While tasks are on their way to what was decided, that is carried out first, but for nodes that are gone.
        return age >= SOON_S and (not _in_transit(state, now) or plan.get("nodes") != about[0])
    return age >= ROUND_S and not _in_transit(state, now)


def _about(state: State, demands: list[Demand], now: float) -> list[list[str]]:
    """What a decision depends on, as far as it must be thought over at once: nodes and tasks, in JSON's own types."""
    return [
        sorted(node.name for node in _nodes(state, now)),
        sorted(f"{demand.id} {demand.movable} {demand.min_gpus} {demand.max_gpus}" for demand in demands),
    ]


def _in_transit(state: State, now: float) -> bool:
    """Whether a task is about to stop that was asked to."""
    asked: dict[str, float] = state.pool.plan.get("asked", {})
    return any(
        member.is_moving and member.live is not None and now - _asked_at(member.live, asked) < PATIENCE_S
        for member in state.members
    )


def _asked_at(job: JobRow, asked: dict[str, float]) -> float:
    """An older server did not note it. It was after the job began then: so nobody is waited for without end."""
    return asked.get(job.id, job.started_at or job.created_at)


def _kept(fresh: Round, decision: Decision, nodes: list[str], now: float) -> dict[str, Any]:
    """The decision as the pool's row keeps it. `nodes`: on which it rests; one may have gone meanwhile."""
    about = [nodes, *_about(fresh.state, fresh.demands, now)[1:]]
    speeds = {demand.id: demand for demand in fresh.demands}
    kind, per_node = fresh.state.spec.kind, fresh.state.spec.slots_per_node
    fair = max(1, len(_nodes(fresh.state, now)) * per_node // max(1, len(speeds)))
    estimates: dict[str, Any] = {}
    for name, demand in speeds.items():
        placement = decision.placed.get(name, ())
        alone = min(max(fair, demand.min_gpus), demand.max_gpus)
        estimates[name] = {
            "goodput": demand.speed.goodput(_shape(kind, placement)) if placement else None,
            "alone": demand.speed.goodput(Shape(kind, -(-alone // per_node), alone)),
            "known": fresh.known[name].is_measured if name in fresh.known else False,
            "left": pool_batches.left_there(demand, _shape(kind, placement) if placement else None),
        }
    return {
        **fresh.state.pool.plan,
        "at": now,
        "about": about,
        "nodes": about[0],
        "placed": {name: [list(one) for one in placement] for name, placement in decision.placed.items()},
        "reasons": _worded(fresh, decision.reasons),
        "estimates": estimates,
    }


def _worded(fresh: Round, reasons: Mapping[str, str]) -> dict[str, str]:
    """The planner speaks of GPUs; not every pool has any. And of many tasks it is not known yet whether they move."""
    found = dict(reasons)
    for member in fresh.state.members:
        name, may_move = member.task.id, member.spec.resources.is_elastic or pools.is_free(member.spec)
        if name in found and may_move and not fresh.known.get(name, Known()).is_measured:
            found[name] = found[name].replace("it cannot be moved", "it was not measured yet")
    if fresh.state.spec.has_gpus:
        return found
    return {
        name: reason.replace(" of cpu", "").replace("GPUs", "slots").replace("GPU", "slot")
        for name, reason in found.items()
    }


def _shape(kind: str, placement: Placement) -> Shape:
    return Shape(kind, len(placement), sum(slots for _, slots in placement))


# ---- carrying out ----------------------------------------------------------------------------------------------------


def _carry_out(ctx: Context, session: Session, fresh: Round, now: float) -> None:
    state, plan = fresh.state, fresh.state.pool.plan
    wanted = {
        name: tuple((str(pilot), int(slots)) for pilot, slots in placement)
        for name, placement in plan.get("placed", {}).items()
    }
    if state.pool.closed_at is not None:
        wanted = {}
    there = {pilot.job.id for pilot in state.pilots if pilot.job is not None and pilot.is_held and not pilot.is_ending}
    for member in state.members:
        placement = wanted.get(member.task.id, ())
        if member.live is not None and all(pilot in there for pilot, _ in placement):
            _maybe_move(ctx, session, fresh, member, placement, now)
    used = state.used()
    barred = _barred(session, state)
    for member in state.members:
        if member.live is not None or member.task.desired != Desired.RUN or not member.is_due(now):
            continue
        placement = wanted.get(member.task.id, ())
        if member.task.id in barred:
            _wait(fresh, member, "its owner may not run tasks in the pool any more: stop it, or launch it elsewhere")
            continue
        if not placement or any(pilot not in there for pilot, _ in placement):
            _say_why(fresh, member, plan, wanted)
        elif all(used.get(pilot, 0) + slots <= state.spec.slots_per_node for pilot, slots in placement):
            if _start(ctx, session, fresh, member, placement, now):
                for pilot, slots in placement:
                    used[pilot] = used.get(pilot, 0) + slots
        else:
            _wait(fresh, member, "its slots are being freed: a task before it saves its state")


def _maybe_move(ctx: Context, session: Session, fresh: Round, member: Member, wanted: Placement, now: float) -> None:
    """Ask a task that should be elsewhere, or make room, to save its state and stop."""
    job, place = member.live, member.place
    assert job is not None
    if place is None or job.desired != Desired.RUN or job.state != JobState.RUNNING.value:
        return
    closing = fresh.state.pool.closed_at is not None
    if not closing and (_placement(place) == wanted or not fresh.known.get(member.task.id, Known()).is_movable):
        return
    if not closing and "placed" not in fresh.state.pool.plan:
        return
    job.desired = Desired.YIELD.value
    live = {one.live.id for one in fresh.state.members if one.live is not None}
    asked = {name: at for name, at in fresh.state.pool.plan.get("asked", {}).items() if name in live}
    fresh.state.pool.plan = {**fresh.state.pool.plan, "asked": {**asked, job.id: now}}
    job.revision = next_revision(session, job.endpoint_id)
    slots = sum(slots for _, slots in wanted)
    lifecycle.record(session, member.task, "task.resizing", now, {"from": place.slots, "to": slots})
    if not slots and not closing:  # of one that goes on, it is written down when it does
        _write_down(session, fresh, member, 0, place.slots, "", now)
    fresh.topics |= {f"task:{member.task.id}", f"endpoint:{job.endpoint_id}", "events"}


def _start(ctx: Context, session: Session, fresh: Round, member: Member, placement: Placement, now: float) -> bool:
    """Give a task that waits a job there; False where it must wait on."""
    state = fresh.state
    sizes = {slots for _, slots in placement}
    if len(sizes) != 1:
        _wait(fresh, member, "its slots would lie unevenly on the nodes; it waits until they can be put right")
        return False
    demand = next((one for one in fresh.demands if one.id == member.task.id), None)
    batch = pool_batches.wished(demand, _shape(state.spec.kind, placement))
    place = PoolPlace(
        pool_id=state.pool.id,
        nodes=tuple(PoolNode(pilot=pilot, slots=slots) for pilot, slots in placement),
        cpus=Resources(cpus=state.spec.cpus).cpus_min,
        mem_bytes=Resources(memory=state.spec.memory).mem_bytes_min,
        has_gpus=state.spec.has_gpus,
        global_batch=batch,
    )
    before = member.jobs[-1] if member.jobs else None
    placed = pool_placing.place(ctx, session, member.task, member.spec, state, place, before)
    fresh.topics |= set(placed.topics)
    if placed.job is None:
        return False
    _write_down(session, fresh, member, place.slots, _slots_of(before), pool_batches.why(demand, batch), now)
    return True


def _write_down(
    session: Session, fresh: Round, member: Member, slots: int, before: int, further: str, now: float
) -> None:
    """One decision, for people: a task has other slots, or none any more, and why."""
    plan = fresh.state.pool.plan
    estimate = plan.get("estimates", {}).get(member.task.id, {})
    reasons = [str(plan.get("reasons", {}).get(member.task.id, "")), further]
    session.add(
        PoolDecisionRow(
            id=new_id("pdc"),
            pool_id=fresh.state.pool.id,
            task_id=member.task.id,
            at=now,
            slots=slots,
            before=before,
            reason="; ".join(filter(None, reasons))[:2000],
            goodput=estimate.get("goodput") if estimate.get("known") else None,
        )
    )


def _slots_of(job: JobRow | None) -> int:
    return decode(PoolPlace, job.place).slots if job is not None and job.place else 0


def _say_why(fresh: Round, member: Member, plan: dict[str, Any], wanted: dict[str, Placement]) -> None:
    if fresh.state.pool.closed_at is not None:
        _wait(fresh, member, f"pool {fresh.state.pool.name} is closed: stop the task, or launch it elsewhere")
    elif not any(pilot.is_held for pilot in fresh.state.pilots):
        waits = next((pilot.task.pending_reason for pilot in fresh.state.pilots if pilot.task.pending_reason), "")
        _wait(fresh, member, "the pool holds no node yet" + (f": {waits}" if waits else ""))
    elif member.task.id in plan.get("reasons", {}) and member.task.id not in wanted:
        _wait(fresh, member, str(plan["reasons"][member.task.id]))
    else:
        _wait(fresh, member, "waiting for its turn in the pool")


def _wait(fresh: Round, member: Member, why: str) -> None:
    member.task.next_attempt_at = None  # that time has come: it waits for something else now
    if member.task.pending_reason != why:
        member.task.pending_reason = why[:1000]
        fresh.topics |= {f"task:{member.task.id}", "events"}


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _hold_nodes(ctx: Context, session: Session, fresh: Round, now: float) -> None:
    """Ask for pilots, and let those go that have had nothing to do for long enough."""
    state = fresh.state
    could_use = sum(min(demand.max_gpus, _most(state)) for demand in fresh.demands)
    wanted = pilots.wanted_nodes(state, could_use)
    lasting = [pilot for pilot in state.pilots if pilots.is_lasting(pilot, now)]
    used = state.used()
    idle = _idle_since(fresh, used, now)
    for pilot in [one for one in lasting if not one.is_held][wanted:]:
        fresh.topics |= pilots.let_go(ctx, session, pilot, "the pool does not need it any more")
        lasting.remove(pilot)
    spare = len(lasting) - wanted
    for pilot in sorted(lasting, key=lambda one: idle.get(one.job.id, now) if one.job else now):
        if spare <= 0 or pilot.job is None or pilot.job.id not in idle:
            break
        if now - idle[pilot.job.id] >= (0 if state.pool.closed_at is not None else state.spec.idle):
            fresh.topics |= pilots.let_go(ctx, session, pilot, "it had nothing to do")
            spare -= 1
    # Those that should be over and are not reported so are not replaced without end.
    room = 2 * state.spec.most_nodes - len(state.pilots)
    more = min(wanted - len(lasting), _MOST_NEW, room)
    for _ in range(more if more > 0 and pilots.pause(session, state.pool, now) is None else 0):
        task = pilots.ask_for(ctx, session, state.pool, state.spec)
        placed = planning.place_task(ctx, session, task, decode(TaskSpec, task.spec))
        fresh.topics |= {*placed.topics, "planning"}
    if state.pool.plan.get("wanted_nodes") != wanted or state.pool.plan.get("idle") != idle:
        state.pool.plan = {**state.pool.plan, "wanted_nodes": wanted, "idle": idle}


def _most(state: State) -> int:
    return state.spec.slots_per_node * state.spec.most_nodes


def _idle_since(fresh: Round, used: dict[str, int], now: float) -> dict[str, float]:
    """Pilots that hold a node and run nothing, with since when."""
    before: dict[str, float] = fresh.state.pool.plan.get("idle", {})
    return {
        pilot.job.id: before.get(pilot.job.id, now)
        for pilot in fresh.state.pilots
        if pilot.job is not None and pilot.is_held and not pilot.is_ending and not used.get(pilot.job.id)
    }
