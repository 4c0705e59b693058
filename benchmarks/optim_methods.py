"""The methods that are compared, and where each looks for its settings: one table, `METHODS`.

Every method draws the same number of settings, half of them anywhere in its space, half near the best of these. All
but L-BFGS (and lr="auto" where all points are in every step) follow the same schedule: warm-up over a share of the
steps (drawn), then a cosine to zero, which multiplies the learning rates of all groups.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.optim_problems import Problem
from diamond.optim import peers
from diamond.optim.kfac import KFAC, AdamW

FOLDER = "DIAMOND_BENCH_KFAC_PYTORCH"  # where kfac-pytorch is installed, outside of Diamond
REFERENCE = "adamw"
FIRST_ORDER = ("adamw", "adamw-short", "muon", "soap")  # the best of these is what K-FAC is compared with
OURS = ("kfac", "kfac-auto")
Settings = dict[str, Any]


@dataclass(frozen=True)
class LogUniform:
    low: float
    high: float

    def draw(self, chance: random.Random) -> float:
        return float(f"{math.exp(chance.uniform(math.log(self.low), math.log(self.high))):.4g}")

    def near(self, value: float, chance: random.Random) -> float:
        """Within a sixth of the space on either side."""
        away = chance.uniform(-1.0, 1.0) * math.log(self.high / self.low) / 6
        return float(f"{min(max(value * math.exp(away), self.low), self.high):.4g}")


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]

    def draw(self, chance: random.Random) -> Any:
        return chance.choice(self.values)

    def near(self, value: Any, chance: random.Random) -> Any:
        """Mostly the same."""
        return value if chance.random() < 0.75 else self.draw(chance)


class Stepper(Protocol):
    """What training needs of an optimizer."""

    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """`build` makes the optimizer of a model from settings; `shorter` draws the length of the run as well, where
    methods are chosen by their time to a target. `still` replaces parts of the space where all points are in every
    step, and nothing is noise."""

    name: str
    build: Callable[[nn.Module, Problem, Settings], Stepper]
    space: Mapping[str, LogUniform | Choice]
    shorter: bool = True
    whole: bool = False  # all training data in every step, which a closure evaluates several times
    scheduled: bool = True
    still: Mapping[str, LogUniform | Choice] = field(default_factory=dict)
    missing: Callable[[], str] = field(default=lambda: "")  # why it cannot be measured here

    def applies_to(self, problem: Problem) -> bool:
        return problem.whole or not self.whole

    def draw(self, problem: Problem, number: int, select: str) -> Settings:
        """The settings of one trial: the same whenever they are drawn."""
        chance = random.Random(f"{problem.name} {self.name} {number}")
        return {name: one.draw(chance) for name, one in self._space(problem, select).items()}

    def near(self, problem: Problem, number: int, select: str, best: Settings) -> Settings:
        """Not far from the best so far."""
        chance = random.Random(f"{problem.name} {self.name} {number}")
        return {name: one.near(best[name], chance) for name, one in self._space(problem, select).items()}

    def _space(self, problem: Problem, select: str) -> dict[str, LogUniform | Choice]:
        space = {**self.space, **(SCHEDULE if self.scheduled else {}), **({} if problem.batch_size else self.still)}
        if self.shorter and self.scheduled and select == "time":
            space["share"] = SHARE
        return space


def _rest(settings: Settings, *without: str) -> Settings:
    return {name: value for name, value in settings.items() if name not in (*without, "warmup", "share", "flat")}


def _adamw(model: nn.Module, problem: Problem, settings: Settings) -> Stepper:
    on_gpu = next(model.parameters()).is_cuda
    return peers.make("adamw", model, betas=(0.9, settings["beta2"]), fused=on_gpu, **_rest(settings, "beta2"))


def _sgd(model: nn.Module, problem: Problem, settings: Settings) -> Stepper:
    return peers.make("sgd", model, nesterov=True, **_rest(settings))


def _muon(model: nn.Module, problem: Problem, settings: Settings) -> Stepper:
    return peers.make("muon", model, heads=problem.heads, **_rest(settings))


def _soap(model: nn.Module, problem: Problem, settings: Settings) -> Stepper:
    betas = (0.95, settings["beta2"])
    return peers.make("soap", model, betas=betas, max_dim=2048, **_rest(settings, "beta2"))


def _lbfgs(model: nn.Module, problem: Problem, settings: Settings) -> Stepper:
    # one iteration a step, so that the metric can be seen after each; its memory lasts from step to step
    return peers.make("lbfgs", model, max_iter=1, max_eval=25, line_search_fn="strong_wolfe", **_rest(settings))


def _kfac(model: nn.Module, problem: Problem, settings: Settings) -> Stepper:
    fallback = AdamW(lr=settings["fallback_lr"])
    return KFAC(model, fallback=fallback, **_rest(settings, "fallback_lr"))  # type: ignore[return-value]


class Preconditioned:
    """kfac-pytorch changes gradients, and SGD takes the step."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        preconditioner = importlib.import_module("kfac.preconditioner").KFACPreconditioner
        self._sgd = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=settings["momentum"])
        self.param_groups = self._sgd.param_groups
        self._preconditioner = preconditioner(
            model,
            factor_update_steps=settings["factor_every"],
            inv_update_steps=settings["inverse_every"],
            damping=settings["damping"],
            factor_decay=settings["decay"],
            kl_clip=settings["clip"],
            lr=lambda _: self.param_groups[0]["lr"],
        )

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        self._preconditioner.step()
        self._sgd.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sgd.zero_grad(set_to_none=set_to_none)


def _kfac_pytorch(model: nn.Module, problem: Problem, settings: Settings) -> Stepper:
    return Preconditioned(model, settings)


def _kfac_pytorch_missing() -> str:
    folder = os.environ.get(FOLDER, "")
    if not folder:
        return f"{FOLDER} names no folder that it is installed in"
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        importlib.import_module("kfac.preconditioner")
    except ImportError as error:
        return f"cannot be imported from {FOLDER}: {error}"
    return ""


SCHEDULE: dict[str, Choice] = {"warmup": Choice((0.0, 0.05))}
SHARE = Choice((1.0, 0.5, 0.25))  # of the horizon
_ADAMW = {
    "lr": LogUniform(1e-4, 1e-2),
    "weight_decay": LogUniform(1e-6, 1e-1),
    "beta2": Choice((0.95, 0.98, 0.99, 0.999)),
}
_KFAC = {
    "lr": LogUniform(2e-3, 3e-1),
    "damping": LogUniform(1e-4, 1e-2),
    "weight_decay": LogUniform(1e-5, 1e-2),
    "momentum": Choice((0.9,)),
    "clip": LogUniform(3e-5, 1e-3),
    "decay": Choice((0.95, 0.99)),
    "measured": Choice((20,)),
    "largest": Choice((256, 8192)),  # in smaller blocks: steps cost less and fit the training data less closely
    "factor_every": Choice((10, 20)),
    "inverse_every": Choice((50, 100)),
}
_KFAC_PYTORCH = {
    "lr": LogUniform(1e-2, 1.0),
    "damping": LogUniform(1e-6, 1e-1),
    "momentum": Choice((0.8, 0.9, 0.95)),
    "clip": LogUniform(1e-4, 1.0),
    "decay": Choice((0.9, 0.95, 0.99)),
    "factor_every": Choice((5, 10)),
    "inverse_every": Choice((20, 50)),
}

# lr="auto" measures length and momentum of all steps, so that neither these nor a bound are drawn
_KFAC_AUTO = {
    "lr": Choice(("auto",)),
    "damping": LogUniform(1e-5, 1e-2),
    **{name: _KFAC[name] for name in _KFAC if name not in ("lr", "damping", "momentum", "clip", "measured")},
    "weight_decay": LogUniform(1e-6, 1e-3),  # its lr is 1
}

# an exact curvature costs one backward pass where the output is one number a point; it may be followed closely
_KFAC_STILL = {
    "damping": LogUniform(1e-7, 1e-4),
    "weight_decay": Choice((0.0,)),
    "curvature": Choice(("ggn-exact",)),
    "decay": Choice((0.5, 0.9, 0.95)),
    "factor_every": Choice((1, 2)),
    "inverse_every": Choice((1, 2)),
}
# every step is measured
_KFAC_AUTO_STILL = {
    **_KFAC_STILL,
    "factor_every": Choice((1,)),
    "inverse_every": Choice((1, 2, 4)),
    "flat": Choice((True,)),
    "warmup": Choice((0.0,)),
}

METHODS = {
    method.name: method
    for method in (
        Method(name="adamw", build=_adamw, space=_ADAMW, shorter=False),  # its end is what others must reach
        Method(name="adamw-short", build=_adamw, space=_ADAMW),
        Method(name="sgd", build=_sgd, space={"lr": LogUniform(1e-3, 1.0), "momentum": Choice((0.8, 0.9, 0.95, 0.99))}),
        Method(
            name="muon",
            build=_muon,
            space={
                "lr": LogUniform(1e-3, 1e-1),
                "adamw_lr": LogUniform(1e-4, 1e-2),
                "weight_decay": LogUniform(1e-6, 1e-1),
                "momentum": Choice((0.9, 0.95)),
            },
        ),
        Method(
            name="soap",
            build=_soap,
            space={
                "lr": LogUniform(3e-4, 3e-2),
                "weight_decay": LogUniform(1e-6, 1e-1),
                "beta2": Choice((0.95, 0.98, 0.99)),
                "precondition_every": Choice((10, 20)),
            },
        ),
        Method(
            name="lbfgs",
            build=_lbfgs,
            space={"lr": Choice((0.5, 1.0)), "history_size": Choice((10, 20, 50, 100))},
            whole=True,
            scheduled=False,
        ),
        Method(
            name="kfac",
            build=_kfac,
            space={**_KFAC, "fallback_lr": LogUniform(1e-4, 1e-2)},
            still=_KFAC_STILL,
        ),
        Method(
            name="kfac-auto",
            build=_kfac,
            space={**_KFAC_AUTO, "fallback_lr": LogUniform(1e-4, 1e-2)},
            still=_KFAC_AUTO_STILL,
        ),
        Method(name="kfac-pytorch", build=_kfac_pytorch, space=_KFAC_PYTORCH, missing=_kfac_pytorch_missing),
    )
}
