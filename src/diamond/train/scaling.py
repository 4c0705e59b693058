"""How many samples a step takes, and what that means for the learning rate: pure arithmetic.

A run keeps its batch unless it is allowed to grow it; then the learning rate the user chose belongs to the batch the
run began with (the *base*), and every other batch gets a multiple of it. Standard library only, Python 3.8 syntax,
because this file runs in the user's environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from diamond.train.errors import TrainError

RULES = ("linear", "sqrt", "adascale", "none")
GROW = "grow"
WISH = "DIAMOND_GLOBAL_BATCH"  # the planner's, where a run lets its batch grow
_MOST_DIGITS = 12
_MOST_WARMUP = 100
_WARMUP_PART = 20  # a twentieth of the run's steps


# ---- the batch -------------------------------------------------------------------------------------------------------


class BatchSize(NamedTuple):
    """What the user said about the samples of an optimizer step, on all ranks together.

    `wanted` is None (keep what the run began with), a number, or "grow"; `accumulate` is how many batches of the loader
    each rank computes for a step, where `wanted` is no number; `most` bounds a batch that grows.
    """

    wanted: int | str | None = None
    accumulate: int = 1
    most: int | None = None

    @property
    def grows(self) -> bool:
        return self.wanted == GROW

    def check(self) -> None:
        """
        Raises:
            TrainError: it makes no sense.
        """
        if not (self.wanted is None or self.grows or _is_count(self.wanted)):
            raise TrainError(
                f"batch={self.wanted!r} is no batch",
                hint='give the samples of a step on all ranks together (1 or more), "grow", or leave it out',
            )
        if not _is_count(self.accumulate):
            raise TrainError(f"accumulate={self.accumulate!r} is no number of batches", hint="give 1 or more")
        if self.accumulate > 1 and _is_count(self.wanted):
            raise TrainError(
                f"batch={self.wanted} and accumulate={self.accumulate} both say how large a step is",
                hint="leave accumulate out: each rank computes as many batches as that takes",
            )
        if self.most is not None and not (self.grows and _is_count(self.most)):
            raise TrainError(
                f"max_batch={self.most!r} bounds nothing", hint='give a number of 1 or more, together with batch="grow"'
            )

    def samples(self, per_rank: int, world: int, *, kept: int | None = None, wish: int | None = None) -> int:
        """Of a step from now on, with so many ranks; `kept` is what it took until now, `wish` the planner's."""
        if isinstance(self.wanted, int):
            return self.wanted
        own = per_rank * world * self.accumulate
        if not self.grows:
            return own if kept is None else kept
        grown = own if wish is None else wish
        return grown if self.most is None else min(grown, self.most)


class End(NamedTuple):
    """When a run is over: after so many steps, or so many samples, over all its jobs."""

    steps: int | None
    samples: int | None

    def check(self) -> None:
        """
        Raises:
            TrainError: there is none, or there are two.
        """
        if (self.steps is None) == (self.samples is None):
            raise TrainError("steps() needs one end", hint="give either until= (steps) or until_samples=")
        if not _is_count(self.steps if self.samples is None else self.samples):
            name, value = ("until", self.steps) if self.samples is None else ("until_samples", self.samples)
            raise TrainError(f"{name}={value!r} is no end", hint="give a whole number, 1 or more")

    def is_reached(self, steps: int, samples: int) -> bool:
        return steps >= self.steps if self.steps is not None else samples >= (self.samples or 0)

    def left(self, samples: int) -> int | None:
        """How many samples the steps to come may take; None: any number."""
        return None if self.samples is None else self.samples - samples

    def total_steps(self, batch: int) -> float:
        return self.steps if self.steps is not None else (self.samples or 0) / batch

    def last_step(self, steps: int, samples: int, batch: int) -> int:
        """The number of the last step, when so many steps and samples are done and batches stay as they are."""
        if self.steps is not None:
            return self.steps
        return steps + max(0, -(-((self.samples or 0) - samples) // batch))

    def told(self, steps: int, samples: int) -> str:
        if self.steps is not None:
            return f"step {steps} of {self.steps}"
        return f"step {steps}, sample {samples} of {self.samples}"


def wished(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """The planner's wish, or None; and what to say if it makes no sense."""
    text = environ.get(WISH, "").strip()
    if not text:
        return None, ""
    if text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) >= 1:
        return int(text), ""
    return None, f"{WISH}={text!r} is no number of samples and is ignored; set it to a whole number of 1 or more"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# ---- the learning rate -----------------------------------------------------------------------------------------------


def lr_scale(rule: str, grown_by: float, noise_scale: float | None = None, *, batch: int = 1) -> float:
    """By what to multiply the learning rate when a batch of `batch` samples has become `grown_by` times as large.

    ``linear``: s, right while the noise of single samples dominates (Goyal et al. 2017). ``sqrt``: the root of s, which
    keeps the noise of the update the same and is what Adam and its kin want (Malladi et al. 2022). ``none``: 1.

    ``adascale`` (Johnson et al. 2020): let G be the true gradient and tr S the variance of one sample's. A batch of b
    samples has a gradient of mean G and variance tr S / b. With m2 = |G|^2 and v = tr S / b at the base, a step with s
    times as many samples makes as much progress as

        r = (v + m2) / (v / s + m2)

    steps of the base, and its learning rate is r times as large. The noise scale (McCandlish et al. 2018), in samples,
    is B = tr S / |G|^2 = b v / m2. Divided by m2, with v / m2 = B / b:

        r = (B + b) / (B / s + b)

    which is s when noise dominates (B >> s b), 1 when there is none, and between the two otherwise.

    Args:
        rule: one of `RULES`.
        grown_by: s; below 1 the batch has shrunk.
        noise_scale: B. Without it, ``adascale`` is ``sqrt``, which lies between its bounds, too.
        batch: b, the base.

    Raises:
        ValueError: `grown_by` or `batch` is not positive, `noise_scale` is negative, or the rule is unknown.
    """
    if not grown_by > 0 or not math.isfinite(grown_by) or batch < 1:
        raise ValueError(f"a batch of {batch} cannot have grown {grown_by} times")
    if noise_scale is not None and not noise_scale >= 0:
        raise ValueError(f"a noise scale is a number of samples, not {noise_scale}")
    if rule == "linear":
        return float(grown_by)
    if rule == "none":
        return 1.0
    if rule == "sqrt" or (rule == "adascale" and noise_scale is None):
        return math.sqrt(grown_by)
    if rule != "adascale" or noise_scale is None:
        raise ValueError(f"rule {rule!r} is not one of {', '.join(RULES)}")
    if math.isinf(noise_scale):
        return float(grown_by)
    found = (noise_scale + batch) / (noise_scale / grown_by + batch)
    return min(max(found, min(1.0, grown_by)), max(1.0, grown_by))  # rounding must not leave the bounds


def warmed(before: float, after: float, *, done: int, warmup: int) -> float:
    """The factor `done` steps after it was to change: up it goes step by step, down at once."""
    if after <= before or done >= warmup:
        return after
    return before + (after - before) * (done + 1) / (warmup + 1)


def warmup_steps(steps: float) -> int:
    """How long to take for a larger learning rate, in a run of so many steps."""
    return max(1, min(_MOST_WARMUP, int(steps / _WARMUP_PART)))


class Growth:
    """The learning rate's factor over a run whose batch changes between jobs.

    With no rule named it is AdaScale's where the noise scale is known, because it is measured, and the root where it is
    not: half way between the bounds of what it can be, 1 and s. Optimizers that divide by the gradient's size (Adam and
    its kin, `adaptive`) get the root of AdaScale's gain: their step stays as long when the noise is averaged away.

    Attributes:
        base, batch: samples of a step, at the beginning of the run and now.
        last: the factor that was in force last.
    """

    def __init__(self, rule: str | None, *, warmup: int | None = None) -> None:
        if rule is not None and rule not in RULES:
            raise TrainError(f"lr_rule={rule!r} is unknown", hint=f"use one of {', '.join(RULES)}, or leave it out")
        if warmup is not None and not (warmup == 0 or _is_count(warmup)):
            raise TrainError(f"lr_warmup={warmup!r} is no number of steps", hint="give 0 or more")
        self.adaptive = False
        self.base = self.batch = 1
        self._rule, self._asked = rule, warmup
        self._warmup = _MOST_WARMUP if warmup is None else warmup
        self._noise: float | None = None
        self._before, self._since, self.last = 1.0, 0, 1.0

    def begin(self, batch: int) -> None:
        self.base = self.batch = batch

    def plan(self, steps: float) -> None:
        """How long the run is, for how long a change may take."""
        if self._asked is None:
            self._warmup = warmup_steps(steps)

    def change(self, batch: int, *, step: int) -> None:
        if batch != self.batch:
            self.batch, self._before, self._since = batch, self.last, step

    def scale(self, step: int, noise: float | None = None) -> float:
        """For the optimizer step after `step` others. Noise that is no number yet counts as unknown."""
        if noise is not None and noise >= 0:
            self._noise = float(noise)
        after = self._after(self.batch / self.base)
        if self._noise is None or self._rule in ("linear", "sqrt"):  # AdaScale's own gain grows as noise does
            after = warmed(self._before, after, done=step - self._since, warmup=self._warmup)
        self.last = after
        return after

    def _after(self, grown_by: float) -> float:
        if grown_by == 1.0:
            return 1.0
        found = lr_scale(self._rule or "adascale", grown_by, self._noise, batch=self.base)
        chosen = self._rule is None and self._noise is not None and self.adaptive
        return math.sqrt(found) if chosen else found

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        known = {} if self._noise is None or math.isinf(self._noise) else {"noise": self._noise}
        return {"base": self.base, "lr_before": self._before, "lr_since": self._since, "lr_scale": self.last, **known}

    def load(self, state: Mapping[str, float]) -> None:
        """What `state` gave, and the batch of then; checkpoints of before there was any of it begin here."""
        self.batch = int(state["global_batch"])
        self.base = int(state.get("base", self.batch))
        self._before, self.last = float(state.get("lr_before", 1.0)), float(state.get("lr_scale", 1.0))
        self._since = int(state.get("lr_since", 0))
        self._noise = float(state["noise"]) if "noise" in state else None
