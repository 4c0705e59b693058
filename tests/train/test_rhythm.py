"""How often a run saves itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diamond.train.rhythm import expected_loss, interval_s, mean_between_failures, percentile


@given(cost=st.floats(0.01, 60), mtbf=st.floats(1800, 30 * 86_400))
def test_no_other_interval_is_much_better(cost: float, mtbf: float) -> None:
    chosen = expected_loss(interval_s(cost, 0.0, mtbf), cost, mtbf)
    others = [
        expected_loss(interval_s(cost, 0.0, mtbf) * factor, cost, mtbf) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)
    ]
    assert chosen <= min(others) * 1.02


def test_what_bounds_it() -> None:
    assert interval_s(0.0, 0.0, 86_400) == 1.0
    assert interval_s(0.0, 30.0, 86_400) == pytest.approx(33.0), "one cannot overtake itself"
    assert interval_s(1000.0, 0.0, 1000.0) == 1000.0
    with pytest.raises(ValueError, match="above 0"):
        interval_s(1.0, 1.0, 0.0)


def test_failures_shorten_it() -> None:
    calm, wild = mean_between_failures(240, 0), mean_between_failures(240, 20)
    assert wild < calm
    assert interval_s(5.0, 0.0, wild) < interval_s(5.0, 0.0, calm)
    assert mean_between_failures(0, 0) == 86_400


def test_of_few_values_the_largest() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(each) for each in range(1, 101)], 0.5) == 50.0
