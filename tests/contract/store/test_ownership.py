"""What somebody is given never stands for what they made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diamond.core.projects import Transferred
from diamond.server.services import image_builds, images, ownership, tasks
from diamond.server.services.context import Context
from diamond.server.services.ownership import Giver
from diamond.server.store.identity_models import AuditRow
from diamond.server.store.models import UserRow
from testing.image_agent import ImageAgent


@pytest.fixture
def build(ctx: Context, agent: ImageAgent, lab: Callable[..., None]) -> Callable[..., str]:
    """An image, ready at an endpoint that both users may use; its id."""
    lab("alpha")

    def make(user: str, package: str, name: str = "env") -> str:
        recipe = {"name": name, "base": "docker://python:3.13-slim", "pip": [package]}
        image_builds.build(ctx, user, recipe, endpoint="alpha", project="lab")
        agent.finish()
        return images.get(ctx, user, name).id

    return make


def name_of(ctx: Context, user_id: str) -> str:
    with ctx.db.read() as session:
        return session.get_one(UserRow, user_id).name


def test_a_given_image_does_not_shadow_ones_own(
    ctx: Context, user_id: str, other_id: str, build: Callable[..., str]
) -> None:
    me, giver = name_of(ctx, user_id), Giver(user_id=other_id)
    mine = build(user_id, "numpy")
    for number, package in enumerate(("evil", "worse", "worst"), 1):
        theirs = build(other_id, package)
        given = ownership.transfer_image(ctx, giver, "env", me)
        assert given == Transferred(owner=me, name="env-from-other" + (f"-{number}" if number > 1 else ""))
        assert images.get(ctx, user_id, given.name).id == theirs
    assert images.get(ctx, user_id, "env").id == mine
    task, _ = tasks.create(ctx, user_id, {"run": "x", "resources": {"image_id": "env"}})
    assert task.image_id == mine
    with ctx.db.read() as session:
        told = session.query(AuditRow).where(AuditRow.action == "image.transferred").order_by(AuditRow.seq).all()[-1]
        assert (told.data["name"], told.data["was"], told.data["to"]) == ("env-from-other-3", "env", me)


def test_not_even_where_there_is_none_yet(ctx: Context, user_id: str, other_id: str, build: Callable[..., str]) -> None:
    name = "e" * 64
    build(other_id, "numpy", name)
    given = ownership.transfer_image(ctx, Giver(user_id=other_id), name, name_of(ctx, user_id))
    assert given.name == "e" * 53 + "-from-other" and len(given.name) == 64
    kept = ownership.transfer_image(ctx, Giver(user_id=user_id), given.name, name_of(ctx, user_id))
    assert kept.name == given.name, "to oneself: nothing changes"


def test_what_an_administrator_gives_keeps_its_name_where_it_is_free(
    ctx: Context, user_id: str, other_id: str, build: Callable[..., str]
) -> None:
    me, admin = name_of(ctx, user_id), Giver(user_id=user_id, is_admin=True)
    mine, theirs, free = build(user_id, "numpy"), build(other_id, "evil"), build(other_id, "scipy", "tools")
    assert ownership.transfer_image(ctx, admin, theirs, me).name == "env-from-other"
    assert ownership.transfer_image(ctx, admin, free, me).name == "tools"
    assert images.get(ctx, user_id, "env").id == mine


def test_all_that_is_handed_over_keeps_names_that_are_free(
    ctx: Context, user_id: str, other_id: str, build: Callable[..., str]
) -> None:
    mine = build(user_id, "numpy")
    build(other_id, "evil")
    newest, free = build(other_id, "worse"), build(other_id, "scipy", "tools")
    assert ownership.hand_over(ctx, "other", name_of(ctx, user_id))["images"] == 3
    found = {name: images.get(ctx, user_id, name).id for name in ("env", "env-from-other", "tools")}
    assert found == {"env": mine, "env-from-other": newest, "tools": free}
