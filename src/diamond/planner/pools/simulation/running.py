"""One task of a simulation: where it is, how far it is, and what it has cost. Moves on in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from diamond.planner.pools.batches import Batch
from diamond.planner.pools.simulation.applications import Counts, Floats
from diamond.planner.pools.simulation.workloads import Arrival
from diamond.planner.pools.snapshot import Placement, Speed, Work

ROUNDING = 1e-9  # of an epoch's work: what is left of it after the arithmetic


class Truth(Protocol):
    """How a task really behaves: an `Application`, or one that was recorded as a whole."""

    @property
    def ends(self) -> Floats: ...

    def rates(self, gpu_type: str, counts: Counts, batch: Batch) -> Floats: ...


class Told(Protocol):
    """What is known of a task, to itself and to the policy."""

    usual_restart_s: float | None

    def saw(self, epoch: int, gpu_type: str, counts: Counts, batch: Batch, pace: float) -> None:
        """It has run so for a while."""
        ...

    def batch(self, epoch: int, gpu_type: str, counts: Counts) -> Batch: ...

    def speed(self, epoch: int) -> Speed: ...

    def left(self, done: float) -> Work | None: ...

    def gpus(self) -> tuple[int, int]:
        """The fewest and the most it may get now."""
        ...


class Recorded:
    """A task of which only the duration is known: its work is counted in seconds."""

    restart_s = 0.0  # its duration holds its start

    def __init__(self, duration_s: float) -> None:
        self.ends = np.array([duration_s])
        self._rates = np.ones(1)

    def rates(self, gpu_type: str, counts: Counts, batch: Batch) -> Floats:
        return self._rates


@dataclass(eq=False)
class Running:
    arrival: Arrival
    truth: Truth
    told: Told
    restart_s: float
    placement: Placement = ()
    gpu_type: str = ""
    counts: Counts = ()
    batch: Batch = Batch(per_gpu=1, accumulation=0)  # noqa: RUF009 - a tuple
    pace: float = 1.0
    epoch: int = 0
    done: float = 0.0
    starting_s: float = 0.0
    trained_s: float = 0.0
    attained_s: float = 0.0
    running_s: float = 0.0
    starts: int = 0
    lost_s: float = 0.0
    lost_gpu_s: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def gpus(self) -> int:
        return sum(self.counts)

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    def place(self, now: float, placement: Placement, gpu_type: str, *, charged: bool = True) -> None:
        """Stops it where it is, and starts it there; an empty placement leaves it waiting."""
        self.placement = placement
        self.gpu_type = gpu_type
        self.counts = tuple(number for _, number in placement)
        if not placement or not charged:
            return
        self.batch = self.told.batch(self.epoch, gpu_type, self.counts)
        self.starting_s = self.restart_s
        self.trained_s = 0.0
        self.starts += 1
        if self.started_at is None:
            self.started_at = now

    def fail(self, now: float, checkpoint_s: float) -> None:
        """Its node is gone, and with it what it did since its last checkpoint; every epoch ends with one."""
        undone_s = self.trained_s % checkpoint_s
        began = float(self.truth.ends[self.epoch - 1]) if self.epoch else 0.0
        undone = min(self.done - began, self._rate() * undone_s)
        self.done -= undone
        self._lose(undone / self._rate())
        self.place(now, (), "")

    def advance(self, now: float, seconds: float) -> None:
        """From `now` on, through as many epochs as it gets done."""
        if not self.placement or self.ended_at is not None:
            return
        clock, until = now, now + seconds
        start_s = min(self.starting_s, seconds)
        self.starting_s -= start_s
        clock += start_s
        self._hold(start_s)
        if self.starts > 1:
            self._lose(start_s)
        while clock < until and self.ended_at is None:
            clock = self._train(clock, until)

    def look_back(self) -> None:
        """What it saw since it started goes into what is known of it, and into its batch."""
        if self.placement and self.trained_s > 0:
            self.told.saw(self.epoch, self.gpu_type, self.counts, self.batch, self.pace)
            self.batch = self.told.batch(self.epoch, self.gpu_type, self.counts)

    def ends_in_s(self) -> float:
        """Exact where its rate does not change any more: in its last epoch."""
        return self.starting_s + (float(self.truth.ends[-1]) - self.done) / self._rate()

    def _train(self, clock: float, until: float) -> float:
        """To the end of the epoch, or of the time."""
        rate = self._rate()
        end = float(self.truth.ends[self.epoch])
        needed_s = (end - self.done) / rate
        if needed_s > until - clock + ROUNDING:
            self._hold(until - clock)
            self.trained_s += until - clock
            self.done += rate * (until - clock)
            return until
        self._hold(needed_s)
        self.trained_s += needed_s
        self.done = end
        self.told.saw(self.epoch, self.gpu_type, self.counts, self.batch, self.pace)
        self.epoch += 1
        if self.epoch == len(self.truth.ends):
            self.ended_at = clock + needed_s
        else:
            self.batch = self.told.batch(self.epoch, self.gpu_type, self.counts)
        return clock + needed_s

    def _rate(self) -> float:
        return float(self.truth.rates(self.gpu_type, self.counts, self.batch)[self.epoch]) * self.pace

    def _hold(self, seconds: float) -> None:
        self.running_s += seconds
        self.attained_s += seconds * self.gpus

    def _lose(self, seconds: float) -> None:
        self.lost_s += seconds
        self.lost_gpu_s += seconds * self.gpus


def counts_of(nodes: int, gpus: int, per_node: int) -> Counts:
    """How so many GPUs lie on so many nodes: full ones first, at least one on each."""
    counts: list[int] = []
    for rest in range(nodes - 1, -1, -1):
        counts.append(max(1, min(per_node, gpus - sum(counts) - rest)))
    return tuple(counts)
