"""What work is worth to a pool: what mean completion loses if there is a unit more of it.

Time that passes costs as many seconds as there are tasks that are not done. With the best use of GPUs, the work that is
done in that time is worth just as much: the largest sum of worth times speedup that these GPUs allow is the number of
tasks. What a unit of a task's work is worth does not change until the task ends, and with the best use those with less
left end sooner. So it can be found backwards: the longest task alone, on all GPUs, is worth 1 over its speedup there;
each that is added is worth as much as makes the largest sum one larger. With speedups that are powers of GPUs this is
the known optimum; where they level off, or rise in steps, it allows for that.
"""

from __future__ import annotations

import numpy as np

from diamond.planner.pools.options import Floats, Ints, Options

# Prices of a GPU at which sums are looked at: the largest sum is the least, over prices, of what tasks gain at that
# price and what all GPUs cost at it.
PRICES = 96
STEPS = 14
# Tasks that are added at once: of those with most left one, then more and more, as what one of many changes is little.
GROWTH = 1.3
ALIKE = 1e-9


def worth_of_work(table: Options, speedup: Floats, seconds: Floats, known: Ints, gpus: int) -> Floats:
    """What a unit of work (a second on the smallest share) of each of these tasks is worth.

    Args:
        seconds: by task, how long it would take on its smallest share.
        known: tasks that count, all of which have rows.
    """
    order = known[np.argsort(-seconds[known], kind="stable")]
    left, counts = seconds[order], np.diff(table.start)[order]
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.arange(starts[-1]) + np.repeat(table.start[order] - starts[:-1], counts)
    numbers, faster = table.gpus[rows].astype(np.float64), np.maximum(speedup[rows], 1e-12)
    prices = np.geomspace(1e-3 / max(gpus, 1), 4.0 * len(order), PRICES)
    sums, price = prices * gpus, 0.0
    found = np.ones(len(order))
    first = 0
    while first < len(order):
        last = _alike_to(left, min(len(order), max(first + 1, int(first * GROWTH))))
        here = slice(starts[first], starts[last])
        added = _Added(numbers[here], faster[here], starts[first:last] - starts[first], counts[first:last], prices)
        sums, price, found[first:last] = added.settled(sums, price, last)
        first = last
    worth = np.ones(len(table.tasks))
    worth[order] = found
    return worth


def _alike_to(left: Floats, last: int) -> int:
    """Further, where the next ones have as much left: what is alike is worth the same."""
    return int(np.searchsorted(-left, -left[last - 1] * (1.0 - ALIKE), "right"))


class _Added:
    """Tasks that are added at once: worth alike but for what a unit of their work costs at the price so far."""

    def __init__(self, gpus: Floats, speedup: Floats, starts: Ints, counts: Ints, prices: Floats) -> None:
        self._gpus, self._speedup, self._starts, self._counts = gpus, speedup, starts, counts
        self._prices, self._cost = prices, np.outer(gpus, prices)

    def settled(self, sums: Floats, price: float, target: float) -> tuple[Floats, float, Floats]:
        """Sums by price with these tasks, the price at which they are least, and what each task is worth."""
        each = np.minimum.reduceat((1.0 + price * self._gpus) / self._speedup, self._starts)
        value = self._speedup * np.repeat(each, self._counts)
        low, high = 0.0, 1.0
        while high < 1e9 and self._with(sums, value, high).min() < target:
            low, high = high, 2.0 * high
        for _ in range(STEPS):
            middle = 0.5 * (low + high)
            if self._with(sums, value, middle).min() < target:
                low = middle
            else:
                high = middle
        after = self._with(sums, value, high)
        return after, float(self._prices[int(after.argmin())]), high * each

    def _with(self, sums: Floats, value: Floats, factor: float) -> Floats:
        gained = np.maximum.reduceat(factor * value[:, None] - self._cost, self._starts, axis=0)
        return np.asarray(sums + np.maximum(gained, 0.0).sum(axis=0))
