"""Trainings whose batch Diamond chooses: units of noise, bounds, and that work over speed is the time it takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.planner.pools.batches import learning_rate_scale
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.speeds import Linear
from diamond.planner.pools.trained import AtBestBatch, AtOwnBatch, Growth, Window, passes, speed
from diamond.train.scaling import lr_scale

ONE, TWO, FOUR = Shape("a", 1, 1), Shape("a", 1, 2), Shape("a", 1, 4)
PASS_S, EXCHANGE_S = 0.2, 0.1
GROWTH = Growth(first=32, most=None, per_rank=32, noise_scale=3200.0, now=32)


def window(slots: int, global_batch: int, per_rank: int = 32) -> Window:
    """Of a training that takes `PASS_S` for each pass, and `EXCHANGE_S` at the end of a step."""
    count = math.ceil(global_batch / slots / per_rank)
    exchange_s = EXCHANGE_S if slots > 1 else 0.0
    return Window(1, slots, global_batch, count * PASS_S + exchange_s, per_rank, exchange_s)


WINDOWS = [window(1, 32), window(2, 128), window(4, 256)]


def grown(growth: Growth = GROWTH) -> AtBestBatch:
    found = speed("a", WINDOWS, None, None, growth)
    assert isinstance(found, AtBestBatch)
    return found


# ---- units -----------------------------------------------------------------------------------------------------------


@given(first=st.integers(1, 10_000), noise=st.floats(0.0, 1e7, allow_subnormal=False), times=st.integers(1, 100))
def test_the_noise_is_that_of_the_training_library(first: int, noise: float, times: int) -> None:
    """`noise_scale` B is in samples: a sample in a batch of T is worth (B + b) / (B + T) of one in the first, b."""
    found = Growth(first, None, first, noise, first).noise
    assert found.efficiency(first * times, first) == pytest.approx((noise + first) / (noise + first * times))
    gain = learning_rate_scale(found, first, first * times)
    assert gain == pytest.approx(lr_scale("adascale", float(times), noise, batch=first))


def test_passes_are_told_from_exchanges() -> None:
    """Steps of two passes and of one say the same of a pass."""
    for found in passes("a", [window(2, 64), window(2, 128), window(2, 640)]):
        assert (found.per_gpu, found.step_s) == (32, pytest.approx(PASS_S + EXCHANGE_S))
    (alone,) = passes("a", [window(1, 320)])
    assert (alone.per_gpu, alone.step_s) == (32, pytest.approx(PASS_S))
    unknown = Window(1, 2, 128, 0.5, 32)
    assert passes("a", [unknown])[0].step_s == pytest.approx(0.25), "no exchange is made up"
    assert passes("a", [Window(1, 2, 128, 0.5)])[0].per_gpu == 64
    assert passes("a", [Window(1, 2, 128, math.inf, 32), Window(2, 1, 128, 0.5, 32)]) == []


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "noise", "largest"),
    [(None, 1e6, 32 * 32), (None, 50.0, 400), (None, 1.0, 32), (None, 0.0, 32), (128, 1e6, 128), (128, 10.0, 80)],
)
def test_the_largest_batch(most: int | None, noise: float, largest: int) -> None:
    limits = GROWTH._replace(most=most, noise_scale=noise).limits
    assert (limits.reference, limits.largest, limits.per_gpu, limits.accumulates) == (32, largest, (1, 32), True)


@settings(max_examples=30, deadline=None)
@given(
    first=st.integers(1, 300),
    growth=st.none() | st.floats(1.0, 50.0),
    per_rank=st.integers(1, 300),
    noise=st.floats(0.0, 1e9),
    gpus=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_what_is_wished_can_be_had(first: int, growth: float | None, per_rank: int, noise: float, gpus: int) -> None:
    most = None if growth is None else int(first * growth)
    found = AtBestBatch(grown().times, Growth(first, most, per_rank, noise, first))
    batch = found.best(Shape("a", 1, gpus))
    if not batch:
        assert first < gpus, "there are more ranks than samples"
        return
    assert first <= batch <= found.growth.limits.largest


def test_a_batch_that_would_be_rounded_up_stays_below_the_most() -> None:
    found = AtBestBatch(grown().times, Growth(first=152, most=177, per_rank=4, noise_scale=973.0, now=152))
    assert 152 <= found.best(Shape("a", 1, 8)) <= 177 and found.goodput(Shape("a", 1, 8)) > 0.0


def test_more_noise_and_more_ranks_make_larger_batches() -> None:
    quiet, loud = (grown(GROWTH._replace(noise_scale=noise)) for noise in (32.0, 32_000.0))
    assert quiet.best(FOUR) < loud.best(FOUR)
    assert loud.best(ONE) == 32, "alone nothing is exchanged: a larger batch is not faster"
    assert loud.best(FOUR) % 4 == 0 and loud.best(FOUR) > 4 * 32
    assert loud.goodput(FOUR) > loud.goodput(TWO) > loud.goodput(ONE) > 0.0


# ---- work and time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "batch"), [(ONE, 32), (TWO, 128), (FOUR, 256)])
def test_what_is_left_over_the_speed_is_the_time_at_the_batch_it_has(shape: Shape, batch: int) -> None:
    found = grown(GROWTH._replace(now=batch, where=shape))
    step_s = window(shape.gpus, batch).step_s
    left = 10_000
    assert found.batch(shape) == batch
    assert found.work(left) / found.goodput(shape) == pytest.approx(left / batch * step_s, rel=0.1)
    assert 0.0 < found.doubt(shape) < 0.2
    there = Shape("a", 1, 3)
    best = found.best(there)
    seconds = found.work_on(found.work(left), there) / found.goodput(there)
    throughput = found.goodput(there) / found.efficiency(best)
    assert seconds == pytest.approx(left / throughput), "every sample is trained on, whatever it is worth there"


def test_where_it_runs_it_keeps_its_batch_until_it_moves() -> None:
    found = grown(GROWTH._replace(now=128, where=FOUR))
    moved = grown(GROWTH._replace(now=128))
    assert found.batch(FOUR) == 128 and found.best(FOUR) == moved.best(FOUR) == moved.batch(FOUR) > 128
    assert found.goodput(FOUR) < moved.goodput(FOUR) and found.goodput(TWO) == moved.goodput(TWO)


# ---- who is asked ----------------------------------------------------------------------------------------------------


def test_trainings_that_say_nothing_are_as_before() -> None:
    assert isinstance(speed("a", WINDOWS, None), AtOwnBatch)
    assert isinstance(speed("a", [], None, None, GROWTH), Linear)
    for wrong in ({"most": 16}, {"first": 0}, {"per_rank": 0}, {"now": 2**53}, {"noise_scale": math.nan}):
        growth = GROWTH._replace(**wrong)
        assert isinstance(speed("a", WINDOWS, None, None, growth), AtOwnBatch), wrong
        with pytest.raises(ValueError, match="growth is"):
            AtBestBatch(grown().times, growth)
