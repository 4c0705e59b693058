"""Two hundred tasks on a real Slurm cluster while everything that can break is broken: none lost, none run twice.

The judge is a ledger on the cluster's own file system, outside Diamond, and the logs byte for byte.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from diamond.core.errors import DiamondError
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.cluster import BINDS, Cluster
from testing.minihpc import Site, many_cpus
from testing.minihpc.fixtures import require
from testing.waiting import eventually

TASKS = 200
LINES = 30
LEDGER = "/scratch/ledger"
CUT_S = float(os.environ.get("DIAMOND_TEST_CUT_S", "8"))  # how long the line to the server is cut; 120 by hand


def program(number: int) -> str:
    return (
        f'echo "{number} $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}}" >> {LEDGER}\n'
        f'for n in $(seq 1 {LINES}); do echo "line $n of task {number}"; sleep 0.0{number % 10}; done\n'
        f"exit {3 if number % 7 == 0 else 0}\n"
    )


def expected_log(number: int) -> bytes:
    return b"".join(f"line {n} of task {number}\n".encode() for n in range(1, LINES + 1))


class Launcher(threading.Thread):
    """Keeps asking, each with one key, until all are taken; as a careful client does."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.ids: dict[int, str] = {}

    def run(self) -> None:
        for number in range(TASKS):
            spec = {"name": f"task {number}", "run": program(number), "resources": {"infra": "cluster"}}
            while number not in self.ids:
                try:
                    with self.cluster.service.client() as client:
                        self.ids[number] = client.tasks.create(spec, idempotency_key=f"fault-{number}").id
                except DiamondError:
                    time.sleep(0.2)
            time.sleep(0.05)


def troubles(cluster: Cluster, chance: random.Random) -> list[Callable[[], None]]:
    """What goes wrong, one after the other, while tasks stream in."""
    site, service = cluster.site, cluster.service

    def restart_agent(point: str = "") -> None:
        cluster.kill_agent()
        cluster.start_agent(fault=point)

    def replace_server() -> None:
        service.kill(service.server)
        service.start_server()

    def cut_link() -> None:
        site.network.cut()
        time.sleep(CUT_S)
        site.network.mend()

    def controller_away() -> None:
        site.restart_controller()

    def requeue_one() -> None:
        found = site.run(["squeue", "--noheader", "--states=PENDING", "-o", "%i"], user="root").stdout.split()
        if found:
            job = chance.choice(found)
            site.run(["scontrol", "hold", job], user="root", check=False)
            time.sleep(1)
            site.run(["scontrol", "release", job], user="root", check=False)

    return [
        lambda: restart_agent("slurm.sbatch:3"),
        controller_away,
        lambda: restart_agent("slurm.submitted:5"),
        cut_link,
        replace_server,
        lambda: restart_agent("agent.submitting:2"),
        requeue_one,
        restart_agent,
        lambda: site.network.delay(80, jitter_ms=40, loss_percent=2),
        site.network.clear,
        controller_away,
        restart_agent,
    ]


@pytest.mark.timeout(900)
def test_two_hundred_tasks_through_every_trouble(tmp_path: Path) -> None:
    require("trixie")
    chance = random.Random(2411)
    with (
        Site("alpha", nodes=many_cpus(2, 8), binds=BINDS) as site,
        Cluster(site, tmp_path / "home") as cluster,
    ):
        site.write(LEDGER, "", user="user1", mode=0o666)
        launcher = Launcher(cluster)
        launcher.start()
        keeper = Keeper(cluster)
        keeper.start()
        for trouble in troubles(cluster, chance):
            time.sleep(chance.uniform(0.5, 1.5))
            trouble()
        launcher.join(240)
        keeper.stop()
        assert len(launcher.ids) == TASKS
        check(cluster, launcher.ids)


class Keeper(threading.Thread):
    """Starts an agent that died of its fault again, as systemd or cron would."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.5):
            agent = self.cluster.agent
            if agent is not None and agent.poll() is not None:
                time.sleep(0.5)
                if self.cluster.agent is agent and not self._done.is_set():
                    self.cluster.start_agent()

    def stop(self) -> None:
        self._done.set()
        self.join()
        agent = self.cluster.agent
        if agent is None or agent.poll() is not None:
            self.cluster.start_agent()


def check(cluster: Cluster, ids: dict[int, str]) -> None:
    with cluster.service.client() as client:

        def states() -> Counter[TaskState]:
            return Counter(client.tasks.get(task_id).state for task_id in ids.values())

        try:
            eventually(lambda: all(state.is_final for state in states()), within_s=240, every_s=2, what="all are over")
        except AssertionError:
            for argv in (["sinfo", "-N", "-l"], ["squeue", "--states=all"]):
                print(cluster.site.run(argv, user="root", check=False).stdout[-3000:])
            print(states(), cluster.service.log_tail("cluster-agent.log", 30))
            raise
        for number, task_id in ids.items():
            task = client.tasks.get(task_id)
            wanted = (
                (TaskState.FAILED, Reason.EXIT_NONZERO) if number % 7 == 0 else (TaskState.SUCCEEDED, Reason.COMPLETED)
            )
            assert (task.state, task.reason) == wanted, (number, task.detail, task.jobs)
            assert b"".join(client.tasks.logs(task_id)) == expected_log(number), number
    lines = cluster.site.path(LEDGER).read_text().splitlines()
    runs = Counter(int(line.split()[0]) for line in lines)
    assert runs == Counter(range(TASKS)), "each ran exactly once"
