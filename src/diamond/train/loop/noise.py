"""How noisy gradients are, from what gradients of smaller and of larger batches measure: pure arithmetic.

A batch of B samples has a gradient of mean G and variance tr(S)/B, so its square norm is |G|^2 + tr(S)/B on average.
Two batch sizes give both. Their ratio tr(S)/|G|^2 is the *simple noise scale* (McCandlish et al. 2018, An Empirical
Model of Large-Batch Training): batches far below it gain from being larger, batches far above it do not. One look at
either is mostly chance, and a mean of ratios is not the ratio; so both are averaged on their own, and then divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

KEEP = 0.95  # of what was known, at every look: about the last twenty count
_FEWEST = 3  # looks before anybody should believe it
_FEWEST_BOUND = 10  # looks before their spread tells how far the mean may be off
_ROUNDING = 1e-6  # of what is averaged: looks that lie no further apart are all alike
_ERRORS = 2.0  # standard errors that the gradient may be longer than it seems


def split(small_sqr: float, small: float, big_sqr: float, big: float) -> tuple[float, float]:
    """|G|^2 and tr(S), from the square norms of gradients of `small` and of `big` samples. Right on average only: each
    may come out below 0."""
    if not 0 < small < big:
        raise ValueError(f"batches of {small} and {big} samples tell nothing about each other")
    grad_sqr = (big * big_sqr - small * small_sqr) / (big - small)
    grad_var = (small_sqr - big_sqr) / (1 / small - 1 / big)
    return grad_sqr, grad_var


class Noise:
    """The estimate, over a run. Several parts of the model (parameter groups) may be told apart.

    Attributes:
        count: how many looks it rests on.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sqr: list[float] = []
        self._var: list[float] = []
        self._squares = 0  # looks whose spread is known, and the mean of their squares
        self._squared = 0.0

    def look(self, small_sqr: Sequence[float], small: float, big_sqr: Sequence[float], big: float) -> None:
        """Square norms by group. One that is no number (a loss that was none) is passed over."""
        found = [split(one, small, two, big) for one, two in zip(small_sqr, big_sqr, strict=True)]
        if not found or not all(math.isfinite(value) for pair in found for value in pair):
            return
        if len(found) != len(self._sqr):  # the groups are other ones now
            self.count, self._sqr, self._var = 0, [0.0] * len(found), [0.0] * len(found)
            self._squares, self._squared = 0, 0.0
        self.count += 1
        self._sqr = [KEEP * old + (1 - KEEP) * new for old, (new, _) in zip(self._sqr, found, strict=True)]
        self._var = [KEEP * old + (1 - KEEP) * new for old, (_, new) in zip(self._var, found, strict=True)]
        whole = sum(sqr for sqr, _ in found)
        if math.isfinite(whole * whole):
            self._squares += 1
            self._squared = KEEP * self._squared + (1 - KEEP) * whole * whole

    @property
    def grad_sqr(self) -> float | None:
        return sum(self._sqr) / self._weight() if self.count else None

    @property
    def grad_var(self) -> float | None:
        return sum(self._var) / self._weight() if self.count else None

    @property
    def scale(self) -> float | None:
        """In samples; None while too little is known, or while noise hides the gradient altogether."""
        return self._ratio(sum(self._sqr), sum(self._var))

    @property
    def least_scale(self) -> float | None:
        """What the scale is at least, where noise hides the gradient; None where it does not, or too little is known.

        The gradient is then hardly longer than chance makes it look, which is told by how far looks lie apart.
        """
        mean, variance = self.grad_sqr, self.grad_var
        if self._squares < _FEWEST_BOUND or mean is None or variance is None or variance <= 0.0:
            return None
        squared = self._squared / (1 - KEEP**self._squares)
        counted = (1 + KEEP) / (1 - KEEP) * (1 - KEEP**self._squares) / (1 + KEEP**self._squares)
        error = math.sqrt(max(0.0, squared - mean * mean) / (counted - 1.0))
        if not _ROUNDING * abs(mean) < error < math.inf or mean >= error:
            return None
        least = variance / (max(mean, 0.0) + _ERRORS * error)
        return least if math.isfinite(least) else None

    @property
    def by_group(self) -> list[float | None]:
        return [self._ratio(sqr, var) for sqr, var in zip(self._sqr, self._var, strict=True)]

    def _weight(self) -> float:
        """What the looks so far count together: averages begin at 0, and this takes the beginning out."""
        return 1.0 - KEEP**self.count

    def _ratio(self, sqr: float, var: float) -> float | None:
        return max(0.0, var / sqr) if self.count >= _FEWEST and sqr > 0 else None

    def state(self) -> dict[str, Any]:
        return {
            "count": self.count, "sqr": self._sqr, "var": self._var, "squares": self._squares, "squared": self._squared
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])
        self._sqr, self._var = [float(one) for one in state["sqr"]], [float(one) for one in state["var"]]
        # Checkpoints of earlier versions do not have these.
        self._squares, self._squared = int(state.get("squares", 0)), float(state.get("squared", 0.0))
