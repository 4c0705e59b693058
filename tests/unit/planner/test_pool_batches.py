"""The best batch for given GPUs, against trying them all; and speeds as policies ask for them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.planner.pools.batches import Batch, Limits, Noise, best_batch, best_batches, learning_rate_scale
from diamond.planner.pools.measurements import Measurement
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.speeds import Estimated, Fixed, Linear
from diamond.planner.pools.steptimes import StepTimes

ONE, FOUR, EIGHT = Shape("a", 1, 1), Shape("a", 1, 4), Shape("a", 2, 8)


def model(constant_s: float = 0.05, sample_s: float = 0.002, sync_s: float = 0.1) -> StepTimes:
    def measured(shape: Shape, per_gpu: int) -> Measurement:
        compute = constant_s + sample_s * per_gpu
        return Measurement(shape, per_gpu, compute, compute + (sync_s * shape.nodes if shape.gpus > 1 else 0.0))

    return StepTimes.fit([measured(shape, per_gpu) for shape in (ONE, FOUR, EIGHT) for per_gpu in (8, 32, 128)])


MODEL = model()


def goodput(noise: Noise, limits: Limits, shape: Shape, batch: Batch) -> float:
    """From what is public of the model, one batch at a time."""
    compute = MODEL.compute_s(shape.gpu_type, batch.per_gpu)
    step = batch.accumulation * compute + MODEL.step_s(shape, batch.per_gpu)
    total = batch.total(shape.gpus)
    return total / step * noise.efficiency(total, limits.reference)


def tried(noise: Noise, limits: Limits, shape: Shape) -> float:
    """The best of all batches there are."""
    found = [0.0]
    for per_gpu in range(limits.per_gpu[0], limits.per_gpu[1] + 1):
        for accumulation in range(limits.largest // (per_gpu * shape.gpus) if limits.accumulates else 1):
            total = Batch(per_gpu, accumulation).total(shape.gpus)
            blind = limits.accumulates and shape.gpus == 1 and accumulation == 0 and total > limits.reference
            if limits.reference <= total <= limits.largest and not blind:
                found.append(goodput(noise, limits, shape, Batch(per_gpu, accumulation)))
    return max(found)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    reference=st.integers(1, 100),
    times=st.floats(1.0, 20.0),
    fewest=st.integers(1, 16),
    most=st.integers(16, 64),
    accumulates=st.booleans(),
    ratio=st.floats(0.01, 1000.0),
    gpus=st.integers(1, 12),
)
def test_the_best_batch_is_about_the_best_of_all(
    reference: int, times: float, fewest: int, most: int, accumulates: bool, ratio: float, gpus: int
) -> None:
    limits = Limits(reference, int(reference * times), (fewest, most), accumulates)
    shape, noise = Shape("a", 1 if gpus <= 4 else 3, gpus), Noise(1.0, ratio)
    best = tried(noise, limits, shape)
    value, batch = best_batch(MODEL, noise, limits, shape)
    assert value >= 0.97 * best
    if value > 0.0:
        assert value == pytest.approx(goodput(noise, limits, shape, batch))
        assert fewest <= batch.per_gpu <= most
        assert batch.accumulation == 0 or accumulates
        assert limits.reference <= batch.total(gpus)
        rounded_up = (batch.per_gpu - 1) * (batch.accumulation + 1) * gpus < reference
        assert batch.total(gpus) <= limits.largest or rounded_up


def test_more_noise_makes_larger_batches_worth_it() -> None:
    limits = Limits(32, 4096, (8, 256))
    found = [best_batch(MODEL, Noise(1.0, ratio), limits, EIGHT) for ratio in (0.1, 10.0, 1000.0)]
    totals = [batch.total(8) for _, batch in found]
    assert totals == sorted(totals)
    assert totals[0] < 0.2 * totals[2]
    assert found[0][0] < found[1][0] < found[2][0]


def test_one_gpu_takes_two_passes_above_the_reference_batch() -> None:
    noise = Noise(1.0, 1e6)
    assert best_batch(MODEL, noise, Limits(32, 512, (8, 512)), ONE)[1] == Batch(256, 1)
    assert best_batch(MODEL, noise, Limits(32, 32, (8, 512)), ONE)[1] == Batch(32, 0)
    assert best_batch(MODEL, noise, Limits(32, 512, (8, 512), accumulates=False), ONE)[1] == Batch(512, 0)


def test_a_batch_that_no_number_of_samples_gives_is_rounded_up() -> None:
    value, batch = best_batch(MODEL, Noise(1.0, 1.0), Limits(128, 128, (8, 256)), Shape("a", 1, 3))
    assert batch == Batch(43, 0)
    assert value > 0.0


@pytest.mark.parametrize(
    ("limits", "shape"),
    [
        (Limits(32, 64, (16, 64)), EIGHT),
        (Limits(512, 1024, (16, 64), accumulates=False), FOUR),
        (Limits(32, 64, (1, 64)), Shape("a", 3, 2)),
        (Limits(32, 64, (1, 64)), Shape("a", 0, 0)),
    ],
    ids=["too many GPUs", "too large for them", "more nodes than GPUs", "nothing"],
)
def test_where_a_task_cannot_run_goodput_is_zero(limits: Limits, shape: Shape) -> None:
    assert best_batch(MODEL, Noise(1.0, 1.0), limits, shape) == (0.0, Batch(0, 0))


def test_many_shapes_at_once_are_the_same_as_one_by_one() -> None:
    limits, noise = Limits(64, 2048, (8, 128)), Noise(1.0, 20.0)
    shapes = [Shape("a", -(-gpus // 4), gpus) for gpus in range(1, 33)] + [Shape("b", 1, 2)]
    assert best_batches(MODEL, noise, limits, shapes) == [best_batch(MODEL, noise, limits, one) for one in shapes]
    assert best_batches(MODEL, noise, limits, []) == []


def test_efficiency_and_learning_rate_follow_the_noise() -> None:
    noise = Noise(square=2.0, variance=6.0)
    assert noise.efficiency(100, 100) == 1.0
    assert noise.efficiency(400, 100) == pytest.approx((6 + 2) / (6 / 4 + 2) / 4)
    assert learning_rate_scale(noise, 100, 400) == pytest.approx((6 + 2) / (6 / 4 + 2))
    assert Noise(1.0, 0.0).efficiency(400, 100) == pytest.approx(0.25)
    assert Noise(0.0, 1.0).efficiency(400, 100) == pytest.approx(1.0)
    assert Noise(0.0, 0.0).efficiency(400, 100) == pytest.approx(0.25)
    assert noise.efficiency(50, 100) == 1.0, "never more than a sample of the reference batch"


wild = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-308, 1.0, 1e308])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(wild, wild, st.integers(1, 10**9), st.integers(1, 10**9))
def test_absurd_noise_gives_an_efficiency_all_the_same(square: float, variance: float, one: int, other: int) -> None:
    noise, reference, total = Noise(square, variance), min(one, other), max(one, other)
    assert 0.0 < noise.efficiency(total, reference) <= 1.0
    assert 1.0 - 1e-9 <= learning_rate_scale(noise, reference, total) <= total / reference * (1.0 + 1e-9)
    assert 0.0 < best_batch(MODEL, noise, Limits(32, 512, (8, 64)), FOUR)[0] < math.inf


@pytest.mark.parametrize(
    ("reference", "largest", "per_gpu", "named"),
    [(0, 10, (1, 2), "reference"), (10, 5, (1, 2), "largest"), (1, 1, (0, 2), "per_gpu"), (1, 1, (3, 2), "per_gpu")],
)
def test_limits_that_cannot_be_are_named(reference: int, largest: int, per_gpu: tuple[int, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} "):
        Limits(reference, largest, per_gpu)


def test_an_estimated_speed_is_that_of_the_best_batch() -> None:
    noise, limits = Noise(1.0, 20.0), Limits(64, 2048, (8, 128))
    speed = Estimated(MODEL, noise, limits)
    speed.prepare([ONE, FOUR])
    for shape in (ONE, FOUR, EIGHT):
        value, batch = best_batch(MODEL, noise, limits, shape)
        assert (speed.goodput(shape), speed.batch(shape)) == (value, batch)
        assert speed.doubt(shape) == pytest.approx(MODEL.doubt(shape, batch.per_gpu))
    unsure = Estimated(MODEL, noise, limits, noise_doubt=0.4)
    assert unsure.doubt(FOUR) == pytest.approx(math.hypot(0.4, speed.doubt(FOUR)))
    nowhere = Shape("a", 16, 999)
    assert (speed.goodput(nowhere), speed.doubt(nowhere)) == (0.0, 0.0)


def test_speeds_without_a_model() -> None:
    linear = Linear(rate=3.0)
    assert (linear.goodput(ONE), linear.goodput(EIGHT), linear.goodput(Shape("a", 0, 0))) == (3.0, 24.0, 0.0)
    assert linear.doubt(EIGHT) >= 1.0
    fixed = Fixed({FOUR: 7.0})
    assert (fixed.goodput(FOUR), fixed.goodput(ONE), fixed.doubt(FOUR)) == (7.0, 0.0, 0.0)


def test_speeds_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match=r"^rate "):
        Linear(rate=0.0)
    with pytest.raises(ValueError, match=r"^doubt "):
        Linear(doubt=math.nan)
    with pytest.raises(ValueError, match=r"^table "):
        Fixed({ONE: math.nan})
    with pytest.raises(ValueError, match=r"^noise_doubt "):
        Estimated(MODEL, Noise(1.0, 1.0), Limits(1, 2, (1, 2)), noise_doubt=-1.0)
