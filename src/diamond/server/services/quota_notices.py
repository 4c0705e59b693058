"""An event when little is left of a quota, for those who want to be told."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.notices import NoticeEvent
from diamond.server.services.context import Context
from diamond.server.store.db import record_event
from diamond.server.store.models import EventRow

TELL_EVERY_S = 86_400.0
_TOLD = "quota_told"


def tell(ctx: Context, session: Session, user_id: str, notes: tuple[str, ...]) -> None:
    """Record what a launch was warned of, at most once a day for each user."""
    told: set[str] = session.info.setdefault(_TOLD, set())
    if not notes or user_id in told:
        return
    told.add(user_id)  # of a batch, once
    now, near = ctx.clock(), NoticeEvent.QUOTA_NEAR.value
    query = sa.select(EventRow.seq).where(EventRow.owner_id == user_id, EventRow.kind == near)
    if session.execute(query.where(EventRow.at > now - TELL_EVERY_S).limit(1)).first() is None:
        record_event(
            session, at=now, kind=near, owner_id=user_id, data={"what": "a quota", "message": "; ".join(notes)}
        )
