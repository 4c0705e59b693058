"""Endpoints as users see them: which exist, what they have, what waits in their queues."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint, EndpointFacts, EndpointUsage, QueueEntry
from diamond.core.enrolment import ENDPOINT_NAME
from diamond.core.errors import Conflict, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.images import ReplicaState
from diamond.core.reasons import Reason
from diamond.core.resources import Resources
from diamond.core.states import FINAL_JOB_STATES, JobState
from diamond.server.services import chains, enrolment, lifecycle, tokens
from diamond.server.services.context import Context
from diamond.server.services.snapshots import is_online
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow, JobRow, ReplicaRow, TaskRow

_FINAL = [state.value for state in FINAL_JOB_STATES]
_MAX_QUEUE = 1000


def create(ctx: Context, user_id: str, name: str) -> tuple[Endpoint, str]:
    """A new endpoint and the token its agent will use; the token cannot be shown again."""
    endpoint, token, _ = _create(ctx, user_id, name, with_token=True)
    assert token is not None
    return endpoint, token


def create_with_code(ctx: Context, user_id: str, name: str) -> tuple[Endpoint, enrolment.Code]:
    """A new endpoint and the code its agent will enrol with; no token exists until it has."""
    endpoint, _, code = _create(ctx, user_id, name, with_token=False)
    assert code is not None
    return endpoint, code


def _create(
    ctx: Context, user_id: str, name: str, *, with_token: bool
) -> tuple[Endpoint, str | None, enrolment.Code | None]:
    if not ENDPOINT_NAME.fullmatch(name):
        raise InvalidInput(
            f"{name[:60]!r} is not an endpoint name",
            hint="use lower-case letters, digits, dots, dashes and underscores, at most 63",
            field="name",
        )
    now = ctx.clock()
    row = EndpointRow(id=new_id("end"), owner_id=user_id, name=name, created_at=now, revision=0)
    try:
        with ctx.db.write() as session:
            session.add(row)
            session.flush()
            token = tokens.issue(session, now=now, endpoint_id=row.id) if with_token else None
            code = None if with_token else enrolment.issue_code(ctx, session, row)
            data = {"name": name}
            record_event(session, at=now, kind="endpoint.created", owner_id=user_id, endpoint_id=row.id, data=data)
    except exc.IntegrityError as error:
        raise Conflict(
            f"there is an endpoint {name!r} already",
            hint=f"choose another name; `diamond endpoint enroll {name}` prints a new line for its agent",
            field="name",
        ) from error
    ctx.hub.notify("events")
    return to_endpoint(row, now, "enrolled" if with_token else "code"), token, code


def list_endpoints(ctx: Context, user_id: str) -> list[Endpoint]:
    with ctx.db.read() as session:
        rows = session.scalars(
            sa.select(EndpointRow)
            .where(EndpointRow.owner_id == user_id, EndpointRow.removed_at.is_(None))
            .order_by(EndpointRow.name)
        ).all()
        access = enrolment.access_of(session, [row.id for row in rows], ctx.clock())
        return [to_endpoint(row, ctx.clock(), access[row.id]) for row in rows]


def get(ctx: Context, user_id: str, name: str) -> Endpoint:
    with ctx.db.read() as session:
        row = _find(session, user_id, name)
        return to_endpoint(row, ctx.clock(), enrolment.access_of(session, [row.id], ctx.clock())[row.id])


def remove(ctx: Context, user_id: str, name: str, *, force: bool = False) -> int:
    """Forget an endpoint; how many live jobs were given up with it. Finished tasks keep their record.

    Raises:
        Conflict: it has live jobs, and `force` was not given.
    """
    with ctx.db.write() as session:
        row = enrolment.locked(session, user_id, name)
        jobs = session.scalars(
            sa.select(JobRow).where(JobRow.endpoint_id == row.id, JobRow.state.not_in(_FINAL)).order_by(JobRow.id)
        ).all()
        if jobs and not force:
            raise Conflict(
                f"endpoint {name} has {len(jobs)} live job{'s' if len(jobs) > 1 else ''}",
                hint="stop its tasks or wait for them; --force gives them up and leaves them running there, unwatched",
            )
        now = ctx.clock()
        enrolment.withdraw(session, row, now)
        topics = {"planning", "events", f"endpoint:{row.id}"}
        for job in jobs:
            task = session.get_one(TaskRow, job.task_id, options=[undefer(TaskRow.spec)])
            job.state, job.reason, job.ended_at = JobState.FAILED.value, Reason.LOST.value, now
            job.detail = f"its endpoint {name} was removed"
            topics |= {f"task:{task.id}"} | chains.drop(ctx, session, lifecycle.follow_job(session, task, job, now))
        # What lay there is out of reach; what was being made there ends with its task.
        session.execute(
            sa.update(ReplicaRow)
            .where(ReplicaRow.endpoint_id == row.id, ReplicaRow.state == ReplicaState.READY.value)
            .values(state=ReplicaState.GONE.value, settled_at=now, detail=f"its endpoint {name} was removed")
        )
        record_event(
            session, at=now, kind="endpoint.removed", owner_id=user_id, endpoint_id=row.id, data={"name": name}
        )
        row.name, row.removed_at, row.last_seen_at, row.instance = _former_name(session, name), now, None, None
    ctx.hub.notify(*topics)
    return len(jobs)


def _former_name(session: Session, name: str) -> str:
    """What the records of its tasks call a removed endpoint; a new one may take the name itself."""
    taken = set(session.scalars(sa.select(EndpointRow.name).where(EndpointRow.removed_at.is_not(None))))
    number = 1
    while (former := f"{name} (removed{f' {number}' if number > 1 else ''})") in taken:
        number += 1
    return former


def _find(session: Session, user_id: str, name: str) -> EndpointRow:
    row = session.scalars(
        sa.select(EndpointRow).where(
            EndpointRow.owner_id == user_id, EndpointRow.name == name, EndpointRow.removed_at.is_(None)
        )
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no endpoint {name[:60]!r}", hint="`diamond endpoint ls` lists them")
    return row


def queue(ctx: Context, user_id: str, name: str | None = None) -> list[QueueEntry]:
    """Live jobs: running ones first, then the waiting ones in the order the scheduler will take them."""
    query = (
        sa.select(JobRow, TaskRow, EndpointRow.name)
        .join(TaskRow, TaskRow.id == JobRow.task_id)
        .join(EndpointRow, EndpointRow.id == JobRow.endpoint_id)
        .where(TaskRow.owner_id == user_id, JobRow.state.not_in(_FINAL))
        .order_by(
            JobRow.state.not_in([JobState.RUNNING.value, JobState.FINISHING.value]),
            TaskRow.priority.desc(),
            JobRow.id,
        )
        .limit(_MAX_QUEUE)
    )
    with ctx.db.read() as session:
        if name is not None:
            query = query.where(JobRow.endpoint_id == _find(session, user_id, name).id)
        rows = session.execute(query.options(sa.orm.undefer(TaskRow.spec))).all()
        return [_entry(job, task, endpoint) for job, task, endpoint in rows]


def _entry(job: JobRow, task: TaskRow, endpoint: str) -> QueueEntry:
    need = decode(Resources, task.spec.get("resources", {}))
    return QueueEntry(
        job_id=job.id,
        task_id=task.id,
        task_name=task.name,
        endpoint=endpoint,
        state=job.state,
        priority=task.priority,
        cpus=need.cpus_min,
        gpus=need.gpus,
        created_at=job.created_at,
        started_at=job.started_at,
        pending_reason=job.pending_reason or task.pending_reason,
        scheduler_id=job.scheduler_id,
        partition=job.partition,
        expected_start_at=job.expected_start_at,
    )


def counts(ctx: Context) -> dict[str, int]:
    """How many endpoints are online and offline, for monitoring."""
    with ctx.db.read() as session:
        seen = session.scalars(sa.select(EndpointRow.last_seen_at).where(EndpointRow.removed_at.is_(None))).all()
    online = sum(is_online(at, ctx.clock()) for at in seen)
    return {"online": online, "offline": len(seen) - online}


def to_endpoint(row: EndpointRow, now: float, access: str = "") -> Endpoint:
    return Endpoint(
        id=row.id,
        name=row.name,
        online=is_online(row.last_seen_at, now),
        created_at=row.created_at,
        last_seen_at=row.last_seen_at,
        facts=decode(EndpointFacts, row.facts) if row.facts else None,
        usage=decode(EndpointUsage, row.usage) if row.usage else None,
        access=access,
    )
