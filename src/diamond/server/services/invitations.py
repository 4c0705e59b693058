"""Invitations: an account for somebody who has none yet. Accepting one is in `accounts`."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import Invitation
from diamond.core.enrolment import token_hash
from diamond.core.errors import Forbidden, InvalidInput, NotFound
from diamond.core.ids import is_id
from diamond.core.projects import Role, parse_role
from diamond.server.services import accounts, audit, codes, form_keys
from diamond.server.services.access import projects_of
from diamond.server.services.context import Context
from diamond.server.store.identity_models import CodeRow, ProjectRow
from diamond.server.store.models import UserRow

VALID_S = 7 * 86_400.0
MAX_OPEN = 200
_MADE_ALREADY = "it is in the list; its link was shown then: if nobody kept that, withdraw it and invite them again"


def invite(
    ctx: Context,
    by: str,
    *,
    name: str = "",
    email: str = "",
    project: str = "",
    role: str = "",
    is_admin: bool = False,
    once: str = "",
) -> Invitation:
    """A code for a new account, valid for a week, once; it is in this answer only.

    Args:
        by: id of an administrator, or of an owner of `project`.
        name: to suggest; whoever accepts chooses.
        role: in the project; member when left out.
        once: key of the form that asks.

    Raises:
        Conflict: that form made an invitation already.
        NotFound: there is no such project, or they may not see it.
        Forbidden: they may not invite.
    """
    if name:
        accounts.check_name(name)
    data: dict[str, Any] = {"name": name, "email": accounts.checked_email(email), "is_admin": is_admin}
    if role and not project:
        raise InvalidInput("is of no use without a project", hint="name the project too", field="role")
    wanted = parse_role(role or Role.MEMBER)
    now = ctx.clock()
    with ctx.db.write() as session:
        form_keys.check(session, by, once, _MADE_ALREADY)
        inviter = session.get_one(UserRow, by)
        project_id = None
        if project:
            project_id = _project(session, inviter, project).id
            data |= {"project_id": project_id, "role": wanted.value}
        if not accounts.may_invite(session, by, project_id, is_admin=is_admin):
            raise Forbidden(
                "administrators invite people, and owners of a project invite into it",
                hint="ask an administrator of this installation" if not project else "ask an owner of the project",
            )
        if not inviter.is_admin and not ctx.identity.owners_invite:
            raise Forbidden(
                "administrators alone invite people who have no account here",
                hint="ask one of them; who has an account is let in with `diamond project add`. The operator can let "
                "owners of projects invite: owners_invite in identity.toml",
            )
        _check_number(session, by, now)
        if name and not accounts.is_free(session, name):
            raise accounts.taken(name)
        code = codes.make(session, codes.INVITATION, now=now, lifetime_s=VALID_S, data=data, created_by=by)
        row = session.scalars(sa.select(CodeRow).where(CodeRow.hash == token_hash(code))).one()
        form_keys.note(session, by, once, row.id, now, _MADE_ALREADY)
        audit.record(session, now, "invitation.made", row.id, name=name, project=project, is_admin=is_admin)
        return _to_invitation(session, row, code)


def _project(session: Session, inviter: UserRow, name: str) -> ProjectRow:
    """One that the inviter is in; administrators manage all, but nobody's own."""
    query = sa.select(ProjectRow).where(ProjectRow.name == name, ProjectRow.removed_at.is_(None))
    if not inviter.is_admin:
        query = query.where(ProjectRow.id.in_(projects_of(inviter.id)))
    row = session.scalars(query).one_or_none() if name.isprintable() else None
    if row is None:
        raise NotFound(f"there is no project {name[:60]!r}", hint="`diamond project ls` lists yours", field="project")
    if row.personal_of is not None:
        raise InvalidInput(
            "is somebody's own, and they work alone in it", hint="make one to share: diamond project create NAME",
            field="project",
        )  # fmt: skip
    return row


def _check_number(session: Session, by: str, now: float) -> None:
    number = sa.select(sa.func.count()).select_from(CodeRow).where(*_open(now), CodeRow.created_by == by)
    if session.execute(number).scalar_one() >= MAX_OPEN:
        raise InvalidInput(f"you have {MAX_OPEN} open invitations", hint="withdraw some of them first")


def list_invitations(ctx: Context, user_id: str) -> list[Invitation]:
    """Open ones, newest first: all, for an administrator; else the user's own and those into projects they own."""
    with ctx.db.read() as session:
        query = sa.select(CodeRow).where(*_open(ctx.clock())).order_by(CodeRow.id.desc())
        rows = [row for row in session.scalars(query) if _is_theirs(session, user_id, row)]
        return [_to_invitation(session, row) for row in rows]


def withdraw(ctx: Context, user_id: str, invitation_id: str) -> None:
    """Its code stops working.

    Raises:
        NotFound: there is no open one of that id that they may see.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = session.get(CodeRow, invitation_id) if is_id(invitation_id, "cod") else None
        if row is None or row.kind != codes.INVITATION or not _is_theirs(session, user_id, row):
            row = None
        if row is None or not codes.void(session, codes.INVITATION, now, CodeRow.id == invitation_id):
            raise NotFound(f"there is no open invitation {invitation_id[:60]!r}", hint="GET /api/v1/invitations lists")
        audit.record(session, now, "invitation.withdrawn", invitation_id)


def _open(now: float) -> tuple[sa.ColumnElement[bool], ...]:
    return CodeRow.kind == codes.INVITATION, CodeRow.used_at.is_(None), CodeRow.expires_at > now


def _is_theirs(session: Session, user_id: str, row: CodeRow) -> bool:
    if row.created_by == user_id or session.get_one(UserRow, user_id).is_admin:
        return True
    owned = projects_of(user_id, Role.OWNER).where(ProjectRow.id == row.data.get("project_id", ""))
    return session.scalars(owned).one_or_none() is not None


def _to_invitation(session: Session, row: CodeRow, code: str = "") -> Invitation:
    data = row.data
    project = session.get(ProjectRow, data["project_id"]) if data.get("project_id") else None
    inviter = session.get(UserRow, row.created_by) if row.created_by else None
    return Invitation(
        id=row.id, name=data.get("name", ""), email=data.get("email", ""), project=project.name if project else "",
        role=data.get("role", ""), is_admin=bool(data.get("is_admin")), invited_by=inviter.name if inviter else "",
        created_at=row.created_at, expires_at=row.expires_at, code=code,
    )  # fmt: skip
