"""Inverses computed aside are those computed at once, some steps later; damping that follows what steps bring."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from diamond.optim import KFAC, OptimError, solvers
from diamond.optim.damping import adapted, after_steps
from diamond.optim.keeping import load_sharded, sharded_state
from diamond.optim.precondition import Inverse
from tests.optim.kfac_ranks import Net, train

EVERY = 8


def made(lr: float | str = 0.05, **options: Any) -> tuple[nn.Module, KFAC]:
    model = Net()
    given = {"damping": 1e-2, "factor_every": 1, "inverse_every": EVERY, **options}
    optimizer = KFAC(model, lr, **given)
    return model, optimizer


def calm(optimizer: KFAC) -> None:
    """As after many steps: inverses at their full period. With a number for lr it follows the number of steps."""
    optimizer.steps, optimizer._calm = 10 * EVERY, EVERY


def history(optimizer: KFAC, model: nn.Module, steps: int) -> list[list[Tensor]]:
    """The inverses in use after each step."""
    found = []
    begin = optimizer.steps
    for step in range(begin, begin + steps):
        train(model, optimizer, range(step, step + 1))
        found.append([tensor.clone() for index in sorted(optimizer.kept) for tensor in tensors(optimizer.kept[index])])
    return found


def tensors(one: Inverse) -> list[Tensor]:
    return one.tensors()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_aside_is_now_some_steps_later() -> None:
    """With steps of no length both see the same factors."""
    runs = []
    for way in ("now", "aside"):
        model, optimizer = made(0.0, inverses=way)
        calm(optimizer)
        runs.append(history(optimizer, model, 3 * EVERY))
    now, aside = runs
    lag = EVERY // 4
    assert same(aside[0], now[0]), "the first are there at once"
    assert not same(now[0], now[EVERY]) and not same(now[EVERY], now[2 * EVERY])
    for step in range(EVERY, 3 * EVERY):
        assert same(aside[step], now[max(0, step - lag)]), step


def test_it_waits_if_need_be_and_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    honest = solvers._COMPUTE["cholesky"]
    for pause in (0.0, 0.02):
        monkeypatch.setitem(solvers._COMPUTE, "cholesky", lambda *a, p=pause: (time.sleep(p), honest(*a))[1])
        model, optimizer = made("auto", inverses="aside", inverse_every=2)
        train(model, optimizer, range(12))
        ended.append(torch.cat([one.detach().reshape(-1) for one in model.parameters()]))
    assert torch.equal(*ended)


@pytest.mark.parametrize(("lr", "break_at"), [(0.05, EVERY + 2), ("auto", EVERY + 2)])
def test_a_break_while_it_computes_changes_not_a_bit(lr: float | str, break_at: int, tmp_path: Path) -> None:
    model, optimizer = made(lr, inverses="aside", factor_every=2)
    calm(optimizer)
    first = optimizer.steps
    train(model, optimizer, range(first, first + break_at))
    assert optimizer.refreshing.due is not None, "nothing was under way"
    state = copy.deepcopy({"model": model.state_dict(), "kfac": optimizer.state_dict()})
    dcp.save(sharded_state(optimizer), checkpoint_id=tmp_path)
    train(model, optimizer, range(first + break_at, first + 20))
    for road in ("state_dict", "sharded"):
        again, resumed = made(lr, inverses="aside", factor_every=2, seed=7)
        again.load_state_dict(state["model"])
        if road == "state_dict":
            resumed.load_state_dict(state["kfac"])
        else:
            given = sharded_state(resumed)
            dcp.load(given, checkpoint_id=tmp_path)
            load_sharded(resumed, given)
        train(again, resumed, range(first + break_at, first + 20))
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)), road


def test_what_goes_wrong_aside_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(inverses="aside")
    train(model, optimizer, range(1))
    monkeypatch.setitem(solvers._COMPUTE, "cholesky", broken)
    with pytest.raises(RuntimeError, match="the solver broke"):
        train(model, optimizer, range(1, 4))
    monkeypatch.undo()
    train(model, optimizer, range(4, 8))
    assert all(one.isfinite().all() for one in model.parameters())


def broken(stack: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    raise RuntimeError("the solver broke")


def test_a_copy_takes_what_was_under_way_along() -> None:
    model, optimizer = made(inverses="aside")
    train(model, optimizer, range(3))
    assert optimizer.refreshing.due is not None
    twin = copy.deepcopy(optimizer.refreshing)
    ours, theirs = optimizer.refreshing.take(10**6), twin.take(10**6)
    assert ours is not None and theirs is not None and ours.keys() == theirs.keys() == optimizer.kept.keys()
    assert all(same(ours[index].tensors(), theirs[index].tensors()) for index in ours)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(OptimError, match="inverses='later' is not known; one of now, aside"):
        KFAC(Net(), inverses="later")
    for spelled in ("ekfac", "EKFAC"):
        with pytest.raises(OptimError, match=r"kind='ekfac' is no longer there.*Leave kind out.*diamond\.optim\.SOAP"):
            KFAC(Net(), kind=spelled)


# ---- damping ---------------------------------------------------------------------------------------------------------


def test_damping_follows_the_ratio_within_bounds() -> None:
    assert adapted(1.0, 1.0, 0.9) < 1.0 == adapted(1.0, 1.0, 0.5) < adapted(1.0, 1.0, 0.1)
    assert adapted(1.0, 1.0, math.nan) > 1.0 and adapted(1.0, 1.0, -5.0) > 1.0
    low = high = 1e-3
    for _ in range(50):
        low, high = adapted(low, 1e-3, 1.0), adapted(high, 1e-3, 0.0)
    assert low == pytest.approx(1e-5) and high == pytest.approx(1.0)


def test_damping_after_bad_steps() -> None:
    assert after_steps(1e-3, 1e-3, 2, adapts=False) == pytest.approx(1e-2) == after_steps(1e-3, 1e-3, 1, adapts=True)
    assert 1e-3 < after_steps(1e-2, 1e-3, 0, adapts=False) < 1e-2, "it falls back"
    assert after_steps(1e-3, 1e-3, 0, adapts=False) == 1e-3
    assert after_steps(1e-5, 1e-3, 0, adapts=True) == 1e-5, "what was measured stays"


class Cubes(nn.Module):
    """Its output soon grows far faster than its slope says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) ** 3


def followed(model: nn.Module, steps: int, adapt: bool) -> tuple[KFAC, list[tuple[float, float]]]:
    """The optimizer, and after each step the ratio that was measured last and the damping."""
    dice = torch.Generator().manual_seed(0)
    optimizer = KFAC(model, "auto", damping=1e-3, adapt_damping=adapt)
    found = []
    for _ in range(steps):
        x = torch.randn(40, 3, generator=dice)
        optimizer.zero_grad()
        F.mse_loss(model(x), 5 + x[:, :2].tanh()).backward()
        optimizer.step()
        assert optimizer.lengths.ratio is not None
        found.append((optimizer.lengths.ratio, optimizer.damping))
    return optimizer, found


def test_promises_of_a_linear_model_are_kept_and_damping_falls() -> None:
    torch.manual_seed(0)
    optimizer, found = followed(nn.Linear(3, 2), 6, adapt=True)
    assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio, _ in found[:2])
    assert optimizer.damping < 5e-4
    torch.manual_seed(0)
    assert followed(nn.Linear(3, 2), 6, adapt=False)[0].damping == 1e-3


def test_broken_promises_raise_damping_which_is_kept_in_the_state() -> None:
    torch.manual_seed(0)
    optimizer, found = followed(Cubes(), 2, adapt=True)
    before = 1e-3
    for ratio, damping in found:
        assert damping == adapted(before, 1e-3, ratio)
        before = damping
    assert found[1][0] < 0 and found[1][1] > found[0][1]
    again = KFAC(Cubes(), "auto", damping=1e-3, adapt_damping=True)
    again.load_state_dict(optimizer.state_dict())
    assert again.damping == optimizer.damping
