"""Who may see and do what, as conditions that queries are made of. The one place that knows the rules.

- An object's owner may do anything with it.
- `project` ones are seen and used by the members of its project, and changed by the project's owners as well.
- `public` ones are seen and used by everybody with an account here.
- An endpoint is its owner's; members of a project it is shared with see it, and run tasks of that project there, once
  an owner of the project has approved of that (`approved`).
- Administrators have no special eyes: they manage accounts, projects and quotas, and can stop anything.

What somebody may not see does not exist for them: services answer NotFound, never Forbidden, where existence is secret.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.projects import Role, Visibility
from diamond.server.store.identity_models import EndpointShareRow, MemberRow, ProjectRow
from diamond.server.store.models import EndpointRow, ImageRow, TaskRow, TemplateRow

Shared = type[TaskRow] | type[ImageRow] | type[TemplateRow]
# Somebody's id, or the place in a query that is built once and asked for many.
Viewer = str | sa.BindParameter[str]


def projects_of(user_id: Viewer, role: Role = Role.VIEWER) -> sa.Select[str]:
    """Ids of the projects in which the user has at least this role."""
    return (
        sa.select(MemberRow.project_id)
        .join(ProjectRow, ProjectRow.id == MemberRow.project_id)
        .where(MemberRow.user_id == user_id, MemberRow.role.in_(role.at_least), ProjectRow.removed_at.is_(None))
    )


def sees(model: Shared, user_id: Viewer) -> sa.ColumnElement[bool]:
    """Whether the user may look at an object, and use it."""
    return sa.or_(
        model.owner_id == user_id,
        model.visibility == Visibility.PUBLIC.value,
        sa.and_(model.visibility == Visibility.PROJECT.value, model.project_id.in_(projects_of(user_id))),
    )


def manages(model: Shared, user_id: Viewer) -> sa.ColumnElement[bool]:
    """Whether the user may stop, change and remove it."""
    shared = model.visibility != Visibility.PRIVATE.value
    return sa.or_(model.owner_id == user_id, sa.and_(shared, model.project_id.in_(projects_of(user_id, Role.OWNER))))


def approved() -> sa.ColumnElement[bool]:
    """Whether an owner of the project has approved of a share. One that still waits for that opens nothing to anybody:
    whoever owns an endpoint reads what is sent there, so the project has to want it."""
    return EndpointShareRow.approved_at.is_not(None)


def sees_endpoint(user_id: Viewer) -> sa.ColumnElement[bool]:
    shared = sa.select(EndpointShareRow.endpoint_id).where(
        EndpointShareRow.project_id.in_(projects_of(user_id)), approved()
    )
    return sa.or_(EndpointRow.owner_id == user_id, EndpointRow.id.in_(shared))


def runs_at(user_id: Viewer, project_id: Viewer | None) -> sa.ColumnElement[bool]:
    """Whether tasks of this user in this project may run at an endpoint, as far as the server has a say."""
    shared = sa.select(EndpointShareRow.endpoint_id).where(
        EndpointShareRow.project_id == ("" if project_id is None else project_id),
        EndpointShareRow.project_id.in_(projects_of(user_id, Role.MEMBER)),
        approved(),
    )
    return sa.or_(EndpointRow.owner_id == user_id, EndpointRow.id.in_(shared))


def job_belongs() -> sa.ColumnElement[bool]:
    """The same of a query that joins tasks with the endpoints of their jobs. Work on images counts in any project."""
    shared = (
        sa.select(EndpointShareRow.endpoint_id)
        .join(MemberRow, MemberRow.project_id == EndpointShareRow.project_id)
        .join(ProjectRow, ProjectRow.id == EndpointShareRow.project_id)
        .where(
            EndpointShareRow.endpoint_id == EndpointRow.id,
            approved(),
            sa.or_(EndpointShareRow.project_id == TaskRow.project_id, TaskRow.kind != "command"),
            MemberRow.user_id == TaskRow.owner_id,
            MemberRow.role.in_(Role.MEMBER.at_least),
            ProjectRow.removed_at.is_(None),
        )
        .correlate(TaskRow, EndpointRow)
    )
    return sa.or_(EndpointRow.owner_id == TaskRow.owner_id, shared.exists())


def runs_somewhere(user_id: str) -> sa.ColumnElement[bool]:
    """The same in any project of theirs: where they may have images."""
    shared = sa.select(EndpointShareRow.endpoint_id).where(
        EndpointShareRow.project_id.in_(projects_of(user_id, Role.MEMBER)), approved()
    )
    return sa.or_(EndpointRow.owner_id == user_id, EndpointRow.id.in_(shared))


def role_in(session: Session, user_id: str, project_id: str | None) -> Role | None:
    query = sa.select(MemberRow.role).where(MemberRow.project_id == project_id, MemberRow.user_id == user_id)
    found: Any = session.scalars(query).one_or_none()
    return Role(found) if found else None
