"""Which batch a task should have on given GPUs, and what that is worth: throughput times statistical efficiency.

A larger batch uses GPUs better and each sample less well. How much less is what the gradient's noise tells. Everything
is counted in samples at the reference batch, at which a task's author chose the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.steptimes import StepTimes, overlapped

CANDIDATES = 50
# Totals that should be whole numbers come out of logarithms a little off.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Limits:
    """Which batches a task can have.

    Attributes:
        reference: the total batch its learning rate was chosen for; it gets no smaller one.
        largest: the largest total batch.
        per_gpu: the fewest and the most samples on one GPU at once.
        accumulates: whether a step may take several passes.
    """

    reference: int
    largest: int
    per_gpu: tuple[int, int]
    accumulates: bool = True

    def __post_init__(self) -> None:
        if self.reference < 1:
            raise ValueError(f"reference must be at least 1, and is {self.reference}")
        if self.largest < self.reference:
            raise ValueError(f"largest is {self.largest}: give the reference batch {self.reference} or more")
        fewest, most = self.per_gpu
        if not 1 <= fewest <= most:
            raise ValueError(f"per_gpu is {self.per_gpu}: give the fewest, at least 1, and the most samples on a GPU")


class Batch(NamedTuple):
    """Samples on each GPU at once, and how many further passes there are before a step."""

    per_gpu: int
    accumulation: int

    def total(self, gpus: int) -> int:
        return self.per_gpu * (self.accumulation + 1) * gpus


class Noise(NamedTuple):
    """Of the gradient at the reference batch: the squared length of its mean, and its variance.

    What is not a number or negative counts as 0. Where both are 0 nothing is known: samples beyond the reference batch
    are then taken to be worth nothing.
    """

    square: float
    variance: float

    def efficiency(self, total: int, reference: int) -> float:
        """What a sample in a batch of `total` is worth by one in the reference batch: in (0, 1]."""
        return float(self.efficiencies(np.array([float(total)]), reference)[0])

    def efficiencies(self, totals: NDArray[np.float64], reference: int) -> NDArray[np.float64]:
        """`efficiency` of many."""
        square, variance = self._shares()
        scale = np.maximum(1.0, totals / reference)
        return np.asarray(1.0 / (variance + square * scale))

    def _shares(self) -> tuple[float, float]:
        """Both by their sum; large numbers must not overflow in it."""
        square = self.square if self.square > 0.0 else 0.0
        variance = self.variance if self.variance > 0.0 else 0.0
        if math.isinf(square) or square == variance == 0.0:
            return 1.0, 0.0
        if math.isinf(variance):
            return 0.0, 1.0
        most = max(square, variance)
        both = square / most + variance / most
        return square / most / both, variance / most / both


def learning_rate_scale(noise: Noise, reference: int, total: int) -> float:
    """What the learning rate is multiplied by at this batch (AdaScale's gain): between 1 and total / reference."""
    return noise.efficiency(total, reference) * max(1.0, total / reference)


def best_batch(times: StepTimes, noise: Noise, limits: Limits, shape: Shape) -> tuple[float, Batch]:
    """Goodput in samples of the reference batch a second, and the batch that gives it.

    0.0 and no samples where the task cannot run: its smallest batch on so many GPUs is above the largest, or its
    reference batch does not fit on them.
    """
    return best_batches(times, noise, limits, [shape])[0]


def best_batches(times: StepTimes, noise: Noise, limits: Limits, shapes: Sequence[Shape]) -> list[tuple[float, Batch]]:
    """`best_batch` of many shapes at once."""
    if not shapes:
        return []
    terms = np.array([times.terms(shape) for shape in shapes])
    constant, sample, sync, factor = (column[:, None] for column in terms.T)
    gpus = np.array([[max(1, shape.gpus)] for shape in shapes], float)
    per_gpu, passes, fits = _candidates(limits, gpus)
    fits &= np.array([[1 <= shape.nodes <= shape.gpus] for shape in shapes])
    compute = constant + sample * per_gpu
    step = (passes - 1.0) * compute + factor * overlapped(compute, sync, times.overlap)
    total = gpus * per_gpu * passes
    goodput = np.where(fits, total / step * noise.efficiencies(total, limits.reference), 0.0)
    best = goodput.argmax(axis=1)
    found = []
    for row, column in enumerate(best.tolist()):
        value = float(goodput[row, column])
        batch = Batch(int(per_gpu[row, column]), int(passes[row, column]) - 1) if value > 0.0 else Batch(0, 0)
        found.append((value, batch))
    return found


def _candidates(
    limits: Limits, gpus: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Samples on a GPU and passes, a row for each number of GPUs, and which of them are within the limits."""
    fewest, most = limits.per_gpu
    smallest = np.maximum(limits.reference, fewest * gpus)
    largest = np.maximum(smallest, limits.largest if limits.accumulates else np.minimum(limits.largest, most * gpus))
    totals = smallest * (largest / smallest) ** np.linspace(0.0, 1.0, CANDIDATES)
    local = totals / gpus
    passes = np.ones_like(local)
    if limits.accumulates:
        passes = np.maximum(1.0, np.ceil(local / most - ROUNDING))
        # The noise is measured by comparing parts of a batch: on one GPU, a second pass is the other part.
        lonely = (gpus == 1.0) & (local > limits.reference + ROUNDING)
        passes = np.where(lonely, np.maximum(2.0, passes), passes)
    per_gpu = np.maximum(fewest, np.ceil(local / passes - ROUNDING))
    # Rounded up, a batch may be above the largest: only the smallest one may, for there may be no other.
    least = np.maximum(fewest, np.ceil(limits.reference / gpus / passes - ROUNDING))
    inside = (per_gpu * passes * gpus <= limits.largest) | ((per_gpu == least) & (passes * gpus <= limits.largest))
    return per_gpu, passes, inside & (per_gpu >= fewest) & (per_gpu <= most) & (fewest * gpus <= limits.largest)
