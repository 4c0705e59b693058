"""How fast a training is at the batch its user chose, from what it measured of itself, and from others like it.

In production the global batch is the user's: with more slots each does less of it. Work is counted in samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from diamond.planner.pools.profiles import Prior
from diamond.planner.pools.snapshot import Shape, Speed
from diamond.planner.pools.speeds import Linear
from diamond.planner.pools.steptimes import Measurement, StepTimes


class Window(NamedTuple):
    """What a training did at one size: steps of that many seconds, of a global batch of that many samples."""

    nodes: int
    slots: int
    global_batch: int
    step_s: float


class AtOwnBatch:
    """A `Speed` for a training whose global batch stays as it is."""

    def __init__(self, times: StepTimes, global_batch: int) -> None:
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}: give a whole number of at least 1")
        self.times = times
        self.global_batch = global_batch
        self._known: dict[Shape, float] = {}

    def goodput(self, shape: Shape) -> float:
        if shape not in self._known:
            self._known[shape] = self._found(shape)
        return self._known[shape]

    def _found(self, shape: Shape) -> float:
        if not 1 <= shape.gpus <= self.global_batch or shape.nodes < 1:
            return 0.0
        seconds = self.times.step_s(shape, self._share(shape))
        return self.global_batch / seconds if 0.0 < seconds < math.inf else 0.0

    def doubt(self, shape: Shape) -> float:
        return self.times.doubt(shape, self._share(shape)) if self.goodput(shape) > 0.0 else 0.0

    def _share(self, shape: Shape) -> int:
        return max(1, math.ceil(self.global_batch / max(shape.gpus, 1)))


def measurements(kind: str, windows: Iterable[Window]) -> list[Measurement]:
    """In the words of `StepTimes`; windows that make no sense are left out."""
    return [
        Measurement(Shape(kind, one.nodes, one.slots), math.ceil(one.global_batch / one.slots), math.nan, one.step_s)
        for one in windows
        if one.nodes >= 1 and one.slots >= one.nodes and one.global_batch >= 1 and 0.0 < one.step_s < math.inf
    ]


def speed(kind: str, windows: Sequence[Window], prior: Prior | None, default_batch: int | None = None) -> Speed:
    """From what was measured, with what others like it suggest; where neither is there, a guess with much doubt.

    Args:
        default_batch: of those like it, where it has not measured anything itself.
    """
    own = measurements(kind, windows)
    times = prior.times if prior is not None else None
    batch = windows[-1].global_batch if windows else default_batch
    if (not own and times is None) or batch is None or batch < 1:
        return Linear()
    return AtOwnBatch(StepTimes.fit(own, times) if own else times or StepTimes.fit(own), batch)
