"""Fixtures of the suites about images: an endpoint that builds, and a second user."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diamond.core.ids import new_id
from diamond.server.services import endpoint_shares, projects
from diamond.server.services.context import Context
from diamond.server.store.models import UserRow
from testing.image_agent import ImageAgent


@pytest.fixture
def agent(ctx: Context, user_id: str) -> ImageAgent:
    return ImageAgent(ctx, user_id, "alpha")


@pytest.fixture
def other_id(ctx: Context, user_id: str) -> str:
    row = UserRow(id=new_id("usr"), name="other", created_at=ctx.clock())
    with ctx.db.write() as session:
        session.add(row)
    return row.id


@pytest.fixture
def lab(ctx: Context, user_id: str, other_id: str) -> Callable[..., None]:
    """A project of both users, and a way to share endpoints of the first with it."""
    projects.create(ctx, user_id, "lab")
    projects.set_member(ctx, user_id, "lab", "other", "member")

    def share(*names: str) -> None:
        for name in names:
            endpoint_shares.share(ctx, user_id, "lab", name)

    return share
