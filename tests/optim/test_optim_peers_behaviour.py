"""What all peers promise: state that goes on exactly, schedules, closures, and errors that say what to do."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from diamond.optim.errors import OptimError
from diamond.optim.peers import LAMB, LARS, NAMES, SOAP, Muon, Peer, ScheduleFreeAdamW, make

OURS: dict[str, dict[str, Any]] = {
    "lars": {"lr": 0.1, "trust": 0.05},
    "lamb": {"lr": 0.01},
    "soap": {"lr": 0.01, "precondition_every": 2},
    "muon": {"lr": 0.02, "adamw_lr": 0.01},
    "schedule-free": {"lr": 0.01, "warmup_steps": 3},
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.LayerNorm(6), nn.Linear(6, 3)]
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    given = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: torch.Tensor = (model(given).float() - given.float().mean((1, 2, 3)).view(-1, 1)).square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OURS)
def test_a_saved_state_goes_on_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = make(name, model, **OURS[name])
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = network(dtype)
    twin.load_state_dict(model.state_dict())
    resumed = make(name, twin, **{**OURS[name], "lr": 123.0})
    resumed.load_state_dict(torch.load(file, weights_only=True))
    before = copy.deepcopy(model)
    train(model, optimizer, range(5, 10))
    train(twin, resumed, range(5, 10))
    assert_same(model, twin)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert resumed.param_groups[0]["lr"] == OURS[name]["lr"]


@pytest.mark.parametrize("name", OURS)
def test_statistics_of_narrow_parameters_are_kept_in_float32(name: str) -> None:
    model = network(torch.bfloat16)
    optimizer = make(name, model, **OURS[name])
    train(model, optimizer, range(3))
    kept = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert kept == {torch.float32}
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


# ---- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_the_loss_falls_and_the_closure_is_called_with_gradients(name: str) -> None:
    model = network()
    optimizer = make(name, model, **OURS[name])
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(40):
        losses.append(optimizer.step(closure).item())  # type: ignore[attr-defined, arg-type]
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.step() is None


@pytest.mark.parametrize("name", [name for name in OURS if name != "schedule-free"])
def test_schedules_of_torch_are_followed(name: str) -> None:
    model = network()
    optimizer = make(name, model, **OURS[name])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
    seen = []
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        schedule.step()
        seen.append(copy.deepcopy(model))
    assert not torch.equal(seen[1][3].weight, seen[2][3].weight)
    assert_same(seen[2], seen[3])
    assert_same(seen[3], seen[4])


def test_schedule_free_takes_a_schedule_and_weighs_by_the_largest_rate() -> None:
    model = network()
    optimizer = ScheduleFreeAdamW(model, 0.04)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        schedule.step()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["largest_lr"], group["steps"]) == (0.01, 0.04, 4)
    assert group["weight_sum"] == pytest.approx(4 * 0.04**2)


def test_schedule_free_does_nothing_while_the_rate_is_zero() -> None:
    model, still = network(), network()
    train(model, ScheduleFreeAdamW(model, 0.0), range(2))
    assert_same(model, still)


def test_schedule_free_refuses_to_step_at_the_average() -> None:
    model = network()
    optimizer = ScheduleFreeAdamW(model)
    train(model, optimizer, range(2))
    optimizer.eval()
    average = copy.deepcopy(model)
    with pytest.raises(OptimError, match=r"eval mode.*optimizer\.train\(\)"):
        optimizer.step()
    assert_same(model, average)
    resumed = ScheduleFreeAdamW(average)
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(OptimError, match="eval mode"):
        resumed.step()
    resumed.train()
    train(average, resumed, range(2, 3))


@pytest.mark.parametrize("name", OURS)
def test_parameters_without_gradient_are_left_alone(name: str) -> None:
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)
    before = copy.deepcopy(unused)
    optimizer = make(name, [*used.parameters(), *unused.parameters()], **OURS[name])
    for step in range(2):
        used(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    assert_same(unused, before)
    assert not any(param in optimizer.state for param in unused.parameters())
    assert all(param in optimizer.state for param in used.parameters())


@pytest.mark.parametrize("name", OURS)
def test_groups_have_options_of_their_own(name: str) -> None:
    model, alone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), nn.Linear(3, 4)
    alone.load_state_dict(model[0].state_dict())
    fixed = {"lr": 0.0, "weight_decay": 0.0}
    second = copy.deepcopy(model[1])
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), **fixed}]
    together = make(name, groups, **{**OURS[name]})
    single = make(name, alone, **OURS[name])
    for step in range(4):
        for at, (mine, other) in enumerate(zip(model[0].parameters(), alone.parameters(), strict=True)):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(10 * step + at))
            other.grad = mine.grad.clone()
        for param in model[1].parameters():
            param.grad = torch.ones_like(param)
        together.step()
        single.step()
    assert_same(model[0], alone)
    assert_same(model[1], second)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_sparse_gradients_are_refused_before_anything_is_changed(name: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    before = copy.deepcopy(model)
    optimizer = make(name, model, **OURS[name])
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(OptimError, match=r"no sparse gradients, and parameter '0\.weight' has one.*sparse=False"):
        optimizer.step()
    assert_same(model, before)


@pytest.mark.parametrize("name", OURS)
def test_complex_parameters_are_refused(name: str) -> None:
    with pytest.raises(OptimError, match=r"shape \(2, 2\) is of torch.complex64"):
        make(name, [nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])


BAD: list[tuple[type[Peer], dict[str, Any], str]] = [
    *(
        (kind, {"lr": value}, "lr=")
        for kind in (LARS, LAMB, SOAP, Muon, ScheduleFreeAdamW)
        for value in (-1.0, "a", None)
    ),
    (LARS, {"lr": float("nan")}, "lr=nan"),
    (LARS, {"momentum": 1.0}, "momentum=1.0"),
    (LARS, {"trust": 0.0}, "trust=0.0"),
    (LARS, {"nesterov": 1}, "nesterov=1"),
    (LARS, {"weight_decay": -0.1}, "weight_decay=-0.1"),
    (LAMB, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
    (LAMB, {"betas": 0.9}, "betas=0.9.*two numbers"),
    (LAMB, {"eps": 0.0}, "eps=0.0"),
    (LAMB, {"max_trust": 0}, "max_trust=0"),
    (LAMB, {"exclude_1d": None}, "exclude_1d=None"),
    (SOAP, {"precondition_every": 0}, "precondition_every=0"),
    (SOAP, {"max_dim": 2.5}, "max_dim=2.5"),
    (SOAP, {"factor_beta": 1.5}, "factor_beta=1.5"),
    (Muon, {"adamw_lr": -1.0}, "adamw_lr=-1.0"),
    (Muon, {"adamw_weight_decay": -1.0}, "adamw_weight_decay=-1.0"),
    (Muon, {"adjust_lr_fn": "other"}, "adjust_lr_fn='other'.*original, match_rms_adamw"),
    (Muon, {"precision": "float16"}, "precision='float16'"),
    (Muon, {"ns_steps": True}, "ns_steps=True"),
    (Muon, {"heads": [3]}, "heads="),
    (ScheduleFreeAdamW, {"betas": (0.0, 0.9)}, r"betas\[0\]=0"),
    (ScheduleFreeAdamW, {"warmup_steps": -1}, "warmup_steps=-1"),
    (ScheduleFreeAdamW, {"averaging_power": -1.0}, "averaging_power=-1.0"),
]


@pytest.mark.parametrize(("kind", "options", "said"), BAD)
def test_bad_options_are_named(kind: type[Peer], options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptimError, match=said):
        kind(nn.Linear(2, 2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OURS)
def test_bad_options_of_a_group_are_named_and_the_group_is_not_added(name: str) -> None:
    optimizer = make(name, nn.Linear(2, 2))
    groups = len(optimizer.param_groups)
    with pytest.raises(OptimError, match="weight_decay=-3"):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(2, 2)))], "weight_decay": -3, "muon": True})
    assert len(optimizer.param_groups) == groups


# ---- the factory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_make_builds_every_optimizer_from_a_model_and_from_parameters(name: str) -> None:
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "lbfgs": torch.optim.LBFGS}
    kinds |= {"lamb": LAMB, "lars": LARS, "soap": SOAP, "muon": Muon, "schedule-free": ScheduleFreeAdamW}
    model = network()
    for given in (model, model.parameters()):
        optimizer = make(name, given, lr=0.5)
        assert type(optimizer) is kinds[name]
        assert optimizer.param_groups[0]["lr"] == 0.5
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert {id(param) for param in held} == {id(param) for param in model.parameters()}


def test_make_says_what_there_is() -> None:
    with pytest.raises(OptimError, match="name='adam' is no optimizer: give one of sgd, adamw, lamb"):
        make("adam", network())
    with pytest.raises(OptimError, match="lamb has no option 'momentum': it takes lr, betas, eps"):
        make("lamb", network(), momentum=0.9)
