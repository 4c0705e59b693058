"""The one user's browser is signed in without a password: by where it runs, or by a token pasted once."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from diamond.core.accounts import Scope
from diamond.core.errors import Unauthenticated
from diamond.server.services import bootstrap, loopback, sessions, tokens
from diamond.server.services.context import Context
from diamond.server.store.identity_models import AuditRow
from diamond.server.store.models import UserRow

FROM = {"address": "127.0.0.1", "browser": "test"}


def test_by_itself_and_the_session_before_ends(ctx: Context, user_id: str) -> None:
    first = loopback.begin(ctx, **FROM, replaces="")
    assert sessions.authenticate(ctx, first).user_id == user_id
    second = loopback.begin(ctx, **FROM, replaces=first)
    assert first != second and sessions.authenticate(ctx, second).user_id == user_id
    with pytest.raises(Unauthenticated):
        sessions.authenticate(ctx, first)
    with ctx.db.read() as session:
        row = session.scalars(sa.select(AuditRow).where(AuditRow.action == "session.began")).first()
        assert row is not None and (row.user_id, row.address) == (user_id, "127.0.0.1")


def test_there_must_be_a_user(ctx: Context) -> None:
    with pytest.raises(Unauthenticated, match="nobody to sign in as"):
        loopback.begin(ctx, **FROM, replaces="")


def test_a_closed_account_is_nobodys(ctx: Context, user_id: str) -> None:
    with ctx.db.write() as session:
        session.get_one(UserRow, user_id).disabled_at = ctx.clock()
    with pytest.raises(Unauthenticated):
        loopback.begin(ctx, **FROM, replaces="")


def test_a_token_that_may_do_less_makes_no_session(ctx: Context, user_id: str) -> None:
    for scopes in ((Scope.READ,), (Scope.READ, Scope.LAUNCH, Scope.AGENT)):
        less = tokens.create(ctx, user_id, "less", scopes, None, held=frozenset(Scope)).value
        with pytest.raises(Unauthenticated, match="may do less"):
            loopback.begin_by_token(ctx, less, **FROM, replaces="")
    agent = bootstrap.prepare(ctx, embedded="local").agent_token_file
    assert agent is not None
    with pytest.raises(Unauthenticated, match="may do less"):
        loopback.begin_by_token(ctx, agent.read_text(), **FROM, replaces="")
    whole = tokens.create(ctx, user_id, "whole", (Scope.ADMIN,), None, held=frozenset(Scope)).value
    cookie = loopback.begin_by_token(ctx, whole, **FROM, replaces="")
    assert sessions.authenticate(ctx, cookie).user_id == user_id
