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
        self._squared = 0.0  # mean of the square of what single looks give for |G|^2

    def look(self, small_sqr: Sequence[float], small: float, big_sqr: Sequence[float], big: float) -> None:
        """Square norms by group. One that is no number (a loss that was none) is passed over."""
        found = [split(one, small, two, big) for one, two in zip(small_sqr, big_sqr, strict=True)]
        if not found or not all(math.isfinite(value) for pair in found for value in pair):
            return
        if len(found) != len(self._sqr):  # the groups are other ones now
            self.count, self._sqr, self._var, self._squared = 0, [0.0] * len(found), [0.0] * len(found), 0.0
        self.count += 1
        self._sqr = [KEEP * old + (1 - KEEP) * new for old, (new, _) in zip(self._sqr, found, strict=True)]
        self._var = [KEEP * old + (1 - KEEP) * new for old, (_, new) in zip(self._var, found, strict=True)]
        self._squared = KEEP * self._squared + (1 - KEEP) * sum(sqr for sqr, _ in found) ** 2

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

        The gradient is then no longer than chance makes it look: by one standard error of what was averaged.
        """
        mean, variance = self.grad_sqr, self.grad_var
        if self.count < _FEWEST or mean is None or variance is None or variance <= 0.0:
            return None
        counted = (1 + KEEP) / (1 - KEEP) * (1 - KEEP**self.count) / (1 + KEEP**self.count)
        error = math.sqrt(max(0.0, self._squared / self._weight() - mean**2) / max(counted - 1.0, 1.0))
        return variance / error if mean < error else None

    @property
    def by_group(self) -> list[float | None]:
        return [self._ratio(sqr, var) for sqr, var in zip(self._sqr, self._var, strict=True)]

    def _weight(self) -> float:
        """What the looks so far count together: averages begin at 0, and this takes the beginning out."""
        return 1.0 - KEEP**self.count

    def _ratio(self, sqr: float, var: float) -> float | None:
        return max(0.0, var / sqr) if self.count >= _FEWEST and sqr > 0 else None

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "sqr": self._sqr, "var": self._var, "squared": self._squared}

    def load(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])
        self._sqr, self._var = [float(one) for one in state["sqr"]], [float(one) for one in state["var"]]
        # Checkpoints of earlier versions do not have it: as if every look had been the mean, so no bound for a while.
        self._squared = float(state.get("squared", sum(self._sqr) ** 2))
