"""How fast tasks are, as policies ask for it: from a model, from a table, or from nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from diamond.planner.pools.batches import Batch, Limits, Noise, best_batches
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.steptimes import StepTimes

# A factor of about three either way: what is known of a task that never ran.
NOTHING_KNOWN = 1.0


class Estimated:
    """Of a task with a model: the goodput of its best batch. Remembers what it was asked.

    Args:
        noise_doubt: how far the efficiency may be off, as a standard deviation of its logarithm.
    """

    def __init__(self, times: StepTimes, noise: Noise, limits: Limits, noise_doubt: float = 0.0) -> None:
        if not 0.0 <= noise_doubt < math.inf:
            raise ValueError(f"noise_doubt is {noise_doubt}: give a number of at least 0")
        self.times = times
        self.noise = noise
        self.limits = limits
        self._noise_doubt = noise_doubt
        self._best: dict[Shape, tuple[float, Batch]] = {}
        self._doubts: dict[Shape, float] = {}

    def prepare(self, shapes: Iterable[Shape]) -> None:
        """Work out many shapes at once, which is faster than one after the other."""
        new = [shape for shape in dict.fromkeys(shapes) if shape not in self._best]
        self._best.update(zip(new, best_batches(self.times, self.noise, self.limits, new), strict=True))

    def goodput(self, shape: Shape) -> float:
        return self._found(shape)[0]

    def batch(self, shape: Shape) -> Batch:
        """The batch that goodput is of; without samples where the task cannot run."""
        return self._found(shape)[1]

    def doubt(self, shape: Shape) -> float:
        if shape not in self._doubts:
            self.prepare([shape])
            new = [one for one in self._best if one not in self._doubts]
            runs = [one for one in new if self._best[one][0] > 0.0]
            values = self.times.doubts(runs, [self._best[one][1].per_gpu for one in runs]).tolist()
            self._doubts.update(dict.fromkeys(new, 0.0))  # that it cannot run there is certain
            self._doubts.update(
                (one, math.hypot(value, self._noise_doubt)) for one, value in zip(runs, values, strict=True)
            )
        return self._doubts[shape]

    def _found(self, shape: Shape) -> tuple[float, Batch]:
        if shape not in self._best:
            self.prepare([shape])
        return self._best[shape]


class Linear:
    """Of a task nothing is known of: twice the GPUs are twice as fast, on whatever kind, and there is much doubt.

    Args:
        rate: work a second on one GPU.
    """

    def __init__(self, rate: float = 1.0, doubt: float = NOTHING_KNOWN) -> None:
        if not 0.0 < rate < math.inf:
            raise ValueError(f"rate is {rate}: give a number above 0")
        if not 0.0 <= doubt < math.inf:
            raise ValueError(f"doubt is {doubt}: give a number of at least 0")
        self._rate = rate
        self._doubt = doubt

    def goodput(self, shape: Shape) -> float:
        return self._rate * max(0, shape.gpus)

    def doubt(self, shape: Shape) -> float:
        return self._doubt


class Fixed:
    """From a table; 0.0 for shapes it does not name."""

    def __init__(self, table: Mapping[Shape, float]) -> None:
        for shape, goodput in table.items():
            if not 0.0 <= goodput < math.inf:
                raise ValueError(f"table says {goodput} for {tuple(shape)}: give a number of at least 0")
        self._table = dict(table)

    def goodput(self, shape: Shape) -> float:
        return self._table.get(shape, 0.0)

    def doubt(self, shape: Shape) -> float:
        return 0.0
