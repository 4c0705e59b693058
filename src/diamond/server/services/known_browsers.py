"""Browsers with which somebody has given their password rightly before.

Whoever guesses passwords is slowed, wherever they are, and the person whose account it is must not be kept out by
that. So a browser that once signed in keeps a random cookie, which gives no rights: wrong passwords that come with it
are counted by themselves. A new password forgets them all.
"""

from __future__ import annotations

import re
import secrets

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.enrolment import token_hash
from diamond.server.services import throttling
from diamond.server.store.identity_models import KnownBrowserRow, SessionRow

LIFETIME_S = 365 * 86_400.0
MAX_PER_USER = 20
_LOOKED_AT = 200  # of an account's latest sessions, for the networks it has come from
_VALUE = re.compile(r"[A-Za-z0-9_-]{43}")


def new_value() -> str:
    return secrets.token_urlsafe(32)


def is_value(value: str) -> bool:
    return _VALUE.fullmatch(value) is not None


def is_known(session: Session, user_id: str, value: str, now: float) -> bool:
    """Whether this account's password was given in this browser, within a year."""
    row = session.get(KnownBrowserRow, (user_id, token_hash(value))) if is_value(value) else None
    return row is not None and row.used_at > now - LIFETIME_S


def note(session: Session, user_id: str, value: str, now: float) -> None:
    """The password was right in this browser. The account's row must be locked."""
    if not is_value(value):
        return
    session.merge(KnownBrowserRow(user_id=user_id, hash=token_hash(value), used_at=now))
    session.flush()
    latest = sa.select(KnownBrowserRow.hash).where(KnownBrowserRow.user_id == user_id)
    kept = session.scalars(latest.order_by(KnownBrowserRow.used_at.desc()).limit(MAX_PER_USER)).all()
    session.execute(
        sa.delete(KnownBrowserRow).where(KnownBrowserRow.user_id == user_id, KnownBrowserRow.hash.not_in(kept))
    )


def forget(session: Session, user_id: str) -> None:
    session.execute(sa.delete(KnownBrowserRow).where(KnownBrowserRow.user_id == user_id))


def has_come_from(session: Session, user_id: str, network: str) -> bool:
    """Whether the account has lately signed in from this network, by whatever way."""
    query = sa.select(SessionRow.address).where(SessionRow.user_id == user_id)
    addresses = session.scalars(query.order_by(SessionRow.created_at.desc()).limit(_LOOKED_AT))
    return any(throttling.network_of(address) == network for address in addresses)
