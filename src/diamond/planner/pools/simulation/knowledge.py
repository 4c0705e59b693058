"""What a simulated task knows of itself: everything, or what it has measured and others like it have left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from diamond.planner.pools.batches import Batch, Noise
from diamond.planner.pools.measurements import Measurement
from diamond.planner.pools.profiles import Past, Prior, Profiles, past_of
from diamond.planner.pools.simulation.applications import Application, Counts
from diamond.planner.pools.simulation.running import counts_of
from diamond.planner.pools.snapshot import Shape, Speed, Work
from diamond.planner.pools.speeds import Estimated, Linear
from diamond.planner.pools.steptimes import StepTimes

SAID_DOUBT = 0.2  # of a speed that a user knows from earlier tasks
LOOK_AGAIN = 0.05  # change of the gradient's noise, in its logarithm, from which on speeds are worked out anew
MEASURE_AGAIN = 0.1  # the same of the samples on a GPU, from which on a step is measured anew


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What holds for a task whatever is known of it.

    Attributes:
        gpus, total: how many GPUs and which batch, where neither is to be chosen for it.
        most_gpus: that the pool lets one task have.
        per_node: GPUs of a node, by kind.
    """

    per_node: Mapping[str, int]
    gpus: int | None = None
    total: int | None = None
    most_gpus: int = 64

    def bounds(self, application: Application, most: int) -> tuple[int, int]:
        if self.gpus is not None:
            return self.gpus, self.gpus
        usable = max(application.most_gpus(kind) for kind in self.per_node if application.runs_on(kind))
        return 1, max(1, min(most, self.most_gpus, usable))


class TrueSpeed:
    """How fast it really is in an epoch, at its best batch or at the one that was asked for."""

    def __init__(self, application: Application, asked: Asked, epoch: int) -> None:
        self._application = application
        self._asked = asked
        self._epoch = epoch
        self._found: dict[Shape, float] = {}

    def goodput(self, shape: Shape) -> float:
        if shape not in self._found:
            self._found[shape] = self._looked_up(shape)
        return self._found[shape]

    def doubt(self, shape: Shape) -> float:
        return 0.0

    def _looked_up(self, shape: Shape) -> float:
        if shape.gpus < max(1, shape.nodes) or not self._application.runs_on(shape.gpu_type):
            return 0.0
        counts = counts_of(shape.nodes, shape.gpus, self._asked.per_node.get(shape.gpu_type, shape.gpus))
        total = self._asked.total or self._application.fixed_batch
        if total is None:
            return float(self._application.best(shape.gpu_type, counts)[0][self._epoch])
        batch = self._application.split(shape.gpu_type, counts, total)
        return float(self._application.rates(shape.gpu_type, counts, batch)[self._epoch])


class Known:
    """An oracle: all that is true, and how long it lasts."""

    def __init__(self, application: Application, asked: Asked, restart_s: float) -> None:
        self.usual_restart_s: float | None = restart_s
        self._application = application
        self._asked = asked
        self._speed: tuple[int, TrueSpeed] | None = None

    def saw(self, epoch: int, gpu_type: str, counts: Counts, batch: Batch, pace: float) -> None:
        """Nothing that it did not know."""

    def batch(self, epoch: int, gpu_type: str, counts: Counts) -> Batch:
        total = self._asked.total or self._application.fixed_batch
        if total is None:
            return self._application.best(gpu_type, counts)[1][epoch]
        return self._application.split(gpu_type, counts, total)

    def speed(self, epoch: int) -> Speed:
        if self._speed is None or self._speed[0] != epoch:
            self._speed = (epoch, TrueSpeed(self._application, self._asked, epoch))
        return self._speed[1]

    def left(self, done: float) -> Work | None:
        left = max(0.0, self._application.total - done)
        return Work(left, left, left)

    def gpus(self) -> tuple[int, int]:
        return self._asked.bounds(self._application, self._asked.most_gpus)


class Stated:
    """A recorded task: its user said at most how long it would take, and on how many GPUs."""

    def __init__(self, gpus: int, limit_s: float | None) -> None:
        self.usual_restart_s: float | None = 0.0
        self._gpus = gpus
        self._limit_s = limit_s
        self._speed = one_size(gpus)

    def saw(self, epoch: int, gpu_type: str, counts: Counts, batch: Batch, pace: float) -> None:
        """Nothing that would change what its user said."""

    def batch(self, epoch: int, gpu_type: str, counts: Counts) -> Batch:
        return Batch(per_gpu=1, accumulation=0)

    def speed(self, epoch: int) -> Speed:
        return self._speed

    def left(self, done: float) -> Work | None:
        if self._limit_s is None:
            return None
        left = max(0.0, self._limit_s - done)
        return Work(left, 0.0, left)

    def gpus(self) -> tuple[int, int]:
        return self._gpus, self._gpus


class OneSize:
    """A second of work a second, on exactly so many GPUs."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus

    def goodput(self, shape: Shape) -> float:
        return 1.0 if shape.gpus == self._gpus else 0.0

    def doubt(self, shape: Shape) -> float:
        return 0.0


@lru_cache(maxsize=4096)
def one_size(gpus: int) -> OneSize:
    """The same object for all tasks of a size: policies see at once that they are alike."""
    return OneSize(gpus)


class AtBatch:
    """How fast a task is expected to be at a batch that is not to be changed."""

    def __init__(self, application: Application, times: StepTimes, noise: Noise, asked: Asked, total: int) -> None:
        self._application = application
        self._times = times
        self._asked = asked
        self._total = total
        self._efficiency = noise.efficiency(total, application.reference)

    def goodput(self, shape: Shape) -> float:
        if shape.gpus < max(1, shape.nodes) or not self._application.runs_on(shape.gpu_type):
            return 0.0
        batch = self._batch(shape)
        step_s = self._times.step_s(shape, batch.per_gpu)
        passes_s = batch.accumulation * self._times.compute_s(shape.gpu_type, batch.per_gpu)
        total = batch.per_gpu * (batch.accumulation + 1) * shape.gpus
        return total * self._efficiency / (step_s + passes_s)

    def doubt(self, shape: Shape) -> float:
        return self._times.doubt(shape, self._batch(shape).per_gpu)

    def _batch(self, shape: Shape) -> Batch:
        counts = counts_of(shape.nodes, shape.gpus, self._asked.per_node.get(shape.gpu_type, shape.gpus))
        return self._application.split(shape.gpu_type, counts, self._total)


class ByType:
    """One model for each kind of GPU: what fits on one of them is not the same on all.

    Args:
        likely: shapes that will be asked for: worked out together when the first of their kind is.
    """

    def __init__(self, speeds: Mapping[str, Estimated], likely: Sequence[Shape] = ()) -> None:
        self.speeds = speeds
        self._likely = likely
        self._ready: set[str] = set()

    def goodput(self, shape: Shape) -> float:
        speed = self._prepared(shape.gpu_type)
        return speed.goodput(shape) if speed else 0.0

    def doubt(self, shape: Shape) -> float:
        speed = self._prepared(shape.gpu_type)
        return speed.doubt(shape) if speed else 0.0

    def _prepared(self, kind: str) -> Estimated | None:
        speed = self.speeds.get(kind)
        if speed is not None and kind not in self._ready:
            self._ready.add(kind)
            speed.prepare(shape for shape in self._likely if shape.gpu_type == kind)
        return speed


class Learnt:
    """What it has measured of itself, from a prior of tasks like it if there is one.

    Args:
        noise: standard deviation of the logarithm of a measured time, and of the gradient's noise.
        size: how much work it is, as its user declared or others like it suggest; None where nobody can say.
        said_rate: work a second on one GPU as its user says, for as long as nothing was measured.
        probed: it has run a step on one GPU of every kind before it came, as Sia assumes.
    """

    def __init__(
        self,
        application: Application,
        asked: Asked,
        random: np.random.Generator,
        *,
        noise: float = 0.0,
        prior: Prior | None = None,
        size: Prior | None = None,
        said_rate: float | None = None,
        probed: bool = False,
    ) -> None:
        self._application = application
        self._asked = asked
        self._random = random
        self._noise = noise
        self._prior = prior
        self._size = size
        self._said_rate = said_rate
        self.measurements: dict[tuple[Shape, int], Measurement] = {}
        self.noises: list[tuple[float, Noise]] = []
        self.usual_restart_s = prior.restart_s if prior else None
        self._gradient: Noise | None = prior.noise(0.0) if prior else None
        self._times: StepTimes | None = prior.times if prior else None
        self._speed: Speed | None = None
        if probed:
            for kind in asked.per_node:
                self._measure(kind, (1,), self._application.split(kind, (1,), self._application.reference).per_gpu, 1.0)

    def saw(self, epoch: int, gpu_type: str, counts: Counts, batch: Batch, pace: float) -> None:
        self._measure(gpu_type, counts, batch.per_gpu, pace)
        total = batch.per_gpu * (batch.accumulation + 1) * sum(counts)
        self._feel(epoch, self._application.noise(total, epoch))

    def batch(self, epoch: int, gpu_type: str, counts: Counts) -> Batch:
        total = self._asked.total or self._application.fixed_batch
        if total is None and isinstance(self.speed(epoch), ByType):
            shape = Shape(gpu_type, len(counts), sum(counts))
            return self._application.fitted(gpu_type, counts, self._models()[gpu_type].batch(shape))
        smallest = self._application.limits(gpu_type).per_gpu[0] * sum(counts)
        return self._application.split(gpu_type, counts, total or max(self._application.reference, smallest))

    def speed(self, epoch: int) -> Speed:
        if self._speed is None:
            self._speed = self._modelled()
        return self._speed

    def left(self, done: float) -> Work | None:
        """Nothing before its speed is known: work of which nobody can say how long it takes would only mislead."""
        known = self._times is not None or self._said_rate is not None
        return self._size.left(done) if self._size and known else None

    def gpus(self) -> tuple[int, int]:
        """Without a prior, at most twice of what it has been measured on."""
        most = max((shape.gpus for shape, _ in self.measurements), default=0)
        return self._asked.bounds(self._application, self._asked.most_gpus if self._prior else max(1, 2 * most))

    def _measure(self, gpu_type: str, counts: Counts, per_gpu: int, pace: float) -> None:
        shape = Shape(gpu_type, len(counts), sum(counts))
        if any(of == shape and abs(math.log(per_gpu / size)) < MEASURE_AGAIN for of, size in self.measurements):
            return
        step_s, compute_s = self._application.step(gpu_type, counts, per_gpu)
        self.measurements[shape, per_gpu] = Measurement(
            shape, per_gpu, compute_s / pace * self._error(), step_s / pace * self._error()
        )
        self._times = StepTimes.fit(self.measurements.values(), self._prior.times if self._prior else None)
        self._speed = None

    def _feel(self, epoch: int, noise: Noise) -> None:
        share = (epoch + 1) / self._application.epochs
        if self.noises and self.noises[-1][0] == share:
            return
        felt = Noise(square=noise.square, variance=noise.variance * self._error())
        self.noises.append((share, felt))
        if self._gradient is None or _apart(self._gradient, felt) > LOOK_AGAIN:
            self._gradient = felt
            self._speed = None

    def _error(self) -> float:
        return math.exp(self._noise * self._random.standard_normal()) if self._noise else 1.0

    def _modelled(self) -> Speed:
        if self._times is None or self._gradient is None:
            return Linear() if self._said_rate is None else Linear(self._said_rate, doubt=SAID_DOUBT)
        total = self._asked.total or self._application.fixed_batch
        if total is not None:
            return AtBatch(self._application, self._times, self._gradient, self._asked, total)
        return ByType(
            {
                kind: Estimated(self._times, self._gradient, self._application.limits(kind))
                for kind in self._asked.per_node
                if self._application.runs_on(kind)
            },
            self._likely(),
        )

    def _likely(self) -> list[Shape]:
        """On as few nodes as will hold them: any number on a few, whole ones beyond."""
        most = self.gpus()[1]
        return [
            Shape(kind, math.ceil(gpus / per_node), gpus)
            for kind, per_node in self._asked.per_node.items()
            for gpus in range(1, most + 1)
            if gpus <= 2 * per_node or gpus % per_node == 0 or gpus == most
        ]

    def _models(self) -> Mapping[str, Estimated]:
        return self._speed.speeds if isinstance(self._speed, ByType) else {}


def asked_rate(application: Application, asked: Asked) -> float | None:
    """Mean rate, by GPU, at just the GPUs and the batch that were asked for; None where these are to be chosen."""
    if asked.gpus is None or asked.total is None:
        return None
    kind, per_node = next((kind, number) for kind, number in asked.per_node.items() if application.runs_on(kind))
    counts = counts_of(math.ceil(asked.gpus / per_node), asked.gpus, per_node)
    rates = application.rates(kind, counts, application.split(kind, counts, asked.total))
    return application.total / float((np.diff(application.ends, prepend=0.0) / rates).sum()) / asked.gpus


def declared_work(total: float, error: float) -> Prior:
    """What a user says of a task's work, and how far users are off."""
    return Prior("declared", 1, None, None, math.log(total), error, None)


def remember(profiles: Profiles, keys: Sequence[str], learnt: Learnt, total: float, restart_s: float) -> None:
    """A task is done: what it measured serves those like it."""
    profiles.learn(keys, list(learnt.measurements.values()), learnt.noises, total, restart_s)


def so_far(learnt: Learnt) -> Past:
    """What a task that is not done measured, to serve those like it meanwhile."""
    return past_of(learnt.measurements.values(), [(0.0, noise) for _, noise in learnt.noises[:1]])


def _apart(one: Noise, other: Noise) -> float:
    ratios = [noise.variance / noise.square if noise.square > 0 else 0.0 for noise in (one, other)]
    if min(ratios) <= 0:
        return math.inf if ratios[0] != ratios[1] else 0.0
    return abs(math.log(ratios[0] / ratios[1]))
