"""What work is worth, against what is known to be best, and for any speedups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.planner.pools.options import Floats, Options, Pool, options
from diamond.planner.pools.pricing import worth_of_work
from diamond.planner.pools.snapshot import Demand, Node, Shape, Snapshot

GPUS = 256


class Curve:
    def __init__(self, power: float, level: int = GPUS) -> None:
        self._power, self._level = power, level

    def goodput(self, shape: Shape) -> float:
        return float(min(shape.gpus, self._level) ** self._power)

    def doubt(self, shape: Shape) -> float:
        return 0.0


def table_of(curves: Sequence[Curve], gpus: int = GPUS) -> tuple[Options, Floats]:
    sizes = tuple(range(1, gpus + 1))
    demands = tuple(
        Demand(id=f"t{number:03}", submitted_at=0.0, speed=curve, max_gpus=gpus, sizes=sizes)
        for number, curve in enumerate(curves)
    )
    snapshot = Snapshot(now=0.0, nodes=(Node(name="n", gpu_type="a", gpus=gpus),), demands=demands)
    table = options(snapshot, Pool.of(snapshot, {}), {})
    return table, table.goodput


def worth(curves: Sequence[Curve], seconds: Sequence[float], gpus: int = GPUS) -> list[float]:
    table, speedup = table_of(curves, gpus)
    found = worth_of_work(table, speedup, np.array(seconds), np.arange(len(curves)), gpus)
    return [float(one) for one in found]


@pytest.mark.parametrize("power", [0.3, 0.5, 0.75])
def test_with_powers_of_gpus_it_is_the_known_optimum(power: float) -> None:
    """For speedups k^a and n tasks the optimal value of the k-th from last is (k^q - (k-1)^q)^(1/q), q = 1/(1-a)."""
    found = worth([Curve(power)] * 4, [4000.0, 300.0, 20.0, 1.0])
    q = 1.0 / (1.0 - power)
    best = [(k**q - (k - 1) ** q) ** (1.0 / q) for k in (1, 2, 3, 4)]
    assert [one / found[0] for one in found] == pytest.approx([one / best[0] for one in best], rel=0.05)


def test_how_much_is_left_counts_by_rank_alone_and_what_is_alike_is_worth_the_same() -> None:
    curves = [Curve(0.7)] * 3
    assert worth(curves, [900.0, 800.0, 700.0]) == worth(curves, [9e9, 50.0, 1.0])
    assert len(set(worth(curves, [5.0, 5.0, 5.0]))) == 1


def test_who_cannot_use_many_gpus_is_worth_more_beside_who_can() -> None:
    """A second of its work takes longer at best, and more of it is paid for by waiting than by GPUs."""
    flat, steep = worth([Curve(0.9, level=2), Curve(0.9)], [100.0, 99.0])
    assert flat > steep


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 16), st.floats(1.0, 1e6)), min_size=1, max_size=40),
    st.integers(1, 24),
)
def test_worth_is_finite_positive_and_falls_with_what_is_left(tasks: list[tuple[float, int, float]], gpus: int) -> None:
    found = worth([Curve(power, level) for power, level, _ in tasks], [left for _, _, left in tasks], gpus)
    assert all(0.0 < one < np.inf for one in found)
    alike = worth([Curve(*tasks[0][:2])] * len(tasks), [left for _, _, left in tasks], gpus)
    order = sorted(range(len(tasks)), key=lambda number: tasks[number][2])
    assert all(alike[a] >= alike[b] * (1 - 1e-3) for a, b in itertools.pairwise(order))
