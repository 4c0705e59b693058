"""What tasks measure: times of steps on GPUs that they had, and what of that can be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from diamond.planner.pools.snapshot import Shape

SHORTEST_S, LONGEST_S = 1e-6, 1e6
MOST_SAMPLES = 10**9


class Measurement(NamedTuple):
    """Times of one task on one shape.

    Attributes:
        per_gpu: samples on each GPU.
        compute_s: forward and backward of these without synchronisation, as in a pass of gradient accumulation.
        step_s: a whole step with synchronisation.
    """

    shape: Shape
    per_gpu: int
    compute_s: float
    step_s: float


class Merged(NamedTuple):
    """Measurements of one shape and batch: their medians, and how many they were."""

    shape: Shape
    per_gpu: int
    compute_s: float
    step_s: float
    repeats: int


def merged(measurements: Iterable[Measurement]) -> list[Merged]:
    """Medians by shape and batch, with how many they are of; NaN for a time nobody measured.

    What cannot be is left out. Sorted, so that the order in which measurements arrive changes nothing.
    """
    found: dict[tuple[Shape, int], list[tuple[float, float]]] = {}
    for one in measurements:
        shape = Shape(*one.shape)
        sane = shape.gpus >= 1 and 1 <= shape.nodes <= shape.gpus and 1 <= one.per_gpu <= MOST_SAMPLES
        compute, step = _time(one.compute_s), _time(one.step_s)
        torn = step < 0.5 * compute
        if sane and not torn and not (math.isnan(compute) and math.isnan(step)):
            found.setdefault((shape, int(one.per_gpu)), []).append((compute, step))
    return [
        Merged(*key, _median([pair[0] for pair in pairs]), _median([pair[1] for pair in pairs]), len(pairs))
        for key, pairs in sorted(found.items())
    ]


def _time(seconds: float) -> float:
    return float(seconds) if SHORTEST_S <= seconds <= LONGEST_S else math.nan


def _median(times: Iterable[float]) -> float:
    there = [time for time in times if not math.isnan(time)]
    return statistics.median(there) if there else math.nan
