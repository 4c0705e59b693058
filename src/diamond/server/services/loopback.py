"""Signing a browser in without accounts: there is one user, and the caller knows that it is theirs."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import Scope
from diamond.core.errors import Unauthenticated
from diamond.server.services import sessions, tokens
from diamond.server.services.context import Context
from diamond.server.store.acting import Actor, acting
from diamond.server.store.models import UserRow


def begin(ctx: Context, *, address: str, browser: str, replaces: str) -> str:
    """A session of the one user; the value of its cookie. Only for a server with one user.

    Raises:
        Unauthenticated: there is no user who could be signed in.
    """
    with ctx.db.write() as session:
        # Whom `bootstrap` takes for the one user.
        known = sa.select(UserRow).where(UserRow.disabled_at.is_(None)).order_by(UserRow.is_admin.desc(), UserRow.id)
        user = session.scalars(known.limit(1)).one_or_none()
        if user is None:
            raise Unauthenticated("there is nobody to sign in as", hint="start the server again: it makes its user")
        value = _begin(ctx, session, user, "loopback", address=address, browser=browser, replaces=replaces)
    _tell(ctx, replaces)
    return value


def begin_by_token(ctx: Context, token: str, *, address: str, browser: str, replaces: str) -> str:
    """A session of the user whose token this is.

    Raises:
        Unauthenticated: it is not valid, or may do less than a session may.
    """
    identity = tokens.authenticate(ctx, token, address)
    if identity.user_id is None or Scope.ADMIN not in identity.scopes:
        raise Unauthenticated(
            "this token may do less than somebody who is signed in",
            hint="use one with the scope `admin`: the one in client.json in the server's home has it",
        )
    with ctx.db.write() as session:
        user = session.get_one(UserRow, identity.user_id)
        value = _begin(ctx, session, user, "token", address=address, browser=browser, replaces=replaces)
    _tell(ctx, replaces)
    return value


def _begin(
    ctx: Context, session: Session, user: UserRow, method: str, *, address: str, browser: str, replaces: str
) -> str:
    with acting(Actor(user_id=user.id, name=user.name, address=address)):
        return sessions.begin(ctx, session, user, method=method, address=address, browser=browser, replaces=replaces)


def _tell(ctx: Context, replaced: str) -> None:
    if replaced:
        ctx.hub.notify("credentials")
