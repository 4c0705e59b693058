"""Endpoints that a project shares: asked for by their owners, approved or declined by the project's, and ended by both.

What an approval is, and when it ends by itself, is in `approvals`.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import Conflict, Forbidden, NotFound
from diamond.core.projects import Project, Role
from diamond.server.services import access, approvals, audit
from diamond.server.services.context import Context
from diamond.server.services.projects import detail, locked
from diamond.server.store.identity_models import EndpointShareRow, ProjectRow
from diamond.server.store.models import EndpointRow, UserRow


def share(ctx: Context, user_id: str, name: str, endpoint: str) -> Project:
    """Offer an endpoint of the user's to a project. Its tasks run there at once if they are an owner of the project,
    else when one of its owners has approved. Safe to repeat.

    Raises:
        Forbidden: the endpoint is another's, or the user only looks on in the project.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = locked(session, user_id, name, Role.MEMBER, shared=True)
        place = _own_endpoint(session, user_id, endpoint)
        known = session.get(EndpointShareRow, (place.id, row.id))
        if known is None:
            approvals.begin(session, place, row, now)
        elif known.approved_at is None and access.role_in(session, user_id, row.id) is Role.OWNER:
            approvals.approve(session, known, place, row, user_id, now)  # they have become one since they asked
        session.flush()
        made = detail(session, row, user_id)
    ctx.hub.notify("planning", "events")
    return made


def approve(ctx: Context, user_id: str, name: str, endpoint: str, *, owner: str | None = None) -> Project:
    """Let tasks of the project go to an endpoint that a member offers. By an owner of the project. Safe to repeat.

    Args:
        owner: whose the endpoint is, as whoever approves saw it.

    Raises:
        NotFound: nobody has asked for that.
        Conflict: it is another's by now.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = locked(session, user_id, name, shared=True)
        found, place = _share(session, row, endpoint)
        whose = session.get_one(UserRow, place.owner_id).name
        if owner is not None and owner != whose:
            raise Conflict(
                f"endpoint {place.name} is {whose}'s by now, not {owner[:60]}'s", hint="look again", field="owner"
            )
        if found.approved_at is None:
            approvals.approve(session, found, place, row, user_id, now)
        session.flush()
        made = detail(session, row, user_id)
    ctx.hub.notify("planning", "events")
    return made


def decline(ctx: Context, user_id: str, name: str, endpoint: str) -> Project:
    """Turn down what a member asked for. By an owner of the project.

    Raises:
        NotFound: nobody has asked for that.
        Conflict: it is approved already.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = locked(session, user_id, name, shared=True)
        found, place = _share(session, row, endpoint)
        if found.approved_at is not None:
            raise Conflict(
                f"endpoint {place.name} is shared with project {row.name} already",
                hint=f"end that: diamond project share-endpoint {row.name} {place.name} --stop",
                field="endpoint",
            )
        approvals.decline(session, found, place, row, user_id, now)
        session.flush()
        made = detail(session, row, user_id)
    ctx.hub.notify("events")
    return made


def unshare(ctx: Context, user_id: str, name: str, endpoint: str) -> Project:
    """The project's tasks go there no more, or a request is withdrawn; what runs there goes on. By the endpoint's
    owner, or the project's."""
    now = ctx.clock()
    with ctx.db.write() as session:
        row = locked(session, user_id, name, Role.VIEWER, shared=True)
        found, place = _share(session, row, endpoint, user_id)
        if place.owner_id != user_id and access.role_in(session, user_id, row.id) is not Role.OWNER:
            raise Forbidden(f"only the owner of endpoint {endpoint}, or of project {name}, can do that")
        session.delete(found)
        audit.record(session, now, "endpoint.unshared", place.id, endpoint=endpoint, project=row.name)
        session.flush()
        made = detail(session, row, user_id)
    ctx.hub.notify("planning", "events")
    return made


def _share(
    session: Session, row: ProjectRow, endpoint: str, user_id: str | None = None
) -> tuple[EndpointShareRow, EndpointRow]:
    """`user_id`: somebody who may be neither: a request of others is hidden from them."""
    query = (
        sa.select(EndpointShareRow, EndpointRow)
        .join(EndpointRow, EndpointRow.id == EndpointShareRow.endpoint_id)
        .where(EndpointShareRow.project_id == row.id)
        .where(EndpointRow.name == (endpoint if endpoint.isprintable() else ""))
    )
    if user_id is not None and access.role_in(session, user_id, row.id) is not Role.OWNER:
        query = query.where(sa.or_(access.approved(), EndpointRow.owner_id == user_id))
    found = session.execute(query.with_for_update(of=EndpointRow)).one_or_none()
    if found is None:
        hint = f"`diamond project show {row.name}` lists what is shared, and what waits to be"
        raise NotFound(
            f"endpoint {endpoint[:60]!r} is not shared with project {row.name}, and nobody asked for that",
            hint=hint, field="endpoint",
        )  # fmt: skip
    return found[0], found[1]


def _own_endpoint(session: Session, user_id: str, name: str) -> EndpointRow:
    """Locked: it must not change hands meanwhile."""
    query = sa.select(EndpointRow).where(
        EndpointRow.name == (name if name.isprintable() else ""),
        EndpointRow.removed_at.is_(None),
        access.sees_endpoint(user_id),
    )
    row = session.scalars(query.with_for_update()).one_or_none()
    if row is None:
        hint = "`diamond endpoint ls` lists yours"
        raise NotFound(f"there is no endpoint {name[:60]!r}", hint=hint, field="endpoint")
    if row.owner_id != user_id:
        owner = session.get_one(UserRow, row.owner_id).name
        raise Forbidden(f"endpoint {name} is {owner}'s: only they can share it", hint=f"ask {owner}", field="endpoint")
    return row
