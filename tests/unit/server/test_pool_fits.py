"""Models of tasks' speeds: fitted anew where something new is known, and only there."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diamond.planner.pools import trained
from diamond.planner.pools.profiles import Prior, Profiles
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.trained import Growth, Window, measurements
from diamond.server.services import pool_fits
from diamond.server.store.pool_models import PoolRow

WINDOWS = (Window(1, 1, 64, 1.0), Window(1, 4, 64, 0.4))
SHAPES = [Shape("A100", 1, 1), Shape("A100", 1, 4), Shape("A100", 2, 8)]


def pool(*, until: float = 1.0, step_s: float = 1.0, **more: Any) -> PoolRow:
    past = Profiles()
    past.learn(["k"], measurements("A100", [Window(1, 2, 64, step_s)]), total_work=1000.0)
    return PoolRow(id="pol_1", profiles={"past": json.loads(past.to_json()), "until": until, "since": "tsk_1"} | more)


def prior_of(row: PoolRow) -> Prior:
    found = pool_fits.profiles_of(row).similar(["k"])
    assert found is not None
    return found


def test_a_model_is_kept_while_nothing_new_is_known() -> None:
    prior = prior_of(pool())
    assert prior_of(pool()) is prior, "read from the same row again"
    kept = pool_fits.speed("A100", WINDOWS, prior, None, None)
    assert pool_fits.speed("A100", (*WINDOWS,), prior_of(pool()), None, None) is kept
    anew = trained.speed("A100", WINDOWS, prior)
    assert [kept.goodput(shape) for shape in SHAPES] == pytest.approx([anew.goodput(shape) for shape in SHAPES])


def test_what_is_new_makes_another() -> None:
    prior = prior_of(pool())
    kept = pool_fits.speed("A100", WINDOWS, prior, None, None)
    growth = Growth(first=64, most=512, per_rank=64, noise_scale=1000.0, now=64)
    for other in (
        pool_fits.speed("H100", WINDOWS, prior, None, None),
        pool_fits.speed("A100", (*WINDOWS, Window(2, 8, 64, 0.3)), prior, None, None),
        pool_fits.speed("A100", WINDOWS, None, None, None),
        pool_fits.speed("A100", WINDOWS, prior_of(pool(until=2.0, step_s=5.0)), None, None),
        pool_fits.speed("A100", WINDOWS, prior, 128, None),
        pool_fits.speed("A100", WINDOWS, prior, None, growth),
    ):
        assert other is not kept
    slower = pool_fits.speed("A100", (), prior_of(pool(until=3.0, step_s=5.0)), 64, None)
    assert slower.goodput(SHAPES[0]) < pool_fits.speed("A100", (), prior, 64, None).goodput(SHAPES[0])


def test_learning_does_not_change_what_was_given_out() -> None:
    row = pool(until=4.0)
    kept = pool_fits.profiles_of(row)
    mine = pool_fits.read_profiles(row)
    mine.learn(["k", "new"], measurements("A100", [Window(1, 2, 64, 9.0)]), total_work=1.0)
    assert kept.similar(["new"]) is None and pool_fits.profiles_of(row) is kept
    assert mine.similar(["new"]) is not None


@pytest.mark.parametrize("broken", [{"past": 7}, {"past": None}, {"until": [1], "since": {}, "past": "x"}])
def test_what_cannot_be_read_is_as_if_nothing_was_learnt(broken: dict[str, Any]) -> None:
    row = pool(**{"until": 5.0, **broken})
    assert pool_fits.profiles_of(row).similar(["k"]) is None


def test_several_threads_get_the_same_answers() -> None:
    prior = prior_of(pool())
    wanted = [(*WINDOWS, Window(2, 8, 64, 0.3 + number / 100)) for number in range(8)] * 4
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda one: pool_fits.speed("A100", one, prior, None, None).goodput(SHAPES[2]), wanted)
        )
    assert found[:8] * 4 == found and len(set(found)) == 8
