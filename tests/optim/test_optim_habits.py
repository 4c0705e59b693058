"""What people do with a model and its optimizer besides training them: copies, detours, mistakes, and bad batches."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from diamond.optim import KFAC, OptimError
from diamond.optim.capture import _PATIENCE
from tests.optim.curved import close, no_modes

_ = pytest.fixture(autouse=True)(no_modes)

DICE = torch.Generator().manual_seed(2)
X, Y = torch.randn(12, 4, generator=DICE), torch.randn(12, 3, generator=DICE)
LABELS = torch.randint(3, (12,), generator=DICE)
EVERY_STEP: dict[str, Any] = {"lr": 0.05, "factor_every": 1, "inverse_every": 1}


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))


def optimizer(model: nn.Module, **options: Any) -> KFAC:
    return KFAC(model, **{**EVERY_STEP, **options})


def train(
    model: nn.Module,
    opt: KFAC,
    number: int = 3,
    loss: Callable[[Any], Tensor] = lambda out: F.mse_loss(out, Y),
    back: Callable[[Tensor], Any] = Tensor.backward,
    x: Tensor = X,
) -> list[float]:
    found = []
    for _step in range(number):
        opt.zero_grad()
        lost = loss(model(x))
        back(lost)
        opt.step()
        found.append(float(lost.detach()))
    return found


def expected(**options: Any) -> list[float]:
    model = network()
    return train(model, optimizer(model, **options))


def modes() -> int:
    return len(_get_current_function_mode_stack())


# ---- ways to ask for gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["of one", "of several", "by hand"])
def test_gradients_without_the_loss_s_own_backward(way: str) -> None:
    model = network()

    def back(loss: Tensor) -> None:
        if way == "by hand":
            weights = list(model.parameters())
            for one, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                one.grad = gradient
        else:
            torch.autograd.backward(loss if way == "of one" else [0.25 * loss, 0.75 * loss])

    assert train(model, optimizer(model), back=back) == pytest.approx(expected(), rel=1e-5)


def test_an_attack_on_the_inputs_is_no_training() -> None:
    """Derivatives by inputs free the graph; what was seen of that pass is gone and does not count."""
    model = network()
    opt = optimizer(model)
    for _step in range(3):
        x = X.clone().requires_grad_()
        torch.autograd.grad(F.mse_loss(model(x), Y), x)
        train(model, opt, 1)
    assert opt.crew.terms == Y.numel()


@pytest.mark.parametrize("lr", [0.05, "auto"])
@pytest.mark.parametrize("answer", ["object", "loss first", "loss last", "dict"])
def test_models_that_take_their_loss_themselves(answer: str, lr: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: Tensor) -> Any:
            logits = self.layers(x)
            loss = F.mse_loss(logits, Y)
            return {
                "object": SimpleNamespace(loss=loss, logits=logits),
                "loss first": (loss, logits),
                "loss last": (logits, loss),
                "dict": {"loss": loss, "logits": logits},
            }[answer]

    def its_own(out: Any) -> Tensor:
        if answer == "object":
            return out.loss  # type: ignore[no-any-return]
        return out[{"loss first": 0, "loss last": 1, "dict": "loss"}[answer]]  # type: ignore[no-any-return]

    model = Own()
    assert train(model, optimizer(model, lr=lr), loss=its_own) == pytest.approx(expected(lr=lr), rel=1e-5)


def test_two_passes_in_one_loss_have_the_curvature_of_both() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) - self.layers(x + 1)  # type: ignore[no-any-return]

    apart, together = network(), Both()
    found, wanted = (optimizer(one, curvature="ggn-exact") for one in (apart, together))
    F.mse_loss(apart(X), apart(X + 1)).backward()
    found.step()
    F.mse_loss(together(X), torch.zeros(12, 3)).backward()
    wanted.step()
    for one, other in zip(found.factors, wanted.factors, strict=True):
        close(one.a.mean(), other.a.mean(), 1e-5)


@pytest.mark.parametrize("way", ["once", "times 100", "pieces that are not divided", "scaler"])
def test_measured_lengths_are_those_of_the_number_that_is_made_small(way: str) -> None:
    model = network()
    opt = optimizer(model, lr="auto", curvature="ggn-exact")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for _step in range(8):
        opt.zero_grad()
        losses.append(float(F.mse_loss(model.eval()(X), Y).detach()))
        model.train()
        if way == "pieces that are not divided":
            for _piece in range(4):
                F.mse_loss(model(X), Y).backward()
        elif way == "scaler":
            scaler.scale(F.mse_loss(model(X), Y)).backward()
            scaler.step(opt)
        else:
            (F.mse_loss(model(X), Y) * (1 if way == "once" else 100)).backward()
        if way != "scaler":
            opt.step()
        else:
            scaler.update()
    assert losses[-1] < 0.6 * losses[0]
    assert max(losses) < 1.1 * losses[0]


# ---- detours ---------------------------------------------------------------------------------------------------------


def test_a_pass_that_leads_nowhere_is_let_go() -> None:
    model = network()
    opt = optimizer(model)
    x = X.clone().requires_grad_()
    model(x)
    alive, other = weakref.ref(x), torch.zeros(2)
    del x
    for _call in range(_PATIENCE + 2):
        other.add(1)
    assert alive() is None
    model.eval()(X)
    assert modes() == 0
    model.train()
    assert train(model, opt) == pytest.approx(expected(), rel=1e-5)


def test_an_optimizer_that_is_dropped_leaves_nothing_behind() -> None:
    model = network()
    opt = optimizer(model)
    model(X)
    gone = weakref.ref(opt)
    del opt
    gc.collect()
    assert gone() is None
    assert modes() == 0
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_the_compiler_s_stance_comes_back() -> None:
    model, other = network(), network()
    try:
        first, second = optimizer(model), optimizer(other, factor_every=100)
        torch.compiler.set_stance("eager_on_recompile")
        for opt in (first, second):
            opt._curving.disarm()
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
        first._curving.arm()
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        first._curving.disarm()
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")


def test_a_compiled_step_runs_as_it_is_written() -> None:
    model = network()
    opt = optimizer(model, factor_every=2)
    step = torch.compile(opt.step, backend="eager")
    found = []
    for _step in range(3):
        opt.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        step()
        found.append(float(loss.detach()))
    torch._dynamo.reset()
    assert found == pytest.approx(expected(factor_every=2), rel=1e-5)


def test_steps_leave_no_tensors_behind() -> None:
    models = [network() for _ in range(2)]
    kinds: list[dict[str, Any]] = [{"lr": "auto"}, {"curvature": "empirical"}]
    optimizers = [optimizer(model, **options) for model, options in zip(models, kinds, strict=True)]

    def tensors() -> int:
        for model, opt in zip(models, optimizers, strict=True):
            train(model, opt, 8)
        gc.collect()
        return sum(type(one) is Tensor for one in gc.get_objects())

    assert tensors() >= tensors()


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_the_model_are_not_watched(how: Callable[[Any], Any]) -> None:
    model = network()
    opt = optimizer(model)
    twin = how(model)
    twin(X)
    assert modes() == 0
    assert train(model, opt) == pytest.approx(expected(), rel=1e-5)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_of_the_optimizer_go_on_alike(how: Callable[[Any], Any]) -> None:
    model = network()
    opt = optimizer(model, lr="auto")
    train(model, opt)
    twin, its_own = how((model, opt))
    assert its_own.root is twin
    assert train(twin, its_own) == train(model, opt)


# ---- bad batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.05, "auto"])
def test_a_gradient_that_is_not_finite_moves_nothing(lr: Any) -> None:
    """Neither by momentum nor by the fallback, which goes on unharmed."""
    model = network()
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    model.register_forward_hook(lambda module, _args, out: out * module.scale)
    opt = optimizer(model, lr=lr)
    train(model, opt, 4)
    before = [one.detach().clone() for one in model.parameters()]
    opt.zero_grad()
    F.mse_loss(model(X), Y).backward()
    for one in model.parameters():
        one.grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
    opt.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert all(torch.isfinite(torch.tensor(train(model, opt, 3))))
    assert not torch.equal(model.scale, before[0])


@pytest.mark.parametrize("followed", [True, False])
def test_scores_that_are_no_numbers(followed: bool) -> None:
    model = network()
    opt = optimizer(model)
    loss = F.cross_entropy(model(X * torch.nan), LABELS)
    if followed:
        loss.backward()
        opt.step()
    losses = train(model, opt, 4, loss=lambda out: F.cross_entropy(out, LABELS))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_samples(reduction: str) -> None:
    model = network()
    opt = optimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, opt, 1, loss=lambda out: F.mse_loss(out, Y[:0], reduction=reduction), x=X[:0])
    assert train(model, opt, 9)[-1] < 0.9


@pytest.mark.parametrize("way", ["index", "select", "where", "filled", "in rows"])
def test_terms_chosen_by_a_mask(way: str) -> None:
    mask = torch.arange(12) % 3 > 0

    def weighed(out: Tensor) -> Tensor:
        return (F.cross_entropy(out, LABELS, reduction="none") * mask).sum() / mask.sum()

    def chosen(out: Tensor) -> Tensor:
        terms = F.cross_entropy(out, LABELS, reduction="none")
        if way == "index":
            return terms[mask].mean()
        if way == "select":
            return terms.masked_select(mask).mean()
        if way == "where":
            return torch.where(mask, terms, torch.zeros_like(terms)).sum() / mask.sum()
        if way == "filled":
            return terms.masked_fill(~mask, 0.0).sum() / mask.sum()
        return (terms.view(3, 4) * mask.view(3, 4)).sum() / mask.sum()

    model, other = network(), network()
    options: dict[str, Any] = {"lr": "auto", "curvature": "ggn-exact"}
    wanted = train(other, optimizer(other, **options), loss=weighed)
    assert train(model, optimizer(model, **options), loss=chosen) == pytest.approx(wanted, rel=1e-4)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model[3](model[:3](X)), "its forward was not called since the last step"),
        (lambda model: model.eval()(X), r"evaluation mode.*call model\.train\(\)"),
        (lambda model: model(X).exp().sigmoid(), "recognised no loss"),
    ],
)
def test_why_no_loss_was_seen(call: Callable[[Any], Tensor], said: str) -> None:
    model = network()
    opt = optimizer(model)
    call(model).sum().backward()
    with pytest.raises(OptimError, match=said):
        opt.step()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"damping": 0}, "damping=0: give a number above 0"),
        ({"clip": 0}, "clip=0: give a number above 0, or None"),
        ({"factor_every": 0}, "factor_every=0"),
        ({"plan": 3}, "plan=3: give a diamond.optim.Plan"),
        ({"compress": "bf16"}, "compress='bf16': give a diamond.optim.Compress"),
        ({"fallback": "adamw"}, "fallback='adamw': give what makes"),
        ({"exclude": "head"}, "exclude='head': give a list"),
        ({"seed": "x"}, "seed='x'"),
    ],
)
def test_arguments_that_make_no_sense_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptimError, match=said):
        optimizer(network(), **options)


def test_parameters_instead_of_a_model() -> None:
    with pytest.raises(OptimError, match="model=list: give the model itself"):
        KFAC(list(network().parameters()))  # type: ignore[arg-type]


def test_another_group_of_parameters_is_refused() -> None:
    model = network()
    model[0].requires_grad_(False)
    opt = optimizer(model)
    with pytest.raises(OptimError, match=r"param_group: .* make it again"):
        opt.add_param_group({"params": list(model[0].parameters())})


def test_complex_weights_are_the_fallback_s() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3, dtype=torch.cfloat), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.to(torch.cfloat)).abs())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Waves()
    opt = optimizer(model)
    before = model.first.weight.detach().clone()
    losses = train(model, opt, 4)
    assert [block.name for block in opt.blocks] == ["last"]
    assert losses[-1] < losses[0]
    assert not torch.equal(model.first.weight, before)
