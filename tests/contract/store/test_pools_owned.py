"""Pools on every database: made, found, changed and closed, by whom, and which tasks may name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.server.services import pool_rounds, pools, projects, tasks
from diamond.server.services.context import Context
from diamond.server.store.pool_models import PoolRow
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
    made = pools.create(ctx, user_id, SPEC)
    with ctx.db.write() as session:
        session.get_one(PoolRow, made.id).name = 'it\'s 100% "mine" 池'  # as older ones may be called
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
    with pytest.raises(InvalidInput, match="at most 1 node, the task asks for 2") as caught:
        tasks.create(ctx, user_id, {"run": "true", "pool": "cores", "num_nodes": 2})
    assert caught.value.field == "num_nodes" and "leave num_nodes out" in caught.value.hint
    pools.close(ctx, user_id, "cores")
    with pytest.raises(InvalidInput, match="is closed"):
        tasks.create(ctx, user_id, {"run": "true", "pool": "cores"})


def test_who_is_barred_from_the_endpoint_is_barred_from_its_pools(
    ctx: Context, user_id: str, other_id: str, lab: Callable[..., None], agent: ImageAgent
) -> None:
    """By the endpoint's own policy file: at the launch, in a dry run, and while a task waits."""
    lab("alpha")
    pools.create(ctx, user_id, {**SPEC, "project": "lab"})
    asked = {"run": "true", "project": "lab", "pool": "cores"}
    task, _ = tasks.create(ctx, other_id, asked)
    agent.facts = replace(agent.facts, allows_others=False)
    agent.hello()
    for ask in (tasks.create, tasks.plan):
        with pytest.raises(InvalidInput, match="policy file lets only") as caught:
            ask(ctx, other_id, asked)
        assert caught.value.field == "pool"
    pool_rounds.run(ctx)
    assert "may not run tasks in the pool any more" in tasks.get(ctx, other_id, task.id).pending_reason
    assert tasks.create(ctx, user_id, asked)[0].spec
