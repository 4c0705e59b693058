"""No step that K-FAC makes by itself lets the loss explode, and where it cannot know better it says so."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import Tensor, nn  # noqa: E402
from torch.func import functional_call  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from diamond.optim import KFAC, pinn  # noqa: E402
from diamond.optim.damping import FARTHEST, after_steps  # noqa: E402
from diamond.optim.lengths import Lengths, _shortened  # noqa: E402

DICE = torch.Generator().manual_seed(5)
INSIDE, EDGE = torch.rand(60, 2, generator=DICE), torch.rand(20, 2, generator=DICE).round()
WAVES = (3 * INSIDE).sin().prod(1, keepdim=True)


def net(seed: int = 0, inputs: int = 2, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )  # fmt: skip


def two_calls(model: nn.Module) -> Tensor:
    return F.mse_loss(model(INSIDE), 30 * WAVES) + F.mse_loss(model(EDGE), torch.zeros(20, 1))


def two_calls_first(model: nn.Module) -> Tensor:
    inside, edge = model(INSIDE), model(EDGE)
    return F.mse_loss(inside, 30 * WAVES) + F.mse_loss(edge, torch.zeros(20, 1))


def one_not_recognised(model: nn.Module) -> Tensor:
    return F.mse_loss(model(EDGE), torch.zeros(20, 1)) + (model(INSIDE) - 30 * WAVES).cosh().log().mean()


def by_hand(model: nn.Module) -> Tensor:
    points = INSIDE.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    (bends,) = torch.autograd.grad(slopes.sum(), points, create_graph=True)
    return (bends.sum(1, keepdim=True) + 18 * WAVES).square().mean() + F.mse_loss(model(EDGE), torch.zeros(20, 1))


def around_the_model(model: nn.Module) -> Tensor:
    weights = dict(model.named_parameters())
    hidden = functional_call(nn.Sequential(*model), weights, (INSIDE,))
    return F.mse_loss(model(EDGE), torch.zeros(20, 1)) + (hidden - 30 * WAVES).abs().pow(1.9).mean()


def train(model: nn.Module, optimizer: KFAC, loss: Callable[[nn.Module], Tensor], number: int) -> list[float]:
    losses = []
    for _step in range(number):
        optimizer.zero_grad()
        lost = loss(model)
        lost.backward()
        optimizer.step()
        losses.append(float(lost.detach()))
    return losses


# ---- which losses are followed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [two_calls, two_calls_first, one_not_recognised, by_hand, around_the_model])
def test_what_depends_on_more_than_one_output_is_not_followed(loss: Callable[[nn.Module], Tensor]) -> None:
    model = net()
    optimizer = KFAC(model)
    with pytest.warns(UserWarning, match=r"of one call of the model.*lr=0\.03, .*clip=0\.0001: give KFAC a number"):
        losses = train(model, optimizer, loss, 60)
    assert not optimizer.measures
    # of derivatives by hand K-FAC does not know all of the curvature, and steps of any given length may be too long
    assert loss is by_hand or (max(losses) < 1.5 * losses[0] and losses[-1] < 0.9 * losses[0])


def test_calls_are_told_apart_where_the_loss_is_named() -> None:
    model = net()
    optimizer = KFAC(model, loss="mse")
    with pytest.warns(UserWarning, match="of one call of the model"):
        train(model, optimizer, two_calls, 1)


def accumulated(model: nn.Module) -> Tensor:
    for rows in (slice(0, 20), slice(20, 40)):
        (F.mse_loss(model(INSIDE[rows]), WAVES[rows]) / 3).backward()
    return F.mse_loss(model(INSIDE[40:]), WAVES[40:]) / 3


def attacked(model: nn.Module) -> Tensor:
    points = INSIDE.clone().requires_grad_()
    (worse,) = torch.autograd.grad(F.mse_loss(model(points), WAVES), points)
    return F.mse_loss(model(INSIDE + 0.01 * worse.sign()), WAVES)


def looked_at(model: nn.Module) -> Tensor:
    assert model(EDGE).shape == (20, 1)
    return F.mse_loss(model(INSIDE), WAVES)


def penalised(model: nn.Module) -> Tensor:
    return F.mse_loss(model(INSIDE), WAVES) + 1e-3 * sum(one.square().sum() for one in model.parameters())


@pytest.mark.parametrize("loss", [accumulated, attacked, looked_at, penalised])
def test_habits_that_go_on_being_measured(loss: Callable[[nn.Module], Tensor]) -> None:
    model = net()
    optimizer = KFAC(model)
    losses = train(model, optimizer, loss, 80)
    assert optimizer.measures
    assert max(losses[10:]) < losses[0] and losses[-1] < losses[0] / 2


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_warning_points_at_the_line_that_steps(scheduled: bool) -> None:
    model = net()
    optimizer = KFAC(model)
    if scheduled:  # schedulers put a call of their own around it
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    two_calls(model).backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
    (one,) = said
    assert one.filename == __file__
    assert Path(__file__).read_text("utf-8").splitlines()[one.lineno - 1] == "        optimizer.step()"


# ---- steps that would not help ---------------------------------------------------------------------------------------


def test_no_step_where_none_lowers_the_loss() -> None:
    found = Lengths(1.0, 0.5)
    assert _shortened(found, lambda _: 1.0, -1.0, -1.0, 1e-6) == Lengths(0.0, 0.0)
    assert _shortened(found, lambda _: math.nan, -1.0, -1.0, 1e-6) == Lengths(0.0, 0.0)
    assert _shortened(found, lambda one: 5 * one.step**2 - one.step, -1.0, -1.0, 1e-6) == Lengths(0.125, 0.0625)
    assert _shortened(found, lambda _: 1e-9, -1e-9, -1e-9, 1e-6).step == 1 / 64, "rounding hides what it brings"
    assert Lengths(0.4, 0.2).after(Lengths(0.0, 0.0)) == Lengths(0.4, 0.2), "it goes on afterwards"
    assert after_steps(1e-3, 1e-3, 1, adapts=False) == pytest.approx(1e-2)
    assert after_steps(FARTHEST, 1.0, 1, adapts=False) == FARTHEST


class Steep(nn.Module):
    """Flat where it begins, and a wall soon after, of which slope and curvature know nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[0.0, 1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        return z + 1e8 * z**5


def test_a_wall_raises_the_damping_until_steps_are_short_enough() -> None:
    model = Steep()
    optimizer = KFAC(model)
    x, y = torch.tensor([[1.0, 0.0]]), torch.ones(1, 1)

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x), y)

    losses = train(model, optimizer, loss, 2)
    assert losses[0] == losses[1] == 1.0, "no step was made"
    assert optimizer.lengths == Lengths(0.0, 0.0) and optimizer.damping == pytest.approx(1e-3)
    with pytest.warns(UserWarning, match="3 times in a row; no step is made"):
        losses += train(model, optimizer, loss, 40)
    assert optimizer.skipped >= 2 and max(losses) == 1.0 and losses[-1] < 0.95


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("fresh", [False, True])
def test_differential_equations_with_the_default_periods(seed: int, fresh: bool) -> None:
    model = pinn.poisson(
        net(seed, width=32), source=lambda points: 2 * math.pi**2 * (math.pi * points).sin().prod(dim=1)
    )
    optimizer = KFAC(model)
    inside, losses = torch.rand(300, 2), []
    for _step in range(60):
        inside = torch.rand(300, 2) if fresh else inside
        optimizer.zero_grad()
        loss = model(inside, EDGE).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert max(losses) < 1.3 * losses[0] and losses[-1] < losses[0] / 100


def test_the_default_bound_gets_further_than_a_wide_one() -> None:
    ends = []
    for options in ({}, {"clip": 1e-2}):
        model = net(width=64)
        points = torch.rand(1000, 2) * 2 - 1
        values = (6 * points[:, :1]).sin() * (4 * points[:, 1:]).cos()
        optimizer, losses = KFAC(model, lr=0.03, **options), []
        for _step in range(150):
            rows = torch.randint(1000, (250,))
            optimizer.zero_grad()
            loss = F.mse_loss(model(points[rows]), values[rows])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        ends.append(losses[-1] / losses[0])
    assert ends[0] < 0.05 and ends[0] < 0.7 * ends[1]
