"""Notices on their way: made from events, claimed by one process at a time, settled when they arrived or were given up.

A notice is made in the transaction that moves the cursor past its event, so each event makes each of its notices once,
whatever is killed when. A claim puts off the next attempt before anything is sent: a process that dies while it sends
costs a delay, and the message keeps its id, by which receivers know it again. Must not send anything itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import encode
from diamond.core.faults import fault_point
from diamond.core.ids import new_id
from diamond.core.notices import ALL
from diamond.server.services import notice_texts, notices
from diamond.server.services.context import Context
from diamond.server.store.db import record_event
from diamond.server.store.identity_models import NoticeRow, NoticeRuleRow
from diamond.server.store.models import Counter, EndpointRow, EventRow, Meta, UserRow

log = logging.getLogger("diamond.server")
CURSOR = "notices_cursor"
# Five attempts within about three hours. The first delay is also how long a claim keeps others from sending the same.
DELAYS_S = (60.0, 300.0, 1800.0, 7200.0)
MAX_ATTEMPTS = len(DELAYS_S) + 1
MAX_FAILURES = 20
SILENT_AFTER_S = 300.0
KEEP_S = 30 * 86_400.0
_BATCH = 500
_LAG = 1000
_LONG_SILENT_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A notice to be sent now, and all that takes."""

    id: str
    rule_id: str
    user_id: str
    channel: str
    target: str
    key: str
    subject: str
    body: dict[str, object]
    created_at: float


def match(ctx: Context) -> int:
    """Make the notices of events that happened since the last time; how many. Call it again until it gives 0."""
    with ctx.db.read() as session:  # nearly always there is nothing to do, and writers queue
        if not _is_work(session):
            return 0
    with ctx.db.write() as session:
        # Whoever holds the cursor does the work; others need not wait for it.
        held = sa.select(Meta).where(Meta.key == CURSOR).with_for_update(skip_locked=True)
        cursor = session.scalars(held).one_or_none()
        if cursor is None:
            return 0
        rules = _rules(session)
        events, last = _next_events(session, rules, int(cursor.value))
        made = 0
        for event in events:
            wanted = [rule for rule in rules if rule.user_id == event.owner_id and rule.since_seq < event.seq]
            made += _make(ctx, session, event, wanted)
        cursor.value = str(max(last, int(cursor.value)))
        session.flush()
        fault_point("server.notices_made")
    return max(made, int(len(events) == _BATCH))


def _make(ctx: Context, session: Session, event: EventRow, rules: list[NoticeRuleRow]) -> int:
    if not rules:
        return 0
    message = notice_texts.message_of(session, event)
    if message is None:
        return 0
    now = ctx.clock()
    made = 0
    for rule in rules:
        if ALL not in rule.events and message.event not in rule.events:
            continue
        session.add(
            NoticeRow(
                id=new_id("msg"), rule_id=rule.id, event_seq=event.seq, subject=message.title, body=encode(message),
                attempts=0, next_at=now, error="", created_at=now,
            )
        )  # fmt: skip
        made += 1
    return made


def _is_work(session: Session) -> bool:
    rules = _rules(session)
    cursor = int(session.scalars(sa.select(Meta.value).where(Meta.key == CURSOR)).one_or_none() or 0)
    events, last = _next_events(session, rules, cursor)
    return bool(events) or last - cursor > _LAG


def _rules(session: Session) -> list[NoticeRuleRow]:
    query = sa.select(NoticeRuleRow).join(UserRow, UserRow.id == NoticeRuleRow.user_id)
    live = query.where(NoticeRuleRow.paused_at.is_(None), UserRow.disabled_at.is_(None))
    return list(session.scalars(live.order_by(NoticeRuleRow.id)))


def _next_events(session: Session, rules: list[NoticeRuleRow], cursor: int) -> tuple[list[EventRow], int]:
    """Events that some rule may be about, and the number up to which all were looked at."""
    newest = session.scalars(sa.select(Counter.value).where(Counter.name == "events")).one()
    if not rules:
        return [], newest
    start = max(cursor, min(rule.since_seq for rule in rules))
    query = sa.select(EventRow).where(EventRow.seq > start, EventRow.seq <= newest)
    query = query.where(EventRow.owner_id.in_({rule.user_id for rule in rules}), EventRow.kind.in_(notice_texts.KINDS))
    events = list(session.scalars(query.order_by(EventRow.seq).limit(_BATCH)))
    return events, (events[-1].seq if len(events) == _BATCH else newest)


def claim(ctx: Context, limit: int, busy: frozenset[str] = frozenset()) -> list[Parcel]:
    """Notices that are due, at most one of each user who is not `busy`: a slow receiver is its user's own affair.

    Nobody else gets them for a while; `settle` says what became of each.
    """
    now = ctx.clock()
    due = (
        sa.select(NoticeRow, NoticeRuleRow)
        .join(NoticeRuleRow, NoticeRuleRow.id == NoticeRow.rule_id)
        .join(UserRow, UserRow.id == NoticeRuleRow.user_id)
        .where(NoticeRow.next_at <= now, UserRow.disabled_at.is_(None), NoticeRuleRow.user_id.not_in(busy))
    )
    with ctx.db.read() as session:
        if session.execute(due.limit(1)).first() is None:
            return []
    parcels: dict[str, Parcel] = {}
    with ctx.db.write() as session:
        locked = due.with_for_update(skip_locked=True, of=NoticeRow)
        for row, rule in session.execute(locked.order_by(NoticeRow.next_at, NoticeRow.event_seq).limit(_BATCH)):
            if rule.user_id in parcels or len(parcels) >= limit:
                continue
            if row.attempts >= MAX_ATTEMPTS:
                row.next_at, row.error = None, "the server stopped while it was being sent"
                continue
            row.attempts += 1
            row.next_at = now + DELAYS_S[min(row.attempts, len(DELAYS_S)) - 1]
            parcels[rule.user_id] = Parcel(
                id=row.id, rule_id=rule.id, user_id=rule.user_id, channel=rule.channel, target=rule.target,
                key=rule.sealed_key, subject=row.subject, body=dict(row.body), created_at=row.created_at,
            )  # fmt: skip
    fault_point("server.notices_claimed")
    return list(parcels.values())


def key_of(ctx: Context, parcel: Parcel) -> str:
    return notices.key_of(ctx, NoticeRuleRow(id=parcel.rule_id, sealed_key=parcel.key))


def settle(ctx: Context, parcel: Parcel, error: str = "", *, hopeless: bool = False) -> None:
    """What became of a notice. `error`: why it did not arrive; `hopeless`: it never will."""
    now = ctx.clock()
    with ctx.db.write() as session:
        rule = session.scalars(
            sa.select(NoticeRuleRow).where(NoticeRuleRow.id == parcel.rule_id).with_for_update()
        ).one_or_none()
        row = session.get(NoticeRow, parcel.id) if rule is not None else None
        if rule is None or row is None:
            return  # its rule was removed meanwhile
        if not error:
            row.delivered_at, row.next_at, row.error = now, None, ""
            rule.failures, rule.last_error = 0, ""
            return
        row.error = rule.last_error = error[:500]
        rule.failures += 1
        if hopeless or row.attempts >= MAX_ATTEMPTS:
            row.next_at = None
        if rule.failures >= MAX_FAILURES and rule.paused_at is None:
            notices.pause(session, rule, now, f"paused after {rule.failures} failures in a row; the last: {error}")
            log.warning("notices of rule %s are paused after %d failures", rule.id, rule.failures)


def next_due(ctx: Context) -> float | None:
    """When the next notice is to be sent; None: none waits."""
    with ctx.db.read() as session:
        return session.execute(sa.select(sa.func.min(NoticeRow.next_at))).scalar_one()


def tell_silence(ctx: Context) -> int:
    """Record, once each, that endpoints have gone silent: an agent that was killed says no goodbye. How many did."""
    now = ctx.clock()
    silent = [
        EndpointRow.removed_at.is_(None),
        EndpointRow.last_seen_at < now - SILENT_AFTER_S,
        EndpointRow.last_seen_at > now - _LONG_SILENT_S,  # what was silent before there were notices is no news
        sa.or_(EndpointRow.silence_told.is_(None), EndpointRow.silence_told < EndpointRow.last_seen_at),
    ]
    with ctx.db.read() as session:
        if session.scalars(sa.select(EndpointRow.id).where(*silent).limit(1)).first() is None:
            return 0
    with ctx.db.write() as session:
        rows = session.scalars(sa.select(EndpointRow).where(*silent).order_by(EndpointRow.id).with_for_update()).all()
        for row in rows:
            assert row.last_seen_at is not None
            row.silence_told = row.last_seen_at
            data = {"name": row.name, "silent_s": now - row.last_seen_at}
            record_event(session, at=now, kind="endpoint.offline", owner_id=row.owner_id, endpoint_id=row.id, data=data)
    ctx.hub.notify("events")
    return len(rows)


def sweep(ctx: Context) -> int:
    """Forget notices that were settled long ago; how many."""
    old = sa.delete(NoticeRow).where(NoticeRow.next_at.is_(None), NoticeRow.created_at < ctx.clock() - KEEP_S)
    with ctx.db.write() as session:
        done = session.execute(old, execution_options={"synchronize_session": False})
        return int(done.rowcount)  # type: ignore[attr-defined]
