"""Pools: pilots, tasks inside of them, rounds that give and take slots; on every database. The agent is the test."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, Partition
from diamond.core.errors import Conflict, InvalidInput, NotFound
from diamond.core.pools import Pool
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Task
from diamond.core.wire import STREAMS, Hello, JobOrder, JobReport, Report, StreamChunk
from diamond.server.services import agents, endpoints, planning, pool_rounds, pools, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow

HOUR = 3600


class Site:
    """An endpoint of four nodes with four GPUs each, whose agent is this test."""

    def __init__(self, ctx: Context, user_id: str, clock: Any) -> None:
        self.ctx, self.user_id, self.clock = ctx, user_id, clock
        self.sent: dict[str, int] = {}
        with ctx.db.read() as session:
            self.id, self.name = session.execute(sa.select(EndpointRow.id, EndpointRow.name)).one()
        gpus = (Gpu(model="A100", count=4),)
        partition = Partition(name="gpu", max_walltime_s=10 * HOUR, groups=(NodeGroup(count=4, cpus=64, gpus=gpus),))
        facts = EndpointFacts(
            scheduler="slurm", nodes=4, cpus_per_node=64, gpus_per_node=gpus, partitions=(partition,), holds_pools=True
        )
        agents.hello(ctx, self.id, Hello(facts=facts))

    def pool(self, **fields: Any) -> Pool:
        spec = {"name": "p", "endpoint": self.name, "nodes": "1..2", "accelerators": "A100:4", "walltime": "2h"}
        return pools.create(self.ctx, self.user_id, spec | fields)

    def launch(self, **fields: Any) -> str:
        fields = {"run": "true", "pool": "p"} | fields
        return tasks.create(self.ctx, self.user_id, fields)[0].id

    def task(self, task_id: str) -> Task:
        return tasks.get(self.ctx, self.user_id, task_id)

    def orders(self) -> list[JobOrder]:
        return list(agents.desired(self.ctx, self.id, self.ctx.epoch, 0).orders)

    def pilots(self) -> list[JobOrder]:
        return [order for order in self.orders() if order.pilot is not None]

    def order(self, task_id: str) -> JobOrder | None:
        """The newest of the task's that is not over."""
        found = [order for order in self.orders() if order.task_id == task_id]
        return max(found, key=lambda order: order.attempt, default=None)

    def round(self) -> None:
        """Rounds, some seconds apart, as the server has them."""
        for _ in range(3):
            planning.run_due(self.ctx)
            pool_rounds.run(self.ctx)
            self.clock.advance(3)

    def tell(self, job_id: str, state: JobState, **fields: Any) -> None:
        job = JobReport(job_id=job_id, state=state, **fields)
        agents.report(self.ctx, self.id, Report(epoch=self.ctx.epoch, jobs=(job,)))

    def run(self, job_id: str, host: str = "n1") -> None:
        self.tell(job_id, JobState.RUNNING, started_at=self.clock(), hosts=(host,))

    def end(self, job_id: str, reason: Reason) -> None:
        state = JobState.SUCCEEDED if reason in (Reason.COMPLETED, Reason.CONTINUED) else JobState.FAILED
        self.tell(job_id, state, reason=reason, ended_at=self.clock())

    def hold(self, number: int = 1) -> list[JobOrder]:
        """Pilots that were asked for get their nodes."""
        self.round()
        found = self.pilots()
        assert len(found) == number, found
        for place, order in enumerate(found):
            self.run(order.job_id, f"n{place + 1}")
        return found

    def measure(
        self, job_id: str, step: int, *, slots: int, step_s: float, nodes: int = 1, ahead_s: float = 0, batch: int = 64
    ) -> None:
        line = {"t": self.clock() + ahead_s, "step": step, "until": 100_000, "steps": 10, "step_s": step_s,
                "samples_per_s": batch / step_s, "world": slots, "nodes": nodes, "global_batch": batch}  # fmt: skip
        raw = json.dumps(line).encode() + b"\n"
        offset = self.sent.get(job_id, 0)
        chunk = StreamChunk.of(job_id, "train", offset, raw)
        agents.report(self.ctx, self.id, Report(epoch=self.ctx.epoch, streams=(chunk,)))
        self.sent[job_id] = offset + len(raw)


@pytest.fixture
def site(ctx: Context, user_id: str, clock: Any) -> Site:
    assert "train" in STREAMS
    return Site(ctx, user_id, clock)


def test_a_pool_asks_for_its_nodes_and_holds_them(site: Site) -> None:
    pool = site.pool()
    (pilot,) = site.hold()
    assert pilot.pilot is not None
    assert (pilot.pilot.pool_id, pilot.pilot.slots, pilot.pilot.has_gpus) == (pool.id, 4, True)
    assert (pilot.spec.num_nodes, pilot.spec.resources.accelerators, pilot.time_limit_s) == (1, "A100:4", 2 * HOUR)
    found = pools.get(site.ctx, site.user_id, "p")
    assert (found.nodes, found.slots, found.used) == (1, 4, 0)
    assert [one.host for one in found.pilots] == ["n1"]


def test_a_task_gets_slots_as_ranks_of_a_node(site: Site) -> None:
    site.pool()
    (pilot,) = site.hold()
    task_id = site.launch(resources={"accelerators": "A100:1..2"})
    assert site.task(task_id).state is TaskState.PENDING
    site.round()
    order = site.order(task_id)
    assert order is not None and order.place is not None and order.chained
    assert [(node.pilot, node.slots) for node in order.place.nodes] == [(pilot.job_id, 2)]
    assert (order.spec.num_nodes, order.spec.ranks_per_node, order.spec.resources.gpus) == (1, 2, 2)
    found = pools.get(site.ctx, site.user_id, "p")
    assert [(one.name, one.slots, one.least, one.most) for one in found.tasks] == [("true", 2, 1, 2)]
    assert found.decisions[0].slots == 2 and found.decisions[0].reason


def test_nothing_said_means_that_diamond_picks(site: Site) -> None:
    """One slot, as long as it may be a script that several ranks would only repeat; more, once it measures itself."""
    site.pool(nodes="1")
    site.hold()
    task_id = site.launch()
    site.round()
    order = site.order(task_id)
    assert order is not None and order.place is not None
    assert (order.place.slots, order.spec.ranks_per_node) == (1, 1)
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=1, step_s=1.2)
    site.clock.advance(300)
    site.round()
    site.end(order.job_id, Reason.CONTINUED)
    site.round()
    larger = site.order(task_id)
    assert larger is not None and larger.place is not None and larger.place.slots > 1
    assert larger.spec.ranks_per_node == larger.place.slots


def test_slots_are_given_and_taken(site: Site) -> None:
    """A task that nobody knows begins small and grows once it is measured; a second one gets its share of that. Each
    time it saves its state, stops, and goes on where it was."""
    site.pool(nodes="1")
    site.hold()
    first = site.launch(resources={"accelerators": "A100:1..4"}, name="first")
    site.round()
    order = site.order(first)
    assert order is not None and order.place is not None and order.place.slots < 4
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=order.place.slots, step_s=1.2 / order.place.slots)
    site.clock.advance(300)
    site.round()
    asked = site.order(first)
    assert asked is not None and asked.desired is Desired.YIELD
    site.end(order.job_id, Reason.CONTINUED)
    site.round()
    larger = site.order(first)
    assert larger is not None and larger.place is not None and larger.place.slots == 4
    assert larger.continues == order.job_id
    site.run(larger.job_id)
    site.measure(larger.job_id, 1000, slots=4, step_s=0.3)
    site.clock.advance(600)
    second = site.launch(resources={"accelerators": "A100:1..4"}, name="second")
    site.round()
    asked = site.order(first)
    assert asked is not None and asked.desired is Desired.YIELD
    assert "freed" in site.task(second).pending_reason
    site.end(larger.job_id, Reason.CONTINUED)
    site.round()
    there = [one.place.slots for name in (first, second) if (one := site.order(name)) is not None and one.place]
    assert len(there) == 2 and sum(there) <= 4, there
    assert site.task(first).attempt == 3
    assert [one.slots for one in pools.get(site.ctx, site.user_id, "p").decisions if one.task_id == first][1:] == [4, 2]


def test_a_task_that_does_not_stop_is_not_waited_for_long(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    first = site.launch(resources={"accelerators": "A100:1..4"}, name="first")
    site.round()
    order = site.order(first)
    assert order is not None and order.place is not None
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=order.place.slots, step_s=1.2 / order.place.slots)
    site.clock.advance(300)
    site.round()
    asked = site.order(first)
    assert asked is not None and asked.desired is Desired.YIELD
    second = site.launch(resources={"accelerators": "A100:1..4"}, name="second")
    site.round()
    assert site.order(second) is None
    site.clock.advance(pool_rounds.PATIENCE_S)
    site.round()
    placed = site.order(second)
    assert placed is not None and placed.place is not None
    assert placed.place.slots + order.place.slots <= 4


def test_a_task_that_measured_nothing_is_left_alone(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    first = site.launch(resources={"accelerators": "A100:3..4"})
    site.round()
    order = site.order(first)
    assert order is not None
    site.run(order.job_id)
    site.clock.advance(600)
    second = site.launch(resources={"accelerators": "A100:2..4"})
    site.round()
    again = site.order(first)
    assert again is not None and again.desired is Desired.RUN
    assert site.order(second) is None
    assert site.task(second).pending_reason


def test_a_pilot_that_dies_takes_no_task_with_it(site: Site) -> None:
    site.pool(nodes="1")
    (pilot,) = site.hold()
    task_id = site.launch(resources={"accelerators": "A100:2"})
    site.round()
    order = site.order(task_id)
    assert order is not None
    site.run(order.job_id)
    site.clock.advance(60)
    site.end(pilot.job_id, Reason.NODE_FAIL)
    site.end(order.job_id, Reason.NODE_FAIL)
    assert site.task(task_id).state is TaskState.PENDING
    (other,) = site.hold()
    assert other.job_id != pilot.job_id
    site.round()
    again = site.order(task_id)
    assert again is not None and again.place is not None
    assert (again.place.nodes[0].pilot, again.continues) == (other.job_id, order.job_id)


def test_a_task_over_two_nodes(site: Site) -> None:
    site.pool(nodes="2")
    first, second = site.hold(2)
    task_id = site.launch(resources={"accelerators": "A100:8..8"})
    site.round()
    order = site.order(task_id)
    assert order is not None and order.place is not None
    assert {node.pilot for node in order.place.nodes} == {first.job_id, second.job_id}
    assert (order.spec.num_nodes, order.spec.ranks_per_node) == (2, 4)


def test_nodes_are_asked_for_with_demand_and_let_go_when_idle(site: Site) -> None:
    site.pool(nodes="0..2", idle="5m")
    site.round()
    assert site.pilots() == []
    task_id = site.launch(resources={"accelerators": "A100:1..8"})
    pilots = site.hold(2)
    site.round()
    order = site.order(task_id)
    assert order is not None
    site.run(order.job_id)
    site.end(order.job_id, Reason.COMPLETED)
    site.round()
    assert [one.desired for one in site.pilots()] == [Desired.RUN] * 2
    site.clock.advance(301)
    site.round()
    assert [one.desired for one in site.pilots()] == [Desired.CANCEL] * 2
    for pilot in pilots:
        site.tell(pilot.job_id, JobState.CANCELLED, reason=Reason.CANCELLED, ended_at=site.clock())
    site.round()
    assert site.pilots() == []


def test_the_next_pilot_is_asked_for_before_the_walltime_is_over(site: Site) -> None:
    site.pool(nodes="1", walltime="1h")
    (pilot,) = site.hold()
    site.clock.advance(HOUR * 0.8)
    site.round()
    assert len(site.pilots()) == 1
    site.clock.advance(HOUR * 0.1)
    site.round()
    assert [one.job_id == pilot.job_id for one in site.pilots()] == [True, False]


def test_a_closed_pool_lets_everything_go_once_tasks_have_saved(site: Site) -> None:
    site.pool(nodes="1")
    (pilot,) = site.hold()
    task_id = site.launch(resources={"accelerators": "A100:1..4"})
    site.round()
    order = site.order(task_id)
    assert order is not None
    site.run(order.job_id)
    closed = pools.close(site.ctx, site.user_id, "p")
    assert closed.closed_at is not None
    site.round()
    asked = site.order(task_id)
    assert asked is not None and asked.desired is Desired.YIELD
    assert [one.desired for one in site.pilots()] == [Desired.RUN]
    site.end(order.job_id, Reason.CONTINUED)
    site.round()
    assert [one.desired for one in site.pilots()] == [Desired.CANCEL]
    assert "closed" in site.task(task_id).pending_reason
    with pytest.raises(InvalidInput, match="closed"):
        site.launch()
    site.tell(pilot.job_id, JobState.CANCELLED, reason=Reason.CANCELLED, ended_at=site.clock())
    site.pool()


def test_a_program_that_goes_on_without_doing_anything_is_not_obeyed_for_ever(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    task_id = site.launch(resources={"accelerators": "A100:2"})
    for _ in range(3):
        site.round()
        order = site.order(task_id)
        assert order is not None
        site.run(order.job_id)
        site.end(order.job_id, Reason.CONTINUED)
    assert site.task(task_id).state is TaskState.FAILED


def test_what_past_tasks_measured_serves_the_next_one(site: Site) -> None:
    site.pool(nodes="1..2")
    site.hold()
    first = site.launch(resources={"accelerators": "A100:1..4"}, run="python train.py")
    site.round()
    order = site.order(first)
    assert order is not None
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=4, step_s=0.3)
    site.measure(order.job_id, 200, slots=4, step_s=0.3)
    site.end(order.job_id, Reason.COMPLETED)
    site.round()
    second = site.launch(resources={"accelerators": "A100:1..4"}, run="python train.py")
    site.round()
    placed = site.order(second)
    assert placed is not None
    site.run(placed.job_id)
    shown = next(one for one in pools.get(site.ctx, site.user_id, "p").tasks if one.task_id == second)
    assert shown.slots == 4
    with site.ctx.db.read() as session:
        kept = pools.find(session, site.user_id, "p").plan["estimates"][second]
    assert kept["goodput"] == pytest.approx(64 / 0.3, rel=0.3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nodes": "8..2"}, "nodes"),
        ({"nodes": "0"}, "nodes"),
        ({"nodes": 10**9}, "nodes"),
        ({"accelerators": "A100:1..4"}, "accelerators"),
        ({"slots": 4}, "slots"),
        ({"accelerators": None}, "slots"),
        ({"walltime": "5s"}, "walltime"),
        ({"endpoint": "nowhere"}, "endpoint"),
        ({"nmae": "x"}, "nmae"),
        ({"name": "two\nlines"}, "name"),
    ],
)
def test_what_cannot_be_a_pool_is_refused_by_name(site: Site, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        site.pool(**fields)
    assert field in f"{refused.value.field} {refused.value.message}"
    assert pools.list_pools(site.ctx, site.user_id) == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pool": "q"}, "pool"),
        ({"resources": {"accelerators": "H100:1..2"}}, "resources.accelerators"),
        ({"resources": {"accelerators": "A100:64"}}, "resources.accelerators"),
        ({"resources": {"accelerators": "A100:1..2"}, "num_nodes": 2}, "num_nodes"),
        ({"resources": {"accelerators": "A100:1"}, "num_nodes": 3}, "num_nodes"),
        ({"num_nodes": 3}, "num_nodes"),
        ({"resources": {"accelerators": "A100:1..2"}, "pool": None}, "resources.accelerators"),
        ({"resources": {"accelerators": "A100:2", "slots": "1..2"}}, "resources.slots"),
        ({"resources": {"infra": "elsewhere"}}, "resources.infra"),
    ],
)
def test_a_task_that_will_never_fit_is_refused_by_name(site: Site, fields: dict[str, Any], field: str) -> None:
    site.pool()
    with pytest.raises(InvalidInput) as refused:
        site.launch(**fields)
    assert refused.value.field == field


def test_names_belong_to_open_pools(site: Site, other_id: str) -> None:
    site.pool()
    with pytest.raises(Conflict):
        site.pool()
    with pytest.raises(NotFound):
        pools.get(site.ctx, other_id, "p")
    with pytest.raises(NotFound):
        pools.close(site.ctx, other_id, "p")


def test_an_endpoint_that_is_removed_closes_its_pools(site: Site) -> None:
    site.pool()
    site.hold()
    endpoints.remove(site.ctx, site.user_id, site.name, force=True)
    site.round()
    found = pools.list_pools(site.ctx, site.user_id, closed=True)[0]
    assert found.closed_at is not None
    with pytest.raises(Conflict, match="closed"):
        pools.change(site.ctx, site.user_id, "p", {"nodes": "2"})


def test_changes_hold_for_what_comes(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    changed = pools.change(site.ctx, site.user_id, "p", {"nodes": "2", "idle": "1h"})
    assert (changed.spec.nodes, changed.spec.idle) == ("2", HOUR)
    site.round()
    assert len(site.pilots()) == 2
    with pytest.raises(InvalidInput, match="cannot be changed"):
        pools.change(site.ctx, site.user_id, "p", {"accelerators": "A100:8"})


def test_a_task_that_is_stopped_leaves_its_slots(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    first = site.launch(resources={"accelerators": "A100:4"})
    site.round()
    order = site.order(first)
    assert order is not None
    site.run(order.job_id)
    second = site.launch(resources={"accelerators": "A100:4"})
    site.round()
    assert site.order(second) is None
    tasks.cancel(site.ctx, site.user_id, first)
    site.tell(order.job_id, JobState.CANCELLED, reason=Reason.CANCELLED, ended_at=site.clock())
    site.round()
    assert site.order(second) is not None
