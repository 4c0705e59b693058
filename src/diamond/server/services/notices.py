"""Rules of notices: what a user wants to be told, and how. What is sent for them is in `outbox`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import InvalidInput, NotFound, RateLimited
from diamond.core.ids import is_id, new_id
from diamond.core.notices import Channel, NoticeRule, parse_events
from diamond.server.services import audit, form_keys, sealing, seen
from diamond.server.services.context import Context
from diamond.server.store.identity_models import AuditRow, NoticeRow, NoticeRuleRow
from diamond.server.store.models import Counter

MAX_RULES = 20
MAX_TESTS = 10
TESTS_WITHIN_S = 3600.0
_KEY_PREFIX = "dmdw_"
_MADE_ALREADY = (
    "it is in the list; a webhook's key was shown then: if nobody kept that, remove the rule and make another"
)


def create(
    ctx: Context, user_id: str, channel: Channel, target: str, events: tuple[str, ...], *, once: str = ""
) -> NoticeRule:
    """A rule for what happens from now on; the key of a webhook is in the answer only.

    Args:
        target: an address or URL that was checked already.
        once: key of the form that asks. Raises Conflict if that made one already.
    """
    now = ctx.clock()
    rule_id = new_id("ntc")
    key = _KEY_PREFIX + secrets.token_urlsafe(32) if channel is Channel.WEBHOOK else ""
    sealed = sealing.seal(ctx, key.encode(), *_about(rule_id)) if key else ""
    with ctx.db.write() as session:
        form_keys.check(session, user_id, once, _MADE_ALREADY)
        count = sa.select(sa.func.count()).select_from(NoticeRuleRow).where(NoticeRuleRow.user_id == user_id)
        if session.execute(count).scalar_one() >= MAX_RULES:
            raise InvalidInput(
                f"you have {MAX_RULES} rules already", hint="remove some: diamond notify ls", field="channel"
            )
        row = NoticeRuleRow(
            id=rule_id, user_id=user_id, channel=channel.value, target=target, events=list(events), sealed_key=sealed,
            created_at=now, failures=0, last_error="", since_seq=_newest_event(session),
        )  # fmt: skip
        session.add(row)
        form_keys.note(session, user_id, once, row.id, now, _MADE_ALREADY)
        audit.record(session, now, "notice_rule.created", row.id, channel=row.channel, target=target, events=events)
    ctx.hub.notify("notices")
    return _to_rule(row, key=key)


def list_rules(ctx: Context, user_id: str) -> list[NoticeRule]:
    with ctx.db.read() as session:
        rows = session.scalars(
            sa.select(NoticeRuleRow).where(NoticeRuleRow.user_id == user_id).order_by(NoticeRuleRow.id)
        ).all()
        waiting, delivered = _counts(session, [row.id for row in rows])
        return [_to_rule(row, waiting=waiting.get(row.id, 0), delivered_at=delivered.get(row.id)) for row in rows]


def get(ctx: Context, user_id: str, rule_id: str) -> NoticeRule:
    """Raises NotFound."""
    with ctx.db.read() as session:
        row = _find(session, user_id, rule_id)
        waiting, delivered = _counts(session, [row.id])
        return _to_rule(row, waiting=waiting.get(row.id, 0), delivered_at=delivered.get(row.id))


def change(
    ctx: Context,
    user_id: str,
    rule_id: str,
    *,
    events: tuple[str, ...] | None = None,
    paused: bool | None = None,
    saw: str | None = None,
) -> NoticeRule:
    """Choose other events, pause it, or have it go on; what happened while it was paused is not told later.

    Args:
        saw: `mark_of` the rule as it was shown.

    Raises:
        Conflict: it is not as it was shown.
        NotFound: the user has no such rule.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = _find(session, user_id, rule_id, lock=True)
        seen.check(saw, "the rule was", ", ".join(row.events), row.events)
        changed: dict[str, Any] = {}
        if events is not None and list(events) != row.events:
            row.events = changed["events"] = list(events)
        if paused is False and row.paused_at is not None:
            row.paused_at, row.failures, row.last_error = None, 0, ""
            row.since_seq, changed["paused"] = _newest_event(session), False
        elif paused and row.paused_at is None:
            pause(session, row, now, "paused on request")
            changed["paused"] = True
        if changed:
            audit.record(session, now, "notice_rule.changed", row.id, **changed)
    ctx.hub.notify("notices")
    return get(ctx, user_id, rule_id)


def mark_of(rule: NoticeRule) -> str:
    return seen.mark(rule.events)


def remove(ctx: Context, user_id: str, rule_id: str) -> None:
    """With everything that waits to be sent for it. Raises NotFound."""
    with ctx.db.write() as session:
        row = _find(session, user_id, rule_id, lock=True)
        audit.record(session, ctx.clock(), "notice_rule.removed", row.id, channel=row.channel, target=row.target)
        session.execute(sa.delete(NoticeRow).where(NoticeRow.rule_id == row.id))
        session.delete(row)


def begin_test(ctx: Context, user_id: str, rule_id: str) -> tuple[NoticeRule, str]:
    """The rule and its key, for a message that is sent to try it; noted, so that nobody is flooded with them.

    Raises:
        NotFound: the user has no such rule.
        RateLimited: too many tests within the last hour.
    """
    now = ctx.clock()
    recent = sa.select(sa.func.count()).select_from(AuditRow).where(AuditRow.at > now - TESTS_WITHIN_S)
    recent = recent.where(AuditRow.action == "notice_rule.tested", AuditRow.user_id == user_id)
    with ctx.db.write() as session:
        row = _find(session, user_id, rule_id)
        if session.execute(recent).scalar_one() >= MAX_TESTS:
            raise RateLimited(f"you sent {MAX_TESTS} test messages within an hour", hint="wait a while")
        audit.record(session, now, "notice_rule.tested", row.id, channel=row.channel, target=row.target)
    return _to_rule(row), key_of(ctx, row)


def key_of(ctx: Context, row: NoticeRuleRow) -> str:
    """What this rule's webhooks are signed with; empty for another channel."""
    return sealing.unseal(ctx, row.sealed_key, *_about(row.id)).decode() if row.sealed_key else ""


def pause(session: Session, row: NoticeRuleRow, now: float, why: str) -> None:
    """Nothing more is sent for it, until its user says so; what waited is given up."""
    row.paused_at, row.last_error = now, why[:500]
    waiting = sa.update(NoticeRow).where(NoticeRow.rule_id == row.id, NoticeRow.next_at.is_not(None))
    session.execute(
        waiting.values(next_at=None, error="the rule was paused"), execution_options={"synchronize_session": "fetch"}
    )


def parse_change(body: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, bool | None]:
    """``{"events": …, "paused": …}``, both optional. Raises InvalidInput."""
    for name in body:
        if name not in ("events", "paused"):
            raise InvalidInput(
                f"unknown field {name[:40]!r}", hint="valid fields here: events, paused", field=name[:40]
            )
    paused = body.get("paused")
    if paused is not None and not isinstance(paused, bool):
        raise InvalidInput("must be true or false", field="paused")
    return (parse_events(body["events"]) if body.get("events") is not None else None), paused


def _about(rule_id: str) -> tuple[str, ...]:
    return ("webhook key", rule_id)


def _find(session: Session, user_id: str, rule_id: str, *, lock: bool = False) -> NoticeRuleRow:
    query = sa.select(NoticeRuleRow).where(NoticeRuleRow.id == rule_id, NoticeRuleRow.user_id == user_id)
    query = query.with_for_update() if lock else query
    row = session.scalars(query).one_or_none() if is_id(rule_id, "ntc") else None
    if row is None:
        raise NotFound(f"you have no rule {rule_id[:60]!r}", hint="`diamond notify ls` lists yours", field="RULE")
    return row


def _newest_event(session: Session) -> int:
    return session.scalars(sa.select(Counter.value).where(Counter.name == "events")).one()


def _counts(session: Session, rule_ids: list[str]) -> tuple[dict[str, int], dict[str, float]]:
    """Of each rule, how many messages wait and when the last one arrived."""
    grouped = sa.select(
        NoticeRow.rule_id,
        sa.func.count(NoticeRow.next_at),
        sa.func.max(NoticeRow.delivered_at),
    ).where(NoticeRow.rule_id.in_(rule_ids))
    rows = session.execute(grouped.group_by(NoticeRow.rule_id)).all()
    return {row[0]: row[1] for row in rows}, {row[0]: row[2] for row in rows if row[2] is not None}


def _to_rule(row: NoticeRuleRow, *, waiting: int = 0, delivered_at: float | None = None, key: str = "") -> NoticeRule:
    return NoticeRule(
        id=row.id, channel=Channel(row.channel), target=row.target, events=tuple(row.events), created_at=row.created_at,
        paused_at=row.paused_at, failures=row.failures, last_error=row.last_error, waiting=waiting,
        delivered_at=delivered_at, key=key,
    )  # fmt: skip
