"""Each optimizer against a few lines that do the same another way: number by number, by SVD, by Kronecker products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from diamond.optim.peers import LAMB, LARS, SOAP, Muon, ScheduleFreeAdamW

STEPS = 7
Numbers = list[float]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(*shape: int, steps: int = STEPS) -> list[torch.Tensor]:
    return [random(*shape, seed=100 + at) for at in range(steps)]


def driven(
    build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], start: torch.Tensor, grads: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """The parameter after one step per gradient, and its optimizer."""
    param = torch.nn.Parameter(start.clone())
    optimizer = build([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer


def norm(numbers: Numbers) -> float:
    return math.sqrt(sum(one * one for one in numbers))


def assert_close(found: torch.Tensor, wanted: Numbers | torch.Tensor, tolerance: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64).reshape(found.shape)
    assert float((found - wanted).abs().max()) < tolerance


def adam_numbers(grads: list[Numbers], betas: tuple[float, float], eps: float) -> Iterator[Numbers]:
    """Adam's direction at each step, from sums over all gradients so far rather than running averages."""
    for t in range(1, len(grads) + 1):
        found = []
        for i in range(len(grads[0])):
            mean = sum(betas[0] ** (t - s) * grads[s - 1][i] for s in range(1, t + 1))
            square = sum(betas[1] ** (t - s) * grads[s - 1][i] ** 2 for s in range(1, t + 1))
            mean /= sum(betas[0] ** (t - s) for s in range(1, t + 1))
            square /= sum(betas[1] ** (t - s) for s in range(1, t + 1))
            found.append(mean / (math.sqrt(square) + eps))
        yield found


# ---- LARS and LAMB ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2, 2), (5,), ()])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars(shape: tuple[int, ...], nesterov: bool) -> None:
    lr, momentum, decay, trust, eps = 0.5, 0.9, 0.02, 0.1, 1e-3
    start, grads = random(*shape, seed=1), gradients(*shape)
    p, buffer, adapts = start.flatten().tolist(), [0.0] * start.numel(), len(shape) > 1
    for grad in grads:
        g = grad.flatten().tolist()
        ratio = trust * norm(p) / (norm(g) + eps) if adapts else 1.0
        for i in range(len(p)):
            buffer[i] = momentum * buffer[i] + ratio * g[i]
        for i in range(len(p)):
            move = ratio * g[i] + momentum * buffer[i] if nesterov else buffer[i]
            p[i] = p[i] * (1 - lr * decay if adapts else 1) - lr * move
    options = {"momentum": momentum, "weight_decay": decay, "trust": trust, "eps": eps, "nesterov": nesterov}
    found, _ = driven(lambda params: LARS(params, lr, **options), start, grads)  # type: ignore[arg-type]
    assert_close(found, p)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2, 2), (5,), ()])
@pytest.mark.parametrize("max_trust", [None, 0.8])
@pytest.mark.parametrize("exclude_1d", [True, False])
def test_lamb(shape: tuple[int, ...], max_trust: float | None, exclude_1d: bool) -> None:
    lr, betas, eps, decay = 0.03, (0.8, 0.95), 1e-6, 0.1
    start, grads = random(*shape, seed=2), gradients(*shape)
    p, adapts = start.flatten().tolist(), len(shape) > 1 or not exclude_1d
    for direction in adam_numbers([grad.flatten().tolist() for grad in grads], betas, eps):
        u = [d + decay * w for d, w in zip(direction, p, strict=True)] if adapts else direction
        ratio = min(norm(p) / norm(u), max_trust or math.inf) if adapts else 1.0
        p = [w - lr * ratio * d for w, d in zip(p, u, strict=True)]
    found, _ = driven(
        lambda params: LAMB(
            params, lr, betas=betas, eps=eps, weight_decay=decay, max_trust=max_trust, exclude_1d=exclude_1d
        ),
        start,
        grads,
    )
    assert_close(found, p)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_weights_that_are_zero_can_leave_it_and_zero_gradients_do_no_harm(kind: type[LARS] | type[LAMB]) -> None:
    found, _ = driven(
        lambda params: kind(params, 0.1), torch.zeros(2, 2, dtype=torch.float64), gradients(2, 2, steps=1)
    )
    assert float(found.abs().min()) > 0
    start = random(2, 2, seed=1)
    still, _ = driven(lambda params: kind(params, 0.1, weight_decay=0.0), start, [torch.zeros_like(start)])
    assert torch.equal(still, start)


# ---- SOAP ------------------------------------------------------------------------------------------------------------


def soap_by_kronecker(
    start: torch.Tensor, grads: list[torch.Tensor], dims: tuple[int, ...], every: int, decay: float
) -> torch.Tensor:
    """On the flattened gradient, with the whole basis as one matrix and the momentum in the parameter's own space."""
    lr, (beta1, beta2), eps = 0.05, (0.9, 0.8), 1e-8
    shape = start.shape

    def factor(grad: torch.Tensor, dim: int) -> torch.Tensor:
        size = shape[dim]
        found = torch.zeros(size, size, dtype=torch.float64)
        for a in range(size):
            for b in range(size):
                found[a, b] = (grad.select(dim, a) * grad.select(dim, b)).sum()
        return found

    def joined(bases: dict[int, torch.Tensor]) -> torch.Tensor:
        found = torch.ones(1, 1, dtype=torch.float64)
        for dim, size in enumerate(shape):
            found = torch.kron(found, bases.get(dim, torch.eye(size, dtype=torch.float64)).contiguous())
        return found

    factors = {dim: (1 - beta2) * factor(grads[0], dim) for dim in dims}
    bases = {dim: torch.linalg.svd(factors[dim]).U for dim in dims}
    p, mean, square = start.flatten(), torch.zeros(start.numel()).double(), torch.zeros(start.numel()).double()
    for t, grad in enumerate(grads[1:], start=1):
        basis = joined(bases)
        mean = beta1 * mean + (1 - beta1) * grad.flatten()
        square = beta2 * square + (1 - beta2) * (basis.T @ grad.flatten()) ** 2
        adam = (basis.T @ mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + eps)
        p = (1 - lr * decay) * p - lr * (basis @ adam)
        for dim in dims:
            factors[dim] = beta2 * factors[dim] + (1 - beta2) * factor(grad, dim)
            if t % every == 0:
                sizes = torch.einsum("ji,jk,ki->i", bases[dim], factors[dim], bases[dim])
                order = sorted(range(len(sizes)), key=lambda i: -float(sizes[i]))
                square = square.view(shape).index_select(dim, torch.tensor(order)).flatten()
                bases[dim] = gram_schmidt(factors[dim] @ bases[dim][:, order])
    return p


def gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    columns: list[torch.Tensor] = []
    for column in matrix.T:
        for _ in range(2):
            for before in columns:
                column = column - (before @ column) * before
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


# Shapes whose first gradient leaves no eigenvalue at zero: there, eigenvectors are any.
@pytest.mark.parametrize(
    ("shape", "max_dim", "dims"),
    [
        ((5, 5), 10, (0, 1)),
        ((6, 4), 4, (1,)),
        ((4, 6), 5, (0,)),
        ((3, 2, 2, 2), 10, (0, 1, 2, 3)),
        ((3, 1, 3), 9, (0, 2)),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_soap(shape: tuple[int, ...], max_dim: int, dims: tuple[int, ...], every: int) -> None:
    start, grads = random(*shape, seed=3), gradients(*shape, steps=10)
    found, optimizer = driven(
        lambda params: SOAP(
            params, 0.05, betas=(0.9, 0.8), weight_decay=0.1, precondition_every=every, max_dim=max_dim
        ),
        start,
        grads,
    )
    assert_close(found, soap_by_kronecker(start, grads, dims, every, decay=0.1), 1e-8)
    (state,) = optimizer.state.values()
    assert {key for key in state if key.startswith("basis_")} == {f"basis_{dim}" for dim in dims}


@pytest.mark.parametrize(("shape", "max_dim"), [((5,), 10), ((), 10), ((4, 5), 3), ((1, 1), 3)])
def test_soap_is_adamw_where_nothing_can_be_rotated(shape: tuple[int, ...], max_dim: int) -> None:
    start, grads = random(*shape, seed=4), gradients(*shape)
    found, _ = driven(lambda params: SOAP(params, 0.1, weight_decay=0.2, max_dim=max_dim), start, grads)
    wanted, _ = driven(lambda params: torch.optim.AdamW(params, 0.1, (0.95, 0.95), weight_decay=0.2), start, grads)
    assert_close(found, wanted)


def test_soap_comes_to_the_eigenbasis_of_its_factors() -> None:
    scales = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5]).double()
    turn = torch.linalg.qr(random(5, 5, seed=9)).Q
    grads = [turn * scales @ random(5, 5, seed=200 + at) for at in range(300)]
    _, optimizer = driven(
        lambda params: SOAP(params, factor_beta=0.99, precondition_every=1), random(5, 5, seed=1), grads
    )
    (state,) = optimizer.state.values()
    inside = state["basis_0"].T @ state["factor_0"] @ state["basis_0"]
    assert float((inside - inside.diag().diag()).norm() / inside.norm()) < 0.01
    assert float((state["basis_0"].T @ state["basis_0"] - torch.eye(5)).abs().max()) < 1e-12


# ---- Muon ------------------------------------------------------------------------------------------------------------


def muon_by_svd(start: torch.Tensor, grads: list[torch.Tensor], *, nesterov: bool, factor: float) -> torch.Tensor:
    """The iteration acts on singular values alone, so it is done on them."""
    lr, decay, momentum = 0.1, 0.05, 0.9
    p, buffer = start.flatten(1), torch.zeros_like(start.flatten(1))
    for grad in grads:
        matrix = grad.flatten(1)
        buffer = momentum * buffer + (1 - momentum) * matrix
        moving = (1 - momentum) * matrix + momentum * buffer if nesterov else buffer
        left, values, right = torch.linalg.svd(moving, full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        p = p - lr * decay * p - lr * factor * (left * values) @ right
    return p


@pytest.mark.parametrize(
    ("shape", "adjust", "factor"),
    [
        ((6, 3), "original", math.sqrt(2)),
        ((3, 6), "original", 1.0),
        ((4, 2, 3, 3), "original", 1.0),
        ((3, 6), "match_rms_adamw", 0.2 * math.sqrt(6)),
    ],
)
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon(shape: tuple[int, ...], adjust: str, factor: float, nesterov: bool) -> None:
    start, grads = random(*shape, seed=5), gradients(*shape)
    found, _ = driven(
        lambda params: Muon(params, 0.1, weight_decay=0.05, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust),
        start,
        grads,
    )
    assert_close(found, muon_by_svd(start, grads, nesterov=nesterov, factor=factor), 1e-11)


def test_muon_is_torchs_muon_and_torchs_adamw() -> None:
    shapes = [(8, 5), (5, 8), (8, 5), (6,)]
    ours = [torch.nn.Parameter(random(*shape, seed=6).float()) for shape in shapes]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    optimizer = Muon(ours, 0.02, weight_decay=0.1, adamw_lr=0.01, betas=(0.9, 0.99))
    peers = [
        torch.optim.Muon(theirs[:3], lr=0.02, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(theirs[3:], lr=0.01, betas=(0.9, 0.99), weight_decay=0.01),
    ]
    for step in range(STEPS):
        for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = random(*mine.shape, seed=50 * step + at).float()
            other.grad = mine.grad.clone()
        for one in (optimizer, *peers):
            one.step()
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert float((mine - other).detach().abs().max()) < 1e-3, "a twentieth of one step: both iterate in bfloat16"
    assert_close(ours[3].detach().double(), theirs[3].detach().double(), 1e-6)


# ---- Schedule-Free ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup", "power"), [(0, 0.0), (4, 0.0), (3, 1.5)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_schedule_free(warmup: int, power: float, decay: float) -> None:
    lr, (beta1, beta2), eps = 0.1, (0.9, 0.95), 1e-8
    start, grads = random(3, 2, seed=7), gradients(3, 2)
    z, x, square = start.flatten().tolist(), start.flatten().tolist(), [0.0] * 6
    rates, weights = [], []
    for t, grad in enumerate(grads, start=1):
        g = grad.flatten().tolist()
        rates.append(lr * min(1.0, t / warmup) if warmup else lr)
        weights.append(t**power * max(rates) ** 2)
        part = weights[-1] / sum(weights)
        for i in range(6):
            y = (1 - beta1) * z[i] + beta1 * x[i]
            square[i] = beta2 * square[i] + (1 - beta2) * g[i] ** 2
            z[i] -= rates[-1] * (g[i] / (math.sqrt(square[i] / (1 - beta2**t)) + eps) + decay * y)
            x[i] = (1 - part) * x[i] + part * z[i]
    options = {"betas": (beta1, beta2), "weight_decay": decay, "warmup_steps": warmup, "averaging_power": power}
    found, optimizer = driven(lambda params: ScheduleFreeAdamW(params, lr, **options), start, grads)  # type: ignore[arg-type]
    assert isinstance(optimizer, ScheduleFreeAdamW)
    assert_close(found, [(1 - beta1) * a + beta1 * b for a, b in zip(z, x, strict=True)])
    (param,) = optimizer.param_groups[0]["params"]
    optimizer.eval()
    optimizer.eval()
    assert_close(param.detach(), x)
    optimizer.train()
    optimizer.train()
    assert_close(param.detach(), found)
