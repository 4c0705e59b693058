"""How fast a training is, from what it measured of itself, and from others like it.

In production the global batch is the user's (`AtOwnBatch`): with more slots each does less of it. Where the user lets
it grow and counts the training's end in samples, it is chosen (`AtBestBatch`). Work is counted in samples, there in
samples of the first batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diamond.planner.pools.batches import Limits, Noise
from diamond.planner.pools.measurements import LONGEST_S, Measurement
from diamond.planner.pools.profiles import Past, Prior, past_of
from diamond.planner.pools.snapshot import Shape, Speed
from diamond.planner.pools.speeds import Estimated, Linear
from diamond.planner.pools.steptimes import StepTimes

MOST_BATCH = 10**9
# Where a training sets no bound itself: times its first batch, and times its noise scale, from where on samples are
# worth a ninth.
MOST_GROWTH = 32
MOST_BY_NOISE = 8
_RUNGS = 20  # that lead from the first batch to thirty times as much, each a fifth higher
# Which of a task's keys is its name: after that of its code, and that of its command.
NAME_LEVEL = 2
MOST_EXCHANGE = 0.95  # of a step: what it waits for other ranks; some of it computes


class Window(NamedTuple):
    """What a training did at one size: steps of that many seconds, of a global batch of that many samples.

    Attributes:
        per_rank: samples that a rank computes at once; None: all of its share.
        comm_s: of a step, what it waited for other ranks; None: nobody knows.
    """

    nodes: int
    slots: int
    global_batch: int
    step_s: float
    per_rank: int | None = None
    comm_s: float | None = None

    @property
    def passes(self) -> int:
        """How often a rank computes for a step."""
        return -(-_share(self.global_batch, self.slots) // self.per_rank) if self.per_rank else 1

    @property
    def makes_sense(self) -> bool:
        return 1 <= self.nodes <= self.slots and self.global_batch >= 1 and 0.0 < self.step_s < math.inf


class Growth(NamedTuple):
    """What there is to know of a training whose batch may grow.

    Attributes:
        first: the batch its learning rate belongs to.
        most: the largest it may have; None where it does not say.
        per_rank: samples that a rank computes at once.
        noise_scale: of its gradient, in samples.
        now: the batch it has, or had last.
        where: what it runs on with that batch; None while it waits.
    """

    first: int
    most: int | None
    per_rank: int
    noise_scale: float
    now: int
    where: Shape | None = None

    @property
    def is_sane(self) -> bool:
        bounded = all(1 <= one <= MOST_BATCH for one in (self.first, self.per_rank, self.now))
        return bounded and 0.0 <= self.noise_scale < math.inf and (self.most is None or self.most >= self.first)

    @property
    def limits(self) -> Limits:
        largest = MOST_GROWTH * self.first if self.most is None else self.most
        largest = min(largest, int(min(MOST_BY_NOISE * self.noise_scale, MOST_BATCH)))
        return Limits(self.first, max(self.first, largest), (1, self.per_rank))

    @property
    def noise(self) -> Noise:
        """Of a gradient of the first batch. The noise scale is what one sample's varies by the mean's square; a mean
        of `first` samples varies so many times less."""
        return Noise(1.0, self.noise_scale / self.first)


class AtOwnBatch:
    """A `Speed` for a training whose global batch stays as it is.

    Args:
        is_guess: the batch is that of another task: so it does not say on how many slots this one can run.
    """

    def __init__(self, times: StepTimes, global_batch: int, *, is_guess: bool = False) -> None:
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}: give a whole number of at least 1")
        self.times = times
        self.global_batch = global_batch
        self._is_guess = is_guess
        self._known: dict[Shape, float] = {}

    def goodput(self, shape: Shape) -> float:
        if shape not in self._known:
            self._known[shape] = self._found(shape)
        return self._known[shape]

    def _found(self, shape: Shape) -> float:
        if shape.gpus < 1 or shape.nodes < 1 or (shape.gpus > self.global_batch and not self._is_guess):
            return 0.0
        seconds = self.times.step_s(shape, _share(self.global_batch, shape.gpus))
        return self.global_batch / seconds if 0.0 < seconds < math.inf else 0.0

    def doubt(self, shape: Shape) -> float:
        return self.times.doubt(shape, _share(self.global_batch, shape.gpus)) if self.goodput(shape) > 0.0 else 0.0


class AtBestBatch:
    """A `Speed` for a training whose batch Diamond chooses: on any shape the best one there, but for the shape it has,
    where it keeps the batch it began with. `times`: of single passes (see `passes`)."""

    def __init__(self, times: StepTimes, growth: Growth) -> None:
        if not growth.is_sane:
            raise ValueError(f"growth is {growth}: give batches of at least 1, and a most that is not below the first")
        self.times = times
        self.growth = growth
        self._limits = growth.limits
        self._best = Estimated(times, growth.noise, self._limits)
        self._known: dict[Shape, tuple[float, int]] = {}

    def goodput(self, shape: Shape) -> float:
        return self._goodput(shape, self.growth.now) if shape == self.growth.where else self._found(shape)[0]

    def doubt(self, shape: Shape) -> float:
        batch = self.batch(shape)
        return self.times.doubt(shape, self._at_once(shape, batch)[0]) if batch and self.goodput(shape) > 0.0 else 0.0

    def best(self, shape: Shape) -> int:
        """The batch to begin with there, also where it is now; 0 where it cannot run."""
        return self._found(shape)[1]

    def batch(self, shape: Shape) -> int:
        """The batch that `goodput` is of."""
        return self.growth.now if shape == self.growth.where else self.best(shape)

    def efficiency(self, batch: int) -> float:
        """What a sample in such a batch is worth by one in the first batch: in (0, 1]."""
        return self.growth.noise.efficiency(batch, self.growth.first)

    def work(self, samples: float) -> float:
        """So many samples in the unit of this `Speed`, as they come now."""
        return samples * self.efficiency(self.growth.now)

    def work_on(self, work: float, shape: Shape) -> float:
        """What `work` is there, with the batch that it has there: as many samples are trained on, whatever they are
        worth. So over `goodput` it is the time that takes."""
        return work * self.efficiency(max(1, self.batch(shape))) / self.efficiency(self.growth.now)

    def _found(self, shape: Shape) -> tuple[float, int]:
        """Goodput and batch: of those that `batches` tries, and of those that fill every pass, which it may miss."""
        if shape not in self._known:
            found = (self._best.goodput(shape), self._best.batch(shape).total(shape.gpus))
            if found[1] > self._limits.largest:  # rounded up, to be the same in every pass of every rank
                found = (self._goodput(shape, self._limits.largest), self._limits.largest)
            if shape.gpus <= self.growth.first:
                found = max(found, *((self._goodput(shape, batch), batch) for batch in self._whole(shape.gpus)))
            self._known[shape] = found
        return self._known[shape]

    def _whole(self, gpus: int) -> list[int]:
        """Batches of whole passes, each about a fifth larger than the one before; with none, the first batch."""
        step = gpus * self.growth.per_rank
        least, most = -(-self._limits.reference // step), self._limits.largest // step
        ladder = {min(most, math.ceil(least * 1.2**power)) for power in range(_RUNGS)}
        return [step * count for count in sorted(ladder) if least <= count <= most] or [self.growth.first]

    def _goodput(self, shape: Shape, batch: int) -> float:
        if not 1 <= shape.nodes <= shape.gpus:
            return 0.0
        per_gpu, passes = self._at_once(shape, batch)
        compute_s = self.times.compute_s(shape.gpu_type, per_gpu)
        throughput = batch / ((passes - 1) * compute_s + self.times.step_s(shape, per_gpu))
        return throughput * self.efficiency(batch) if math.isfinite(throughput) else 0.0

    def _at_once(self, shape: Shape, batch: int) -> tuple[int, int]:
        """Samples on a GPU at once, and passes."""
        share = _share(batch, shape.gpus)
        passes = -(-share // self.growth.per_rank)
        return -(-share // passes), passes


def _share(global_batch: int, slots: int) -> int:
    return max(1, math.ceil(global_batch / max(slots, 1)))


def measurements(kind: str, windows: Iterable[Window]) -> list[Measurement]:
    """In the words of `StepTimes`; windows that make no sense are left out."""
    return [
        Measurement(Shape(kind, one.nodes, one.slots), _share(one.global_batch, one.slots), math.nan, one.step_s)
        for one in windows
        if one.makes_sense
    ]


def passes(kind: str, windows: Iterable[Window]) -> list[Measurement]:
    """The same, of steps with a single pass: those before the last exchange nothing, and are taken off."""
    return [_pass(kind, one) for one in windows if one.makes_sense]


def _pass(kind: str, window: Window) -> Measurement:
    count = window.passes
    waited_s = window.comm_s if window.slots > 1 and window.comm_s is not None else 0.0
    exchange_s = min(max(waited_s, 0.0), MOST_EXCHANGE * window.step_s)
    compute_s = (window.step_s - exchange_s) / count
    per_gpu = -(-_share(window.global_batch, window.slots) // count)
    return Measurement(Shape(kind, window.nodes, window.slots), per_gpu, math.nan, compute_s + exchange_s)


class Live:
    """Tasks that are not over and have measured something, by their keys: they speak for those like them that have not,
    as long as none that is over does."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.pasts: dict[str, list[Past]] = {}
        self._batches: dict[str, int] = {}

    def add(self, keys: Sequence[str], windows: Iterable[Window], restart_s: float | None) -> None:
        """One more. Times are rounded: what follows from them need not be worked out anew for every step."""
        known = [one._replace(step_s=_rounded(one.step_s)) for one in windows if one.makes_sense]
        if not known:
            return
        past = past_of(measurements(self._kind, known), restart_s=_rounded(restart_s) if restart_s else None)
        for key in keys:
            self.pasts.setdefault(key, []).append(past)
            self._batches[key] = known[-1].global_batch

    def batch(self, keys: Sequence[str], past: Mapping[str, int]) -> int | None:
        """The global batch of the one most like it, of those that are over (`past`, by key) or not."""
        return next((found for key in keys if (found := past.get(key) or self._batches.get(key))), None)


def is_known(prior: Prior | None) -> bool:
    """Whether tasks of the same code or command were measured: only that they had the same name is not enough to take
    it for a training, of which there may be several ranks."""
    return prior is not None and prior.times is not None and prior.level < NAME_LEVEL


def _rounded(seconds: float) -> float:
    """To within four percent."""
    return 2.0 ** (round(math.log2(min(seconds, LONGEST_S)) * 8) / 8) if seconds > 0.0 else seconds


def speed(
    kind: str,
    windows: Sequence[Window],
    prior: Prior | None,
    default_batch: int | None = None,
    growth: Growth | None = None,
) -> Speed:
    """From what was measured, with what others like it suggest; where neither is there, a guess with much doubt.

    Args:
        default_batch: of those like it, where it has not measured anything itself.
        growth: of one whose batch is to be chosen; it has measured something.
    """
    own = measurements(kind, windows)
    times = prior.times if prior is not None else None
    batch = windows[-1].global_batch if windows else default_batch
    if (not own and times is None) or batch is None or batch < 1:
        return Linear()
    if own and growth is not None and growth.is_sane:
        return AtBestBatch(StepTimes.fit(passes(kind, windows), times), growth)
    return AtOwnBatch(StepTimes.fit(own, times) if own else times or StepTimes.fit(own), batch, is_guess=not windows)
