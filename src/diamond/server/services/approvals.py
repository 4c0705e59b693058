"""Whether a project wants the endpoints that its members share with it: asked, approved, and asked anew.

An endpoint's owner reads whatever is sent there, secrets included, so a plain member only asks, and one of the
project's owners approves. What an owner of the project shares is approved with that. An approval is of an endpoint in
somebody's hands: it ends when the endpoint changes hands or gets another agent, and when whoever approved of their
own endpoint is no longer an owner of the project. Works on rows, inside of the caller's write transaction.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.projects import Role
from diamond.server.services import audit
from diamond.server.store.db import record_event
from diamond.server.store.identity_models import EndpointShareRow, MemberRow, ProjectRow
from diamond.server.store.models import EndpointRow, UserRow

ASKED, APPROVED, DECLINED = "endpoint.share_asked", "endpoint.share_approved", "endpoint.share_declined"


def begin(session: Session, place: EndpointRow, project: ProjectRow, now: float) -> None:
    """Share an endpoint with a project, as its owner: approved if they are an owner of the project, else asked for."""
    share = EndpointShareRow(endpoint_id=place.id, project_id=project.id, created_at=now)
    session.add(share)
    audit.record(session, now, "endpoint.shared", place.id, endpoint=place.name, project=project.name)
    if _is_owner(session, place.owner_id, project.id):
        approve(session, share, place, project, place.owner_id, now)
    else:
        _ask(session, place, project, now)
    session.flush()


def approve(
    session: Session, share: EndpointShareRow, place: EndpointRow, project: ProjectRow, by: str, now: float
) -> None:
    """From now on tasks of the project go there. Every member is told whose endpoint that is."""
    share.approved_at, share.approved_by = now, by
    approver = session.get_one(UserRow, by).name
    audit.record(
        session, now, APPROVED, place.id, endpoint=place.name, project=project.name, owner=_owner(session, place)
    )
    _tell(session, APPROVED, _members(session, project.id), place, project, now, by=approver)


def decline(
    session: Session, share: EndpointShareRow, place: EndpointRow, project: ProjectRow, by: str, now: float
) -> None:
    """It is not shared. Who asked is told."""
    session.delete(share)
    name = session.get_one(UserRow, by).name
    audit.record(
        session, now, DECLINED, place.id, endpoint=place.name, project=project.name, owner=_owner(session, place)
    )
    _tell(session, DECLINED, [place.owner_id], place, project, now, by=name)


def ask_anew(session: Session, place: EndpointRow, now: float, *, has_new_owner: bool) -> None:
    """What was approved has another owner now, or else another agent: every project says again whether it wants it."""
    query = (
        sa.select(EndpointShareRow, ProjectRow)
        .join(ProjectRow, ProjectRow.id == EndpointShareRow.project_id)
        .where(EndpointShareRow.endpoint_id == place.id, EndpointShareRow.approved_at.is_not(None))
        .order_by(ProjectRow.id)
    )
    for share, project in session.execute(query).all():
        if not _is_owner(session, place.owner_id, project.id):
            why = "it has another owner" if has_new_owner else "another agent speaks for it"
            _end(session, share, place, project, now, why)
        elif has_new_owner:
            approve(session, share, place, project, place.owner_id, now)


def after_demotion(session: Session, user_id: str, project: ProjectRow, now: float) -> None:
    """Somebody is no longer an owner of the project: what they approved of themselves, another owner has to."""
    query = (
        sa.select(EndpointShareRow, EndpointRow)
        .join(EndpointRow, EndpointRow.id == EndpointShareRow.endpoint_id)
        .where(EndpointShareRow.project_id == project.id, EndpointShareRow.approved_by == user_id)
        .where(EndpointRow.owner_id == user_id)
        .order_by(EndpointRow.id)
    )
    for share, place in session.execute(query).all():
        _end(session, share, place, project, now, "who approved of their own is no owner of the project any more")


def _end(
    session: Session, share: EndpointShareRow, place: EndpointRow, project: ProjectRow, now: float, why: str
) -> None:
    share.approved_at = share.approved_by = None
    audit.record(session, now, "endpoint.approval_ended", place.id, endpoint=place.name, project=project.name, why=why)
    _ask(session, place, project, now, why=why)


def _ask(session: Session, place: EndpointRow, project: ProjectRow, now: float, why: str = "") -> None:
    owners = _members(session, project.id, Role.OWNER)
    _tell(session, ASKED, owners, place, project, now, by=_owner(session, place), why=why)


def _tell(
    session: Session, kind: str, user_ids: list[str], place: EndpointRow, project: ProjectRow, now: float, **more: str
) -> None:
    data = {"name": place.name, "project": project.name, "owner": _owner(session, place), **more}
    for user_id in user_ids:
        record_event(session, at=now, kind=kind, owner_id=user_id, endpoint_id=place.id, data=data)


def _members(session: Session, project_id: str, role: Role = Role.VIEWER) -> list[str]:
    session.flush()
    query = sa.select(MemberRow.user_id).where(MemberRow.project_id == project_id, MemberRow.role.in_(role.at_least))
    return list(session.scalars(query.order_by(MemberRow.user_id)))


def _is_owner(session: Session, user_id: str, project_id: str) -> bool:
    return user_id in _members(session, project_id, Role.OWNER)


def _owner(session: Session, place: EndpointRow) -> str:
    return session.get_one(UserRow, place.owner_id).name
