"""Twelve elastic trainings in a pool of eight slots on a real Slurm site, while things break, against fixed sizes.

    .venv/bin/python -m benchmarks.pool_site [--quick] [--check]            (as root: it starts a Slurm site)

The site has four nodes of two (declared) GPUs each. The trainings (`testing/elastic.py`) are real but for computing,
which is waited for. They arrive over fourteen minutes, with work that differs sixfold. In the pool they may have
one to eight slots; meanwhile one node is killed (and comes back), one pilot is cancelled, and server and agent are
killed and started again. The same trainings are then run with two slots each, first come first served, in a pool that
nothing happens to. Completion is counted from submission. Of every training the final weights must be those of one that
was never interrupted. Last, the recorded run is replayed in the simulator.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Bench, options
from diamond.core.codec import encode
from diamond.core.states import TaskState
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.simulation.replaying import replay
from testing import torch_at_site
from testing.cluster import BINDS, SOURCE, Cluster
from testing.minihpc import Node, Partition, Site
from testing.waiting import eventually

PROGRAM = Path(__file__).parents[1] / "testing" / "elastic.py"
NODES, SLOTS = 4, 2
LONGEST_S = 2400.0
GAP_S = 75.0  # between arrivals: half of what eight slots could do
SAMPLE_S = 0.016  # a step of 64 samples takes a second on one slot


@dataclass(frozen=True)
class Work:
    name: str
    at_s: float
    steps: int


@dataclass
class Outcome:
    """What became of the trainings of one pool: seconds from submission to the end, by name."""

    completions: dict[str, float] = field(default_factory=dict)
    weights: dict[str, dict[str, float]] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)
    record: Any = None
    log: list[str] = field(default_factory=list)

    @property
    def mean_s(self) -> float:
        return sum(self.completions.values()) / len(self.completions)


def workload(number: int, seed: int = 7) -> list[Work]:
    draw = random.Random(seed)
    return [Work(f"t{place:02d}", at_s=place * GAP_S, steps=int(105 * 6 ** draw.random())) for place in range(number)]


def site() -> Site:
    nodes = tuple(Node(name=f"g{n}", cpus=4, gpu_type="a100", num_gpus=SLOTS) for n in range(1, NODES + 1))
    everywhere = tuple(node.name for node in nodes)
    day = {"Default": "YES", "MaxTime": "1-00:00:00", "DefaultTime": "01:00:00"}
    return Site(
        "alpha",
        nodes=nodes,
        partitions=[Partition(name="gpu", nodes=everywhere, options=day)],
        binds={**BINDS, **torch_at_site.binds(), "/opt/elastic.py": PROGRAM},
        pythons=[torch_at_site.VERSION],
    )


class Pool:
    """A pool of the cluster, the trainings in it, and what is done to it meanwhile."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.outcome = Outcome()
        self._ids: dict[str, str] = {}
        self._submitted: dict[str, float] = {}

    def run(self, works: list[Work], accelerators: str, faults: list[tuple[float, str]]) -> Outcome:
        with self.cluster.service.client() as client:
            spec = {"name": self.name, "endpoint": "cluster", "nodes": str(NODES), "accelerators": f"a100:{SLOTS}",
                    "cpus": "2", "walltime": "1h", "idle": "30s"}  # fmt: skip
            client.pools.create(spec)
            eventually(lambda: client.pools.get(self.name).nodes == NODES, within_s=180, what="all nodes are held")
        began = time.time()
        breaking = threading.Thread(target=self._break, args=(began, faults), daemon=True)
        breaking.start()
        for work in works:
            time.sleep(max(0.0, began + work.at_s - time.time()))
            self._submit(work, accelerators)
        self._wait(began)
        breaking.join(60)
        with self.cluster.service.client() as client:
            self.outcome.record = client.pools.record(self.name)
            client.pools.close(self.name)
            eventually(lambda: not client.pools.get(self.name).pilots, within_s=180, what="all nodes are let go")
        return self.outcome

    def _submit(self, work: Work, accelerators: str) -> None:
        task = {
            "name": work.name,
            "pool": self.name,
            "run": f"exec {torch_at_site.PYTHON} /opt/elastic.py ledger {work.steps} {SAMPLE_S}",
            "envs": {"PYTHONPATH": torch_at_site.PYTHONPATH, "OMP_NUM_THREADS": "1", "DIAMOND_STANDBYS": "0",
                     "PYTHONDONTWRITEBYTECODE": "1"},
            "resources": {"accelerators": accelerators},
            "outputs": ["ledger"],
        }  # fmt: skip

        def made() -> bool:
            try:
                with self.cluster.service.client() as client:
                    self._ids[work.name] = client.tasks.create(task, idempotency_key=f"{self.name}-{work.name}").id
            except Exception as error:  # the server is being killed
                self.outcome.log.append(f"{work.name}: {error}")
                return False
            return True

        self._submitted[work.name] = time.time()
        eventually(made, within_s=60, every_s=1.0, what=f"{work.name} is submitted")

    def _wait(self, began: float) -> None:
        left = set(self._ids)
        while left:
            assert time.time() - began < LONGEST_S, f"{sorted(left)} are not done"
            time.sleep(1.0)
            for name in sorted(left):
                try:
                    with self.cluster.service.client() as client:
                        task = client.tasks.get(self._ids[name])
                        if not task.state.is_final:
                            continue
                        said = [(job.state, job.reason, job.detail, job.exit_code) for job in task.jobs]
                        assert task.state is TaskState.SUCCEEDED, (name, task.detail, said)
                        folder = Path(tempfile.mkdtemp(prefix="diamond-pool-"))
                        client.tasks.download(task.id, folder)
                except (OSError, ConnectionError):
                    continue
                except AssertionError:
                    raise
                except Exception as error:  # the server is away for a moment
                    self.outcome.log.append(f"{name}: {error}")
                    continue
                assert task.ended_at is not None
                last = json.loads((folder / "ledger").read_text().splitlines()[-1])
                self.outcome.completions[name] = task.ended_at - self._submitted[name]
                self.outcome.weights[name] = {key: last[key] for key in ("norm", "sum")}
                self.outcome.jobs[name] = len(task.jobs)
                left.discard(name)
                done = f"{name} after {self.outcome.completions[name]:.0f} s, {len(task.jobs)} jobs"
                print(f"  {self.name}: {done}", flush=True)

    def _break(self, began: float, faults: list[tuple[float, str]]) -> None:
        for at_s, what in faults:
            time.sleep(max(0.0, began + at_s - time.time()))
            print(f"  {self.name}: {what} after {time.time() - began:.0f} s", flush=True)
            getattr(self, f"_{what}")()

    def _kill_node(self) -> None:
        self.cluster.site.kill_node("g2")
        time.sleep(45)  # until Slurm has noticed
        self.cluster.site.start_node("g2", wait=False)
        self.cluster.site.run(["scontrol", "update", "NodeName=g2", "State=RESUME"], user="root", check=False)

    def _cancel_pilot(self) -> None:
        found = self.cluster.site.run(["squeue", "-h", "-w", "g3", "-o", "%i"], user="root", check=False).stdout.split()
        for job in found[:1]:
            self.cluster.site.run(["scancel", job], user="root", check=False)

    def _restart_server(self) -> None:
        self.cluster.service.kill(self.cluster.service.server)
        self.cluster.service.start_server()

    def _restart_agent(self) -> None:
        self.cluster.kill_agent()
        self.cluster.start_agent()


def uninterrupted(steps: int) -> dict[str, float]:
    """The final weights of the same training here, in one go and without waiting."""
    with tempfile.TemporaryDirectory(prefix="diamond-pool-") as folder:
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "DIAMOND_TRAIN_QUIET": "1"}
        argv = [sys.executable, str(PROGRAM), "ledger", str(steps), "0"]
        subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=300, check=True)
        last = json.loads((Path(folder) / "ledger").read_text().splitlines()[-1])
        return {key: last[key] for key in ("norm", "sum")}


def furthest(works: list[Work], outcome: Outcome) -> float:
    """How far any training's final weights are from those of one that was never interrupted."""
    far = 0.0
    for work in works:
        right = uninterrupted(work.steps)
        far = max(far, *(abs(outcome.weights[work.name][key] - right[key]) for key in right))
    return far


def replayed(outcome: Outcome) -> float:
    """The simulator's mean completion of the recorded run, over what was recorded."""
    return replay(outcome.record, Goodput()).ratio


def keep_record(name: str, outcome: Outcome) -> None:
    """What `diamond simulate` replays, beside the figures: a later policy or replay can be held against this run."""
    target = RESULTS / "raw" / f"pool_site_{name}.json"
    target.write_text(json.dumps(encode(outcome.record), separators=(",", ":")) + "\n")


def main() -> int:
    chosen = options(__doc__ or "")
    bench = Bench("pool_site", packages=("torch", "scipy"))
    works = workload(4 if chosen.quick else 12)
    faults = [(150.0, "kill_node"), (330.0, "cancel_pilot"), (450.0, "restart_server"), (510.0, "restart_agent")]
    with ExitStack() as stack:
        centre = stack.enter_context(site())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="diamond-pool-site-"))
        cluster = stack.enter_context(Cluster(centre, Path(folder) / "home"))
        elastic = Pool(cluster, "elastic").run(works, f"a100:1..{NODES * SLOTS}", [] if chosen.quick else faults)
        fixed = Pool(cluster, "fixed").run(works, "a100:2", [])
    far = furthest(works, elastic)
    bench.add(
        "mean completion", elastic.mean_s, "s", "lower",
        runs=list(elastic.completions.values()), peer_runs={"two slots each": list(fixed.completions.values())},
        peer={"two slots each": round(fixed.mean_s, 1)},
        note="one node killed, one pilot cancelled, server and agent restarted in the elastic run alone",
    )  # fmt: skip
    bench.add("mean completion against two slots each", elastic.mean_s / fixed.mean_s, "of it", "lower", aim=0.75)
    bench.add("final weights off by at most", far, "absolute", "lower", aim=1e-3)
    bench.add("jobs a training", sum(elastic.jobs.values()) / len(works), "jobs", "lower")
    for name, outcome in (("elastic", elastic), ("fixed", fixed)):
        if not chosen.quick:
            keep_record(name, outcome)
        ratio = replayed(outcome)
        bench.add(f"simulated mean completion of the {name} run", ratio, "of what was recorded", "lower")
        bench.add(f"simulated {name} run off by", abs(ratio - 1), "of what was recorded", "lower", aim=0.15)
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
