"""What one person may have of what costs the server something: as many as the operator said, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from diamond.core.accounts import Scope
from diamond.core.enrolment import token_hash
from diamond.core.errors import Conflict, InvalidInput, RateLimited, Unauthenticated
from diamond.core.logins import LoginState, NewLogin, new_user_token
from diamond.server.services import logins, projects, sessions, tokens
from diamond.server.services.allowances import Allowances
from diamond.server.services.context import Context
from diamond.server.store.identity_models import AuditRow
from diamond.server.store.models import UserRow
from testing.context import Clock


def sign_in(ctx: Context, user_id: str) -> str:
    with ctx.db.write() as session:
        user = session.get_one(UserRow, user_id)
        return sessions.begin(ctx, session, user, method="password", address="192.0.2.7", browser="")


def test_one_session_too_many_ends_the_one_used_longest_ago(ctx: Context, user_id: str, clock: Clock) -> None:
    ctx = replace(ctx, allowances=Allowances(sessions=3))
    cookies = []
    for _ in range(3):
        cookies.append(sign_in(ctx, user_id))
        clock.advance(100)
    sessions.authenticate(ctx, cookies[0])  # the oldest, but in use
    cookies.append(sign_in(ctx, user_id))
    with pytest.raises(Unauthenticated):
        sessions.authenticate(ctx, cookies[1])
    for cookie in (cookies[0], *cookies[2:]):
        assert sessions.authenticate(ctx, cookie).user_id == user_id
    assert len(sessions.list_sessions(ctx, user_id)) == 3
    with ctx.db.read() as session:
        [ended] = session.scalars(sa.select(AuditRow).where(AuditRow.action == "session.ended")).all()
    assert "sessions_per_user" in str(ended.data)


def test_sessions_of_others_are_nobodys_room(ctx: Context, user_id: str, other_id: str) -> None:
    ctx = replace(ctx, allowances=Allowances(sessions=1))
    mine = sign_in(ctx, user_id)
    sign_in(ctx, other_id)
    assert sessions.authenticate(ctx, mine).user_id == user_id


def test_refusals_say_the_number_and_the_setting(ctx: Context, user_id: str) -> None:
    ctx = replace(ctx, allowances=Allowances(tokens=len(tokens.list_tokens(ctx, user_id)) + 1, projects=2))
    tokens.create(ctx, user_id, "one", (Scope.READ,), None, held=frozenset(Scope))
    with pytest.raises(InvalidInput, match="tokens already") as caught:
        tokens.create(ctx, user_id, "two", (Scope.READ,), None, held=frozenset(Scope))
    assert "DIAMOND_TOKENS_PER_USER" in caught.value.hint
    projects.create(ctx, user_id, "first")
    projects.create(ctx, user_id, "second")
    with pytest.raises(Conflict, match="you own 2 projects already") as refused:
        projects.create(ctx, user_id, "third")
    assert (refused.value.field, "DIAMOND_PROJECTS_PER_USER" in refused.value.hint) == ("name", True)
    projects.remove(ctx, user_id, "first")
    assert projects.create(ctx, user_id, "third").name == "third"


def test_logins_begun_and_cancelled_count_by_network(ctx: Context, user_id: str, clock: Clock) -> None:
    def begin(address: str) -> None:
        wanted = NewLogin(name="x", token_sha256=token_hash(new_user_token()), scopes=(Scope.READ,))
        started = logins.begin(ctx, wanted, lifetime_s=60.0, address=address, url="http://localhost")
        assert logins.poll(ctx, started.device_code, cancel=True).state is LoginState.REFUSED

    for number in range(logins.BEGUN_FROM_NETWORK.times):
        begin(f"2001:db8::{number:x}")  # whoever has one address of it has them all
    with pytest.raises(RateLimited, match="logins begun from this network"):
        begin("2001:db8::ffff")
    begin("2001:db8:0:1::1")
    clock.advance(logins.BEGUN_FROM_NETWORK.within_s)
    begin("2001:db8::ffff")
