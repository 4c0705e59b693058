"""Jobs on the login node beside Slurm's: the same promises, on one real site."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from diamond.core.reasons import Reason
from diamond.core.states import JobState
from testing.bench import SlurmBench
from testing.minihpc import Site

SHOW = 'echo "nice $(nice) slurm ${SLURM_JOB_ID:-none} cpus $DIAMOND_CPUS"'


@pytest.fixture
def both(contract_sites: Callable[[str], Site]) -> Iterator[SlurmBench]:
    made = SlurmBench(contract_sites("trixie"), env={"LOGIN_CPUS": "1"})
    yield made
    made.close()


def test_each_runs_where_it_should(both: SlurmBench) -> None:
    here = both.submit(SHOW, on_login=True, cpus=8, mem_bytes=2**50, gpus=4, num_nodes=3)
    there = both.submit(SHOW)
    seen = {job.name: both.result(job) for job in (here, there)}
    assert all(one.reason == Reason.COMPLETED for one in seen.values()), seen
    assert both.log(here) == f"nice {min(19, os.nice(0) + 10)} slurm none cpus 1\n"
    assert f"slurm {seen[there.name].scheduler_id} cpus 1\n" in both.log(there)
    assert (seen[here.name].hosts, both.ids(here)) == (("contract-trixie",), [])
    assert len(both.ids(there)) == 1
    facts = both.scheduler.capacity()
    assert (facts.scheduler, [one.name for one in facts.partitions]) == ("slurm", ["debug"])


def test_few_at_once(both: SlurmBench) -> None:
    jobs = [both.submit("sleep 0.4", on_login=True) for _ in range(3)]
    ended = [both.result(job) for job in jobs]
    spans = sorted((one.started_at or 0.0, one.ended_at or 0.0) for one in ended)
    assert all(before[1] <= after[0] + 0.05 for before, after in itertools.pairwise(spans))


def test_both_survive_the_agent(both: SlurmBench) -> None:
    running = both.submit("echo up; sleep 3; echo done", on_login=True)
    waiting = both.submit("echo second", on_login=True)
    batch = both.submit("echo up; sleep 3; echo done")
    for job in (running, batch):
        both.said(job, "up")
    both.scheduler.kill()
    both._scheduler = None
    found = both.scheduler.observe()
    assert {found[job.name].state for job in (running, batch)} == {JobState.RUNNING}
    assert found[waiting.name].state == JobState.QUEUED
    both.scheduler.submit(running)  # as a journal that lags behind would
    for job in (running, waiting, batch):
        assert both.result(job).reason == Reason.COMPLETED
    assert both.log(running) == both.log(batch) == "up\ndone\n"


def test_cancel_forget_and_usage_go_to_both(both: SlurmBench) -> None:
    jobs = [both.submit("echo up; sleep 60", on_login=where) for where in (True, False)]
    for job in jobs:
        both.until(job, JobState.RUNNING)
    usage = both.scheduler.usage()
    assert (usage.jobs_running, usage.cpus_used) == (2, 1)
    both.scheduler.cancel([job.name for job in jobs])
    assert [both.result(job).reason for job in jobs] == [Reason.CANCELLED] * 2
    both.scheduler.forget([job.name for job in jobs])
    assert both.scheduler.observe() == {}
    both.start()
    assert both.scheduler.observe() == {}


def test_a_time_limit_holds_on_the_login_node(both: SlurmBench) -> None:
    job = both.submit(
        "trap 'echo warned' USR1; for i in $(seq 100); do sleep 0.1; done", on_login=True, time_limit_s=2.0, warn_s=1.0
    )
    assert (both.result(job).reason, "warned" in both.log(job)) == (Reason.TIME_LIMIT, True)
