"""The audit log's rows: each holds the hash of the one before, so that nothing can be changed or left out unseen.

Rows are written at the end of the transaction that did what they tell of, under one lock, so that their order is the
order of commits. How the hash is made, and checked, is in `core.audit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.audit import FIRST, hash_of
from diamond.server.store import acting
from diamond.server.store.identity_models import AuditRow
from diamond.server.store.models import Counter, table_of

# Events that tell of what somebody did, rather than of what became of it. Image work that somebody asked for makes a
# task, whose `task.created` says what it is for.
ACTIONS = frozenset(
    {
        "task.created", "task.cancel_requested", "shell.opened", "shell.closed",
        "endpoint.created", "endpoint.enrolled", "endpoint.removed", "endpoint.revoked", "endpoint.rotated",
        "endpoint.policy_changed",
        "image.building", "image.shared", "image.removed",
    }
)  # fmt: skip
FIELDS = ("seq", "at", "action", "user_id", "user", "via", "address", "object", "data", "previous", "hash")
_MAX_TEXT = 500
_MAX_ITEMS = 100
_PENDING = "diamond_audit"
# Built once: putting a statement together costs more than running it.
_BUMP = (
    sa.update(table_of(Counter))
    .where(Counter.name == sa.bindparam("counter"))
    .values(value=Counter.value + sa.bindparam("by"))
    .returning(Counter.value)
)
_HASH = sa.select(AuditRow.hash).where(AuditRow.seq == sa.bindparam("seq"))
_INSERT = sa.insert(table_of(AuditRow))


def bump(session: Session, counter: str, by: int) -> int:
    """Count on; its row stays locked until the commit."""
    return int(session.connection().execute(_BUMP, {"counter": counter, "by": by}).scalar_one())


def add(session: Session, at: float, action: str, obj: str, data: Mapping[str, Any]) -> None:
    """Have an entry written when this transaction commits, in the name of whoever acts now."""
    who = acting.current()
    row = {
        "at": float(at),  # as every database gives it back, whatever the caller had
        "action": action,
        "user_id": who.user_id,
        "user": _text(who.name),
        "via": _text(who.via),
        "address": _text(who.address),
        "object": _text(obj),
        "data": _plain(data),
    }
    session.info.setdefault(_PENDING, []).append(row)


def add_event(session: Session, event: Mapping[str, Any]) -> None:
    """The same for an event, if it tells of what somebody did."""
    kind: str = event["kind"]
    if kind in ACTIONS:
        data = dict(event.get("data") or {})
        task_id, endpoint_id = event.get("task_id"), event.get("endpoint_id")
        obj = str(data.pop("image_id", "")) if kind.startswith("image.") else ""
        where = {"task": task_id, "endpoint_id": endpoint_id} if obj else {}
        add(session, event["at"], kind, obj or task_id or endpoint_id or "", where | data)


def write_pending(session: Session) -> None:
    rows: list[dict[str, Any]] = session.info.pop(_PENDING, [])
    if not rows:
        return
    session.flush()  # the counter's lock is the last that a transaction takes
    first = bump(session, "audit", len(rows)) - len(rows) + 1
    connection = session.connection()
    previous = connection.execute(_HASH, {"seq": first - 1}).scalar_one_or_none() or FIRST
    for seq, row in enumerate(rows, start=first):
        row |= {"seq": seq, "previous": previous, "hash": None}
        row["hash"] = previous = hash_of({name: row[name] for name in FIELDS})
    connection.execute(_INSERT, rows)


def _text(value: object) -> str:
    """As every database keeps it: no NUL, no half of a character."""
    return str(value)[:_MAX_TEXT].replace("\x00", "").encode(errors="replace").decode()


def _plain(value: Any) -> Any:
    """As JSON keeps it on every database, and no longer than is useful."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in list(items)[:_MAX_ITEMS]]
    if isinstance(value, Mapping):
        return {_text(key)[:100]: _plain(item) for key, item in list(value.items())[:_MAX_ITEMS]}
    return _text(value)
