"""What past tasks tell of one that has not run yet: step times, gradient noise, how much work it is, restart cost.

Tasks are known by keys, from the most specific (the same code, model and data) to the least (the same template). The
most specific one that is known speaks for a new task, and where it says nothing (a size that none of its tasks had),
the next one does, the less surely the less specific it is. Tasks that are not over speak where none that is over does.
Memory is bounded: the last few tasks of a key, measurements merged.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from diamond.planner.pools.batches import Noise
from diamond.planner.pools.measurements import Measurement, Merged, merged
from diamond.planner.pools.snapshot import Shape, Work
from diamond.planner.pools.steptimes import StepTimes

TASKS_A_KEY = 8
MOST_KEYS = 5000
MOST_MEASUREMENTS = 64
MOST_PRIORS = 4000
# The noise is kept by tenths of a task's progress.
TENTHS = 10

# By how specific a key is: how far times of tasks with it lie apart (of the logarithm), and how far their work does.
LEVEL_SDS = (0.05, 0.2, 0.5)
WORK_SDS = (0.3, 0.5, 0.9)
# Past tasks whose spread weighs as much as those assumptions.
ASSUMED_TASKS = 2.0
LOW, HIGH = 0.1, 0.9
# Of a task that outlasts all others by far: then some of what is done is assumed to be left.
MOST_PASSED = 0.999
LEAST_LEFT = 0.05
LEAST_WORK, MOST_WORK = 1e-18, 1e18
LARGEST_LOG = math.log(MOST_WORK) + 10.0  # of what a task may take: tasks whose work lies far apart suggest anything


class Past(NamedTuple):
    """One task that is over, or what it measured so far. `noise` is variance by square, by tenths of progress; what was
    not measured is None."""

    times: tuple[Merged, ...]
    noise: tuple[float | None, ...]
    total_work: float | None
    restart_s: float | None


@dataclass(frozen=True)
class Prior:
    """What to expect of a task.

    Attributes:
        key: the key that was known, and how many tasks with it were remembered.
        level: how specific that key is, 0 the most.
        times: to be the prior of `StepTimes.fit`; None if nobody measured any.
        noises: by tenths of progress; only their ratio means something. None if nobody measured any.
        log_work, work_sd: mean and standard deviation of the logarithm of a whole task's work.
    """

    key: str
    tasks: int
    times: StepTimes | None
    noises: tuple[Noise, ...] | None
    log_work: float | None
    work_sd: float
    restart_s: float | None
    level: int = 0

    def noise(self, share: float) -> Noise | None:
        """At this share of progress, between 0 and 1."""
        if self.noises is None:
            return None
        return self.noises[_tenth(share)]

    @property
    def work(self) -> Work | None:
        """Of a whole task."""
        return self.left(0.0)

    def left(self, done: float) -> Work | None:
        """What is left of a task of which so much is done and which is not finished; None where nobody can say.

        The further it is beyond what others took, the longer it is thought to go on.
        """
        if self.log_work is None:
            return None
        normal = statistics.NormalDist(self.log_work, self.work_sd)
        done = min(max(0.0, done), MOST_WORK) if math.isfinite(done) else 0.0
        passed = min(normal.cdf(math.log(done)), MOST_PASSED) if done > 0.0 else 0.0
        low, middle, high = (
            math.exp(min(normal.inv_cdf(passed + share * (1.0 - passed)), LARGEST_LOG)) - done
            for share in (LOW, 0.5, HIGH)
        )
        least = LEAST_LEFT * done
        return Work(max(middle, least), max(low, 0.0), max(high, middle, least))


class Profiles:
    """The history of a pool's tasks. Several threads may ask it; while one lets it `learn`, no other may.

    Args:
        tasks: how many of each key are remembered, the last ones.
        keys: how many keys are; those that were learned longest ago go first.
    """

    def __init__(self, tasks: int = TASKS_A_KEY, keys: int = MOST_KEYS) -> None:
        if tasks < 1:
            raise ValueError(f"tasks must be at least 1, and is {tasks}")
        if keys < 1:
            raise ValueError(f"keys must be at least 1, and is {keys}")
        self._tasks = tasks
        self._keys = keys
        self._past: dict[str, tuple[Past, ...]] = {}
        # By key, how specific it is and the less specific prior, which is kept with it, so that no other has its id.
        self._priors: dict[tuple[str, int, int], tuple[Prior | None, tuple[Past, ...], Prior]] = {}

    def learn(
        self,
        keys: Sequence[str],
        measurements: Iterable[Measurement],
        noise_by_progress: Iterable[tuple[float, Noise]] = (),
        total_work: float | None = None,
        restart_s: float | None = None,
    ) -> None:
        """Remember a task that is over.

        Args:
            keys: from most to least specific.
            noise_by_progress: shares of progress between 0 and 1, with the noise there.
            total_work: all that it took to finish; None for one that did not.
            restart_s: what a stop and a new start cost it; None for one that was not stopped.
        """
        if isinstance(keys, str):
            raise TypeError(f"keys is the text {keys!r}: give a list of them")
        past = past_of(measurements, noise_by_progress, total_work, restart_s)
        for key in dict.fromkeys(keys):
            others = self._past.pop(key, ())  # put back at the end: the last to be forgotten
            self._past[key] = (*others, past)[-self._tasks :]
        for key in list(self._past)[: max(0, len(self._past) - self._keys)]:
            del self._past[key]

    def similar(self, keys: Sequence[str], live: Mapping[str, Sequence[Past]] | None = None) -> Prior | None:
        """What the most specific of these keys that is known suggests, and the others where it says nothing; None where
        none is known. The same object until something new is learnt.

        Args:
            live: by key, what tasks that are not over have measured so far: they speak for a key of which no task is
                over. The task itself should not be among them.
        """
        found: Prior | None = None
        for level, key in reversed(list(enumerate(keys))):
            past = self._past.get(key) or tuple((live or {}).get(key, ()))[-self._tasks :]
            if past:
                found = self._prior(key, level, past, found)
        return found

    def _prior(self, key: str, level: int, past: tuple[Past, ...], wider: Prior | None) -> Prior:
        known = self._priors.get((key, level, id(wider)))
        if known is None or known[1] != past:
            if len(self._priors) > MOST_PRIORS:
                self._priors.clear()
            known = self._priors[key, level, id(wider)] = (wider, past, _prior(key, level, past, wider))
        return known[2]

    def to_json(self) -> str:
        """Text that any JSON parser reads: a time that was not measured is null."""
        past = {
            key: [[[_plain(time) for time in one.times], *one[1:]] for one in tasks]
            for key, tasks in self._past.items()
        }
        return json.dumps({"tasks": self._tasks, "keys": self._keys, "past": past}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Profiles:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            data = json.loads(text)
            found = cls(data["tasks"], data["keys"])
            found._past = {key: tuple(_past(one) for one in tasks) for key, tasks in data["past"].items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"text is no Profiles ({error!r}): give what to_json wrote") from error
        return found


def past_of(
    measurements: Iterable[Measurement],
    noise_by_progress: Iterable[tuple[float, Noise]] = (),
    total_work: float | None = None,
    restart_s: float | None = None,
) -> Past:
    """Of one task; see `Profiles.learn`."""
    times = sorted(merged(measurements), key=lambda one: -one.repeats)[:MOST_MEASUREMENTS]
    return Past(tuple(sorted(times)), _by_tenths(noise_by_progress), _positive(total_work), _positive(restart_s))


def _plain(one: Merged) -> list[Any]:
    return [None if isinstance(value, float) and math.isnan(value) else value for value in one]


def _time(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds


def _past(data: Sequence[Any]) -> Past:
    times, noise, total_work, restart_s = data
    read = [
        Merged(Shape(*shape), per_gpu, _time(pass_s), _time(step_s), repeats)
        for shape, per_gpu, pass_s, step_s, repeats in times
    ]
    return Past(tuple(read), tuple(noise), _positive(total_work), _positive(restart_s))


def _positive(value: float | None) -> float | None:
    return float(value) if value is not None and LEAST_WORK < value < MOST_WORK else None


def _tenth(share: float) -> int:
    return min(TENTHS - 1, int(min(max(share, 0.0), 1.0) * TENTHS)) if math.isfinite(share) else 0


def _by_tenths(noise_by_progress: Iterable[tuple[float, Noise]]) -> tuple[float | None, ...]:
    found: list[list[float]] = [[] for _ in range(TENTHS)]
    for share, noise in noise_by_progress:
        ratio = noise.variance / noise.square if noise.square > 0.0 else math.nan
        if math.isfinite(share) and 0.0 < ratio < math.inf:
            found[_tenth(share)].append(ratio)
    return tuple(statistics.median(ratios) if ratios else None for ratios in found)


def _prior(key: str, level: int, past: Sequence[Past], wider: Prior | None) -> Prior:
    """`wider`: what less specific keys suggest."""
    apart = min(level, len(LEVEL_SDS) - 1)
    log_work, work_sd = _work(past, WORK_SDS[apart])
    restarts = [one.restart_s for one in past if one.restart_s is not None]
    own = Prior(
        key=key,
        tasks=len(past),
        times=_times(past, LEVEL_SDS[apart], wider.times if wider is not None else None),
        noises=_noises(past),
        log_work=log_work,
        work_sd=work_sd,
        restart_s=statistics.median(restarts) if restarts else None,
        level=level,
    )
    if wider is None:
        return own
    if own.log_work is None:
        own = replace(own, log_work=wider.log_work, work_sd=wider.work_sd)
    return replace(
        own,
        noises=own.noises if own.noises is not None else wider.noises,
        restart_s=own.restart_s if own.restart_s is not None else wider.restart_s,
    )


def _times(past: Sequence[Past], assumed_sd: float, wider: StepTimes | None) -> StepTimes | None:
    """One model of all these tasks, with the doubt that is in how far they lie apart."""
    measured = [[Measurement(*one[:4]) for one in task.times] for task in past if task.times]
    if not measured:
        return wider
    times = StepTimes.fit([one for task in measured for one in task], wider)
    offs = [_off(times, task) for task in measured]
    # Fitted again with all of them at one level: how far tasks lie apart is not how noisy their measurements are.
    level = [_scaled(one, -off) for task, off in zip(measured, offs, strict=True) for one in task]
    spread = _pooled_sd(offs, assumed_sd)
    return StepTimes.fit(level, wider).widened(spread, spread / 2.0)


def _scaled(one: Measurement, by: float) -> Measurement:
    return one._replace(compute_s=one.compute_s * math.exp(by), step_s=one.step_s * math.exp(by))


def _off(times: StepTimes, task: Sequence[Measurement]) -> float:
    """By how much this task takes longer than the model says, as a logarithm."""
    steps = [one.step_s / times.step_s(one.shape, one.per_gpu) for one in task]
    passes = [one.compute_s / times.compute_s(one.shape.gpu_type, one.per_gpu) for one in task]
    return statistics.median(math.log(ratio) for ratio in [*steps, *passes] if not math.isnan(ratio))


def _work(past: Sequence[Past], assumed_sd: float) -> tuple[float | None, float]:
    logs = [math.log(one.total_work) for one in past if one.total_work is not None]
    if not logs:
        return None, assumed_sd
    # The mean of a few is off itself.
    return statistics.median(logs), _pooled_sd(logs, assumed_sd) * math.sqrt(1.0 + 1.0 / len(logs))


def _pooled_sd(values: Sequence[float], assumed_sd: float) -> float:
    """Of these and of what is assumed before there are any."""
    if not values:
        return assumed_sd
    middle = statistics.median(values)
    squares = sum((value - middle) ** 2 for value in values)
    return math.sqrt((ASSUMED_TASKS * assumed_sd**2 + squares) / (ASSUMED_TASKS + len(values) - 1))


def _noises(past: Sequence[Past]) -> tuple[Noise, ...] | None:
    """Medians of tasks; tenths that none of them measured are filled in from those beside them."""
    columns = [
        [ratio for ratio in column if ratio is not None] for column in zip(*(one.noise for one in past), strict=True)
    ]
    known = [place for place, column in enumerate(columns) if column]
    if not known:
        return None
    logs = [math.log(statistics.median(columns[place])) for place in known]
    return tuple(Noise(1.0, math.exp(value)) for value in np.interp(range(TENTHS), known, logs).tolist())
