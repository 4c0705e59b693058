"""How far K-FAC goes: against the exact parabola, where the loss cannot be followed, and over many steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.func import functional_call, jvp  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from diamond.optim import KFAC  # noqa: E402
from diamond.optim.lengths import MOST_MOMENTUM, MOST_WHEN_STILL, Lengths  # noqa: E402
from diamond.optim.uses import Thinning  # noqa: E402


def net(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def surrogate(number: int = 64) -> tuple[Any, Any]:
    torch.manual_seed(1)
    inputs = torch.randn(number, 6)
    return inputs, inputs[:, :2].sum(1, keepdim=True).tanh()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own jvp
def test_the_first_length_is_that_of_the_exact_parabola() -> None:
    inputs, targets = surrogate()
    model = net(6, 12, 1)
    optimizer = KFAC(model, damping=0.01)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    optimizer.step()
    step = {name: one.detach() - before[name] for name, one in model.named_parameters()}
    direction = {name: one / optimizer.lengths.step for name, one in step.items()}
    model.eval()  # the next training pass would be looked at again
    moved = jvp(lambda weights: functional_call(model, weights, inputs), (before,), (direction,))[1]
    slope = sum((gradients[name] * one).sum() for name, one in direction.items())
    curved = 2 * moved.square().mean() + 0.01 * sum(one.square().sum() for one in direction.values())
    exact = float(-slope / curved)
    halvings = round(torch.tensor(exact / optimizer.lengths.step).log2().item())
    assert 0 <= halvings <= 6
    assert optimizer.lengths.step * 2**halvings == pytest.approx(exact, rel=1e-2)


def value(loss: Callable[..., Any], model: Any, inputs: Any, targets: Any) -> float:
    with torch.no_grad():
        return float(loss(model, inputs, targets))


def test_momentum_is_bounded_and_lengths_grow_slowly() -> None:
    assert Lengths(4.0, 0.9).after(Lengths(1.0, 0.1)) == Lengths(2.0, 0.5)
    assert Lengths(0.1, 0.0).after(Lengths(1.0, 0.8)) == Lengths(0.1, 0.0)
    assert Lengths(1.9, 0.0).close_to(Lengths(1.0, 0.0)) and not Lengths(2.1, 0.0).close_to(Lengths(1.0, 0.0))
    inputs, targets = surrogate()
    model = net(6, 12, 1)
    optimizer = KFAC(model)
    for _ in range(60):
        chosen = torch.randperm(64)[:32]
        optimizer.zero_grad()
        F.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
        assert 0 <= optimizer.lengths.momentum <= MOST_MOMENTUM
        assert not optimizer.lengths.still


def test_a_batch_that_comes_again_leaves_nothing_to_be_careful_of() -> None:
    inputs, targets = surrogate()
    model = net(6, 12, 1)
    optimizer = KFAC(model, factor_every=1)
    kept = []
    for number in range(40):
        optimizer.zero_grad()
        F.mse_loss(model(inputs.clone()), targets).backward()
        optimizer.step()
        assert optimizer.lengths.still is (number > 0)
        kept.append(optimizer.lengths.momentum)
    assert min(kept) >= 0 and MOST_MOMENTUM < max(kept) <= MOST_WHEN_STILL
    assert Lengths(4.0, 0.9, still=True).after(Lengths(1.0, 0.1)) == Lengths(4.0, 0.9)
    F.mse_loss(model(inputs[:32]), targets[:32]).backward()
    optimizer.step()
    assert not optimizer.lengths.still


@pytest.mark.parametrize("batch", [8, 16, 64])
def test_nothing_has_to_be_tuned(batch: int) -> None:
    """Small batches and whole ones, many steps beyond what is there to learn."""
    inputs, targets = surrogate()
    model = net(6, 16, 16, 1)
    optimizer = KFAC(model)
    first = value(of_output, model, inputs, targets)
    for _ in range(250):
        chosen = torch.randperm(64)[:batch]
        optimizer.zero_grad()
        F.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    assert value(of_output, model, inputs, targets) < first / 100
    assert optimizer.skipped == 0


def of_output(model: Any, inputs: Any, targets: Any) -> Any:
    return F.mse_loss(model(inputs), targets)


def minus_target(model: Any, inputs: Any, targets: Any) -> Any:
    return (model(inputs).squeeze(1) - targets.squeeze(1)).square().mean()


def of_two(model: Any, inputs: Any, targets: Any) -> Any:
    output = model(inputs)
    return F.mse_loss(output, targets) + F.l1_loss(output, targets)


def scaled(model: Any, inputs: Any, targets: Any) -> Any:
    return F.mse_loss(3 * model(inputs), targets)


@pytest.mark.parametrize(
    ("loss", "followed"), [(of_output, True), (minus_target, True), (scaled, False), (of_two, False)]
)
def test_what_cannot_be_followed_is_said(loss: Callable[..., Any], followed: bool) -> None:
    inputs, targets = surrogate()
    model = net(6, 16, 1)
    optimizer = KFAC(model)
    first = value(loss, model, inputs, targets)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(60):
            optimizer.zero_grad()
            loss(model, inputs, targets).backward()
            optimizer.step()
    assert optimizer.measures is followed
    assert ["give KFAC a number for lr" in str(one.message) for one in said] == ([] if followed else [True])
    assert value(loss, model, inputs, targets) < 0.7 * first


def test_a_schedule_still_counts_where_the_loss_cannot_be_followed() -> None:
    inputs, targets = surrogate()
    model = net(6, 16, 1)
    optimizer = KFAC(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step >= 5 else 1.0)
    scaled(model, inputs, targets).backward()
    with pytest.warns(UserWarning, match="lr='auto' follows"):
        optimizer.step()
    lengths = []
    for _ in range(8):
        scheduler.step()
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        scaled(model, inputs, targets).backward()
        optimizer.step()
        lengths.append(sum((one - two).norm().item() for one, two in zip(before, model.parameters(), strict=True)))
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert lengths[3] > 0
    assert lengths[-1] == pytest.approx(0.9 * lengths[-2], rel=1e-3), "only the momentum of the last step is left"


def test_some_rows_tell_what_all_do() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 60_000, 6) @ torch.diag(torch.tensor([3.0, 2.0, 1.0, 1.0, 0.5, 0.1]))
    thin = Thinning(torch.Generator().manual_seed(0))
    some = thin.rows(rows, 6)
    assert some.shape == (1, 2048, 6)
    whole = (rows[0].T @ rows[0]) / 60_000
    assert torch.allclose(some[0].T @ some[0] / 2048, whole, atol=0.7)  # 9 * 3 / sqrt(2048) = 0.6 for the largest
    scaled_rows = thin.rows(rows, 6, scaled=True)
    assert torch.allclose(scaled_rows[0].T @ scaled_rows[0] / 60_000, whole, atol=0.7)
    assert thin.rows(rows[:, :4000], 6).shape == (1, 4000, 6), "few rows are all taken"
    pictures = torch.randn(64, 2, 40, 40)
    assert len(thin.samples(pictures, 1600, 18)) == 6
    assert len(thin.samples(pictures[:8], 1600, 18)) == 8


def test_stacked_blocks_are_preconditioned_as_single_ones_are() -> None:
    inputs, targets = surrogate()
    torch.manual_seed(0)

    class Own(nn.Linear):
        """On a CPU, plain ones are not stacked (see lean.py)."""

    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), Own(8, 8), nn.LayerNorm(8), nn.Tanh(),
        nn.Linear(8, 8, bias=False), nn.Tanh(), Own(8, 8), nn.Tanh(), nn.Linear(8, 1),
    )  # fmt: skip
    optimizer = KFAC(model, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer._curving.disarm()
    with torch.no_grad():
        together = optimizer.directions.find()
        assert [len(one.blocks) for one in optimizer.directions.stacks] == [1, 2, 2, 1, 1]
        assert len(together.parameters) == 13
        slope = 0.0
        for block in optimizer.blocks:
            bias = block.bias
            gradient = block.matrix(block.weight.grad, None if bias is None else bias.grad)
            single = optimizer.kept[block.index].apply(gradient)
            slope += float((single * gradient).sum())
            weight, rest = block.views(single)
            steps = dict(zip(map(id, together.parameters), together.tensors(), strict=True))
            assert torch.allclose(steps[id(block.weight)], weight, rtol=1e-4, atol=1e-7)
            assert bias is None or torch.allclose(steps[id(bias)], rest, rtol=1e-4, atol=1e-7)
    assert float(together.along) == pytest.approx(slope, rel=1e-5)
