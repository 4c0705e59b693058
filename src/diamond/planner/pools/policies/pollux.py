"""Goodput with fairness, after Pollux (OSDI 2021): the power mean, with p = -1, of speedups over a fair share.

What a task gains is its goodput against that of an equal share of the GPUs, lowered by the restart factor where it
would be restarted. With p = -1 the best mean is the least sum of 1/speedup, a multiple-choice knapsack that is solved
exactly here, where the published scheduler uses a genetic algorithm. Further differences: beyond four nodes only
whole ones are tried, the fair share of a task is one that it takes, and two tasks of several nodes each may meet on
one. Pollux knows one kind of GPU: where there are several, a task stays with the kind on which it runs, a new one goes
to the kind with most GPUs a task, and each kind is solved apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from diamond.planner.pools.policies.knapsack import Group, Row, cheapest
from diamond.planner.pools.policies.ledger import Ledger, largest, restart_factor, smallest
from diamond.planner.pools.policies.words import decide
from diamond.planner.pools.snapshot import Decision, Demand, Snapshot

_NOTHING = 1e-3  # added to a speedup, as published: having no GPU is bad, not infinitely bad
_FEW = 4  # nodes up to which every number of GPUs is tried: beyond, one more or less hardly matters
_LEAST_FACTOR = 1e-2  # a task that is new, or was restarted often, would else gain nothing by starting, and never do so


class Pollux:
    """Priorities are not part of it.

    Args:
        growth: a task gets at most so many times the GPUs it has had before, and the fewest it takes at first, as
            published (its speed on more is a guess); None: as many as it takes at once.
    """

    name = "pollux"
    adapts_batch = True

    def __init__(self, growth: int | None = 2) -> None:
        self.growth = growth

    def allocate(self, snapshot: Snapshot) -> Decision:
        ledger = Ledger(snapshot)
        for kind, tasks in _by_kind(ledger).items():
            self._share_out(ledger, kind, tasks)
        return decide(ledger, {}, "others gain more by the GPUs")

    def _share_out(self, ledger: Ledger, kind: str, tasks: Sequence[Demand]) -> None:
        if not tasks:
            return
        fair = math.ceil(ledger.total[kind] / len(tasks))
        owners: dict[str | None, list[tuple[Demand, Row]]] = {}
        for task in tasks:
            row = self._row(ledger, task, kind, fair) if task.id not in ledger.wanted else None
            if row is not None:
                owners.setdefault(task.owner if task.owner in ledger.snapshot.quotas else None, []).append((task, row))
        groups = [Group([row for _, row in members], ledger.room(members[0][0], kind)) for members in owners.values()]
        for members, sizes in zip(owners.values(), cheapest(groups, ledger.free[kind]), strict=True):
            for (task, _), gpus in zip(members, sizes, strict=True):
                if gpus:
                    ledger.take(task, kind, gpus)

    def _row(self, ledger: Ledger, task: Demand, kind: str, fair: int) -> Row | None:
        """What each number of GPUs costs: 1/speedup. None where it can run on none."""
        speeds = {size: ledger.goodput(task, kind, size) for size in self._sizes(ledger, task, kind)}
        speeds = {size: speed for size, speed in speeds.items() if speed > 0}
        share = largest(task, fair) or smallest(task)
        base = ledger.goodput(task, kind, share) or max(speeds.values(), default=0.0)
        if not base:
            return None
        now = ledger.shapes.get(task.id)
        factor = max(restart_factor(task, ledger.snapshot.now), _LEAST_FACTOR)
        scale = len(ledger.types[kind]) / ledger.total[kind]  # so that a whole node for a fair share counts as 1
        sizes, costs = [0], [1 / _NOTHING]
        for size, speed in speeds.items():
            stays = now is not None and (now.gpu_type, now.gpus) == (kind, size)
            sizes.append(size)
            costs.append(1 / (speed / base * scale * (1.0 if stays else factor) + _NOTHING))
        return Row(np.array(sizes), np.array(costs))

    def _sizes(self, ledger: Ledger, task: Demand, kind: str) -> list[int]:
        """Any number on a few nodes, and whole nodes beyond; and its own bounds, for tasks that take nothing else."""
        width, most = ledger.width(kind), ledger.most(task, kind)
        if self.growth is not None:
            most = min(most, max(self.growth * ledger.seen(task), smallest(task)))
        whole = range(width, most + 1, width) if width else ()
        tried = {*range(1, min(_FEW * width, most) + 1), *whole, most, smallest(task), *(task.sizes or ())}
        now = ledger.shapes.get(task.id)
        if now is not None:
            tried.add(now.gpus)
        return sorted(size for size in tried if 0 < size <= most and task.takes(size))


def _by_kind(ledger: Ledger) -> dict[str, list[Demand]]:
    found: dict[str, list[Demand]] = {kind: [] for kind in ledger.types}
    new = []
    for demand in sorted(ledger.snapshot.demands, key=lambda one: (one.submitted_at, one.id)):
        shape = ledger.shapes.get(demand.id)
        if shape is not None:
            found[shape.gpu_type].append(demand)
        else:
            new.append(demand)
    for demand in new:
        kinds = [kind for kind in ledger.kinds(demand) if ledger.most(demand, kind)]
        kinds = [kind for kind in kinds if ledger.goodput(demand, kind, smallest(demand)) > 0] or kinds
        if kinds:
            found[max(kinds, key=lambda one: ledger.total[one] / (len(found[one]) + 1))].append(demand)
    return found
