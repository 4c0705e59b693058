"""`diamond login`: a terminal asks, somebody who is signed in approves, and the token the terminal made begins to work.

A login is a row with two hashed codes: the terminal's own, by which it asks how things stand, and the short one that
people type. The token is accepted in the transaction that approves, once; every question may be repeated.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import Scope, all_of
from diamond.core.enrolment import token_hash
from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound, RateLimited, Unauthenticated
from diamond.core.ids import new_id
from diamond.core.logins import (
    DEVICE_PATH,
    INTERVAL_S,
    VALID_S,
    Login,
    LoginAnswer,
    LoginState,
    NewLogin,
    StartedLogin,
    new_user_code,
    plain_user_code,
)
from diamond.server.services import audit, throttling, tokens
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.store.identity_models import LoginRow
from diamond.server.store.models import TokenRow, UserRow

MAX_WAITING = 10_000
MAX_WAITING_PER_NETWORK = 100  # a login node is one address for all its users
# Whatever became of them: one that was cancelled at once has cost a row and two codes all the same. Within so short a
# time that a flood from behind the same address keeps nobody out for long.
BEGUN_FROM_NETWORK = throttling.Limit(what="logins begun from this network", times=120, within_s=60.0)
WRONG_CODES = throttling.Limit(what="wrong codes", times=20, within_s=60.0)
_KEEP_S = 86_400.0
_KEEP_UNAPPROVED_S = 3600.0
_SILENT_S = 4 * INTERVAL_S  # a terminal that has not asked for so long is not waiting any more
_HASH = re.compile(r"[0-9a-f]{64}")


def begin(ctx: Context, wanted: NewLogin, *, lifetime_s: float, address: str, url: str) -> StartedLogin:
    """Somebody at a terminal wants to act for a user nobody knows yet.

    Args:
        lifetime_s: how long the token shall work once it is approved.
        address: where the terminal is, as the one who approves will see it.
        url: address of this server, as browsers reach it.

    Raises:
        InvalidInput: a field cannot be accepted.
        RateLimited: too many were begun from there in the last minute.
    """
    name = wanted.name.strip()
    if not name or len(name) > tokens.MAX_NAME or not name.isprintable():
        raise InvalidInput(f"must be 1 to {tokens.MAX_NAME} printable characters", field="name")
    if not _HASH.fullmatch(wanted.token_sha256):
        raise InvalidInput("must be 64 lower-case hex digits: the SHA-256 of a token", field="token_sha256")
    if not wanted.scopes:
        raise InvalidInput(f"must be a list of {', '.join(Scope)}", field="scopes")
    now = ctx.clock()
    network = throttling.network_of(address[:100])
    ctx.throttle.count(now, (BEGUN_FROM_NETWORK, network))
    device_code, user_code = secrets.token_urlsafe(32), new_user_code()
    with ctx.db.write() as session:
        is_old = sa.and_(LoginRow.expires_at < now - _KEEP_UNAPPROVED_S, LoginRow.user_id.is_(None))
        session.execute(sa.delete(LoginRow).where(sa.or_(LoginRow.expires_at < now - _KEEP_S, is_old)))
        _make_room(session, now, MAX_WAITING_PER_NETWORK, LoginRow.network == network)
        _make_room(session, now, MAX_WAITING)
        session.add(
            LoginRow(
                id=new_id("lgn"), device_hash=token_hash(device_code),
                user_code_hash=token_hash(plain_user_code(user_code)), token_hash=wanted.token_sha256,
                scopes=[scope for scope in Scope if scope in wanted.scopes], name=name, lifetime_s=lifetime_s,
                address=address[:100], network=network, created_at=now, expires_at=now + VALID_S,
            )
        )  # fmt: skip
    return StartedLogin(
        device_code=device_code, user_code=user_code, verification_url=url.rstrip("/") + DEVICE_PATH,
        expires_in_s=VALID_S, interval_s=INTERVAL_S,
    )  # fmt: skip


def _make_room(session: Session, now: float, most: int, *which: sa.ColumnElement[bool]) -> None:
    """Anybody may begin a login, so nobody may begin so many that others cannot: one too many takes another's place.

    First of those whose terminals have stopped asking, then of the oldest.
    """
    waiting = (LoginRow.expires_at > now, LoginRow.decided_at.is_(None), *which)
    beyond = session.execute(sa.select(sa.func.count()).select_from(LoginRow).where(*waiting)).scalar_one() - most + 1
    if beyond > 0:
        asked_at = sa.func.coalesce(LoginRow.polled_at, LoginRow.created_at)
        is_silent = sa.case((asked_at < now - _SILENT_S, 0), else_=1)
        least = sa.select(LoginRow.id).where(*waiting).order_by(is_silent, LoginRow.created_at, LoginRow.id)
        gone = session.scalars(least.limit(beyond)).all()
        session.execute(sa.delete(LoginRow).where(LoginRow.id.in_(gone), LoginRow.decided_at.is_(None)))


def poll(ctx: Context, device_code: str, *, cancel: bool = False) -> LoginAnswer:
    """How the terminal's login stands. With `cancel` it is over, unless somebody has decided already.

    Raises:
        NotFound: there is no such login, or not any more.
        RateLimited: asked too often.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        query = sa.select(LoginRow).where(LoginRow.device_hash == token_hash(device_code)).with_for_update()
        row = session.scalars(query).one_or_none()
        if row is None:
            raise NotFound("there is no such login", hint="start again: diamond login")
        if row.polled_at is not None and 0 <= now - row.polled_at < INTERVAL_S / 2 and not cancel:
            raise RateLimited("asked too often", hint=f"ask every {INTERVAL_S:.0f} seconds")
        row.polled_at = now
        state = _state(row, now)
        if cancel and state is LoginState.PENDING:
            row.decided_at, state = now, LoginState.REFUSED
        if state is not LoginState.APPROVED:
            return LoginAnswer(state=state)
        row.used_at = row.used_at or now
        user = session.get_one(UserRow, row.user_id)
        token = session.scalars(sa.select(TokenRow).where(TokenRow.hash == row.token_hash)).one()
        return LoginAnswer(
            state=state, user=user.name, token_id=token.id, scopes=_scopes(row), token_expires_at=token.expires_at
        )


def find(ctx: Context, identity: Identity, user_code: str) -> Login:
    """What asks, for whoever is about to decide.

    Raises:
        NotFound: no login waits under this code.
        RateLimited: this user has given too many wrong ones.
    """
    now = ctx.clock()
    with _guessing(ctx, identity), ctx.db.read() as session:
        return _view(_by_user_code(session, user_code, now, lock=False), now)


def approve(ctx: Context, identity: Identity, user_code: str) -> Login:
    """From now on the terminal's token acts for the one who approves. Approving one's own approval again is harmless.

    Raises:
        NotFound: no login waits under this code.
        Conflict: it was decided otherwise.
        Forbidden: it asks for more than the credential of the one who approves may do.
    """
    assert identity.user_id is not None
    now = ctx.clock()
    with _guessing(ctx, identity), ctx.db.write() as session:
        row = _by_user_code(session, user_code, now, lock=True)
        if row.decided_at is not None:
            if row.user_id != identity.user_id:
                raise Conflict("this login was decided already", hint="start another in the terminal: diamond login")
            return _view(row, now)
        scopes = _scopes(row)
        if beyond := all_of(scopes) - identity.scopes:
            raise Forbidden(
                f"it asks for {', '.join(sorted(beyond))}, which your own credential may not do",
                hint="sign in for one that may, or have it ask for less: diamond login --scopes …",
            )
        expires_at = now + row.lifetime_s
        token = tokens.accept(
            ctx, session, user_id=identity.user_id, sha256=row.token_hash, name=row.name, scopes=scopes,
            expires_at=expires_at,
        )  # fmt: skip
        row.decided_at, row.user_id = now, identity.user_id
        audit.record(
            session, now, "login.approved", token.id, name=row.name, scopes=scopes, expires_at=expires_at,
            asked_from=row.address,
        )  # fmt: skip
        return _view(row, now)


def refuse(ctx: Context, identity: Identity, user_code: str) -> Login:
    """The terminal is told no. Refusing twice is harmless.

    Raises:
        NotFound: no login waits under this code.
        Conflict: it was approved already; its token can be revoked.
    """
    now = ctx.clock()
    with _guessing(ctx, identity), ctx.db.write() as session:
        row = _by_user_code(session, user_code, now, lock=True)
        if row.user_id is not None:
            raise Conflict("this login was approved already", hint="revoke its token: diamond token ls")
        if row.decided_at is None:
            row.decided_at = now
            audit.record(session, now, "login.refused", row.id, name=row.name, asked_from=row.address)
        return _view(row, now)


@contextmanager
def _guessing(ctx: Context, identity: Identity) -> Iterator[None]:
    """Wrong codes count against the user who gives them."""
    try:
        with ctx.throttle.trying(ctx.clock(), (WRONG_CODES, identity.user_id or "")):
            yield
    except Unauthenticated as error:  # who asks is known; it is the code that is not
        raise NotFound(error.message, hint=error.hint, field="user_code") from None


def _by_user_code(session: Session, user_code: str, now: float, *, lock: bool) -> LoginRow:
    plain = plain_user_code(user_code)
    query = sa.select(LoginRow).where(LoginRow.user_code_hash == token_hash(plain), LoginRow.expires_at > now)
    row = session.scalars(query.with_for_update() if lock else query).one_or_none() if plain else None
    if row is None:
        raise Unauthenticated(
            "no login waits under this code",
            hint="check every letter; codes work for a quarter of an hour, then: diamond login",
        )
    return row


def _scopes(row: LoginRow) -> tuple[Scope, ...]:
    return tuple(Scope(scope) for scope in row.scopes)


def _state(row: LoginRow, now: float) -> LoginState:
    if row.user_id is not None:
        return LoginState.APPROVED
    if row.decided_at is not None:
        return LoginState.REFUSED
    return LoginState.EXPIRED if row.expires_at <= now else LoginState.PENDING


def _view(row: LoginRow, now: float) -> Login:
    return Login(
        name=row.name, address=row.address, scopes=_scopes(row), created_at=row.created_at, expires_at=row.expires_at,
        token_lifetime_s=row.lifetime_s, state=_state(row, now),
    )  # fmt: skip
