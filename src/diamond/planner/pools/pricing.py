"""What work costs a pool: the price of GPUs falls as tasks end, and every task is worth what its end will cost.

Suppose that a GPU costs `price` seconds of others' completion a second. A task is then done at least cost with the
number of GPUs that minimises (1 + price x GPUs) / speedup, and that minimum is what a unit of its work is worth to the
pool. What counts is the price when the task ends: until then it gives way to whoever pays more, and makes up for it
later. Who ends last ends alone, at the lowest price. So prices are found backwards, the longest task first: with each
that is added, the price rises until all of them together ask for no more GPUs than there are. With speedups that are
powers of GPUs this is what minimises mean completion; where they level off, it allows for that.
"""

from __future__ import annotations

import numpy as np

from diamond.planner.pools.options import Floats, Ints, Options

CHEAPEST, DEAREST = 1e-6, 1e3
STEPS = 12
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
    added = _Added(table.gpus[rows].astype(np.float64), speedup[rows], starts, counts)
    price, first = CHEAPEST, 0
    found = np.ones(len(order))
    while first < len(order):
        last = _alike_to(left, min(len(order), max(first + 1, int(first * GROWTH))))
        price = added.clearing(first, last, price, gpus)
        found[first:last] = added.cheapest(first, last, price)[0]
        added.settle(first, last, found[first:last])
        first = last
    worth = np.ones(len(table.tasks))
    worth[order] = found
    return worth


def _alike_to(left: Floats, last: int) -> int:
    """Further, where the next ones have as much left: what is alike is worth the same."""
    return int(np.searchsorted(-left, -left[last - 1] * (1.0 - ALIKE), "right"))


class _Added:
    """Tasks in the order in which they are added, rows by task; `value` of a row is known once its task is settled."""

    def __init__(self, gpus: Floats, speedup: Floats, starts: Ints, counts: Ints) -> None:
        self._gpus, self._speedup, self._starts, self._counts = gpus, speedup, starts, counts
        self._value = np.zeros(len(gpus))

    def settle(self, first: int, last: int, worth: Floats) -> None:
        here = slice(self._starts[first], self._starts[last])
        self._value[here] = self._speedup[here] * np.repeat(worth, self._counts[first:last])

    def cheapest(self, first: int, last: int, price: float) -> tuple[Floats, float]:
        """What a unit of work of these tasks costs at that price, and the GPUs they ask for together."""
        here = slice(self._starts[first], self._starts[last])
        cost = (1.0 + price * self._gpus[here]) / np.maximum(self._speedup[here], 1e-12)
        starts = self._starts[first:last] - self._starts[first]
        least = np.minimum.reduceat(cost, starts)
        return least, self._smallest(here, starts, cost <= np.repeat(least, self._counts[first:last]))

    def clearing(self, first: int, last: int, price: float, gpus: int) -> float:
        """The price, not below the given one, at which all up to `last` ask for no more than there is."""
        if self._asked(first, last, price) <= gpus:
            return price
        low = high = price
        while high < DEAREST and self._asked(first, last, high) > gpus:
            low, high = high, high * 4.0
        for _ in range(STEPS):
            middle = float(np.sqrt(low * high))
            if self._asked(first, last, middle) > gpus:
                low = middle
            else:
                high = middle
        return high

    def _asked(self, first: int, last: int, price: float) -> float:
        asked = self.cheapest(first, last, price)[1]
        if first:
            here, starts = slice(0, self._starts[first]), self._starts[:first]
            gain = self._value[here] - price * self._gpus[here]
            most = np.maximum.reduceat(gain, starts)
            asked += self._smallest(here, starts, gain >= np.repeat(most, self._counts[:first]))
        return asked

    def _smallest(self, here: slice, starts: Ints, among: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
        """GPUs of the smallest of these rows of each task, together."""
        return float(np.minimum.reduceat(np.where(among, self._gpus[here], np.inf), starts).sum())
