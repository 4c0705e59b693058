"""What goes into the audit log (who did what, to what, from where), and how it is read and checked.

Many actions are events already (`task.created`, `endpoint.removed`); those that `audit_chain.ACTIONS` names enter the
log by themselves, in the same transaction. What is no event calls `record`. What was refused calls `refuse`, since the
transaction it was refused in leaves nothing behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.audit import FIRST, FORMAT, AuditEntry, AuditHead, AuditVerdict, Chain
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput, NotFound
from diamond.server.services.context import Context
from diamond.server.store import acting, audit_chain
from diamond.server.store.identity_models import AuditRow
from diamond.server.store.models import Counter, UserRow

_BATCH = 1000
_ACTION = re.compile(r"[a-z_]{1,40}(\.[a-z_]{1,40})?")
# Refusals cost whoever makes them nothing: their share of the log is bounded.
_REFUSED_WITHIN_S = 60.0
MOST_REFUSED = 200
MOST_REFUSED_BY_ONE = 100  # address, behind which there may be a whole institute
_COLUMNS = [getattr(AuditRow, name) for name in audit_chain.FIELDS]


def record(session: Session, at: float, action: str, obj: str = "", /, **data: Any) -> None:
    """Add an entry to this write transaction. `obj` is an id; `data` must hold nothing secret."""
    audit_chain.add(session, at, action, obj, data)


def refuse(ctx: Context, action: str, obj: str = "", /, **data: Any) -> bool:
    """Note, in a transaction of its own, that something was refused; False when there were too many lately.

    Call it outside any transaction. The last entry before a pause says that there is one.
    """
    now = ctx.clock()
    recent = sa.select(sa.func.count()).select_from(AuditRow).where(AuditRow.at > now - _REFUSED_WITHIN_S)
    recent = recent.where(AuditRow.action.like("%.refused"))
    address = acting.current().address
    with ctx.db.write() as session:
        left = MOST_REFUSED - session.execute(recent).scalar_one()
        if address:
            by_one = session.execute(recent.where(AuditRow.address == address)).scalar_one()
            left = min(left, MOST_REFUSED_BY_ONE - by_one)
        if left <= 0:
            return False
        more = {"more": "further ones are left out for a minute"} if left == 1 else {}
        record(session, now, action, obj, **data, **more)
    return True


def entries(
    ctx: Context,
    *,
    user_id: str | None = None,
    user: str = "",
    action: str = "",
    obj: str = "",
    since: float | None = None,
    until: float | None = None,
    cursor: int | None = None,
    limit: int = 100,
) -> tuple[list[AuditEntry], int | None]:
    """Entries that fit, newest first, and the cursor of the next page.

    Args:
        user_id: only of this user. `user`: the same by name or id, for administrators.
        action: ``task.created``, or ``task`` for all about tasks.
        since, until: Unix seconds.
        cursor: only entries with a smaller number.
    """
    query = sa.select(*_COLUMNS).order_by(AuditRow.seq.desc()).limit(limit + 1)
    if action:
        query = query.where(_is_action(action))
    if obj:
        query = query.where(AuditRow.object == obj)
    if since is not None:
        query = query.where(AuditRow.at >= since)
    if until is not None:
        query = query.where(AuditRow.at < until)
    if cursor is not None:
        query = query.where(AuditRow.seq < cursor)
    if user_id is not None:
        query = query.where(AuditRow.user_id == user_id)
    with ctx.db.read() as session:
        if user:
            known = session.scalars(sa.select(UserRow.id).where(UserRow.name == user)).one_or_none()
            # Who is not known (any more) is found by what they called themselves.
            query = query.where(sa.or_(AuditRow.user_id == (known or user), AuditRow.user == user))
        rows = session.execute(query).all()
    found = [AuditEntry(**row._asdict()) for row in rows[:limit]]
    return found, (found[-1].seq if len(rows) > limit else None)


def _is_action(text: str) -> sa.ColumnElement[bool]:
    if not _ACTION.fullmatch(text):
        raise InvalidInput(
            f"{text[:60]!r} is no action", hint="write one such as task.created, or a noun: task", field="action"
        )
    if "." in text:
        return AuditRow.action == text
    return AuditRow.action.between(f"{text}.", f"{text}/")  # "/" follows "." in ASCII


def head(ctx: Context) -> AuditHead:
    """The last entry. Kept somewhere else, it proves later that everything up to it is as it was."""
    with ctx.db.read() as session:
        return _head(session)


def _head(session: Session) -> AuditHead:
    last = sa.select(AuditRow.seq, AuditRow.hash, AuditRow.at).order_by(AuditRow.seq.desc()).limit(1)
    row = session.execute(last).one_or_none()
    return AuditHead(seq=row.seq, hash=row.hash, at=row.at) if row else AuditHead(seq=0, hash=FIRST)


def verify(ctx: Context, expected: AuditHead | None = None) -> AuditVerdict:
    """Recompute the whole chain. `expected`: a head the log had once."""
    chain = Chain(head=expected)
    with ctx.db.read() as session:
        counted = session.scalars(sa.select(Counter.value).where(Counter.name == "audit")).one_or_none()
        query = sa.select(*_COLUMNS).order_by(AuditRow.seq).execution_options(yield_per=_BATCH)
        with session.execute(query) as rows:
            for row in rows:
                if not chain.add(row._asdict()):
                    break
    return chain.end(counted)


def export(ctx: Context, after: int = 0) -> Iterator[bytes]:
    """The log from the entry after this one on, as lines of JSON; the first is about itself, the last about the end.

    Short transactions: however slow its reader is, nothing waits for it.

    Raises:
        NotFound: there is no entry with that number.
    """
    with ctx.db.write() as session:
        if after:
            found = session.scalars(sa.select(AuditRow.hash).where(AuditRow.seq == after)).one_or_none()
            if found is None:
                raise NotFound(f"the audit log has no entry {after}", hint="`diamond audit head` says where it ends")
            before = AuditHead(seq=after, hash=found)
        else:
            before = AuditHead(seq=0, hash=FIRST)
        record(session, ctx.clock(), "audit.exported", after=after)
    last = head(ctx)
    return _lines(ctx, before, last)


def _lines(ctx: Context, before: AuditHead, last: AuditHead) -> Iterator[bytes]:
    about = {"kind": "diamond-audit", "format": FORMAT, "epoch": ctx.epoch, "at": ctx.clock(), "after": encode(before)}
    yield _line(about)
    seq = before.seq
    while seq < last.seq:
        query = sa.select(*_COLUMNS).where(AuditRow.seq > seq, AuditRow.seq <= last.seq)
        with ctx.db.read() as session:
            rows = session.execute(query.order_by(AuditRow.seq).limit(_BATCH)).all()
        if not rows:  # somebody removed them: the check of this file will say so
            break
        yield b"".join(_line(row._asdict()) for row in rows)
        seq = rows[-1].seq
    yield _line({"kind": "end", "head": encode(last)})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
