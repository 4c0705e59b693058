"""Reading what happened, by cursor."""

from __future__ import annotations

import sqlalchemy as sa

from diamond.core.events import Event
from diamond.server.services.context import Context
from diamond.server.store.models import EventRow


def since(ctx: Context, user_id: str, seq: int, *, task_id: str | None = None, limit: int = 500) -> list[Event]:
    """Events after `seq`, oldest first; the last one's `seq` is the next cursor."""
    query = sa.select(EventRow).where(EventRow.owner_id == user_id, EventRow.seq > seq)
    if task_id is not None:
        query = query.where(EventRow.task_id == task_id)
    with ctx.db.read() as session:
        rows = session.scalars(query.order_by(EventRow.seq).limit(limit)).all()
        return [
            Event(
                seq=row.seq,
                at=row.at,
                kind=row.kind,
                task_id=row.task_id,
                job_id=row.job_id,
                endpoint_id=row.endpoint_id,
                data=row.data,
            )
            for row in rows
        ]
