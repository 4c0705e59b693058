"""Forms that make something once: whoever sends one again, by reloading its answer, is told that it was done.

Each page has a random key in its form. What the form made is noted under it in the transaction that makes it, among the
codes that work once. Programs have `Idempotency-Key` where they need one, and tell nothing here.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from diamond.core.enrolment import token_hash
from diamond.core.errors import Conflict
from diamond.core.ids import new_id
from diamond.server.services.context import Context
from diamond.server.store.identity_models import CodeRow

FIELD = "once"
_KIND = "form"
_KEPT_S = 7 * 86_400.0  # nobody reloads an older page


def check(session: Session, user_id: str, key: str, hint: str) -> None:
    """Before anything is made.

    Raises:
        Conflict: about the field `FIELD`: a form with this key was done already.
    """
    if key and _made(session, user_id, key) is not None:
        raise _done(hint)


def note(session: Session, user_id: str, key: str, made: str, now: float, hint: str) -> None:
    """What the form made, if this transaction commits. Raises Conflict if another was faster."""
    if not key:
        return
    session.execute(sa.delete(CodeRow).where(CodeRow.kind == _KIND, CodeRow.expires_at < now))
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    row = insert(CodeRow).values(
        id=new_id("cod"), kind=_KIND, hash=_hash(user_id, key), created_by=user_id, data={"made": made},
        created_at=now, expires_at=now + _KEPT_S, used_at=now,
    )  # fmt: skip
    # On PostgreSQL the second waits here until the first has committed.
    if session.execute(row.on_conflict_do_nothing().returning(CodeRow.id)).scalar_one_or_none() is None:
        raise _done(hint)


def made_by(ctx: Context, user_id: str, key: str) -> str:
    """The id of what the form with this key made; "" if it made nothing."""
    with ctx.db.read() as session:
        return (_made(session, user_id, key) or "") if key else ""


def _made(session: Session, user_id: str, key: str) -> str | None:
    query = sa.select(CodeRow).where(CodeRow.kind == _KIND, CodeRow.hash == _hash(user_id, key))
    row = session.scalars(query).one_or_none()
    return None if row is None else str(row.data.get("made", ""))


def _hash(user_id: str, key: str) -> str:
    return token_hash(f"{_KIND} {user_id} {key}")


def _done(hint: str) -> Conflict:
    return Conflict("this was done already: the same form came a second time, and made nothing", hint=hint, field=FIELD)
