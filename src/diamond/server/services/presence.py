"""Which agent speaks for an endpoint, and when it was last heard of."""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import Conflict, NotFound
from diamond.server.services.context import Context
from diamond.server.services.snapshots import is_online
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow

_TOUCH_EVERY_S = 5.0


class Told(NamedTuple):
    """What is known of an endpoint that its agent's calls must be held against; its facts are long, and left out."""

    name: str
    instance: str | None
    revision: int
    last_seen_at: float | None
    usage: dict[str, Any] | None


# Built once, since every poll and every report asks: putting a query together costs more than running it.
_TOLD = sa.select(*(getattr(EndpointRow, name) for name in Told._fields)).where(
    EndpointRow.id == sa.bindparam("endpoint")
)
_LOCKED = sa.select(EndpointRow).where(EndpointRow.id == sa.bindparam("endpoint")).with_for_update()


def told(session: Session, endpoint_id: str, instance: str) -> Told | None:
    """None: there is no such endpoint.

    Raises:
        Conflict: another agent home speaks for it.
    """
    found = session.execute(_TOLD, {"endpoint": endpoint_id}).one_or_none()
    if found is None:
        return None
    known = Told(*found)
    check_instance(known, instance)
    return known


def locked(session: Session, endpoint_id: str) -> EndpointRow:
    row = session.scalars(_LOCKED, {"endpoint": endpoint_id}).one_or_none()
    if row is None:
        raise gone()
    return row


def gone() -> NotFound:
    return NotFound("this agent's endpoint was removed", hint="create it again and use its new token")


def check_instance(row: EndpointRow | Told, instance: str) -> None:
    if row.instance not in (None, instance):
        raise Conflict(
            f"another agent now speaks for endpoint {row.name}", hint="stop this one; its jobs were given up"
        )


def is_stale(ctx: Context, last_seen_at: float | None) -> bool:
    """Whether it is worth writing down that the agent was heard of again."""
    return last_seen_at is None or ctx.clock() - last_seen_at > _TOUCH_EVERY_S


def touch(ctx: Context, session: Session, row: EndpointRow) -> None:
    now = ctx.clock()
    if not is_online(row.last_seen_at, now):
        data = {"name": row.name}
        record_event(session, at=now, kind="endpoint.online", owner_id=row.owner_id, endpoint_id=row.id, data=data)
    row.last_seen_at = now
