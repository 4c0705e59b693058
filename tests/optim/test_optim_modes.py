"""The ways in which people train: half precision, pieces of a batch, checkpoints of activations, compiled models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from diamond.optim.errors import OptimError
from diamond.optim.kfac import KFAC
from tests.optim.curved import close, no_modes

_ = pytest.fixture(autouse=True)(no_modes)

DICE = torch.Generator().manual_seed(2)
X, Y = torch.randn(12, 4, generator=DICE), torch.randn(12, 3, generator=DICE)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def network(inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def optimizer(model: nn.Module, **options: Any) -> KFAC:
    usual = {"lr": 0.05, "clip": 1e-2, "curvature": "ggn-exact", "factor_every": 1, "inverse_every": 1}
    return KFAC(model, **{**usual, **options})


def steps(model: nn.Module, opt: KFAC, number: int = 3, call: Callable[[Tensor], Tensor] | None = None) -> list[float]:
    losses = []
    for _step in range(number):
        opt.zero_grad()
        loss = F.mse_loss((call or model)(X), Y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def expected(number: int = 3, **options: Any) -> KFAC:
    """What a plain model comes to."""
    model = network()
    opt = optimizer(model, **options)
    steps(model, opt, number)
    return opt


def same(found: KFAC, wanted: KFAC, relative: float = 1e-5) -> None:
    """Factors and weights."""
    for one, other in zip(found.factors, wanted.factors, strict=True):
        assert one.known and other.known
        close(one.a.mean(), other.a.mean(), relative)
        if other.g.known:
            close(one.g.mean(), other.g.mean(), relative)
    for one_weight, other_weight in zip(found.root.parameters(), wanted.root.parameters(), strict=True):
        close(one_weight.detach(), other_weight.detach(), relative)


def test_autocast() -> None:
    model = network()
    opt = optimizer(model)
    for _step in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(X), Y)
        loss.backward()
        opt.step()
    assert all(one.dtype == torch.float32 for one in model.parameters())
    same(opt, expected(), 0.05)


@pytest.mark.parametrize("curvature", ["ggn-exact", "ggn-mc"])
def test_scaled_losses(curvature: str) -> None:
    model = network()
    opt = optimizer(model, curvature=curvature)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _step in range(3):
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(X), Y)).backward()
        scaler.step(opt)
        scaler.update()
    same(opt, expected(curvature=curvature), 1e-4)


def test_half_precision_with_a_scaler() -> None:
    model = network()
    opt = optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    losses = []
    for _step in range(2):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(X).float(), Y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    same(opt, expected(2), 0.05)


def test_a_step_that_the_scaler_skips() -> None:
    model = network()
    opt = optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    before = [one.detach().clone() for one in model.parameters()]
    for broken in (True, False):
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(X), Y)).backward()
        if broken:
            model[0].weight.grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.step(opt)
        scaler.update()
        unchanged = all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
        assert unchanged == broken
    assert opt.steps == 1
    assert all(bool(one.a.mean().isfinite().all()) for one in opt.factors)


def test_pieces_of_a_batch_are_the_batch() -> None:
    model = network()
    opt = optimizer(model)
    for _step in range(3):
        opt.zero_grad()
        for x, y in zip(X.split(4), Y.split(4), strict=True):
            (F.mse_loss(model(x), y) / 3).backward()
        opt.step()
    same(opt, expected(), 1e-4)


def test_a_sum_of_losses_of_several_forward_passes() -> None:
    model = network()
    opt = optimizer(model)
    for _step in range(3):
        opt.zero_grad()
        losses = [F.mse_loss(model(x), y) for x, y in zip(X.split(4), Y.split(4), strict=True)]
        (sum(losses, torch.zeros(())) / 3).backward()
        opt.step()
    same(opt, expected(), 1e-4)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = network(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[:2](x)
        hidden = checkpoint(self.layers[2:5], hidden, use_reentrant=self.reentrant)
        found: Tensor = self.layers[5](hidden)
        return found


@pytest.mark.parametrize("curvature", ["ggn-exact", "empirical"])
def test_checkpoints_of_activations(curvature: str) -> None:
    model = Checkpointed(reentrant=False)
    opt = optimizer(model, curvature=curvature)
    steps(model, opt)
    same(opt, expected(curvature=curvature))


def test_reentrant_checkpoints_are_refused_by_name() -> None:
    model = Checkpointed(reentrant=True)
    _opt = optimizer(model)
    with pytest.raises(OptimError, match=r"layers\.2: activation checkpointing with use_reentrant=True"):
        model(X)


class Wrapped(nn.Module):
    """Of a class that torch did not write, whose code it therefore compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["before", "after", "in place"])
def test_compiled_models(backend: str, order: str) -> None:
    """Steps that take curvature run as they are written, those between compiled."""
    options = {"factor_every": 2, "inverse_every": 2}
    model = Wrapped()
    if order == "before":
        compiled: Any = torch.compile(model, backend=backend)
        opt = optimizer(compiled, **options)
    else:
        opt = optimizer(model, **options)
        if order == "in place":
            model.compile(backend=backend)
        compiled = model if order == "in place" else torch.compile(model, backend=backend)
    steps(compiled, opt, 24)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    same(opt, expected(24, **options), 1e-3)


def test_activations_in_place() -> None:
    model = network(inplace=True)
    opt = optimizer(model)
    steps(model, opt)
    same(opt, expected())


def test_validation_between_steps() -> None:
    model = network()
    opt = optimizer(model)
    for _step in range(3):
        opt.zero_grad()
        model.train()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        model.eval()
        F.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 3))
        with torch.no_grad():
            model.train()
            model(torch.randn(5, 4))
        opt.step()
        model.eval()
        F.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 3))
        assert not _get_current_function_mode_stack()
    same(opt, expected())


def test_a_forward_pass_that_fails() -> None:
    model = network()
    opt = optimizer(model)
    for _step in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(5, 9))
        assert not _get_current_function_mode_stack()
        steps(model, opt, 1)
    same(opt, expected())


def test_a_forward_pass_that_leads_nowhere() -> None:
    model = network()
    opt = optimizer(model)
    for _step in range(3):
        model(torch.randn(5, 4))
        steps(model, opt, 1)
        assert not _get_current_function_mode_stack()
    same(opt, expected())


def test_an_error_between_loss_and_step() -> None:
    model = network()
    opt = optimizer(model)
    with pytest.raises(RuntimeError, match="size of tensor"), pytest.warns(UserWarning, match="different to the input"):
        F.mse_loss(model(torch.randn(5, 4)), torch.randn(4, 3))
    steps(model, opt)
    same(opt, expected())


def test_schedulers() -> None:
    model = network()
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    rates = []
    for _step in range(3):
        steps(model, opt, 1)
        rates.append(opt.param_groups[0]["lr"])
        schedule.step()
    assert rates == [0.05, 0.025, 0.0125]


def test_closures() -> None:
    model = network()
    opt = optimizer(model)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        return loss

    losses = [float(opt.step(closure).detach()) for _step in range(3)]
    assert losses[-1] < losses[0]
    same(opt, expected())


def test_modes_of_the_user_around_the_forward_pass() -> None:
    """They end before the loss is taken; what ends is theirs, not ours."""

    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    model = network()
    opt = optimizer(model)
    for _step in range(3):
        opt.zero_grad()
        with torch.device("cpu"), Counting() as counting:
            out = model(X)
        seen = counting.calls
        loss = F.mse_loss(out, Y)
        loss.backward()
        assert counting.calls == seen > 0
        opt.step()
        assert not _get_current_function_mode_stack()
    same(opt, expected())


def test_a_default_device() -> None:
    model = network()
    opt = optimizer(model)
    torch.set_default_device("cpu")
    try:
        steps(model, opt)
        assert len(_get_current_function_mode_stack()) == 1
    finally:
        torch.set_default_device(None)
    same(opt, expected())


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("before", [True, False])
def test_under_ddp(before: bool) -> None:
    model = network()
    opt = optimizer(model) if before else None
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = opt or optimizer(wrapped)
    steps(wrapped, opt)
    same(opt, expected())
