"""Tasks as a table: filtered, searched, sorted by a column, and read page by page in both directions.

Pages are found by what stands in the last row, not by counting rows, so they cost the same however many tasks there
are, and a task that comes or goes meanwhile neither repeats a row nor hides one.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.errors import InvalidInput
from diamond.core.ids import is_id
from diamond.core.projects import Role
from diamond.core.rundir import RunDir
from diamond.core.states import TaskState
from diamond.core.tasks import Task, TaskSpec
from diamond.server.services import access, projects, task_views
from diamond.server.services.context import Context
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow, JobRow, TaskRow

SORTS = ("created", "name", "status", "endpoint", "duration", "gpus")
MAX_SEARCH = 200
PAGE = 40
_MAX_CURSOR = 2000


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which tasks, in which order. `everybody`: all that the user may see, instead of their own."""

    states: tuple[TaskState, ...] = ()
    search: str = ""  # a part of the name, or the beginning of an id
    endpoint: str = ""
    project: str = ""
    everybody: bool = False
    sort: str = "created"
    ascending: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A task with what its newest job adds to it."""

    task: Task
    num_gpus: int = 0  # on all its nodes
    log_path: str = ""  # on the endpoint; empty before a job has a place


@dataclass(frozen=True, kw_only=True)
class Page:
    """`counts` are of all states, whichever were asked for."""

    rows: list[Row]
    total: int
    counts: dict[TaskState, int] = field(default_factory=dict)
    next_cursor: str | None = None
    previous_cursor: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Cursor:
    """After (or before) which row; `at` is the moment that durations of running tasks were counted to."""

    back: bool
    value: Any
    id: str
    at: float


def page(ctx: Context, user_id: str, wanted: Wanted, *, limit: int = PAGE, cursor: str = "") -> Page:
    """One page of the table.

    Raises:
        InvalidInput: a column that nothing is sorted by, or a cursor that is none.
        NotFound: a project the user is not in.
    """
    if wanted.sort not in SORTS:
        raise InvalidInput(f"{wanted.sort[:40]!r} is not one of {', '.join(SORTS)}", field="sort")
    place = _parse_cursor(cursor, wanted) if cursor else None
    at = place.at if place else ctx.clock()
    with ctx.db.read() as session:
        where = _where(session, user_id, wanted)
        counted = sa.select(TaskRow.state, sa.func.count()).where(*where).group_by(TaskRow.state)
        counts = {TaskState(state): int(number) for state, number in session.execute(counted)}
        total = sum(number for state, number in counts.items() if not wanted.states or state in wanted.states)
        if wanted.states:
            where.append(TaskRow.state.in_([state.value for state in wanted.states]))
        found = list(session.execute(_query(wanted, where, place, at).limit(limit + 1)))
        more, found = len(found) > limit, found[:limit]
        if place is not None and place.back:
            found.reverse()
        rows = _rows(ctx, session, user_id, found)
    is_back = place is not None and place.back
    has_next, has_previous = (True, more) if is_back else (more, place is not None)
    return Page(
        rows=rows,
        total=total,
        counts=counts,
        next_cursor=_cursor(wanted, found[-1], at, back=False) if found and has_next else None,
        previous_cursor=_cursor(wanted, found[0], at, back=True) if found and has_previous else None,
    )


def choices(ctx: Context, user_id: str) -> tuple[list[str], list[str]]:
    """Names of the endpoints and of the projects that the table can be narrowed to."""
    with ctx.db.read() as session:
        there = sa.select(EndpointRow.name).where(access.sees_endpoint(user_id), EndpointRow.removed_at.is_(None))
        mine = sa.select(ProjectRow.name).where(ProjectRow.id.in_(access.projects_of(user_id)))
        return sorted(session.scalars(there)), sorted(session.scalars(mine))


def _where(session: Session, user_id: str, wanted: Wanted) -> list[Any]:
    """All but the states, which are counted first."""
    everybody = wanted.everybody or bool(wanted.project)
    where: list[Any] = [access.sees(TaskRow, user_id) if everybody else TaskRow.owner_id == user_id]
    where.append(TaskRow.kind == "command")
    if wanted.project:
        found = projects.look_up(session, user_id, wanted.project, Role.VIEWER)
        where.append(TaskRow.project_id == (found.id if found else ""))
    if wanted.endpoint:
        named = sa.select(EndpointRow.id).where(EndpointRow.name == _text(wanted.endpoint))
        where.append(TaskRow.endpoint_id.in_(named))
    if search := _text(wanted.search).strip()[:MAX_SEARCH]:
        by_name = TaskRow.name.icontains(search, autoescape=True)
        where.append(sa.or_(by_name, TaskRow.id.startswith(search, autoescape=True)) if "_" in search else by_name)
    return where


def _text(raw: str) -> str:
    return raw.replace("\x00", "")  # PostgreSQL refuses it


def _sorted_by(sort: str, at: float) -> sa.ColumnElement[Any]:
    """Never NULL, which databases put in different places."""
    if sort == "name":
        return sa.func.lower(TaskRow.name)
    if sort == "status":
        return sa.func.coalesce(TaskRow.state, "")
    if sort == "endpoint":
        return sa.func.coalesce(EndpointRow.name, "")
    if sort == "gpus":
        return sa.func.coalesce(JobRow.num_gpus, 0)
    if sort == "duration":
        end = sa.func.coalesce(TaskRow.ended_at, at)
        return end - sa.func.coalesce(TaskRow.started_at, end)
    return TaskRow.id.expression


def _query(wanted: Wanted, where: list[Any], place: _Cursor | None, at: float) -> sa.Select[Any]:
    key = _sorted_by(wanted.sort, at)
    query = (
        sa.select(TaskRow, JobRow.num_gpus, JobRow.run_dir, key.label("sorted_by"))
        .outerjoin(JobRow, sa.and_(JobRow.task_id == TaskRow.id, JobRow.attempt == TaskRow.attempt))
        .outerjoin(EndpointRow, EndpointRow.id == TaskRow.endpoint_id)
        .where(*where)
    )
    ascending = wanted.ascending != (place is not None and place.back)
    if wanted.sort == "created":  # the index alone finds these
        if place is not None:
            query = query.where(TaskRow.id > place.id if ascending else TaskRow.id < place.id)
        return query.order_by(TaskRow.id.asc() if ascending else TaskRow.id.desc())
    if place is not None:
        beyond = key > place.value if ascending else key < place.value
        same = TaskRow.id > place.id if ascending else TaskRow.id < place.id
        query = query.where(sa.or_(beyond, sa.and_(key == place.value, same)))
    return query.order_by(key.asc(), TaskRow.id.asc()) if ascending else query.order_by(key.desc(), TaskRow.id.desc())


def _rows(ctx: Context, session: Session, user_id: str, found: Sequence[Any]) -> list[Row]:
    tasks = [each[0] for each in found]
    known = task_views.whereabouts(ctx, session, tasks)
    named = task_views.names_of(session, tasks)
    images = task_views.image_names(session, user_id, tasks)
    unplaced = [each[0].id for each in found if each[1] is None]
    asked = session.execute(sa.select(TaskRow.id, TaskRow.spec).where(TaskRow.id.in_(unplaced))) if unplaced else ()
    gpus = {task_id: _gpus(spec) for task_id, spec in asked}
    return [
        Row(
            task=task_views.to_task(row, known, named, image=images.get(row.image_id or "", "")),
            num_gpus=gpus.get(row.id, 0) if num_gpus is None else num_gpus,
            log_path=log_path(run_dir or ""),
        )
        for row, num_gpus, run_dir, _ in found
    ]


def _gpus(raw: dict[str, Any]) -> int:
    spec = decode(TaskSpec, raw)
    return spec.num_nodes * spec.resources.gpus


def log_path(run_dir: str) -> str:
    """Where a job's log is on its endpoint."""
    return str(RunDir(Path(run_dir)).stream("log")) if run_dir else ""


def _cursor(wanted: Wanted, row: Any, at: float, *, back: bool) -> str:
    said = [wanted.sort, wanted.ascending, back, row[3], row[0].id, at]
    return base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")


def _parse_cursor(text: str, wanted: Wanted) -> _Cursor:
    wrong = InvalidInput("is not a cursor this server gave out", hint="start again without it", field="cursor")
    try:
        padded = text[:_MAX_CURSOR] + "=" * (-len(text[:_MAX_CURSOR]) % 4)
        sort, ascending, back, value, task_id, at = json.loads(base64.urlsafe_b64decode(padded))
    except (ValueError, TypeError, binascii.Error):
        raise wrong from None
    kind: tuple[type, ...] = (int, float) if wanted.sort in ("duration", "gpus") else (str,)
    fits = isinstance(value, kind) and isinstance(at, float) and isinstance(task_id, str) and is_id(task_id, "tsk")
    if (sort, ascending) != (wanted.sort, wanted.ascending) or not fits or (isinstance(value, str) and "\x00" in value):
        raise wrong
    return _Cursor(back=bool(back), value=value, id=task_id, at=at)
