"""`diamond.train` on a real Slurm cluster: on two nodes, and over more jobs than anybody is at home for."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from testing import torch_at_site
from testing.cluster import BINDS, SOURCE, Cluster
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.waiting import PATIENCE, eventually

PROGRAM = Path(__file__).parents[2] / "testing" / "trained.py"
SAMPLES = 211  # as in the program, which needs torch to be imported
BATCH = 16
JOB_S = 60  # Slurm's shortest limit
NUM_JOBS = 3  # one that agent and server see the beginning of, one that begins without them, one after they are back
STEP_S = 0.3
UNTIL = 240  # more steps than one job has the time for, and the next before it is told to end


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("trixie")
    if reason := torch_at_site.why_not():
        pytest.skip(reason)
    binds = {**BINDS, **torch_at_site.binds(), "/opt/trained.py": PROGRAM}
    with (
        Site("alpha", binds=binds, pythons=[torch_at_site.VERSION]) as site,
        Cluster(site, tmp_path_factory.mktemp("cluster") / "home") as running,
    ):
        yield running


def spec(ledger: str, until: int, step_s: float, **fields: Any) -> dict[str, Any]:
    return {
        "run": f"exec {torch_at_site.PYTHON} /opt/trained.py {ledger} {until} {step_s}",
        "envs": {"PYTHONPATH": torch_at_site.PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        "resources": {"infra": "cluster"},
        **fields,
    }


def steps(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: it may be written to just now."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def uninterrupted(folder: Path, until: int) -> list[str]:
    """The losses of the same program here, in one go and without Diamond."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DIAMOND_", "SLURM_"))}
    env = {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "DIAMOND_TRAIN_QUIET": "1"}
    argv = [sys.executable, str(PROGRAM), "ledger", str(until), "0"]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line["loss"] for line in steps(folder / "ledger.0")]


def test_two_nodes_train_one_model(cluster: Cluster) -> None:
    until, ledger = 40, "/home/user1/two"
    with cluster.service.client() as client:
        task = client.tasks.create(
            spec(ledger, until, 0.0, num_nodes=2, ranks_per_node=1, slurm={"partition": "debug", "time": "2m"})
        )
        done = client.tasks.wait(task.id, timeout_s=110 * PATIENCE)
        said = b"".join(client.tasks.logs(task.id)).decode()
        assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), (done.detail, said)
        assert "2 ranks (ddp)" in said
        curves = {series.key: series for series in client.tasks.metrics(task.id)}
    ranks = [steps(cluster.site.path(f"{ledger}.{rank}")) for rank in (0, 1)]
    assert [[line["step"] for line in lines] for lines in ranks] == [list(range(1, until + 1))] * 2
    assert len({line["node"] for lines in ranks for line in lines}) == 2, "each rank is on a node of its own"
    seen: Counter[tuple[int, int]] = Counter()
    for lines in ranks:
        for line in lines:
            seen.update((line["epoch"], sample) for sample in line["samples"])
    whole = until // math.ceil(SAMPLES / (2 * BATCH))
    assert whole >= 5
    for epoch in range(whole):
        assert sorted(sample for at, sample in seen if at == epoch) == list(range(SAMPLES)), epoch
    assert set(seen.values()) == {1}, "no rank saw what the other did"
    assert curves["loss"].count == until
    assert curves["loss"].last_value == float.fromhex(ranks[0][-1]["loss"])


@pytest.mark.timeout(1500)
def test_a_chain_of_jobs_trains_on_while_nobody_is_at_home(cluster: Cluster, tmp_path: Path) -> None:
    """Agent and server are killed in the middle, and come back only after the next job has begun without them.

    The first job ends because its time does, the next because it is told to: another minute would show no more.
    """
    ledger = "/home/user1/chain"
    file = cluster.site.path(f"{ledger}.0")

    def jobs_begun() -> list[str]:
        return list(dict.fromkeys(line["job"] for line in steps(file)))

    with cluster.service.client() as client:
        slurm = {"partition": "debug", "time": f"{JOB_S}s"}
        task = client.tasks.create(spec(ledger, UNTIL, STEP_S, max_duration="30m", slurm=slurm))
        eventually(jobs_begun, within_s=2 * JOB_S, every_s=0.5, what="the first job trains")
        begun = jobs_begun()  # which the server may still believe to wait
        ahead = eventually(
            lambda: [
                job.id
                for job in client.tasks.get(task.id).jobs
                if job.state is JobState.QUEUED and job.id not in begun
            ],
            within_s=JOB_S, every_s=0.5, what="the one after it is in Slurm's queue",
        )  # fmt: skip
    cluster.kill_agent()
    cluster.service.kill(cluster.service.server)
    eventually(lambda: ahead[0] in jobs_begun(), within_s=3 * JOB_S, every_s=0.5, what="the next began by itself")
    time.sleep(3.0)
    (trains,) = (one.pid for one in cluster.site.processes() if "/opt/trained.py" in one.argv)
    os.kill(trains, signal.SIGTERM)
    cluster.service.start_server()
    cluster.start_agent()
    with cluster.service.client() as client:
        done = client.tasks.wait(task.id, timeout_s=10 * JOB_S * PATIENCE)
        ran = [job for job in done.jobs if job.started_at and job.reason != Reason.CANCELLED]
        told = [(job.attempt, job.state, job.reason, job.detail) for job in done.jobs]
        assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), told
        series = [one for job in ran for one in client.tasks.metrics(task.id, job.attempt)]
    assert {job.reason for job in ran[:-1]} == {Reason.CONTINUED}, told
    lines = steps(file)
    assert len(jobs_begun()) >= NUM_JOBS
    assert jobs_begun() == [job.id for job in ran if job.id in jobs_begun()], "one after the other"
    for before, after in pairwise(lines):
        repeated = before["step"] + 1 - after["step"]
        if before["job"] == after["job"]:
            assert repeated == 0, (before, after)
        else:
            assert repeated in (0, 1), f"between {before} and {after}"
    assert (lines[0]["step"], lines[-1]["step"]) == (1, UNTIL)
    assert sum(one.count for one in series if one.key == "loss") == len(lines), (
        "every step's metrics are at the server, those of the outage too"
    )
    last = {line["step"]: line["loss"] for line in lines}
    assert [last[step] for step in range(1, UNTIL + 1)] == uninterrupted(tmp_path, UNTIL)
