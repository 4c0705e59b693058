"""Which option for which task: a knapsack in which every task takes one of its options, or none.

Exact by dynamic programming where one kind of GPU is all there is to share, and by HiGHS where there are several kinds
or quotas; where that is too large or takes too long, by prices of GPUs that make demand meet supply. Every answer is
feasible, and at least as good as the one it was given to begin with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, vstack

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Clock = Callable[[], float]
Numbers = Ints | list[int]

# Rows up to which HiGHS finishes within a tenth of a second as a rule, and a bound on its search that is no clock's.
HIGHS_ROWS = 2500
HIGHS_NODES = 50
GAP = 2e-3
# Steps of dynamic programming (rows times GPUs) that take about a second.
STEPS = 400_000_000
PRICE_ROUNDS = 60


@dataclass(frozen=True)
class Problem:
    """What there is to choose from.

    Attributes:
        start: rows `start[i]` to `start[i + 1]` are task i's.
        kind, gpus, value: by row; values are finite.
        capacity: GPUs by kind.
        owner: by task, whose bound it counts against; -1 for nobody's.
        bounds: GPUs by owner.
        must: by task, whether it has to take one.
        given: by task, the row to begin with (-1: none); together they are feasible, and hold what `must` says.
    """

    start: Ints
    kind: Ints
    gpus: Ints
    value: Floats
    capacity: Ints
    owner: Ints
    bounds: Ints
    must: Bools
    given: Ints

    @cached_property
    def task(self) -> Ints:
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))

    @cached_property
    def plain(self) -> tuple[list[int], list[int], list[int]]:
        """Kind and GPUs by row and owner by task, as lists: single values of them are read much faster."""
        return self.kind.tolist(), self.gpus.tolist(), self.owner.tolist()

    def total(self, chosen: Ints) -> float:
        return float(self.value[chosen[chosen >= 0]].sum())

    def room(self, chosen: Ints) -> tuple[Ints, Ints]:
        """What a choice leaves of every kind, and of every owner's bound."""
        tasks = np.flatnonzero(chosen >= 0)
        rows = chosen[tasks]
        kinds = np.bincount(self.kind[rows], weights=self.gpus[rows], minlength=len(self.capacity))
        bound = self.owner[tasks] >= 0
        owners = np.bincount(self.owner[tasks][bound], weights=self.gpus[rows][bound], minlength=len(self.bounds))
        return self.capacity - kinds.astype(np.int64), self.bounds - owners.astype(np.int64)


def choose(problem: Problem, until: float, clock: Clock = time.monotonic) -> tuple[Ints, bool]:
    """By task, the row it gets (-1: none), and whether nothing is better: with several kinds, by more than `GAP`."""
    if not len(problem.value):
        return problem.given.copy(), True
    shared = int((problem.capacity > 0).sum())
    if shared <= 1 and not len(problem.bounds) and len(problem.value) * int(problem.capacity.sum()) <= STEPS:
        found = _by_steps(problem, until, clock)
        if found is not None:
            return found, True
    rough, most = _by_prices(problem, until, clock)
    rough = improved(problem, rough, until, clock)
    if np.isfinite(most) and most - problem.total(rough) <= GAP * abs(most):
        return rough, True
    if len(problem.value) <= HIGHS_ROWS and clock() < until:
        exact = _by_highs(problem, until - clock())
        if exact is not None and problem.total(exact) >= problem.total(rough):
            return exact, True
    return rough, False


def _by_steps(problem: Problem, until: float, clock: Clock) -> Ints | None:
    """Dynamic programming over GPUs; None where the time was over before."""
    room = int(problem.capacity.sum())
    best = np.zeros(room + 1)
    counts = np.diff(problem.start).tolist()
    picks = np.empty((len(problem.start) - 1, room + 1), dtype=np.int16)
    for task in range(len(problem.start) - 1):
        if task % 64 == 0 and clock() > until:
            return None
        if not counts[task] and not problem.must[task]:
            picks[task] = -1
            continue
        after = np.full(room + 1, -np.inf) if problem.must[task] else best.copy()
        pick = np.full(room + 1, -1, dtype=np.int16)
        first = int(problem.start[task])
        for row in range(first, int(problem.start[task + 1])):
            gpus = int(problem.gpus[row])
            if gpus > room:
                continue
            gained = best[: room + 1 - gpus] + problem.value[row]
            better = gained > after[gpus:]
            np.copyto(after[gpus:], gained, where=better)
            pick[gpus:][better] = row - first
        best, picks[task] = after, pick
    return _traced(problem, picks, int(np.argmax(best)))


def _traced(problem: Problem, picks: NDArray[np.int16], room: int) -> Ints:
    chosen = np.full(len(problem.start) - 1, -1, dtype=np.int64)
    for task in range(len(chosen) - 1, -1, -1):
        if picks[task, room] >= 0:
            chosen[task] = problem.start[task] + picks[task, room]
            room -= int(problem.gpus[chosen[task]])
    return chosen


def _by_highs(problem: Problem, seconds: float) -> Ints | None:
    """Mixed-integer programming; None where it did not finish."""
    rows, tasks = np.arange(len(problem.value)), problem.task
    shape = (len(problem.start) - 1, len(rows))
    once = csr_array((np.ones(len(rows)), (tasks, rows)), shape=shape)
    kinds = csr_array((problem.gpus.astype(float), (problem.kind, rows)), shape=(len(problem.capacity), len(rows)))
    bound = problem.owner[tasks] >= 0
    owners = csr_array(
        (problem.gpus[bound].astype(float), (problem.owner[tasks][bound], rows[bound])),
        shape=(len(problem.bounds), len(rows)),
    )
    low = np.concatenate([problem.must.astype(float), np.full(len(problem.capacity) + len(problem.bounds), -np.inf)])
    high = np.concatenate([np.ones(shape[0]), problem.capacity, problem.bounds])
    answer = milp(
        -problem.value / max(float(np.abs(problem.value).max()), 1e-12),
        integrality=np.ones(len(rows)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(vstack([once, kinds, owners]), low, high),
        options={"time_limit": max(seconds, 0.01), "node_limit": HIGHS_NODES, "mip_rel_gap": GAP},
    )
    if answer.x is None or answer.status not in (0, 1):
        return None
    chosen = np.full(shape[0], -1, dtype=np.int64)
    taken = np.flatnonzero(answer.x > 0.5)
    chosen[tasks[taken]] = taken
    left, unspent = problem.room(chosen)
    feasible = (left >= 0).all() and (unspent >= 0).all() and (chosen[problem.must] >= 0).all()
    return chosen if feasible and (answer.status == 0 or answer.mip_gap is not None) else None


def _by_prices(problem: Problem, until: float, clock: Clock) -> tuple[Ints, float]:
    """What tasks would buy at prices that no kind of GPU is asked for more than there is; begins with `given`.

    With it, what no choice is worth more than: at any prices, what tasks gain and what all GPUs cost.
    """
    kinds = len(problem.capacity)
    supply = np.concatenate([problem.capacity, problem.bounds]).astype(float)
    owner = problem.owner[problem.task]
    prices = np.zeros(len(supply))
    density = problem.value / np.maximum(problem.gpus, 1)
    step = float(np.median(density[density > 0])) if (density > 0).any() else 1.0
    best, most = problem.given, np.inf
    for turn in range(PRICE_ROUNDS):
        if clock() > until:
            break
        chosen, gained = _bought(problem, prices, owner, kinds)
        most = min(most, gained + float(prices @ supply))
        left, unspent = problem.room(chosen)
        short = -np.concatenate([left, unspent])
        candidate = _affordable(problem, chosen)
        if problem.total(candidate) > problem.total(best):
            best = candidate
        pace = step * (0.5 if turn < PRICE_ROUNDS // 3 else 2.0 / (turn - PRICE_ROUNDS // 3 + 4))
        prices = np.maximum(prices + pace * np.clip(short / np.maximum(supply, 1.0), -1.0, 1.0), 0.0)
    return best, most


def _bought(problem: Problem, prices: Floats, owner: Ints, kinds: int) -> tuple[Ints, float]:
    """By task, the row that gains most at these prices, and the sum of those gains."""
    owed = prices[problem.kind] + np.where(owner >= 0, prices[kinds + owner] if len(problem.bounds) else 0.0, 0.0)
    gain = problem.value - owed * problem.gpus
    chosen = np.full(len(problem.start) - 1, -1, dtype=np.int64)
    some = np.flatnonzero(np.diff(problem.start) > 0)
    top = np.maximum.reduceat(gain, problem.start[some])
    first = np.flatnonzero(gain >= np.repeat(top, np.diff(problem.start)[some]))
    rows = np.full(len(chosen), -1, dtype=np.int64)
    rows[problem.task[first[::-1]]] = first[::-1]
    good = some[(top > 0) | problem.must[some]]
    chosen[good] = rows[good]
    return chosen, float(gain[chosen[good]].sum())


def _affordable(problem: Problem, chosen: Ints) -> Ints:
    """A choice cut down to what there is: the given row first for whoever must have one, then by value for a GPU."""
    found = np.where(problem.must, problem.given, -1)
    room, unspent = problem.room(found)
    tasks = np.flatnonzero(chosen >= 0)
    density = problem.value[chosen[tasks]] / problem.gpus[chosen[tasks]]
    has, rows, left, bounds = found.tolist(), chosen.tolist(), room.tolist(), unspent.tolist()
    for task in tasks[np.lexsort((tasks, -density))].tolist():
        _exchange(problem, has, task, rows[task], left, bounds)
    return np.array(has, dtype=np.int64)


def _exchange(problem: Problem, chosen: Numbers, task: int, row: int, room: Numbers, unspent: Numbers) -> bool:
    """Gives a task that row instead of what it has, where there is room for it."""
    kinds, numbers, owners = problem.plain
    had, owner = int(chosen[task]), owners[task]
    gpus, back = numbers[row], numbers[had] if had >= 0 else 0
    same = had >= 0 and kinds[had] == kinds[row]
    if gpus - (back if same else 0) > room[kinds[row]] or (owner >= 0 and gpus - back > unspent[owner]):
        return False
    if had >= 0:
        room[kinds[had]] += back
    room[kinds[row]] -= gpus
    if owner >= 0:
        unspent[owner] += back - gpus
    chosen[task] = row
    return True


def improved(problem: Problem, chosen: Ints, until: float, clock: Clock) -> Ints:
    """With what is left over given to who gains most for a GPU, until nothing gains any more."""
    chosen = chosen.copy()
    room, unspent = problem.room(chosen)
    tasks = problem.task
    while True:
        has = chosen[tasks]
        gain = problem.value - np.where(has >= 0, problem.value[has], 0.0)
        more = problem.gpus - np.where(has >= 0, problem.gpus[has], 0)
        same = (has >= 0) & (problem.kind[has] == problem.kind)
        fits = np.where(same, more, problem.gpus) <= room[problem.kind]
        if len(unspent):
            owner = problem.owner[tasks]
            fits &= (owner < 0) | (more <= unspent[owner])
        worth = np.where(fits & (gain > 1e-9), gain / np.maximum(more, 0.25), 0.0)
        ranked = np.argsort(-worth, kind="stable")[: max(1, int((worth > 0).sum()) // 8)]
        done = [
            _exchange(problem, chosen, int(tasks[row]), int(row), room, unspent)
            for row in _each_once(ranked, tasks)
            if worth[row] > 0
        ]
        if not any(done) or clock() >= until:  # one pass is made in any case: it is short, and idle GPUs are worse
            return chosen


def _each_once(rows: Ints, tasks: Ints) -> Ints:
    """The first row of every task, in the order given."""
    _, first = np.unique(tasks[rows], return_index=True)
    return rows[np.sort(first)]
