"""Turning what is wanted into jobs: snapshot the endpoints, ask the planner, write the job with its desired state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode, encode
from diamond.core.endpoints import ONLINE_WITHIN_S, EndpointFacts, EndpointUsage
from diamond.core.errors import InvalidInput
from diamond.core.ids import new_id
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.scripts import ScriptPlan, job_envs, job_script
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Choice
from diamond.planner.placement import Candidate, Placement, place
from diamond.server.services import lifecycle
from diamond.server.services.chains import next_revision, time_left
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, IdempotencyRow, JobRow, TaskRow

_BATCH = 200
_LOOK_AGAIN_S = 30.0
_SNAPSHOT = "endpoints"
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
    rows = _endpoints(session)
    before = _newest_job(session, task)
    if before is not None and before.chained and before.reason in (Reason.CONTINUED, Reason.TIME_LIMIT):
        # A chain goes on where its files are.
        rows = [row for row in rows if row.id == before.endpoint_id]
        if not rows:
            detail = "the endpoint that holds its files was removed"
            lifecycle.end_task(session, task, ctx.clock(), reason=Reason.LOST, detail=detail)
            return Placed(topics=[f"task:{task.id}", "events"])
    placement = place(spec, [_candidate(ctx, row) for row in rows])
    if placement.endpoint is None:
        if refuse_impossible:
            _refuse(spec, placement)
        task.pending_reason = _waiting_text(spec, placement)
        return Placed(topics=[f"task:{task.id}", "events"])
    endpoint = next(row for row in rows if row.name == placement.endpoint)
    limit_s = time_left(session, task, spec)
    if limit_s is not None and limit_s <= 0:
        detail = "earlier attempts used up max_duration"
        lifecycle.end_task(session, task, ctx.clock(), reason=Reason.TIME_LIMIT, detail=detail)
        return Placed(topics=[f"task:{task.id}", "events"])
    job = _add_job(ctx, session, task, endpoint, placement.choice, limit_s, before)
    return Placed(topics=[f"task:{task.id}", f"endpoint:{endpoint.id}", "events"], endpoint=endpoint, job=job)


def _one_job(left_s: int | None, choice: Choice) -> tuple[int | None, bool]:
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
    limit_s, is_longer = _one_job(left_s, choice)
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
        created_at=now,
        detail="",
        pending_reason="",
        run_dir="",
        hosts=[],
    )
    add_after_task(session, job)
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
        silent = [row.id for row in _endpoints(session) if not is_online(row.last_seen_at, ctx.clock())]
        if (
            not silent
            or not session.scalars(sa.select(JobRow.id).where(JobRow.endpoint_id.in_(silent), *untold).limit(1)).all()
        ):
            return 0
    with ctx.db.write() as session:
        rows = _endpoints(session, lock=True)
        candidates = [_candidate(ctx, row) for row in rows]
        found = session.execute(
            sa.select(JobRow, TaskRow)
            .join(TaskRow, TaskRow.id == JobRow.task_id)
            .where(JobRow.endpoint_id.in_(silent), *untold)
            .order_by(JobRow.id)
            .limit(_BATCH)
            .options(undefer(TaskRow.spec))
        ).all()
        topics: set[str] = set()
        for job, task in found:
            placement = place(decode(TaskSpec, task.spec), [c for c in candidates if c.online])
            target = next((row for row in rows if row.name == placement.endpoint), None)
            if target is not None:
                _move(ctx, session, task, job, target, placement.choice)
                topics |= {f"task:{task.id}", f"endpoint:{target.id}", "events"}
    ctx.hub.notify(*topics)
    return len(found) - len([topic for topic in topics if topic.startswith("task:")])


def _move(ctx: Context, session: Session, task: TaskRow, job: JobRow, target: EndpointRow, choice: Choice) -> None:
    left_s = time_left(session, task, decode(TaskSpec, task.spec))
    job.time_limit_s, job.chained = _one_job(left_s, choice)
    job.partition, job.gpu_type, job.continues = choice.partition, choice.gpu_type, None
    job.revision = next_revision(session, target.id)
    job.endpoint_id = task.endpoint_id = target.id
    lifecycle.record(session, task, "task.moved", ctx.clock(), {"endpoint": target.name})


def _place_batch(ctx: Context, session: Session, task_ids: list[str]) -> tuple[list[str], int]:
    _endpoints(session, lock=True)
    rows = session.scalars(
        sa.select(TaskRow)
        .where(TaskRow.id.in_(task_ids), TaskRow.state == TaskState.PENDING.value)
        .order_by(TaskRow.priority.desc(), TaskRow.id)
        .options(undefer(TaskRow.spec))
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


def explain(ctx: Context, session: Session, spec: TaskSpec) -> dict[str, Any]:
    """The dry run: where it would go and why, and exactly what would run there."""
    rows = _endpoints(session)
    placement = place(spec, [_candidate(ctx, row) for row in rows])
    if placement.endpoint is None:
        _refuse(spec, placement)
    chosen = next((row for row in rows if row.name == placement.endpoint), None)
    facts = decode(EndpointFacts, chosen.facts) if chosen and chosen.facts else None
    limit_s, chained = _one_job(spec.max_duration, placement.choice)
    run_root = facts.run_root if facts and facts.run_root else "RUN_DIRECTORY"
    script = job_script(
        ScriptPlan(
            job_id="JOB_ID",
            run_dir=f"{run_root}/JOB_ID",
            ranks_per_node=spec.ranks_per_node,
            has_setup=bool(spec.setup),
            scheduler=facts.scheduler if facts else "local",
            num_nodes=spec.num_nodes,
            chained=chained,
            modules=spec.slurm.modules,
        )
    )
    files = {"run.sh": spec.run} | ({"setup.sh": spec.setup} if spec.setup else {})
    envs = job_envs(
        task_id="TASK_ID",
        task_name=spec.name or "",
        job_id="JOB_ID",
        attempt=1,
        num_nodes=spec.num_nodes,
        user_envs=spec.envs,
    )
    return {
        "spec": encode(spec),
        "endpoint": placement.endpoint,
        "why": list(placement.why) or [_waiting_text(spec, placement)],
        "others": {name: obstacle.text for name, obstacle in placement.obstacles.items()},
        "script": script,
        "files": files,
        "envs": envs,
        "time_limit_s": limit_s,
        "partition": placement.choice.partition,
        "jobs": math.ceil(spec.max_duration / limit_s) if chained and spec.max_duration and limit_s else 1,
    }


def _refuse(spec: TaskSpec, placement: Placement) -> None:
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


def _waiting_text(spec: TaskSpec, placement: Placement) -> str:
    if placement.undecided:
        return f"waiting for the agent of {', '.join(placement.undecided)} to connect for the first time"
    if not placement.obstacles:
        return "waiting for an endpoint: none is connected yet (`diamond up` makes this machine one)"
    return "no endpoint can run it now: " + "; ".join(
        f"{name}: {item.text}" for name, item in sorted(placement.obstacles.items())
    )


def begin_batch(session: Session) -> None:
    """Let every task of this transaction be placed by one look at the endpoints; to be ended by `end_batch`."""
    session.info[_SNAPSHOT] = _endpoints(session)
    session.info[_LATER] = []


def end_batch(session: Session) -> None:
    session.flush()
    session.add_all(session.info.pop(_LATER))
    session.info.pop(_SNAPSHOT)


def _endpoints(session: Session, *, lock: bool = False) -> list[EndpointRow]:
    if not lock and _SNAPSHOT in session.info:
        return list(session.info[_SNAPSHOT])
    query = sa.select(EndpointRow).where(EndpointRow.removed_at.is_(None)).order_by(EndpointRow.name)
    return list(session.scalars(query.with_for_update() if lock else query).all())


def _candidate(ctx: Context, row: EndpointRow) -> Candidate:
    return Candidate(
        name=row.name,
        online=is_online(row.last_seen_at, ctx.clock()),
        facts=_facts(row),
        usage=decode(EndpointUsage, row.usage) if row.usage else None,
    )


def is_online(last_seen_at: float | None, now: float) -> bool:
    return last_seen_at is not None and now - last_seen_at < ONLINE_WITHIN_S


def _facts(row: EndpointRow) -> EndpointFacts | None:
    """What the row says of its endpoint; decoded once: a cluster's facts are long, and a batch has many tasks."""
    if not row.facts:
        return None
    known: tuple[object, EndpointFacts] | None = row.__dict__.get("_decoded_facts")
    if known is None or known[0] is not row.facts:
        known = (row.facts, decode(EndpointFacts, row.facts))
        row.__dict__["_decoded_facts"] = known
    return known[1]
