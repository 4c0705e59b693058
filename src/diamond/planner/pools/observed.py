"""One task as a pool comes to know it: it says what it measures, and is asked how fast it would be elsewhere.

Whoever runs tasks keeps one of these for each: `saw` while it runs, `speed`, `left` and `most_gpus` for every snapshot,
`batch` when it is placed, `remember` when it is done. Models are fitted anew only when something new was seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from diamond.planner.pools.batches import Batch, Limits, Noise, best_batch
from diamond.planner.pools.measurements import Measurement
from diamond.planner.pools.profiles import Past, Prior, Profiles, past_of
from diamond.planner.pools.snapshot import Shape, Speed, Work
from diamond.planner.pools.speeds import Estimated, Linear
from diamond.planner.pools.steptimes import StepTimes

# Changes (of the logarithm) from which on something is new: samples on a GPU, and the gradient's noise.
OTHER_BATCH = 0.1
OTHER_NOISE = 0.05
# How far what is left may be off (of the logarithm) when a plan is all that is known: later steps may bring less.
PLAN_OFF = 0.5
# While no gradient was seen: a larger batch is taken to bring nothing.
NO_NOISE = Noise(1.0, 0.0)


class Observed:
    """See the module.

    Args:
        limits: which batches it can have, by kind of GPU; it runs on these kinds alone.
        prior: what others like it suggest.
    """

    def __init__(self, limits: Mapping[str, Limits], prior: Prior | None = None) -> None:
        if not limits:
            raise ValueError("limits is empty: give those of at least one kind of GPU")
        self.limits = dict(limits)
        self.prior = prior
        self._steps: list[Measurement] = []
        self._noises: list[tuple[float, Noise]] = []
        self._times = prior.times if prior else None
        self._noise = prior.noise(0.0) if prior else None
        self._speed: Speed | None = None

    def saw(self, measurement: Measurement, noise: Noise | None = None, done: float = 0.0) -> None:
        """A step, and the gradient's noise at the time, when so much work was done."""
        if noise is not None and (self._noise is None or not self._noises or _apart(self._noise, noise) > OTHER_NOISE):
            self._noises.append((done, noise))
            self._noise, self._speed = noise, None
        if any(_alike(one, measurement) for one in self._steps):
            return
        self._steps.append(measurement)
        self._times = StepTimes.fit(self._steps, self.prior.times if self.prior else None)
        self._speed = None

    def speed(self) -> Speed:
        if self._speed is None:
            self._speed = self._modelled()
        return self._speed

    def batch(self, shape: Shape, limits: Limits | None = None) -> Batch | None:
        """The best one on these GPUs, within narrower limits where they are given; None where nothing was measured."""
        if self._times is None or shape.gpu_type not in self.limits:
            return None
        return best_batch(self._times, self._noise or NO_NOISE, limits or self.limits[shape.gpu_type], shape)[1]

    def left(self, done: float, share: float | None = None) -> Work | None:
        """As others like it suggest, else as far as it has come.

        Args:
            share: the part of its planned steps or epochs that is done; None where there is no plan.
        """
        if self.prior is not None and self.prior.log_work is not None:
            return self.prior.left(done)
        if share is None or not (0.0 < share <= 1.0 and 0.0 < done < math.inf):
            return None
        left = done * (1.0 - share) / share
        return Work(left, left * math.exp(-PLAN_OFF), left * math.exp(PLAN_OFF))

    def most_gpus(self, most: int) -> int:
        """One until anything was measured, of it or of tasks like it; how far it then goes at once is the policy's."""
        return most if self._times is not None else 1

    def so_far(self) -> Past:
        """What it measured, to serve those like it while it runs: the `live` of `Profiles.similar`."""
        return past_of(self._steps, [(0.0, noise) for _, noise in self._noises[:1]])

    def remember(self, profiles: Profiles, keys: Sequence[str], total: float, restart_s: float | None = None) -> None:
        """It is done, after so much work: what it measured serves those like it."""
        noises = [(done / total, noise) for done, noise in self._noises] if total > 0.0 else []
        profiles.learn(keys, self._steps, noises, total, restart_s)

    def _modelled(self) -> Speed:
        if self._times is None:
            return Linear()
        noise = self._noise or NO_NOISE
        return ByKind({kind: Estimated(self._times, noise, limits) for kind, limits in self.limits.items()})


class ByKind:
    """One `Speed` for each kind of GPU; others do not run it."""

    def __init__(self, speeds: Mapping[str, Speed]) -> None:
        self._speeds = dict(speeds)

    def goodput(self, shape: Shape) -> float:
        speed = self._speeds.get(shape.gpu_type)
        return speed.goodput(shape) if speed else 0.0

    def doubt(self, shape: Shape) -> float:
        speed = self._speeds.get(shape.gpu_type)
        return speed.doubt(shape) if speed else 0.0


def _alike(one: Measurement, other: Measurement) -> bool:
    return one.shape == other.shape and abs(math.log(max(one.per_gpu, 1) / max(other.per_gpu, 1))) < OTHER_BATCH


def _apart(one: Noise, other: Noise) -> float:
    ratios = [noise.variance / noise.square if noise.square > 0.0 else 0.0 for noise in (one, other)]
    if not 0.0 < min(ratios) <= max(ratios) < math.inf:
        return math.inf if ratios[0] != ratios[1] else 0.0
    return abs(math.log(ratios[0] / ratios[1]))
