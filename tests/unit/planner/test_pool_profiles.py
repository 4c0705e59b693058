"""What past tasks tell of the next: the more alike they were, the more surely."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from diamond.planner.pools.batches import Noise
from diamond.planner.pools.measurements import Measurement
from diamond.planner.pools.profiles import MOST_MEASUREMENTS, Prior, Profiles, past_of
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.steptimes import StepTimes

ONE, FOUR, EIGHT = Shape("a", 1, 1), Shape("a", 1, 4), Shape("a", 2, 8)
KEYS = ["code+model+data", "code+model", "template"]


def measured(slower: float = 1.0, shapes: Sequence[Shape] = (ONE, FOUR, EIGHT)) -> list[Measurement]:
    found = []
    for shape in shapes:
        for per_gpu in (16, 64):
            compute = slower * (0.05 + 0.003 * per_gpu)
            found.append(Measurement(shape, per_gpu, compute, compute + slower * 0.2 * (shape.nodes - 0.9)))
    return found


def known(profiles: Profiles, keys: Sequence[str]) -> Prior:
    prior = profiles.similar(keys)
    assert prior is not None
    return prior


def test_nothing_is_known_of_what_never_ran() -> None:
    profiles = Profiles()
    assert profiles.similar(KEYS) is None
    profiles.learn(KEYS, measured())
    assert profiles.similar(["another"]) is None
    assert profiles.similar([]) is None


def test_the_most_specific_key_speaks_and_the_less_specific_with_more_doubt() -> None:
    profiles = Profiles()
    profiles.learn(KEYS, measured(), total_work=1000.0)
    profiles.learn(["other data", *KEYS[1:]], measured(2.0), total_work=5000.0)
    same, model, template = (known(profiles, ["?"] * level + KEYS[level:]) for level in range(3))
    assert (same.key, model.key, template.key) == tuple(KEYS)
    assert (same.tasks, model.tasks) == (1, 2)
    assert same.times is not None and model.times is not None and template.times is not None
    doubts = [prior.doubt(EIGHT, 32) for prior in (same.times, model.times, template.times)]
    assert doubts[1] > 1.5 * doubts[0]
    assert doubts[2] > 1.1 * doubts[1]
    assert same.work_sd < model.work_sd < template.work_sd


def test_where_the_most_specific_key_says_nothing_the_next_one_does() -> None:
    """Eight tasks of this model were measured on all sizes; the only one with this data ran on four GPUs, twice as
    long as they do."""
    profiles = Profiles()
    for number in range(8):
        profiles.learn([f"data {number}", *KEYS[1:]], measured(), total_work=1000.0, restart_s=20.0)
    profiles.learn(KEYS, measured(2.0, shapes=[FOUR]))
    same, general = known(profiles, KEYS), known(profiles, ["?", *KEYS[1:]])
    alone = Profiles()
    alone.learn(KEYS, measured(2.0, shapes=[FOUR]))
    little = known(alone, KEYS)
    assert same.times is not None and general.times is not None and little.times is not None
    assert (same.key, same.tasks) == (KEYS[0], 1)
    assert same.times.step_s(FOUR, 32) == pytest.approx(2.0 * general.times.step_s(FOUR, 32), rel=0.2)
    for shape, part in ((ONE, 0.8), (EIGHT, 0.5)):
        assert same.times.doubt(shape, 32) < part * little.times.doubt(shape, 32)
        assert same.times.step_s(shape, 32) > 1.3 * general.times.step_s(shape, 32), "it is slower there as well"
    assert (same.log_work, same.restart_s) == (general.log_work, 20.0), "nothing else is known of it"
    assert known(profiles, KEYS) is same, "the same until something new is learnt"
    profiles.learn(["data 9", *KEYS[1:]], measured(), total_work=1000.0, restart_s=30.0)
    assert known(profiles, KEYS) is not same, "also by the less specific key"


def test_tasks_that_are_not_over_speak_where_none_that_is_over_does() -> None:
    profiles = Profiles()
    live = {KEYS[1]: [past_of(measured(2.0), restart_s=20.0)]}
    assert profiles.similar(KEYS) is None
    running = profiles.similar(KEYS, live)
    assert running is not None and running.times is not None and running.log_work is None
    assert (running.key, running.restart_s) == (KEYS[1], 20.0)
    assert running.times.step_s(EIGHT, 16) == pytest.approx(measured(2.0)[4].step_s, rel=0.05)
    again = profiles.similar(KEYS, {KEYS[1]: [past_of(measured(2.0), restart_s=20.0)]})
    assert again is running, "as long as they have nothing new to say"
    profiles.learn(KEYS[1:], measured(), total_work=1000.0)
    assert known(profiles, KEYS) is profiles.similar(KEYS, live), "who is over knows better"


def test_what_differs_in_a_less_specific_key_is_not_worked_out_again_and_again() -> None:
    profiles = Profiles()
    names = [["code", "command", f"name {number}"] for number in range(3)]
    for keys in names:
        profiles.learn(keys, measured())
    first = [profiles.similar(keys) for keys in names]
    assert len({id(prior) for prior in first}) == 3
    assert all(one is two for one, two in zip(first, [profiles.similar(keys) for keys in names], strict=True))


def test_a_new_task_is_known_on_many_gpus_after_one_measurement_on_one() -> None:
    profiles = Profiles()
    profiles.learn(KEYS, measured())
    prior = known(profiles, ["new data", *KEYS[1:]])
    truth = {(one.shape, one.per_gpu): one.step_s for one in measured(1.2)}
    first = measured(1.2, [ONE])[:1]
    cold, warm = StepTimes.fit(first), StepTimes.fit(first, prior=prior.times)
    errors = [abs(math.log(times.step_s(EIGHT, 64) / truth[EIGHT, 64])) for times in (cold, warm)]
    assert errors[1] < 0.1 < errors[0]
    assert warm.doubt(EIGHT, 64) < 0.6 * cold.doubt(EIGHT, 64)


def test_work_of_several_tasks_is_a_range_and_of_one_a_wide_one() -> None:
    once, often = Profiles(), Profiles()
    once.learn(KEYS, [], total_work=1000.0)
    for total in (900.0, 1000.0, 1100.0, 950.0, 1050.0):
        often.learn(KEYS, [], total_work=total)
    wide, narrow = known(once, KEYS).work, known(often, KEYS).work
    assert wide is not None and narrow is not None
    assert wide.expected == pytest.approx(narrow.expected) == pytest.approx(1000.0)
    assert wide.low < narrow.low < 900.0 < 1100.0 < narrow.high < wide.high
    assert wide.high / wide.low > 2.0


def test_what_is_left_shrinks_with_what_is_done_but_never_to_nothing() -> None:
    profiles = Profiles()
    profiles.learn(KEYS, [], total_work=1000.0)
    prior = known(profiles, KEYS)
    found = [prior.left(done) for done in (0.0, 300.0, 600.0, 900.0, 3000.0, 1e9)]
    left = [work.expected for work in found if work is not None]
    assert left[:4] == sorted(left[:4], reverse=True)
    assert left[1] == pytest.approx(700.0, rel=0.05)
    assert left[4] > 100.0, "longer than all others: it may take long"
    for work in found:
        assert work is not None
        assert 0.0 <= work.low <= work.expected <= work.high < math.inf
    assert prior.left(math.nan) == prior.work


def test_noise_is_known_by_progress_and_filled_in_between() -> None:
    profiles = Profiles()
    profiles.learn(KEYS, [], [(0.05, Noise(2.0, 20.0)), (0.95, Noise(1.0, 1000.0)), (0.5, Noise(0.0, 1.0))])
    profiles.learn(KEYS, [], [(0.05, Noise(1.0, 10.0)), (0.95, Noise(0.1, 100.0)), (math.nan, Noise(1.0, 1.0))])
    prior = known(profiles, KEYS)
    ratios = [noise.variance / noise.square for share in (0.0, 0.3, 0.6, 1.0) if (noise := prior.noise(share))]
    assert ratios == pytest.approx([10.0, 46.416, 215.44, 1000.0], rel=0.01)


def test_what_nobody_measured_is_none() -> None:
    profiles = Profiles()
    profiles.learn(KEYS, [], [(0.5, Noise(math.nan, 1.0))], total_work=math.nan, restart_s=-1.0)
    prior = known(profiles, KEYS)
    assert (prior.times, prior.noise(0.5), prior.work, prior.restart_s) == (None, None, None, None)


def test_a_restart_costs_what_it_mostly_cost() -> None:
    profiles = Profiles()
    for seconds in (20.0, 25.0, 900.0, math.nan):
        profiles.learn(KEYS, [], restart_s=seconds)
    assert known(profiles, KEYS).restart_s == 25.0


def test_memory_is_bounded() -> None:
    profiles = Profiles(tasks=3, keys=2)
    for number in range(10):
        profiles.learn(["always", f"task {number}"], measured(), total_work=float(number + 1))
    assert profiles.similar(["task 8"]) is None
    assert known(profiles, ["task 9"]).tasks == 1
    last = known(profiles, ["always"])
    assert last.tasks == 3
    assert last.work is not None and last.work.expected == pytest.approx(9.0)
    profiles.learn(["many"], [Measurement(ONE, samples, 1.0, 1.0) for samples in range(1, 500)] * 2)
    (past,) = json.loads(profiles.to_json())["past"]["many"]
    assert len(past[0]) == MOST_MEASUREMENTS


def test_what_is_learned_later_counts_at_once() -> None:
    profiles = Profiles()
    profiles.learn(KEYS, [], total_work=100.0)
    assert known(profiles, KEYS).tasks == 1
    profiles.learn(KEYS, measured())
    assert known(profiles, KEYS).tasks == 2
    assert known(profiles, KEYS).times is not None


def test_profiles_survive_as_text() -> None:
    profiles = Profiles(tasks=5)
    profiles.learn(KEYS, [*measured(), Measurement(FOUR, 8, math.nan, 0.4)], [(0.2, Noise(1.0, 9.0))], 500.0, 12.0)
    text = profiles.to_json()
    again = Profiles.from_json(text)
    assert again.to_json() == text
    before, after = known(profiles, KEYS), known(again, KEYS)
    assert before.times is not None and after.times is not None
    assert after.times.step_s(EIGHT, 32) == before.times.step_s(EIGHT, 32)
    assert (after.work, after.noises, after.restart_s) == (before.work, before.noises, before.restart_s)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tasks": 1, "keys": 1, "past": {"a": [1]}}', '{"tasks": "x"}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^text is no Profiles"):
        Profiles.from_json(text)


def test_arguments_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match=r"^tasks "):
        Profiles(tasks=0)
    with pytest.raises(ValueError, match=r"^keys "):
        Profiles(keys=0)
    with pytest.raises(TypeError, match=r"^keys "):
        Profiles().learn("template", [])


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1.0, 0.0, 1e9, 1e300, 1e-300])
def test_absurd_tasks_leave_numbers_that_can_be_computed_with(absurd: float) -> None:
    profiles = Profiles()
    for work in (absurd, 1e-17, 1e17):  # so far apart that their spread suggests anything
        profiles.learn(KEYS, measured(), [(absurd, Noise(absurd, absurd))], total_work=work, restart_s=absurd)
    prior = known(Profiles.from_json(profiles.to_json()), KEYS)
    for done in (absurd, 0.0, 1e20):
        left = prior.left(done)
        assert left is not None
        assert 0.0 <= left.low <= left.high < math.inf
        assert 0.0 < left.expected <= left.high
