"""One task of a replay: where it is, how far it is, what was heard of it, and how large it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from diamond.planner.pools.pace import ENDING_S, HANDOVER_S, free_bounds
from diamond.planner.pools.profiles import Prior
from diamond.planner.pools.simulation.recorded import Truth
from diamond.planner.pools.snapshot import Placement, Speed
from diamond.planner.pools.trained import Window, is_known

_A_MOMENT_S = 1e-6  # what is left of a task that is done is not always nothing, in floating point


class Phase(Enum):
    """Where a task is: `QUEUED` and `STARTING` have slots already, `WARNED` and `STOPPING` still have them.

    `WARNED` is one that was asked to stop and trains on until it has heard of it.
    `STUCK` is one that waits for a node that is gone, until somebody notices.
    """

    WAITING = "waiting"
    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    WARNED = "warned"
    ENDING = "ending"
    STOPPING = "stopping"
    STUCK = "stuck"
    DONE = "done"


class Fitted(NamedTuple):
    """A speed, and what it was made of."""

    windows: tuple[Window, ...]
    prior: Prior | None
    batch: int | None
    speed: Speed


@dataclass(eq=False)
class Replayed:
    """One task of a replay. `until`: when its phase is over, if nothing comes between."""

    truth: Truth
    phase: Phase = Phase.WAITING
    until: float = math.inf
    placement: Placement = ()
    done: float = 0.0
    at: float = 0.0
    tells_at: float = math.inf
    told: bool = False
    windows: dict[tuple[int, int], Window] = field(default_factory=dict)
    restart_s: float | None = None
    attained_s: float = 0.0
    running_since: float | None = None
    first_at: float | None = None
    trained_since: float = 0.0
    starts: int = 0
    lost_s: float = 0.0
    lost_slot_s: float = 0.0
    ended_at: float | None = None
    fitted: Fitted | None = None

    @property
    def name(self) -> str:
        return f"{self.truth.record.id:05}"

    @property
    def slots(self) -> int:
        return sum(slots for _, slots in self.placement)

    @property
    def size(self) -> tuple[int, int]:
        return len(self.placement), self.slots

    @property
    def is_movable(self) -> bool:
        return self.told and self.truth.record.can_move

    @property
    def runs(self) -> bool:
        """Whether its job is one that could be asked to stop."""
        return self.phase in (Phase.STARTING, Phase.TRAINING)

    @property
    def is_started(self) -> bool:
        """Whether its job does something: starts, trains or stops."""
        return self.phase in (Phase.STARTING, Phase.TRAINING, Phase.WARNED, Phase.STOPPING, Phase.ENDING)

    @property
    def trains(self) -> bool:
        return self.phase in (Phase.TRAINING, Phase.WARNED)

    @property
    def is_leaving(self) -> bool:
        """Whether it was asked to stop, and has not yet."""
        return self.phase in (Phase.WARNED, Phase.STOPPING)

    def advance(self, now: float) -> None:
        """Up to now, which is not after the end of its phase."""
        seconds = now - self.at
        if self.trains:
            self.done = min(self.truth.total, self.done + seconds * self.truth.rate(*self.size))
        if self.running_since is not None:
            self.attained_s += seconds * self.slots
            if not self.trains and self.starts > 1:
                self.lost_s += seconds
                self.lost_slot_s += seconds * self.slots
        self.at = now

    def give(self, placement: Placement) -> None:
        self.placement, self.phase, self.until = placement, Phase.QUEUED, self.at + self.truth.costs.queued_s

    def ask_to_stop(self) -> None:
        costs = self.truth.costs
        if self.phase is Phase.TRAINING:
            self.phase, self.until = Phase.WARNED, min(self.until, self.at + costs.heeding_s)
        else:  # a program that is being started hears of it once it has
            self.phase, self.until = Phase.STOPPING, max(self.until, self.at) + costs.stopping_s

    def stick(self) -> None:
        """Its node is gone, and nobody knows."""
        self._undo()
        self.phase, self.until, self.tells_at = Phase.STUCK, math.inf, math.inf

    def lose(self) -> None:
        """Its node is gone."""
        self._undo()
        self._leave()

    def _undo(self) -> None:
        """Half of what it does between two checkpoints is lost with a node."""
        if self.trains:
            undone_s = min(self.truth.saved_s / 2, self.at - self.trained_since)
            self.done = max(0.0, self.done - undone_s * self.truth.rate(*self.size)) if self.truth.measured else 0.0
            self.lost_s += undone_s
            self.lost_slot_s += undone_s * self.slots

    def step(self) -> None:
        """Into its next phase, at the end of this one."""
        costs = self.truth.costs
        if self.phase is Phase.QUEUED:
            self.phase, self.until = Phase.STARTING, self.at + costs.starting_s
            self.running_since = self.at
            self.first_at = self.at if self.first_at is None else self.first_at
            self.starts += 1
        elif self.phase is Phase.STARTING:
            self.phase, self.until, self.trained_since = Phase.TRAINING, self.at + self._left_s(), self.at
            self.tells_at = self.at + costs.telling_s if self.truth.measured else math.inf
        elif self.phase is Phase.WARNED and self._left_s() > _A_MOMENT_S:
            self.phase, self.until = Phase.STOPPING, self.at + costs.stopping_s
        elif self.trains:
            self._tell()  # the last word comes with the end
            self.done = self.truth.total
            self.phase, self.until = Phase.ENDING, self.at + costs.ending_s
        elif self.phase is Phase.STOPPING:
            self._leave()
        elif self.phase is Phase.ENDING:
            self._leave()
            self.phase, self.ended_at = Phase.DONE, self.at

    def _left_s(self) -> float:
        return (self.truth.total - self.done) / self.truth.rate(*self.size)

    def hear(self, now: float) -> None:
        """What it says of itself, if that has come."""
        if self.tells_at <= now:
            self._tell()

    def _tell(self) -> None:
        if not self.truth.measured:
            return
        self.told, self.tells_at = True, math.inf
        costs = self.truth.costs
        self.restart_s = ENDING_S + max(costs.queued_s, HANDOVER_S) + costs.starting_s
        batch = self.truth.batches.get(self.size, self.truth.global_batch)
        self.windows.pop(self.size, None)
        self.windows[self.size] = Window(*self.size, batch, batch / self.truth.rate(*self.size))

    def _leave(self) -> None:
        self.placement, self.phase, self.until = (), Phase.WAITING, math.inf
        self.running_since, self.tells_at = None, math.inf


def bounds(task: Replayed, prior: Prior | None, per_node: int, most: int) -> tuple[int, int]:
    """At least and at most so many slots, by what is known of it then."""
    record = task.truth.record
    if not record.is_free:
        return record.least, record.most
    tried = max((window.slots for window in task.windows.values()), default=0)
    return free_bounds(tried, per_node, most, is_known=is_known(prior))
