"""Browsers that are signed in. A session is a row: it can be listed, ended, and outlives a restart of the server.

The cookie holds 256 bits of chance and nothing else; the database holds their hash. Each sign-in makes a new session,
so a cookie that somebody planted beforehand never becomes one that is signed in.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import BrowserSession
from diamond.core.enrolment import token_hash
from diamond.core.errors import NotFound, Unauthenticated
from diamond.core.ids import is_id, new_id
from diamond.server.services import audit
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.store.identity_models import SessionRow
from diamond.server.store.models import UserRow

SIGNED_OUT = "you are not signed in"
LIFETIME_S = 14 * 86_400.0
IDLE_S = 3 * 86_400.0
_NOTE_USE_EVERY_S = 60.0


def begin(
    ctx: Context, session: Session, user: UserRow, *, method: str, address: str, browser: str, replaces: str = ""
) -> str:
    """Sign the user in; the value of the cookie. `replaces`: the cookie the browser had, which ends."""
    now = ctx.clock()
    if replaces:
        _end(session, SessionRow.hash == token_hash(replaces), now)
    value = secrets.token_urlsafe(32)
    row = SessionRow(
        id=new_id("ses"), hash=token_hash(value), user_id=user.id, method=method, address=address[:100],
        browser=browser[:300], created_at=now, used_at=now, expires_at=now + LIFETIME_S,
    )  # fmt: skip
    session.add(row)
    session.flush()
    _make_room(session, user.id, now, ctx.allowances.sessions)
    user.seen_at = now
    audit.record(session, now, "session.began", row.id, user=user.name, method=method)
    return value


def _make_room(session: Session, user_id: str, now: float, most: int) -> None:
    """The newest `most` go on. Nobody is kept out by sessions that were left open somewhere."""
    live = sa.select(SessionRow.id).where(SessionRow.user_id == user_id, *_live_at(now))
    latest = live.order_by(SessionRow.used_at.desc(), SessionRow.id.desc())
    if too_many := session.scalars(latest.offset(most)).all():
        _end(session, SessionRow.id.in_(too_many), now)
        for session_id in too_many:
            audit.record(session, now, "session.ended", session_id, why="too many", setting="sessions_per_user")


def _live_at(now: float) -> tuple[sa.ColumnElement[bool], ...]:
    return SessionRow.ended_at.is_(None), SessionRow.expires_at > now, SessionRow.used_at > now - IDLE_S


def authenticate(ctx: Context, cookie: str) -> Identity:
    """Whose browser this is.

    Raises:
        Unauthenticated: nobody is signed in with it.
    """
    now = ctx.clock()
    with ctx.db.read() as session:
        row = session.scalars(sa.select(SessionRow).where(SessionRow.hash == token_hash(cookie))).one_or_none()
        if row is None or row.ended_at is not None or row.expires_at <= now or row.used_at + IDLE_S <= now:
            raise Unauthenticated(SIGNED_OUT, hint="sign in at /sign-in")
        user = session.get_one(UserRow, row.user_id)
        if user.disabled_at is not None:
            raise Unauthenticated("this account is closed", hint="ask an administrator of this installation")
    if now - row.used_at > _NOTE_USE_EVERY_S:
        with ctx.db.write() as session:
            session.execute(sa.update(SessionRow).where(SessionRow.id == row.id).values(used_at=now))
    return Identity(
        user_id=user.id, name=user.name, is_admin=user.is_admin, via=row.id, session_id=row.id, csrf=csrf_of(cookie),
        until=row.expires_at,
    )  # fmt: skip


def csrf_of(cookie: str) -> str:
    """What forms of this session must hold: from the cookie, so that it needs no place of its own; not leading back."""
    return hmac.new(cookie.encode(), b"diamond csrf", hashlib.sha256).hexdigest()


def list_sessions(ctx: Context, user_id: str, *, current: str = "") -> list[BrowserSession]:
    now = ctx.clock()
    with ctx.db.read() as session:
        query = (
            sa.select(SessionRow).where(SessionRow.user_id == user_id, *_live_at(now)).order_by(SessionRow.id.desc())
        )
        return [
            BrowserSession(
                id=row.id, method=row.method, address=row.address, browser=row.browser, created_at=row.created_at,
                used_at=row.used_at, expires_at=row.expires_at, current=row.id == current,
            )
            for row in session.scalars(query)
        ]  # fmt: skip


def end(ctx: Context, user_id: str, session_id: str) -> None:
    """Sign a browser out; its open streams end too.

    Raises:
        NotFound: the user has no such session.
    """
    with ctx.db.write() as session:
        query = sa.select(SessionRow).where(SessionRow.id == session_id, SessionRow.user_id == user_id)
        if not is_id(session_id, "ses") or session.scalars(query).one_or_none() is None:
            raise NotFound(f"you have no session {session_id[:60]!r}", hint="`diamond session ls` lists yours")
        if _end(session, SessionRow.id == session_id, ctx.clock()):
            audit.record(session, ctx.clock(), "session.ended", session_id)
    ctx.hub.notify("credentials")


def end_all(session: Session, user_id: str, now: float, *, but: str = "") -> int:
    """Sign the user out everywhere, but from one session. The caller notifies "credentials" after the commit."""
    return _end(session, sa.and_(SessionRow.user_id == user_id, SessionRow.id != but), now)


def _end(session: Session, which: sa.ColumnElement[bool], now: float) -> int:
    dying = sa.update(SessionRow).where(which, SessionRow.ended_at.is_(None)).values(ended_at=now)
    return len(session.execute(dying.returning(SessionRow.id)).all())
