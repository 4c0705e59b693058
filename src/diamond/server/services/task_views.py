"""Tasks and jobs as users see them: rows turned into what the API answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.durations import format_duration
from diamond.core.images import ImageUse
from diamond.core.jobs import Job
from diamond.core.projects import Visibility
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Task, TaskSpec
from diamond.server.services import images, snapshots
from diamond.server.services.context import Context
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow, ImageRow, JobRow, TaskRow, UserRow


class Where(NamedTuple):
    """An endpoint's name, and for how long its agent has been silent (None: it is online)."""

    name: str
    silent_s: float | None

    @staticmethod
    def of(name: str, last_seen_at: float | None, created_at: float, now: float) -> Where:
        if snapshots.is_online(last_seen_at, now):
            return Where(name, None)
        return Where(name, now - (last_seen_at or created_at))

    def explain(self, state: TaskState) -> str:
        silent = f"endpoint {self.name} is offline: its agent has been silent for {format_duration(self.silent_s or 0)}"
        if state is TaskState.QUEUED:
            return f"{silent}; the task waits until it returns"
        return f"{silent}; what is shown may be out of date"


# Built once: putting a query together costs more than running it.
_ENDPOINTS = sa.select(EndpointRow.id, EndpointRow.name, EndpointRow.last_seen_at, EndpointRow.created_at).where(
    EndpointRow.id.in_(sa.bindparam("endpoints", expanding=True))
)
_NAMES = sa.union_all(
    sa.select(UserRow.id, UserRow.name).where(UserRow.id.in_(sa.bindparam("owners", expanding=True))),
    sa.select(ProjectRow.id, ProjectRow.name).where(ProjectRow.id.in_(sa.bindparam("projects", expanding=True))),
)


def whereabouts(ctx: Context, session: Session, rows: Iterable[TaskRow | JobRow]) -> dict[str, Where]:
    """Of the endpoints that these tasks and jobs are at, by id."""
    now = ctx.clock()
    wanted = {row.endpoint_id for row in rows if row.endpoint_id}
    found = session.execute(_ENDPOINTS, {"endpoints": list(wanted)}) if wanted else ()
    return {key: Where.of(name, seen_at, made_at, now) for key, name, seen_at, made_at in found}


def names_of(session: Session, rows: Sequence[TaskRow]) -> dict[str, str]:
    """What the owners and projects of these tasks are called, by id."""
    if not rows:
        return {}
    owners, places = {row.owner_id for row in rows}, {row.project_id for row in rows} - {None}
    found = session.execute(_NAMES, {"owners": list(owners), "projects": list(places)})
    return {str(key): str(name) for key, name in found}


def to_task(row: TaskRow, endpoints: dict[str, Where], names: dict[str, str], **detail: Any) -> Task:
    where = endpoints.get(row.endpoint_id) if row.endpoint_id else None
    state = TaskState(row.state)
    stuck = where is not None and where.silent_s is not None and not state.is_final and state is not TaskState.PENDING
    return Task(
        id=row.id,
        name=row.name,
        state=state,
        desired=Desired(row.desired),
        reason=Reason(row.reason) if row.reason else None,
        detail=row.detail,
        endpoint=where.name if where else None,
        attempt=row.attempt,
        exit_code=row.exit_code,
        priority=row.priority,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        next_attempt_at=row.next_attempt_at,
        pending_reason=where.explain(state) if where and stuck else row.pending_reason,
        expected_start_at=row.expected_start_at,
        kind=row.kind,
        image_id=row.image_id or "",
        owner=names.get(row.owner_id, ""),
        project=names.get(row.project_id or "", ""),
        visibility=Visibility(row.visibility),
        **detail,
    )


def to_job(row: JobRow, endpoints: dict[str, Where]) -> Job:
    return Job(
        id=row.id,
        task_id=row.task_id,
        attempt=row.attempt,
        endpoint=endpoints[row.endpoint_id].name if row.endpoint_id in endpoints else row.endpoint_id,
        state=JobState(row.state),
        reason=Reason(row.reason) if row.reason else None,
        detail=row.detail,
        exit_code=row.exit_code,
        signal=row.signal,
        scheduler_id=row.scheduler_id,
        hosts=tuple(row.hosts),
        run_dir=row.run_dir,
        partition=row.partition,
        continues=row.continues,
        image=decode(ImageUse, row.image) if row.image else None,
        pending_reason=row.pending_reason,
        expected_start_at=row.expected_start_at,
        created_at=row.created_at,
        queued_at=row.queued_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


def image_name(session: Session, row: TaskRow, spec: TaskSpec, user_id: str) -> str:
    image = session.get(ImageRow, row.image_id) if row.image_id else None
    return images.shown_name(session, image, user_id) if image else (spec.resources.image_id or "")


def image_names(session: Session, user_id: str, rows: Iterable[TaskRow]) -> dict[str, str]:
    wanted = {row.image_id for row in rows if row.image_id}
    found = session.scalars(sa.select(ImageRow).where(ImageRow.id.in_(wanted))).all() if wanted else []
    return {image.id: images.shown_name(session, image, user_id) for image in found}
