"""Tasks that are not over and speak for those like them: what they tell, and what they do not."""

from __future__ import annotations

import math

import pytest

from diamond.planner.pools.profiles import Profiles
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.trained import AtOwnBatch, Live, Window, is_known, speed

KEYS = ["code", "command", "name"]
WINDOW = Window(1, 2, 64, 0.5)


def live(*windows: Window, keys: list[str] = KEYS, restart_s: float | None = 20.0) -> Live:
    found = Live("a")
    found.add(keys, windows, restart_s)
    return found


def test_times_are_rounded_so_that_little_changes_change_nothing() -> None:
    profiles = Profiles()
    first = profiles.similar(KEYS, live(WINDOW).pasts)
    again = profiles.similar(KEYS, live(WINDOW._replace(step_s=0.505)).pasts)
    other = profiles.similar(KEYS, live(WINDOW._replace(step_s=0.7)).pasts)
    assert first is again is not other
    assert first is not None and first.times is not None and other is not None and other.times is not None
    assert first.times.step_s(Shape("a", 1, 2), 32) == pytest.approx(0.5, rel=0.05)
    assert other.times.step_s(Shape("a", 1, 2), 32) == pytest.approx(0.7, rel=0.05)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf, 1.79e308, 5e-324])
def test_nonsense_is_passed_over(step_s: float) -> None:
    found = Profiles().similar(KEYS, live(WINDOW._replace(step_s=step_s)).pasts)
    assert found is None or found.times is None or math.isfinite(found.times.step_s(Shape("a", 1, 2), 32))


def test_the_batch_is_that_of_the_most_alike_whether_it_is_over_or_not() -> None:
    running = live(WINDOW)
    assert running.batch(KEYS, {}) == 64
    assert running.batch(KEYS, {"name": 2}) == 64, "the same code knows better than the same name"
    assert running.batch(KEYS, {"code": 2}) == 2
    assert running.batch(["other", "other", "name"], {"name": 2}) == 2
    assert running.batch(["other"], {}) is None


def test_the_batch_of_another_does_not_say_on_how_many_slots_one_can_run() -> None:
    prior = Profiles().similar(KEYS, live(Window(1, 1, 1, 0.5)).pasts)
    four = Shape("a", 1, 4)
    guessed = speed("a", (), prior, default_batch=1)
    assert isinstance(guessed, AtOwnBatch) and guessed.goodput(four) > 0.0
    assert speed("a", (Window(1, 1, 1, 0.5),), prior).goodput(four) == 0.0, "its own does"


def test_a_name_is_not_enough_to_be_known() -> None:
    by_name = Profiles().similar(["?", "?", "name"], live(WINDOW).pasts)
    by_command = Profiles().similar(["?", "command", "?"], live(WINDOW).pasts)
    assert by_name is not None and by_name.times is not None
    assert not is_known(by_name) and is_known(by_command) and not is_known(None)
