"""Tasks on a real Slurm cluster, from the command line to the log: the server outside, the agent on the login node."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core import clusters
from diamond.core.endpoint_words import free_nodes
from diamond.core.errors import InvalidInput
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import Task
from testing.cluster import BINDS, Cluster
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.waiting import eventually

POLICY = """
denied_partitions = ["restricted"]
max_nodes = 3
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("trixie")
    with (
        Site("alpha", binds=BINDS) as site,
        Cluster(site, tmp_path_factory.mktemp("cluster") / "home with space", policy=POLICY) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_running(cluster: Cluster) -> Iterator[None]:
    """What a failed test leaves in the queue must not fail the next one too."""
    yield
    with cluster.service.client() as client:
        for task in [task for task in client.tasks.list() if not task.state.is_final]:
            client.tasks.cancel(task.id)
            client.tasks.wait(task.id, timeout_s=60)


def launch(cluster: Cluster, run: str, **fields: Any) -> str:
    spec = {"run": run, "resources": {"infra": "cluster", **fields.pop("resources", {})}, **fields}
    with cluster.service.client() as client:
        return client.tasks.create(spec).id


def done(cluster: Cluster, task_id: str, within_s: float = 60) -> Task:
    with cluster.service.client() as client:
        return client.tasks.wait(task_id, timeout_s=within_s)


def log(cluster: Cluster, task_id: str, attempt: int | None = None) -> str:
    with cluster.service.client() as client:
        return b"".join(client.tasks.logs(task_id, attempt)).decode()


def ran(cluster: Cluster, run: str, **fields: Any) -> str:
    """The log of a task that succeeded."""
    task = done(cluster, launch(cluster, run, **fields))
    text = log(cluster, task.id)
    assert (task.state, task.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), (task.detail, text)
    return text


def test_the_agent_found_out_what_the_cluster_has(cluster: Cluster) -> None:
    facts = cluster.endpoint().facts
    assert facts is not None
    assert (facts.scheduler, facts.scheduler_version[:5], facts.os_user) == ("slurm", "24.11", "user1")
    found = {partition.name: partition for partition in facts.partitions}
    assert "restricted" not in found, "the policy file does not allow it"
    assert found["debug"].is_default
    assert found["debug"].max_walltime_s == 120
    assert {gpu.model for group in found["gpu"].groups for gpu in group.gpus} == {"a100"}
    kinds = eventually(lambda: {one.kind: one for one in free_nodes(cluster.endpoint())}, what="a heartbeat")
    nodes = found["gpu"].nodes
    assert (kinds["a100"].nodes, kinds["a100"].free, kinds["a100"].down) == (nodes, nodes, 0), kinds
    assert kinds["a100"].gpus_free == kinds["a100"].gpus == clusters.of_endpoint(facts).gpus["a100"]
    assert not found["maintenance"].is_up
    assert found["spot"].is_preemptible
    shown = cluster.service.diamond("endpoint", "show", "cluster")
    assert shown.returncode == 0, shown.stderr
    for word in ("24.11", "debug", "a100", "max_nodes"):
        assert word in shown.stdout


def test_a_task_from_its_file_to_its_outputs(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os\nopen('result.txt', 'w').write(os.environ['X'])\nprint('trained')\n"
    )
    (tmp_path / "task.yaml").write_text(
        "name: \"it's a $(tour)\"\nworkdir: .\nresources: {accelerators: 'A100:2', cpus: 2}\nenvs: {X: }\n"
        "setup: echo set up\nrun: |\n  python3 program.py; echo gpus=$CUDA_VISIBLE_DEVICES on $SLURM_JOB_PARTITION\n"
        "outputs: [result.txt]\nmax_duration: 10m\n"
    )
    value = "a=b 'c' $(x)\nand \"more\" 名"
    service = cluster.service
    told = service.diamond("launch", str(tmp_path / "task.yaml"), "--infra", "cluster", "--env", f"X={value}")
    assert told.returncode == 0, told.stdout + told.stderr
    for word in ("set up", "trained", "gpus=0,1 on gpu"):
        assert word in told.stdout
    fetched = service.diamond("outputs", "it's a $(tour)", "--to", str(tmp_path / "out"))
    assert fetched.returncode == 0, fetched.stderr
    assert (tmp_path / "out" / "result.txt").read_text() == value
    shown = json.loads(service.diamond("show", "it's a $(tour)", "--json").stdout)
    assert shown["jobs"][0]["partition"] == "gpu"
    assert shown["jobs"][0]["scheduler_id"].isdecimal()
    assert shown["jobs"][0]["hosts"] == ["c1"] or shown["jobs"][0]["hosts"] == ["c2"]


RENDEZVOUS = """
import os, socket, time
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(where, backlog=world) as server:
        names = set()
        for _ in range(world - 1):
            peer, _ = server.accept()
            with peer, peer.makefile() as lines:
                names.add(lines.readline().strip())
    print("met", *sorted(names), flush=True)
else:
    for _ in range(200):
        try:
            with socket.create_connection(where) as peer:
                peer.sendall(f"{rank}@{os.environ['SLURMD_NODENAME']}\\n".encode())
            break
        except OSError:
            time.sleep(0.1)
"""


def test_ranks_on_two_nodes_meet(cluster: Cluster) -> None:
    text = ran(
        cluster,
        f"python3 - <<'EOF'\n{RENDEZVOUS}\nEOF\necho node=$NODE_RANK local=$LOCAL_RANK",
        num_nodes=2,
        ranks_per_node=2,
        slurm={"partition": "gpu"},
    )
    assert "met 1@c1 2@c2 3@c2" in text
    for node in (0, 1):
        for local in (0, 1):
            assert f"node={node} local={local}" in text


def test_jobs_on_compute_nodes_measure_themselves(cluster: Cluster) -> None:
    """Both nodes of one job, each with its own numbers; a job of one node, as local ones do; and nothing stays."""
    hold = "python3 -c 'import os, time; x = bytearray({}); time.sleep(24)'"
    two = launch(
        cluster,
        "case $NODE_RANK in 0) " + hold.format(50_000_000) + ";; *) " + hold.format(90_000_000) + ";; esac",
        num_nodes=2,
        slurm={"partition": "gpu"},
    )
    one = launch(cluster, hold.format(70_000_000), slurm={"partition": "cpu"})
    assert [done(cluster, task, 120).state for task in (two, one)] == [TaskState.SUCCEEDED] * 2
    with cluster.service.client() as client:
        use = {series.key: series for series in client.tasks.metrics(two) if series.stream == "util"}
        curve = client.tasks.curve(two, "sys/node1/rss_bytes", x="time")
        alone = {series.key: series for series in client.tasks.metrics(one) if series.stream == "util"}
    assert set(use) == {f"sys/node{node}/{what}" for node in (0, 1) for what in ("cpu_percent", "rss_bytes")}
    assert 50_000_000 < use["sys/node0/rss_bytes"].last_value < 90_000_000 < use["sys/node1/rss_bytes"].last_value
    assert len(curve.points) == use["sys/node1/rss_bytes"].count >= 2
    assert set(alone) == {"sys/cpu_percent", "sys/rss_bytes"}
    assert 70_000_000 < alone["sys/rss_bytes"].last_value < 200_000_000
    left = ran(cluster, "sleep 1; cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' ' '", num_nodes=2, ranks_per_node=1)
    assert left.count("measure.sh util.node") <= 2, "those of this job alone"


def test_options_reach_slurm_and_odd_values_arrive(cluster: Cluster) -> None:
    envs = {"A": 'it\'s "x"\n$(touch pwned) `id` \\ \t é 名\n\n', "EMPTY": ""}
    text = ran(
        cluster,
        'printf "%s|%s|" "$A" "$EMPTY"; scontrol show job "$SLURM_JOB_ID"; ls',
        envs=envs,
        slurm={"partition": "cpu", "account": "bio", "time": "00:05:00", "extra": ["--comment=a b c", "--nice=10"]},
    )
    assert text.startswith(f"{envs['A']}||")
    for word in ("Partition=cpu", "Account=bio", "TimeLimit=00:05:00", "Comment=a b c", "Requeue=0"):
        assert word in text
    assert "pwned" not in text.partition("||")[2]


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"resources": {"accelerators": "H100:8"}}, "resources.accelerators", "a100:2 in gpu"),
        ({"slurm": {"partition": "gqu"}}, "slurm.partition", "no partition gqu"),
        ({"slurm": {"partition": "restricted"}}, "slurm.partition", "no partition restricted"),
        ({"slurm": {"partition": "gpu", "time": "30d"}}, "slurm.time", "partition gpu allows"),
        ({"slurm": {"partition": "gpu", "extra": ["--part=admin"]}}, "slurm.extra", "--part is not a whole option"),
    ],
)
def test_the_impossible_is_refused_at_once(cluster: Cluster, fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        launch(cluster, "true", **fields)
    assert caught.value.field == field
    assert says in caught.value.message


def test_the_policy_of_the_endpoint_refuses_by_name(cluster: Cluster) -> None:
    task = done(cluster, launch(cluster, "true", num_nodes=4))
    assert (task.state, task.reason) == (TaskState.FAILED, Reason.REJECTED)
    assert "max_nodes = 3" in task.detail


def test_slurm_refuses_in_its_own_words(cluster: Cluster) -> None:
    task = done(cluster, launch(cluster, "true", slurm={"constraint": "moonrock&(a|b)"}))
    assert (task.state, task.reason) == (TaskState.FAILED, Reason.REJECTED)
    assert "feature" in task.detail.lower()


def test_a_waiting_task_says_why_and_can_be_stopped(cluster: Cluster) -> None:
    task_id = launch(cluster, "true", slurm={"extra": ["--hold"]})
    with cluster.service.client() as client:
        eventually(lambda: "held" in client.tasks.get(task_id).pending_reason.lower(), within_s=20, what="says why")
    queue = cluster.service.diamond("queue")
    assert "held" in queue.stdout.lower(), queue.stdout
    with cluster.service.client() as client:
        client.tasks.cancel(task_id)
    assert done(cluster, task_id).state is TaskState.CANCELLED
    assert cluster.site.run(["squeue", "--noheader", "--me"]).stdout.strip() == ""


def test_a_busy_partition_gives_an_expected_start(cluster: Cluster) -> None:
    first = launch(cluster, "sleep 110", slurm={"partition": "cpu", "time": "2m", "exclusive": True})
    with cluster.service.client() as client:
        eventually(lambda: client.tasks.get(first).state is TaskState.RUNNING, within_s=30)
        # Only now: several jobs are handed to Slurm at once, in no certain order.
        second = launch(cluster, "true", slurm={"partition": "cpu", "time": "1m", "exclusive": True})
        task = eventually(
            lambda: (t := client.tasks.get(second)).expected_start_at and t, within_s=90, what="an estimate"
        )
        assert task.pending_reason
        assert time.time() - 60 < task.expected_start_at < time.time() + 600
        client.tasks.cancel(first)
    assert done(cluster, second).state is TaskState.SUCCEEDED


def test_stopping_a_running_task(cluster: Cluster) -> None:
    task_id = launch(cluster, "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    eventually(lambda: "up" in log(cluster, task_id), within_s=20)
    with cluster.service.client() as client:
        client.tasks.cancel(task_id)
    task = done(cluster, task_id)
    assert (task.state, task.reason) == (TaskState.CANCELLED, Reason.CANCELLED)
    assert "told" in log(cluster, task_id)


CHAIN = """
n=$(cat place 2>/dev/null || echo 0)
echo "link at $n resumed=$DIAMOND_RESUMED"
trap 'echo "$n" > place; exit 85' USR1
while [ "$n" -lt 160 ]; do sleep 0.25; n=$((n + 1)); done
echo done at "$n"
"""


def test_a_chain_across_walltimes_survives_restarts(cluster: Cluster) -> None:
    task_id = launch(cluster, CHAIN, max_duration="10m", slurm={"partition": "debug", "time": "1m", "warning": "55s"})
    with cluster.service.client() as client:
        eventually(lambda: len(client.tasks.get(task_id).jobs) == 2, within_s=30, what="the next link is queued ahead")
        ahead = eventually(lambda: (j := client.tasks.get(task_id).jobs[1]).state is JobState.QUEUED and j, within_s=30)
        assert ahead.continues == client.tasks.get(task_id).jobs[0].id
    cluster.kill_agent()
    cluster.service.kill(cluster.service.server)
    cluster.service.start_server()
    cluster.start_agent()
    task = done(cluster, task_id, within_s=150)
    assert task.state is TaskState.SUCCEEDED, [(j.state, j.reason, j.detail, j.continues) for j in task.jobs]
    ran_ones = [job for job in task.jobs if job.started_at and job.reason != Reason.CANCELLED]
    assert len(ran_ones) >= 2
    assert [job.reason for job in ran_ones[:-1]] == [Reason.CONTINUED] * (len(ran_ones) - 1)
    assert "done at 160" in log(cluster, task_id, ran_ones[-1].attempt)
    assert "resumed=1" in log(cluster, task_id, ran_ones[-1].attempt)
    eventually(lambda: not cluster.site.run(["squeue", "--noheader", "--me"]).stdout.strip(), within_s=30)
