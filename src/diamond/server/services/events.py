"""Reading what happened, by cursor."""

from __future__ import annotations

import sqlalchemy as sa

from diamond.core.events import Event
from diamond.server.services import tasks
from diamond.server.services.context import Context
from diamond.server.store.models import Counter, EventRow


def topic_of(user: str) -> str:
    """What is woken when something of this user's happens; see api/events.keep_waking."""
    return f"events-of:{user}"


def newest(ctx: Context) -> int:
    with ctx.db.read() as session:
        return session.execute(sa.select(Counter.value).where(Counter.name == "events")).scalar_one()


def owners_since(ctx: Context, seq: int) -> tuple[set[str], int]:
    """Whose events came after `seq`, and the newest one's number."""
    with ctx.db.read() as session:
        rows = session.execute(sa.select(EventRow.seq, EventRow.owner_id).where(EventRow.seq > seq)).all()
    return {owner for _, owner in rows if owner}, max([seq, *(number for number, _ in rows)])


def since(ctx: Context, user_id: str, seq: int, *, task_id: str | None = None, limit: int = 500) -> list[Event]:
    """Events after `seq`, oldest first; the last one's `seq` is the next cursor.

    Those of what the user owns; with `task_id`, those of that task, if they may look at it.
    """
    query = sa.select(EventRow).where(EventRow.seq > seq)
    with ctx.db.read() as session:
        if task_id is None:
            query = query.where(EventRow.owner_id == user_id)
        else:
            query = query.where(EventRow.task_id == tasks.find(session, user_id, task_id).id)
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
