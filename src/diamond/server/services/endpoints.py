"""Endpoints as users see them: which exist, what they have, what waits in their queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint, EndpointUsage, QueueEntry
from diamond.core.enrolment import ENDPOINT_NAME
from diamond.core.errors import Conflict, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.images import ReplicaState
from diamond.core.reasons import Reason
from diamond.core.resources import Resources
from diamond.core.states import FINAL_JOB_STATES, JobState, TaskState
from diamond.server.services import access, chains, enrolment, lifecycle, snapshots, tokens
from diamond.server.services.context import Context
from diamond.server.services.snapshots import is_online
from diamond.server.store.db import record_event
from diamond.server.store.identity_models import EndpointShareRow, ProjectRow
from diamond.server.store.models import EndpointRow, JobRow, ReplicaRow, TaskRow, UserRow
from diamond.server.store.pool_models import PoolRow

_FINAL = [state.value for state in FINAL_JOB_STATES]
_MAX_QUEUE = 1000
_RESERVED = ("new",)  # /endpoints/new makes one


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
    if name in _RESERVED:
        raise InvalidInput(f"{name!r} is the name of a page", hint="choose another name", field="name")
    now = ctx.clock()
    row = EndpointRow(id=new_id("end"), owner_id=user_id, name=name, created_at=now, revision=0)
    try:
        with ctx.db.write() as session:
            session.add(row)
            session.flush()
            expires_at = now + ctx.agent_token_s
            token = tokens.issue(session, now=now, endpoint_id=row.id, expires_at=expires_at) if with_token else None
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
    with ctx.db.read() as session:
        return _views(ctx, session, user_id, [row])[0], token, code


def list_endpoints(ctx: Context, user_id: str) -> list[Endpoint]:
    """The user's own, and those shared with their projects."""
    with ctx.db.read() as session:
        return _views(ctx, session, user_id, snapshots.seen_by(session, user_id))


def get(ctx: Context, user_id: str, name: str) -> Endpoint:
    with ctx.db.read() as session:
        return _views(ctx, session, user_id, [_find(session, user_id, name)])[0]


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
        topics = {"planning", "pools", "events", f"endpoint:{row.id}"}
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
        session.execute(
            sa.update(PoolRow).where(PoolRow.endpoint_id == row.id, PoolRow.closed_at.is_(None)).values(closed_at=now)
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
    named = [EndpointRow.name == (name if name.isprintable() else ""), EndpointRow.removed_at.is_(None)]
    row = session.scalars(sa.select(EndpointRow).where(*named, access.sees_endpoint(user_id))).one_or_none()
    if row is None:
        raise NotFound(f"there is no endpoint {name[:60]!r}", hint="`diamond endpoint ls` lists them")
    return row


def queue(ctx: Context, user_id: str, name: str | None = None) -> list[QueueEntry]:
    """Live jobs: running ones first, then the waiting ones in the order the scheduler will take them; last, tasks that
    wait here, for a quota, an image or an endpoint.

    Of one endpoint those of everybody, since they are in front; of what the user does not see only that it is there.
    """
    sees = access.sees(TaskRow, user_id)
    query = (
        sa.select(JobRow, TaskRow, EndpointRow.name, EndpointRow.owner_id, UserRow.name, sees.label("sees"))
        .join(TaskRow, TaskRow.id == JobRow.task_id)
        .join(EndpointRow, EndpointRow.id == JobRow.endpoint_id)
        .join(UserRow, UserRow.id == TaskRow.owner_id)
        .where(JobRow.state.not_in(_FINAL))
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
        else:
            query = query.where(TaskRow.owner_id == user_id)
        rows = session.execute(query.options(sa.orm.undefer(TaskRow.spec))).all()
        jobs = [
            _entry(job, task, endpoint, owner)
            if seen
            else _placeholder(job, task, endpoint, owner if endpoint_owner == user_id else "")
            for job, task, endpoint, endpoint_owner, owner, seen in rows
        ]
        return jobs + (_waiting_here(session, user_id, _MAX_QUEUE - len(jobs)) if name is None else [])


def _waiting_here(session: Session, user_id: str, limit: int) -> list[QueueEntry]:
    query = (
        sa.select(TaskRow, UserRow.name)
        .join(UserRow, UserRow.id == TaskRow.owner_id)
        .where(TaskRow.owner_id == user_id, TaskRow.state == TaskState.PENDING.value)
        .order_by(TaskRow.priority.desc(), TaskRow.id)
        .limit(limit)
        .options(undefer(TaskRow.spec))
    )
    entries = []
    for task, owner in session.execute(query):
        need = decode(Resources, task.spec.get("resources", {}))
        entries.append(
            QueueEntry(
                owner=owner,
                job_id="",
                task_id=task.id,
                task_name=task.name,
                endpoint="",
                state=task.state,
                priority=task.priority,
                cpus=need.cpus_min,
                gpus=need.gpus,
                created_at=task.created_at,
                pending_reason=task.pending_reason,
            )
        )
    return entries


def _placeholder(job: JobRow, task: TaskRow, endpoint: str, owner: str) -> QueueEntry:
    """Somebody else's: what it takes, and when. Whose it is, the endpoint's owner knows from its agent's records."""
    shown = _entry(job, task, endpoint, owner)
    return replace(shown, job_id="", task_id="", task_name="", pending_reason="", scheduler_id=None)


def _entry(job: JobRow, task: TaskRow, endpoint: str, owner: str) -> QueueEntry:
    need = decode(Resources, task.spec.get("resources", {}))
    return QueueEntry(
        owner=owner,
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


# Built once: putting a query together costs more than running it.
_OWNERS = (
    sa.select(EndpointRow.id, UserRow.name)
    .join(UserRow, UserRow.id == EndpointRow.owner_id)
    .where(EndpointRow.id.in_(sa.bindparam("endpoints", expanding=True)))
)
_SHARES = (
    sa.select(EndpointShareRow.endpoint_id, ProjectRow.name, EndpointShareRow.approved_at)
    .join(ProjectRow, ProjectRow.id == EndpointShareRow.project_id)
    .where(
        EndpointShareRow.endpoint_id.in_(sa.bindparam("endpoints", expanding=True)),
        ProjectRow.id.in_(access.projects_of(sa.bindparam("viewer"))),
    )
    .order_by(ProjectRow.name)
)


def _views(ctx: Context, session: Session, user_id: str, rows: Sequence[EndpointRow]) -> list[Endpoint]:
    ids = [row.id for row in rows]
    states = enrolment.access_of(session, ids, ctx.clock())
    found = session.execute(_OWNERS, {"endpoints": ids}) if ids else ()
    owners = {str(key): str(name) for key, name in found}
    shared: dict[str, list[str]] = {}
    waits: dict[str, list[str]] = {}
    shares = session.execute(_SHARES, {"endpoints": ids, "viewer": user_id}) if ids else ()
    for endpoint_id, name, approved_at in shares:
        (waits if approved_at is None else shared).setdefault(endpoint_id, []).append(name)
    return [
        to_endpoint(
            row, ctx.clock(), states[row.id] if row.owner_id == user_id else None, owner=owners[row.id],
            is_mine=row.owner_id == user_id, shared_with=tuple(shared.get(row.id, ())),
            waits_for=tuple(waits.get(row.id, ())) if row.owner_id == user_id else (),
        )
        for row in rows
    ]  # fmt: skip


def to_endpoint(row: EndpointRow, now: float, state: enrolment.Access | None = None, **more: Any) -> Endpoint:
    return Endpoint(
        **more,
        id=row.id,
        name=row.name,
        online=is_online(row.last_seen_at, now),
        created_at=row.created_at,
        last_seen_at=row.last_seen_at,
        facts=snapshots.facts_of(row),
        usage=decode(EndpointUsage, row.usage) if row.usage else None,
        access=state.word if state else "",
        token_expires_at=state.until if state else None,
        proven_at=row.proven_at,
    )
