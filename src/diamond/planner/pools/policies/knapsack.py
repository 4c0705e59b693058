"""The multiple-choice knapsack, solved exactly: one option of every row, so that the sum of costs is least.

Dynamic programming over the capacity. Rows of one owner with a quota are solved apart first: what they cost together
at each number of GPUs is then one row among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Row(NamedTuple):
    """Options of one task: numbers of GPUs, in rising order from 0, and what each costs.

    Those whose cost is no number are not taken.
    """

    sizes: NDArray[np.int64]
    costs: NDArray[np.float64]


class Group(NamedTuple):
    """Rows that together get at most `most` GPUs."""

    rows: Sequence[Row]
    most: int


class _Solved(NamedTuple):
    least: NDArray[np.float64]  # by capacity
    picks: NDArray[np.int32]  # by row and capacity


def cheapest(groups: Sequence[Group], capacity: int) -> list[list[int]]:
    """For every row of every group its number of GPUs; the smaller one where two cost the same."""
    inner = [_solve(group.rows, max(min(group.most, capacity), 0)) for group in groups]
    merged = [Row(np.arange(len(one.least)), one.least) for one in inner]
    shares = _trace(merged, _solve(merged, capacity), capacity)
    return [_trace(group.rows, one, share) for group, one, share in zip(groups, inner, shares, strict=True)]


def _solve(rows: Sequence[Row], capacity: int) -> _Solved:
    least = np.zeros(capacity + 1)
    picks = np.zeros((len(rows), capacity + 1), dtype=np.int32)
    columns = np.arange(capacity + 1)
    for number, row in enumerate(rows):
        before = columns - row.sizes[:, None]
        costs = np.where(np.isfinite(row.costs), row.costs, np.inf)
        tried = np.where(before >= 0, least[np.maximum(before, 0)] + costs[:, None], np.inf)
        picks[number] = np.argmin(tried, axis=0)
        least = tried[picks[number], columns]
    return _Solved(least, picks)


def _trace(rows: Sequence[Row], solved: _Solved, capacity: int) -> list[int]:
    sizes = []
    left = capacity
    for number in reversed(range(len(rows))):
        sizes.append(int(rows[number].sizes[solved.picks[number, left]]))
        left -= sizes[-1]
    return sizes[::-1]
