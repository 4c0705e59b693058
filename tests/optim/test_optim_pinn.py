"""Networks that are solutions: their derivatives, their residuals, and what K-FAC makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import Tensor, nn  # noqa: E402
from torch.func import hessian, jacfwd, jacrev, vmap  # noqa: E402

from diamond.optim import KFAC, OptimError, pinn  # noqa: E402
from diamond.optim.capture import Capture  # noqa: E402
from diamond.optim.covered import coverage  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own derivatives

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU(approximate="tanh"),
    "softplus": lambda: nn.Softplus(beta=3.0),
    "sine": lambda: pinn.Sine(2.0),
    "own": lambda: pinn.Smooth(torch.atan, lambda z: 1 / (1 + z**2), lambda z: -2 * z / (1 + z**2) ** 2),
}


def net(dimensions: int = 2, activation: str = "tanh", width: int = 7, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    between = ACTIVATIONS[activation]()
    layers = nn.Linear(dimensions, width), between, nn.Linear(width, width), between, nn.Linear(width, outputs)
    return nn.Sequential(*layers).double()


def some(number: int, dimensions: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(number, dimensions, dtype=torch.float64, generator=generator) * 4 - 2


# ---- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_derivatives_are_those_of_torch(activation: str) -> None:
    model, points = net(3, activation, outputs=2), some(5, 3)
    jet = pinn.derivatives(model, points, first=(2, 0), second=((1.0, 1.0, 1.0), (0.0, 0.5, 0.0)))
    slopes = vmap(jacfwd(model))(points)  # (points, outputs, axes)
    bends = vmap(hessian(model))(points)
    assert torch.allclose(jet.value, model(points), atol=1e-12)
    assert torch.allclose(jet.first, slopes[..., [2, 0]].movedim(-1, 0), atol=1e-11)
    assert torch.allclose(jet.laplacian, bends.diagonal(dim1=2, dim2=3).sum(-1), atol=1e-10)
    assert torch.allclose(jet.second[1], 0.5 * bends[..., 1, 1], atol=1e-10)


def test_the_laplacian_is_the_default_and_linear_maps_have_none() -> None:
    points = some(4)
    assert torch.allclose(
        pinn.derivatives(net(), points).second, pinn.derivatives(net(), points, second=((1.0, 1.0),)).second
    )
    jet = pinn.derivatives(nn.Linear(2, 1).double(), points, first=(0,))
    assert torch.equal(jet.laplacian, torch.zeros(4, 1, dtype=torch.float64))


def test_layers_within_layers_and_weights_computed_from_others() -> None:
    inner = nn.Sequential(nn.Identity(), nn.utils.parametrizations.weight_norm(nn.Linear(2, 5)), nn.SiLU())
    model = nn.Sequential(inner, nn.Linear(5, 1)).double()
    points = some(3)
    expected = vmap(hessian(model))(points).diagonal(dim1=2, dim2=3).sum(-1)
    assert torch.allclose(pinn.derivatives(model, points).laplacian, expected, atol=1e-12)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), r"net\.1, a ReLU; .*pinn\.Smooth"),
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.LayerNorm(3))), r"net\.1\.0, a LayerNorm"),
        (lambda: nn.Sequential(Own(2, 1)), r"net\.0, a Own"),
        (lambda: nn.Sequential(nn.Tanh()), "no Linear layer"),
    ],
)
def test_layers_that_cannot_be_carried_are_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(OptimError, match=message):
        pinn.poisson(make(), source=lambda points: 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pinn.derivatives(net(), some(4, 3)), r"points: its shape is \(4, 3\); give \(points, 2\)"),
        (lambda: pinn.derivatives(net(), some(4).float()), "torch.float32, the network's torch.float64"),
        (lambda: pinn.derivatives(net(), some(4), first=(2,)), "first: there is no axis 2; give some of 0 to 1"),
        (lambda: pinn.derivatives(net(), some(4), second=((1.0,),)), "second: a row has 1 numbers"),
        (lambda: pinn.poisson(net(), source=lambda x: 0.0, weight=0.0), "the weight of inside is 0.0"),
        (lambda: pinn.poisson(net(), source=lambda x: 0.0)(some(4)), "1 sets were given; .* inside, boundary"),
        (lambda: pinn.poisson(net(), source=lambda x: x)(some(4), some(2)), r"source: at 4 points .* \(4, 2\)"),
        (lambda: pinn.poisson(net(), source=lambda x: 0.0)(some(4), some(0)), "boundary: .* at least one point"),
        (lambda: pinn.heat(net(1), initial=lambda x: 0.0), "places first and time last"),
        (lambda: pinn.heat(net(), initial=lambda x: 0.0, diffusivity=-1.0), "diffusivity is -1.0; give a number"),
        (lambda: pinn.Residuals(net(), []), "conditions: there are none"),
    ],
)
def test_what_does_not_fit_is_said(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptimError, match=message):
        call()


# ---- equations -----------------------------------------------------------------------------------------------------


def test_the_residual_of_poisson() -> None:
    model = net(3)
    residuals = pinn.poisson(model, source=lambda x: x.sum(1), boundary=lambda x: x[:, :1], weight=0.25)
    inside, boundary = some(6, 3), some(2, 3)
    laplacian = vmap(hessian(model))(inside).diagonal(dim1=2, dim2=3).sum(-1)[:, 0]
    mean_square = (-laplacian - inside.sum(1)).square().mean()
    expected = 0.25 * mean_square + (model(boundary)[:, 0] - boundary[:, 0]).square().mean()
    assert torch.allclose(residuals(inside, boundary).square().sum(), expected)


def test_exact_solutions_leave_nothing() -> None:
    """A network of one sine is a solution of the heat equation along one axis only by luck; this one is by choice."""
    wave = nn.Sequential(nn.Linear(2, 1), pinn.Sine(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        wave[0].weight.copy_(torch.tensor([[2.0, 0.0]]))
        wave[0].bias.fill_(0.3)
        wave[2].weight.fill_(1.5)
        wave[2].bias.fill_(0.0)

    def truth(points: Tensor) -> Tensor:
        return 1.5 * torch.sin(2 * points[:, 0] + 0.3)

    still = pinn.poisson(wave, source=lambda x: 4 * truth(x), boundary=truth)
    assert float(still(some(5), some(3)).detach().abs().max()) < 1e-12
    kept_up = pinn.heat(wave, truth, truth, source=lambda x: 0.5 * 4 * truth(x), diffusivity=0.5)
    assert float(kept_up(some(5), some(3), some(4)).detach().abs().max()) < 1e-12
    assert float(pinn.heat(wave, truth, truth)(some(5), some(3), some(4)).detach().abs().max()) > 0.1


def test_the_residual_of_heat() -> None:
    model = net(3)
    residuals = pinn.heat(model, initial=lambda x: x[:, 0], diffusivity=0.3, initial_weight=2.0)
    inside, boundary, initial = some(6, 3), some(2, 3), some(4, 3)
    slope = vmap(jacfwd(model))(inside)[:, 0, 2]
    bends = vmap(hessian(model))(inside)[:, 0].diagonal(dim1=1, dim2=2)
    found = residuals(inside, boundary, initial)
    assert torch.allclose(found[:6] * math.sqrt(6), slope - 0.3 * bends[:, :2].sum(1))
    assert torch.allclose(found[6:8] * math.sqrt(2), model(boundary)[:, 0])
    assert torch.allclose(found[8:], math.sqrt(2 / 4) * (model(initial) - initial[:, :1])[:, 0])


def test_conditions_of_ones_own() -> None:
    """A flow through a wall: the slope across it is given."""
    wall = pinn.Condition(name="wall", residual=lambda points, jet: jet.first[0] - 1, weight=3.0, first=(1,))
    model, points = net(), some(5)
    found = pinn.Residuals(model, [wall])(points)
    assert torch.allclose(found, math.sqrt(3 / 5) * (vmap(jacfwd(model))(points)[:, 0, 1] - 1))


# ---- K-FAC ---------------------------------------------------------------------------------------------------------


def test_every_layer_is_covered_and_derivatives_add_no_bias() -> None:
    model = pinn.poisson(net(), source=lambda x: 1.0)
    assert coverage(model).covered == sum(one.numel() for one in model.parameters())
    optimizer = KFAC(model)
    seen = Capture(optimizer.blocks, None)
    seen.begin(model)
    model(some(6), some(2))
    seen.leave()
    uses = [(use.block.name, len(use.inputs), use.options["bias"]) for use in seen.uses]
    # slopes along two axes; second derivatives from the first bend on
    assert uses == [
        ("net.0", 8, True), ("net.0", 12, False),
        ("net.2", 8, True), ("net.2", 18, False),
        ("net.4", 8, True), ("net.4", 6, False),
    ]  # fmt: skip


def pieces(
    model: nn.Sequential, inside: Tensor, boundary: Tensor, taps: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Residuals of -Laplace u = 1 by hand, for two layers; taps are added where weights give something, and what goes
    into the weights comes back as well."""
    first, last = model[0], model[2]
    points = torch.cat([inside, boundary])
    z = points @ first.weight.T + first.bias + taps["values"]
    slopes = first.weight.T[:, None] + taps["slopes"]
    y, bent = z.tanh(), (-2 * z.tanh() / z.cosh() ** 2)[: len(inside)] * slopes.square().sum(0)
    laplacian = bent @ last.weight.T + taps["sums"]
    u = y @ last.weight.T + last.bias + taps["outputs"]
    left = (laplacian[:, 0] + 1) / math.sqrt(len(inside))
    out = u[len(inside) :, 0] / math.sqrt(len(boundary))
    axes = torch.eye(2, dtype=points.dtype).repeat_interleave(len(inside), 0)
    return torch.cat([left, out]), {"values": points, "slopes": axes, "outputs": y, "sums": bent}


def product(kinds: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The Kronecker product with the partial traces of a sum of such, from the means and sums over uses."""
    terms = [(a.T @ a / len(a), g.T @ g) for a, g in kinds]
    whole = sum(a.trace() * g.trace() for a, g in terms)
    inputs, outputs = sum(g.trace() * a for a, g in terms), sum(a.trace() * g for a, g in terms)
    return torch.kron(outputs, inputs) / whole


def test_the_factors_are_those_of_all_uses() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inside, boundary = some(6), some(3)
    residuals = pinn.poisson(model, source=lambda x: 1.0)
    optimizer = KFAC(residuals, lr=0.0, curvature="ggn-exact")
    shapes = {"values": (9, 4), "slopes": (2, 6, 4), "sums": (6, 1), "outputs": (9, 1)}
    taps = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    _, inputs = pieces(model, inside, boundary, taps)
    by_tap = jacrev(lambda some_taps: pieces(model, inside, boundary, some_taps)[0])(taps)
    # every residual depends on one position of each kind, so that a sum over residuals is one over positions
    gradients = {name: math.sqrt(2) * one.sum(0).reshape(-1, one.shape[-1]).detach() for name, one in by_tap.items()}
    ones = {name: torch.full((len(one), 1), float(name in ("values", "outputs"))) for name, one in inputs.items()}
    rows = {name: torch.cat([one, ones[name].double()], dim=1).detach() for name, one in inputs.items()}
    residuals(inside, boundary).square().sum().backward()
    optimizer.step()
    for place, kinds in enumerate((("values", "slopes"), ("outputs", "sums"))):
        factors = optimizer.factors[place]
        found = torch.kron(factors.g.mean()[0], factors.a.mean()[0]).double()
        expected = product([(rows[kind], gradients[kind]) for kind in kinds])
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_the_last_layer_of_a_single_condition_is_exact() -> None:
    """Its curvature is a Kronecker product, one side of which is a number."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    condition = pinn.Condition(name="value", residual=lambda points, jet: jet.value, weight=3.0)
    residuals, points = pinn.Residuals(model, [condition]), some(7)
    optimizer = KFAC(residuals, lr=0.0, curvature="ggn-exact")
    residuals(points).square().sum().backward()
    optimizer.step()
    rows = torch.cat([model[1](model[0](points)), torch.ones(7, 1, dtype=torch.float64)], dim=1).detach()
    factors = optimizer.factors[1]
    assert torch.allclose((factors.g.mean() * factors.a.mean())[0].double(), 2 * 3.0 / 7 * rows.T @ rows, rtol=1e-4)


@pytest.mark.parametrize("curvature", ["ggn-exact", "ggn-mc"])
def test_k_fac_solves_poisson(curvature: str) -> None:
    """u = x (1 - x) on a line, with all points in every step; no step is tuned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    residuals = pinn.poisson(model, source=lambda points: 2.0)
    optimizer = KFAC(residuals, damping=1e-6, curvature=curvature, factor_every=1, inverse_every=1)
    inside, ends = torch.linspace(0.02, 0.98, 40)[:, None], torch.tensor([[0.0], [1.0]])
    for _ in range(60):
        optimizer.zero_grad()
        residuals(inside, ends).square().sum().backward()
        optimizer.step()
    truth = inside * (1 - inside)
    assert optimizer.measures and optimizer.lengths.still
    assert float((model(inside) - truth).detach().norm() / truth.norm()) < 1e-2
