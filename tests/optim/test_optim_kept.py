"""What K-FAC keeps: a run that goes on after a break is the run without one, and other numbers of ranks can read it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from diamond.optim import KFAC, OptimError
from diamond.optim.keeping import load_sharded, sharded_state
from tests.optim.kfac_ranks import Net, batch, continued, leg, train, uninterrupted
from tests.optim.test_optim_ranks import apart, check_factors, run

RANKS = {2: ("two", "continued"), 4: ("four",)}
ROUNDING = {"ddp 0.05": 1e-5, "fsdp auto": 5e-4, "fsdp 0.05": 1e-5}  # as in test_optim_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the checkpoint of one process, from which two ranks went on, from theirs four; and what they had to say."""
    made = tmp_path_factory.mktemp("kept")
    leg("begun", None, made)
    for world, scenes in RANKS.items():
        run(made, world, scenes)
    return made


def trained(steps: int = 4, **options: Any) -> tuple[nn.Module, KFAC]:
    model = Net(spare=True)
    optimizer = KFAC(model, 0.05, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("world", [1, 2])
def test_a_break_changes_not_a_bit(folder: Path, world: int) -> None:
    told = [torch.load(folder / f"continued.2.{rank}.pt") for rank in range(2)] if world == 2 else [continued()]
    for found in told:
        assert len(found) == 4
        for name, (unbroken, by_state_dict, by_sharded_state) in found.items():
            assert torch.equal(by_state_dict, unbroken), name
            assert torch.equal(by_sharded_state, unbroken), name


def test_a_run_goes_on_with_two_ranks_four_and_one(folder: Path) -> None:
    ended, alone = leg("ended", "four", folder), uninterrupted()
    assert alone.keys() == ended.keys() == ROUNDING.keys()
    for name, wanted in alone.items():
        assert apart(ended[name]["weights"], wanted["weights"]) < ROUNDING[name], name
        check_factors([ended[name]], wanted, ROUNDING[name])
        for scene, world in (("two", 2), ("four", 4)):
            told = [torch.load(folder / f"{scene}.{world}.{rank}.pt")[name] for rank in range(world)]
            assert all(torch.equal(one["weights"], told[0]["weights"]) for one in told)
            assert sum(one["memory"]["factors"] for one in told) == wanted["memory"]["factors"]


def test_what_is_loaded_is_a_copy() -> None:
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(state)
    again = Net(spare=True)
    again.load_state_dict(model.state_dict())
    resumed = KFAC(again, 0.05)
    resumed.load_state_dict(given)
    train(again, resumed, range(4, 8))
    for name, sides in state["kfac"]["factors"].items():
        for side, kept in sides.items():
            assert (kept["sum"] is None) == (given["kfac"]["factors"][name][side]["sum"] is None)
            if kept["sum"] is not None:
                assert torch.equal(given["kfac"]["factors"][name][side]["sum"], kept["sum"])


def test_nothing_known_yet_is_kept_as_such(tmp_path: Path) -> None:
    fresh = KFAC(Net(spare=True), 0.05)
    dcp.save(sharded_state(fresh), checkpoint_id=tmp_path)
    model, optimizer = trained()
    state = sharded_state(optimizer)
    dcp.load(state, checkpoint_id=tmp_path)
    load_sharded(optimizer, state)
    assert optimizer.steps == 0
    assert not any(one.known for one in optimizer.factors)
    assert not optimizer.kept
    assert not optimizer.state
    assert not optimizer._fallback.state
    train(model, optimizer, range(1))
    assert sorted(optimizer.blocks[index].name for index in optimizer.kept) == ["first", "last", "norm", "second"]


def test_damping_and_schedule_come_back(tmp_path: Path) -> None:
    _, optimizer = trained()
    optimizer.damping, optimizer.skipped = 0.125, 3
    optimizer.param_groups[0]["lr"] = 0.0625
    dcp.save(sharded_state(optimizer), checkpoint_id=tmp_path)
    fresh = KFAC(Net(spare=True), 0.05)
    state = sharded_state(fresh)
    dcp.load(state, checkpoint_id=tmp_path)
    load_sharded(fresh, state)
    assert (fresh.damping, fresh.skipped, fresh.steps) == (0.125, 3, 4)
    assert fresh.param_groups[0]["lr"] == 0.0625
    assert fresh.memory_bytes() == optimizer.memory_bytes()


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_state_of_another_kind_or_model_is_refused() -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    with pytest.raises(
        OptimError, match="kind='ekfac', which is no longer there: it diverged; load the model's weights"
    ):
        optimizer.load_state_dict({**state, "kfac": {**state["kfac"], "kind": "ekfac"}})
    with pytest.raises(OptimError, match="spare is not in this model"):
        KFAC(Net(), 0.05).load_state_dict(state)
    wider = Net(spare=True)
    wider.spare = nn.Linear(4, 5)
    with pytest.raises(OptimError, match="spare is linear 1x4x5 in it and linear 1x5x5 here"):
        KFAC(wider, 0.05).load_state_dict(state)
    with pytest.raises(OptimError, match="no part 'kfac'"):
        optimizer.load_state_dict(torch.optim.SGD(Net().parameters(), lr=0.1).state_dict())


def kept_in(optimizer: KFAC, way: str) -> Any:
    return copy.deepcopy(optimizer.state_dict() if way == "state_dict" else sharded_state(optimizer))


def put_into(optimizer: KFAC, state: Any, way: str) -> None:
    if way == "state_dict":
        optimizer.load_state_dict(state)
    else:
        load_sharded(optimizer, state)


@pytest.mark.parametrize("way", ["state_dict", "sharded"])
@pytest.mark.parametrize(
    ("written", "here", "said"),
    [
        ("auto", {"lr": 0.05}, "written with lr='auto', and this optimizer has lr=0.05; give KFAC the same lr"),
        ("auto", {"lr": 1.0, "measured": 40}, "written with lr='auto', and this optimizer has lr=1.0"),
        (0.05, {"lr": "auto"}, "written with a number for lr, and this optimizer has lr='auto'; give KFAC the same lr"),
        (1.0, {"lr": "auto"}, "written with a number for lr, and this optimizer has lr='auto'"),
    ],
)
def test_a_share_of_what_is_measured_is_no_length(written: Any, here: dict[str, Any], said: str, way: str) -> None:
    model = Net(spare=True)
    optimizer = KFAC(model, written)
    train(model, optimizer, range(2))
    fresh = KFAC(Net(spare=True), **here)
    before = fresh.param_groups[0]["lr"]
    with pytest.raises(OptimError, match=said):
        put_into(fresh, kept_in(optimizer, way), way)
    assert fresh.steps == 0 and not fresh.kept and not fresh.state
    assert fresh.param_groups[0]["lr"] == before and fresh.measures is (here["lr"] == "auto" or "measured" in here)


@pytest.mark.parametrize("way", ["state_dict", "sharded"])
def test_what_is_no_longer_measured_comes_back_so(way: str) -> None:
    model = Net(spare=True)
    ended = KFAC(model, 0.05, measured=2)
    torch.optim.lr_scheduler.ExponentialLR(ended, 0.5)
    train(model, ended, range(4))
    ended.param_groups[0]["lr"] = 0.0125  # as a schedule does
    again = KFAC(Net(spare=True), 0.2, measured=2)  # the number itself comes with the state, as with any optimizer
    put_into(again, kept_in(ended, way), way)
    assert not again.measures and again.param_groups[0]["lr"] == 0.0125 and again._reference == 0.05
    model = Net(spare=True)
    gave_up = KFAC(model)
    x, y = batch(0)
    nn.functional.mse_loss(3 * model(x), y).backward()
    with pytest.warns(UserWarning, match="lr='auto' follows"):
        gave_up.step()
    again = KFAC(Net(spare=True))
    put_into(again, kept_in(gave_up, way), way)
    assert not again.measures and again._rate == gave_up._rate < 1 and again.steps == 1


def test_a_state_that_is_incomplete_or_of_other_ranks_is_refused() -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    lacking = {**state, "kfac": {key: one for key, one in state["kfac"].items() if key not in ("kept", "factors")}}
    with pytest.raises(OptimError, match="factors, kept missing"):
        optimizer.load_state_dict(lacking)
    with pytest.raises(OptimError, match=r"rank 1 has written it.*sharded_state"):
        optimizer.load_state_dict({**state, "kfac": {**state["kfac"], "rank": 1}})
    with pytest.raises(OptimError, match="version 7"):
        optimizer.load_state_dict({**state, "kfac": {**state["kfac"], "version": 7}})


@pytest.mark.parametrize("place", ["factors", "kept"])
def test_a_state_that_is_not_finite_is_refused_and_changes_nothing(place: str) -> None:
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    if place == "factors":
        state["kfac"]["factors"]["second"]["a"]["sum"][0, 0, 0] = torch.nan
    else:
        state["kfac"]["kept"]["second"]["inverse_g"][0, 0, 0] = torch.inf
    train(model, optimizer, range(4, 6))
    before = {index: one.a.clone() for index, one in optimizer.kept.items()}
    with pytest.raises(OptimError, match="what is kept of second is not finite"):
        optimizer.load_state_dict(state)
    assert optimizer.steps == 6
    assert all(torch.equal(one.a, before[index]) for index, one in optimizer.kept.items())


def _without(part: Any, key: Any) -> None:
    del part[key]


BROKEN: dict[str, tuple[Any, str]] = {
    "a number": (lambda state: _without(state["kfac"]["numbers"], "damping"), "numbers: damping missing"),
    "a block": (lambda state: _without(state["kfac"]["factors"], "first"), "factors: first missing"),
    "a side": (lambda state: _without(state["kfac"]["factors"]["first"], "a"), "factors of first: a missing"),
    "an inverse": (lambda state: _without(state["kfac"]["kept"]["first"], "inverse_a"), "kept of first: inverse_a"),
    "the fallback": (lambda state: state["kfac"].update(fallback={}), "fallback: param_groups, state missing"),
    "groups": (lambda state: _without(state, "param_groups"), "param_groups missing"),
    "shape of a factor": (
        lambda state: state["kfac"]["factors"]["first"]["a"].update(sum=torch.ones(1, 2, 2)),
        r"factors of first: a has shape \(1, 2, 2\)",
    ),
    "shape of an inverse": (
        lambda state: state["kfac"]["kept"]["first"].update(inverse_g=torch.ones(1, 2, 2)),
        r"kept of first: inverse_g has shape \(1, 2, 2\)",
    ),
    "another block": (lambda state: state["kfac"]["kept"].update(more={}), "kept has more, which is not in this model"),
    "a last step": (lambda state: state["state"][0]["last_step"].fill_(torch.nan), "last step in it is not finite"),
    "used": (lambda state: state["kfac"].update(used=[99]), "used names blocks that there are not"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(what: str) -> None:
    change, said = BROKEN[what]
    _, optimizer = trained(2)
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    fresh = KFAC(Net(spare=True), 0.05)
    with pytest.raises(OptimError, match=said):
        fresh.load_state_dict(state)
    assert fresh.steps == 0 and not fresh.kept and not fresh.state


def test_draws_of_a_device_that_is_not_there_begin_anew() -> None:
    _, optimizer = trained(2)
    state = copy.deepcopy(optimizer.state_dict())
    state["kfac"]["generators"] = {"cuda:3": torch.zeros(16, dtype=torch.uint8)}
    fresh = KFAC(Net(spare=True), 0.05)
    fresh.load_state_dict(state)
    assert fresh.steps == 2 and not fresh._curving.state()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _, optimizer = trained()
    dcp.save(sharded_state(optimizer), checkpoint_id=tmp_path)
    smaller = KFAC(Net(), 0.05)
    state = sharded_state(smaller)
    dcp.load(state, checkpoint_id=tmp_path)  # all that it asks for is there
    with pytest.raises(OptimError, match="another model: spare is not in this model"):
        load_sharded(smaller, state)
    other = Net()
    other.more = nn.Linear(3, 3)
    larger = KFAC(other, 0.05)
    with pytest.raises(CheckpointException, match=r"block\.more\.a"):
        dcp.load(sharded_state(larger), checkpoint_id=tmp_path)
    state = sharded_state(larger)
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    with pytest.raises(OptimError, match="more is not in it; spare is not in this model"):
        load_sharded(larger, state)


def test_a_bad_checkpoint_is_refused() -> None:
    _, optimizer = trained()
    state = copy.deepcopy(sharded_state(optimizer))
    with pytest.raises(OptimError, match="about is missing"):
        load_sharded(optimizer, {})
    with pytest.raises(OptimError, match="about is not what sharded_state has written"):
        load_sharded(optimizer, {**state, "about": "{"})
    with pytest.raises(OptimError, match=r"block\.first\.a, last\.norm\.bias missing"):
        load_sharded(
            optimizer, {key: one for key, one in state.items() if key not in ("block.first.a", "last.norm.bias")}
        )
    about = json.dumps({**json.loads(state["about"]), "kind": "ekfac"})
    with pytest.raises(OptimError, match="kind='ekfac', which is no longer there"):
        load_sharded(optimizer, {**state, "about": about})
    state["block.last.inverse_a"][0, 0, 0] = torch.nan
    with pytest.raises(OptimError, match="what is kept of last is not finite"):
        load_sharded(optimizer, state)


def test_a_fallback_whose_state_cannot_be_resharded_is_named() -> None:
    optimizer = KFAC(Net(), 0.05, fallback=lambda parameters: Crooked(parameters))
    with pytest.raises(OptimError, match="Crooked keeps corner, which is no tensor of its parameter's shape"):
        sharded_state(optimizer)


class Crooked(torch.optim.SGD):
    """Keeps something of a shape of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["corner"] = torch.zeros(11)
