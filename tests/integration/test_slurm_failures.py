"""What goes wrong on real clusters, end to end: nodes die, memory runs out, somebody uses scancel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.cluster import BINDS, Cluster
from testing.minihpc import Site, memory
from testing.minihpc.fixtures import require
from testing.minihpc.slurm_conf import QUICK_NODE_FAIL
from testing.waiting import eventually


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("trixie")
    limits = memory.available() is None
    with (
        Site("beta", binds=BINDS, conf=QUICK_NODE_FAIL, memory_limits=limits) as site,
        Cluster(site, tmp_path_factory.mktemp("failures")) as running,
    ):
        yield running


def test_a_dead_node_is_noticed_and_the_task_goes_on_elsewhere(cluster: Cluster) -> None:
    program = 'if [ -e place ]; then echo "back with $(cat place)"; exit 0; fi; echo here > place; echo up; sleep 600'
    with cluster.service.client() as client:
        task = client.tasks.create(
            {
                "run": program,
                "retry": {"max_retries": 1, "backoff": "1s"},
                "slurm": {"partition": "gpu"},
                "max_duration": "1h",
            }
        )
        eventually(lambda: b"up" in b"".join(client.tasks.logs(task.id)), within_s=30, what="it runs")
        (node,) = eventually(lambda: client.tasks.get(task.id).jobs[0].hosts, within_s=10, what="where it runs")
        cluster.site.kill_node(node)
        try:
            done = client.tasks.wait(task.id, timeout_s=150)
            assert (done.state, done.jobs[0].reason) == (TaskState.SUCCEEDED, Reason.NODE_FAIL), done
            assert done.jobs[-1].hosts != (node,)
            assert done.jobs[-1].continues == done.jobs[0].id
            assert b"".join(client.tasks.logs(task.id)) == b"back with here\n"
        finally:
            cluster.site.start_node(node)


def test_scancel_by_hand_is_a_cancel(cluster: Cluster) -> None:
    with cluster.service.client() as client:
        task = client.tasks.create({"run": "echo up; sleep 600", "resources": {"infra": "cluster"}})
        eventually(lambda: b"up" in b"".join(client.tasks.logs(task.id)), within_s=30)
        cluster.site.run(["scancel", client.tasks.get(task.id).jobs[0].scheduler_id or ""])
        done = client.tasks.wait(task.id, timeout_s=30)
    assert (done.state, done.reason) == (TaskState.CANCELLED, Reason.CANCELLED)
    assert "scancel" in done.detail


def test_out_of_memory(cluster: Cluster) -> None:
    if why := memory.available():
        pytest.skip(why)
    with cluster.service.client() as client:
        task = client.tasks.create(
            {
                "run": "python3 -c 'x = bytearray(900 << 20); print(len(x))'",
                "resources": {"infra": "cluster", "memory": "200MB"},
            }
        )
        done = client.tasks.wait(task.id, timeout_s=60)
    assert (done.state, done.reason) == (TaskState.FAILED, Reason.OUT_OF_MEMORY), (done.detail, done.exit_code)
