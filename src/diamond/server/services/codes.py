"""Codes that work once: invitations, new passwords, the first administrator, sign-ins under way.

Only their hashes are kept. A code is used in the transaction that does what it is for, so that of two who show it at
the same moment one succeeds, and a failure leaves it unused.
"""

from __future__ import annotations

import secrets
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.enrolment import new_code, plain_code, token_hash
from diamond.core.errors import Unauthenticated
from diamond.core.ids import new_id
from diamond.server.services.context import Context
from diamond.server.store.identity_models import CodeRow

SETUP = "setup"
INVITATION = "invitation"
RESET = "reset"
_KEEP_S = 30 * 86_400.0
_MAX_CHARS = 200


def make(
    session: Session,
    kind: str,
    *,
    now: float,
    lifetime_s: float,
    user_id: str | None = None,
    data: dict[str, Any] | None = None,
    created_by: str | None = None,
    short: bool = False,
) -> str:
    """A fresh code; the caller hands it out and keeps no copy.

    Args:
        user_id: whom it is for, where that is known already.
        data: what it is for; must hold nothing secret that is not hashed or sealed.
        short: to be typed from a screen: 60 bits in three groups of letters. Others have 256 bits.
    """
    # Those long dead go now: anybody can begin a sign-in, and nothing else would ever remove its code.
    session.execute(sa.delete(CodeRow).where(CodeRow.kind == kind, CodeRow.expires_at < now - _KEEP_S))
    value = new_code() if short else secrets.token_urlsafe(32)
    session.add(
        CodeRow(
            id=new_id("cod"), kind=kind, hash=_hash(value), user_id=user_id, created_by=created_by, data=data or {},
            created_at=now, expires_at=now + lifetime_s,
        )
    )  # fmt: skip
    session.flush()
    return value


def find(session: Session, kind: str, value: str, now: float) -> CodeRow:
    """What a code that still works is for, without using it.

    Raises:
        Unauthenticated: it is unknown, used, void or too old.
    """
    row = session.scalars(sa.select(CodeRow).where(*_live(kind, value, now))).one_or_none()
    if row is None:
        raise _wrong(kind)
    return row


def look(ctx: Context, kind: str, value: str) -> CodeRow:
    """`find`, in a transaction of its own."""
    with ctx.db.read() as session:
        return find(session, kind, value, ctx.clock())


def use(session: Session, kind: str, value: str, now: float) -> CodeRow:
    """Use a code up, if this transaction commits; what it was for.

    Raises:
        Unauthenticated: it is unknown, void or too old, or somebody else was faster.
    """
    # One statement: PostgreSQL lets the second one wait for the first, then look again.
    taken = sa.update(CodeRow).where(*_live(kind, value, now)).values(used_at=now).returning(CodeRow.id)
    code_id = session.execute(taken, execution_options={"synchronize_session": False}).scalar_one_or_none()
    if code_id is None:
        raise _wrong(kind)
    return session.get_one(CodeRow, code_id, populate_existing=True)


def void(session: Session, kind: str, now: float, *which: sa.ColumnElement[bool]) -> int:
    """Codes of this kind that nobody has used stop working; how many did."""
    live = (CodeRow.kind == kind, CodeRow.used_at.is_(None), CodeRow.expires_at > now)
    dying = sa.update(CodeRow).where(*live, *which).values(expires_at=now).returning(CodeRow.id)
    return len(session.execute(dying, execution_options={"synchronize_session": False}).all())


def _live(kind: str, value: str, now: float) -> tuple[sa.ColumnElement[bool], ...]:
    return CodeRow.kind == kind, CodeRow.hash == _hash(value), CodeRow.used_at.is_(None), CodeRow.expires_at > now


def _hash(value: str) -> str:
    """Short ones however they were typed."""
    return token_hash(plain_code(value) or value.strip()[:_MAX_CHARS])


def _wrong(kind: str) -> Unauthenticated:
    what, hint = _WORDS.get(kind, ("code", "begin again"))
    return Unauthenticated(f"this {what} is not valid: it is unknown, was used already, or is too old", hint=hint)


_WORDS = {
    SETUP: ("setup code", "the server prints a fresh one at each start until there is an administrator"),
    INVITATION: ("invitation", "ask whoever invited you for a new one"),
    RESET: ("code for a new password", "ask an administrator for a new one"),
}
