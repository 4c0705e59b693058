"""What a policy sees and what it answers: one snapshot of a pool in, one decision out.

Production and the simulator build the same snapshots and call the same `allocate`. Nothing here knows of servers,
Slurm or clocks: the same snapshot always gives the same decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

Placement = tuple[tuple[str, int], ...]
"""Nodes by name, in order, with how many of their GPUs; empty: the task waits."""


class Shape(NamedTuple):
    """What speed depends on: not which nodes these are, but how many, and of which kind."""

    gpu_type: str
    nodes: int
    gpus: int


class Speed(Protocol):
    """How fast a task would be. Work is counted in samples at the task's own reference batch."""

    def goodput(self, shape: Shape) -> float:
        """Work a second; 0.0 where it cannot run at all. Never negative, never NaN."""
        ...

    def doubt(self, shape: Shape) -> float:
        """How far that may be off, as a standard deviation of its logarithm; 0.0 for what was measured often."""
        ...


class Work(NamedTuple):
    """How much is left of a task, in the unit of its Speed: the expected amount, and a range that holds it mostly."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    gpu_type: str
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A task that waits or runs: what it can use, and what is known of it.

    Attributes:
        speed: its own model, or one that others like it suggest.
        min_gpus, max_gpus: alike for a rigid task. It gets between these, or nothing.
        sizes: if given, only these numbers of GPUs (a model that is cut into four runs on 4, 8, 12, …).
        gpu_types: kinds it can run on; all where it does not say.
        movable: whether it may be stopped and go on from a checkpoint. What is not, keeps what it has.
        owner: whose quota it counts against.
        left: None where nobody can say.
        done: work so far. attained_s: GPU seconds so far.
        restart_s: what a stop and a new start cost it, measured where it has happened.
        deadline: when it should be finished, in the snapshot's time.
        load: of a service, requests a second that are expected; its speed is then what it can answer in time.
    """

    id: str
    submitted_at: float
    speed: Speed
    min_gpus: int = 1
    max_gpus: int = 1
    sizes: tuple[int, ...] | None = None
    gpu_types: frozenset[str] | None = None
    movable: bool = True
    priority: int = 0
    owner: str = ""
    left: Work | None = None
    done: float = 0.0
    attained_s: float = 0.0
    running_s: float = 0.0
    restarts: int = 0
    restart_s: float = 30.0
    deadline: float | None = None
    load: float | None = None

    def takes(self, gpus: int) -> bool:
        return self.min_gpus <= gpus <= self.max_gpus and (self.sizes is None or gpus in self.sizes)

    def runs_on(self, gpu_type: str) -> bool:
        return self.gpu_types is None or gpu_type in self.gpu_types


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A pool at one moment.

    Attributes:
        placed: what runs where, by task; of tasks that wait, nothing.
        quotas: GPUs that an owner may hold at once; no bound for those it does not name.
        seconds: how long a decision may take.
    """

    now: float
    nodes: tuple[Node, ...]
    demands: tuple[Demand, ...]
    placed: Mapping[str, Placement] = field(default_factory=dict)
    quotas: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 1.0

    @property
    def total_gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    def types(self) -> dict[str, list[Node]]:
        """Nodes by their kind of GPU, kinds in order of name, nodes in theirs."""
        found: dict[str, list[Node]] = {}
        for node in sorted(self.nodes, key=lambda one: (one.gpu_type, one.name)):
            found.setdefault(node.gpu_type, []).append(node)
        return found

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return {node.name: node.gpu_type for node in self.nodes}

    def shape_of(self, placement: Placement) -> Shape | None:
        """None where it names nodes that are not there any more."""
        found = {self._kinds.get(name) for name, _ in placement}
        if len(found) != 1 or None in found:
            return None
        return Shape(str(found.pop()), len(placement), sum(gpus for _, gpus in placement))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What every task of the snapshot gets, and why in words."""

    placed: Mapping[str, Placement]
    reasons: Mapping[str, str]
    exact: bool = True  # False where the time was over before the best was found


class Policy(Protocol):
    name: str

    def allocate(self, snapshot: Snapshot) -> Decision: ...


def faults(snapshot: Snapshot, decision: Decision) -> list[str]:
    """What is wrong with a decision, in words; nothing, for one that can be carried out."""
    found = [*_overbooked(snapshot, decision.placed.items())]
    held: dict[str, int] = {}
    stays = _immovable(snapshot)
    for demand in snapshot.demands:
        if demand.id not in decision.reasons:
            found.append(f"{demand.id}: no reason is given")
        placement = decision.placed.get(demand.id, ())
        if placement:
            found += _unfit(snapshot, demand, placement) if placement != stays.get(demand.id) else []
            held[demand.owner] = held.get(demand.owner, 0) + sum(gpus for _, gpus in placement)
        if placement != stays.get(demand.id, placement):
            found.append(f"{demand.id}: cannot be moved, and was")
    found += [
        f"{owner or 'nobody'}: {gpus} GPUs, of {snapshot.quotas[owner]} that are allowed"
        for owner, gpus in sorted(held.items())
        if owner in snapshot.quotas and gpus > max(snapshot.quotas[owner], _kept(snapshot, owner))
    ]
    known = {demand.id for demand in snapshot.demands}
    return found + [f"{name}: unknown" for name in sorted(set(decision.placed) - known)]


def _immovable(snapshot: Snapshot) -> dict[str, Placement]:
    """What tasks that cannot be moved hold, also where their own bounds were changed since.

    Not what cannot be held any more, as its nodes are gone or have fewer GPUs now: these tasks have ended.
    """
    left = {node.name: node.gpus for node in snapshot.nodes}
    found: dict[str, Placement] = {}
    held = (one.id for one in snapshot.demands if not one.movable and one.id in snapshot.placed)
    for name in sorted(held):
        placement = snapshot.placed[name]
        once = len(dict(placement)) == len(placement)
        if snapshot.shape_of(placement) is None or not once or any(not 1 <= gpus <= left[n] for n, gpus in placement):
            continue
        found[name] = placement
        left.update({node: left[node] - gpus for node, gpus in placement})
    return found


def _kept(snapshot: Snapshot, owner: str) -> int:
    """What an owner's immovable tasks hold: a quota that was lowered does not end them."""
    return sum(
        gpus
        for demand in snapshot.demands
        if demand.owner == owner and not demand.movable
        for _, gpus in snapshot.placed.get(demand.id, ())
    )


def _overbooked(snapshot: Snapshot, placed: Iterable[tuple[str, Placement]]) -> list[str]:
    there = {node.name: node.gpus for node in snapshot.nodes}
    used: dict[str, int] = {}
    for _, placement in placed:
        for name, gpus in placement:
            used[name] = used.get(name, 0) + gpus
    return [
        f"{name}: {gpus} GPUs given of {there.get(name, 0)}" for name, gpus in used.items() if gpus > there.get(name, 0)
    ]


def _unfit(snapshot: Snapshot, demand: Demand, placement: Placement) -> list[str]:
    shape = snapshot.shape_of(placement)
    if shape is None:
        return [f"{demand.id}: placed on nodes that are unknown or of several kinds"]
    found = []
    if not demand.takes(shape.gpus):
        found.append(f"{demand.id}: {shape.gpus} GPUs are not what it takes")
    if not demand.runs_on(shape.gpu_type):
        found.append(f"{demand.id}: cannot run on {shape.gpu_type}")
    if len({name for name, _ in placement}) != len(placement) or any(gpus < 1 for _, gpus in placement):
        found.append(f"{demand.id}: a node is named twice, or without a GPU")
    return found
