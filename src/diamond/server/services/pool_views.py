"""Pools as users see them: rows turned into what the API answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.durations import format_duration
from diamond.core.pools import Pilot, Pool, PoolDecision, PoolTask
from diamond.core.states import TaskState
from diamond.server.services import access, pilots, pool_state
from diamond.server.services.context import Context
from diamond.server.services.pool_state import Held, Member, State
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow, TaskRow, UserRow
from diamond.server.store.pool_models import PoolDecisionRow, PoolRow

MAX_DECISIONS = 200
MAX_ENDED = 50


def view(ctx: Context, session: Session, user_id: str, row: PoolRow, *, whole: bool = False) -> Pool:
    """`whole`: with its pilots, tasks and newest decisions. Of tasks that the user may not see, no name is told."""
    state = pool_state.read(session, row)
    used = state.used()
    held = [pilot for pilot in state.pilots if pilot.is_held]
    project = session.get(ProjectRow, row.project_id) if row.project_id else None
    shown: dict[str, Any] = {}
    if whole:
        seen = of_pool(session, user_id, row)
        shown = {
            "pilots": tuple(_pilot(state, pilot, used, ctx.clock()) for pilot in state.pilots),
            "tasks": (*_tasks(ctx, session, state, seen), *_ended(session, row, seen)),
            "decisions": _decisions(session, row, seen),
        }
    return Pool(
        id=row.id,
        name=row.name,
        spec=state.spec,
        owner=session.get_one(UserRow, row.owner_id).name,
        project="" if project is None or project.personal_of else project.name,
        endpoint=session.get_one(EndpointRow, row.endpoint_id).name,
        created_at=row.created_at,
        closed_at=row.closed_at,
        nodes=len(held),
        wanted_nodes=int(row.plan.get("wanted_nodes", 0)),
        slots=len(held) * state.spec.slots_per_node,
        used=sum(used.values()),
        waiting=sum(member.live is None for member in state.members),
        running=sum(member.live is not None for member in state.members),
        goodput=_gain(row.plan),
        note=_note(session, state, ctx.clock()),
        is_mine=row.owner_id == user_id,
        **shown,
    )


def _gain(plan: dict[str, Any]) -> float | None:
    """Work now, over what fixed equal shares would do, as estimated; of tasks that were measured."""
    ratios = [
        (one["goodput"] or 0.0) / one["alone"]
        for one in plan.get("estimates", {}).values()
        if one.get("known") and one.get("alone")
    ]
    return sum(ratios) / len(ratios) if ratios else None


def _note(session: Session, state: State, now: float) -> str:
    if state.pool.closed_at is not None:
        return (
            "it is closed; its nodes are let go once its tasks have saved their state"
            if state.pilots
            else "it is closed"
        )
    waiting = [pilot for pilot in state.pilots if not pilot.is_held and not pilot.is_ending]
    why = next((pilot.task.pending_reason for pilot in waiting if pilot.task.pending_reason), "")
    said = f"{_nodes(len(waiting))} asked for" + (f": {why}" if why else "") if waiting else ""
    lasting = sum(pilots.is_lasting(pilot, now) for pilot in state.pilots)
    missing = int(state.pool.plan.get("wanted_nodes", 0)) - lasting
    paused = pilots.pause(session, state.pool, now) if missing > 0 else None
    return "; ".join(filter(None, [said, _paused(paused, missing, now) if paused is not None else ""]))


def _nodes(number: int) -> str:
    return f"{number} more {'node is' if number == 1 else 'nodes are'}"


def _paused(paused: pilots.Pause, missing: int, now: float) -> str:
    """Since when it is waited, and until when; in lengths of time, since nobody knows the reader's clock."""
    lost = "the last job of the pool was" if paused.failed == 1 else f"the last {paused.failed} jobs of the pool were"
    return (
        f"{_nodes(missing)} wanted: {lost} over at once ({paused.why or 'nobody said why'}), so Diamond has waited for "
        f"{format_duration(max(0.0, now - paused.since))} and asks again in {format_duration(paused.until - now)}"
    )


def _pilot(state: State, pilot: Held, used: dict[str, int], now: float) -> Pilot:
    job = pilot.job
    return Pilot(
        task_id=pilot.task.id,
        job_id=job.id if job is not None else "",
        state=pilot.task.state,
        host=str(job.hosts[0]) if job is not None and job.hosts else "",
        slots=state.spec.slots_per_node,
        used=used.get(job.id, 0) if job is not None else 0,
        started_at=pool_state.began_at(job, now) if job is not None else None,
        ends_at=pilot.ends_at(),
        pending_reason=pilot.task.pending_reason,
    )


class Shown(NamedTuple):
    """A task as a viewer is told of it: by its id and name, or by its number alone, where they may not see it."""

    number: int
    task_id: str
    name: str


def of_pool(session: Session, user_id: str, row: PoolRow) -> dict[str, Shown]:
    """All tasks that the pool ever had, by id. They are counted together, so that each keeps its number while others
    come and go."""
    theirs = (TaskRow.pool_id == row.id, TaskRow.kind == "command")
    seen = set(session.scalars(sa.select(TaskRow.id).where(*theirs, access.sees(TaskRow, user_id))))
    query = sa.select(TaskRow.id, TaskRow.name).where(*theirs).order_by(TaskRow.created_at, TaskRow.id)
    return {
        key: Shown(number, key, name) if key in seen else Shown(number, "", f"task {number} of another user")
        for number, (key, name) in enumerate(session.execute(query), 1)
    }


_GONE = Shown(0, "", "a removed task")


def _tasks(ctx: Context, session: Session, state: State, seen: dict[str, Shown]) -> list[PoolTask]:
    hosts = {
        pilot.job.id: str(pilot.job.hosts[0]) for pilot in state.pilots if pilot.job is not None and pilot.job.hosts
    }
    people = _people(session, [member.task for member in state.members])
    return [_task(ctx, state, member, hosts, people, seen) for member in state.members]


def _task(
    ctx: Context, state: State, member: Member, hosts: dict[str, str], people: dict[str, str], seen: dict[str, Shown]
) -> PoolTask:
    # Loaded where a pool is looked at: its models take a while to load, and many servers have no pool.
    from diamond.server.services import pool_batches, pool_demands

    plan, task, place = state.pool.plan, member.task, member.place
    known = pool_demands.known_of(ctx, State(state.pool, state.spec, [], [member]))[task.id]
    low, high = pool_demands.widest(state.spec, member.spec)
    estimate = plan.get("estimates", {}).get(task.id, {})
    goodput = estimate.get("goodput") if estimate.get("known") else None
    left, latest = estimate.get("left"), known.latest
    shown = seen.get(task.id, _GONE)
    is_mine = bool(shown.task_id)
    is_news = member.live is not None and known.job_id == member.live.id
    of_batch = pool_batches.fields(member.spec, latest, known.noise_scale, place, is_news=is_news)
    if not is_mine:  # in the words of its program
        of_batch |= {"parallel": "", "parallel_reason": ""}
    return PoolTask(
        task_id=shown.task_id,
        name=shown.name,
        number=shown.number,
        owner=people.get(task.owner_id, ""),
        state=task.state,
        slots=place.slots if place is not None else 0,
        nodes=len(place.nodes) if place is not None else 0,
        hosts=tuple(hosts.get(node.pilot, "") for node in place.nodes) if place is not None else (),
        least=low,
        most=high,
        resizable=known.is_movable,
        moving=member.is_moving,
        reason=(task.pending_reason if is_mine else "") or str(plan.get("reasons", {}).get(task.id, "")),
        goodput=goodput,
        alone=estimate.get("alone") if estimate.get("known") else None,
        step=latest.step if latest is not None else None,
        until=latest.until if latest is not None else None,
        restarts=max(0, len([job for job in member.jobs if job.started_at]) - 1),
        submitted_at=task.created_at,
        predicted_end_at=float(plan.get("at", 0.0)) + left / goodput if goodput and left is not None else None,
        **of_batch,
    )


def _ended(session: Session, row: PoolRow, seen: dict[str, Shown]) -> list[PoolTask]:
    final = [state.value for state in TaskState if state.is_final]
    query = (
        sa.select(TaskRow)
        .where(TaskRow.pool_id == row.id, TaskRow.kind == "command", TaskRow.state.in_(final))
        .order_by(TaskRow.ended_at.desc())
        .limit(MAX_ENDED)
    )
    tasks = session.scalars(query).all()
    people = _people(session, tasks)
    return [
        PoolTask(
            **seen.get(task.id, _GONE)._asdict(),
            owner=people.get(task.owner_id, ""),
            state=task.state,
            submitted_at=task.created_at,
            ended_at=task.ended_at,
            restarts=max(0, task.attempt - 1),
        )
        for task in tasks
    ]


def _people(session: Session, tasks: Any) -> dict[str, str]:
    wanted = {task.owner_id for task in tasks}
    found = session.execute(sa.select(UserRow.id, UserRow.name).where(UserRow.id.in_(wanted)))
    return {str(key): str(name) for key, name in found}


def _decisions(session: Session, row: PoolRow, seen: dict[str, Shown]) -> tuple[PoolDecision, ...]:
    query = (
        sa.select(PoolDecisionRow)
        .where(PoolDecisionRow.pool_id == row.id)
        .order_by(PoolDecisionRow.id.desc())
        .limit(MAX_DECISIONS)
    )
    return tuple(
        PoolDecision(
            at=one.at,
            task_id=seen.get(one.task_id, _GONE).task_id,
            task_name=seen.get(one.task_id, _GONE).name,
            number=seen.get(one.task_id, _GONE).number,
            slots=one.slots,
            before=one.before,
            reason=one.reason,
            goodput=one.goodput,
        )
        for one in session.scalars(query)
    )
