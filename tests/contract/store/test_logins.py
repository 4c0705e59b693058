"""`diamond login` and tokens in the store: approved once, by one person, for no more than that person may do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from diamond.core.accounts import Scope
from diamond.core.enrolment import token_hash
from diamond.core.errors import (
    Conflict,
    DiamondError,
    Forbidden,
    InvalidInput,
    NotFound,
    RateLimited,
    Unauthenticated,
)
from diamond.core.logins import INTERVAL_S, VALID_S, LoginState, NewLogin, StartedLogin, new_user_token, plain_user_code
from diamond.server.services import logins, tokens
from diamond.server.services.allowances import Allowances
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.store.identity_models import AuditRow, LoginRow
from diamond.server.store.models import TokenRow, UserRow
from testing.context import Clock

LIFETIME_S = 90 * 86_400.0
FULL = frozenset(Scope)


def begin(ctx: Context, *scopes: Scope, token: str = "", address: str = "192.0.2.7") -> tuple[StartedLogin, str]:
    token = token or new_user_token()
    wanted = NewLogin(
        name="diamond login on laptop", token_sha256=token_hash(token), scopes=scopes or (Scope.READ, Scope.LAUNCH)
    )
    started = logins.begin(ctx, wanted, lifetime_s=LIFETIME_S, address=address, url="https://diamond.example.org/")
    return started, token


def who(user_id: str, scopes: frozenset[Scope] = FULL) -> Identity:
    return Identity(user_id=user_id, name="alice", scopes=scopes, via="ses_000000001")


def state(ctx: Context, clock: Clock, started: StartedLogin) -> LoginState:
    clock.advance(2)
    return logins.poll(ctx, started.device_code).state


def test_the_token_works_from_the_approval_on_and_every_question_may_be_repeated(
    ctx: Context, user_id: str, clock: Clock
) -> None:
    started, token = begin(ctx)
    assert started.verification_url == "https://diamond.example.org/device"
    assert len(plain_user_code(started.user_code)) == 8
    assert state(ctx, clock, started) is LoginState.PENDING
    with pytest.raises(Unauthenticated):
        tokens.authenticate(ctx, token)
    seen = logins.find(ctx, who(user_id), started.user_code.lower().replace("-", " "))
    assert (seen.name, seen.address, seen.scopes) == (
        "diamond login on laptop", "192.0.2.7", (Scope.READ, Scope.LAUNCH),
    )  # fmt: skip
    logins.approve(ctx, who(user_id), started.user_code)
    identity = tokens.authenticate(ctx, token)
    assert (identity.user_id, identity.scopes) == (user_id, {Scope.READ, Scope.LAUNCH})
    for _ in range(3):
        clock.advance(2)
        answer = logins.poll(ctx, started.device_code)
        assert (answer.state, answer.scopes) == (LoginState.APPROVED, (Scope.READ, Scope.LAUNCH))
        assert answer.token_id == identity.via
    (listed,) = [one for one in tokens.list_tokens(ctx, user_id, current=identity.via) if one.current]
    assert (listed.name, listed.expires_at) == ("diamond login on laptop", answer.token_expires_at)


def test_nothing_stored_lets_anybody_in(ctx: Context, user_id: str) -> None:
    started, token = begin(ctx)
    logins.approve(ctx, who(user_id), started.user_code)
    with ctx.db.read() as session:
        rows = [*session.scalars(sa.select(LoginRow)), *session.scalars(sa.select(TokenRow))]
        rows += session.scalars(sa.select(AuditRow))
        kept = repr([{key: value for key, value in vars(row).items() if key[0] != "_"} for row in rows])
    for secret in (token, started.device_code, started.user_code, plain_user_code(started.user_code)):
        assert secret not in kept
    assert "login.approved" in kept


@pytest.mark.parametrize("decide", [logins.approve, logins.refuse])
def test_of_many_decisions_at_once_one_counts(
    ctx: Context, user_id: str, other_id: str, clock: Clock, decide: Callable[..., object]
) -> None:
    for _ in range(4):
        started, token = begin(ctx)

        def attempt(call: tuple[Callable[..., object], str], code: str = started.user_code) -> str:
            try:
                call[0](ctx, who(call[1]), code)
            except Conflict:
                return ""
            return call[1]

        calls = [(decide, user_id), (logins.approve, other_id), (decide, user_id), (logins.approve, other_id)]
        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(attempt, calls))
        with ctx.db.read() as session:
            holders = list(session.scalars(sa.select(TokenRow.user_id).where(TokenRow.hash == token_hash(token))))
        assert len(holders) <= 1
        if holders:  # whoever approved may repeat it, and nobody else
            assert set(answers) == {holders[0], ""}
            assert tokens.authenticate(ctx, token).user_id == holders[0]
        else:
            assert decide is logins.refuse
            assert state(ctx, clock, started) is LoginState.REFUSED


def test_refused_cancelled_and_expired_ones_never_become_tokens(ctx: Context, user_id: str, clock: Clock) -> None:
    refused, first = begin(ctx)
    logins.refuse(ctx, who(user_id), refused.user_code)
    logins.refuse(ctx, who(user_id), refused.user_code)  # harmless
    assert state(ctx, clock, refused) is LoginState.REFUSED
    cancelled, second = begin(ctx)
    assert logins.poll(ctx, cancelled.device_code, cancel=True).state is LoginState.REFUSED
    expired, third = begin(ctx)
    clock.advance(VALID_S)
    assert state(ctx, clock, expired) is LoginState.EXPIRED
    for started in (refused, cancelled, expired):
        with pytest.raises((Conflict, NotFound)):
            logins.approve(ctx, who(user_id), started.user_code)
    for token in (first, second, third):
        with pytest.raises(Unauthenticated):
            tokens.authenticate(ctx, token)
    clock.advance(86_400)
    begin(ctx)  # sweeps what is long over
    with pytest.raises(NotFound):
        logins.poll(ctx, expired.device_code)


def test_cancelling_takes_nothing_back(ctx: Context, user_id: str) -> None:
    started, token = begin(ctx)
    logins.approve(ctx, who(user_id), started.user_code)
    assert logins.poll(ctx, started.device_code, cancel=True).state is LoginState.APPROVED
    assert tokens.authenticate(ctx, token).user_id == user_id
    with pytest.raises(Conflict, match="approved already"):
        logins.refuse(ctx, who(user_id), started.user_code)


def test_nobody_gives_more_than_they_hold(ctx: Context, user_id: str) -> None:
    started, token = begin(ctx, Scope.ADMIN)
    with pytest.raises(Forbidden, match="admin"):
        logins.approve(ctx, who(user_id, frozenset({Scope.READ, Scope.LAUNCH})), started.user_code)
    with pytest.raises(Unauthenticated):
        tokens.authenticate(ctx, token)
    logins.approve(ctx, who(user_id), started.user_code)  # it still waits for somebody who may
    assert tokens.authenticate(ctx, token).scopes == FULL


def test_a_known_token_and_a_closed_account_get_nothing(ctx: Context, user_id: str, other_id: str) -> None:
    first, token = begin(ctx)
    logins.approve(ctx, who(user_id), first.user_code)
    again, _ = begin(ctx, token=token)
    with pytest.raises(Conflict, match="known"):
        logins.approve(ctx, who(other_id), again.user_code)
    assert tokens.authenticate(ctx, token).user_id == user_id
    with ctx.db.write() as session:
        session.get_one(UserRow, other_id).disabled_at = ctx.clock()
    third, _ = begin(ctx)
    with pytest.raises(Forbidden, match="closed"):
        logins.approve(ctx, who(other_id), third.user_code)


def test_asking_too_often_and_guessing_are_slowed_down(ctx: Context, user_id: str, other_id: str, clock: Clock) -> None:
    started, _ = begin(ctx)
    logins.poll(ctx, started.device_code)
    with pytest.raises(RateLimited, match="too often"):
        logins.poll(ctx, started.device_code)
    assert state(ctx, clock, started) is LoginState.PENDING
    for _ in range(logins.WRONG_CODES.times):
        with pytest.raises(NotFound):
            logins.find(ctx, who(user_id), "0000-0000")
    for call in (logins.find, logins.approve, logins.refuse):
        with pytest.raises(RateLimited, match="wrong codes"):
            call(ctx, who(user_id), started.user_code)
    assert logins.find(ctx, who(other_id), started.user_code).state is LoginState.PENDING
    clock.advance(logins.WRONG_CODES.within_s)
    assert logins.find(ctx, who(user_id), started.user_code).state is LoginState.PENDING


def _begun(ctx: Context, **where: str) -> StartedLogin:
    return begin(ctx, **where)[0]


def _waits(ctx: Context, started: StartedLogin) -> bool:
    try:
        return logins.poll(ctx, started.device_code).state is LoginState.PENDING
    except NotFound:
        return False


def test_one_network_cannot_fill_the_waiting_room(
    ctx: Context, user_id: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred logins of nobody block neither their own address nor others: the oldest go."""
    monkeypatch.setattr(logins, "MAX_WAITING_PER_NETWORK", 3)
    elsewhere = _begun(ctx, address="198.51.100.1")
    first = [_begun(ctx, address=f"2001:db8::{number:x}") for number in range(3)]  # whoever has one of it has them all
    clock.advance(1)
    mine = _begun(ctx, address="2001:db8::ffff")
    assert [_waits(ctx, one) for one in (*first, mine, elsewhere)].count(True) == 4
    assert logins.approve(ctx, who(user_id), mine.user_code).state is LoginState.APPROVED
    clock.advance(10)
    for number in range(3):  # what was decided takes nobody's room, and is not dropped
        _begun(ctx, address=f"2001:db8::a{number:x}")
    assert logins.poll(ctx, mine.device_code).state is LoginState.APPROVED


def test_terminals_that_ask_no_more_go_first(ctx: Context, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_WAITING_PER_NETWORK", 4)
    mine = _begun(ctx)
    silent = [_begun(ctx) for _ in range(3)]
    for _ in range(6):
        clock.advance(INTERVAL_S)
        assert _waits(ctx, mine)
    flood = [_begun(ctx) for _ in range(3)]
    assert [_waits(ctx, one) for one in silent] == [False] * 3
    clock.advance(INTERVAL_S)
    assert [_waits(ctx, one) for one in (mine, *flood)] == [True] * 4, "the oldest of all, but its terminal asks"


def test_all_networks_together_cannot_fill_it_either(
    ctx: Context, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "MAX_WAITING", 4)
    started = []
    for number in range(6):
        clock.advance(1)
        started.append(_begun(ctx, address=f"198.51.100.{number}"))
    assert [_waits(ctx, one) for one in started] == [False, False, True, True, True, True]


def test_a_flood_ends_with_its_minute(ctx: Context, clock: Clock) -> None:
    for _ in range(logins.BEGUN_FROM_NETWORK.times):
        _begun(ctx)
    with pytest.raises(RateLimited, match="logins begun from this network"):
        _begun(ctx)
    _begun(ctx, address="198.51.100.1")
    clock.advance(60)
    assert _waits(ctx, _begun(ctx))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": " "}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"token_sha256": "abc"}, "token_sha256"),
        ({"token_sha256": "A" * 64}, "token_sha256"),
        ({"scopes": ()}, "scopes"),
    ],
)
def test_nonsense_is_refused_by_name(ctx: Context, change: dict[str, object], field: str) -> None:
    wanted = NewLogin(**{"name": "x", "token_sha256": "0" * 64, **change})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput) as caught:
        logins.begin(ctx, wanted, lifetime_s=1.0, address="", url="http://x")
    assert caught.value.field == field


def test_tokens_expire_show_their_use_and_are_counted(
    ctx: Context, user_id: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tokens.create(ctx, user_id, "cron", (Scope.READ,), 3600.0, held=FULL)
    assert made.value
    before = {one.id: one for one in tokens.list_tokens(ctx, user_id)}[made.id]
    assert (before.used_at, before.value) == (None, "")
    tokens.authenticate(ctx, made.value, "192.0.2.9")
    after = {one.id: one for one in tokens.list_tokens(ctx, user_id)}[made.id]
    assert (after.used_at, after.used_from) == (clock.now, "192.0.2.9")
    clock.advance(3600)
    with pytest.raises(Unauthenticated, match="expired"):
        tokens.authenticate(ctx, made.value)
    assert made.id in {one.id for one in tokens.list_tokens(ctx, user_id)}  # so that one sees why
    clock.advance(31 * 86_400)
    assert made.id not in {one.id for one in tokens.list_tokens(ctx, user_id)}
    ctx = replace(ctx, allowances=Allowances(tokens=len(tokens.list_tokens(ctx, user_id)) + 1))
    tokens.create(ctx, user_id, "one more", (Scope.READ,), None, held=FULL)  # expired ones do not count
    with pytest.raises(InvalidInput, match="already"):
        tokens.create(ctx, user_id, "too many", (Scope.READ,), None, held=FULL)
    started, _ = begin(ctx)
    with pytest.raises(Conflict, match="already"):
        logins.approve(ctx, who(user_id), started.user_code)


def test_a_token_makes_none_that_may_do_more(ctx: Context, user_id: str) -> None:
    for wanted, held in (((Scope.ADMIN,), {Scope.READ, Scope.LAUNCH}), ((), FULL)):
        with pytest.raises(InvalidInput) as caught:
            tokens.create(ctx, user_id, "x", wanted, None, held=frozenset(held))
        assert caught.value.field == "scopes"
    for lifetime_s in (0.0, -1.0, 1e12):
        with pytest.raises(InvalidInput) as caught:
            tokens.create(ctx, user_id, "x", (Scope.READ,), lifetime_s, held=FULL)
        assert caught.value.field == "expires_in_s"


def test_revoking_is_for_ones_own_and_harmless_twice(ctx: Context, user_id: str, other_id: str) -> None:
    made = tokens.create(ctx, user_id, "x", (Scope.READ,), None, held=FULL)
    with pytest.raises(NotFound):
        tokens.revoke(ctx, other_id, made.id)
    for _ in range(2):
        assert tokens.revoke(ctx, user_id, made.id).revoked_at == ctx.clock()
    with pytest.raises(DiamondError, match="not valid"):
        tokens.authenticate(ctx, made.value)
    with ctx.db.read() as session:
        recorded = session.scalars(sa.select(AuditRow.action).where(AuditRow.object == made.id)).all()
    assert sorted(recorded) == ["token.created", "token.revoked"]
