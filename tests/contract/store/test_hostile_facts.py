"""An endpoint that says absurd things of itself holds nobody else up for long."""

from __future__ import annotations

import time

import pytest

from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts, EndpointUsage, Gpu, NodeGroup, Partition
from diamond.core.errors import TooLarge
from diamond.core.states import JobState, TaskState
from diamond.core.wire import MAX_REPORTED, Hello, JobReport, Report
from diamond.server.services import agents, endpoints, planning, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow
from testing.context import Clock
from testing.quotas import World


@pytest.fixture
def world(ctx: Context, clock: Clock, user_id: str) -> World:
    return World(ctx, clock, user_id)


def absurd() -> EndpointFacts:
    group = NodeGroup(count=512, cpus=512, gpus=(Gpu(model="H100", count=512),))
    partitions = tuple(Partition(name=f"p{n}", max_walltime_s=2**60, groups=(group,) * 4) for n in range(3000))
    return EndpointFacts(scheduler="slurm", nodes=2**62, cpus_per_node=2**62, partitions=partitions, allows_others=True)


def test_what_is_too_much_is_cut_before_it_is_kept_and_its_owner_is_told(world: World) -> None:
    agents.hello(world.ctx, world.endpoint, Hello(facts=absurd()))
    with world.ctx.db.read() as session:
        kept = decode(EndpointFacts, session.get_one(EndpointRow, world.endpoint).facts)
    assert len(kept.partitions) == 1000
    assert any(text.startswith("partitions: of 3000 entries") for text in kept.cut)
    (shown,) = endpoints.list_endpoints(world.ctx, world.owner)
    assert shown.facts == kept


def test_an_endpoint_with_thousands_of_partitions_holds_up_nobody(world: World) -> None:
    agents.hello(world.ctx, world.endpoint, Hello(facts=absurd()))
    world.launch()  # the facts are decoded
    began = time.process_time()
    for _ in range(5):
        world.launch("bob", resources={"accelerators": "H100:4"})
        endpoints.list_endpoints(world.ctx, world.users["bob"])
    assert time.process_time() - began < 5, "some hundredths of a second each, unless the machine is very busy"


def test_use_out_of_all_bounds_is_brought_back(world: World) -> None:
    usage = EndpointUsage(cpus_used=-5, jobs_queued=2**62, warnings=("w" * 10_000,) * 1000, gpus_used={"A": 2**62})
    agents.report(world.ctx, world.endpoint, Report(epoch=world.ctx.epoch, usage=usage))
    with world.ctx.db.read() as session:
        kept = decode(EndpointUsage, session.get_one(EndpointRow, world.endpoint).usage)
    assert (kept.cpus_used, len(kept.warnings), len(kept.warnings[0])) == (0, 50, 1000)
    assert kept.gpus_used["A"] <= 2**53


def test_a_report_about_too_much_names_the_field(world: World) -> None:
    jobs = tuple(JobReport(job_id="job_x", state=JobState.RUNNING) for _ in range(MAX_REPORTED + 1))
    with pytest.raises(TooLarge) as caught:
        agents.report(world.ctx, world.endpoint, Report(epoch=world.ctx.epoch, jobs=jobs))
    assert caught.value.field == "jobs"


def test_an_older_agents_facts_are_taken(world: World) -> None:
    raw = encode(absurd())
    raw.pop("cut")
    agents.hello(world.ctx, world.endpoint, decode(Hello, {"facts": raw}))


def test_a_transaction_that_looks_for_long_leaves_the_rest_for_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "MOST_S", -1.0)
    specs = [{"run": "true", "project": "pde", "name": f"task{n}"} for n in range(4)]
    made = [tasks.create(world.ctx, world.users["alice"], spec)[0] for spec in specs]
    assert {task.state for task in made} == {TaskState.PENDING}
    assert {task.pending_reason for task in made} == {planning.NOT_YET}
    assert planning.run_due(world.ctx) is None
    assert {world.task(task).state for task in made} == {TaskState.QUEUED}
