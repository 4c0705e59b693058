"""An administrator, bob, and a project of his; hashes are cheap ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diamond.core.accounts import User
from diamond.core.ids import new_id
from diamond.core.projects import Role
from diamond.server.services import accounts
from diamond.server.services.context import Context
from diamond.server.store.identity_models import MemberRow, ProjectRow
from testing.people import PASSWORD, cheap_passwords


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with cheap_passwords():
        yield


@pytest.fixture
def admin(ctx: Context) -> User:
    return accounts.create(ctx, name="alice", password=PASSWORD, is_admin=True)


@pytest.fixture
def bob(ctx: Context, admin: User) -> User:
    return accounts.create(ctx, name="bob", password=PASSWORD, full_name="Bob  B.", email="bob@example.org")


@pytest.fixture
def shared(ctx: Context, bob: User) -> str:
    """A project that bob owns."""
    row = ProjectRow(id=new_id("prj"), name="waves", created_at=ctx.clock(), title="")
    with ctx.db.write() as session:
        session.add(row)
        session.flush()
        session.add(MemberRow(project_id=row.id, user_id=bob.id, role=Role.OWNER.value, created_at=ctx.clock()))
    return row.name
