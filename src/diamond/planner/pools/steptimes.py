"""How long a step of a task takes on GPUs it may never have had, from the few noisy times that were measured.

Compute grows with the samples on a GPU, one line per kind of GPU. Synchronisation is a constant plus a term for each
doubling of the GPUs, within a node and between nodes (and off by a factor on more than two nodes, where libraries
change their way of doing it). Both overlap as a p-norm. All parameters are logarithms with a normal prior; a fit is
the most probable set of them, its covariance is where the doubt comes from. So one measurement is enough for a model,
a model of a similar task can be the prior, and what was never measured has the doubt to show for it. Kinds of GPU
share the parameters and differ by factors, so one GPU of a kind tells much of many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diamond.planner.pools.measurements import Measurement, merged
from diamond.planner.pools.snapshot import Shape

Vector = NDArray[np.float64]

# Places in the vector of parameters: compute's constant and slope, synchronisation within a node, its growth, by how
# much both differ between nodes, the factor on more than two nodes, and the overlap.
CONSTANT, SLOPE, WITHIN, WITHIN_GROWTH, BETWEEN, BETWEEN_GROWTH, MANY, OVERLAP = range(8)
COMMON = 8
# Of each kind of GPU, after those: all of compute, its constant, synchronisation within a node, and between nodes.
OF_TYPE = 4

# Where nothing is known: synchronisation of a seventh of compute, twice that between nodes, growing by a quarter with
# each doubling, overlapping a little. Low on purpose: who overrates it never tries more GPUs.
SYNC_SHARE = math.log(0.15)
BETWEEN_FACTOR = math.log(2.0)
GROWTH = math.log(0.25)
MANY_AT = -0.15
OVERLAP_AT = -2.0
COMMON_SD = np.array([1.0, 1.0, 1.2, 1.0, 0.8, 0.7, 0.4, 1.2])
LEVEL_SD = 3.0
TYPE_SD = np.array([0.7, 0.3, 0.8, 0.5])
# Kinds that compute faster mostly sit in machines that synchronise faster, within nodes and between them: how much so.
FOLLOWS = 0.75

# Even a model of the same task is not quite the one of the next.
PRIOR_SD = 0.05
# Times spread about the model by about this much; it takes several measurements to believe otherwise.
NOISE = 0.05
NOISE_COUNT = 4.0
LEAST_NOISE = 0.01
# Tails of the noise: that of a Student t, so that a measurement far off weighs next to nothing.
TAILS = 4.0
# What one shape may well have of its own.
SHAPE_NOISE = 0.3
# A prior that is off by more than so many standard deviations is of a task of another size: its level is not believed,
# and the rest of it less. Nobody's model is further off than the last number.
OTHER_SIZE = 4.0
OTHER_SD = 0.3
FARTHEST_OFF = math.log(1e4)
# Repeats of one measurement share what the model gets wrong there.
MOST_REPEATS = 8.0
FIRST_NOISE = 0.5  # before anything is fitted, all is far off
ROUNDS, STEPS, CLOSE = 6, 5, 1e-3
FARTHEST, FAR_ABOVE = 40.0, 1.5  # of any parameter; in standard deviations


class Terms(NamedTuple):
    """All that a shape's times depend on.

    Attributes:
        constant_s, sample_s: compute is the one plus the other for each sample.
        factor: what was measured on this shape, by what the model says of it.
    """

    constant_s: float
    sample_s: float
    sync_s: float
    factor: float


class _Rows(NamedTuple):
    """Measurements as columns: repeats are one row, with their median; unusable times weigh 0."""

    kind: NDArray[np.int64]
    alone: NDArray[np.bool_]
    between: NDArray[np.bool_]
    many: NDArray[np.bool_]
    doublings: Vector  # of two GPUs
    samples: Vector
    times: Vector  # logarithms: computes, then steps
    weights: Vector
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, eq=False)
class StepTimes:
    """A fitted model. Made by `fit`; never changes."""

    types: tuple[str, ...]
    mean: Vector
    covariance: Vector
    noise: float
    seen: Mapping[Shape, tuple[float, float]] = field(default_factory=dict)  # weight, log of measured by model

    @classmethod
    def fit(cls, measurements: Iterable[Measurement], prior: StepTimes | None = None) -> StepTimes:
        """The model that these measurements suggest; near the prior where they say nothing else.

        A task's model is fitted to all its measurements each time: one that was fitted to some of them must not be
        the prior for the rest. Absurd measurements are dropped or outweighed.
        """
        usable = merged(measurements)
        types = tuple(sorted({one.shape.gpu_type for one in usable} | set(prior.types if prior else ())))
        rows = _rows(usable, types)
        if prior is not None:
            mean, covariance = _levelled(rows, *_continued(prior.widened(PRIOR_SD), types))
        else:
            mean, covariance = _start(rows, types)
        before = cls(types, mean, covariance, prior.noise if prior else NOISE, prior.seen if prior else {})
        return _fitted(rows, before) if usable else before

    def widened(self, level_sd: float, each_sd: float | None = None) -> StepTimes:
        """The same times with more doubt: for a task that is only similar.

        Args:
            level_sd: by how much all of its compute and synchronisation may differ together (of the logarithm).
            each_sd: by how much each parameter may differ besides; as much, if not given.
        """
        together = np.outer(_level(len(self.mean)), _level(len(self.mean))) * level_sd**2
        each = np.eye(len(self.mean)) * (level_sd if each_sd is None else each_sd) ** 2
        return StepTimes(self.types, self.mean, self.covariance + together + each, self.noise, self.seen)

    @property
    def overlap(self) -> float:
        """The p of the p-norm: 1 where compute and synchronisation follow each other, 10 where they are hidden."""
        return _p(self.mean[OVERLAP])

    def terms(self, shape: Shape) -> Terms:
        scale, constant, within, between = self._of_type(shape.gpu_type)
        mean, sync = self.mean, 0.0
        if shape.nodes > 1:
            level = mean[WITHIN] + mean[BETWEEN] + (mean[MANY] if shape.nodes > 2 else 0.0) + between
            sync = math.exp(level) * _growth(mean[WITHIN_GROWTH] + mean[BETWEEN_GROWTH], shape.gpus)
        elif shape.gpus > 1:
            sync = math.exp(mean[WITHIN] + within) * _growth(mean[WITHIN_GROWTH], shape.gpus)
        weight, off = self.seen.get(shape, (0.0, 0.0))
        return Terms(
            constant_s=math.exp(mean[CONSTANT] + scale + constant),
            sample_s=math.exp(mean[SLOPE] + scale),
            sync_s=sync,
            factor=math.exp(off * weight / (weight + 1.0)),
        )

    def compute_s(self, gpu_type: str, per_gpu: int) -> float:
        """Forward and backward of so many samples on one GPU, without synchronisation."""
        terms = self.terms(Shape(gpu_type, 1, 1))
        return terms.constant_s + terms.sample_s * per_gpu

    def step_s(self, shape: Shape, per_gpu: int) -> float:
        """A whole step with so many samples on each GPU."""
        terms = self.terms(shape)
        compute = terms.constant_s + terms.sample_s * per_gpu
        return terms.factor * float(overlapped(np.array(compute), np.array(terms.sync_s), self.overlap))

    def doubt(self, shape: Shape, per_gpu: int) -> float:
        """How far `step_s` may be off, as a standard deviation of its logarithm."""
        return float(self.doubts([shape], [per_gpu])[0])

    def doubts(self, shapes: Sequence[Shape], per_gpu: Sequence[int]) -> Vector:
        """`doubt` of many at once."""
        types, mean, covariance = self.types, self.mean, self.covariance
        for name in sorted({shape.gpu_type for shape in shapes}.difference(types)):
            types = (*types, name)
            mean, covariance = _extended(mean, covariance)
        rows = _rows([(shape, samples, 1.0, 1.0, 1) for shape, samples in zip(shapes, per_gpu, strict=True)], types)
        weights = np.array([self.seen.get(shape, (0.0, 0.0))[0] for shape in shapes])
        slopes = _secants(mean, covariance, rows, _predicted(mean, rows))
        own = max(NOISE, self.noise) ** 2 * TAILS / (TAILS - 2.0)  # what a shape may have that the model has not
        return np.asarray(np.sqrt(_variances(slopes, covariance) + own / (1.0 + weights)))

    def _of_type(self, gpu_type: str) -> Vector:
        if gpu_type not in self.types:
            return np.zeros(OF_TYPE)
        start = COMMON + OF_TYPE * self.types.index(gpu_type)
        return self.mean[start : start + OF_TYPE]


def overlapped(compute: Vector, sync: Vector, overlap: float) -> Vector:
    """The p-norm of both, without overflow."""
    larger = np.maximum(compute, sync)
    return np.asarray(larger * (1.0 + (np.minimum(compute, sync) / larger) ** overlap) ** (1.0 / overlap))


def _p(parameter: float) -> float:
    return float(1.0 + 9.0 / (1.0 + math.exp(-parameter)))


def _growth(parameter: float, gpus: int) -> float:
    return 1.0 + math.exp(parameter) * math.log2(max(2, gpus) / 2)


def _level(size: int) -> Vector:
    """The direction in which all times grow together."""
    return np.isin(np.arange(size), [CONSTANT, SLOPE, WITHIN]).astype(np.float64)


def _rows(usable: Sequence[tuple[Shape, int, float, float, int]], types: tuple[str, ...]) -> _Rows:
    shapes = tuple(one[0] for one in usable)
    gpus = np.array([shape.gpus for shape in shapes], float)
    alone = gpus == 1
    times = np.array([one[2:4] for one in usable], float).reshape(-1, 2).T
    repeats = np.minimum(MOST_REPEATS, np.array([one[4] for one in usable], float))
    # On one GPU both times say the same: together they count once.
    weights = np.where(np.isnan(times), 0.0, repeats * np.where(alone & ~np.isnan(times).any(axis=0), 0.5, 1.0))
    return _Rows(
        kind=np.array([types.index(shape.gpu_type) for shape in shapes], np.int64),
        alone=alone,
        between=np.array([shape.nodes > 1 for shape in shapes], bool),
        many=np.array([shape.nodes > 2 for shape in shapes], bool),
        doublings=np.log2(np.maximum(gpus / 2.0, 1.0)),
        samples=np.array([one[1] for one in usable], float),
        times=np.log(np.where(np.isnan(times), 1.0, times)).reshape(-1),
        weights=weights.reshape(-1),
        shapes=shapes,
    )


def _start(rows: _Rows, types: tuple[str, ...]) -> tuple[Vector, Vector]:
    """What is thought before anything is fitted: the median of compute, half of it constant."""
    count = len(rows.samples)
    compute, step = rows.times[:count], rows.times[count:]
    known = rows.weights[:count] > 0
    level = float(np.median(np.where(known, compute, step))) if count else 0.0
    samples = float(np.median(np.log(rows.samples))) if count else 0.0
    half = level - math.log(2.0)
    mean = np.array([half, half - samples, level + SYNC_SHARE, GROWTH, BETWEEN_FACTOR, 0.0, MANY_AT, OVERLAP_AT])
    covariance = np.diag(COMMON_SD**2) + np.outer(_level(COMMON), _level(COMMON)) * LEVEL_SD**2
    for _ in types:
        mean, covariance = _extended(mean, covariance)
    return mean, covariance


def _extended(mean: Vector, covariance: Vector) -> tuple[Vector, Vector]:
    """With room for one more kind of GPU, of which nothing is known."""
    size = len(mean)
    wider = np.zeros((size + OF_TYPE, size + OF_TYPE))
    wider[:size, :size] = covariance
    factors = np.diag(TYPE_SD)
    factors[2:, 0], factors[3, 2] = FOLLOWS * TYPE_SD[0], FOLLOWS * TYPE_SD[2]
    wider[size:, size:] = factors @ factors.T
    return np.concatenate([mean, np.zeros(OF_TYPE)]), wider


def _continued(prior: StepTimes, types: tuple[str, ...]) -> tuple[Vector, Vector]:
    """A prior's parameters, in the order of these kinds of GPU."""
    mean, covariance = prior.mean, prior.covariance
    order = list(prior.types)
    for name in types:
        if name not in order:
            mean, covariance = _extended(mean, covariance)
            order.append(name)
    places = list(range(COMMON))
    for name in types:
        start = COMMON + OF_TYPE * order.index(name)
        places += range(start, start + OF_TYPE)
    return mean[places], covariance[np.ix_(places, places)]


def _levelled(rows: _Rows, mean: Vector, covariance: Vector) -> tuple[Vector, Vector]:
    """A prior at the level of these measurements, where it is far off all of them: one that is believed so firmly that
    it outweighs what a task measures of itself is worth nothing."""
    known = rows.weights > 0
    if not known.any():
        return mean, covariance
    found = _predicted(mean, rows)
    off = float(np.median((rows.times - found.times)[known]))
    doubt = float(np.median(np.sqrt(_variances(found.slopes, covariance)[known] + NOISE**2)))
    if not OTHER_SIZE * doubt < abs(off) < FARTHEST_OFF:
        return mean, covariance
    return mean + off * _level(len(mean)), covariance + np.eye(len(mean)) * OTHER_SD**2


def _secants(mean: Vector, covariance: Vector, rows: _Rows, found: _Prediction) -> Vector:
    """Derivatives of steps' times, for what is doubted.

    Synchronisation that is small where the model thinks it is may be large all the same: its part in the time is taken
    between there and far above, not only at the most probable place.
    """
    p = _p(mean[OVERLAP])
    above = FAR_ABOVE * np.sqrt(_variances(found.by_sync, covariance) + 1e-12)
    higher = np.logaddexp(0.0, p * (found.ratio + above)) - np.logaddexp(0.0, p * found.ratio)
    part = np.where(rows.alone, 0.0, higher / (p * above))[:, None]
    count = len(rows.samples)
    slopes: Vector = (1.0 - part) * found.slopes[:count] + part * found.by_sync
    slopes[:, OVERLAP] = found.slopes[count:, OVERLAP]
    return slopes


def _variances(slopes: Vector, covariance: Vector) -> Vector:
    return np.asarray(np.maximum(0.0, ((slopes @ covariance) * slopes).sum(axis=1)))


class _Prediction(NamedTuple):
    """Logarithms of all times, computes first and then steps, and their derivatives by the parameters."""

    times: Vector
    slopes: Vector
    by_sync: Vector  # the derivatives of synchronisation alone
    ratio: Vector  # synchronisation by compute, as a logarithm


def _predicted(at: Vector, rows: _Rows) -> _Prediction:
    count = len(rows.samples)
    which = np.arange(count)
    first = COMMON + OF_TYPE * rows.kind
    scale = at[first]
    constant = at[CONSTANT] + scale + at[first + 1]
    compute = np.logaddexp(constant, at[SLOPE] + scale + np.log(rows.samples))
    share = np.exp(constant - compute)
    slopes = np.zeros((2 * count, len(at)))
    slopes[which, CONSTANT] = share
    slopes[which, SLOPE] = 1.0 - share
    slopes[which, first] = 1.0
    slopes[which, first + 1] = share

    growth = np.exp(at[WITHIN_GROWTH] + rows.between * at[BETWEEN_GROWTH]) * rows.doublings
    column = first + np.where(rows.between, 3, 2)
    sync = at[WITHIN] + rows.between * at[BETWEEN] + rows.many * at[MANY] + at[column] + np.log1p(growth)
    by_sync = np.zeros((count, len(at)))
    by_sync[:, WITHIN] = 1.0
    by_sync[:, BETWEEN] = rows.between
    by_sync[:, MANY] = rows.many
    by_sync[:, WITHIN_GROWTH] = growth / (1.0 + growth)
    by_sync[:, BETWEEN_GROWTH] = rows.between * by_sync[:, WITHIN_GROWTH]
    by_sync[which, column] = 1.0

    p = _p(at[OVERLAP])
    ratio = sync - compute
    both = np.logaddexp(0.0, p * ratio)
    part = np.where(rows.alone, 0.0, np.exp(p * ratio - both))
    slopes[count:] = (1.0 - part)[:, None] * slopes[:count] + part[:, None] * by_sync
    by_p = np.where(rows.alone, 0.0, (part * p * ratio - both) / p**2)
    slopes[count:, OVERLAP] = by_p * (p - 1.0) * (10.0 - p) / 9.0
    step = compute + np.where(rows.alone, 0.0, both / p)
    return _Prediction(np.concatenate([compute, step]), slopes, by_sync, ratio)


def _fitted(rows: _Rows, prior: StepTimes) -> StepTimes:
    """The most probable parameters: rounds of least squares, in which what is far off weighs less and less."""
    precision: Vector = np.linalg.inv(prior.covariance).astype(np.float64)
    at, spread = prior.mean, FIRST_NOISE
    found = _predicted(at, rows)
    total = float(rows.weights.sum())
    for _ in range(ROUNDS):
        before = at
        weights = _believed(rows, found, spread)
        at, found = _squared(rows, prior.mean, precision, weights / spread**2, at, found)
        squares = float((_believed(rows, found, spread) * (rows.times - found.times) ** 2).sum())
        spread = max(LEAST_NOISE, float(np.sqrt((NOISE_COUNT * prior.noise**2 + squares) / (NOISE_COUNT + total))))
        if np.abs(at - before).max() < CLOSE:
            break
    weights = _believed(rows, found, spread) / spread**2
    after: Vector = np.linalg.inv((found.slopes.T * weights) @ found.slopes + precision).astype(np.float64)
    for _ in range(2):  # what is doubted depends on the slopes, and they on it
        slopes = np.concatenate([found.slopes[: len(rows.samples)], _secants(at, after, rows, found)])
        after = (after + np.linalg.inv((slopes.T * weights) @ slopes + precision)) / 2.0
    seen = {**prior.seen, **_seen(rows, rows.times - found.times)}
    return StepTimes(prior.types, at, (after + after.T) / 2.0, spread, seen)


def _believed(rows: _Rows, found: _Prediction, spread: float) -> Vector:
    """What each time weighs, given how far it is from the model."""
    return rows.weights * (TAILS + 1.0) / (TAILS + ((rows.times - found.times) / spread) ** 2)


def _squared(
    rows: _Rows, mean: Vector, precision: Vector, weights: Vector, at: Vector, found: _Prediction
) -> tuple[Vector, _Prediction]:
    """A few damped Gauss-Newton steps with these weights."""

    def cost(there: Vector, times: Vector) -> float:
        return float((weights * (rows.times - times) ** 2).sum() + (there - mean) @ precision @ (there - mean))

    damping, now = 1e-3, cost(at, found.times)
    for _ in range(STEPS):
        weighted = found.slopes.T * weights
        hessian = weighted @ found.slopes + precision
        downhill = weighted @ (rows.times - found.times) - precision @ (at - mean)
        hessian[np.diag_indices_from(hessian)] *= 1.0 + damping
        there = np.clip(at + np.linalg.solve(hessian, downhill), -FARTHEST, FARTHEST)
        tried = _predicted(there, rows)
        then = cost(there, tried.times)
        if then < now:
            settled = now - then < CLOSE * (1.0 + now)
            at, found, now, damping = there, tried, then, damping / 10.0
            if settled:
                break
        else:
            damping = max(damping * 30.0, 1e-2)
    return at, found


def _seen(rows: _Rows, off: Vector) -> dict[Shape, tuple[float, float]]:
    """By how much the model is off where whole steps were measured, and what that weighs: little where it cannot be."""
    count = len(rows.samples)
    found: dict[Shape, list[tuple[float, float]]] = {}
    for shape, weight, value in zip(rows.shapes, rows.weights[count:].tolist(), off[count:].tolist(), strict=True):
        if weight > 0.0:
            found.setdefault(shape, []).append((weight, value))
    seen = {}
    for shape, pairs in found.items():
        middle = statistics.median(value for _, value in pairs)
        likely = (TAILS + 1.0) / (TAILS + (middle / SHAPE_NOISE) ** 2)
        seen[shape] = (sum(weight for weight, _ in pairs) * likely, middle)
    return seen
