"""Turning what is wanted into jobs: snapshot the endpoints, ask the planner, write the job with its desired state."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode, encode
from diamond.core.ids import new_id
from diamond.core.images import ImageUse
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Choice
from diamond.planner.placement import Placement, place
from diamond.planner.shares import Turns, Waiting
from diamond.server.services import (
    image_placing,
    image_settling,
    image_work,
    lifecycle,
    places,
    quotas,
    shares,
    snapshots,
    usage,
    withdrawals,
)
from diamond.server.services.chains import next_revision, time_left
from diamond.server.services.context import Context
from diamond.server.services.image_placing import Failed, Need
from diamond.server.services.places import Asked, Decided
from diamond.server.services.snapshots import is_online
from diamond.server.store.models import EndpointRow, IdempotencyRow, ImageRow, JobRow, TaskRow

NO_ENDPOINT = "waiting for an endpoint: none that it may use is connected yet"
NOT_YET = "waiting for its turn to be placed: many tasks were launched at once"
_BATCH = 200
MOST_S = 1.0  # that one transaction spends on looking through endpoints
_SPENT = "seconds spent placing"
_LOOK_AGAIN_S = 30.0
_LATER = "later"
# Built once: what is asked whenever something changes costs more to put together than to run.
_WAITING = sa.select(TaskRow.id, TaskRow.next_attempt_at, TaskRow.owner_id, TaskRow.priority, TaskRow.created_at).where(
    TaskRow.state == TaskState.PENDING.value
)
_SEEN_AT = sa.select(EndpointRow.id, EndpointRow.last_seen_at).where(EndpointRow.removed_at.is_(None))
# A link of a chain stays where its files are.
_UNTOLD = (JobRow.state == JobState.PLANNED.value, JobRow.delivered_at.is_(None), JobRow.chained.is_(False))


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What became of a pending task.

    Attributes:
        topics: to be woken after the commit.
        decided: where it goes and why; None where that was settled before.
    """

    topics: list[str]
    endpoint: EndpointRow | None = None
    job: JobRow | None = None
    decided: Decided | None = None


def place_task(
    ctx: Context, session: Session, task: TaskRow, spec: TaskSpec, *, refuse_impossible: bool = False
) -> Placed:
    """Give the task a job if an endpoint can run it.

    Raises:
        InvalidInput: with `refuse_impossible`, when no known endpoint could ever run it.
    """
    if task.kind not in ("command", "pilot"):
        return _place_work(ctx, session, task, spec)
    if refuse_impossible and _is_out_of_time(session):
        task.pending_reason = NOT_YET
        return Placed(topics=[f"task:{task.id}", "events", "planning"])
    if task.pool_id is not None and task.kind == "command":  # `pool_rounds` gives it slots
        return Placed(topics=[f"task:{task.id}", "events", "pools"])
    before = _newest_job(session, task)
    stays = before is not None and before.chained and before.reason in (Reason.CONTINUED, Reason.TIME_LIMIT)
    asked = Asked.of(task, spec, stays=stays)
    rows = places.rows_for(session, asked)
    if before is not None and stays:  # a chain goes on where its files are
        rows = [row for row in rows if row.id == before.endpoint_id]
        if not rows:
            detail = "the endpoint that holds its files was removed, or is no longer shared with its project"
            lifecycle.end_task(session, task, ctx.clock(), reason=Reason.LOST, detail=detail)
            return Placed(topics=[f"task:{task.id}", "events"])
    if failed := image_placing.disappointed(session, task):
        return end_without_image(ctx, session, task, failed)
    need = image_placing.look(ctx, session, task, spec, rows)
    began = time.monotonic()
    decided = places.decide(ctx, session, asked, rows, need)
    session.info[_SPENT] = session.info.get(_SPENT, 0.0) + time.monotonic() - began
    endpoint, placement = decided.endpoint, decided.placement
    if endpoint is None:
        if refuse_impossible:
            places.refuse(session, asked, decided)
        taken_back = f"{before.detail}; " if before and before.reason == Reason.CANCELLED else ""
        task.pending_reason = taken_back + waiting_text(spec, placement)
        return Placed(topics=[f"task:{task.id}", "events"], decided=decided)
    use = need.uses.get(endpoint.id) if need is not None else None
    if need is not None and use is None:
        if refuse_impossible:
            check_room(session, asked, need, endpoint)
        return replace(bring_image(ctx, session, task, need, endpoint), decided=decided)
    limit_s = time_left(session, task, spec)
    if limit_s is not None and limit_s <= 0:
        detail = "earlier attempts used up max_duration"
        lifecycle.end_task(session, task, ctx.clock(), reason=Reason.TIME_LIMIT, detail=detail)
        return Placed(topics=[f"task:{task.id}", "events"])
    lasts_s = limit_s if limit_s is not None else placement.choice.walltime_s
    new_for_s = (lasts_s or 0) if refuse_impossible else None
    if why := quotas.why_waits(ctx, session, task.owner_id, task.project_id, spec, new_for_s=new_for_s):
        task.pending_reason = why
        return Placed(topics=[f"task:{task.id}", "events"], decided=decided)
    job = add_job(ctx, session, task, endpoint, placement.choice, limit_s, before, use, holds=spec)
    quotas.take(session, task, job.num_nodes, job.num_gpus)
    topics = [f"task:{task.id}", f"endpoint:{endpoint.id}", "events"]
    return Placed(topics=topics, endpoint=endpoint, job=job, decided=decided)


def check_room(session: Session, asked: Asked, need: Need, endpoint: EndpointRow) -> None:
    """Refuse a new task whose image would be more than may be stored.

    Raises:
        QuotaExceeded: naming the limit.
    """
    if need.ways[endpoint.id].how != "waiting":
        text = f"its image would have to be brought to {endpoint.name}"
        quotas.check_storage(session, asked.user_id, asked.project_id, 0, text, field="image")


def _is_out_of_time(session: Session) -> bool:
    """Whether this transaction has looked through endpoints for so long that the rest can wait for another.

    While it goes on nobody else can write to SQLite, or launch at those endpoints.
    """
    return bool(session.info.get(_SPENT, 0.0) > MOST_S)


def bring_image(ctx: Context, session: Session, task: TaskRow, need: Need, endpoint: EndpointRow) -> Placed:
    """The task waits while its image is made at the endpoint, and goes on by itself."""
    assert need.image is not None
    now = ctx.clock()
    way = need.ways[endpoint.id]
    replica, made = image_placing.begin(ctx, session, task.owner_id, need, endpoint)
    topics = place_made(ctx, session, made)
    if image_placing.wait_for(task, replica):
        data = {"image": need.image.name, "endpoint": endpoint.name, "how": way.how, "why": way.why}
        lifecycle.record(session, task, "task.image", now, {**data, "task": replica.task_id})
    task.pending_reason = image_placing.waiting_text(session, need.image, replica)
    return Placed(topics=[f"task:{task.id}", "events", *topics])


def place_made(ctx: Context, session: Session, made: list[TaskRow]) -> list[str]:
    """Place tasks that look after images, just made; topics to be woken."""
    topics: list[str] = []
    for work in made:
        topics += place_task(ctx, session, work, decode(TaskSpec, work.spec)).topics
    return topics


def end_without_image(ctx: Context, session: Session, task: TaskRow, failed: Failed) -> Placed:
    lifecycle.end_task(session, task, ctx.clock(), reason=Reason.IMAGE_FAILED, detail=failed.text)
    return Placed(topics=[f"task:{task.id}", "events", "planning"])


def _place_work(ctx: Context, session: Session, task: TaskRow, spec: TaskSpec) -> Placed:
    """A job that looks after images has its endpoint from the start; it may wait for another, or for its base."""
    waits = Placed(topics=[f"task:{task.id}", "events"])
    endpoint = next((row for row in snapshots.endpoints(session) if row.id == task.endpoint_id), None)
    if endpoint is None or not withdrawals.may_work(session, task, endpoint):
        detail = "its endpoint was removed" if endpoint is None else f"endpoint {endpoint.name} is no longer shared"
        lifecycle.end_task(session, task, ctx.clock(), reason=Reason.LOST, detail=detail)
        return replace(waits, topics=[*waits.topics, "planning"])
    state = image_placing.export_state(ctx, session, task) or image_placing.removal_state(session, task)
    if not state:
        state, topics = _base_state(ctx, session, task, endpoint)
        waits = replace(waits, topics=[*waits.topics, *topics])
    if isinstance(state, Failed):
        return end_without_image(ctx, session, task, state)
    if state:
        task.pending_reason = state
        return waits
    choice = Choice()  # beside the scheduler, its partitions do not matter
    order = image_work.order_of(task)
    if order is not None and order.where == "batch":
        placement = place(spec, [snapshots.candidate(ctx, endpoint)])
        if placement.endpoint is None:
            task.pending_reason = waiting_text(spec, placement)
            return waits
        choice = placement.choice
    holds = spec if order is not None and order.where == "batch" else None
    job = add_job(ctx, session, task, endpoint, choice, time_left(session, task, spec), None, holds=holds)
    job.chained = False  # a build does not go on where another stopped; its finished steps are kept
    return Placed(topics=[*waits.topics, f"endpoint:{endpoint.id}"], endpoint=endpoint, job=job)


def _base_state(ctx: Context, session: Session, task: TaskRow, endpoint: EndpointRow) -> tuple[str | Failed, list[str]]:
    """What a build waits for: nothing once the image it builds on is there and its order says where."""
    base_id = str((task.work or {}).get("base_id") or "")
    if not base_id:
        return "", []
    if failed := image_placing.disappointed(session, task, "base_replica_id"):
        return failed, []
    base = session.get(ImageRow, base_id, options=[undefer(ImageRow.recipe)])
    if base is None or base.removed_at is not None:
        return Failed(text="the image it builds on was removed"), []
    order = image_work.order_of(task)
    pinned = image_placing.base_pin(order.recipe, base) if order is not None and order.recipe is not None else ""
    tried = (task.work or {}).get("tried", [])
    need = image_placing.need_image(ctx, session, base, [endpoint], tried=tried, pinned=pinned)
    if (use := need.uses.get(endpoint.id)) is not None:
        image_work.give_base(task, use)
        return "", []
    if obstacle := need.obstacles.get(endpoint.id):
        return Failed(text=f"the image it builds on cannot be had: {obstacle.text}"), []
    # As the base's owner: who may use an image may not see into a private one that it builds on.
    asked_by = image_work.asker_of(task)
    replica, made = image_placing.begin(ctx, session, base.owner_id, need, endpoint, asked_by=asked_by)
    image_placing.wait_for(task, replica, "base_replica_id")
    text = image_placing.waiting_text(session, base, replica).replace("its image", "its base, image", 1)
    return text, place_made(ctx, session, made)


def one_job(left_s: int | None, choice: Choice) -> tuple[int | None, bool]:
    """The time limit of the next job of a task that may run for `left_s`, and whether it needs more than that one."""
    limits = [limit for limit in (left_s, choice.walltime_s) if limit is not None]
    is_longer = left_s is not None and choice.walltime_s is not None and left_s > choice.walltime_s
    return min(limits, default=None), is_longer


def _newest_job(session: Session, task: TaskRow) -> JobRow | None:
    if task.attempt == 0:
        return None
    return session.scalars(
        sa.select(JobRow).where(JobRow.task_id == task.id, JobRow.attempt == task.attempt)
    ).one_or_none()


def add_job(
    ctx: Context,
    session: Session,
    task: TaskRow,
    endpoint: EndpointRow,
    choice: Choice,
    left_s: int | None,
    before: JobRow | None,
    use: ImageUse | None = None,
    *,
    holds: TaskSpec | None,
) -> JobRow:
    """The task's next job there. `left_s`: how long the task may still run in all; `holds`: whose nodes it takes."""
    now = ctx.clock()
    revision = next_revision(session, endpoint.id)
    # A job queued in advance and given up has a number too.
    newest = 0
    if task.attempt:
        highest = sa.select(sa.func.max(JobRow.attempt)).where(JobRow.task_id == task.id)
        newest = session.execute(highest).scalar_one() or 0
    task.attempt = newest + 1
    task.endpoint_id = endpoint.id
    task.next_attempt_at = None
    task.pending_reason, task.expected_start_at = "", None
    limit_s, is_longer = one_job(left_s, choice)
    goes_on = (
        before is not None and before.endpoint_id == endpoint.id and MEANINGS[Reason(before.reason or "LOST")].resumes
    )
    job = JobRow(
        id=new_id("job"),
        task_id=task.id,
        endpoint_id=endpoint.id,
        attempt=task.attempt,
        state=JobState.PLANNED.value,
        desired=Desired.RUN.value,
        revision=revision,
        time_limit_s=limit_s,
        partition=choice.partition,
        gpu_type=choice.gpu_type,
        chained=is_longer or (before is not None and before.chained),
        continues=before.id if before is not None and goes_on else None,
        image=encode(use) if use is not None else None,
        num_nodes=holds.num_nodes if holds is not None else 0,
        num_gpus=holds.num_nodes * holds.resources.gpus if holds is not None else 0,
        stored_bytes=0,
        created_at=now,
        detail="",
        pending_reason="",
        run_dir="",
        hosts=[],
    )
    told = places.readers(session, task.owner_id, endpoint, holds) if holds is not None else ""
    data = {"endpoint": endpoint.name, **({"note": told} if told else {})}
    lifecycle.move(session, task, TaskState.QUEUED, now, data)
    add_after_task(session, job)
    if use is not None and use.image_id:
        image_placing.note_use(session, use.image_id, endpoint.id, now)
    return job


def add_after_task(session: Session, row: JobRow | IdempotencyRow) -> None:
    """Add a row that points to a task added before it; of a batch, all tasks are written in one go, then the rest."""
    if (kept := session.info.get(_LATER)) is not None:
        kept.append(row)
    else:
        session.flush()
        session.add(row)


def run_due(ctx: Context) -> float | None:
    """Place every pending task that is due; returns when to look again (None: when something changes)."""
    image_settling.settle(ctx)
    usage.charge_ended(ctx)
    withdrawals.run(ctx)
    now = ctx.clock()
    with ctx.db.read() as session:
        rows = session.execute(_WAITING).all()
        due = [
            Waiting(id=task_id, user=user, priority=priority, created_at=created_at)
            for task_id, at, user, priority, created_at in rows
            if at is None or at <= now
        ]
        due, turns = shares.in_turn(session, due, now)
    left = 0
    while due:
        with ctx.db.write() as session:
            topics, placed, due_later = _place_batch(ctx, session, due[:_BATCH], turns)
        left += len(due[:_BATCH]) - len(due_later) - placed
        due = due_later + due[_BATCH:]
        ctx.hub.notify(*topics)
    left += _rescue(ctx)
    later = [row.next_attempt_at for row in rows if row.next_attempt_at is not None and row.next_attempt_at > now]
    # Due already but not placeable: something must change first; look now and then all the same.
    return min(later + ([now + _LOOK_AGAIN_S] if left else []), default=None)


def _rescue(ctx: Context) -> int:
    """Move jobs nobody was told of away from endpoints that went silent; returns how many must wait.

    A job that an agent may know of stays: only that agent can say that it does not run.
    """
    with ctx.db.read() as session:  # nearly always there is nothing to do, and writers queue
        silent = [one for one, seen_at in session.execute(_SEEN_AT) if not is_online(seen_at, ctx.clock())]
        untold = sa.select(JobRow.id).where(JobRow.endpoint_id.in_(silent), *_UNTOLD).limit(1)
        if not silent or session.scalars(untold).first() is None:
            return 0
    with ctx.db.write() as session:
        rows = snapshots.endpoints(session, lock=True)
        found = session.execute(
            sa.select(JobRow, TaskRow)
            .join(TaskRow, TaskRow.id == JobRow.task_id)
            .where(JobRow.endpoint_id.in_(silent), *_UNTOLD, TaskRow.kind == "command")
            .order_by(JobRow.id)
            .limit(_BATCH)
            .options(undefer(TaskRow.spec))
        ).all()
        topics: set[str] = set()
        for job, task in found:
            spec = decode(TaskSpec, task.spec)
            asked = Asked.of(task, spec)
            mine = snapshots.usable(session, task.owner_id, task.project_id, rows)
            need = image_placing.look(ctx, session, task, spec, mine)
            # Only where its image is ready: the job exists already and cannot wait for one.
            there = mine if need is None else [row for row in mine if row.id in need.uses]
            decided = places.decide(ctx, session, asked, there, need, online=True)
            if (target := decided.endpoint) is not None:
                use = need.uses[target.id] if need is not None else None
                job.image = encode(use) if use is not None else None
                _move(ctx, session, task, job, target, decided.placement.choice)
                topics |= {f"task:{task.id}", f"endpoint:{target.id}", "events"}
    ctx.hub.notify(*topics)
    return len(found) - len([topic for topic in topics if topic.startswith("task:")])


def _move(ctx: Context, session: Session, task: TaskRow, job: JobRow, target: EndpointRow, choice: Choice) -> None:
    left_s = time_left(session, task, decode(TaskSpec, task.spec))
    job.time_limit_s, job.chained = one_job(left_s, choice)
    job.partition, job.gpu_type, job.continues = choice.partition, choice.gpu_type, None
    job.revision = next_revision(session, target.id)
    job.endpoint_id = task.endpoint_id = target.id
    lifecycle.record(session, task, "task.moved", ctx.clock(), {"endpoint": target.name})


def _place_batch(
    ctx: Context, session: Session, batch: list[Waiting], turns: Turns
) -> tuple[list[str], int, list[Waiting]]:
    """Topics to wake, how many have a job now, and those there was no time to look at: others want to write too."""
    task_ids = [one.id for one in batch]
    quotas.lock_tasks(session, task_ids)
    snapshots.endpoints(session, lock=True)
    found = session.scalars(
        sa.select(TaskRow)
        .where(TaskRow.id.in_(task_ids), TaskRow.state == TaskState.PENDING.value)
        .order_by(TaskRow.id)
        .options(undefer(TaskRow.spec), undefer(TaskRow.work))
        .with_for_update(skip_locked=True)
    ).all()
    rows = {row.id: row for row in found}
    topics: set[str] = set()
    placed = 0
    waiting = {one.id: one for one in batch if one.id in rows}
    for one in turns.each(list(waiting.values())):
        if _is_out_of_time(session) and len(waiting) < len(rows):  # at least one, or it would never end
            break
        task = rows[waiting.pop(one.id).id]
        reason_before = task.pending_reason
        done = place_task(ctx, session, task, decode(TaskSpec, task.spec))
        if task.state != TaskState.PENDING.value:
            placed += 1
            turns.charge(one.user, one.cost)
        if task.state != TaskState.PENDING.value or task.pending_reason != reason_before:
            topics.update(done.topics)
    return sorted(topics), placed, list(waiting.values())


def waiting_text(spec: TaskSpec, placement: Placement) -> str:
    if placement.undecided:
        return f"waiting for the agent of {', '.join(placement.undecided)} to connect for the first time"
    if not placement.obstacles:
        return f"{NO_ENDPOINT} (diamond endpoint create NAME)"
    return "no endpoint can run it now: " + "; ".join(
        f"{name}: {item.text}" for name, item in sorted(placement.obstacles.items())
    )


def begin_batch(session: Session) -> None:
    """Let every task of this transaction be placed by one look at the endpoints; to be ended by `end_batch`."""
    snapshots.keep(session)
    session.info[_LATER] = []


def end_batch(session: Session) -> None:
    session.flush()
    session.add_all(session.info.pop(_LATER))
    snapshots.forget(session)
