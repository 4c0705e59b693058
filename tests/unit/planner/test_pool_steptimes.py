"""Step times from few, noisy and absurd measurements: close where measured, honest in their doubt elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.planner.pools.measurements import Measurement
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.steptimes import StepTimes

ONE, TWO, FOUR = Shape("a", 1, 1), Shape("a", 1, 2), Shape("a", 1, 4)
PAIR, EIGHT, SIXTEEN = Shape("a", 2, 2), Shape("a", 2, 8), Shape("a", 4, 16)


@dataclass(frozen=True)
class Truth:
    """A task as it is: written apart from the model, and linear in GPUs where the model thinks of doublings."""

    constant_s: float = 0.05
    sample_s: float = 0.004
    within_s: float = 0.02
    between_s: float = 0.12
    growth: float = 0.03
    p: float = 1.8
    slower: float = 1.0

    def compute_s(self, per_gpu: int) -> float:
        return self.slower * (self.constant_s + self.sample_s * per_gpu)

    def step_s(self, shape: Shape, per_gpu: int) -> float:
        sync = self.between_s if shape.nodes > 1 else self.within_s
        sync *= (1.0 + self.growth * (shape.gpus - 2)) if shape.gpus > 1 else 0.0
        return float((self.compute_s(per_gpu) ** self.p + sync**self.p) ** (1.0 / self.p))

    def measured(self, shape: Shape, per_gpu: int, chance: Random | None = None, noise: float = 0.0) -> Measurement:
        def jitter() -> float:
            return math.exp(chance.gauss(0.0, noise)) if chance else 1.0

        return Measurement(shape, per_gpu, self.compute_s(per_gpu) * jitter(), self.step_s(shape, per_gpu) * jitter())


def drawn(chance: Random) -> Truth:
    def around(middle: float, spread: float) -> float:
        return math.exp(chance.gauss(math.log(middle), spread))

    level = around(0.1, 1.5)
    within = level * around(0.2, 1.0)
    return Truth(
        constant_s=level * chance.uniform(0.1, 0.9),
        sample_s=level * chance.uniform(0.1, 0.9) / 32,
        within_s=within,
        between_s=within * chance.uniform(1.0, 5.0),
        growth=around(0.03, 0.7),
        p=chance.uniform(1.0, 4.0),
    )


def error(times: StepTimes, truth: Truth, shape: Shape, per_gpu: int) -> float:
    return abs(math.log(times.step_s(shape, per_gpu) / truth.step_s(shape, per_gpu)))


def test_one_measurement_is_met_and_makes_a_model() -> None:
    times = StepTimes.fit([Measurement(ONE, 32, 0.2, 0.21)])
    assert times.step_s(ONE, 32) == pytest.approx(0.205, rel=0.05)
    assert times.compute_s("a", 32) == pytest.approx(0.205, rel=0.05)
    assert times.compute_s("a", 64) == pytest.approx(0.3, rel=0.1), "half constant, half growing"
    assert times.doubt(ONE, 32) < 0.1 < times.doubt(ONE, 1024) < times.doubt(EIGHT, 32)


def test_held_out_times_are_within_what_is_doubted() -> None:
    chance = Random(7)
    held_out = [ONE, Shape("a", 1, 3), Shape("a", 2, 4), SIXTEEN]
    batches = [64, 16, 32, 64]
    inside: dict[str, list[bool]] = {"one GPU": [], "one node": [], "two nodes": []}
    errors: list[float] = []
    doubted: list[float] = []
    for _ in range(200):
        truth = drawn(chance)
        known = [truth.measured(ONE, per_gpu, chance, 0.05) for per_gpu in (16, 32)]
        for name, more in (("one GPU", []), ("one node", [TWO, FOUR]), ("two nodes", [PAIR, EIGHT])):
            known += [truth.measured(shape, 32, chance, 0.05) for shape in more]
            times = StepTimes.fit(known)
            offs = [error(times, truth, *one) for one in zip(held_out, batches, strict=True)]
            doubts = times.doubts(held_out, batches).tolist()
            inside[name] += [off < 2.0 * doubt for off, doubt in zip(offs, doubts, strict=True)]
        errors += offs
        doubted += doubts
    for name, found in inside.items():
        assert sum(found) / len(found) >= 0.9, name
    assert median(errors) < 0.1
    assert median(doubted) < 0.15, "doubt is not all there is"


def test_measuring_a_shape_again_and_again_removes_the_doubt() -> None:
    truth, chance = Truth(p=3.0), Random(3)
    doubts = []
    for number in (1, 8):
        known = [truth.measured(EIGHT, 8 + per_gpu, chance, 0.05) for per_gpu in range(4 * number)]
        doubts.append(StepTimes.fit(known).doubt(EIGHT, 16))
    assert doubts[1] < 0.5 * doubts[0] < 0.05


def test_from_one_gpu_more_are_hoped_for_but_not_believed() -> None:
    truth = Truth()
    times = StepTimes.fit([truth.measured(ONE, per_gpu) for per_gpu in (8, 16, 64)])
    assert times.step_s(ONE, 32) == pytest.approx(truth.step_s(ONE, 32), rel=0.03)
    assert times.step_s(ONE, 32) < times.step_s(FOUR, 32) < 1.5 * times.step_s(ONE, 32), "worth a try"
    assert times.doubt(FOUR, 32) > 0.3
    assert times.doubt(EIGHT, 32) > times.doubt(FOUR, 32)


def test_between_nodes_is_never_expected_to_be_faster_than_within() -> None:
    for growth in (0.0, 0.5, 2.0):
        truth = Truth(within_s=0.3, growth=growth)
        times = StepTimes.fit([truth.measured(shape, 32) for shape in (ONE, TWO, FOUR)])
        for gpus in (2, 4, 8):
            assert times.step_s(Shape("a", 2, gpus), 32) >= times.step_s(Shape("a", 1, gpus), 32)


def test_absurd_measurements_do_not_change_what_sound_ones_say() -> None:
    truth, chance = Truth(), Random(1)
    sound = [truth.measured(shape, 32, chance, 0.03) for shape in (ONE, TWO, FOUR, PAIR, EIGHT) for _ in range(2)]
    sound += [truth.measured(shape, 64, chance, 0.03) for shape in (ONE, FOUR, EIGHT)]
    absurd = [
        Measurement(TWO, 32, math.nan, math.inf),
        Measurement(FOUR, 32, 0.0, -1.0),
        Measurement(EIGHT, 32, 1e9, 1e9),
        Measurement(ONE, 0, 0.1, 0.1),
        Measurement(Shape("a", 5, 2), 32, 0.1, 0.1),
        Measurement(Shape("a", 0, 0), 32, 0.1, 0.1),
        Measurement(FOUR, 128, 0.5, 0.01),
        Measurement(FOUR, 48, 900.0, 1000.0),
        Measurement(EIGHT, 48, 1e-5, 1e-5),
    ]
    times = StepTimes.fit(sound + absurd)
    for shape in (ONE, FOUR, EIGHT):
        for per_gpu in (32, 48, 64):
            assert error(times, truth, shape, per_gpu) < 0.12


wild = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e-6, 0.1, 1.0, 1e6, 1e9, 1e300])
shapes = st.builds(Shape, st.sampled_from(["a", "b", ""]), st.integers(-1, 64), st.integers(-1, 512))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.builds(Measurement, shapes, st.integers(-1, 10**12), wild, wild), max_size=8))
def test_whatever_is_measured_there_is_a_model(measurements: list[Measurement]) -> None:
    times = StepTimes.fit(measurements)
    again = StepTimes.fit(measurements[::-1], prior=times)
    for model in (times, again):
        for shape in (ONE, FOUR, SIXTEEN, Shape("b", 2, 8)):
            assert 0.0 < model.step_s(shape, 32) < math.inf
            assert 0.0 < model.doubt(shape, 32) < math.inf
        assert 1.0 <= model.overlap <= 10.0


def test_the_order_of_measurements_changes_nothing() -> None:
    truth, chance = Truth(), Random(5)
    known = [truth.measured(shape, 32, chance, 0.1) for shape in (ONE, FOUR, EIGHT, ONE, FOUR)]
    assert StepTimes.fit(known).step_s(SIXTEEN, 16) == StepTimes.fit(known[::-1]).step_s(SIXTEEN, 16)


def test_a_prior_makes_up_for_what_was_not_measured() -> None:
    truth = Truth(within_s=0.1, between_s=0.5)
    past = StepTimes.fit([truth.measured(shape, batch) for shape in (ONE, FOUR, PAIR, EIGHT) for batch in (16, 64)])
    slower = replace(truth, constant_s=0.06, sample_s=0.0048)
    known = [slower.measured(ONE, 32)]
    alone, helped = StepTimes.fit(known), StepTimes.fit(known, prior=past.widened(0.1))
    assert error(alone, slower, EIGHT, 32) > 0.5
    assert error(helped, slower, EIGHT, 32) < 0.1
    assert error(helped, slower, ONE, 64) < 0.05
    assert helped.doubt(EIGHT, 32) < 0.3 * alone.doubt(EIGHT, 32)
    assert StepTimes.fit([], prior=past).step_s(EIGHT, 32) == past.step_s(EIGHT, 32)


def test_measurements_prevail_over_a_wrong_prior() -> None:
    wrong = StepTimes.fit([Truth().measured(shape, batch) for shape in (ONE, FOUR, EIGHT) for batch in (16, 64)])
    truth, chance = Truth(constant_s=0.2, sample_s=0.01, between_s=0.9), Random(2)
    known = [truth.measured(shape, batch, chance, 0.03) for shape in (ONE, FOUR, EIGHT) for batch in (16, 32, 64)]
    times = StepTimes.fit(known, prior=wrong.widened(0.2))
    for shape in (ONE, FOUR, EIGHT):
        assert error(times, truth, shape, 48) < 0.1


def test_another_kind_of_gpu_is_known_by_one_gpu_of_it() -> None:
    truth = Truth()
    slow = replace(truth, slower=3.0)
    known = [truth.measured(shape, batch) for shape in (ONE, FOUR, PAIR, EIGHT) for batch in (16, 64)]
    other, many = Shape("b", 1, 1), Shape("b", 2, 8)
    unknown = StepTimes.fit(known)
    assert unknown.step_s(many, 32) == pytest.approx(unknown.step_s(Shape("c", 2, 8), 32))
    assert unknown.step_s(many, 32) == pytest.approx(unknown.step_s(EIGHT, 32), rel=0.15)
    assert unknown.doubt(many, 32) > 0.5 > 5.0 * unknown.doubt(EIGHT, 32)
    times = StepTimes.fit([*known, slow.measured(other, 32)])
    as_far = replace(slow, between_s=3.0 * truth.between_s)
    assert 0.95 * slow.step_s(many, 32) < times.step_s(many, 32) < 1.05 * as_far.step_s(many, 32)
    assert error(times, slow, other, 64) < 0.1
    assert error(times, truth, EIGHT, 32) < 0.05, "what one kind shows changes nothing of the other"
    assert times.doubt(many, 32) < 0.7 * unknown.doubt(many, 32)


def test_what_was_measured_on_a_shape_is_believed_over_the_model() -> None:
    truth = Truth()
    known = [truth.measured(shape, batch) for shape in (ONE, TWO, PAIR, EIGHT) for batch in (16, 32, 64)]
    odd = [Measurement(FOUR, batch, truth.compute_s(batch), 1.3 * truth.step_s(FOUR, batch)) for batch in (16, 32, 64)]
    times = StepTimes.fit(known + odd)
    assert times.step_s(FOUR, 48) == pytest.approx(1.3 * truth.step_s(FOUR, 48), rel=0.1)
    assert error(times, truth, TWO, 48) < 0.1


@pytest.mark.parametrize("times", [15.0, 1.0 / 15.0])
def test_what_a_task_measures_of_itself_outweighs_those_like_it(times: float) -> None:
    """The same command with a much larger model: its own step is believed, and how it scales is taken over."""
    one, two, four = Shape("a", 1, 1), Shape("a", 1, 2), Shape("a", 1, 4)
    usual = [
        Measurement(shape, 64 // shape.gpus, math.nan, 0.5 / shape.gpus + 0.02 * (shape.gpus > 1))
        for shape in (one, two, four)
    ]
    prior = StepTimes.fit([each for _ in range(8) for each in usual]).widened(0.05, 0.025)
    own = usual[1]._replace(step_s=times * usual[1].step_s)
    found = StepTimes.fit([own], prior)
    assert found.step_s(two, 32) == pytest.approx(own.step_s, rel=0.1)
    for shape, like in ((one, usual[0]), (four, usual[2])):
        assert found.step_s(shape, 64 // shape.gpus) == pytest.approx(times * like.step_s, rel=0.35)
    near = StepTimes.fit([own._replace(step_s=1.1 * usual[1].step_s)], prior)
    assert near.doubt(four, 16) < 1.5 * prior.doubt(four, 16), "what is not far off changes little"
