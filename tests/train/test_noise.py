"""The gradient's noise scale: the arithmetic, and what real runs measure where it is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from diamond.train.loop.noise import Noise, split
from tests.train.measured import expected
from tests.train.served import Measured

UNTIL = 16 * 128


def test_two_batch_sizes_give_both() -> None:
    sqr, var = split(3.0 + 80.0 / 8, 8, 3.0 + 80.0 / 32, 32)
    assert (sqr, var) == (pytest.approx(3.0), pytest.approx(80.0))
    with pytest.raises(ValueError, match="tell nothing"):
        split(1.0, 8, 1.0, 8)


def test_chance_averages_out() -> None:
    dice = random.Random(1)
    noise = Noise()
    assert noise.scale is None and noise.grad_sqr is None
    for _ in range(100):
        # What g1·g1, g2·g2 of single gradients vary by is far more than what their means differ by.
        small, big = 5.0 + 40.0 / 4 * dice.gauss(1, 0.3), 5.0 + 40.0 / 8 * dice.gauss(1, 0.3)
        noise.look([small], 4, [big], 8)
    assert noise.scale == pytest.approx(8.0, rel=0.5)
    assert noise.grad_sqr == pytest.approx(5.0, rel=0.4) and noise.grad_var == pytest.approx(40.0, rel=0.4)


def test_what_it_does_not_know() -> None:
    noise = Noise()
    for _ in range(2):
        noise.look([1.5], 4, [1.25], 8)
    assert noise.scale is None, "two looks are chance"
    noise.look([float("nan")], 4, [1.0], 8)
    assert noise.count == 2
    noise.look([1.5], 4, [1.25], 8)
    assert noise.scale == pytest.approx(2.0)
    noise.look([1.5, 2.0], 4, [1.25, 2.0], 8)
    assert noise.count == 1, "other groups begin anew"
    hidden = Noise()
    for _ in range(5):
        hidden.look([4.0], 4, [1.0], 8)
    assert hidden.scale is None and hidden.grad_sqr is not None and hidden.grad_sqr < 0


@pytest.mark.parametrize(("length", "is_hidden"), [(0.001, True), (50.0, False)])
def test_where_noise_hides_the_gradient_the_least_it_can_be_is_told(length: float, is_hidden: bool) -> None:
    """Over many runs: the bound is nearly always below what is true, and not by orders of magnitude in the middle."""
    variance, bounds, told = 800.0, [], 0
    for seed in range(200):
        dice, noise = random.Random(seed), Noise()
        for _ in range(60):
            small, big = (length + variance / size * dice.gauss(1, 0.3) for size in (4, 8))
            noise.look([small], 4, [big], 8)
        if (least := noise.least_scale) is not None:
            told, bounds = told + 1, [*bounds, least]
    assert (told > 150) is is_hidden and (told < 20) is not is_hidden
    if is_hidden:
        assert sum(least < variance / length for least in bounds) > 0.99 * told
        assert sorted(bounds)[told // 2] > 16, "batches of 8 were averaged: more than that is known"


def test_it_is_kept_exactly() -> None:
    one, two = Noise(), Noise()
    for at in range(7):
        one.look([1.1 + at / 7], 4, [1.0], 8)
    two.load(one.state())
    for noise in (one, two):
        noise.look([1.3], 4, [1.1], 8)
    assert one.scale == two.scale and one.state() == two.state() and one.least_scale == two.least_scale


@pytest.mark.parametrize("big", [1.0, 1.3], ids=["hidden", "seen"])
def test_a_checkpoint_of_an_earlier_version_knows_no_spread(big: float) -> None:
    one, two = Noise(), Noise()
    for _ in range(20):
        one.look([4.0], 4, [big * 2], 8)
    two.load({key: value for key, value in one.state().items() if not key.startswith("squar")})
    assert two.scale == one.scale and two.least_scale is None
    two.look([4.5], 4, [big], 8)
    assert two.least_scale is None, "one look is chance"


@pytest.mark.parametrize("size", [1.0, 1e-170, 1e160, 1e200], ids=str)
def test_looks_that_are_all_alike_or_out_of_reach_give_no_bound(size: float) -> None:
    noise = Noise()
    for number in range(300):
        noise.look([4.0 * size], 4, [1.0 * size], 8)
        assert noise.least_scale is None, number
    assert noise.scale is None and noise.grad_sqr is not None and noise.grad_sqr < 0


@pytest.mark.parametrize(
    ("world", "given"),
    [
        (1, {"batch_size": 32}),  # this step against the next
        (1, {"batch_size": 16, "run": {"accumulate": 4}}),  # the first piece against all
        (2, {"batch_size": 32}),  # ranks against their mean
        (2, {"batch_size": 32, "run": {"parallel": "fsdp"}}),  # shards of this step against those of the next
    ],
    ids=["steps", "pieces", "ranks", "shards"],
)
def test_it_is_what_it_is_known_to_be(measured: Measured, world: int, given: dict[str, Any], tmp_path: Path) -> None:
    told = measured(tmp_path, world, UNTIL, given)
    sqr, var = expected()
    assert told["noise_looks"] == pytest.approx(20, abs=1)
    assert told["grad_var"] == pytest.approx(var, rel=0.1)
    assert told["grad_sqr"] == pytest.approx(sqr, rel=0.2)
    assert told["noise_scale"] == pytest.approx(var / sqr, rel=0.2)
    assert "noise_by_group" not in told
    for rank in range(1, world):
        assert (tmp_path / f"noise-{rank}").read_text() == (tmp_path / "noise").read_text(), "the same on every rank"


def test_groups_are_told_apart(measured: Measured, tmp_path: Path) -> None:
    told = measured(tmp_path, 2, 10 * 128, {"batch_size": 16, "run": {"noise_by_group": True}})
    noisy, flat = told["noise_by_group"]
    assert noisy == pytest.approx(told["noise_scale"]) and flat is None, "the second has no gradient at all"


def test_it_goes_on_with_the_run(measured: Measured, tmp_path: Path) -> None:
    """What depends on it (the learning rate of a batch that grew) is the same to the last bit after a restart."""
    measured(tmp_path / "whole", 2, 200, {"batch_size": 4})
    for until in (128, 200):  # the last probe is taken up a step later, in the second job
        measured(tmp_path / "parts", 2, until, {"batch_size": 4})
    whole, parts = ((tmp_path / name / "noise").read_text() for name in ("whole", "parts"))
    assert whole == parts != "None"
