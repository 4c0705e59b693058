"""How a pool is run: which sizes a task may have, and when a node that ends is left."""

from __future__ import annotations

import pytest

from diamond.planner.pools import pace


@pytest.mark.parametrize(
    ("low", "high", "per_node", "sizes"),
    [
        (1, 4, 4, (1, 2, 3, 4)),
        (1, 12, 4, (1, 2, 3, 4, 8, 12)),
        (3, 11, 4, (3, 4, 8)),
        (5, 9, 4, (8,)),
        (6, 6, 4, (6,)),
        (1, 3, 1, (1, 2, 3)),
    ],
)
def test_sizes_lie_evenly_on_nodes(low: int, high: int, per_node: int, sizes: tuple[int, ...]) -> None:
    assert pace.even_sizes(low, high, per_node) == sizes


@pytest.mark.parametrize(
    ("tried", "is_known", "most"),
    [(0, False, 1), (1, False, 4), (2, False, 4), (4, False, 8), (12, False, 16), (0, True, 16)],
)
def test_who_says_nothing_gets_more_once_something_is_known(tried: int, is_known: bool, most: int) -> None:
    assert pace.free_bounds(tried, 4, 16, is_known=is_known) == (1, most)


def test_a_node_is_left_in_its_last_minute_or_tenth() -> None:
    assert (pace.leave_s(3600), pace.leave_s(300)) == (60.0, 30.0)
