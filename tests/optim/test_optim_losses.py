"""The losses a user may take: their curvature at the output against the Hessian of the very same expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diamond.optim.errors import OptimError
from diamond.optim.kfac import KFAC
from diamond.optim.losses import NAMES, Outcome, of_output
from diamond.optim.watch import Losses
from tests.optim.curved import close, factors_of, ggn, kron, no_modes

_ = pytest.fixture(autouse=True)(no_modes)

DICE = torch.Generator().manual_seed(3)
N, C = 6, 4
Y = torch.randn(N, C, generator=DICE)
POSITIVE = torch.rand(N, C, generator=DICE) + 0.1
BITS = (torch.rand(N, C, generator=DICE) < 0.5).float()
LABELS = torch.tensor([0, 3, 1, 1, 2, 0])
IGNORED = torch.tensor([0, -100, 1, 1, -100, 0])
MIXED = torch.softmax(torch.randn(N, C, generator=DICE), 1)
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])
MASK = torch.tensor([1.0, 0, 1, 1, 0, 2])

# A layer whose input is the same for all samples has a curvature that is one Kronecker product, whatever the loss.
# Losses that torch takes in single precision only would disturb the double precision of the reference: all take both.


def as_(like: Tensor, other: Tensor) -> Tensor:
    return other.to(like.dtype)


EXPRESSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda p: F.mse_loss(p, as_(p, Y)),
    "mse the other way": lambda p: F.mse_loss(as_(p, Y), p),
    "mse sum": lambda p: F.mse_loss(p, as_(p, Y), reduction="sum"),
    "mse sum over number": lambda p: F.mse_loss(p, as_(p, Y), reduction="sum") / N,
    "mse none mean": lambda p: F.mse_loss(p, as_(p, Y), reduction="none").mean(),
    "mse none masked": lambda p: (F.mse_loss(p, as_(p, Y), reduction="none") * as_(p, MASK)[:, None]).sum() / 5,
    "mse none, then a weight for each": lambda p: (
        F.mse_loss(p, as_(p, Y), reduction="none").sum(1) * as_(p, MASK)
    ).mean(),
    "mse weighted": lambda p: F.mse_loss(p, as_(p, Y), weight=as_(p, POSITIVE)),
    "mse module": lambda p: nn.MSELoss()(p, as_(p, Y)),
    "squares": lambda p: ((p - as_(p, Y)) ** 2).mean(),
    "squares pow": lambda p: (p - as_(p, Y)).pow(2).mean(),
    "squares torch": lambda p: torch.mean(torch.square(p - as_(p, Y))),
    "squares product": lambda p: product(p - as_(p, Y)).mean(),
    "squares sum": lambda p: (p - as_(p, Y)).square().sum(),
    "squares sum over number": lambda p: (p - as_(p, Y)).square().sum() / N,
    "squares sum then mean": lambda p: ((p - as_(p, Y)) ** 2).sum(dim=-1).mean(),
    "squares halved": lambda p: (0.5 * (p - as_(p, Y)) ** 2).mean(),
    "two sums over number": lambda p: (
        ((p - as_(p, Y)).square().sum() + F.mse_loss(p, as_(p, POSITIVE), reduction="sum")) / N
    ),
    "a sum over number and a mean": lambda p: (
        0.5 * F.cross_entropy(p, LABELS) + (p - as_(p, Y)).square().sum() / N  # shares are of what counts most
    ),
    "two means": lambda p: F.mse_loss(p, as_(p, Y)) + F.cross_entropy(p, LABELS),
    "two means weighed": lambda p: 0.1 * F.mse_loss(p, as_(p, Y)) + F.cross_entropy(p, LABELS),
    "classes": lambda p: F.cross_entropy(p, LABELS),
    "classes sum": lambda p: F.cross_entropy(p, LABELS, reduction="sum"),
    "classes none": lambda p: F.cross_entropy(p, LABELS, reduction="none").mean(),
    "classes masked": lambda p: (
        (F.cross_entropy(p, LABELS, reduction="none") * as_(p, MASK)).sum() / as_(p, MASK).sum()
    ),
    "classes ignored": lambda p: F.cross_entropy(p, IGNORED),
    "classes ignored none": lambda p: F.cross_entropy(p, IGNORED, reduction="none").mean(),
    "classes weighted": lambda p: F.cross_entropy(p, LABELS, weight=as_(p, WEIGHTS)),
    "classes weighted and ignored": lambda p: F.cross_entropy(p, IGNORED, weight=as_(p, WEIGHTS)),
    "classes smoothed": lambda p: F.cross_entropy(p, IGNORED, label_smoothing=0.2),
    "classes smoothed and weighted": lambda p: F.cross_entropy(p, IGNORED, weight=as_(p, WEIGHTS), label_smoothing=0.2),
    "classes mixed": lambda p: F.cross_entropy(p, as_(p, MIXED)),
    "classes mixed and weighted": lambda p: F.cross_entropy(
        p, as_(p, MIXED), weight=as_(p, WEIGHTS), label_smoothing=0.1
    ),
    "classes at positions": lambda p: F.cross_entropy(p.reshape(N, 2, 2), torch.tensor([[0, 1]] * N)),
    "classes at positions, some ignored": lambda p: F.cross_entropy(
        p.reshape(N, 2, 2), torch.tensor([[0, 1], [-100, 1]] * (N // 2))
    ),
    "classes module": lambda p: nn.CrossEntropyLoss()(p, LABELS),
    "nll": lambda p: F.nll_loss(p.log_softmax(-1), LABELS),
    "nll weighted and ignored": lambda p: F.nll_loss(p.log_softmax(-1), IGNORED, weight=as_(p, WEIGHTS)),
    "bce": lambda p: F.binary_cross_entropy_with_logits(p, as_(p, BITS)),
    "bce sum": lambda p: F.binary_cross_entropy_with_logits(p, as_(p, BITS), reduction="sum"),
    "bce weighted": lambda p: F.binary_cross_entropy_with_logits(p, as_(p, BITS), weight=as_(p, WEIGHTS)),
    "bce positives": lambda p: F.binary_cross_entropy_with_logits(p, as_(p, BITS), pos_weight=as_(p, WEIGHTS)),
    "bce probabilities": lambda p: F.binary_cross_entropy(p.sigmoid(), as_(p, BITS)),
    "poisson": lambda p: F.poisson_nll_loss(p, as_(p, POSITIVE)),
    "huber near": lambda p: F.huber_loss(p, as_(p, Y), delta=50.0),
    "huber sum": lambda p: F.huber_loss(p, as_(p, Y), delta=50.0, reduction="sum"),
    "smooth l1 near": lambda p: F.smooth_l1_loss(p, as_(p, Y), beta=50.0),
}


def product(difference: Tensor) -> Tensor:
    return difference * difference


def same_inputs() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, C)), torch.randn(1, 3).expand(N, 3)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_curvature_is_that_of_the_expression(name: str) -> None:
    model, x = same_inputs()
    loss = EXPRESSIONS[name]
    found = factors_of(model, x, loss)["0"]
    close(kron(found), ggn(model, x, loss, "0"))


@pytest.mark.parametrize(
    "name", ["classes weighted and ignored", "bce positives", "bce probabilities", "nll", "poisson"]
)
def test_draws_come_to_the_same(name: str) -> None:
    model, x = same_inputs()
    loss = EXPRESSIONS[name]
    wanted = ggn(model, x, loss, "0")
    model.train()
    several = torch.stack([kron(factors_of(model, x, loss, curvature="ggn-mc", seed=n)["0"]) for n in range(300)])
    spread = several.std(0).double() / 300**0.5
    assert bool(((several.mean(0) - wanted).abs() <= 4.5 * spread + 1e-6).all())
    close(several.mean(0), wanted, 0.2)


@pytest.mark.parametrize(
    ("loss", "width", "height"),
    [
        (lambda p: F.huber_loss(p, Y, delta=0.3), 0.3, 0.3),
        (lambda p: F.smooth_l1_loss(p, Y, beta=0.3), 0.3, 1.0),
        (lambda p: F.l1_loss(p, Y), None, 1.0),
        (lambda p: F.smooth_l1_loss(p, Y, beta=0.0), None, 1.0),
    ],
)
def test_losses_with_corners_have_the_parabola_above(
    loss: Callable[[Tensor], Tensor], width: float | None, height: float
) -> None:
    model, x = same_inputs()
    offset = (model(x) - Y).detach().abs()
    width = 1e-3 * float(offset.mean()) if width is None else width
    _, g = factors_of(model, x, loss)["0"]
    assert g is not None
    close(g[0], torch.diag((height / offset.clamp_min(width)).sum(0)) / Y.numel(), 1e-5)


def test_one_row_of_logits() -> None:
    model = nn.Linear(3, 4)
    x, label = torch.randn(3), torch.tensor(2)
    _, g = factors_of(model, x, lambda p: F.cross_entropy(p, label))["model"]
    p = model(x).detach().softmax(0)
    assert g is not None
    close(g[0], torch.diag(p) - torch.outer(p, p), 1e-5)


def test_one_number_a_sample() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(x)[:, 0]
            return found

    x, y = torch.randn(5, 3), torch.randn(5)
    _, g = factors_of(Flat(), x, lambda p: F.mse_loss(p, y))["layer"]
    assert g is not None
    close(g[0], torch.tensor([[2.0]]), 1e-5)


def test_what_the_loss_does_not_depend_on_does_not_count() -> None:
    """Figures for a log, and penalties on the weights themselves, in any order."""
    model, x = same_inputs()
    plain = kron(factors_of(model, x, lambda p: F.mse_loss(p, Y))["0"])

    def chatty(p: Tensor) -> Tensor:
        penalty = model[0].weight.square().sum()  # type: ignore[union-attr, operator]
        F.l1_loss(p, Y), ((p - 1) ** 2).mean()
        return F.mse_loss(p, Y) + 1e-3 * penalty  # type: ignore[no-any-return]

    close(kron(factors_of(model, x, chatty)["0"]), plain, 1e-6)


def scaled(out: Tensor) -> Tensor:
    return out / out.square().mean().sqrt()


def test_squares_within_the_model_are_no_losses() -> None:
    """Even where a larger one means a larger loss."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, C)

        def forward(self, x: Tensor) -> Tensor:
            return scaled(self.layer(x))

    model, x = Scaled(), torch.randn(1, 3)
    hidden = model.layer(x).detach()
    _, g = factors_of(model, x, lambda p: F.mse_loss(p, 3 * scaled(hidden)))["layer"]
    slope = torch.func.jacrev(lambda h: scaled(h)[0])(hidden)[:, 0]
    assert g is not None
    close(g[0], 2 * slope.T @ slope / C, 1e-5)


def test_both_sides_may_come_from_the_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, C), nn.Linear(3, C)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.one(x), self.two(x)])

    found = factors_of(Two(), torch.randn(N, 3), lambda p: F.mse_loss(p[0], p[1]))
    for name in ("one", "two"):
        g = found[name][1]
        assert g is not None
        close(g[0], 2 * torch.eye(C) / C, 1e-5)


@pytest.mark.parametrize("scaled", [0.25, 65536.0])
def test_scalers_and_pieces_of_a_batch_do_not_change_a_mean(scaled: float) -> None:
    model, x = same_inputs()
    plain = kron(factors_of(model, x, lambda p: F.mse_loss(p, Y))["0"])
    close(kron(factors_of(model, x, lambda p: F.mse_loss(p, Y) * torch.tensor(scaled))["0"]), plain, 1e-6)


@pytest.mark.parametrize("name", ["mse", "cross_entropy", "bce"])
def test_a_loss_by_name_is_what_torch_takes(name: str) -> None:
    model, x = same_inputs()
    loss = {"mse": EXPRESSIONS["mse"], "cross_entropy": EXPRESSIONS["classes"], "bce": EXPRESSIONS["bce"]}[name]
    close(kron(factors_of(model, x, loss, loss=name)["0"]), kron(factors_of(model, x, loss)["0"]), 1e-6)


def test_unknown_losses_are_refused_aloud() -> None:
    model, x = same_inputs()
    opt = KFAC(model, lr=0.1)
    F.cosine_similarity(model(x), Y).mean().backward()
    with pytest.raises(OptimError, match="recognised no loss"):
        opt.step()
    with pytest.raises(OptimError, match="loss='hinge' is not known"):
        of_output(torch.ones(2, 2), "hinge")
    with pytest.raises(OptimError, match="depends on the targets"):
        of_output(torch.ones(2, 2), "huber")
    with pytest.raises(OptimError, match="holds no tensor"):
        of_output("words", "mse")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "huber"])
def test_the_quadratic_form_is_that_of_the_directions(name: str) -> None:
    out = torch.rand(3, 4) * 0.8 + 0.1
    outcome = of_output(out.log_softmax(-1) if name == "nll" else out, name)
    one, other = torch.randn(3, 4), torch.randn(3, 4)
    wanted = sum((s * one).sum(1) @ (s * other).sum(1) for s in outcome.square_root()) / outcome.terms
    close(outcome.quadratic(one, other), torch.as_tensor(wanted), 1e-4)


@pytest.mark.parametrize("copied", [True, False])
def test_the_quadratic_form_takes_moves_as_the_model_makes_them(copied: bool) -> None:
    """Models give (samples, positions, classes); torch's loss wants the classes second, or all positions as rows."""
    logits, one = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    wanted = of_output(logits.flatten(0, 1), "cross_entropy").quadratic(one, one)
    turned = logits.transpose(1, 2)
    close(of_output(turned.contiguous() if copied else turned, "cross_entropy").quadratic(one, one), wanted, 1e-5)
    numbers = Outcome(logits.permute(2, 0, 1), "mse", 24, kept=torch.arange(4.0)[:, None, None])
    close(numbers.quadratic(one, one), 2 * ((one * torch.arange(4.0)) ** 2).sum() / 24, 1e-5)


@pytest.mark.parametrize("weight", [1.0, 65536.0, 0.25])
@pytest.mark.parametrize("name", ["mse", "mse sum", "mse sum over number", "classes ignored"])
def test_real_gradients_are_measured_in_the_loss_s_own_unit(name: str, weight: float) -> None:
    """Whatever the number is multiplied by before backward; a sum has the curvature of a mean, times its terms."""
    out = torch.randn(N, C, requires_grad=True)
    capture = Losses()
    with Following(capture):
        loss = EXPRESSIONS[name](out) * torch.tensor(weight)
    (outcome,) = capture.before_backward([loss])
    loss.backward()
    assert out.grad is not None
    found = out.grad.square().sum() * outcome.of_real / outcome.terms
    single = torch.func.vmap(torch.func.grad(lambda o, y: F.mse_loss(o, y, reduction="sum")))(out.detach(), Y)
    if name == "classes ignored":
        single = torch.autograd.grad(F.cross_entropy(out, IGNORED, reduction="sum"), out)[0]
    divisor = {"mse": N * C, "mse sum": 1, "mse sum over number": N, "classes ignored": 4}[name]
    close(found, single.square().sum() / divisor, 1e-5)


class Following(TorchFunctionMode):
    def __init__(self, losses: Losses) -> None:
        super().__init__()
        self.losses = losses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.losses.note(func, args, kwargs or {}, result, squares=True)
        return result


@pytest.mark.parametrize("far", [1.0, 20.0])
@pytest.mark.parametrize(
    "name", [name for name in EXPRESSIONS if name.startswith(("mse", "squares", "classes", "bce"))]
)
def test_how_far_the_loss_rises_over_its_tangent(name: str, far: float) -> None:
    """However far the output moves, without a word about the targets: a parabola would say too little, or too much."""
    torch.manual_seed(8)
    out, by = torch.randn(N, C, requires_grad=True), far * torch.randn(N, C)
    capture = Losses()
    with Following(capture):
        loss = EXPRESSIONS[name](out)
    (outcome,) = capture.before_backward([loss])
    loss.backward()
    assert out.grad is not None
    risen = EXPRESSIONS[name]((out + by).detach()) - loss.detach() - (out.grad * by).sum()
    if outcome.kind == "bce_probabilities":  # of which the targets must be known
        close(outcome.beyond(by), outcome.quadratic(by, by) / 2, 1e-6)
    else:
        close(outcome.beyond(by), risen, 1e-4)
