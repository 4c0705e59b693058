"""A task as its pool comes to know it: from nothing, from its own steps, from those before it."""

from __future__ import annotations

import pytest

from diamond.planner.pools import observed
from diamond.planner.pools.batches import Limits, Noise
from diamond.planner.pools.measurements import Measurement
from diamond.planner.pools.observed import Observed
from diamond.planner.pools.profiles import Profiles
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.steptimes import StepTimes

ONE, FOUR, EIGHT = Shape("a", 1, 1), Shape("a", 1, 4), Shape("a", 2, 8)
LIMITS = Limits(reference=64, largest=4096, per_gpu=(8, 256))
NOISE = Noise(square=1.0, variance=9.0)


def step(shape: Shape, per_gpu: int) -> Measurement:
    compute = 0.05 + 0.003 * per_gpu
    return Measurement(shape, per_gpu, compute, compute + (0.02 * (shape.nodes + 1) if shape.gpus > 1 else 0.0))


def task(profiles: Profiles | None = None) -> Observed:
    return Observed({"a": LIMITS}, profiles.similar(["app"]) if profiles else None)


def test_of_a_new_task_nothing_is_known_and_it_begins_small() -> None:
    new = task()
    assert new.speed().goodput(FOUR) == 4 * new.speed().goodput(ONE)
    assert new.speed().doubt(ONE) >= 0.5
    assert (new.batch(ONE), new.left(0.0), new.most_gpus(64)) == (None, None, 1)


def test_a_task_has_one_gpu_until_it_was_measured() -> None:
    seen = task()
    assert seen.most_gpus(64) == 1
    seen.saw(step(FOUR, 64), NOISE)
    assert seen.most_gpus(64) == 64
    assert seen.most_gpus(6) == 6
    assert 0.0 < seen.speed().goodput(ONE) < seen.speed().goodput(FOUR)
    assert seen.speed().goodput(Shape("another kind", 1, 1)) == 0.0
    assert seen.batch(Shape("another kind", 1, 1)) is None


def test_without_a_gradient_a_larger_batch_brings_nothing() -> None:
    probed = task()
    probed.saw(step(ONE, 64))
    batch = probed.batch(FOUR)
    assert batch is not None and batch.total(4) == LIMITS.reference
    probed.saw(step(ONE, 64), NOISE)
    larger = probed.batch(FOUR)
    assert larger is not None and larger.total(4) > LIMITS.reference


def test_narrower_limits_hold_for_a_batch() -> None:
    seen = task()
    seen.saw(step(ONE, 64), NOISE)
    free, narrow = seen.batch(FOUR), seen.batch(FOUR, Limits(64, 4096, (8, 24)))
    assert free is not None and free.per_gpu > 24
    assert narrow is not None and 8 <= narrow.per_gpu <= 24


def test_what_is_not_new_is_not_fitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    real = StepTimes.fit

    def counted(*given: object) -> StepTimes:
        fits.append(given)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(observed.StepTimes, "fit", counted)
    seen = task()
    for per_gpu in (64, 64, 66, 128):
        seen.saw(step(ONE, per_gpu), NOISE)
    assert len(fits) == 2
    before = seen.speed()
    seen.saw(step(ONE, 64), Noise(1.0, 9.1))
    assert seen.speed() is before
    seen.saw(step(ONE, 64), Noise(1.0, 30.0))
    assert seen.speed() is not before


def test_the_next_task_begins_with_what_this_one_measured() -> None:
    profiles, first = Profiles(), task()
    for shape in (ONE, FOUR, EIGHT):
        for per_gpu in (16, 64):
            first.saw(step(shape, per_gpu), NOISE, done=500.0)
    first.remember(profiles, ["app"], 1000.0, 20.0)
    second = task(profiles)
    assert second.most_gpus(64) == 64
    assert second.speed().goodput(EIGHT) == pytest.approx(first.speed().goodput(EIGHT), rel=0.15)
    left = second.left(0.0)
    assert left is not None and left.expected == pytest.approx(1000.0)
    assert second.prior is not None and second.prior.restart_s == 20.0


def test_what_is_left_follows_the_plan_until_others_tell() -> None:
    profiles, first = Profiles(), task()
    first.saw(step(ONE, 64), NOISE)
    assert first.left(0.0, 0.0) is None
    assert first.left(100.0, None) is None
    planned = first.left(100.0, 0.25)
    assert planned is not None and planned.expected == pytest.approx(300.0)
    assert planned.low < 300.0 < planned.high
    done = first.left(400.0, 1.0)
    assert done is not None and done.expected == 0.0
    first.remember(profiles, ["app"], 1000.0)
    told = task(profiles).left(100.0, 0.25)
    assert told is not None and told.expected == pytest.approx(900.0, rel=0.1)


def test_a_task_that_runs_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="limits is empty"):
        Observed({})


def test_what_it_measured_so_far_serves_those_like_it() -> None:
    running = task()
    running.saw(step(FOUR, 64), NOISE, done=10.0)
    prior = Profiles().similar(["app"], {"app": [running.so_far()]})
    new = Observed({"a": LIMITS}, prior)
    assert new.most_gpus(64) == 64 and new.left(0.0) is None
    assert new.speed().goodput(FOUR) == pytest.approx(running.speed().goodput(FOUR), rel=0.05)
    assert new.batch(FOUR) == running.batch(FOUR)
