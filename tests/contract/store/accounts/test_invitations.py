"""One-time codes on both databases: invitations and new passwords, also when two use one at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from diamond.core.accounts import User
from diamond.core.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    Unauthenticated,
)
from diamond.server.identity_file import IdentityConfig
from diamond.server.identity_providers import IdentityProviders
from diamond.server.services import (
    accounts,
    bootstrap,
    codes,
    invitations,
    sessions,
    tokens,
    users,
)
from diamond.server.services.context import Context
from diamond.server.store.identity_models import AuditRow, CodeRow, MemberRow, ProjectRow
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


@pytest.mark.parametrize("name", ["unknown", "root", "diamond", "administrator", "root."])
def test_reserved_names_are_refused_wherever_they_come_from(ctx: Context, admin: User, name: str) -> None:
    code = invitations.invite(ctx, admin.id).code
    with ctx.db.write() as session:
        setup = codes.make(session, codes.SETUP, now=ctx.clock(), lifetime_s=60)
    for attempt in (
        lambda: accounts.create(ctx, name=name, password=PASSWORD),
        lambda: invitations.invite(ctx, admin.id, name=name),
        lambda: accounts.accept_invitation(ctx, code, name=name, password=PASSWORD),
        lambda: accounts.setup(ctx, setup, name=name, password=PASSWORD),
    ):
        with pytest.raises(InvalidInput, match="reserved") as caught:
            attempt()
        assert caught.value.field == "name"
    assert accounts.accept_invitation(ctx, code, name="carol", password=PASSWORD).name == "carol"


def test_the_one_user_of_a_container_is_not_called_root(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.getpass, "getuser", lambda: "root")
    bootstrap.prepare(ctx, embedded=None)
    with ctx.db.read() as session:
        assert session.scalars(sa.select(UserRow.name)).all() == ["user"]


def test_codes_work_once_and_not_for_ever(ctx: Context, admin: User, clock: Clock) -> None:
    with ctx.db.write() as session:
        made = [codes.make(session, "test", now=clock(), lifetime_s=60, data={"n": n}) for n in range(3)]
        short = codes.make(session, "test", now=clock(), lifetime_s=60, short=True)
    assert codes.look(ctx, "test", made[0]).data == codes.look(ctx, "test", made[0]).data == {"n": 0}
    assert codes.look(ctx, "test", short.replace("-", " ").lower())
    with pytest.raises(Unauthenticated):
        codes.look(ctx, "other", made[0])

    def use() -> int:
        with ctx.db.write() as session:
            return int(codes.use(session, "test", made[0], clock()).data["n"])

    found = at_once(use, use, use)
    assert sorted(type(each).__name__ for each in found) == ["Unauthenticated", "Unauthenticated", "int"]

    def use_in_vain() -> None:
        with ctx.db.write() as session:
            codes.use(session, "test", made[1], clock())
            raise RuntimeError("what it was for has failed")

    with pytest.raises(RuntimeError):
        use_in_vain()
    assert codes.look(ctx, "test", made[1]).data == {"n": 1}
    with ctx.db.write() as session:
        assert codes.void(session, "test", clock(), CodeRow.id == codes.look(ctx, "test", made[1]).id) == 1
    clock.advance(59)
    codes.look(ctx, "test", made[2])
    clock.advance(1)
    for dead in made[1:]:
        with pytest.raises(Unauthenticated):
            codes.look(ctx, "test", dead)
    with ctx.db.read() as session:
        stored = repr(session.execute(sa.select(CodeRow.hash, CodeRow.data)).all())
    assert not any(value in stored for value in (*made, short))
    clock.advance(31 * 86_400)
    with ctx.db.write() as session:
        codes.make(session, "test", now=clock(), lifetime_s=60)
    with ctx.db.read() as session:
        assert session.execute(sa.select(sa.func.count()).select_from(CodeRow)).scalar_one() == 1


def test_an_invitation_is_accepted_by_one(ctx: Context, admin: User) -> None:
    made = invitations.invite(ctx, admin.id, name="carol", email="carol@example.org")
    assert made.code
    assert [each.code for each in invitations.list_invitations(ctx, admin.id)] == [""]

    def accept(name: str) -> Callable[[], User]:
        return lambda: accounts.accept_invitation(ctx, made.code, name=name, password=PASSWORD, address="192.0.2.1")

    found = at_once(accept("carol"), accept("mallory"))
    assert sorted(type(each).__name__ for each in found) == ["Unauthenticated", "User"]
    (user,) = [each for each in found if isinstance(each, User)]
    assert (user.email, user.is_admin) == ("carol@example.org", False)
    assert len(users.list_users(ctx)) == 2
    assert invitations.list_invitations(ctx, admin.id) == []
    with ctx.db.read() as session:
        entry = session.scalars(sa.select(AuditRow).where(AuditRow.action == "invitation.accepted")).one()
    assert (entry.user, entry.address) == (user.name, "192.0.2.1")


def test_a_slip_leaves_an_invitation_valid(ctx: Context, bob: User, admin: User) -> None:
    code = invitations.invite(ctx, admin.id).code
    for name, password, kind in (
        ("bob", PASSWORD, Conflict), ("Carol", PASSWORD, InvalidInput), ("carol", "short", InvalidInput),
    ):  # fmt: skip
        with pytest.raises(kind):
            accounts.accept_invitation(ctx, code, name=name, password=password)
    assert accounts.accept_invitation(ctx, code, name="carol", password=PASSWORD).name == "carol"


def test_who_may_invite_whom(ctx: Context, admin: User, bob: User, shared: str, clock: Clock) -> None:
    carol = accounts.create(ctx, name="carol")
    with pytest.raises(Forbidden, match="administrators alone"):
        invitations.invite(ctx, bob.id, project=shared, role="viewer")
    ctx = dataclasses.replace(ctx, identity=IdentityProviders(IdentityConfig(owners_invite=True)))
    into = invitations.invite(ctx, bob.id, project=shared, role="viewer")
    assert (into.project, into.role, into.invited_by) == (shared, "viewer", "bob")
    for who, wanted, kind in (
        (bob.id, {}, Forbidden),
        (bob.id, {"is_admin": True}, Forbidden),
        (bob.id, {"project": shared, "is_admin": True}, Forbidden),
        (carol.id, {"project": shared}, NotFound),
        (bob.id, {"project": "bob"}, InvalidInput),
        (admin.id, {"project": "nothing"}, NotFound),
        (admin.id, {"role": "owner"}, InvalidInput),
        (admin.id, {"project": shared, "role": "king"}, InvalidInput),
        (admin.id, {"name": "bob"}, Conflict),
        (admin.id, {"email": "none"}, InvalidInput),
    ):
        with pytest.raises(kind):
            invitations.invite(ctx, who, **wanted)
    by_admin = invitations.invite(ctx, admin.id, project=shared, is_admin=True)
    assert {each.id for each in invitations.list_invitations(ctx, admin.id)} == {into.id, by_admin.id}
    assert {each.id for each in invitations.list_invitations(ctx, bob.id)} == {into.id, by_admin.id}
    assert invitations.list_invitations(ctx, carol.id) == []
    with pytest.raises(NotFound):
        invitations.withdraw(ctx, carol.id, by_admin.id)
    dave = accounts.accept_invitation(ctx, into.code, name="dave", password=PASSWORD)
    with ctx.db.read() as session:
        roles = session.scalars(
            sa.select(MemberRow.role).join(ProjectRow, ProjectRow.id == MemberRow.project_id)
            .where(ProjectRow.name == shared, MemberRow.user_id == dave.id)
        ).all()  # fmt: skip
    assert roles == ["viewer"]
    assert [each.name for each in accounts.people(ctx, dave.id)] == ["bob", "dave"]
    assert [each.name for each in accounts.people(ctx, carol.id)] == ["carol"]
    invitations.withdraw(ctx, bob.id, by_admin.id)
    with pytest.raises(NotFound):
        invitations.withdraw(ctx, bob.id, by_admin.id)
    with pytest.raises(Unauthenticated):
        accounts.accept_invitation(ctx, by_admin.code, name="eve", password=PASSWORD)
    late = invitations.invite(ctx, bob.id, project=shared)
    clock.advance(invitations.VALID_S)
    with pytest.raises(Unauthenticated):
        accounts.accept_invitation(ctx, late.code, name="eve", password=PASSWORD)


def test_an_invitation_falls_with_whoever_made_it(ctx: Context, admin: User, bob: User, shared: str) -> None:
    users.set_admin(ctx, "bob", True)
    as_admin = invitations.invite(ctx, bob.id)
    as_owner = invitations.invite(ctx, bob.id, project=shared)
    users.set_admin(ctx, "bob", False)
    with pytest.raises(Unauthenticated, match="no longer"):
        accounts.accept_invitation(ctx, as_admin.code, name="carol", password=PASSWORD)
    users.disable(ctx, "bob")
    with pytest.raises(Unauthenticated, match="no longer"):
        accounts.accept_invitation(ctx, as_owner.code, name="carol", password=PASSWORD)


def test_a_new_password_by_code(ctx: Context, admin: User, bob: User, clock: Clock) -> None:
    accounts.sign_in(ctx, "bob", PASSWORD, **FROM)
    token = accounts.first_token(ctx, bob, "mine")
    first, _ = users.reset(ctx, admin.id, "bob")
    code, expires_at = users.reset(ctx, admin.id, "bob")
    assert expires_at == clock() + 86_400
    with pytest.raises(Unauthenticated):
        accounts.use_reset(ctx, first, OTHER_PASSWORD)  # the newer one made it void
    with pytest.raises(InvalidInput):
        accounts.use_reset(ctx, code, "short")
    assert live_sessions(ctx, bob) == 1
    assert accounts.use_reset(ctx, code, OTHER_PASSWORD).name == "bob"
    assert live_sessions(ctx, bob) == 0
    assert tokens.authenticate(ctx, token).user_id == bob.id
    with pytest.raises(Unauthenticated):
        accounts.use_reset(ctx, code, PASSWORD)
    accounts.sign_in(ctx, "bob", OTHER_PASSWORD, **FROM)
    code, _ = users.reset(ctx, admin.id, "bob", revoke_tokens=True)
    accounts.use_reset(ctx, code, PASSWORD)
    with pytest.raises(Unauthenticated):
        tokens.authenticate(ctx, token)
    code, _ = users.reset(ctx, admin.id, "bob")
    clock.advance(86_400)
    with pytest.raises(Unauthenticated):
        accounts.use_reset(ctx, code, OTHER_PASSWORD)
    with pytest.raises(NotFound):
        users.reset(ctx, admin.id, "nobody")
