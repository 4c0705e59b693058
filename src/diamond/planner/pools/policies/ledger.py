"""What is left to give while a policy hands out GPUs: of each kind, and of each owner's quota.

All policies of this package read a snapshot through it, so that none of them can promise a GPU twice, move what cannot
be moved, or go past a quota.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from diamond.planner.pools.packing import Wanted, fewest_nodes, pack
from diamond.planner.pools.snapshot import Demand, Placement, Shape, Snapshot, Work

# What is beyond these is no measurement: of work and speeds, of seconds (thirty million years), and of restarts.
LEAST, MOST = 1e-30, 1e30
LONGEST_S = 1e15
MOST_RESTARTS = 10**6


class Ledger:
    """A snapshot with what was promised so far. Tasks that cannot be moved have theirs from the start.

    Attributes:
        standing: placements that can go on as they are; those on nodes that went away are not among them.
        shapes: of these, by task.
        wanted: what was promised, in that order.
        free: GPUs of each kind that nobody was promised.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot = _sane_snapshot(snapshot)
        self.types = snapshot.types()
        self.standing, self.shapes = _standing(snapshot)
        self.wanted: dict[str, Wanted] = {}
        self.total = {kind: sum(node.gpus for node in nodes) for kind, nodes in self.types.items()}
        self.free = dict(self.total)
        self._quotas = dict(snapshot.quotas)
        self._all = snapshot.total_gpus
        self._asked: dict[Hashable, int] = {}
        self._by_speed: dict[Hashable, list[str]] = {}
        self._widths = {kind: sorted((node.gpus for node in nodes), reverse=True) for kind, nodes in self.types.items()}
        for demand in snapshot.demands:
            if not demand.movable and demand.id in self.shapes:
                self.keep(demand)

    def likeness(self, demand: Demand) -> Hashable:
        """Alike for tasks that hold nothing and may be given the same: a long queue has few kinds of them."""
        if demand.id in self.shapes:
            return demand.id
        owner = demand.owner if demand.owner in self._quotas else None
        return id(demand.speed), demand.min_gpus, demand.max_gpus, demand.sizes, demand.gpu_types, owner

    def waiting(self) -> list[Demand]:
        """Those that were promised nothing so far."""
        return [demand for demand in self.snapshot.demands if demand.id not in self.wanted]

    def room(self, demand: Demand, kind: str) -> int:
        """GPUs of a kind that could be promised to a task now."""
        return max(min(self.free[kind], self.quota(demand)), 0)

    def quota(self, demand: Demand) -> int:
        """What is left of its owner's quota; more than there is, where there is none."""
        return self._quotas.get(demand.owner, self._all)

    def take(self, demand: Demand, kind: str, gpus: int) -> None:
        self.wanted[demand.id] = Wanted(kind, gpus)
        self.free[kind] -= gpus
        if demand.owner in self._quotas:
            self._quotas[demand.owner] -= gpus

    def keep(self, demand: Demand) -> None:
        shape = self.shapes[demand.id]
        self.take(demand, shape.gpu_type, shape.gpus)

    def kinds(self, demand: Demand) -> list[str]:
        return [kind for kind in self.types if demand.runs_on(kind)]

    def width(self, kind: str) -> int:
        """GPUs of the largest node of a kind."""
        return self._widths[kind][0]

    def most(self, demand: Demand, kind: str) -> int:
        """The largest number it takes that this kind and its owner's quota could ever give; 0 where there is none."""
        return largest(demand, min(self.total[kind], self.snapshot.quotas.get(demand.owner, self.total[kind])))

    def asked(self, demand: Demand) -> int:
        """What it gets from a policy that never resizes: as many as it takes, of one kind."""
        like = self.likeness(demand)
        if like not in self._asked:
            self._asked[like] = max((self.most(demand, kind) for kind in self.kinds(demand)), default=0)
        return self._asked[like]

    def shape(self, demand: Demand, kind: str, gpus: int) -> Shape:
        """Its own, where it has just that now; else on as few nodes as can hold it."""
        now = self.shapes.get(demand.id)
        if now is not None and (now.gpu_type, now.gpus) == (kind, gpus):
            return now
        return Shape(kind, fewest_nodes(gpus, self._widths[kind]), gpus)

    def goodput(self, demand: Demand, kind: str, gpus: int) -> float:
        """Work a second; 0.0 for what cannot run, and for estimates that are no numbers."""
        return rate(demand, self.shape(demand, kind, gpus))

    def by_speed(self, demand: Demand, gpus: int) -> list[str]:
        """Kinds on which that many GPUs of it run, where it runs now first, then the fastest."""
        like = (gpus, self.likeness(demand))
        if like not in self._by_speed:
            self._by_speed[like] = self._ranked(demand, gpus)
        return self._by_speed[like]

    def _ranked(self, demand: Demand, gpus: int) -> list[str]:
        now = self.shapes.get(demand.id)
        speeds = {kind: self.goodput(demand, kind, gpus) for kind in self.kinds(demand) if gpus <= self.total[kind]}
        here = now.gpu_type if now is not None else None
        return sorted((kind for kind, one in speeds.items() if one > 0), key=lambda one: (one != here, -speeds[one]))

    def seen(self, demand: Demand) -> int:
        """GPUs it has held at once before, as far as the snapshot tells; 0 where it has never run."""
        now = self.shapes.get(demand.id)
        mean = demand.attained_s / demand.running_s if demand.running_s > 0 else 0.0
        return max(now.gpus if now is not None else 0, math.ceil(sound(mean) - 1e-6))

    def places(self, *, hold: bool = False) -> dict[str, Placement]:
        """Nodes for what was promised; with `hold`, nothing that runs is moved for it."""
        demands: Iterable[Demand] = (one for one in self.snapshot.demands if one.id in self.wanted)
        if hold:
            demands = (
                replace(one, movable=False) if one.movable and one.id in self.standing else one for one in demands
            )
        return pack(replace(self.snapshot, placed=self.standing, demands=tuple(demands)), self.wanted)


def largest(demand: Demand, most: int) -> int:
    """The largest number of GPUs a task takes that is not above `most`; 0 where there is none."""
    if demand.sizes is not None:
        return max((size for size in demand.sizes if 0 < size <= most and demand.takes(size)), default=0)
    size = min(demand.max_gpus, most)
    return size if size >= max(demand.min_gpus, 1) else 0


def smallest(demand: Demand) -> int:
    """The smallest number of GPUs a task takes; 0 where it takes none."""
    if demand.sizes is not None:
        return min((size for size in demand.sizes if size > 0 and demand.takes(size)), default=0)
    size = max(demand.min_gpus, 1)
    return size if demand.takes(size) else 0


def sound(number: float) -> float:
    """Itself if it is a number above zero, else 0.0: estimates come from measurements, and these may be absurd.

    What is too large or too small to be computed with is brought to the nearest that is not.
    """
    if LEAST <= number <= MOST:
        return number
    return min(max(number, LEAST), MOST) if math.isfinite(number) and number > 0 else 0.0


def rate(demand: Demand, shape: Shape) -> float:
    """Work a second as its estimate says; 0.0 where that makes no sense."""
    try:
        return sound(demand.speed.goodput(shape))
    except (ArithmeticError, ValueError, TypeError):
        return 0.0


def sane(demand: Demand, now: float) -> Demand:
    """Itself, if its numbers can be computed with; else with others instead of those that cannot."""
    if _is_sane(demand):
        return demand
    load = demand.load
    return replace(
        demand,
        submitted_at=_within(demand.submitted_at, -LONGEST_S, LONGEST_S, now),
        left=_sane_work(demand.left),
        done=_within(demand.done, 0.0, MOST, 0.0),
        attained_s=_within(demand.attained_s, 0.0, MOST, 0.0),
        running_s=_within(demand.running_s, 0.0, LONGEST_S, 0.0),
        restarts=min(max(demand.restarts, 0), MOST_RESTARTS),
        restart_s=_within(demand.restart_s, 0.0, LONGEST_S, 0.0) if math.isfinite(demand.restart_s) else 0.0,
        deadline=None
        if demand.deadline is None or math.isnan(demand.deadline)
        else _within(demand.deadline, -LONGEST_S, LONGEST_S, now),
        load=None if load is None else _within(load, 0.0, MOST, 0.0) if math.isfinite(load) else 0.0,
    )


def _is_sane(demand: Demand) -> bool:
    left, load, deadline = demand.left, demand.load, demand.deadline
    return (
        -LONGEST_S <= demand.submitted_at <= LONGEST_S
        and 0.0 <= demand.done <= MOST
        and 0.0 <= demand.attained_s <= MOST
        and 0.0 <= demand.running_s <= LONGEST_S
        and 0 <= demand.restarts <= MOST_RESTARTS
        and 0.0 <= demand.restart_s <= LONGEST_S
        and (left is None or (0.0 <= left.low <= MOST and 0.0 <= left.expected <= MOST and 0.0 <= left.high <= MOST))
        and (deadline is None or -LONGEST_S <= deadline <= LONGEST_S)
        and (load is None or 0.0 <= load <= MOST)
    )


def _sane_work(left: Work | None) -> Work | None:
    """Nothing where what is expected is no number; a lower end of 0 says that little is known of it."""
    if left is None or not math.isfinite(left.expected):
        return None
    expected = _within(left.expected, 0.0, MOST, 0.0)
    low, high = _within(left.low, 0.0, MOST, 0.0), _within(left.high, 0.0, MOST, expected)
    return Work(expected, low if math.isfinite(left.high) else 0.0, high)


def _within(number: float, least: float, most: float, otherwise: float) -> float:
    return otherwise if math.isnan(number) else min(max(number, least), most)


def _sane_snapshot(snapshot: Snapshot) -> Snapshot:
    now = snapshot.now if -LONGEST_S <= snapshot.now <= LONGEST_S else 0.0
    if now == snapshot.now and all(map(_is_sane, snapshot.demands)):
        return snapshot
    return replace(snapshot, now=now, demands=tuple(sane(one, now) for one in snapshot.demands))


def restart_factor(demand: Demand, now: float) -> float:
    """Which part of its speed a task keeps if it is restarted as often in future as it was so far."""
    age = max(now - demand.submitted_at, 0.0)
    delay = sound(demand.restart_s)
    return max(age - demand.restarts * delay, 0.0) / (age + delay) if age + delay > 0 else 1.0


def _standing(snapshot: Snapshot) -> tuple[dict[str, Placement], dict[str, Shape]]:
    kinds = {node.name: node.gpu_type for node in snapshot.nodes}
    left = {node.name: node.gpus for node in snapshot.nodes}
    standing: dict[str, Placement] = {}
    shapes: dict[str, Shape] = {}
    running = [one for one in snapshot.demands if one.id in snapshot.placed]
    for demand in sorted(running, key=lambda one: (one.movable, one.id)):  # what cannot be moved comes first
        placement = snapshot.placed[demand.id]
        found = {kinds.get(name) for name, _ in placement}
        kind = found.pop() if len(found) == 1 else None
        if kind is None:
            continue
        shape = Shape(kind, len(placement), sum(gpus for _, gpus in placement))
        if not _holds(placement, left) or (demand.movable and not _suits(demand, shape)):
            continue
        standing[demand.id], shapes[demand.id] = placement, shape
        for name, gpus in placement:
            left[name] -= gpus
    return standing, shapes


def _suits(demand: Demand, shape: Shape) -> bool:
    """Whether it would be started so; what cannot be moved keeps what it has all the same."""
    return demand.takes(shape.gpus) and demand.runs_on(shape.gpu_type)


def _holds(placement: Placement, left: Mapping[str, int]) -> bool:
    """Whether its nodes still have these GPUs."""
    return len(dict(placement)) == len(placement) and all(1 <= gpus <= left[name] for name, gpus in placement)
