"""K-FAC on real ranks against one process with the whole batch: DDP, FSDP2, tensors spread, and who keeps what.

What ranks add up in another order differs by float32's rounding, 1e-7; damping of 1e-2 lets an inverse enlarge it a
hundredfold. Lengths are measured by differences of a ten-thousandth to a thousandth of the weights in size,
which costs three to four more digits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optim import kfac_ranks

# Starting ranks takes longer than what they do: those of one number do all their scenes in one life.
SCENES = {
    2: ("every_mode", "drift", "uneven", "experts", "static_graph", "spread_models", "fsdp_options", "refused",
        "compressed", "not_finite", "split_and_aside"),
    4: ("every_mode", "drift", "uneven", "experts", "spread_models"),
}  # fmt: skip
ROUNDING = {"0.05": 1e-5, "auto": 5e-4}
BFLOAT16 = 5e-2  # eight bits of a factor are 0.4 % of it, in each of six steps
Told = list[dict[str, Any]]
Ranks = Callable[[str, int], Told]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    begun: set[int] = set()
    alone: dict[str, Any] = {}

    def told(scene: str, world: int) -> Told:
        if world == 1:
            if scene not in alone:
                alone[scene] = kfac_ranks.SCENES[scene]()
            return [alone[scene]]
        if world not in begun:
            begun.add(world)
            run(folder, world, SCENES[world])
        return [torch.load(folder / f"{scene}.{world}.{rank}.pt") for rank in range(world)]

    return told


def run(folder: Path, world: int, scenes: Sequence[str]) -> None:
    known = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
    begun = [
        subprocess.Popen(
            [sys.executable, "-W", "error", kfac_ranks.__file__, str(folder), *scenes],
            env=known | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=240)[0] for one in begun]
    finally:
        for one in begun:
            one.kill()
            one.wait()
    assert [one.returncode for one in begun] == [0] * world, "\n".join(one[-2000:] for one in said)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def agree(found: Told) -> bool:
    return all(torch.equal(one["weights"], found[0]["weights"]) for one in found)


def check_factors(found: Told, alone: dict[str, Any], tolerance: float) -> None:
    """Each is kept by its owner only, and is that of the whole batch."""
    for name, sides in alone["factors"].items():
        owned = [one["factors"][name] for one in found if name in one["factors"]]
        assert len(owned) == 1, name
        for ours, theirs in zip(owned[0], sides, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert apart(ours, theirs) <= tolerance * float(theirs.abs().max()), name


@pytest.mark.parametrize("world", [2, 4])
def test_every_way_to_share_the_work_goes_the_way_of_one_process(ranks: Ranks, world: int) -> None:
    told, alone = ranks("every_mode", world), ranks("every_mode", 1)[0]
    assert {name.split()[1] for name in told[0]} == {str(number) for number in (1, 2, 4) if number <= world}
    for name in told[0]:
        lr, _, factor = name.split()
        found, wanted = [one[name] for one in told], alone[f"{lr} 1 tri"]
        assert agree(found), name
        tolerance = BFLOAT16 if factor == "bf16-tri" else ROUNDING[lr]
        assert apart(found[0]["weights"], wanted["weights"]) < tolerance, name
        check_factors(found, wanted, tolerance)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_its_share_and_no_more(ranks: Ranks, world: int) -> None:
    told, alone = ranks("every_mode", world), ranks("every_mode", 1)[0]["0.05 1 tri"]["memory"]
    assert alone["factors"] == alone["inverses"] > 0
    for number in [one for one in (1, 2, 4) if one <= world]:
        memory = [one[f"0.05 {number} tri"]["memory"] for one in told]
        assert sum(one["factors"] for one in memory) == alone["factors"]
        assert sum(one["inverses"] for one in memory) == number * alone["inverses"]
        if number == 1:
            assert all(one["factors"] == one["inverses"] < alone["factors"] for one in memory)
        if number == world:
            assert all(one["inverses"] == alone["inverses"] for one in memory)


def test_what_ranks_send_each_other_is_counted(ranks: Ranks) -> None:
    told = ranks("every_mode", 2)
    packed, plain, half, shared = (
        [one[f"0.05 {how}"]["sent"] for one in told] for how in ("1 tri", "1 none", "1 bf16-tri", "2 tri")
    )
    sides, vector = (7, 14, 15, 10, 11, 3), 28  # of the factors' matrices; the norm's diagonal
    triangles, squares = sum(side * (side + 1) // 2 for side in sides), sum(side * side for side in sides)
    updates, left = divmod(packed[0]["factor reduce"], 4 * (triangles + vector))
    assert left == 0
    assert 1 < updates <= 6
    for rank in range(2):
        assert packed[rank]["factor reduce"] == updates * 4 * (triangles + vector)
        assert plain[rank]["factor reduce"] == updates * 4 * (squares + vector)
        assert half[rank]["factor reduce"] == updates * (2 * triangles + 4 * vector)
        assert "inverse broadcast" not in packed[rank]
        assert "step broadcast" not in shared[rank]
    matrices = 14 * 7 + 28 + 10 * 15 + 3 * 11
    assert sum(one["step broadcast"] for one in packed) == 6 * 4 * matrices
    inversions, left = divmod(sum(one["inverse broadcast"] for one in shared), 4 * (squares + vector))
    assert left == 0
    assert 1 <= inversions <= updates


def test_pieces_and_inverses_aside_go_the_way_of_one_process(ranks: Ranks) -> None:
    told, alone = ranks("split_and_aside", 2), ranks("split_and_aside", 1)[0]
    assert told[0].keys() == {"pieces 1", "pieces 2", "aside 1", "aside 2"}
    for name in told[0]:
        found, wanted = [one[name] for one in told], alone[f"{name.split()[0]} 1"]
        assert agree(found), name
        assert apart(found[0]["weights"], wanted["weights"]) < ROUNDING["0.05"], name
        check_factors(found, wanted, ROUNDING["0.05"])
    assert all(side.shape[-1] <= 4 for name in ("first", "last") for side in alone["pieces 1"]["factors"][name])
    assert apart(alone["pieces 1"]["weights"], alone["aside 1"]["weights"]) > 1e-3


def test_a_rank_that_finds_no_number_makes_no_step(ranks: Ranks) -> None:
    for lr in ("0.05", "auto"):
        told = [one[lr] for one in ranks("not_finite", 2)]
        assert agree(told)
        assert all(one["skipped"] == 1 for one in told)
        before, after = told[0]["losses"]
        assert after < 0.9 * before


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_do_not_drift_apart(ranks: Ranks, world: int) -> None:
    told = ranks("drift", world)
    for name in told[0]:
        found = [one[name] for one in told]
        assert agree(found), name
        before, after = found[0]["losses"]
        assert after < 0.7 * before, name


@pytest.mark.parametrize("world", [2, 4])
def test_factors_weigh_samples_alike_on_uneven_ranks(ranks: Ranks, world: int) -> None:
    told, alone = ranks("uneven", world), ranks("uneven", 1)[0]
    assert agree(told)
    check_factors(told, alone, 1e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_layers_that_some_ranks_use(ranks: Ranks, world: int) -> None:
    told, alone = ranks("experts", world), ranks("experts", 1)[0]
    for name, wanted in alone.items():
        found = [one[name] for one in told]
        assert agree(found), name
        assert all(one["used"] == wanted["used"] == [0, 1, 2, 4] for one in found)
        tolerance = ROUNDING[name]
        assert apart(found[0]["weights"], wanted["weights"]) < tolerance, name
        check_factors(found, wanted, tolerance)


def test_a_static_graph_of_ddp_lets_the_first_step_pass(ranks: Ranks) -> None:
    told, alone = ranks("static_graph", 2), ranks("static_graph", 1)[0]
    assert agree(told)
    assert apart(told[0]["weights"], alone["weights"]) < ROUNDING["0.05"]


@pytest.mark.parametrize("world", [2, 4])
def test_models_that_are_spread_go_the_way_of_whole_ones(ranks: Ranks, world: int) -> None:
    told, alone = ranks("spread_models", world), ranks("spread_models", 1)[0]
    ways = {2: {"shards", "tensors"}, 4: {"shards", "replicas of shards", "shards of tensors"}}[world]
    assert {name.rsplit(" ", 2)[0] for name in told[0]} == ways
    for name in told[0]:
        how, lr, curvature = name.rsplit(" ", 2)
        found, wanted = [one[name] for one in told], alone[f"whole {lr} {curvature}"]
        assert agree(found), name
        if curvature == "ggn-mc" and how == "shards":  # each rank draws for its own samples
            assert apart(found[0]["weights"], wanted["weights"]) > 1e-3
            continue
        assert apart(found[0]["weights"], wanted["weights"]) < ROUNDING[lr], name
        check_factors(found, wanted, ROUNDING[lr])


def test_fsdp_in_pieces_kept_whole_by_one_worker_and_in_bfloat16(ranks: Ranks) -> None:
    told, alone = ranks("fsdp_options", 2), ranks("fsdp_options", 1)[0]
    tolerances = {"pieces": 1e-5, "whole": 5e-4, "one worker": 5e-4, "bfloat16": BFLOAT16}
    assert alone.keys() == tolerances.keys()
    for name, wanted in alone.items():
        found = [one[name] for one in told]
        assert agree(found), name
        assert apart(found[0]["weights"], wanted["weights"]) < tolerances[name], name
        check_factors(found, wanted, tolerances[name])


def test_what_cannot_be_done_is_said_on_every_rank(ranks: Ranks) -> None:
    said = {
        "late": "first were replaced after the optimizer was made; make it after fully_shard",
        "lossless": "recognised no loss",
        "fsdp1": "fully_shard",
        "replicas": "use DistributedDataParallel",
        "plan": "first belongs to rank 7, and there are 2",
        "workers": "3 workers for first do not divide 2 ranks",
    }
    for found in ranks("refused", 2):
        assert found.keys() == said.keys()
        for name, text in said.items():
            assert text in found[name], name


def test_compressed_gradients_and_factors_train(ranks: Ranks) -> None:
    told = ranks("compressed", 2)
    for name in ("0.05", "auto"):
        found = [one[name] for one in told]
        assert agree(found), name
        assert found[0]["ratio"] > 1.5, "a small net has little to gain"
        before, after = found[0]["losses"]
        assert after < 0.7 * before, name
