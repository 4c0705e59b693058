"""How soon tasks are done under Diamond's policy and under others, replayed from public traces; how long it decides.

    DIAMOND_BENCH_TRACES=FOLDER python -m benchmarks.scheduling [--workloads NAME ...] [--policies NAME ...]

The folder holds the public data of Pollux (pollux/traces, pollux/workloads), Sia (sia/traces, sia/workloads) and a log
of Slurm (mirage/ls6-a100.log), which are not part of Diamond. Of the log, a thousand jobs are taken from three places,
on as many nodes as the largest of them needs: these cannot be resized, only ordered. On that log our policy also runs
without its promise of a turn after half an hour ("no turns"), since `srtf` and `tiresias` promise none. One workload is
run again in trouble: with nodes that fail or are slow, tasks that come in bursts, users who are wrong about their work.

All policies run in Diamond's own simulator, with every move charged its restart. Speeds are estimated from what a
task's own steps measured, with noise of 5 %; "warm" adds the profiles of tasks of the same application that ended
before. Each user says how much work a task is, off by a factor whose logarithm has a standard deviation of 0.2. What is
random is drawn anew for each seed. What is done is written workload by workload; `--add` keeps what was recorded of
other workloads and of decisions, and notes which planner they are of where it has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import RESULTS, Bench, Figure, median
from diamond import planner
from diamond.planner.pools.policies import named
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.simulation import (
    Failure,
    in_bursts,
    pollux_applications,
    read_arrivals,
    sia_applications,
    simulate,
)
from diamond.planner.pools.simulation.applications import ANY
from diamond.planner.pools.simulation.workloads import Arrival
from diamond.planner.pools.snapshot import Demand, Node, Policy, Shape, Snapshot, Work
from diamond.planner.pools.valuing import Taste

FOLDER = "DIAMOND_BENCH_TRACES"
OURS = "diamond"
NO_TURNS = f"{OURS}, no turns"
POLICIES = (OURS, "pollux", "sia", "tiresias", "srtf", "fifo")
SIZES = ((160, 64, 100.0), (1000, 512, None), (5000, 2048, 2000.0))  # tasks, GPUs, milliseconds at most
OF_PLANNER = "of planner"
SAVED = {"pollux": 20.0, "sia": 15.0}  # percent of mean completion, against the policy of that suite


def _pool(parts: dict[str, tuple[int, int]]) -> tuple[Node, ...]:
    return tuple(
        Node(name=f"{kind}{number:02}", gpu_type=kind, gpus=gpus)
        for kind, (many, gpus) in parts.items()
        for number in range(many)
    )


POOLS = {
    "pollux": _pool({ANY: (16, 4)}),
    "sia": _pool({"aws": (6, 4), "dgx-ext": (2, 8), "rtx": (3, 8)}),
    "scale-8": _pool({"aws": (48, 4), "dgx-ext": (16, 8), "rtx": (24, 8)}),
    "scale-32": _pool({"aws": (192, 4), "dgx-ext": (64, 8), "rtx": (96, 8)}),
    "log": _pool({ANY: (34, 1)}),
}
BURST_S = 3600.0
LOG, OF_LOG = "mirage/ls6-a100.log", 1000
RIGID = (OURS, NO_TURNS, "tiresias", "srtf", "fifo")  # policies that do not need to resize
TROUBLED = "pollux-6"
TROUBLES = ("failing nodes", "slow nodes", "bursts", "wrong estimates")
WORKLOADS = {
    **{f"pollux-{number}": f"pollux/workloads/workload-{number}.csv" for number in (1, 3, 6)},
    **{f"{kind}-{number}": f"sia/workloads/{kind}/workload-{number}.csv" for kind in ("philly", "saturn", "newtrace")
       for number in (1, 3)},
    **{f"log-{first}": LOG for first in (0, 4000, 8000)},
    **{f"{TROUBLED}, {trouble}": "pollux/workloads/workload-6.csv" for trouble in TROUBLES},
    **{f"scale-{times}": f"sia/workloads/scale/scale_{times}x-1.csv" for times in (8, 32)},
}  # fmt: skip


@dataclass(frozen=True)
class Order:
    """One simulation."""

    workload: str
    policy: str
    knowledge: str
    seed: int
    first: int | None

    @property
    def suite(self) -> str:
        return _suite(self.workload)


def _suite(workload: str) -> str:
    return next((suite for suite in ("pollux", "log") if workload.startswith(suite)), "sia")


def _arrivals(workload: str) -> tuple[Arrival, ...]:
    found = read_arrivals(Path(os.environ[FOLDER]) / WORKLOADS[workload])
    if _suite(workload) != "log":
        return found
    first = int(workload.removeprefix("log-"))
    return found[first : first + OF_LOG]


def replay(order: Order) -> dict[str, float]:
    data = Path(os.environ[FOLDER])
    arrivals = _arrivals(order.workload)[: order.first]
    trouble = order.workload.partition(", ")[2]
    if trouble == "bursts":
        arrivals = in_bursts(arrivals, BURST_S)
    names = sorted({one.application for one in arrivals if one.application})
    read = sia_applications if order.suite == "sia" else pollux_applications
    applications = read(data / order.suite / "traces", names) if names else {}
    nodes = POOLS.get(order.workload, POOLS[order.suite])
    outcome = simulate(
        arrivals, _policy(order.policy), nodes, applications=applications,
        knowledge=order.knowledge, noise=0.05, seed=order.seed, declared=True,  # type: ignore[arg-type]
        declared_error=1.0 if trouble == "wrong estimates" else 0.2,
        failures=_failures(trouble, nodes, order.seed), probed=order.suite == "sia", decision_s=30.0,
    )  # fmt: skip
    assert outcome.summary()["tasks"] == len(arrivals), "a task was lost"
    return outcome.summary()


def _policy(name: str) -> Policy:
    return Goodput(Taste(wait_s=math.inf)) if name == NO_TURNS else named(name)


def _failures(trouble: str, nodes: tuple[Node, ...], seed: int) -> tuple[Failure, ...]:
    """Every half hour of a day a node is gone for an hour; or every eighth node does everything at half speed."""
    chance = random.Random(seed)
    names = [node.name for node in nodes]
    if trouble == "slow nodes":
        return tuple(Failure(node=name, at=0.0, speed=0.5) for name in chance.sample(names, len(names) // 8))
    if trouble != "failing nodes":
        return ()
    turns = [name for _ in range(48) for name in chance.sample(names, len(names))][:48]
    return tuple(Failure(node=name, at=1800.0 * n, until=1800.0 * n + 3600.0) for n, name in enumerate(turns, 1))


def compare(bench: Bench, chosen: argparse.Namespace) -> None:
    with ProcessPoolExecutor(chosen.jobs, multiprocessing.get_context("spawn")) as pool:
        for workload in chosen.workloads:
            _compare_on(bench, workload, chosen, pool)
            if not chosen.quick:
                bench.write()


def _compare_on(bench: Bench, workload: str, chosen: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    orders = [
        Order(workload, policy, knowledge, seed, 30 if chosen.quick else None)
        for policy in (*chosen.policies, NO_TURNS)
        if _suite(workload) != "log" or policy in RIGID
        if policy != NO_TURNS or (_suite(workload) == "log" and OURS in chosen.policies)
        for knowledge in (("estimated", "warm") if policy == OURS and _suite(workload) != "log" else ("estimated",))
        for seed in range(1 if chosen.quick else chosen.seeds)
    ]
    found: dict[str, list[dict[str, float]]] = {}
    for order, summary in zip(orders, pool.map(replay, orders), strict=True):
        label = f"{order.policy}, warm" if order.knowledge == "warm" else order.policy
        print(f"  {workload} {label} {order.seed}: {summary['completion_mean_s']:.0f} s", flush=True)
        found.setdefault(label, []).append(summary)
    _record(bench, workload, found)


# What is recorded of each workload: name, key of the summary, unit, factor, better.
_FIGURES = (
    ("mean completion", "completion_mean_s", "s", 1.0, "lower"),
    ("median completion", "completion_median_s", "s", 1.0, "lower"),
    ("p99 completion", "completion_p99_s", "s", 1.0, "lower"),
    ("makespan", "makespan_s", "s", 1.0, "lower"),
    ("GPU-hours", "gpu_hours", "h", 1.0, "lower"),
    ("mean finish-time ratio", "rho_mean", "", 1.0, "lower"),
    ("worst finish-time ratio", "rho_worst", "", 1.0, "lower"),
    ("tasks later than with a fair share", "rho_over_1_share", "%", 100.0, "lower"),
    ("moves a task", "restarts_mean", "", 1.0, "lower"),
    ("GPU-hours lost to moves", "lost_gpu_hours", "h", 1.0, "lower"),
    ("mean wait for a first GPU", "wait_mean_s", "s", 1.0, "lower"),
    ("decision, mean", "decision_mean_s", "ms", 1000.0, "lower"),
)


def _record(bench: Bench, workload: str, found: dict[str, list[dict[str, float]]]) -> None:
    ours = next((label for label in (f"{OURS}, warm", OURS) if label in found), None)
    if ours is None:
        return
    for name, key, unit, factor, better in _FIGURES:
        runs = {label: [round(factor * one[key], 3) for one in many] for label, many in found.items()}
        means = {label: sum(many) / len(many) for label, many in runs.items()}
        bench.add(f"{workload}: {name}", means.pop(ours), unit, better, runs=runs.pop(ours),
                  peer={label: round(one, 3) for label, one in means.items()}, peer_runs=runs, note=ours)  # fmt: skip
    rival = _suite(workload)
    if rival in found:
        means = {label: sum(one["completion_mean_s"] for one in many) for label, many in found.items()}
        bench.add(f"{workload}: mean completion below {rival}'s", 100 * (1 - means[ours] / means[rival]), "%", "higher",
                  aim=SAVED[rival], note=ours)  # fmt: skip


@dataclass(frozen=True)
class Scaling:
    """Amdahl's law, with a part of its own for every task."""

    serial: float

    def goodput(self, shape: Shape) -> float:
        return 1.0 / (self.serial + (1 - self.serial) / shape.gpus) / (1.0 + 0.05 * (shape.nodes - 1))

    def doubt(self, shape: Shape) -> float:
        return 0.1


def crowd(tasks: int, gpus: int, kinds: int) -> Snapshot:
    """As many tasks as that, half of which run, on nodes of 4 GPUs."""
    chance = random.Random(tasks)
    nodes = [Node(name=f"n{number:04}", gpu_type=f"kind{number % kinds}", gpus=4) for number in range(gpus // 4)]
    demands, placed = [], {}
    for number in range(tasks):
        work = chance.lognormvariate(8.0, 1.5)
        name = f"t{number:05}"
        demands.append(
            Demand(
                id=name,
                submitted_at=-chance.uniform(0, 7200),
                speed=Scaling(chance.uniform(0.0, 0.2)),
                max_gpus=chance.choice((1, 2, 4, 8, 16)),
                left=Work(work, work / 2, 2 * work),
                attained_s=chance.uniform(0, 3600),
                running_s=chance.uniform(0, 3600),
            )
        )
        if number < len(nodes):
            placed[name] = ((nodes[number].name, min(4, demands[-1].max_gpus)),)
    return Snapshot(now=0.0, nodes=tuple(nodes), demands=tuple(demands), placed=placed, seconds=1.5)


def decide(bench: Bench, chosen: argparse.Namespace) -> None:
    for tasks, gpus, aim in SIZES[: 1 if chosen.quick else None]:
        for kinds in (1, 3):
            snapshot, took = crowd(tasks, gpus, kinds), []
            for _ in range(5):
                began = time.perf_counter()
                named(OURS).allocate(snapshot)
                took.append(1000 * (time.perf_counter() - began))
            bench.add(f"decision: {tasks} tasks, {gpus} GPUs of {kinds} kind{'s' if kinds > 1 else ''}", median(took),
                      "ms", "lower", aim=aim, runs=[round(one, 2) for one in took])  # fmt: skip


def digest() -> str:
    """Of the policies and the simulator, as they are here."""
    folder = Path(planner.__path__[0]) / "pools"
    sources = sorted((str(path.relative_to(folder)), path.read_bytes()) for path in folder.rglob("*.py"))
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:16]


def recorded(workloads: list[str], code: str) -> list[Figure]:
    """Figures of decisions and of other workloads than these; those of other policies say so in their note."""
    document = json.loads((RESULTS / "scheduling.json").read_text())
    before = document["versions"].get("planner")
    kept = [
        Figure(**{key: value for key, value in one.items() if key != "holds"})
        for one in document["figures"]
        if one["name"].partition(": ")[0] not in workloads
    ]
    if before == code:
        return kept
    return [one if OF_PLANNER in one.note else replace(one, note=_noted(one.note, before)) for one in kept]


def _noted(note: str, planner_digest: str) -> str:
    return f"{note}; {OF_PLANNER} {planner_digest}".removeprefix("; ")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="simulations beside each other")
    parser.add_argument("--add", action="store_true", help="keep what was recorded of other workloads")
    parser.add_argument("--quick", action="store_true", help="30 tasks of each, one seed")
    parser.add_argument("--check", action="store_true", help="exit 1 when an aim does not hold")
    parser.add_argument("--keep", action="store_true", help="write the result file even with --quick")
    chosen = parser.parse_args()
    if not Path(os.environ.get(FOLDER, "/nowhere")).is_dir():
        raise SystemExit(f"{FOLDER}: name the folder that holds pollux/ and sia/")
    code = digest()
    bench = Bench("scheduling", packages=("numpy", "scipy"), versions={"planner": code})
    if chosen.add:
        bench.figures += recorded(chosen.workloads, code)
    else:
        decide(bench, chosen)
    compare(bench, chosen)
    return bench.finish(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
