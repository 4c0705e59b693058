"""What every option of every task is worth to the pool, in one unit: GPUs' worth of progress.

A task on its smallest share counts as many as that share has GPUs; on more, as many times more as it is faster. Three
things change that. A change of place costs a restart, which weighs more the younger a task is and the less it has left.
What is not well known counts more, so that it becomes known, or less. And while GPUs are short, work that ends soon
counts more, unless that makes a task much later than its fair share would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diamond.planner.pools.options import Floats, Ints, Options
from diamond.planner.pools.policies.ledger import LEAST, LONGEST_S
from diamond.planner.pools.pricing import worth_of_work
from diamond.planner.pools.snapshot import Demand, Snapshot

# Standard deviations between `low` and `high` of what is left, which hold it mostly.
LOW_TO_HIGH = 2 * 1.645
# What a task that nobody can say anything of has left when it starts, and how far the rule of thumb after that is
# trusted.
UNSEEN_S = 600.0
UNTOLD = 0.5
# Age from which on a task sticks to what it has in full, and what is added to every age when a restart is weighed.
SETTLED_S = 3600.0
YOUNG_S = 100.0
# How much more or less than the usual task one may count for what it has left.
WEIGHTS = (0.125, 8.0)


@dataclass(frozen=True, kw_only=True)
class Taste:
    """What a pool's owner may prefer.

    Attributes:
        haste: how much work that ends soon is preferred while GPUs are short: 0 not at all, 1 as is best for mean
            completion (see `pricing`).
        fairness: bends speedups, so that a second GPU for one task counts less than a first for another; from 0 to 1.
        lateness: finish-time ratio (to the fair share) above which a task is not put behind shorter ones.
        sticky: how much more an option counts for being what a task has.
        thrift: a further GPU that brings less than this part of a first one is rather left idle.
        pessimism: doubts that are taken off a speed that is not known.
        curiosity: doubts that are added to it, up to what more GPUs can bring at best.
        headroom: how much more than its load a service can answer.
        wait_s: whoever has waited that long in total gets its smallest share first, and again after as long again.
        turn_s: how long it keeps that.
    """

    haste: float = 1.0
    fairness: float = 0.0
    lateness: float = 3.0
    sticky: float = 0.15
    thrift: float = 0.0
    pessimism: float = 0.0
    curiosity: float = 0.5
    headroom: float = 0.2
    wait_s: float = 1800.0
    turn_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("haste", "lateness", "sticky", "thrift", "pessimism", "curiosity", "headroom"):
            if not 0.0 <= getattr(self, name) < 100.0:
                raise ValueError(f"{name}: {getattr(self, name)} is not a number from 0 to 100")
        if not 0.0 <= self.fairness <= 1.0:
            raise ValueError(f"fairness: {self.fairness} is not between 0 and 1")
        for name in ("wait_s", "turn_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}: {getattr(self, name)} is not a number of seconds above 0")


@dataclass(frozen=True)
class Worth:
    """By row: value for the choice, speedup. By task: weight, goodput on the smallest and on the fair share."""

    value: Floats
    speedup: Floats
    weight: Floats
    smallest: Floats
    fair: Floats


def worth(snapshot: Snapshot, table: Options, gpus: int, taste: Taste) -> Worth:
    smallest, least = _smallest(table)
    fair = _at_fair_share(table, gpus)
    counted = _hoped_for(table, taste)
    speedup = counted / smallest[table.task] * least[table.task]
    weight = _weights(snapshot, table, speedup, smallest, fair, gpus, taste)
    bent = speedup ** (1.0 - 0.5 * taste.fairness) - taste.thrift * (table.gpus - least[table.task])
    value = _capped_by_load(table, weight[table.task] * bent, taste)
    return Worth(_with_restarts(snapshot, table, value, taste), speedup, weight, smallest, fair)


def _smallest(table: Options) -> tuple[Floats, Floats]:
    """By task, goodput on its smallest number of GPUs (of the slowest kind), and that number."""
    goodput, gpus = np.ones(len(table.tasks)), np.ones(len(table.tasks))
    some, first = _first_rows(table)
    if len(some):
        gpus[some] = table.gpus[first]
        goodput[some] = np.minimum.reduceat(np.where(table.gpus == gpus[table.task], table.goodput, np.inf), first)
    return goodput, gpus


def _first_rows(table: Options) -> tuple[Ints, Ints]:
    """Tasks that have rows, and the first row of each."""
    some = np.flatnonzero(np.diff(table.start) > 0)
    return some, table.start[some]


def _at_fair_share(table: Options, gpus: int) -> Floats:
    """By task, goodput on an equal part of the pool, or on its smallest share for a part of the time."""
    share = gpus / max(len(table.tasks), 1)
    fair = np.ones(len(table.tasks))
    some, first = _first_rows(table)
    if len(some):
        within = np.maximum.reduceat(np.where(table.gpus <= share, table.goodput, -1.0), first)
        fair[some] = np.where(within >= 0.0, within, table.goodput[first] * share / table.gpus[first])
    return np.maximum(fair, 1e-300)


def _hoped_for(table: Options, taste: Taste) -> Floats:
    """Goodput, more for sizes that were not tried yet: a try costs one restart, and what it shows lasts.

    Without that, a task whose second size seems to bring little would stay on its first one, beside idle GPUs. At most
    what it would be if every GPU brought as much as those that it has, or as its smallest share.
    """
    known = np.where(table.now >= 0, table.now, table.start[:-1])[table.task]
    hoped = table.goodput * np.exp((taste.curiosity - taste.pessimism) * _added_doubt(table))
    most = table.goodput[known] * table.gpus / np.maximum(table.gpus[known], 1)
    return np.minimum(hoped, np.maximum(table.goodput, most))


def _added_doubt(table: Options) -> Floats:
    """Doubt beyond that of what a task has, or of its smallest share."""
    known = np.zeros(len(table.tasks))
    some, first = _first_rows(table)
    known[some] = table.doubt[np.where(table.now[some] >= 0, table.now[some], first)]
    return np.clip(table.doubt - known[table.task], 0.0, 3.0)


def _weights(
    snapshot: Snapshot, table: Options, speedup: Floats, smallest: Floats, fair: Floats, gpus: int, taste: Taste
) -> Floats:
    """One for the usual task; more for those whose work is worth more than others', as surely as that is known."""
    weight = np.ones(len(table.tasks))
    most = np.zeros(len(table.tasks))
    np.maximum.at(most, table.task, table.gpus)
    if taste.haste == 0.0 or most.sum() <= gpus:
        return weight
    seconds, certain = _seconds_left(table, smallest)
    known = np.flatnonzero((certain > 0.0) & (np.diff(table.start) > 0))
    if not len(known):
        return weight
    valued = np.log(worth_of_work(table, speedup, seconds, known, gpus)[known])
    weight[known] = np.clip(np.exp(taste.haste * certain[known] * (valued - valued.mean())), *WEIGHTS)
    # Little by little: a task that is let off at once would be put back at once, with a restart each time.
    late = np.clip(finish_ratios(snapshot, table, fair) / max(taste.lateness, 1e-9) - 1.0, 0.0, 1.0)
    return np.where(weight < 1.0, weight ** (1.0 - late), weight)


def _seconds_left(table: Options, goodput: Floats) -> tuple[Floats, Floats]:
    """By task, what is left at that goodput, and how certain that is, from 0 (for services: nothing is) to 1.

    Of a task of which nothing is known, as much is left as it has done: the longer it ran, the longer it will run.
    """
    seconds, certain = np.ones(len(table.tasks)), np.zeros(len(table.tasks))
    for task, demand in enumerate(table.tasks):
        spread = _spread(demand)
        if spread is not None and demand.left is not None:
            seconds[task] = max(demand.left.expected / goodput[task], 1.0)
            certain[task] = 1.0 / (1.0 + spread**2)
        elif demand.load is None:
            done = demand.done if np.isfinite(demand.done) else 0.0
            seconds[task] = max(done / goodput[task], UNSEEN_S)
            certain[task] = UNTOLD
    return seconds, certain


def _spread(demand: Demand) -> float | None:
    """Standard deviation of the logarithm of what is left; None where nothing is known of it."""
    if demand.left is None or demand.load is not None:
        return None
    expected, low, high = demand.left
    if not (np.isfinite(expected) and expected > 0.0):
        return None
    if not (0.0 < low <= high < np.inf):
        return 1.0
    return float(np.log(high / low)) / LOW_TO_HIGH


def finish_ratios(snapshot: Snapshot, table: Options, fair: Floats) -> Floats:
    """By task, when it will end at the speed it has, to when it would on its fair share alone; 0 where unknown."""
    ratio = np.zeros(len(table.tasks))
    for task, demand in enumerate(table.tasks):
        if _spread(demand) is None or demand.left is None:
            continue
        age = _age_s(snapshot, demand)
        now = table.goodput[table.now[task]] if table.now[task] >= 0 else fair[task]
        alone = (max(demand.done, 0.0) + demand.left.expected) / fair[task]
        ratio[task] = (age + demand.left.expected / max(now, 1e-300)) / max(alone, 1e-9)
    return ratio


def _capped_by_load(table: Options, value: Floats, taste: Taste) -> Floats:
    """A service gains nothing from answering more than it is asked."""
    value = value.copy()
    for task, demand in enumerate(table.tasks):
        if demand.load is not None and (rows := table.rows(task)):
            first, here = rows[0], slice(rows[0], rows[-1] + 1)
            needed = needed_for_load(demand, taste)
            share = np.minimum(table.goodput[here] / needed, 1.0) if needed > 0.0 else np.ones(len(rows))
            value[here] = table.gpus[first] * share / max(float(share[0]), 1e-9)
    return value


def needed_for_load(demand: Demand, taste: Taste) -> float:
    load = 0.0 if demand.load is None or not np.isfinite(demand.load) else max(demand.load, 0.0)
    return load * (1.0 + taste.headroom) if load >= LEAST else 0.0


def _with_restarts(snapshot: Snapshot, table: Options, value: Floats, taste: Taste) -> Floats:
    """Less for what a running task has to restart for, more for what it has, and less for stopping it as well."""
    value = value.copy()
    for task in np.flatnonzero(table.now >= 0):
        demand, rows, now = table.tasks[task], table.rows(int(task)), int(table.now[task])
        here = slice(rows[0], rows[-1] + 1)
        kept = float(value[now])
        useful = useful_share(snapshot, demand, table.goodput[here])
        value[here] *= useful
        if demand.left is not None and _spread(demand) is not None:  # what is nearly done is not stopped for speed
            rest = max(min(demand.left.low, demand.left.expected), 0.0)
            late = restart_of(demand) + rest / table.goodput[here] > rest / table.goodput[now]
            value[here] = np.where(late & (table.goodput[here] > table.goodput[now]), kept * 0.99, value[here])
        # A young task is still finding its size: a restart weighs enough on it already.
        value[now] = kept * (1.0 + taste.sticky * min(1.0, _age_s(snapshot, demand) / SETTLED_S))
        value[here] += kept * (1.0 - float(useful[now - rows[0]]))
    return value


def _age_s(snapshot: Snapshot, demand: Demand) -> float:
    age = snapshot.now - demand.submitted_at
    return min(age, LONGEST_S) if age > 0.0 else 0.0


def restart_of(demand: Demand) -> float:
    return demand.restart_s if np.isfinite(demand.restart_s) and demand.restart_s > 0.0 else 0.0


def useful_share(snapshot: Snapshot, demand: Demand, goodput: Floats) -> Floats:
    """The part of its time that a task works if it restarts now, judged by its age and by what it has left."""
    restart = restart_of(demand)
    age = _age_s(snapshot, demand) + YOUNG_S
    by_age = max(age - max(demand.restarts, 0) * restart, 0.0) / max(age + restart, 1e-9)
    if demand.left is None or _spread(demand) is None:
        return np.full(len(goodput), by_age)
    rest = demand.left.expected / goodput
    return np.minimum(by_age, rest / (rest + restart + 1e-9))
