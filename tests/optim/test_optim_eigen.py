"""EKFAC: the curvature in the factors' eigenbases is that of whole samples, whose positions move together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from diamond.optim import KFAC
from diamond.optim.precondition import Eigen, eigenbases_of
from tests.optim.test_optim_layers import gradients, seen

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (6, 4)),
    "sequence": (lambda: nn.Linear(4, 3), (5, 7, 4)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1), (5, 2, 6, 4)),
    "groups": (lambda: nn.Conv1d(4, 6, 3, groups=2, bias=False), (5, 4, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 2, stride=2, bias=False), (4, 3, 3, 2)),
    "no batch": (lambda: nn.Conv2d(2, 3, 3), (2, 6, 5)),
}


def turned(number: int, size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(number, size, size))[0]


@pytest.mark.parametrize("name", LAYERS)
def test_squares_are_of_the_gradients_of_samples(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x = make(), torch.randn(shape)
    (use,), out = seen(model, x)
    direction = torch.randn_like(out)
    block = use.block
    eigen = Eigen(
        turned(block.copies, block.a), turned(block.copies, block.g), torch.ones(block.copies, block.g, block.a), 0.0
    )
    found = eigen.squares(use, gradients([use], out, direction)[0], "expand")
    wanted = torch.zeros_like(found)
    batched = zip(x, direction, strict=True) if name != "no batch" else [(x, direction)]
    for one, slope in batched:
        model.zero_grad()
        model(one if name == "no batch" else one[None]).backward(slope if name == "no batch" else slope[None])
        bias = block.bias
        gradient = block.matrix(block.weight.grad, None if bias is None else bias.grad)
        wanted += torch.bmm(torch.bmm(eigen.g.transpose(1, 2), gradient), eigen.a).square()
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.max()))


def test_moments_grow_at_once_and_keep_their_sum_in_another_basis() -> None:
    eigen = Eigen(turned(1, 2), turned(1, 2), torch.ones(1, 2, 2), 0.0)
    eigen.learn(torch.full((1, 2, 2), 100.0), 0.9)
    assert torch.allclose(eigen.moments, torch.full((1, 2, 2), 100.0)), "products of positions may be far too small"
    eigen.learn(torch.full((1, 2, 2), 50.0), 0.9)
    assert torch.allclose(eigen.moments, torch.full((1, 2, 2), 95.0))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = KFAC(model, lr=1e-3, kind="ekfac")
    x = torch.randn(16, 3)
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    kept = optimizer.kept[0]
    assert isinstance(kept, Eigen)
    kept.moments.mul_(7.0)
    again = eigenbases_of(optimizer.factors, 1e-3, optimizer.kept)[0]
    assert isinstance(again, Eigen)
    assert float(again.moments.sum()) == pytest.approx(float(kept.moments.sum()), rel=1e-4)
    alone = eigenbases_of(optimizer.factors, 1e-3, {})[0]
    assert float(again.moments.sum()) == pytest.approx(7.0 * float(alone.tensors()[2].sum()), rel=1e-4)
