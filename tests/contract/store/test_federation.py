"""Who comes in with an identity, whom an account is made for, which account an identity opens: on both databases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.errors import Conflict, NotFound, Unauthenticated
from diamond.server.identity_file import Allow, IdentityConfig, ProviderConfig
from diamond.server.identity_providers import IdentityProviders
from diamond.server.provider_link import Person, Refused
from diamond.server.services import accounts, federation, invitations, sessions, users
from diamond.server.services.context import Context
from diamond.server.services.federation import Ticket
from diamond.server.store.identity_models import AuditRow, CodeRow, IdentityRow, ProjectRow
from diamond.server.store.models import UserRow
from testing.context import Clock

OPEN = ProviderConfig(
    name="open", title="Open", issuer="https://open.example", client_id="d", allow=Allow(everybody=True),
    create_accounts=True,
)  # fmt: skip
KNOWN = replace(OPEN, name="known", title="Known", issuer="https://known.example", allow=Allow(), create_accounts=False)
ALICE = Person(issuer=OPEN.issuer, subject="a", label="alice@example.org", suggestions=("alice",))


@pytest.fixture(autouse=True)
def _configured(ctx: Context) -> None:
    config = IdentityConfig(providers=(OPEN, KNOWN))
    object.__setattr__(ctx, "identity", IdentityProviders(config))


def come_in(ctx: Context, person: Person = ALICE, config: ProviderConfig = OPEN, **more: str) -> str:
    """The id of whoever is signed in then."""
    cookie = federation.come_in(ctx, config, person, address="192.0.2.1", browser="b", **more)
    user_id = sessions.authenticate(ctx, cookie).user_id
    assert user_id
    return user_id


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as info:
        act()
    assert info.value.message
    assert info.value.hint
    return info.value.why


def count(ctx: Context, model: Any) -> int:
    with ctx.db.read() as session:
        return int(session.execute(sa.select(sa.func.count()).select_from(model)).scalar_one())


def test_an_account_with_a_project_of_its_own(ctx: Context) -> None:
    user_id = come_in(ctx, replace(ALICE, full_name="Alice A", email="alice@example.org"))
    user = accounts.me(ctx, user_id)
    assert (user.name, user.full_name, user.email, user.is_admin, user.has_password) == (
        "alice", "Alice A", "alice@example.org", False, False,
    )  # fmt: skip
    assert [(item.provider, item.label) for item in user.identities] == [("open", "alice@example.org")]
    with ctx.db.read() as session:
        assert session.scalars(sa.select(ProjectRow.personal_of)).all() == [user_id]
        actions = list(session.execute(sa.select(AuditRow.action, AuditRow.user_id).order_by(AuditRow.seq)))
    assert actions == [("user.created", user_id), ("identity.linked", user_id), ("session.began", user_id)]


def test_the_same_identity_is_the_same_user_whatever_else_changes(ctx: Context, clock: Clock) -> None:
    first = come_in(ctx)
    clock.advance(100)
    assert come_in(ctx, replace(ALICE, label="new@example.org", suggestions=("other",))) == first
    (identity,) = accounts.me(ctx, first).identities
    assert (identity.label, identity.used_at) == ("new@example.org", ctx.clock())
    assert come_in(ctx, replace(ALICE, subject="A")) != first
    assert come_in(ctx, replace(ALICE, issuer="https://open.example/")) != first


def test_two_browsers_at_once_make_one_account(ctx: Context) -> None:
    found: list[str] = []
    gate = threading.Barrier(4)

    def one() -> None:
        gate.wait()
        found.append(come_in(ctx))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert (count(ctx, UserRow), count(ctx, IdentityRow)) == (1, 1)


def test_people_of_one_name_at_once_get_names_of_their_own(ctx: Context) -> None:
    found: list[str] = []
    gate = threading.Barrier(2)

    def one(subject: str) -> None:
        gate.wait()
        found.append(come_in(ctx, replace(ALICE, subject=subject)))

    threads = [threading.Thread(target=one, args=(subject,)) for subject in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(accounts.me(ctx, user_id).name for user_id in found) == ["alice", "alice-2"]


@pytest.mark.parametrize(
    ("suggestions", "name"),
    [
        (("Bob.Smith",), "bob.smith"),
        (("Zoë Müller",), "zoe-muller"),
        (("", "--", "carol"), "carol"),
        (("root", "bob"), "bob"),
        (("root",), "user-1"),
        (("Administrator", "unknown", "diamond-"), "user-1"),
        ((), "user-1"),
        (("漢字",), "user-1"),
        (("x" * 80,), "x" * 39),
        (("../../etc/passwd",), "etc-passwd"),
        (("a'; DROP TABLE users;--",), "a-drop-table-users"),
    ],
)
def test_names_are_made_from_what_the_provider_says(ctx: Context, suggestions: tuple[str, ...], name: str) -> None:
    assert accounts.me(ctx, come_in(ctx, replace(ALICE, suggestions=suggestions))).name == name


def test_a_name_of_a_project_or_a_user_is_not_taken_over(ctx: Context) -> None:
    accounts.create(ctx, name="alice", password="correct horse battery", email="alice@example.org", is_admin=True)
    with ctx.db.write() as session:
        session.add(ProjectRow(id="prj_000000001", name="alice-2", created_at=0.0))
    user = accounts.me(ctx, come_in(ctx, replace(ALICE, email="alice@example.org")))
    assert (user.name, user.is_admin) == ("alice-3", False)


@pytest.mark.parametrize(
    ("allow", "fits"),
    [
        (Allow(everybody=True), True),
        (Allow(subjects=("s",)), True),
        (Allow(subjects=("S",)), False),
        (Allow(emails=("a@lab.example.org",)), True),
        (Allow(emails=("b@lab.example.org",)), False),
        (Allow(domains=("lab.example.org",)), True),
        (Allow(domains=("*.example.org",)), True),
        (Allow(domains=("example.org",)), False),
        (Allow(domains=("*.lab.example.org",)), False),
        (Allow(domains=("b.example.org",)), False),
        (Allow(groups=("physics",)), True),
        (Allow(groups=("Physics", "chemistry")), False),
        (Allow(), False),
    ],
)
def test_rules(ctx: Context, allow: Allow, fits: bool) -> None:
    person = Person(
        issuer=OPEN.issuer, subject="s", email="a@lab.example.org", domains=frozenset({"lab.example.org"}),
        groups=frozenset({"physics"}),
    )  # fmt: skip
    config = replace(OPEN, allow=allow)
    if fits:
        come_in(ctx, person, config)
    else:
        assert refused(lambda: come_in(ctx, person, config)) == "not allowed"
        assert (count(ctx, UserRow), count(ctx, IdentityRow)) == (0, 0)


def test_an_address_that_is_not_verified_fits_nothing(ctx: Context) -> None:
    config = replace(OPEN, allow=Allow(emails=("",), domains=("example.org",)))
    assert refused(lambda: come_in(ctx, replace(ALICE, email=""), config)) == "not allowed"


def test_without_making_accounts_only_known_ones_come_in(ctx: Context) -> None:
    stranger = replace(ALICE, issuer=KNOWN.issuer)
    assert refused(lambda: come_in(ctx, stranger, KNOWN)) == "not allowed"
    user_id = come_in(ctx)
    federation.link(ctx, user_id, KNOWN, stranger)
    assert come_in(ctx, stranger, KNOWN) == user_id


def test_rules_may_hold_for_every_sign_in(ctx: Context) -> None:
    user_id = come_in(ctx)
    strict = replace(OPEN, allow=Allow(groups=("staff",), every_sign_in=True))
    assert refused(lambda: come_in(ctx, ALICE, strict)) == "not allowed"
    assert come_in(ctx, replace(ALICE, groups=frozenset({"staff"})), strict) == user_id
    # Without that, who is known comes in, though they would get no account today.
    assert come_in(ctx, ALICE, replace(strict, allow=Allow(groups=("staff",)))) == user_id


def test_a_closed_account_is_not_opened(ctx: Context) -> None:
    accounts.create(ctx, name="root-of-all", password="correct horse battery", is_admin=True)
    user_id = come_in(ctx)
    users.disable(ctx, "alice")
    assert refused(lambda: come_in(ctx)) == "disabled"
    users.enable(ctx, "alice")
    assert come_in(ctx) == user_id


@pytest.fixture
def admin(ctx: Context) -> str:
    return accounts.create(ctx, name="chief", password="correct horse battery", is_admin=True).id


def test_an_invitation_makes_the_account(ctx: Context, admin: str) -> None:
    code = invitations.invite(ctx, admin, name="guest", email="guest@example.org", is_admin=True).code
    stranger = replace(ALICE, issuer=KNOWN.issuer)
    user = accounts.me(ctx, come_in(ctx, stranger, KNOWN, invitation=code))
    assert (user.name, user.email, user.is_admin, user.has_password) == ("guest", "guest@example.org", True, False)
    assert come_in(ctx, stranger, KNOWN) == user.id
    assert refused(lambda: come_in(ctx, replace(stranger, subject="b"), KNOWN, invitation=code)) == "invitation"
    with pytest.raises(Unauthenticated):
        federation.check_invitation(ctx, code, address="192.0.2.1")


def test_an_invitation_is_used_once_by_two_at_once(ctx: Context, admin: str) -> None:
    code = invitations.invite(ctx, admin).code
    gate = threading.Barrier(2)
    done: list[str] = []

    def one(subject: str) -> None:
        gate.wait()
        try:
            come_in(ctx, replace(ALICE, issuer=KNOWN.issuer, subject=subject), KNOWN, invitation=code)
            done.append("in")
        except Refused as error:
            done.append(error.why)

    threads = [threading.Thread(target=one, args=(subject,)) for subject in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["in", "invitation"]
    assert (count(ctx, UserRow), count(ctx, IdentityRow)) == (2, 1)


def test_an_invitation_that_is_wrong_or_not_needed(ctx: Context, admin: str) -> None:
    assert refused(lambda: come_in(ctx, invitation="no-such-code")) == "invitation"
    come_in(ctx)
    code = invitations.invite(ctx, admin).code
    assert refused(lambda: come_in(ctx, invitation=code)) == "invitation"
    federation.check_invitation(ctx, code, address="192.0.2.1")  # still good


def test_an_identity_never_changes_hands(ctx: Context) -> None:
    alice, bob = come_in(ctx), come_in(ctx, replace(ALICE, subject="b", suggestions=("bob",)))
    mine = replace(ALICE, issuer=KNOWN.issuer)
    federation.link(ctx, alice, KNOWN, mine)
    federation.link(ctx, alice, KNOWN, mine)  # again: nothing happens
    assert len(accounts.me(ctx, alice).identities) == 2
    assert refused(lambda: federation.link(ctx, bob, KNOWN, mine)) == "belongs to another"
    (linked,) = (item for item in accounts.me(ctx, alice).identities if item.provider == "known")
    federation.unlink(ctx, alice, linked.id)
    assert len(accounts.me(ctx, alice).identities) == 1
    assert refused(lambda: come_in(ctx, mine, KNOWN)) == "unlinked"
    assert refused(lambda: federation.link(ctx, bob, KNOWN, mine)) == "belongs to another"
    assert federation.link(ctx, alice, KNOWN, mine).id == linked.id
    assert come_in(ctx, mine, KNOWN) == alice


def test_two_who_link_the_same_identity_at_once(ctx: Context) -> None:
    people = [come_in(ctx, replace(ALICE, subject=subject)) for subject in "xy"]
    gate = threading.Barrier(2)
    done: list[str] = []

    def one(user_id: str) -> None:
        gate.wait()
        try:
            federation.link(ctx, user_id, KNOWN, replace(ALICE, issuer=KNOWN.issuer))
            done.append("linked")
        except Refused as error:
            done.append(error.why)

    threads = [threading.Thread(target=one, args=(user_id,)) for user_id in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["belongs to another", "linked"]


def test_the_last_way_in_stays(ctx: Context) -> None:
    user_id = come_in(ctx)
    (first,) = accounts.me(ctx, user_id).identities
    with pytest.raises(Conflict, match="only way left"):
        federation.unlink(ctx, user_id, first.id)
    # An identity at a provider that is no longer configured is no way in.
    federation.link(ctx, user_id, replace(KNOWN, name="gone"), replace(ALICE, issuer="https://gone.example"))
    with pytest.raises(Conflict, match="only way left"):
        federation.unlink(ctx, user_id, first.id)
    federation.link(ctx, user_id, KNOWN, replace(ALICE, issuer=KNOWN.issuer))
    federation.unlink(ctx, user_id, first.id)
    with pytest.raises(NotFound):
        federation.unlink(ctx, user_id, first.id)


def test_a_password_is_a_way_in_where_passwords_are_used(ctx: Context) -> None:
    user = accounts.create(ctx, name="carol", password="correct horse battery")
    linked = federation.link(ctx, user.id, OPEN, ALICE)
    object.__setattr__(ctx, "identity", IdentityProviders(IdentityConfig(local_accounts=False, providers=(OPEN,))))
    with pytest.raises(Conflict):
        federation.unlink(ctx, user.id, linked.id)
    object.__setattr__(ctx, "identity", IdentityProviders(IdentityConfig(providers=(OPEN,))))
    federation.unlink(ctx, user.id, linked.id)


def test_unlinking_is_ones_own_affair_and_ends_other_sessions(ctx: Context) -> None:
    alice, bob = come_in(ctx), come_in(ctx, replace(ALICE, subject="b"))
    federation.link(ctx, alice, KNOWN, replace(ALICE, issuer=KNOWN.issuer))
    (first, _) = accounts.me(ctx, alice).identities
    with pytest.raises(NotFound):
        federation.unlink(ctx, bob, first.id)
    with pytest.raises(NotFound):
        federation.unlink(ctx, alice, "idn_'; --")
    cookie = federation.come_in(ctx, OPEN, ALICE, address="", browser="")
    kept = sessions.authenticate(ctx, cookie).session_id
    federation.unlink(ctx, alice, first.id, keep_session=kept)
    assert [item.id for item in sessions.list_sessions(ctx, alice)] == [kept]
    assert len(sessions.list_sessions(ctx, bob)) == 1


def begin(ctx: Context, state: str = "s", key: str = "k", **more: Any) -> None:
    federation.begin(ctx, "open", state, key, Ticket(next_path="/tasks", **more))


def take(ctx: Context, provider: str = "open", state: str = "s", key: str = "k") -> Ticket:
    return federation.take(ctx, provider, state, key, address="192.0.2.1")


def test_a_sign_in_under_way_is_this_browsers_this_providers_and_ends(ctx: Context, clock: Clock) -> None:
    begin(ctx)
    for wrong in ({"provider": "known"}, {"state": "t"}, {"key": "l"}, {"key": ""}, {"state": "s\nk", "key": ""}):
        assert refused(lambda wrong=wrong: take(ctx, **wrong)) == "state"  # type: ignore[misc]
    assert take(ctx) == Ticket(next_path="/tasks")
    assert refused(lambda: take(ctx)) == "state"
    begin(ctx, state="late")
    clock.advance(federation.VALID_S)
    assert refused(lambda: take(ctx, state="late")) == "state"
    begin(ctx, state="new")
    assert count(ctx, CodeRow) == 1  # those that are over are gone


def test_of_two_who_come_back_at_once_one_does(ctx: Context) -> None:
    begin(ctx)
    gate = threading.Barrier(2)
    done: list[str] = []

    def one() -> None:
        gate.wait()
        try:
            take(ctx)
            done.append("back")
        except Refused as error:
            done.append(error.why)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == ["back", "state"]


def test_nothing_that_could_be_used_is_kept(ctx: Context) -> None:
    begin(ctx, state="the-state", key="the-key")
    with ctx.db.read() as session:
        (row,) = session.scalars(sa.select(CodeRow))
        kept = repr((row.hash, row.data, row.user_id))
    assert "the-state" not in kept
    assert "the-key" not in kept


def test_a_refusal_is_written_down(ctx: Context) -> None:
    federation.refuse(ctx, "open", Refused("nonce", "no"), address="192.0.2.1")
    with ctx.db.read() as session:
        (row,) = session.scalars(sa.select(AuditRow))
    assert (row.action, row.address, row.data) == (
        "session.refused", "192.0.2.1", {"method": "open", "reason": "nonce"},
    )  # fmt: skip
