"""One training run, timed: the clock stands still while the metric is computed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.optim_methods import Method, Settings, Stepper
from benchmarks.optim_problems import Data, Problem


@dataclass(frozen=True)
class Point:
    """`device_s`: CPU seconds of the process, or seconds on the GPU's stream."""

    step: int
    wall_s: float
    device_s: float
    metric: float


@dataclass
class Run:
    method: str
    seed: int
    settings: Settings
    steps: int
    curve: list[Point] = field(default_factory=list)
    stopped: str = ""  # why it ended early

    @property
    def final(self) -> float:
        """The metric at the end, infinite for a run that did not come so far."""
        return math.inf if self.stopped or not self.curve else self.curve[-1].metric

    def reached(self, target: float) -> Point | None:
        return next((point for point in self.curve if point.metric <= target), None)

    def to_json(self, most: int = 60) -> dict[str, Any]:
        thinned = self.curve[:: max(1, -(-len(self.curve) // most))]
        if self.curve and thinned[-1] is not self.curve[-1]:
            thinned = [*thinned, self.curve[-1]]
        points = [[one.step, _short(one.wall_s), _short(one.device_s), _short(one.metric)] for one in thinned]
        return {
            "method": self.method,
            "seed": self.seed,
            "settings": self.settings,
            "steps": self.steps,
            "stopped": self.stopped,
            "final": _short(self.final),
            "curve": points,
        }


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Clock:
    """Adds up what passes between `go` and `stop`."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self.wall_s = self.device_s = 0.0
        self._began = (0.0, 0.0)
        self._events: tuple[Any, Any] | None = None

    def go(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        self._began = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
            torch.cuda.synchronize()
            self.device_s += self._events[0].elapsed_time(self._events[1]) / 1000
        else:
            self.device_s += time.process_time() - self._began[1]
        self.wall_s += time.perf_counter() - self._began[0]


def train(
    problem: Problem,
    method: Method,
    settings: Settings,
    *,
    seed: int,
    split: str,
    steps: int,
    device: str,
    limit_s: float = math.inf,
) -> Run:
    """Trains from the seed's model and order of batches, and looks at `split` along the way.

    Args:
        steps: the horizon; settings may ask for a share of it.
        limit_s: on `device_s`; a run that exceeds it is stopped.
    """
    steps = max(1, round(steps * settings.get("share", 1.0)))
    steps = _whole_steps(problem, steps) if method.whole else steps
    run = Run(method.name, seed, settings, steps)
    model = problem.model(seed).to(device).train()
    data = problem.data_on(device, "train")
    batches = problem.batches(data, problem.batch_size, seed)
    clock = Clock(device)
    stepper: Stepper | None = None
    try:
        clock.go()
        stepper = method.build(model, problem, settings)
        rates = [group["lr"] for group in stepper.param_groups]
        clock.stop()
        done = 0
        for until in _stops(steps, problem.evaluations):
            clock.go()
            for number in range(done, until):
                scheduled = method.scheduled and not settings.get("flat")
                factor = _factor(number, steps, settings["warmup"]) if scheduled else 1.0
                for group, rate in zip(stepper.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                _step(problem, method, model, stepper, data, batches)
            clock.stop()
            done = until
            metric = problem.metric(model, split)
            run.curve.append(Point(done, clock.wall_s, clock.device_s, metric if metric == metric else math.inf))
            if not math.isfinite(metric):
                run.stopped = f"diverged before step {done}"
                break
            if clock.device_s > limit_s and done < steps:
                run.stopped = f"time limit of {limit_s:.0f} s at step {done}"
                break
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        # of an optimizer that cannot do this: it counts as a run that failed, with its reason in the result file
        run.stopped = f"{type(error).__name__}: {error}"[:300]
    finally:
        # K-FAC watches every operation from a forward pass to the step; one that fails between must not watch others
        getattr(stepper, "_disarm", lambda: None)()
    return run


def _step(
    problem: Problem, method: Method, model: nn.Module, stepper: Stepper, data: Data, batches: Iterator[Data]
) -> None:
    if method.whole:
        stepper.step(_closure(problem, model, stepper, data))
        return
    stepper.zero_grad(set_to_none=True)
    problem.loss(model, next(batches)).backward()
    stepper.step()


def _closure(problem: Problem, model: nn.Module, stepper: Stepper, data: Data) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        stepper.zero_grad(set_to_none=True)
        loss = problem.loss(model, data)
        loss.backward()
        return loss

    return closure


def _whole_steps(problem: Problem, steps: int) -> int:
    """As many as see the same number of samples."""
    if not problem.batch_size:
        return steps
    return max(1, steps * problem.batch_size // len(problem.data("train")[0]))


def _stops(steps: int, evaluations: int) -> list[int]:
    """After which steps to look: half of the times evenly, half by equal ratios, where metrics fall fastest."""
    half = max(1, evaluations // 2)
    evenly = {max(1, round(steps * place / half)) for place in range(1, half + 1)}
    ratios = {max(1, round(steps ** (place / half))) for place in range(1, half + 1)}
    return sorted(evenly | ratios | {steps})


def _factor(number: int, steps: int, warmup: float) -> float:
    """What multiplies learning rates: up linearly, then down by a cosine, and never quite zero."""
    rising = round(steps * warmup)
    if number < rising:
        return (number + 1) / (rising + 1)
    return 0.5 * (1 + math.cos(math.pi * (number - rising) / (steps - rising)))
