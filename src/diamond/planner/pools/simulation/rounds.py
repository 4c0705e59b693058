"""Replays a recorded pool through a policy, in rounds as the server has them.

A look at the pool follows whatever happens in it, and otherwise some seconds after the last. It decides anew where
something is different from what was decided on, or some time has passed, but first carries out what was decided: tasks
that are to move are asked to stop, and go on once they have and there is room. A policy knows of a task what the server
would know: nothing before it was told, then what was measured, and what tasks like it that are done left behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from diamond.core.errors import InvalidInput
from diamond.planner.pools import trained
from diamond.planner.pools.profiles import Prior, Profiles
from diamond.planner.pools.simulation.outcomes import Contention, Outcome, Placed, TaskOutcome
from diamond.planner.pools.simulation.recorded import NodeTime, Truth
from diamond.planner.pools.snapshot import Demand, Node, Placement, Policy, Snapshot, Speed, Work, faults
from diamond.planner.pools.speeds import Linear
from diamond.planner.pools.trained import Window

# As `services.pool_rounds` and `services.pool_demands` have them.
ROUND_S = 60.0
SOON_S = 2.0
LOOK_S = ROUND_S / 4
DECIDE_S = 1.0
RESTART_S = 30.0

PATIENCE = 5_000  # looks in a row at a pool where nothing runs, before a replay is given up


class Phase(Enum):
    """Where a task is: `QUEUED` and `STARTING` have slots already, `STOPPING` still has them."""

    WAITING = "waiting"
    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    ENDING = "ending"
    STOPPING = "stopping"
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

    def advance(self, now: float) -> None:
        """Up to now, which is not after the end of its phase."""
        seconds = now - self.at
        if self.phase is Phase.TRAINING:
            self.done = min(self.truth.total, self.done + seconds * self.truth.rate(*self.size))
        if self.running_since is not None:
            self.attained_s += seconds * self.slots
            if self.phase is not Phase.TRAINING and self.starts > 1:
                self.lost_s += seconds
                self.lost_slot_s += seconds * self.slots
        self.at = now

    def give(self, placement: Placement) -> None:
        self.placement, self.phase, self.until = placement, Phase.QUEUED, self.at + self.truth.costs.queued_s

    def ask_to_stop(self) -> None:
        self.phase, self.until = Phase.STOPPING, self.at + self.truth.costs.stopping_s

    def lose(self) -> None:
        """Its node is gone, and half of what it does between two checkpoints."""
        if self.phase is Phase.TRAINING:
            undone_s = min(self.truth.saved_s / 2, self.at - self.trained_since)
            self.done = max(0.0, self.done - undone_s * self.truth.rate(*self.size)) if self.truth.measured else 0.0
            self.lost_s += undone_s
            self.lost_slot_s += undone_s * self.slots
        self._leave()

    def step(self) -> None:
        """Into its next phase, at the end of this one."""
        costs = self.truth.costs
        if self.phase is Phase.QUEUED:
            self.phase, self.until = Phase.STARTING, self.at + costs.starting_s
            self.running_since = self.at
            self.first_at = self.at if self.first_at is None else self.first_at
            self.starts += 1
        elif self.phase is Phase.STARTING:
            left_s = (self.truth.total - self.done) / self.truth.rate(*self.size)
            self.phase, self.until, self.trained_since = Phase.TRAINING, self.at + left_s, self.at
            self.tells_at = self.at + costs.telling_s if self.truth.measured else math.inf
        elif self.phase is Phase.TRAINING:
            self._tell()  # the last word comes with the end
            self.done = self.truth.total
            self.phase, self.until = Phase.ENDING, self.at + costs.ending_s
        elif self.phase is Phase.STOPPING:
            self._leave()
        elif self.phase is Phase.ENDING:
            self._leave()
            self.phase, self.ended_at = Phase.DONE, self.at

    def hear(self, now: float) -> None:
        """What it says of itself, if that has come."""
        if self.tells_at <= now:
            self._tell()

    def _tell(self) -> None:
        if not self.truth.measured:
            return
        self.told, self.tells_at = True, math.inf
        self.restart_s = self.truth.costs.starting_s
        batch = self.truth.global_batch
        self.windows.pop(self.size, None)
        self.windows[self.size] = Window(*self.size, batch, batch / self.truth.rate(*self.size))

    def _leave(self) -> None:
        self.placement, self.phase, self.until = (), Phase.WAITING, math.inf
        self.running_since, self.tells_at = None, math.inf


class Rounds:
    """One replay.

    Args:
        slot_kind, per_node, most_nodes: as the record says of the pool.
    """

    def __init__(
        self,
        policy: Policy,
        tasks: Sequence[Truth],
        nodes: Sequence[NodeTime],
        *,
        slot_kind: str,
        per_node: int,
        most_nodes: int,
    ) -> None:
        if not tasks:
            raise InvalidInput("holds no task that ran", hint="record a pool in which tasks have run", field="tasks")
        if not nodes:
            raise InvalidInput("holds no node", hint="record a pool that has held nodes", field="nodes")
        self._policy = policy
        self._kind, self._per_node, self._most = slot_kind, per_node, per_node * most_nodes
        self._nodes = list(nodes)
        self._coming = sorted((Replayed(truth) for truth in tasks), key=_submitted, reverse=True)
        self._there: list[Replayed] = []
        self._finished: list[Replayed] = []
        self._profiles = Profiles()
        self._batches: dict[str, int] = {}
        self._wanted: dict[str, Placement] = {}
        self._about: object = None
        self._decided_at = -math.inf
        self._look_at = 0.0
        self._idle = 0
        self._timeline: list[Placed] = []
        self._decisions_s: list[float] = []

    def outcome(self) -> Outcome:
        now = 0.0
        while self._coming or self._there:
            now = self._next(now)
            if self._happen(now) or now >= self._look_at:
                self._look(now)
        return Outcome(
            policy=self._policy.name,
            tasks=self._outcomes(),
            timeline=tuple(self._timeline),
            decisions_s=tuple(self._decisions_s),
            total_gpus=self._most,
            settings={"round_s": ROUND_S, "soon_s": SOON_S},
        )

    # ---- what happens ------------------------------------------------------------------------------------------------

    def _next(self, now: float) -> float:
        """The next moment at which something happens, or the pool is looked at."""
        moments = [task.until for task in self._there]
        moments += [_submitted(task) for task in self._coming[-1:]]
        changes = [at for node in self._nodes for at in (node.began_at, node.leaving_at, node.lost_at)]
        moments += [at for at in changes if at > now]
        if self._there:
            moments.append(self._look_at)
        return max(now, min(moments))

    def _happen(self, now: float) -> bool:
        """Bring everything to now; whether something happened that the server is told of."""
        news = any(now in (node.began_at, node.leaving_at) for node in self._nodes)
        for task in self._there:
            task.advance(now)
            task.hear(now)
            while task.until <= now:
                news = True
                self._step(task)
        for node in self._nodes:
            if node.lost_at == now:
                news = True
                self._lose(node)
        while self._coming and _submitted(self._coming[-1]) <= now:
            news = True
            task = self._coming.pop()
            task.at = now
            self._there.append(task)
        self._bring_in()
        return news

    def _step(self, task: Replayed) -> None:
        task.step()
        if not task.placement:
            self._timeline.append(Placed(task.at, task.name, ()))

    def _lose(self, node: NodeTime) -> None:
        for task in self._there:
            if any(name == node.name for name, _ in task.placement):
                task.lose()
                self._timeline.append(Placed(task.at, task.name, ()))

    def _bring_in(self) -> None:
        """Those that are done leave, and what they measured stays."""
        for task in [one for one in self._there if one.phase is Phase.DONE]:
            self._there.remove(task)
            self._finished.append(task)
            if task.windows:
                keys, windows = _keys(task), tuple(task.windows.values())
                self._profiles.learn(
                    keys, trained.measurements(self._kind, windows), total_work=task.done, restart_s=task.restart_s
                )
                self._batches.update(dict.fromkeys(keys, task.truth.global_batch))

    # ---- looks -------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        demands = [self._demand(task, now) for task in self._there]
        if self._is_time(demands, now):
            self._decide(demands, now)
        self._carry_out(now)
        self._look_at = now + (SOON_S if self._in_transit() else LOOK_S)
        self._idle = 0 if any(task.placement for task in self._there) or not self._there else self._idle + 1
        if self._idle > PATIENCE:
            raise RuntimeError(
                f"policy {self._policy.name} leaves all slots idle, with {len(self._there)} tasks waiting"
            )

    def _in_transit(self) -> bool:
        return any(task.phase is Phase.STOPPING for task in self._there)

    def _is_time(self, demands: Sequence[Demand], now: float) -> bool:
        age = now - self._decided_at
        about = self._what_matters(demands, now)
        if self._about != about:
            gone = not isinstance(self._about, tuple) or self._about[0] != about[0]
            return age >= SOON_S and (not self._in_transit() or gone)
        return age >= ROUND_S and not self._in_transit()

    def _what_matters(self, demands: Sequence[Demand], now: float) -> tuple[list[str], list[tuple[object, ...]]]:
        return (
            [node.name for node in self._lasting(now)],
            sorted((one.id, one.movable, one.min_gpus, one.max_gpus) for one in demands),
        )

    def _lasting(self, now: float) -> list[NodeTime]:
        return [node for node in self._nodes if node.began_at <= now < min(node.leaving_at, node.lost_at)]

    def _decide(self, demands: list[Demand], now: float) -> None:
        nodes = tuple(Node(name=one.name, gpu_type=self._kind, gpus=one.slots) for one in self._lasting(now))
        there = {node.name for node in nodes}
        placed = {
            task.name: task.placement
            for task in self._there
            if task.placement and all(name in there for name, _ in task.placement)
        }
        snapshot = Snapshot(now=now, nodes=nodes, demands=tuple(demands), placed=placed, seconds=DECIDE_S)
        began = time.perf_counter()
        decision = self._policy.allocate(snapshot)
        self._decisions_s.append(time.perf_counter() - began)
        if wrong := faults(snapshot, decision):
            raise RuntimeError(f"policy {self._policy.name} at {now:g} s: {'; '.join(wrong[:5])}")
        self._wanted = dict(decision.placed)
        self._about, self._decided_at = self._what_matters(demands, now), now

    def _carry_out(self, now: float) -> None:
        there = {node.name for node in self._lasting(now)}
        for task in self._there:
            wanted = self._wanted.get(task.name, ())
            if task.runs and task.is_movable and task.placement != wanted:
                task.ask_to_stop()
        used: dict[str, int] = {}
        for task in self._there:
            for name, slots in task.placement:
                used[name] = used.get(name, 0) + slots
        for task in self._there:
            wanted = self._wanted.get(task.name, ())
            if task.phase is not Phase.WAITING or not wanted or any(name not in there for name, _ in wanted):
                continue
            even = len({slots for _, slots in wanted}) == 1
            if even and all(used.get(name, 0) + slots <= self._per_node for name, slots in wanted):
                task.give(wanted)
                self._timeline.append(Placed(now, task.name, wanted))
                for name, slots in wanted:
                    used[name] = used.get(name, 0) + slots

    # ---- what is known -----------------------------------------------------------------------------------------------

    def _demand(self, task: Replayed, now: float) -> Demand:
        record = task.truth.record
        prior = self._profiles.similar(_keys(task))
        windows = tuple(task.windows.values())
        low, high = bounds(task, prior, self._per_node, self._most)
        batch = None if windows else next((self._batches[key] for key in _keys(task) if key in self._batches), None)
        speed = self._speed(task, windows, prior, batch)
        usual = prior.restart_s if prior is not None else None
        return Demand(
            id=task.name,
            submitted_at=record.submitted_at,
            speed=speed,
            min_gpus=low,
            max_gpus=high,
            sizes=sizes(low, high, self._per_node) if low != high else None,
            movable=task.is_movable or not task.placement,
            priority=record.priority,
            owner=str(record.owner),
            left=None if isinstance(speed, Linear) else self._left(task, prior),
            done=task.done if task.told else 0.0,
            attained_s=task.attained_s,
            running_s=now - task.running_since if task.running_since is not None else 0.0,
            restarts=max(0, task.starts - 1),
            restart_s=next(one for one in (task.restart_s, usual, RESTART_S) if one is not None),
        )

    def _speed(self, task: Replayed, windows: tuple[Window, ...], prior: Prior | None, batch: int | None) -> Speed:
        """Fitted anew where something new is known."""
        known = task.fitted
        if known is None or known.prior is not prior or (known.windows, known.batch) != (windows, batch):
            known = task.fitted = Fitted(windows, prior, batch, trained.speed(self._kind, windows, prior, batch))
        return known.speed

    def _left(self, task: Replayed, prior: Prior | None) -> Work | None:
        if task.told and task.truth.record.total_samples:
            left = max(0.0, task.truth.record.total_samples - task.done)
            return Work(left, left, left)
        return prior.left(task.done if task.told else 0.0) if prior is not None else None

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def _outcomes(self) -> tuple[TaskOutcome, ...]:
        tasks = sorted(self._finished, key=lambda one: (_submitted(one), one.name))
        contention = Contention([(_submitted(task), float(task.ended_at or 0.0)) for task in tasks])
        return tuple(self._outcome_of(task, contention) for task in tasks)

    def _outcome_of(self, task: Replayed, contention: Contention) -> TaskOutcome:
        came, went = _submitted(task), float(task.ended_at or 0.0)
        number = contention.mean(came, went)
        return TaskOutcome(
            name=task.name,
            application="",
            submitted_at=came,
            started_at=float(task.first_at or came),
            ended_at=went,
            gpu_s=task.attained_s,
            restarts=max(0, task.starts - 1),
            lost_s=task.lost_s,
            lost_gpu_s=task.lost_slot_s,
            contention=number,
            alone_s=self._alone_s(task, self._most / max(1.0, number)),
        )

    def _alone_s(self, task: Replayed, share: float) -> float:
        """With a fair share of the slots from start to end; see `outcomes`."""
        truth, record = task.truth, task.truth.record
        tried = sizes(record.least, min(record.most, self._most), self._per_node)
        rates = (truth.rate(math.ceil(size / self._per_node), size) * min(1.0, share / size) for size in tried)
        return truth.costs.queued_s + truth.costs.starting_s + truth.total / max(rates)


def bounds(task: Replayed, prior: Prior | None, per_node: int, most: int) -> tuple[int, int]:
    """At least and at most so many slots, as `services.pool_demands.bounds` has it."""
    record = task.truth.record
    if not record.is_free:
        return record.least, record.most
    tried = max((window.slots for window in task.windows.values()), default=0)
    high = most if prior is not None and prior.times is not None else max(per_node, 2 * tried)
    return 1, min(high, most)


def sizes(low: int, high: int, per_node: int) -> tuple[int, ...]:
    """Evenly on nodes: any number on one, whole nodes beyond."""
    found = [size for size in range(low, high + 1) if size <= per_node or size % per_node == 0]
    return tuple(found or [low])


def _submitted(task: Replayed) -> float:
    return task.truth.record.submitted_at


def _keys(task: Replayed) -> list[str]:
    like = task.truth.record.like
    return [f"{level} {number}" for level, number in enumerate(like)] or [f"task {task.truth.record.id}"]
