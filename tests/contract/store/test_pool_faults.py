"""Pools that are disturbed: tasks that cannot move, absurd measures, clocks that go back, pilots that end meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import undefer

from diamond.core.reasons import Reason
from diamond.core.wire import Report, StreamChunk
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.snapshot import Decision, Snapshot
from diamond.server.services import agents, pool_demands, pool_history, pool_rounds, pool_state, pools
from diamond.server.services.context import Context
from diamond.server.store.pool_models import PoolRow
from tests.contract.store.test_pools import Site

LARGEST_WAIT_S = 3600.0


@pytest.fixture
def site(ctx: Context, user_id: str, clock: Any) -> Site:
    return Site(ctx, user_id, clock)


def test_a_large_task_gets_its_turn_though_small_ones_keep_coming_and_none_can_be_moved(site: Site) -> None:
    """Each small one takes ten minutes, and another comes for every one that ends."""
    site.pool(nodes="1", walltime="10h")
    site.hold()
    small = {"resources": {"accelerators": "A100:1"}, "run": "sleep 600"}
    ends: dict[str, tuple[float, str]] = {}
    queue = [site.launch(**small, name=f"first{number}") for number in range(4)]
    site.round()
    for number, task in enumerate(queue):
        order = site.order(task)
        assert order is not None
        site.run(order.job_id)
        ends[task] = (site.clock() + 150.0 * (number + 1), order.job_id)
    large = site.launch(resources={"accelerators": "A100:4"}, name="large", run="true")
    queue = [site.launch(**small, name=f"next{number}") for number in range(4)]
    began = site.clock()
    while site.order(large) is None:
        assert site.clock() - began < LARGEST_WAIT_S, f"it waits on: {site.task(large).pending_reason}"
        site.clock.advance(60)
        for task, (at, job_id) in list(ends.items()):
            if site.clock() >= at:
                site.end(job_id, Reason.COMPLETED)
                del ends[task]
                queue.append(site.launch(**small, name=f"after {task}"))
        pool_rounds.run(site.ctx)
        for task in list(queue):
            if (order := site.order(task)) is not None:
                site.run(order.job_id)
                ends[task] = (site.clock() + 600.0, order.job_id)
                queue.remove(task)
    assert "tsk_" not in (site.task(queue[0]).pending_reason or ""), "whom it waits for is not everybody's to know"


def test_a_rate_that_nothing_can_be_divided_by_does_not_break_the_page(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    task = site.launch(resources={"accelerators": "A100:1..4"})
    site.round()
    order = site.order(task)
    assert order is not None
    site.run(order.job_id)
    line = {"t": site.clock(), "step": 5, "samples": 100, "samples_per_s": 5e-324, "world": 10_000_000, "nodes": 1,
            "global_batch": 8, "step_s": 1.0, "steps": 1}  # fmt: skip
    chunk = StreamChunk.of(order.job_id, "train", 0, json.dumps(line).encode() + b"\n")
    agents.report(site.ctx, site.id, Report(epoch=site.ctx.epoch, streams=(chunk,)))
    site.clock.advance(100)
    site.end(order.job_id, Reason.COMPLETED)
    site.round()
    found = pool_history.read(site.ctx, site.user_id, pools.get(site.ctx, site.user_id, "p").id, 3600.0)
    assert found.actual == {}


def test_time_in_earlier_jobs_is_not_time_spent_waiting(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    task = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    order = site.order(task)
    assert order is not None
    site.run(order.job_id)
    site.clock.advance(1000)
    site.end(order.job_id, Reason.CONTINUED)
    site.clock.advance(50)
    site.round()
    again = site.order(task)
    assert again is not None and again.job_id != order.job_id
    site.run(again.job_id)
    site.clock.advance(200)
    with site.ctx.db.read() as session:
        row = session.scalars(sa.select(PoolRow).options(undefer(PoolRow.profiles))).one()
        state = pool_state.read(session, row)
    (demand,) = pool_demands.demands(state, pool_demands.known_of(site.ctx, state), site.clock())
    assert demand.running_s == pytest.approx(1200.0, abs=20.0)


def test_a_clock_that_goes_back_does_not_stop_the_pool(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    first = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    order = site.order(first)
    assert order is not None
    site.run(order.job_id)
    site.clock.now -= 3600.0
    second = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    assert site.order(second) is not None


def test_nobody_is_moved_to_a_node_that_went_while_it_was_decided(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.pool(nodes="2")
    kept, lost = site.hold(2)
    decide = Goodput.allocate

    def lose(self: Goodput, snapshot: Snapshot) -> Decision:
        decision = decide(self, snapshot)
        if any(node.name == lost.job_id for node in snapshot.nodes):
            site.end(lost.job_id, Reason.NODE_FAIL)
        return decision

    monkeypatch.setattr(Goodput, "allocate", lose)
    tasks = [site.launch(resources={"accelerators": "A100:4"}, name=name) for name in "ab"]
    began = site.clock()
    while not any(site.order(task) for task in tasks):
        pool_rounds.run(site.ctx)
        site.clock.advance(2.1)
        assert site.clock() - began < 15.0, "what was decided on a node that is gone is decided anew at once"
    (order,) = [order for task in tasks if (order := site.order(task)) is not None]
    assert order.place is not None and [node.pilot for node in order.place.nodes] == [kept.job_id]


def test_a_task_that_may_yet_turn_out_to_move_is_not_said_to_be_immovable(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    tasks = [site.launch(resources={"accelerators": size}, name=size) for size in ("A100:1..2", "A100:1")]
    site.round()
    for task in tasks:
        order = site.order(task)
        assert order is not None
        site.run(order.job_id)
    site.clock.advance(70)
    site.round()
    found = {one.name: one.reason for one in pools.get(site.ctx, site.user_id, "p").tasks}
    assert "not measured yet" in found["A100:1..2"] and "cannot be moved" in found["A100:1"], found
