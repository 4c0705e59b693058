"""Nodes of a Slurm job die in the middle of a training, which goes on with those that are left, in the same job."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import Task
from diamond.sdk.client import Client
from testing import torch_at_site
from testing.cluster import BINDS, Cluster
from testing.minihpc import Node, Partition, Site
from testing.minihpc.fixtures import require
from testing.waiting import PATIENCE, eventually

PROGRAM = Path(__file__).parents[1] / "train" / "outlived.py"
SAMPLES, BATCH = 211, 8  # as in the program, which needs torch to be imported
NODES = tuple(Node(name=f"c{number}", cpus=2) for number in range(1, 4))
PARTITION = Partition(
    name="main",
    nodes=tuple(node.name for node in NODES),
    options={"Default": "YES", "MaxTime": "1:00:00", "PreemptMode": "OFF"},
)
# The step at which a node is lost, the one at which a training waits for Slurm to notice, and how many there are.
LOST_AT, HOLD_AT, UNTIL, STEP_S = 40, 180, 200, 0.15


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("trixie")
    if reason := torch_at_site.why_not():
        pytest.skip(reason)
    binds = {**BINDS, **torch_at_site.binds(), "/opt/outlived.py": PROGRAM}
    with (
        Site("gamma", nodes=NODES, partitions=[PARTITION], binds=binds, pythons=[torch_at_site.VERSION]) as site,
        Cluster(site, tmp_path_factory.mktemp("cluster") / "home") as running,
    ):
        yield running


def launched(client: Client, ledger: str, num_nodes: int, hold: str = "", **fields: Any) -> Task:
    return client.tasks.create(
        {
            "run": f"exec {torch_at_site.PYTHON} /opt/outlived.py {ledger} {UNTIL} {STEP_S} {hold}",
            "envs": {"PYTHONPATH": torch_at_site.PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            "resources": {"infra": "cluster"},
            "slurm": {"partition": "main", "time": "10m"},
            "num_nodes": num_nodes,
            **fields,
        }
    )


def batches(cluster: Cluster, ledger: str) -> list[dict[str, Any]]:
    """Of all ranks and generations. Whole lines only: they may be written to just now."""
    found = []
    for path in cluster.site.path(str(Path(ledger).parent)).glob(f"{Path(ledger).name}.*"):
        found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return found


def step_reached(cluster: Cluster, ledger: str, generation: int = 0) -> int:
    return max((one["step"] for one in batches(cluster, ledger) if one["generation"][1] >= generation), default=0)


def trained_on(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batches that count: a generation begins at a checkpoint, and does anew what came after it."""
    newest: dict[int, list[int]] = {}
    for one in found:
        newest[one["step"]] = max(newest.get(one["step"], [0, 0]), one["generation"])
    return [one for one in found if one["generation"] == newest[one["step"]]]


def assert_every_sample_once(found: list[dict[str, Any]], num_nodes: int) -> None:
    counted = trained_on(found)
    assert {one["step"] for one in counted} == set(range(1, UNTIL + 1))
    whole = UNTIL // math.ceil(SAMPLES / (num_nodes * BATCH))
    assert whole >= 10
    for epoch in range(whole):
        seen = sorted(sample for one in counted if one["epoch"] == epoch for sample in one["samples"])
        assert seen == list(range(SAMPLES)), f"epoch {epoch}"


def node_state(site: Site, name: str) -> str:
    return site.run(["sinfo", "-h", "-N", "-n", name, "-o", "%T"], user="root").stdout.split()[0].rstrip("*")


def job_of(client: Client, task: Task) -> Any:
    (job,) = client.tasks.get(task.id).jobs
    return job


def assert_it_went_on(cluster: Cluster, client: Client, task: Task, ledger: str, first: Any, left: list[str]) -> None:
    """The task succeeds in its one job, on the nodes that are left, and what is told of it says so."""
    done = client.tasks.wait(task.id, timeout_s=150 * PATIENCE)
    said = b"".join(client.tasks.logs(task.id)).decode()
    assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), (done.detail, said)
    (job,) = done.jobs
    assert (job.id, job.scheduler_id) == (first.id, first.scheduler_id)
    found = batches(cluster, ledger)
    assert {str(one["generation"][0]) for one in found} == {job.scheduler_id}
    last = max(one["generation"] for one in found)
    assert sorted({one["node"] for one in found if one["generation"] == last}) == left
    assert min(one["step"] for one in found if one["generation"] == last) > 1, "from a checkpoint, not from the start"
    assert_every_sample_once(found, len(first.hosts))
    gap_s = min(one["at"] for one in found if one["generation"] == last) - max(
        one["at"] for one in found if one["generation"] != last
    )
    assert gap_s < 20 * PATIENCE, "the others came together again within seconds"
    assert f"a node was lost; going on with {len(left)} rank" in said, said
    training = client.tasks.training(task.id)
    assert training.latest is not None
    assert (training.latest.nodes, training.latest.restarts) == (len(left), last[1])
    assert {row.nodes for row in training.by_size} >= {len(left), len(first.hosts)}


@pytest.mark.timeout(400)
def test_a_node_whose_power_goes_is_done_without(cluster: Cluster) -> None:
    ledger, site = "/home/user1/power", cluster.site
    with cluster.service.client() as client:
        task = launched(client, ledger, 3, hold=str(HOLD_AT), min_nodes=2)
        eventually(lambda: step_reached(cluster, ledger) >= LOST_AT, within_s=90, every_s=0.2, what="it trains")
        first = job_of(client, task)
        kept, victim, other = first.hosts
        site.kill_node(victim)
        try:
            again = lambda: step_reached(cluster, ledger, 1)  # noqa: E731
            eventually(lambda: again() >= LOST_AT, within_s=40, every_s=0.2, what="the others train on")
            eventually(lambda: node_state(site, victim) == "down", within_s=60, every_s=0.5, what="Slurm notices")
            before = again()
            site.path(f"{ledger}-go").touch()
            eventually(lambda: again() > before + 3, within_s=30, every_s=0.2, what="and that changes nothing")
            assert job_of(client, task).state == JobState.RUNNING
            assert_it_went_on(cluster, client, task, ledger, first, [kept, other])
        finally:
            site.start_node(victim)


@pytest.mark.timeout(400)
def test_a_node_that_an_administrator_takes_down_is_done_without(cluster: Cluster) -> None:
    ledger, site = "/home/user1/taken", cluster.site
    with cluster.service.client() as client:
        task = launched(client, ledger, 2, min_nodes=1)
        eventually(lambda: step_reached(cluster, ledger) >= LOST_AT, within_s=90, every_s=0.2, what="it trains")
        first = job_of(client, task)
        kept, victim = first.hosts
        site.run(["scontrol", "update", f"NodeName={victim}", "State=DOWN", "Reason=repair"], user="root")
        try:
            assert_it_went_on(cluster, client, task, ledger, first, [kept])
        finally:
            site.wait_for_nodes(victim)  # it answers, and so is taken back


@pytest.mark.timeout(400)
def test_without_min_nodes_slurm_ends_the_job(cluster: Cluster) -> None:
    ledger, site = "/home/user1/whole", cluster.site
    with cluster.service.client() as client:
        task = launched(client, ledger, 2)
        eventually(lambda: step_reached(cluster, ledger) >= LOST_AT, within_s=90, every_s=0.2, what="it trains")
        victim = job_of(client, task).hosts[1]
        site.run(["scontrol", "update", f"NodeName={victim}", "State=DOWN", "Reason=repair"], user="root")
        try:
            done = client.tasks.wait(task.id, timeout_s=90 * PATIENCE)
            assert (done.state, done.reason) == (TaskState.FAILED, Reason.NODE_FAIL), done.detail
        finally:
            site.wait_for_nodes(victim)  # it answers, and so is taken back


@pytest.mark.timeout(500)
def test_the_loss_of_the_first_node_ends_the_job_and_another_goes_on(cluster: Cluster) -> None:
    """Slurm itself would keep the others until the job's time is over: its script ran on the first node."""
    ledger, site = "/home/user1/first", cluster.site
    with cluster.service.client() as client:
        task = launched(client, ledger, 2, min_nodes=1, retry={"max_retries": 1, "backoff": "1s"})
        eventually(lambda: step_reached(cluster, ledger) >= LOST_AT, within_s=90, every_s=0.2, what="it trains")
        victim = job_of(client, task).hosts[0]
        site.kill_node(victim)
        try:
            done = client.tasks.wait(task.id, timeout_s=240 * PATIENCE)
            said = b"".join(client.tasks.logs(task.id)).decode()
            told = [(job.state, job.reason, job.detail) for job in done.jobs]
            assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), (told, said)
            before, after = done.jobs
            assert before.reason == Reason.NODE_FAIL and victim in before.detail, told
            assert after.continues == before.id and victim not in after.hosts
            found = batches(cluster, ledger)
            assert min(one["step"] for one in found if str(one["generation"][0]) == after.scheduler_id) > 1
            assert_every_sample_once(found, 2)
        finally:
            site.start_node(victim)
