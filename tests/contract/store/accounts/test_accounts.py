"""Accounts, invitations, one-time codes and administrators, on both databases, also when two come at once."""

from __future__ import annotations

import dataclasses

import pytest
import sqlalchemy as sa

from diamond.core.accounts import User
from diamond.core.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    RateLimited,
    Unauthenticated,
)
from diamond.core.ids import new_id
from diamond.core.states import TaskState
from diamond.server.identity_file import IdentityConfig
from diamond.server.identity_providers import IdentityProviders
from diamond.server.services import (
    accounts,
    bootstrap,
    invitations,
    known_browsers,
    passwords,
    sessions,
    tasks,
    throttling,
    tokens,
    users,
)
from diamond.server.services.context import Context
from diamond.server.store.identity_models import AuditRow, IdentityRow, MemberRow, ProjectRow, SessionRow
from diamond.server.store.models import UserRow
from testing.context import Clock
from testing.people import PASSWORD
from testing.races import at_once

FROM = {"address": "192.0.2.7", "browser": "a browser"}
OTHER_PASSWORD = "a quite different long one"


def actions(ctx: Context) -> list[str]:
    with ctx.db.read() as session:
        return list(session.scalars(sa.select(AuditRow.action).order_by(AuditRow.seq)))


def live_sessions(ctx: Context, user: User) -> int:
    return len(sessions.list_sessions(ctx, user.id))


def test_a_new_account_has_a_project_of_its_own(ctx: Context, bob: User) -> None:
    assert (bob.name, bob.full_name, bob.is_admin, bob.has_password) == ("bob", "Bob B.", False, True)
    with ctx.db.read() as session:
        project = session.scalars(sa.select(ProjectRow).where(ProjectRow.personal_of == bob.id)).one()
        member = session.scalars(sa.select(MemberRow).where(MemberRow.project_id == project.id)).one()
        stored = session.get_one(UserRow, bob.id).password_hash
    assert (project.name, member.user_id, member.role) == ("bob", bob.id, "owner")
    assert stored is not None
    assert stored.startswith("$argon2id$")
    assert "user.created" in actions(ctx)


def test_names_are_taken_once_by_users_and_projects(ctx: Context, bob: User, shared: str) -> None:
    for name in ("bob", shared):
        with pytest.raises(Conflict, match="taken") as caught:
            accounts.create(ctx, name=name, password=PASSWORD)
        assert caught.value.field == "name"
    for name in ("", "Bob", "-x", "a b", "x" * 40, "é", "a/b", "a\x00"):
        with pytest.raises(InvalidInput, match="user name"):
            accounts.create(ctx, name=name, password=PASSWORD)
    first, second = at_once(*[lambda: accounts.create(ctx, name="carol", password=PASSWORD)] * 2)
    assert sorted(type(each).__name__ for each in (first, second)) == ["Conflict", "User"]


def test_fields_are_checked(ctx: Context, bob: User) -> None:
    changed = accounts.change(ctx, bob.id, full_name=" Robert  B. ", email="r@example.org")
    assert (changed.full_name, changed.email) == ("Robert B.", "r@example.org")
    assert accounts.change(ctx, bob.id, email="").full_name == "Robert B."
    for bad in ("no address", "a@b@c", "x@y\nBcc: z@z", "a,b@c.de", "x" * 250 + "@a.de"):
        with pytest.raises(InvalidInput) as caught:
            accounts.change(ctx, bob.id, email=bad)
        assert caught.value.field == "email"
    with pytest.raises(InvalidInput):
        accounts.change(ctx, bob.id, full_name="x\x1b[2J")
    assert actions(ctx).count("user.changed") == 2


def test_signing_in_and_being_refused(ctx: Context, bob: User) -> None:
    cookie = accounts.sign_in(ctx, "bob", PASSWORD, **FROM)
    assert sessions.authenticate(ctx, cookie).user_id == bob.id
    again = accounts.sign_in(ctx, " Bob ", PASSWORD, replaces=cookie, **FROM)
    with pytest.raises(Unauthenticated):
        sessions.authenticate(ctx, cookie)
    assert sessions.authenticate(ctx, again).name == "bob"
    accounts.create(ctx, name="carol")  # comes with an identity alone
    with ctx.db.write() as session:
        session.add(UserRow(id=new_id("usr"), name="closed", created_at=1.0, disabled_at=2.0, password_hash=None))
    users.disable(ctx, "closed")
    said = set()
    for name, password in (
        ("bob", "wrong"),
        ("nobody", PASSWORD),
        ("carol", ""),
        ("closed", PASSWORD),
        ("bob\x00", ""),
    ):
        with pytest.raises(Unauthenticated) as caught:
            accounts.sign_in(ctx, name, password, **FROM)
        said.add(str(caught.value))
    assert len(said) == 1
    assert actions(ctx).count("session.refused") == 5


def test_unknown_people_take_as_long(ctx: Context, bob: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number of hashes is computed, whoever it is that does not exist."""
    accounts.create(ctx, name="carol")
    counted: list[str] = []
    hasher = passwords._hasher()
    real = hasher.verify_and_update

    def counting(password: str, known: str) -> tuple[bool, str | None]:
        counted.append(known.split("$")[3])  # the cost parameters
        return real(password, known)

    monkeypatch.setattr(hasher, "verify_and_update", counting)
    for name in ("bob", "nobody", "carol"):
        with pytest.raises(Unauthenticated):
            accounts.sign_in(ctx, name, "wrong", **FROM)
    assert len(counted) == 3
    assert len(set(counted)) == 1


def guess(ctx: Context, address: str, *, times: int = 1, name: str = "bob", device: str = "") -> None:
    for _ in range(times):
        with pytest.raises(Unauthenticated):
            accounts.sign_in(ctx, name, "wrong", address=address, browser="", device=device)


def test_guessing_is_slowed_by_account_and_network(ctx: Context, bob: User, clock: Clock) -> None:
    limit = throttling.PASSWORDS_OF_ACCOUNT
    for number in range(limit.times):  # whoever has one address of IPv6 has its /64
        guess(ctx, f"2001:db8::{number:x}")
    with pytest.raises(RateLimited, match="this account"):
        accounts.sign_in(ctx, "Bob", PASSWORD, address="2001:db8::ffff", browser="")
    clock.advance(limit.within_s)
    accounts.sign_in(ctx, "bob", PASSWORD, address="2001:db8::ffff", browser="")
    hourly = throttling.PASSWORDS_OF_ACCOUNT_HOURLY
    for _ in range(hourly.times // limit.times - 1):
        guess(ctx, "2001:db8::1", times=limit.times)
        clock.advance(limit.within_s)
    with pytest.raises(RateLimited, match="in an hour"):
        accounts.sign_in(ctx, "bob", PASSWORD, address="2001:db8::1", browser="")


def test_guessing_names_is_slowed_by_network(ctx: Context, bob: User) -> None:
    for number in range(throttling.PASSWORDS_FROM_ADDRESS.times):
        guess(ctx, f"2001:db8::{number:x}", name=f"user{number}")
    with pytest.raises(RateLimited, match="this address"):
        accounts.sign_in(ctx, "bob", PASSWORD, address="2001:db8::ffff", browser="")
    accounts.sign_in(ctx, "bob", PASSWORD, address="2001:db8:0:1::1", browser="")


def test_a_stranger_elsewhere_keeps_nobody_out(ctx: Context, bob: User) -> None:
    """Bob has never been here before; somebody in another network has been wrong in his name as often as they may."""
    guess(ctx, "198.51.100.7", times=throttling.PASSWORDS_OF_ACCOUNT.times)
    with pytest.raises(RateLimited):
        accounts.sign_in(ctx, "bob", "wrong", address="198.51.100.7", browser="")
    assert accounts.sign_in(ctx, "bob", PASSWORD, **FROM)


def test_guesses_from_many_networks_are_slowed_and_keep_out_nobody_who_is_known(
    ctx: Context, bob: User, clock: Clock
) -> None:
    device = known_browsers.new_value()
    accounts.sign_in(ctx, "bob", PASSWORD, address="203.0.113.1", browser="", device=device)
    accounts.sign_in(ctx, "bob", PASSWORD, **FROM)
    limit = throttling.PASSWORDS_FROM_STRANGERS
    for number in range(limit.times):
        guess(ctx, f"2001:db8:{number:x}::1")
    for password in ("wrong", PASSWORD):  # the right one tells strangers nothing
        with pytest.raises(RateLimited, match="networks it has not signed in from"):
            accounts.sign_in(ctx, "bob", password, address="2001:db8:ffff::1", browser="")
    assert accounts.sign_in(ctx, "bob", PASSWORD, **FROM), "a network that Bob has come from"
    assert accounts.sign_in(ctx, "bob", PASSWORD, address="192.0.2.200", browser="", device=device), "his laptop"
    with pytest.raises(RateLimited):
        accounts.sign_in(ctx, "bob", PASSWORD, address="192.0.2.201", browser="", device=known_browsers.new_value())
    clock.advance(limit.within_s)
    assert accounts.sign_in(ctx, "bob", PASSWORD, address="192.0.2.201", browser="")


def test_somebody_in_the_same_network_keeps_no_known_browser_out(ctx: Context, bob: User) -> None:
    accounts.create(ctx, name="carol", password=PASSWORD)
    device = known_browsers.new_value()
    accounts.sign_in(ctx, "bob", PASSWORD, **FROM, device=device)
    guess(ctx, FROM["address"], times=throttling.PASSWORDS_OF_ACCOUNT.times)
    for number in range(throttling.PASSWORDS_FROM_ADDRESS.times - throttling.PASSWORDS_OF_ACCOUNT.times):
        guess(ctx, FROM["address"], name=f"user{number}")
    with pytest.raises(RateLimited):
        accounts.sign_in(ctx, "bob", PASSWORD, **FROM)
    assert accounts.sign_in(ctx, "bob", PASSWORD, **FROM, device=device)
    with pytest.raises(RateLimited):
        accounts.sign_in(ctx, "carol", PASSWORD, **FROM, device=device)  # it is known to Bob's account alone


def test_a_known_browser_may_not_guess_for_ever(ctx: Context, bob: User) -> None:
    device = known_browsers.new_value()
    accounts.sign_in(ctx, "bob", PASSWORD, **FROM, device=device)
    for number in range(throttling.PASSWORDS_OF_ACCOUNT.times):
        guess(ctx, f"198.51.100.{number}", device=device)
    with pytest.raises(RateLimited):
        accounts.sign_in(ctx, "bob", PASSWORD, **FROM, device=device)
    assert accounts.sign_in(ctx, "bob", PASSWORD, **FROM), "elsewhere its mistakes count for nothing"


def test_a_new_password_forgets_browsers_and_each_account_knows_but_a_few(
    ctx: Context, bob: User, clock: Clock
) -> None:
    devices = [known_browsers.new_value() for _ in range(known_browsers.MAX_PER_USER + 2)]
    for device in devices:
        clock.advance(1)
        accounts.sign_in(ctx, "bob", PASSWORD, **FROM, device=device)
    guess(ctx, FROM["address"], device="x" * 5000)

    def known() -> list[bool]:
        with ctx.db.read() as session:
            return [known_browsers.is_known(session, bob.id, device, ctx.clock()) for device in devices]

    assert known() == [False, False, *[True] * known_browsers.MAX_PER_USER]
    accounts.change_password(ctx, bob.id, PASSWORD, OTHER_PASSWORD)
    assert not any(known())


def test_identities_alone(ctx: Context, admin: User, bob: User) -> None:
    """Where the operator wants no passwords, the first administrator has one until they link an identity."""
    identities = dataclasses.replace(ctx, identity=IdentityProviders(IdentityConfig(local_accounts=False)))
    accounts.sign_in(identities, "alice", PASSWORD, **FROM)
    assert accounts.offers_passwords(identities)
    with pytest.raises(Unauthenticated):
        accounts.sign_in(identities, "bob", PASSWORD, **FROM)
    code, _ = users.reset(ctx, admin.id, "bob")
    with pytest.raises(Forbidden, match="no passwords"):
        accounts.use_reset(identities, code, OTHER_PASSWORD)
    with pytest.raises(Forbidden, match="no passwords"):
        accounts.accept_invitation(identities, invitations.invite(ctx, admin.id).code, name="carol", password=PASSWORD)
    with ctx.db.write() as session:
        session.add(
            IdentityRow(
                id=new_id("idn"), user_id=admin.id, issuer="https://issuer.example", subject="1", provider="p",
                label="alice", created_at=1.0,
            )
        )  # fmt: skip
    assert not accounts.offers_passwords(identities)
    with pytest.raises(Unauthenticated):
        accounts.sign_in(identities, "alice", PASSWORD, **FROM)


def test_many_guesses_at_once_get_no_further(ctx: Context, bob: User) -> None:
    limit = throttling.PASSWORDS_OF_ACCOUNT.times
    found = at_once(*[lambda: accounts.sign_in(ctx, "bob", "wrong", **FROM)] * (limit + 4))
    assert [type(each) for each in found].count(Unauthenticated) == limit


def test_a_better_hash_replaces_an_old_one(ctx: Context, bob: User) -> None:
    from pwdlib import PasswordHash
    from pwdlib.hashers.argon2 import Argon2Hasher

    weak = PasswordHash((Argon2Hasher(time_cost=1, memory_cost=512, parallelism=1),)).hash(PASSWORD)
    with ctx.db.write() as session:
        session.get_one(UserRow, bob.id).password_hash = weak
    accounts.sign_in(ctx, "bob", PASSWORD, **FROM)
    with ctx.db.read() as session:
        assert session.get_one(UserRow, bob.id).password_hash not in (None, weak)
    accounts.sign_in(ctx, "bob", PASSWORD, **FROM)


def test_changing_ones_password(ctx: Context, bob: User) -> None:
    mine = sessions.authenticate(ctx, accounts.sign_in(ctx, "bob", PASSWORD, **FROM))
    other = accounts.sign_in(ctx, "bob", PASSWORD, **FROM)
    token = accounts.first_token(ctx, bob, "mine")
    with pytest.raises(Forbidden) as caught:
        accounts.change_password(ctx, bob.id, "wrong", OTHER_PASSWORD)
    assert caught.value.field == "old_password"
    for bad in ("short", "x" * 300, "bobbobbob123", "passwordpassword", "aaaaaaaaaaaaaaa"):
        with pytest.raises(InvalidInput) as refused:
            accounts.change_password(ctx, bob.id, PASSWORD, bad)
        assert refused.value.field == "new_password"
    accounts.change_password(ctx, bob.id, PASSWORD, OTHER_PASSWORD, keep_session=mine.session_id)
    assert [each.id for each in sessions.list_sessions(ctx, bob.id)] == [mine.session_id]
    with pytest.raises(Unauthenticated):
        sessions.authenticate(ctx, other)
    accounts.sign_in(ctx, "bob", OTHER_PASSWORD, **FROM)
    assert tokens.authenticate(ctx, token).user_id == bob.id
    carol = accounts.create(ctx, name="carol")
    with pytest.raises(Conflict, match="no password"):
        accounts.change_password(ctx, carol.id, "", OTHER_PASSWORD)


def test_closing_an_account_ends_all_of_it(ctx: Context, admin: User, bob: User) -> None:
    cookie = accounts.sign_in(ctx, "bob", PASSWORD, **FROM)
    token = accounts.first_token(ctx, bob, "mine")
    reset, _ = users.reset(ctx, admin.id, "bob")
    launched = [tasks.create(ctx, bob.id, {"run": "sleep 1"})[0] for _ in range(2)]
    mine = tasks.create(ctx, admin.id, {"run": "sleep 1"})[0]
    user, stopped = users.disable(ctx, "bob")
    assert (user.disabled_at, stopped) == (ctx.clock(), 2)
    for task in launched:
        assert tasks.get(ctx, bob.id, task.id).state is TaskState.CANCELLED
    assert tasks.get(ctx, admin.id, mine.id).state is TaskState.PENDING
    for dead in (
        lambda: sessions.authenticate(ctx, cookie),
        lambda: tokens.authenticate(ctx, token),
        lambda: accounts.sign_in(ctx, "bob", PASSWORD, **FROM),
        lambda: accounts.use_reset(ctx, reset, OTHER_PASSWORD),
    ):
        with pytest.raises(Unauthenticated):
            dead()
    assert "credentials" in ctx.hub.topics  # type: ignore[attr-defined]
    assert users.disable(ctx, "bob") == (user, 0)
    assert users.enable(ctx, "bob").disabled_at is None
    with pytest.raises(Unauthenticated):
        tokens.authenticate(ctx, token)
    assert sessions.authenticate(ctx, accounts.sign_in(ctx, "bob", PASSWORD, **FROM)).name == "bob"
    found = actions(ctx)
    assert [found.count(action) for action in ("user.disabled", "user.enabled", "token.all_revoked")] == [1, 1, 1]


def test_there_is_always_an_administrator(ctx: Context, admin: User, bob: User) -> None:
    for change in (lambda: users.set_admin(ctx, "alice", False), lambda: users.disable(ctx, "alice")):
        with pytest.raises(Conflict, match="last administrator"):
            change()
    users.set_admin(ctx, "bob", True)
    found = at_once(lambda: users.set_admin(ctx, "alice", False), lambda: users.disable(ctx, "bob"))
    assert [isinstance(each, Conflict) for each in found].count(True) == 1
    active = [user for user in users.list_users(ctx) if user.is_admin and user.disabled_at is None]
    assert len(active) == 1
    closed = accounts.create(ctx, name="carol")
    users.disable(ctx, closed.name)
    with pytest.raises(Conflict, match="closed"):
        users.set_admin(ctx, "carol", True)


def test_the_first_administrator(ctx: Context, clock: Clock) -> None:
    old = bootstrap.prepare_multi_user(ctx)
    code = bootstrap.prepare_multi_user(ctx)
    assert accounts.setup_needed(ctx)
    with pytest.raises(Unauthenticated):
        accounts.setup(ctx, old, name="alice", password=PASSWORD)
    with pytest.raises(InvalidInput):
        accounts.setup(ctx, code, name="alice", password="short")
    clock.advance(86_400 * 365)
    found = at_once(*[lambda: accounts.setup(ctx, code, name="alice", password=PASSWORD, address="192.0.2.9")] * 2)
    assert sorted(type(each).__name__ for each in found) == ["Unauthenticated", "User"]
    (user,) = [each for each in found if isinstance(each, User)]
    assert user.is_admin
    assert not accounts.setup_needed(ctx)
    assert bootstrap.prepare_multi_user(ctx) == ""
    with pytest.raises(Unauthenticated):
        accounts.setup(ctx, code, name="mallory", password=PASSWORD)
    assert sessions.authenticate(ctx, accounts.sign_in(ctx, "alice", PASSWORD, **FROM)).is_admin


def test_from_one_user_to_many_and_back(ctx: Context, user_id: str) -> None:
    """Whoever was alone takes their account over, with all that is theirs."""
    alone = accounts.me(ctx, user_id)
    assert (alone.is_admin, alone.has_password) == (True, False)
    task = tasks.create(ctx, user_id, {"run": "true"})[0]
    code = bootstrap.prepare_multi_user(ctx)
    user = accounts.setup(ctx, code, name=alone.name, password=PASSWORD, full_name="Me")
    assert (user.id, user.full_name) == (user_id, "Me")
    assert tasks.get(ctx, user.id, task.id).id == task.id
    accounts.create(ctx, name="zoe", password=PASSWORD)
    token = bootstrap.prepare(ctx, embedded=None).user_token
    assert tokens.authenticate(ctx, token).user_id == user_id
    with ctx.db.read() as session:
        assert session.scalars(sa.select(SessionRow)).all() == []


def test_an_administrator_who_cannot_sign_in_is_none(ctx: Context, admin: User) -> None:
    assert not accounts.setup_needed(ctx)
    with ctx.db.write() as session:
        session.get_one(UserRow, admin.id).password_hash = None
    assert accounts.setup_needed(ctx)


@pytest.mark.parametrize(
    ("called", "name"), [("Jean-Luc P.@ACME", "jean-luc-p.-acme"), ("_apt", "apt"), ("用户", "user")]
)
def test_whoever_is_alone_gets_a_name_that_can_be_one(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, called: str, name: str
) -> None:
    monkeypatch.setenv("LOGNAME", called)
    token = bootstrap.prepare(ctx, embedded=None).user_token
    identity = tokens.authenticate(ctx, token)
    assert (identity.name, identity.is_admin) == (name, True)
    with ctx.db.read() as session:
        assert session.scalars(sa.select(ProjectRow.name)).all() == [name]
