"""Pilots and jobs inside them on a real Slurm cluster of two nodes: what Slurm and the stewards make of it together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from diamond.agent.schedulers.base import Observed
from diamond.agent.table import Tracked, report_of
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.states import JobState
from diamond.core.wire import JobOrder
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.minihpc.slurm_conf import Node, Partition
from testing.pools import Pools, job_id, pilot_order, pooled_order
from testing.slurm_driver_host import BINDS
from testing.waiting import eventually

NODES = tuple(Node(name=name, cpus=4, gpu_type="a100", num_gpus=4) for name in ("c1", "c2"))
PARTITION = Partition(name="main", nodes=("c1", "c2"), options={"Default": "YES", "MaxTime": "1-00:00:00"})
SAVES = "trap 'echo saved; exit 85' USR1; echo ready; while :; do sleep 0.05; done"
SHOWS = (
    "echo $(hostname) rank $RANK of $WORLD_SIZE gpus $CUDA_VISIBLE_DEVICES of $SLURM_JOB_ID "
    "ends ${SLURM_JOB_END_TIME-unset}; "
)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    require("trixie")
    with Site("pools", nodes=NODES, partitions=[PARTITION], binds=BINDS) as running:
        yield running


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pools") / "driver.log"


@pytest.fixture(scope="module")
def pools(site: Site, log_file: Path) -> Iterator[Pools]:
    """With two pilots, each of a node of its own."""
    site.run(["mkdir", "-p", "/home/user1/agent/jobs"])
    with log_file.open("w") as log:
        one = Pools(site, "/home/user1/agent/jobs", log=log)
        try:
            held = [one.put(pilot_order(number, slots=4, gpus="a100")) for number in (1, 2)]
            eventually(lambda: all(pilot.pilot.exists() for pilot in held), within_s=30, what="the pilots have begun")
            assert {said(pilot)["host"] for pilot in held} == {"c1", "c2"}
            yield one
        finally:
            one.end()


def said(pilot: RunDir) -> dict[str, object]:
    found = json.loads(pilot.pilot.read_text())
    assert isinstance(found, dict)
    return found


def text(run_dir: RunDir) -> str:
    return run_dir.stream("log").read_text()


def wait_for(run_dir: RunDir, word: str, times: int) -> None:
    eventually(lambda: text(run_dir).count(word) == times, within_s=20, what=f"{times} times {word} in {text(run_dir)}")


def over(pools: Pools, number: int) -> Observed:
    def seen() -> Observed:
        return pools.observe()[job_id(number)]

    eventually(lambda: seen().state.is_final, within_s=40, what=f"{number} is over; it is {seen()}")
    return seen()


def reason(order: JobOrder, run_dir: RunDir, seen: Observed) -> Reason | None:
    """As the agent would report it."""
    return report_of(Tracked(order, run_dir.path), seen).reason


def steps(site: Site) -> set[str]:
    lines = site.run(["squeue", "--steps", "--noheader", "--format=%N %j"]).stdout.splitlines()
    return {line for line in lines if "batch" not in line and "extern" not in line}


def test_jobs_share_nodes_and_give_them_up(site: Site, pools: Pools) -> None:
    first = pooled_order(11, SHOWS + SAVES, 1, slots=2, gpus=True)
    wide = pooled_order(12, SHOWS + SAVES, 1, 2, slots=2, gpus=True)
    one, two = pools.put(first), pools.put(wide)
    wait_for(one, "ready", 2)
    wait_for(two, "ready", 4)
    hosts = [str(said(RunDir(one.path.parent / job_id(number)))["host"]) for number in (1, 2)]
    ids = [str(said(RunDir(one.path.parent / job_id(number)))["slurm_id"]) for number in (1, 2)]
    shown = [line.partition("] ")[2].split() for line in (text(one) + text(two)).splitlines() if "rank" in line]
    gpus = {(words[0], words[6], words[8]) for words in shown}
    assert gpus == {(hosts[0], "0,1", ids[0]), (hosts[0], "2,3", ids[0]), (hosts[1], "0,1", ids[1])}, shown
    assert {words[10] for words in shown} == {"unset"}, "a warning is to mean the end"
    ranks = {(words[0], words[2], words[4]) for words in shown}
    of_two = {(hosts[0], "0", "2"), (hosts[0], "1", "2")}
    of_four = {(hosts[rank // 2], str(rank), "4") for rank in range(4)}
    assert ranks == of_two | of_four
    assert {f"{hosts[0]} {job_id(11)}", f"{hosts[0]} {job_id(12)}"} <= steps(site)
    assert len(steps(site)) == 4  # the second job has one more on each node
    eventually(lambda: pools.observe()[job_id(12)].state is JobState.RUNNING, within_s=30, what="it is seen to run")
    seen = pools.observe()[job_id(12)]
    assert (seen.state, seen.hosts, seen.scheduler_id) == (JobState.RUNNING, tuple(hosts), ids[0])

    command = pools.shell(12, ["sh", "-c", "hostname; echo $DIAMOND_TASK_ID"], node=1)
    inside = site.run(command)
    assert inside.stdout.split() == [hosts[1], "tsk_00000012"], inside.stderr

    pools.warn(12)
    assert reason(wide, two, over(pools, 12)) is Reason.CONTINUED
    assert text(two).count("saved") == 4
    pools.warn(11)
    assert reason(first, one, over(pools, 11)) is Reason.CONTINUED
    assert not steps(site), "nothing is left"


def test_cancelled_jobs_leave_nothing(site: Site, pools: Pools) -> None:
    narrow = pools.put(pooled_order(21, "echo ready; sleep 60", 2, slots=1, gpus=True))
    wide = pools.put(pooled_order(22, "echo ready; sleep 60", 2, 1, slots=1, gpus=True))
    wait_for(narrow, "ready", 1)
    wait_for(wide, "ready", 2)
    pools.cancel([job_id(21), job_id(22)])
    for number in (21, 22):
        assert over(pools, number).reason is Reason.CANCELLED
    eventually(lambda: not steps(site), within_s=20, what="nothing is left")


def test_a_pilot_that_is_lost_takes_its_jobs_with_it_and_no_others(site: Site, pools: Pools) -> None:
    lone = pools.put(pooled_order(31, "echo ready; sleep 60", 1, slots=1, gpus=True))
    wide = pools.put(pooled_order(32, "echo ready; sleep 60", 2, 1, slots=1, gpus=True))  # its script is in the other
    stays = pools.put(pooled_order(33, SAVES, 2, slots=1, gpus=True))
    wait_for(lone, "ready", 1)
    wait_for(wide, "ready", 2)
    wait_for(stays, "ready", 1)
    lost = RunDir(lone.path.parent / job_id(1))
    site.run(["scancel", str(said(lost)["slurm_id"])])
    for number in (31, 32):
        ended = over(pools, number)
        assert (ended.reason, ended.detail) == (Reason.NODE_FAIL, "the pilot that held its node ended"), ended
    assert over(pools, 1).reason is Reason.CANCELLED
    assert pools.observe()[job_id(33)].state is JobState.RUNNING
    eventually(lambda: len(steps(site)) == 1, within_s=20, what="only the other pilot's own job is left")
    pools.warn(2)  # it ends when nothing runs in it
    pools.warn(33)
    assert over(pools, 33).exit_code == 85 and over(pools, 2).reason is Reason.COMPLETED
    assert not site.run(["squeue", "--noheader"]).stdout.strip()
