"""The factors against those of curvlinops, an independent implementation, which gave the numbers below.

They are of its KFACLinearOperator (3.0.1: fisher_type="type-2", weight and bias together) on the same networks and
samples: of each layer's matrix the trace, the Frobenius norm, and its product with 1, 2, 3, … summed against
cos(0), cos(1), …, which depends on every entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.optim.curved import factors_of, no_modes

_ = pytest.fixture(autouse=True)(no_modes)

# By network and sharing: for each layer trace, norm, and that product.
CURVLINOPS: dict[tuple[str, str], dict[str, tuple[float, float, float]]] = {
    ("squares", "expand"): {"0": (2.028087, 0.8157826, -2.461772), "2": (5.106835, 2.14367, 72.3659)},
    ("squares", "reduce"): {"0": (2.028087, 0.8157826, -2.461772), "2": (5.106835, 2.14367, 72.3659)},
    ("classes", "expand"): {"0": (0.6685308, 0.3061909, -0.3028347), "2": (1.521952, 0.8342582, -0.5763026)},
    ("classes", "reduce"): {"0": (0.6685308, 0.3061909, -0.3028347), "2": (1.521952, 0.8342582, -0.5763026)},
    ("pictures", "expand"): {"0": (8.895628, 1.501705, 52.29841), "3": (7.852925, 2.774865, 63.88774)},
    ("pictures", "reduce"): {"0": (2.139329, 1.323678, 52.92834), "3": (7.852925, 2.774865, 63.88774)},
}


def waves(*shape: int, by: float = 0.7) -> Tensor:
    """Numbers that are the same everywhere, and not in a row."""
    count = int(torch.tensor(shape).prod())
    return torch.sin(by * torch.arange(1, count + 1, dtype=torch.float64).square()).reshape(shape).float()


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for place, one in enumerate(model.parameters()):
            one.copy_(0.5 * waves(*one.shape, by=0.3 + 0.1 * place))
    return model


def perceptron() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def convolution() -> nn.Module:
    return filled(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)))


X, Y, CLASSES = waves(8, 4), waves(8, 3, by=0.9), torch.arange(8) % 3
PICTURES = waves(5, 2, 4, 4)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor, Callable[[Tensor], Tensor]]] = {
    "squares": (perceptron, X, Y, lambda output: F.mse_loss(output, Y)),
    "classes": (perceptron, X, CLASSES, lambda output: F.cross_entropy(output, CLASSES)),
    "pictures": (convolution, PICTURES, CLASSES[:5], lambda output: F.cross_entropy(output, CLASSES[:5])),
}


def summary(matrix: Tensor) -> tuple[float, float, float]:
    values = matrix.double()
    places = torch.arange(len(values), dtype=torch.float64)
    return float(values.trace()), float(values.norm()), float(torch.cos(places) @ values @ (places + 1))


@pytest.mark.parametrize(("name", "sharing"), list(CURVLINOPS))
def test_factors_are_those_of_another_implementation(name: str, sharing: str) -> None:
    make, inputs, _targets, take = NETWORKS[name]
    found: dict[str, Any] = factors_of(make(), inputs, take, sharing=sharing)
    assert set(found) == set(CURVLINOPS[name, sharing])
    for layer, (a, g) in found.items():
        ours = torch.kron(g[0], a[0])
        assert summary(ours) == pytest.approx(CURVLINOPS[name, sharing][layer], rel=1e-4), layer
