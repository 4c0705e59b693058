"""Gradients of few rows: the same step by less arithmetic, and the whole matrix wherever that would be wrong."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from diamond.optim import KFAC
from diamond.optim.lean import pays

INPUTS, TARGETS = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 8)[:, None]


def trained(steps: int = 4) -> tuple[nn.Sequential, KFAC]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 48, bias=False), nn.Tanh(), nn.Linear(48, 1))
    optimizer = KFAC(model, lr=0.01, damping=1e-2)
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()
    optimizer._curving.disarm()
    return model, optimizer


def backward(model: nn.Module, optimizer: KFAC) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(INPUTS), TARGETS).backward()


def steps_of(optimizer: KFAC) -> list[torch.Tensor]:
    with torch.no_grad():
        return [one.clone() for one in optimizer.directions.find().tensors()]


def test_the_step_is_the_same() -> None:
    model, optimizer = trained()
    backward(model, optimizer)
    taken = [optimizer.directions.lean[index]._inputs is not None for index in (0, 1)]
    assert taken == [True, True] and not pays(optimizer.blocks[2], 8), "one output is not worth it"
    lean = steps_of(optimizer)
    whole = steps_of(optimizer)  # what was taken is taken, so that this one multiplies the matrices
    assert len(lean) == 5
    for one, other in zip(lean, whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)


def scaled_unseen(model: nn.Module) -> None:
    for one in model.parameters():
        assert one.grad is not None
        one.grad.data.mul_(2.0)


def accumulated(model: nn.Module) -> None:
    F.mse_loss(model(INPUTS.flip(1)), TARGETS).backward()


def replaced(model: nn.Module) -> None:
    for one in model.parameters():
        one.grad = torch.ones_like(one)


@pytest.mark.parametrize("change", [clipped, scaled_unseen, accumulated, replaced])
def test_a_gradient_that_was_changed_counts_as_it_is(change: Callable[[nn.Module], None]) -> None:
    model, optimizer = trained()
    backward(model, optimizer)
    change(model)
    found = steps_of(optimizer)
    for block, (weight, _) in zip(
        optimizer.blocks, ((one, None) for one in (found[0], found[2], found[3])), strict=True
    ):
        bias = block.bias
        gradient = block.matrix(block.weight.grad, None if bias is None else bias.grad)
        wanted = block.views(optimizer.kept[block.index].apply(gradient))[0]
        assert torch.allclose(weight, wanted, rtol=1e-4, atol=1e-7)


def test_copies_of_a_model_tell_nobody_and_nothing_stays() -> None:
    model, optimizer = trained()
    twin = copy.deepcopy(model)
    twin(INPUTS).sum().backward()
    again = pickle.loads(pickle.dumps(model))
    again(INPUTS).sum().backward()
    assert all(one._inputs is None and one._uses == 0 for one in optimizer.directions.lean.values())
    del optimizer
    gc.collect()
    assert not any(module._forward_hooks for module in model.modules())
