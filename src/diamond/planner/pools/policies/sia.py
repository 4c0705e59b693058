"""Goodput on several kinds of GPUs, after Sia (SOSP 2023): one integer programme over all tasks and configurations.

A configuration is a kind of GPU and a number: powers of two within a node, whole nodes beyond. A task's goodputs are
divided by its least one (which then counts as the GPUs it needs at least) and multiplied by the restart factor where
it would be restarted; the sum of goodput^p over the tasks that get something, and 1.1 for every one that does not, is
made least, with p = -0.5. A task starts with the fewest GPUs it takes and gets at most twice those it has had.
The published one rounds goodput^p to two places; this one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from diamond.planner.pools.policies.ledger import Ledger, restart_factor, smallest, sound
from diamond.planner.pools.policies.words import decide
from diamond.planner.pools.snapshot import Decision, Demand, Snapshot

POWER = -0.5
UNSERVED = 1.1
_HIGHEST = 3000.0  # of goodput^p, as published
_GAP = 1e-4  # relative, at which the solver may stop, as published
_SOLVER_SHARE = 0.6  # of the time for a decision; what is left is for the relaxation and the places


class _Choice(NamedTuple):
    task: int
    kind: str
    gpus: int
    cost: float  # against getting nothing, so below zero


class Sia:
    """Priorities are not part of it.

    Args:
        growth: a task gets at most so many times the GPUs it has had before; None: as many as it takes at once.
    """

    name = "sia"
    adapts_batch = True

    def __init__(self, growth: int | None = 2) -> None:
        self.growth = growth

    def allocate(self, snapshot: Snapshot) -> Decision:
        ledger = Ledger(snapshot)
        tasks = ledger.waiting()
        choices = [choice for number, task in enumerate(tasks) for choice in self._choices(ledger, number, task)]
        taken, exact = _solve(ledger, tasks, choices)
        for choice in taken:
            ledger.take(tasks[choice.task], choice.kind, choice.gpus)
        return decide(ledger, {}, "others gain more by the GPUs", exact=exact)

    def _choices(self, ledger: Ledger, number: int, task: Demand) -> list[_Choice]:
        speeds = {
            (kind, gpus): speed
            for kind in ledger.kinds(task)
            for gpus in self._numbers(ledger, task, kind)
            if (speed := ledger.goodput(task, kind, gpus)) > 0
        }
        if not speeds:
            return []
        least = min(speeds, key=lambda one: (speeds[one], one))
        now = ledger.shapes.get(task.id)
        found = []
        for (kind, gpus), speed in speeds.items():
            stays = now is None or (now.gpu_type, now.gpus) == (kind, gpus)
            factor = 1.0 if stays else _restart_factor(task, ledger.snapshot.now)
            value = speed / speeds[least] * least[1] * factor
            cost = (min(value**POWER, _HIGHEST) if value > 0 else _HIGHEST) - UNSERVED
            if cost < 0:
                found.append(_Choice(number, kind, gpus, cost))
        return found

    def _numbers(self, ledger: Ledger, task: Demand, kind: str) -> list[int]:
        width, most = ledger.width(kind), ledger.most(task, kind)
        usual = {2**power for power in range(width.bit_length()) if 2**power <= width}
        usual |= set(range(width, ledger.total[kind] + 1, width)) if width else set()
        taken = {gpus for gpus in usual if gpus <= most and task.takes(gpus)}
        if not taken:  # of a rigid task, any number is one
            taken = {gpus for gpus in (smallest(task), *(task.sizes or ())) if 0 < gpus <= most and task.takes(gpus)}
        now = ledger.shapes.get(task.id)
        if now is not None and now.gpu_type == kind and now.gpus <= most:
            taken.add(now.gpus)
        if self.growth is None or not taken:
            return sorted(taken)
        top = max(self.growth * ledger.seen(task), min(taken))
        return sorted(gpus for gpus in taken if gpus <= top)


def _restart_factor(task: Demand, now: float) -> float:
    """As published, none for those that are too young to have been worth a restart."""
    return 1.0 if now - task.submitted_at < sound(task.restart_s) else restart_factor(task, now)


def _solve(ledger: Ledger, tasks: Sequence[Demand], choices: Sequence[_Choice]) -> tuple[list[_Choice], bool]:
    """The best choices, and whether they are; where the solver does not finish, the relaxed problem is rounded."""
    if not choices:
        return [], True
    limit_s = _SOLVER_SHARE * ledger.snapshot.seconds
    if limit_s > 0:
        result = _programme(ledger, tasks, choices, whole=True, limit_s=limit_s)
        if result.status == 0 and result.x is not None:
            return [choice for choice, taken in zip(choices, result.x, strict=True) if taken > 0.5], True
    relaxed = _programme(ledger, tasks, choices, whole=False, limit_s=60.0)
    shares = np.zeros(len(choices)) if relaxed.x is None else relaxed.x
    return _rounded(ledger, tasks, choices, shares), False


def _programme(
    ledger: Ledger, tasks: Sequence[Demand], choices: Sequence[_Choice], *, whole: bool, limit_s: float
) -> OptimizeResult:
    """One choice a task, no more GPUs of a kind than are free, and no owner past its quota."""
    kinds = {kind: len(tasks) + number for number, kind in enumerate(ledger.types)}
    owners = sorted({tasks[one.task].owner for one in choices} & set(ledger.snapshot.quotas))
    quotas = {owner: len(tasks) + len(kinds) + number for number, owner in enumerate(owners)}
    of_owner = {task.owner: ledger.quota(task) for task in tasks}
    bounds = [1.0] * len(tasks) + [ledger.free[kind] for kind in kinds] + [max(of_owner[one], 0) for one in owners]
    entries = [(one.task, column, 1) for column, one in enumerate(choices)]
    entries += [(kinds[one.kind], column, one.gpus) for column, one in enumerate(choices)]
    entries += [
        (quotas[owner], column, one.gpus)
        for column, one in enumerate(choices)
        if (owner := tasks[one.task].owner) in quotas
    ]
    rows, columns, values = zip(*entries, strict=True)
    matrix = csr_array((np.array(values, dtype=float), (rows, columns)), shape=(len(bounds), len(choices)))
    return milp(
        np.array([one.cost for one in choices]),
        integrality=np.full(len(choices), int(whole)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, -np.inf, np.array(bounds, dtype=float)),
        options={"time_limit": limit_s, "mip_rel_gap": _GAP},
    )


def _rounded(
    ledger: Ledger, tasks: Sequence[Demand], choices: Sequence[_Choice], shares: NDArray[np.float64]
) -> list[_Choice]:
    """First what the relaxed solution wants most, then whatever still fits, the most gain a GPU first."""
    order = sorted(
        range(len(choices)), key=lambda one: (-round(float(shares[one]), 6), choices[one].cost / choices[one].gpus, one)
    )
    free = dict(ledger.free)
    quotas = {task.owner: ledger.quota(task) for task in tasks}
    taken: dict[int, _Choice] = {}
    for number in order:
        choice = choices[number]
        owner = tasks[choice.task].owner
        if choice.task not in taken and choice.gpus <= min(free[choice.kind], quotas[owner]):
            taken[choice.task] = choice
            free[choice.kind] -= choice.gpus
            quotas[owner] -= choice.gpus
    return list(taken.values())
