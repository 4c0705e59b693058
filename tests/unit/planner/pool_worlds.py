"""Small worlds for tests of pools: an application whose step times follow a formula, and policies that are one rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from diamond.planner.pools.packing import Wanted, pack
from diamond.planner.pools.simulation import Application, Arrival
from diamond.planner.pools.snapshot import Decision, Demand, Node, Snapshot

PER_GPU = (4, 8, 16)
EPOCH_STEPS = 100.0
REFERENCE = 16
KINDS = {"": 1.0, "slow": 2.0, "fast": 1.0}


def step_s(nodes: int, gpus: int, per_gpu: int, factor: float = 1.0) -> tuple[float, float]:
    """(whole step, synchronisation): what the tables below are made of."""
    sync = 0.0 if gpus == 1 else 0.02 * nodes
    return factor * (0.1 + 0.05 * per_gpu) + sync, sync


def write_application(folder: Path, name: str = "toy", kinds: Iterable[str] = ("",), epochs: int = 3) -> Path:
    """Tables in the form of the public ones; every epoch is 100 steps at the reference batch of 16."""
    home = folder / name
    home.mkdir(parents=True)
    for kind in kinds:
        suffix = f"-{kind}" if kind else ""
        lines = ["placement,local_bsz,step_time,sync_time"]
        for placement in ("1", "2", "3", "4", "11", "12", "22", "44"):
            counts = [int(digit) for digit in placement]
            for size in PER_GPU:
                step, sync = step_s(len(counts), sum(counts), size, KINDS[kind])
                lines.append(f"{placement},{size},{step},{sync}")
        (home / f"placements{suffix}.csv").write_text("\n".join(lines) + "\n")
        lines = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
        for nodes, gpus in ((4, 4), (4, 8), (4, 16)):
            for size in PER_GPU:
                step, sync = step_s(nodes, gpus, size, KINDS[kind])
                lines.append(f"{nodes},{gpus},{size},{step},{sync}")
        (home / f"scalability{suffix}.csv").write_text("\n".join(lines) + "\n")
    for batch in (REFERENCE, 4 * REFERENCE):
        lines = ["progress,iteration,metric,grad_sqr,grad_var"]
        lines += [f"{EPOCH_STEPS * (epoch + 1)},{epoch},0.5,1.0,{4.0 + epoch}" for epoch in range(epochs)]
        (home / f"validation-{batch}.csv").write_text("\n".join(lines) + "\n")
    return folder


def toy(folder: Path, kinds: Sequence[str] = ()) -> dict[str, Application]:
    write_application(folder, kinds=kinds or ("",))
    return {"toy": Application.read(folder, "toy", gpu_types=kinds)}


def nodes(number: int, gpus: int = 4, kind: str = "any") -> list[Node]:
    return [Node(name=f"{kind}{index}", gpu_type=kind, gpus=gpus) for index in range(number)]


def arrivals(*at: float, gpus: int = 1, batch: int = REFERENCE) -> list[Arrival]:
    return [Arrival(f"t{index}", moment, "toy", gpus, batch) for index, moment in enumerate(at)]


class Rule:
    """Gives tasks, in order of submission, the GPUs that a rule says, as long as there are any."""

    def __init__(self, rule: Callable[[Demand, Snapshot], int], *, adapts_batch: bool = True) -> None:
        self.name = "rule"
        self.adapts_batch = adapts_batch
        self.snapshots: list[Snapshot] = []
        self._rule = rule

    def allocate(self, snapshot: Snapshot) -> Decision:
        self.snapshots.append(snapshot)
        free = snapshot.total_gpus
        wanted = {}
        for demand in sorted(snapshot.demands, key=lambda one: (one.submitted_at, one.id)):
            gpus = self._rule(demand, snapshot)
            if snapshot.nodes and demand.takes(gpus) and gpus <= free:
                wanted[demand.id] = Wanted(snapshot.nodes[0].gpu_type, gpus)
                free -= gpus
        placed = pack(snapshot, wanted)
        return Decision(placed=placed, reasons={demand.id: "by the rule" for demand in snapshot.demands})


def always(gpus: int, *, adapts_batch: bool = True) -> Rule:
    return Rule(lambda demand, snapshot: gpus, adapts_batch=adapts_batch)


def as_asked() -> Rule:
    return Rule(lambda demand, snapshot: demand.max_gpus, adapts_batch=False)
