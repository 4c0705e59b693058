"""Pools on every database: made, found, changed and closed, by whom, and which tasks may name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.server.services import pools, projects, tasks
from diamond.server.services.context import Context
from testing.image_agent import ImageAgent

SPEC: dict[str, Any] = {"name": "cores", "endpoint": "alpha", "slots": 4}


@pytest.fixture
def agent(ctx: Context, user_id: str) -> ImageAgent:
    return ImageAgent(ctx, user_id, "alpha", holds_pools=True)


def test_made_found_changed_and_closed(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    made = pools.create(ctx, user_id, SPEC)
    assert pools.get(ctx, user_id, "cores").id == pools.get(ctx, user_id, made.id).id == made.id
    with pytest.raises(Conflict, match="already") as caught:
        pools.create(ctx, user_id, SPEC)
    assert caught.value.field == "name"
    assert pools.change(ctx, user_id, "cores", {"idle": "1h"}).spec.idle == 3600
    closed = pools.close(ctx, user_id, "cores")
    assert closed.closed_at == ctx.clock() == pools.close(ctx, user_id, made.id).closed_at
    assert pools.list_pools(ctx, user_id) == []
    again = pools.create(ctx, user_id, SPEC)
    assert pools.get(ctx, user_id, "cores").id == again.id, "an open one of a name comes before closed ones"
    assert [pool.id for pool in pools.list_pools(ctx, user_id, closed=True)] == [again.id, made.id]


def test_odd_references_find_nothing(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    pools.create(ctx, user_id, {**SPEC, "name": 'it\'s 100% "mine" 池'})
    assert pools.get(ctx, user_id, 'it\'s 100% "mine" 池').spec.slots == 4
    for ref in ("", "a\x00b", "%", "it's", "' OR 1=1 --", "pol_", "pol_000000000000000000", "x" * 10_000, "\ud800"):
        with pytest.raises(NotFound):
            pools.get(ctx, user_id, ref)
        with pytest.raises(NotFound):
            pools.close(ctx, user_id, ref)


def test_there_is_a_most_of_open_pools(
    ctx: Context, user_id: str, agent: ImageAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "MAX_OPEN", 2)
    for name in ("a", "b"):
        pools.create(ctx, user_id, {**SPEC, "name": name})
    with pytest.raises(InvalidInput, match="2 pools already"):
        pools.create(ctx, user_id, {**SPEC, "name": "c"})
    pools.close(ctx, user_id, "a")
    assert pools.create(ctx, user_id, {**SPEC, "name": "c"}).name == "c"


def test_where_a_pool_cannot_be_held(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ImageAgent(ctx, user_id, "old")
    for change, field, said in (
        ({"endpoint": "old"}, "endpoint", "does not hold pools"),
        ({"endpoint": "nowhere"}, "endpoint", "there is no endpoint"),
        ({"nodes": "1..2"}, "nodes", "is one machine"),
    ):
        with pytest.raises(InvalidInput, match=said) as caught:
            pools.create(ctx, user_id, {**SPEC, **change})
        assert caught.value.field == field


def test_members_use_it_and_its_owner_changes_it(
    ctx: Context, user_id: str, other_id: str, lab: Callable[..., None], agent: ImageAgent
) -> None:
    lab("alpha")
    private = pools.create(ctx, user_id, SPEC)
    shared = pools.create(ctx, user_id, {**SPEC, "name": "shared", "project": "lab"})
    assert [pool.id for pool in pools.list_pools(ctx, other_id)] == [shared.id]
    for ref in ("cores", private.id):
        with pytest.raises(NotFound):
            pools.get(ctx, other_id, ref)
    with pytest.raises(Forbidden, match="is another's"):
        pools.change(ctx, other_id, "shared", {"nodes": 1})
    with pytest.raises(Forbidden, match="is another's"):
        pools.close(ctx, other_id, "shared")
    task, _ = tasks.create(ctx, other_id, {"run": "true", "project": "lab", "pool": "shared"})
    with pytest.raises(InvalidInput, match="there is no pool 'cores'"):
        tasks.create(ctx, other_id, {"run": "true", "project": "lab", "pool": "cores"})
    with pytest.raises(InvalidInput) as caught:
        tasks.create(ctx, other_id, {"run": "true", "pool": "shared"})
    assert caught.value.field == "pool"
    projects.set_member(ctx, user_id, "lab", "other", "viewer")
    with pytest.raises(Forbidden):
        tasks.create(ctx, other_id, {"run": "true", "project": "lab", "pool": "shared"})
    seen = pools.get(ctx, user_id, "shared")
    assert [one.task_id for one in seen.tasks] == [task.id] and seen.waiting == 1


def test_tasks_that_never_fit_are_refused(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    pools.create(ctx, user_id, SPEC)
    for resources, field in (
        ({"slots": "5..9"}, "resources.slots"),
        ({"accelerators": "A100:1"}, "resources.accelerators"),
        ({"infra": "local"}, "resources.infra"),
    ):
        with pytest.raises(InvalidInput) as caught:
            tasks.create(ctx, user_id, {"run": "true", "pool": "cores", "resources": resources})
        assert caught.value.field == field
    pools.close(ctx, user_id, "cores")
    with pytest.raises(InvalidInput, match="is closed"):
        tasks.create(ctx, user_id, {"run": "true", "pool": "cores"})
