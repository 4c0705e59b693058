"""Steps of a given length, of which the first few are measured all the same."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from diamond.optim import KFAC, OptimError  # noqa: E402

LONG = 0.5  # with momentum, far too long for curvature that one small batch tells


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((24, 48, 48, 4)):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def batches(number: int) -> list[tuple[Any, Any]]:
    torch.manual_seed(1)
    fade = torch.logspace(0, -3, 24)  # inputs of very different size, as waves of a field are
    inputs = [torch.randn(16, 24) * fade for _ in range(number)]
    return [(one, one[:, :4].tanh()) for one in inputs]


def train(model: nn.Module, optimizer: Any, data: list[tuple[Any, Any]]) -> list[float]:
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_measured_beginning_keeps_long_steps_from_going_astray() -> None:
    data = batches(30)
    given, measured = net(), net()
    astray = train(given, KFAC(given, lr=LONG, clip=None), data)
    kept = train(measured, KFAC(measured, lr=LONG, clip=None, measured=30), data)
    assert max(astray) > 10 * astray[0]
    assert max(kept) <= 1.5 * kept[0] and kept[-1] < kept[0] / 4


def test_then_the_number_counts_with_its_schedule_and_momentum() -> None:
    data = batches(12)
    model = net()
    optimizer = KFAC(model, lr=0.01, momentum=0.5, clip=None, measured=10)
    train(model, optimizer, data[:9])
    assert optimizer.measures
    train(model, optimizer, data[9:11])
    assert not optimizer.measures
    twins = [(other := copy.deepcopy(model), KFAC(other, lr=0.01, momentum=0.5, clip=None, measured=10)) for _ in "12"]
    moved = []
    for factor, (other, twin) in zip((1.0, 0.5), twins, strict=True):
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = [(one.detach().clone(), twin.state[one]["last_step"].clone()) for one in other.parameters()]
        twin.param_groups[0]["lr"] *= factor
        train(other, twin, data[11:])
        moved.append(
            [one.detach() - old - 0.5 * last for one, (old, last) in zip(other.parameters(), before, strict=True)]
        )
    for whole, half in zip(*moved, strict=True):
        assert torch.allclose(half, whole / 2, rtol=1e-3, atol=1e-6)


def test_a_schedule_multiplies_measured_lengths_by_its_share_of_lr() -> None:
    (batch,) = batches(1)
    moved = []
    for lr, factor in ((0.01, 1.0), (7.0, 1.0), (7.0, 0.25)):
        model = net()
        optimizer = KFAC(model, lr=lr, measured=5)
        optimizer.param_groups[0]["lr"] *= factor
        before = [one.detach().clone() for one in model.parameters()]
        train(model, optimizer, [batch])
        moved.append(
            [(one.detach() - old) / optimizer.lengths.step for one, old in zip(model.parameters(), before, strict=True)]
        )
    for small, large, quarter in zip(*moved, strict=True):
        assert torch.allclose(small, large, rtol=1e-4, atol=1e-7)
        assert torch.allclose(quarter, large / 4, rtol=1e-4, atol=1e-7)


def test_a_loss_that_cannot_be_followed_is_told_and_lr_counts_at_once() -> None:
    model = net()
    optimizer = KFAC(model, lr=0.01, measured=5)
    inputs, targets = batches(1)[0]
    F.mse_loss(3 * model(inputs), targets).backward()
    with pytest.warns(UserWarning, match=r"measured=5.*give measured=0"):
        optimizer.step()
    assert not optimizer.measures and optimizer._rate == 1.0


@pytest.mark.parametrize("value", [-1, 2.5, True, "some"])
def test_what_is_no_number_of_steps_is_refused(value: Any) -> None:
    with pytest.raises(OptimError, match=r"measured=.*whole number of at least 0"):
        KFAC(net(), lr=0.1, measured=value)
