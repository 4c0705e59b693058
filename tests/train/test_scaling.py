"""How many samples a step takes, and by what its learning rate is multiplied."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diamond.train.errors import TrainError
from diamond.train.scaling import RULES, BatchSize, End, Growth, lr_scale, warmed, warmup_steps, wished

grown = st.floats(1e-3, 1e4)
noises = st.one_of(st.none(), st.floats(0, 1e12), st.just(math.inf))
batches = st.integers(1, 10**6)


@given(rule=st.sampled_from(RULES), by=grown, noise=noises, batch=batches)
def test_the_factor_stays_between_one_and_how_much_the_batch_grew(
    rule: str, by: float, noise: float | None, batch: int
) -> None:
    assert min(1.0, by) <= lr_scale(rule, by, noise, batch=batch) <= max(1.0, by)
    assert lr_scale(rule, 1.0, noise, batch=batch) == 1.0


@given(rule=st.sampled_from(RULES), one=grown, other=grown, noise=noises, batch=batches)
def test_larger_batches_never_get_smaller_rates(
    rule: str, one: float, other: float, noise: float | None, batch: int
) -> None:
    small, large = sorted((one, other))
    assert lr_scale(rule, small, noise, batch=batch) <= lr_scale(rule, large, noise, batch=batch) * (1 + 1e-12)


@given(by=st.floats(1, 1e4), one=st.floats(0, 1e9), other=st.floats(0, 1e9), batch=batches)
def test_more_noise_allows_more(by: float, one: float, other: float, batch: int) -> None:
    little, much = sorted((one, other))
    found = lr_scale("adascale", by, little, batch=batch)
    assert found <= lr_scale("adascale", by, much, batch=batch) * (1 + 1e-12)


@given(by=st.floats(1, 100), batch=st.integers(1, 1000))
def test_adascale_is_linear_in_noise_and_one_without_it(by: float, batch: int) -> None:
    assert lr_scale("adascale", by, 1e9 * batch, batch=batch) == pytest.approx(lr_scale("linear", by), rel=1e-6)
    assert lr_scale("adascale", by, math.inf, batch=batch) == by
    assert lr_scale("adascale", by, 0.0, batch=batch) == 1.0
    assert lr_scale("adascale", by, None, batch=batch) == lr_scale("sqrt", by)


@given(variance=st.floats(1e-6, 1e6), mean=st.floats(1e-6, 1e6), by=st.floats(1, 1e3), batch=st.integers(1, 4096))
def test_adascale_is_the_papers_formula(variance: float, mean: float, by: float, batch: int) -> None:
    """Written with the variance of the base batch's gradient, which is the noise scale's, divided by the batch."""
    paper = (variance + mean) / (variance / by + mean)
    assert lr_scale("adascale", by, batch * variance / mean, batch=batch) == pytest.approx(paper, rel=1e-9)


@pytest.mark.parametrize("given_", [("linear", 0), ("linear", math.inf), ("sqrt", -1), ("magic", 2), ("sqrt", 2, -1.0)])
def test_what_makes_no_sense_has_no_factor(given_: Any) -> None:
    with pytest.raises(ValueError, match=r"batch|rule|noise"):
        lr_scale(*given_)


@given(before=st.floats(0.1, 10), after=st.floats(0.1, 10), warmup=st.integers(0, 200))
def test_up_step_by_step_and_down_at_once(before: float, after: float, warmup: int) -> None:
    way = [warmed(before, after, done=done, warmup=warmup) for done in range(warmup + 2)]
    assert way[-1] == way[warmup] == after
    if after <= before:
        assert set(way) == {after}
    else:
        assert way == sorted(way) and (not warmup or before < way[0] < after or math.isclose(before, after))


def test_how_long_a_change_takes() -> None:
    assert [warmup_steps(steps) for steps in (0, 10, 400, 2000, 10**6)] == [1, 1, 20, 100, 100]


def test_a_batch_that_grows_and_comes_back() -> None:
    one = Growth("linear", warmup=3)
    one.begin(8)
    assert [one.scale(step) for step in range(3)] == [1.0] * 3
    one.change(32, step=3)
    assert [one.scale(step) for step in range(3, 8)] == [1.75, 2.5, 3.25, 4.0, 4.0]
    one.change(8, step=8)
    assert one.scale(8) == 1.0


def test_a_change_in_the_middle_of_another_begins_where_that_is() -> None:
    one = Growth("linear", warmup=3)
    one.begin(8)
    one.change(32, step=0)
    assert [one.scale(0), one.scale(1)] == [1.75, 2.5]
    again = Growth("linear", warmup=3)
    again.load({"global_batch": one.batch, **one.state()})
    assert again.scale(2) == 3.25, "another job goes on with it"
    again.load({"global_batch": one.batch, **one.state()})
    again.change(64, step=2)
    assert [again.scale(step) for step in range(2, 6)] == [3.875, 5.25, 6.625, 8.0]
    assert again.base == 8


def test_with_no_rule_it_is_measured_where_it_can_be() -> None:
    one = Growth(None, warmup=0)
    one.begin(10)
    one.change(40, step=0)
    assert one.scale(0) == 2.0, "the root"
    assert one.scale(1, math.nan) == one.scale(1, -3.0) == 2.0, "no number yet"
    gain = (30 + 10) / (30 / 4 + 10)
    assert one.scale(1, 30.0) == pytest.approx(gain)
    assert one.scale(2) == pytest.approx(gain), "what is known is kept"
    one.adaptive = True
    assert one.scale(3) == pytest.approx(math.sqrt(gain))
    again = Growth(None, warmup=0)
    again.adaptive = True
    again.load({"global_batch": 40, **one.state()})
    assert again.scale(3) == one.scale(3)


@given(rule=st.sampled_from((None, *RULES)), base=batches, batch=batches, noise=noises, warmup=st.integers(0, 5))
def test_a_job_that_goes_on_has_the_same_factor(
    rule: str | None, base: int, batch: int, noise: float | None, warmup: int
) -> None:
    one, other = Growth(rule, warmup=warmup), Growth(rule, warmup=warmup)
    one.begin(base)
    one.change(batch, step=5)
    for step in range(5, 8):
        one.scale(step, noise)
    other.load({"global_batch": one.batch, **one.state()})
    assert [one.scale(step, noise) for step in range(8, 15)] == [other.scale(step, noise) for step in range(8, 15)]
    if rule == "none":
        assert one.last == 1.0


def test_a_checkpoint_of_before_there_was_any_of_it() -> None:
    one = Growth(None)
    one.load({"epoch": 1, "taken": 3, "global_batch": 16})
    assert (one.base, one.batch, one.scale(100)) == (16, 16, 1.0)


@pytest.mark.parametrize(
    ("size", "kept", "wish", "samples"),
    [
        (BatchSize(), None, None, 16),
        (BatchSize(), 64, 99, 64),
        (BatchSize(accumulate=3), None, None, 48),
        (BatchSize(5), 64, 99, 5),
        (BatchSize("grow"), 64, None, 16),
        (BatchSize("grow"), 8, 40, 40),
        (BatchSize("grow", 2, 24), 8, None, 24),
        (BatchSize("grow", 1, 24), 8, 40, 24),
    ],
)
def test_how_many_samples_a_step_takes(size: BatchSize, kept: int | None, wish: int | None, samples: int) -> None:
    size.check()
    assert size.samples(8, 2, kept=kept, wish=wish) == samples


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (BatchSize(0), "batch=0.*1 or more"),
        (BatchSize(-2), "batch=-2"),
        (BatchSize(True), "batch=True"),
        (BatchSize("shrink"), "batch='shrink'.*grow"),
        (BatchSize(accumulate=0), "accumulate=0"),
        (BatchSize(8, 2), "both say.*leave accumulate out"),
        (BatchSize(None, 1, 64), 'max_batch=64.*batch="grow"'),
        (BatchSize("grow", 1, 0), "max_batch=0"),
    ],
)
def test_sizes_that_make_no_sense(size: BatchSize, words: str) -> None:
    with pytest.raises(TrainError, match=f"(?i){words}"):
        size.check()


def test_rules_that_make_no_sense() -> None:
    with pytest.raises(TrainError, match=r"lr_rule='cubic'.*linear, sqrt"):
        Growth("cubic")
    with pytest.raises(TrainError, match="lr_warmup=-1"):
        Growth(None, warmup=-1)


@pytest.mark.parametrize("text", ["many", "0", "-4", "1.5", "²", "9" * 5000])
def test_a_wish_that_is_none(text: str) -> None:
    wish, problem = wished({"DIAMOND_GLOBAL_BATCH": text})
    assert wish is None and repr(text) in problem and "ignored" in problem


def test_a_wish() -> None:
    assert wished({}) == wished({"DIAMOND_GLOBAL_BATCH": " "}) == (None, "")
    assert wished({"DIAMOND_GLOBAL_BATCH": "512"}) == (512, "")


def test_where_a_run_ends() -> None:
    steps, samples = End(10, None), End(None, 100)
    assert not steps.is_reached(9, 10**6) and steps.is_reached(10, 0)
    assert not samples.is_reached(10**6, 99) and samples.is_reached(0, 100)
    assert (steps.left(5), samples.left(95)) == (None, 5)
    assert (steps.total_steps(4), samples.total_steps(4)) == (10, 25)
    assert (steps.last_step(3, 70, 16), samples.last_step(30, 70, 16)) == (10, 32), "earlier steps were smaller"
    assert samples.last_step(30, 100, 16) == samples.last_step(30, 120, 16) == 30
    for wrong in (End(None, None), End(1, 1)):
        with pytest.raises(TrainError, match="one end"):
            wrong.check()
