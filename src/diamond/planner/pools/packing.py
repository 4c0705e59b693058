"""Which nodes: from numbers of GPUs to places, moving as few tasks as possible.

A task of up to one node's GPUs gets them on one node; a larger one gets whole nodes, and the rest on one more. Tasks
that keep their number keep their places. Where what is free lies in too many pieces, smaller tasks that may move make
room; only where that does not help either is a task spread over more nodes than it needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diamond.planner.pools.snapshot import Node, Placement, Snapshot


class Wanted(NamedTuple):
    gpu_type: str
    gpus: int


def pack(snapshot: Snapshot, wanted: Mapping[str, Wanted]) -> dict[str, Placement]:
    """Places for all that fit; who does not fit is left out. Of tasks of one size, the first in `wanted` is first.

    The caller sees to it that no kind of GPU is promised more often than there is. Then nobody is left out.
    """
    demands = {demand.id: demand for demand in snapshot.demands}
    found: dict[str, Placement] = {}
    for gpu_type, nodes in snapshot.types().items():
        here = {name: one.gpus for name, one in wanted.items() if one.gpu_type == gpu_type and one.gpus > 0}
        there = {node.name: node.gpus for node in nodes}
        kept = {
            name: placement
            for name, gpus in here.items()
            if (placement := snapshot.placed.get(name, ())) and _still_there(placement, gpus, there)
        }
        fixed = {name for name in kept if name in demands and not demands[name].movable}
        found.update(_packed(nodes, here, kept, fixed))
    return found


def fewest_nodes(gpus: int, sizes: Sequence[int]) -> int:
    """How many of these nodes, largest first, it takes to hold that many GPUs; 0 where they are too few."""
    held = 0
    for number, size in enumerate(sizes, 1):
        held += size
        if held >= gpus:
            return number
    return 0


def _still_there(placement: Placement, gpus: int, there: Mapping[str, int]) -> bool:
    return (
        sum(number for _, number in placement) == gpus
        and len({name for name, _ in placement}) == len(placement)
        and all(0 < number <= there.get(name, 0) for name, number in placement)
    )


def _packed(
    nodes: Sequence[Node], here: Mapping[str, int], kept: Mapping[str, Placement], fixed: set[str]
) -> dict[str, Placement]:
    """Without moving anybody where that spreads nobody; else the better of that and of moving some."""
    quiet = _Floor(nodes, here, kept, fixed)
    spread = quiet.settle(evict=False)
    if not spread:
        return quiet.placed
    moved = _Floor(nodes, here, kept, fixed)
    moved.settle(evict=True)
    return min((moved, quiet), key=lambda floor: floor.badness()).placed


class _Floor:
    """The nodes of one kind while tasks are put on them."""

    def __init__(
        self, nodes: Sequence[Node], here: Mapping[str, int], kept: Mapping[str, Placement], fixed: set[str]
    ) -> None:
        self.placed: dict[str, Placement] = {}
        self._gpus = here
        self._fixed = fixed
        self._size = {node.name: max(node.gpus, 0) for node in nodes}
        self._sizes = sorted(self._size.values(), reverse=True)
        self._free = dict(self._size)
        self._on: dict[str, set[str]] = {name: set() for name in self._size}
        self._turn = {name: turn for turn, name in enumerate(here)}
        for name in sorted(kept, key=lambda one: (one not in fixed, self._turn[one])):
            if all(self._free[node] >= gpus for node, gpus in kept[name]):  # a node may have lost GPUs
                self._put(name, kept[name])
        self._before = dict(self.placed)

    def settle(self, *, evict: bool) -> bool:
        """Places everybody that fits; whether somebody lies on more nodes than it takes, or on none."""
        queue = [self._entry(name) for name in self._gpus if name not in self.placed]
        heapq.heapify(queue)  # large ones first: they need whole nodes
        left = []
        while queue:
            name = heapq.heappop(queue)[2]
            gpus = self._gpus[name]
            placement = self._compact(gpus)
            if not placement and evict and gpus <= sum(self._free.values()):
                for other in self._evicted(gpus):
                    self._take_off(other)
                    heapq.heappush(queue, self._entry(other))
                placement = self._compact(gpus)
            if placement:
                self._put(name, placement)
            else:
                left.append(name)
        for name in sorted(left, key=lambda one: self._turn[one]):
            placement = self._spread(self._gpus[name])
            if placement:
                self._put(name, placement)
        return bool(left)

    def badness(self) -> tuple[int, int, int]:
        """GPUs without a place, nodes more than it takes, tasks that moved."""
        missing = sum(gpus for name, gpus in self._gpus.items() if name not in self.placed)
        extra = sum(
            len(placement) - fewest_nodes(self._gpus[name], self._sizes) for name, placement in self.placed.items()
        )
        return missing, extra, sum(self.placed.get(name) != one for name, one in self._before.items())

    def _entry(self, name: str) -> tuple[int, int, str]:
        return -self._gpus[name], self._turn[name], name

    def _put(self, name: str, placement: Placement) -> None:
        self.placed[name] = placement
        for node, gpus in placement:
            self._free[node] -= gpus
            self._on[node].add(name)

    def _take_off(self, name: str) -> None:
        for node, gpus in self.placed.pop(name):
            self._free[node] += gpus
            self._on[node].remove(name)

    def _compact(self, gpus: int) -> Placement:
        """On the node where it fits best, or on as many nodes as it takes at least; nothing where that is not free."""
        fitting = [(room, name) for name, room in self._free.items() if room >= gpus]
        if fitting:
            return ((min(fitting)[1], gpus),)
        placement = self._spread(gpus)
        return placement if len(placement) == fewest_nodes(gpus, self._sizes) else ()

    def _spread(self, gpus: int) -> Placement:
        """On the nodes with most free, the last part where it fits best."""
        if gpus > sum(self._free.values()):
            return ()
        chosen: dict[str, int] = {}
        left = gpus
        for name in sorted(self._free, key=lambda one: (-self._free[one], one)):
            fitting = [(room, node) for node, room in self._free.items() if room >= left and node not in chosen]
            if fitting:
                chosen[min(fitting)[1]] = left
                break
            chosen[name] = self._free[name]
            left -= self._free[name]
        return tuple(sorted(chosen.items()))

    def _evicted(self, gpus: int) -> Iterable[str]:
        """Smaller tasks that make room for a larger one when they go elsewhere: as few GPUs of them as will do."""
        number = fewest_nodes(gpus, self._sizes)
        whole, rest = (0, gpus) if number == 1 else divmod(gpus, max(self._sizes))
        gone: set[str] = set()
        used: set[str] = set()
        for need in [max(self._sizes)] * whole + [rest] * (rest > 0):
            plans = [
                (sum(self._gpus[one] for one in plan), node, plan)
                for node in self._size
                if node not in used and (plan := self._cleared(node, need, gpus)) is not None
            ]
            if not plans:
                return ()
            _, node, plan = min(plans, key=lambda one: one[:2])
            gone.update(plan)
            used.add(node)
        return sorted(gone)

    def _cleared(self, node: str, need: int, below: int) -> list[str] | None:
        """Who has to go from a node for that many free GPUs: the smallest one that suffices, or the largest ones."""
        short = need - self._free[node]
        if short <= 0:
            return []
        loose = sorted(
            (
                (dict(self.placed[name])[node], name)
                for name in self._on[node]
                if name not in self._fixed and self._gpus[name] < below
            ),
        )
        enough = [name for gpus, name in loose if gpus >= short]
        if enough:
            return enough[:1]
        plan = []
        for gpus, name in reversed(loose):
            plan.append(name)
            short -= gpus
            if short <= 0:
                return plan
        return None
