"""Credentials: made once, shown once, kept as hashes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.enrolment import new_token, token_hash
from diamond.core.errors import Unauthenticated
from diamond.core.ids import new_id
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, TokenRow


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who is asking: a user, or the agent of an endpoint. Exactly one is set."""

    user_id: str | None = None
    endpoint_id: str | None = None


def hash_token(token: str) -> str:
    return token_hash(token)


def issue(session: Session, *, now: float, user_id: str | None = None, endpoint_id: str | None = None) -> str:
    """A new token; the caller hands it out and keeps no copy."""
    assert (user_id is None) != (endpoint_id is None)
    token = "dmdu_" + secrets.token_urlsafe(32) if user_id else new_token()
    session.add(
        TokenRow(id=new_id("tok"), hash=hash_token(token), user_id=user_id, endpoint_id=endpoint_id, created_at=now)
    )
    return token


def authenticate(ctx: Context, token: str) -> Identity:
    """Who holds this token.

    Raises:
        Unauthenticated: it is unknown or was revoked.
    """
    with ctx.db.read() as session:
        row = session.scalars(sa.select(TokenRow).where(TokenRow.hash == hash_token(token))).one_or_none()
        if row is not None and row.revoked_at is not None and row.endpoint_id is not None:
            endpoint = session.get(EndpointRow, row.endpoint_id)
            if endpoint is not None and endpoint.removed_at is not None:
                raise Unauthenticated(
                    "the endpoint this agent spoke for was removed",
                    hint="stop it (`diamond agent stop`); to use this machine again: `diamond endpoint create NAME`",
                )
            raise Unauthenticated(
                "this agent's token was revoked",
                hint="its jobs go on; to let it speak again, enrol it anew: `diamond endpoint enroll NAME`",
            )
        if row is None or row.revoked_at is not None:
            raise Unauthenticated(
                "this token is not valid here",
                hint="use the token in $DIAMOND_HOME/client.json, or set DIAMOND_TOKEN",
            )
        return Identity(user_id=row.user_id, endpoint_id=row.endpoint_id)
