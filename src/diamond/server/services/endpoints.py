"""Endpoints as users see them: which exist, what they have, what waits in their queues."""

from __future__ import annotations

import re

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint, EndpointFacts, EndpointUsage, QueueEntry
from diamond.core.errors import Conflict, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.resources import Resources
from diamond.core.states import FINAL_JOB_STATES, JobState
from diamond.server.services import tokens
from diamond.server.services.context import Context
from diamond.server.services.planning import is_online
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow, JobRow, TaskRow

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_MAX_QUEUE = 1000


def create(ctx: Context, user_id: str, name: str) -> tuple[Endpoint, str]:
    """A new endpoint and the token its agent will use; the token cannot be shown again."""
    if not _NAME.fullmatch(name):
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
            token = tokens.issue(session, now=now, endpoint_id=row.id)
            data = {"name": name}
            record_event(session, at=now, kind="endpoint.created", owner_id=user_id, endpoint_id=row.id, data=data)
    except exc.IntegrityError as error:
        raise Conflict(f"there is an endpoint {name!r} already", hint="choose another name", field="name") from error
    ctx.hub.notify("events")
    return to_endpoint(row, now), token


def list_endpoints(ctx: Context, user_id: str) -> list[Endpoint]:
    with ctx.db.read() as session:
        rows = session.scalars(
            sa.select(EndpointRow).where(EndpointRow.owner_id == user_id).order_by(EndpointRow.name)
        ).all()
        return [to_endpoint(row, ctx.clock()) for row in rows]


def get(ctx: Context, user_id: str, name: str) -> Endpoint:
    with ctx.db.read() as session:
        return to_endpoint(_find(session, user_id, name), ctx.clock())


def _find(session: Session, user_id: str, name: str) -> EndpointRow:
    row = session.scalars(
        sa.select(EndpointRow).where(EndpointRow.owner_id == user_id, EndpointRow.name == name)
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
        .where(TaskRow.owner_id == user_id, JobRow.state.not_in([state.value for state in FINAL_JOB_STATES]))
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
        pending_reason=task.pending_reason,
    )


def counts(ctx: Context) -> dict[str, int]:
    """How many endpoints are online and offline, for monitoring."""
    with ctx.db.read() as session:
        seen = session.scalars(sa.select(EndpointRow.last_seen_at)).all()
    online = sum(is_online(at, ctx.clock()) for at in seen)
    return {"online": online, "offline": len(seen) - online}


def to_endpoint(row: EndpointRow, now: float) -> Endpoint:
    return Endpoint(
        id=row.id,
        name=row.name,
        online=is_online(row.last_seen_at, now),
        created_at=row.created_at,
        last_seen_at=row.last_seen_at,
        facts=decode(EndpointFacts, row.facts) if row.facts else None,
        usage=decode(EndpointUsage, row.usage) if row.usage else None,
    )
