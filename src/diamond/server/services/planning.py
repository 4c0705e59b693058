"""Turning what is wanted into jobs: snapshot the endpoints, ask the planner, write the job with its desired state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput
from diamond.core.ids import new_id
from diamond.core.images import ImageUse
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Choice
from diamond.planner.placement import Candidate, Placement, place
from diamond.server.services import image_placing, image_settling, image_work, lifecycle, snapshots
from diamond.server.services.chains import next_revision, time_left
from diamond.server.services.context import Context
from diamond.server.services.image_placing import Failed, Need
from diamond.server.services.snapshots import is_online
from diamond.server.store.models import EndpointRow, IdempotencyRow, ImageRow, JobRow, TaskRow

_BATCH = 200
_LOOK_AGAIN_S = 30.0
_LATER = "later"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What became of a pending task. `topics` are to be woken after the commit."""

    topics: list[str]
    endpoint: EndpointRow | None = None
    job: JobRow | None = None


def place_task(
    ctx: Context, session: Session, task: TaskRow, spec: TaskSpec, *, refuse_impossible: bool = False
) -> Placed:
    """Give the task a job if an endpoint can run it.

    Raises:
        InvalidInput: with `refuse_impossible`, when no known endpoint could ever run it.
    """
    if task.kind != "command":
        return _place_work(ctx, session, task, spec)
    rows = snapshots.endpoints(session)
    before = _newest_job(session, task)
    if before is not None and before.chained and before.reason in (Reason.CONTINUED, Reason.TIME_LIMIT):
        # A chain goes on where its files are.
        rows = [row for row in rows if row.id == before.endpoint_id]
        if not rows:
            detail = "the endpoint that holds its files was removed"
            lifecycle.end_task(session, task, ctx.clock(), reason=Reason.LOST, detail=detail)
            return Placed(topics=[f"task:{task.id}", "events"])
    if failed := image_placing.disappointed(session, task):
        return _end_without_image(ctx, session, task, failed)
    need = image_placing.look(ctx, session, task, spec, rows)
    placement = place(spec, candidates(ctx, rows, need))
    if placement.endpoint is None:
        if refuse_impossible:
            refuse(spec, placement)
        task.pending_reason = waiting_text(spec, placement)
        return Placed(topics=[f"task:{task.id}", "events"])
    endpoint = next(row for row in rows if row.name == placement.endpoint)
    use = need.uses.get(endpoint.id) if need is not None else None
    if need is not None and use is None:
        return _bring_image(ctx, session, task, need, endpoint)
    limit_s = time_left(session, task, spec)
    if limit_s is not None and limit_s <= 0:
        detail = "earlier attempts used up max_duration"
        lifecycle.end_task(session, task, ctx.clock(), reason=Reason.TIME_LIMIT, detail=detail)
        return Placed(topics=[f"task:{task.id}", "events"])
    job = _add_job(ctx, session, task, endpoint, placement.choice, limit_s, before, use)
    return Placed(topics=[f"task:{task.id}", f"endpoint:{endpoint.id}", "events"], endpoint=endpoint, job=job)


def candidates(ctx: Context, rows: list[EndpointRow], need: Need | None) -> list[Candidate]:
    if need is None:
        return [snapshots.candidate(ctx, row) for row in rows]
    return [
        snapshots.candidate(
            ctx,
            row,
            rank=need.rank(row),
            note=need.note(row),
            obstacle=need.obstacles.get(row.id),
            is_undecided=not need.is_decided(row),
        )
        for row in rows
    ]


def _bring_image(ctx: Context, session: Session, task: TaskRow, need: Need, endpoint: EndpointRow) -> Placed:
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


def _end_without_image(ctx: Context, session: Session, task: TaskRow, failed: Failed) -> Placed:
    lifecycle.end_task(session, task, ctx.clock(), reason=Reason.IMAGE_FAILED, detail=failed.text)
    return Placed(topics=[f"task:{task.id}", "events", "planning"])


def _place_work(ctx: Context, session: Session, task: TaskRow, spec: TaskSpec) -> Placed:
    """A job that looks after images has its endpoint from the start; it may wait for another, or for its base."""
    waits = Placed(topics=[f"task:{task.id}", "events"])
    endpoint = next((row for row in snapshots.endpoints(session) if row.id == task.endpoint_id), None)
    if endpoint is None:
        lifecycle.end_task(session, task, ctx.clock(), reason=Reason.LOST, detail="its endpoint was removed")
        return replace(waits, topics=[*waits.topics, "planning"])
    state = image_placing.export_state(ctx, session, task) or image_placing.removal_state(session, task)
    if not state:
        state, topics = _base_state(ctx, session, task, endpoint)
        waits = replace(waits, topics=[*waits.topics, *topics])
    if isinstance(state, Failed):
        return _end_without_image(ctx, session, task, state)
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
    job = _add_job(ctx, session, task, endpoint, choice, time_left(session, task, spec), None)
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
    replica, made = image_placing.begin(ctx, session, base.owner_id, need, endpoint)
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


def _add_job(
    ctx: Context,
    session: Session,
    task: TaskRow,
    endpoint: EndpointRow,
    choice: Choice,
    left_s: int | None,
    before: JobRow | None,
    use: ImageUse | None = None,
) -> JobRow:
    """The task's next job there. `left_s`: how long the task may still run in all."""
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
        created_at=now,
        detail="",
        pending_reason="",
        run_dir="",
        hosts=[],
    )
    add_after_task(session, job)
    if use is not None and use.image_id:
        image_placing.note_use(session, use.image_id, endpoint.id, now)
    lifecycle.move(session, task, TaskState.QUEUED, now, {"endpoint": endpoint.name})
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
    now = ctx.clock()
    with ctx.db.read() as session:
        pending = sa.select(TaskRow.id, TaskRow.next_attempt_at).where(TaskRow.state == TaskState.PENDING.value)
        rows = session.execute(pending.order_by(TaskRow.priority.desc(), TaskRow.id)).all()
    due = [task_id for task_id, at in rows if at is None or at <= now]
    left = 0
    for start in range(0, len(due), _BATCH):
        batch = due[start : start + _BATCH]
        with ctx.db.write() as session:
            topics, placed = _place_batch(ctx, session, batch)
        left += len(batch) - placed
        ctx.hub.notify(*topics)
    left += _rescue(ctx)
    later = [at for _, at in rows if at is not None and at > now]
    # Due already but not placeable: something must change first; look now and then all the same.
    return min(later + ([now + _LOOK_AGAIN_S] if left else []), default=None)


def _rescue(ctx: Context) -> int:
    """Move jobs nobody was told of away from endpoints that went silent; returns how many must wait.

    A job that an agent may know of stays: only that agent can say that it does not run.
    """
    # A link of a chain stays where its files are.
    untold = (JobRow.state == JobState.PLANNED.value, JobRow.delivered_at.is_(None), JobRow.chained.is_(False))
    with ctx.db.read() as session:  # nearly always there is nothing to do, and writers queue
        silent = [row.id for row in snapshots.endpoints(session) if not is_online(row.last_seen_at, ctx.clock())]
        if (
            not silent
            or not session.scalars(sa.select(JobRow.id).where(JobRow.endpoint_id.in_(silent), *untold).limit(1)).all()
        ):
            return 0
    with ctx.db.write() as session:
        rows = snapshots.endpoints(session, lock=True)
        found = session.execute(
            sa.select(JobRow, TaskRow)
            .join(TaskRow, TaskRow.id == JobRow.task_id)
            .where(JobRow.endpoint_id.in_(silent), *untold, TaskRow.kind == "command")
            .order_by(JobRow.id)
            .limit(_BATCH)
            .options(undefer(TaskRow.spec))
        ).all()
        topics: set[str] = set()
        for job, task in found:
            spec = decode(TaskSpec, task.spec)
            need = image_placing.look(ctx, session, task, spec, rows)
            # Only where its image is ready: the job exists already and cannot wait for one.
            there = rows if need is None else [row for row in rows if row.id in need.uses]
            placement = place(spec, [one for one in candidates(ctx, there, need) if one.online])
            target = next((row for row in rows if row.name == placement.endpoint), None)
            if target is not None:
                use = need.uses[target.id] if need is not None else None
                job.image = encode(use) if use is not None else None
                _move(ctx, session, task, job, target, placement.choice)
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


def _place_batch(ctx: Context, session: Session, task_ids: list[str]) -> tuple[list[str], int]:
    snapshots.endpoints(session, lock=True)
    rows = session.scalars(
        sa.select(TaskRow)
        .where(TaskRow.id.in_(task_ids), TaskRow.state == TaskState.PENDING.value)
        .order_by(TaskRow.priority.desc(), TaskRow.id)
        .options(undefer(TaskRow.spec), undefer(TaskRow.work))
        .with_for_update(skip_locked=True)
    ).all()
    topics: set[str] = set()
    placed = 0
    for task in rows:
        reason_before = task.pending_reason
        done = place_task(ctx, session, task, decode(TaskSpec, task.spec))
        placed += task.state != TaskState.PENDING.value
        if task.state != TaskState.PENDING.value or task.pending_reason != reason_before:
            topics.update(done.topics)
    return sorted(topics), placed


def refuse(spec: TaskSpec, placement: Placement) -> None:
    """Say no at once to what no known endpoint can ever do; wait only for what may still become possible."""
    infra = spec.resources.infra
    known = sorted([*placement.obstacles, *placement.undecided])
    if infra is not None and infra not in known:
        raise InvalidInput(
            f"there is no endpoint {infra[:60]!r}",
            hint=f"endpoints: {', '.join(known) or 'none yet'}",
            field="resources.infra",
        )
    if placement.undecided or not placement.obstacles:
        return
    real = {
        name: item for name, item in placement.obstacles.items() if item.field != "resources.infra" or infra is None
    }
    if len(real) == 1:
        (name, obstacle), *_ = real.items()
        raise InvalidInput(f"endpoint {name} cannot run this: {obstacle.text}", field=obstacle.field)
    raise InvalidInput(
        "no endpoint can run this: " + "; ".join(f"{name}: {item.text}" for name, item in sorted(real.items())),
        field="resources",
    )


def waiting_text(spec: TaskSpec, placement: Placement) -> str:
    if placement.undecided:
        return f"waiting for the agent of {', '.join(placement.undecided)} to connect for the first time"
    if not placement.obstacles:
        return "waiting for an endpoint: none is connected yet (`diamond up` makes this machine one)"
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
