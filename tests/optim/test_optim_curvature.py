"""The factors of K-FAC against the exact Gauss-Newton matrix, its Monte-Carlo estimate and per-sample gradients."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from diamond.optim.losses import Outcome
from tests.optim.curved import close, factors_of, ggn, kron, no_modes, stepped

_ = pytest.fixture(autouse=True)(no_modes)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def deep_linear(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5, bias), nn.Linear(5, 3, bias), nn.Linear(3, 2, bias))


X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.ones(6, 2)
mse = partial(F.mse_loss, target=Y)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("layer", ["0", "1", "2"])
def test_exact_on_linear_networks(layer: str, reduction: str, bias: bool) -> None:
    model = deep_linear(bias)
    found = factors_of(model, X, lambda out: F.mse_loss(out, Y, reduction=reduction))
    wanted = ggn(model, X, lambda out: F.mse_loss(out.reshape(6, 2), Y.double(), reduction=reduction), layer)
    close(kron(found[layer]), wanted)


@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_exact_on_one_sample_of_any_network(layer: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3))
    target = torch.tensor([2])
    found = factors_of(model, X[:1], lambda out: F.cross_entropy(out, target))
    close(kron(found[layer]), ggn(model, X[:1], lambda out: F.cross_entropy(out.reshape(1, 3), target), layer))


@pytest.mark.parametrize("classes", [False, True])
def test_monte_carlo_comes_to_the_exact(classes: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    labels, numbers = torch.randint(0, 3, (6,)), torch.randn(6, 3)

    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out, labels) if classes else F.mse_loss(out, numbers)

    exact = factors_of(model, X, loss)
    draws = [factors_of(model, X, loss, curvature="ggn-mc", seed=seed) for seed in range(200)]
    for layer in ("0", "2"):
        several = torch.stack([kron(one[layer]) for one in draws])
        wanted = kron(exact[layer])
        spread = several.std(0) / len(draws) ** 0.5
        # 4.5 standard errors for each entry, of a few hundred entries
        assert bool(((several.mean(0) - wanted).abs() <= 4.5 * spread + 1e-6).all())
        assert float((several.mean(0) - wanted).norm() / wanted.norm()) < 0.15


def test_empirical_is_of_the_gradients_of_single_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    _, g = factors_of(model, X, mse, curvature="empirical")["2"]
    wanted = torch.zeros(2, 2)
    for x, y in zip(X, Y, strict=True):
        out = model(x).detach().requires_grad_()
        (own,) = torch.autograd.grad((out - y).square().sum(), out)
        wanted += torch.outer(own, own)
    assert g is not None
    close(g[0], wanted / Y.numel())


@pytest.mark.parametrize("curvature", ["ggn-exact", "empirical"])
def test_a_batch_twice_has_the_same_factors(curvature: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    once = factors_of(model, X, mse, curvature=curvature)
    twice = factors_of(model, torch.cat([X, X]), lambda out: F.mse_loss(out, torch.cat([Y, Y])), curvature=curvature)
    for name, (a, g) in once.items():
        assert g is not None and twice[name][1] is not None
        close(twice[name][0], a, 1e-5)
        close(twice[name][1], g, 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_weights_shared_over_positions(sharing: str) -> None:
    """Each position mixed with the others afterwards, so that gradients at one depend on the loss at another."""
    layer, mix = nn.Linear(4, 3), torch.randn(5, 5)
    x, y = torch.randn(6, 5, 4), torch.randn(6, 5, 3)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("pq,nqd->npd", mix, self.layer(x))

    a, g = factors_of(Mixed(), x, lambda out: F.mse_loss(out, y), sharing=sharing)["layer"]
    inputs = torch.cat([x, torch.ones(6, 5, 1)], dim=2)
    # gradients at (sample, position, output) for each of a sample's 15 squared terms
    b = 2**0.5 * torch.einsum("pq,de->pdqe", mix, torch.eye(3)).reshape(15, 5, 3)
    if sharing == "expand":
        rows = inputs.reshape(-1, 5)
        wanted_a, wanted_g = rows.T @ rows / 30, torch.einsum("kqd,kqe->de", b, b) * 6 / y.numel()
    else:
        rows = inputs.mean(1)
        wanted_a, wanted_g = rows.T @ rows / 6, torch.einsum("kd,ke->de", b.sum(1), b.sum(1)) * 6 / y.numel()
    assert g is not None
    close(a[0], wanted_a)
    close(g[0], wanted_g)


def test_rows_that_are_positions_of_a_sample_are_told_apart() -> None:
    """Logits flattened to (samples * positions, classes), as language models do: still the exact curvature."""
    mix = torch.randn(3, 3)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("pq,nqd->npd", mix, self.layer(x))

    model, x, y = Mixed(), torch.randn(5, 3, 4), torch.randint(0, 2, (5, 3))
    flat = factors_of(model, x, lambda out: F.cross_entropy(out.reshape(-1, 2), y.reshape(-1)))["layer"]
    whole = factors_of(model, x, lambda out: F.cross_entropy(out.transpose(1, 2), y))["layer"]
    close(kron(flat), kron(whole), 1e-5)


def test_samples_that_meet_do_not_add_up() -> None:
    """Batch normalisation mixes samples: random signs keep the estimate right on average."""
    y = torch.randn(8, 2)
    rest = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    hidden = torch.randn(8, 3, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(rest, hidden)  # sample, output, sample, hidden
    wanted = 2 * torch.einsum("iknd,ikne->de", jacobian, jacobian) / y.numel()
    found = torch.zeros(3, 3)
    for seed in range(100):
        out = rest(hidden)
        for direction in Outcome(out, "mse", y.numel()).square_root(torch.Generator().manual_seed(seed)):
            (at,) = torch.autograd.grad(out, hidden, direction, retain_graph=True)
            found += at.T @ at / y.numel() / 100
    close(found, wanted, 0.1)


def test_several_forward_passes_are_one_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    whole = factors_of(model, X, mse)
    pieces = iter([Y[:2], Y[2:]])
    opt = stepped(model, [X[:2], X[2:]], lambda out: F.mse_loss(out, next(pieces)))
    for one in opt.factors:
        a, g = whole[one.block.name]
        assert g is not None
        close(one.a.mean(), a, 1e-5)
        close(one.g.mean(), g, 1e-5)
