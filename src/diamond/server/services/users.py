"""What administrators do with other people's accounts. They see nobody's objects by it.

There is always an administrator: the last one can neither be closed nor made an ordinary user.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import User
from diamond.core.errors import Conflict, NotFound
from diamond.core.states import TaskState
from diamond.server.services import accounts, audit, codes, form_keys, lifecycle, sessions, snapshots, tasks
from diamond.server.services.context import Context
from diamond.server.store.identity_models import CodeRow
from diamond.server.store.models import TaskRow, UserRow

RESET_VALID_S = 86_400.0
_MADE_ALREADY = "the link was shown then, and works: if nobody kept it, make another one below"


def list_users(ctx: Context) -> list[User]:
    """Everybody, by name."""
    with ctx.db.read() as session:
        return accounts.to_users(session, list(session.scalars(sa.select(UserRow).order_by(UserRow.name))))


def search(ctx: Context, words: str = "", *, offset: int = 0, limit: int = 50) -> tuple[list[User], int]:
    """A page of those whose name, full name or e-mail holds these words, by name; and how many there are in all."""
    query = sa.select(UserRow)
    if words:
        wanted = words if words.isprintable() else ""  # PostgreSQL would stumble over a NUL
        columns = (UserRow.name, UserRow.full_name, UserRow.email)
        query = query.where(sa.or_(*(column.icontains(wanted, autoescape=True) for column in columns)))
    page = query.order_by(UserRow.name).offset(offset).limit(limit)
    with ctx.db.read() as session:
        total = session.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()
        return accounts.to_users(session, list(session.scalars(page))), total


def get(ctx: Context, name: str) -> User:
    with ctx.db.read() as session:
        return accounts.to_user(session, _find(session, name))


def disable(ctx: Context, name: str) -> tuple[User, int]:
    """Close an account: sessions end, tokens die, live tasks are stopped; how many were. What they own stays.

    Raises:
        Conflict: it is the last administrator's.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = _locked(session, name)
        _keep_one(session, row)
        if row.disabled_at is None:
            row.disabled_at = now
            audit.record(session, now, "user.disabled", row.id, name=row.name)
        sessions.end_all(session, row.id, now)
        accounts.revoke_tokens(session, row.id, now)
        codes.void(session, codes.RESET, now, CodeRow.user_id == row.id)
        session.flush()
        user = accounts.to_user(session, row)
    ctx.hub.notify("credentials")
    # Only now: until the commit they could have launched another.
    return user, _stop_tasks(ctx, user.id)


def _stop_tasks(ctx: Context, user_id: str) -> int:
    """Ask for every live task of the user to be stopped. Their agents may go on speaking, or they could not."""
    live = [state.value for state in TaskState if not state.is_final]
    query = sa.select(TaskRow).where(TaskRow.owner_id == user_id, TaskRow.state.in_(live))
    topics: set[str] = set()
    with ctx.db.write() as session:
        snapshots.endpoints(session, lock=True)  # before tasks: the order in which every transaction takes its locks
        rows = session.scalars(query.order_by(TaskRow.id).with_for_update()).all()
        for row in rows:
            topics.update(tasks.cancel_row(ctx, session, row, by=lifecycle.as_administrator(row)))
    if topics:
        ctx.hub.notify(*topics)
    return len(rows)


def enable(ctx: Context, name: str) -> User:
    """Open a closed account again. Sessions and tokens it had stay dead."""
    now = ctx.clock()
    with ctx.db.write() as session:
        row = _locked(session, name)
        if row.disabled_at is not None:
            row.disabled_at = None
            audit.record(session, now, "user.enabled", row.id, name=row.name)
        session.flush()
        user = accounts.to_user(session, row)
    ctx.hub.notify("credentials")
    return user


def set_admin(ctx: Context, name: str, is_admin: bool) -> User:
    """Make somebody an administrator, or an ordinary user again.

    Raises:
        Conflict: nobody would be left, or the account is closed.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = _locked(session, name)
        if not is_admin:
            _keep_one(session, row)
        elif row.disabled_at is not None:
            raise Conflict(f"the account {name} is closed", hint=f"open it first: diamond user enable {name}")
        if row.is_admin != is_admin:
            row.is_admin = is_admin
            action = "user.made_administrator" if is_admin else "user.made_ordinary"
            audit.record(session, now, action, row.id, name=row.name)
        session.flush()
        user = accounts.to_user(session, row)
    ctx.hub.notify("credentials")
    return user


def reset(ctx: Context, by: str, name: str, *, revoke_tokens: bool = False, once: str = "") -> tuple[str, float]:
    """A code with which the user sets a new password, once; and until when. Earlier ones are void.

    Args:
        by: the administrator's id.
        revoke_tokens: when it is used, their tokens die as well as their sessions.
        once: key of the form that asks. Raises Conflict if that made one already.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        form_keys.check(session, by, once, _MADE_ALREADY)
        row = _locked(session, name)
        codes.void(session, codes.RESET, now, CodeRow.user_id == row.id)
        code = codes.make(
            session, codes.RESET, now=now, lifetime_s=RESET_VALID_S, user_id=row.id, created_by=by,
            data={"revoke_tokens": revoke_tokens},
        )  # fmt: skip
        form_keys.note(session, by, once, row.id, now, _MADE_ALREADY)
        audit.record(session, now, "user.reset_made", row.id, name=row.name, revoke_tokens=revoke_tokens)
    return code, now + RESET_VALID_S


def _find(session: Session, name: str) -> UserRow:
    row = None
    if name.isprintable():
        row = session.scalars(sa.select(UserRow).where(UserRow.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"there is no user {name[:60]!r}", hint="`diamond user ls` lists them", field="name")
    return row


def _locked(session: Session, name: str) -> UserRow:
    """The user's row, with those of all administrators: of two who depose each other, the second sees what the first
    did."""
    found = _find(session, name)
    query = sa.select(UserRow).where(sa.or_(UserRow.is_admin, UserRow.id == found.id)).order_by(UserRow.id)
    fresh = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    rows = {row.id: row for row in session.scalars(fresh)}
    return rows[found.id]


def _keep_one(session: Session, row: UserRow) -> None:
    others = sa.select(UserRow.id).where(UserRow.is_admin, UserRow.disabled_at.is_(None), UserRow.id != row.id)
    is_active = row.is_admin and row.disabled_at is None
    if is_active and session.scalars(others.limit(1)).one_or_none() is None:
        raise Conflict(
            f"{row.name} is the last administrator of this installation",
            hint="make somebody else one first: diamond user admin NAME",
        )
