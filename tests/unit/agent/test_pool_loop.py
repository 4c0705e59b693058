"""The agent as a whole with pilots and jobs inside them, on this machine, against a server that is a Python object."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from diamond.agent.link import Link
from diamond.agent.main import Agent
from diamond.agent.policy import Policy
from diamond.agent.pool_orders import malformed
from diamond.agent.schedulers.local.scheduler import LocalScheduler
from diamond.agent.schedulers.pooled_local import PooledLocal
from diamond.core.endpoints import EndpointFacts
from diamond.core.pools import PoolNode
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.slurm import SlurmOptions
from diamond.core.states import Desired, JobState
from diamond.core.wire import JobOrder
from testing.pools import job_id, pilot_order, pooled_order

Until = Callable[..., Any]
SAVES = "trap 'echo saved; exit 85' USR1; echo ready; while :; do sleep 0.05; done"


class Endpoint:
    """An agent that can be stopped and started again, and the orders it gets."""

    def __init__(self, server: Any, home: Path) -> None:
        self.server = server
        self.home = home
        home.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        self.server.closed = False

        def scheduler(jobs: Path) -> PooledLocal:
            return PooledLocal(LocalScheduler(jobs, cpus=2, gpus=(), grace_s=1.0), jobs)

        self.agent = Agent(link=cast(Link, self.server), home=self.home, scheduler=scheduler)
        self._thread = threading.Thread(target=self.agent.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.agent.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def put(self, order: JobOrder) -> RunDir:
        self.server._put(order)
        return RunDir(self.home / "jobs" / order.job_id)

    def ask(self, number: int, desired: Desired) -> None:
        self.server._put(replace(self.server.orders[job_id(number)][1], desired=desired))


@pytest.fixture
def endpoint(server: Any, home: Path, until: Until) -> Iterator[Endpoint]:
    one = Endpoint(server, home)
    yield one
    for name in list(server.orders):
        if name not in server.finals:
            server.cancel(name)
    until(lambda: set(server.finals) == set(server.orders), "all jobs are over")
    one.stop()


def test_a_job_yields_its_place_and_goes_on_in_another(endpoint: Endpoint, server: Any, until: Until) -> None:
    pilot = endpoint.put(pilot_order(1))
    until(lambda: pilot.pilot.exists() and server.jobs[job_id(1)].state is JobState.RUNNING)
    assert server.hellos[-1]["facts"]["holds_pools"] is True
    endpoint.put(pooled_order(2, "echo 1 >> kept; " + SAVES, 1))
    until(lambda: "ready" in server.log(job_id(2)))
    endpoint.stop()
    endpoint.start()
    endpoint.ask(2, Desired.YIELD)
    result = server.result(job_id(2))
    assert (result.state, result.reason) == (JobState.SUCCEEDED, Reason.CONTINUED), result
    assert server.log(job_id(2)) == "ready\nsaved\n"

    # One that never began, in a pilot that waits for room: what it was to go on from is found by the next.
    endpoint.put(pilot_order(3))
    waits = endpoint.put(pooled_order(4, "echo never", 3, continues=job_id(2)))
    until(lambda: job_id(4) in server.jobs and server.jobs[job_id(4)].state is JobState.QUEUED)
    assert server.jobs[job_id(4)].pending_reason == "its pilot has not begun"
    endpoint.ask(4, Desired.YIELD)
    assert server.result(job_id(4)).reason is Reason.CONTINUED
    unheard = replace(pooled_order(5, "echo never", 1, continues=job_id(4)), desired=Desired.YIELD)
    endpoint.put(unheard)
    assert server.result(job_id(5)).reason is Reason.CONTINUED
    endpoint.put(pooled_order(6, "cat kept; echo $DIAMOND_RESUMED", 1, continues=job_id(5)))
    assert server.result(job_id(6)).reason is Reason.COMPLETED
    assert server.log(job_id(6)) == "1\n1\n" and not waits.stream("log").read_text()

    endpoint.ask(3, Desired.CANCEL)
    endpoint.ask(1, Desired.YIELD)
    assert server.result(job_id(1)).reason is Reason.COMPLETED, "a pilot that yields ends once nothing runs in it"


def test_a_job_is_told_apart_from_its_pilot(endpoint: Endpoint, server: Any, until: Until) -> None:
    pilot = endpoint.put(pilot_order(1))
    until(pilot.pilot.exists)
    runs = endpoint.put(pooled_order(2, "echo ready; sleep 60", 1))
    until(lambda: "ready" in server.log(job_id(2)))
    until(lambda: runs.stream("util").exists() and runs.stream("util").read_text(), "it is measured")
    assert not pilot.stream("util").exists(), "a pilot uses nothing"
    endpoint.ask(1, Desired.CANCEL)
    assert server.result(job_id(2)).reason is Reason.NODE_FAIL
    assert server.result(job_id(1)).reason is Reason.CANCELLED


def test_what_runs_in_a_pool_is_held_to_its_pilots_names(endpoint: Endpoint, server: Any, until: Until) -> None:
    """It names no partition and no account: those of its pilot count, which the rules allow."""
    (endpoint.home / "policy.toml").write_text('allowed_partitions = ["small"]\nallowed_accounts = ["mine"]\n')
    order = pilot_order(1)
    slurm = SlurmOptions(partition="small", account="mine")
    pilot = endpoint.put(replace(order, spec=replace(order.spec, slurm=slurm)))
    until(pilot.pilot.exists)
    endpoint.put(pooled_order(2, "true", 1))
    assert server.result(job_id(2)).reason is Reason.COMPLETED, server.result(job_id(2)).detail
    endpoint.stop()
    endpoint.start()  # the pilot is known from the journal
    endpoint.put(pooled_order(3, "true", 1))
    assert server.result(job_id(3)).reason is Reason.COMPLETED, server.result(job_id(3)).detail
    (endpoint.home / "policy.toml").write_text('allowed_partitions = ["other"]\n')
    endpoint.put(pooled_order(4, "true", 1))
    assert server.result(job_id(4)).detail == "policy.toml: allowed_partitions = other, the task asks for small"


def test_what_an_order_must_not_say() -> None:
    good = pooled_order(1, "true", 2, 3)
    place = good.place
    assert place is not None and malformed(good) == "" and malformed(pilot_order(1)) == ""

    def at(*nodes: PoolNode) -> JobOrder:
        return replace(good, place=replace(place, nodes=nodes))

    first = place.nodes[0]
    for wrong, word in (
        (at(), "at least one"),
        (at(first, first), "once"),
        (at(replace(first, pilot="../../home"), first), "id of its job"),
        (at(replace(first, slots=0), place.nodes[1]), "slots"),
        (at(first), "1 pilots for a task of 2 nodes"),
        (replace(good, place=replace(place, mem_bytes=-1)), "mem_bytes"),
        (replace(good, spec=replace(good.spec, ranks_per_node=0)), "ranks_per_node"),
        (replace(good, pilot=pilot_order(1).pilot), "cannot itself"),
        (replace(pilot_order(1), spec=replace(good.spec, num_nodes=2)), "one node"),
    ):
        assert word in malformed(wrong), (word, malformed(wrong))
        assert Policy().refusal(wrong) == malformed(wrong)


def test_the_owner_may_have_none_of_it() -> None:
    rules = Policy(allow_pools=False)
    assert "allow_pools = false" in rules.refusal(pooled_order(1, "true", 2))
    assert "holds a node" in rules.refusal(pilot_order(1))
    facts = EndpointFacts(scheduler="local", holds_pools=True)
    assert not rules.filter_facts(facts).holds_pools and Policy().filter_facts(facts).holds_pools
