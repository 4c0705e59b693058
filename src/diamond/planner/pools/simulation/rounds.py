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

from diamond.core.errors import InvalidInput
from diamond.planner.pools import trained
from diamond.planner.pools.even import evened
from diamond.planner.pools.pace import DECIDE_S, LOOK_S, RESTART_S, ROUND_S, SOON_S, even_sizes
from diamond.planner.pools.profiles import Prior, Profiles
from diamond.planner.pools.simulation.outcomes import Contention, Outcome, Placed, TaskOutcome
from diamond.planner.pools.simulation.recorded import SUCCEEDED, NodeTime, Truth, keys_of
from diamond.planner.pools.simulation.replayed import Fitted, Phase, Replayed, bounds
from diamond.planner.pools.snapshot import Demand, Node, Placement, Policy, Snapshot, Speed, Work, faults
from diamond.planner.pools.speeds import Linear
from diamond.planner.pools.trained import Live, Window

LONGEST = 10  # times the whole record
PATIENCE = 5_000  # looks in a row at a pool where nothing runs, before a replay is given up


class Rounds:
    """One replay.

    Args:
        slot_kind, per_node, most_nodes: as the record says of the pool.
        lasted_s: how long the recorded run was; tasks that did not succeed in it are not waited for.
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
        lasted_s: float,
    ) -> None:
        if not tasks:
            raise InvalidInput("holds no task that ran", hint="record a pool in which tasks have run", field="tasks")
        if not nodes:
            raise InvalidInput("holds no node", hint="record a pool that has held nodes", field="nodes")
        self._policy = policy
        self._kind, self._per_node, self._most = slot_kind, per_node, per_node * most_nodes
        self._longest_s = LONGEST * max(lasted_s, 600.0)
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
        while any(_is_compared(task) for task in (*self._coming, *self._there)):
            now = self._next(now)
            if now > self._longest_s:
                raise InvalidInput(
                    f"under {self._policy.name} its tasks would take more than {LONGEST} times as long as they did",
                    hint="try another policy; if none does better, its measurements cannot be right",
                    field="tasks",
                )
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
        changes = [at for node in self._nodes for at in (node.began_at, node.leaving_at, node.silent_at, node.lost_at)]
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
        silent = {node.name for node in self._nodes if node.silent_at <= now < node.lost_at}
        for task in self._there:
            if task.is_started and any(name in silent for name, _ in task.placement):
                task.stick()
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
                keys, windows = keys_of(task.truth.record), tuple(task.windows.values())
                self._profiles.learn(
                    keys, trained.measurements(self._kind, windows), total_work=task.done, restart_s=task.restart_s
                )
                self._batches.update(dict.fromkeys(keys, task.truth.global_batch))

    # ---- looks -------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        live = self._live()
        demands = [self._demand(task, live, now) for task in self._there]
        if self._is_time(demands, now):
            self._decide(demands, now)
        self._carry_out(now)
        self._look_at = now + self._until_next_look(demands, now)
        self._idle = 0 if any(task.placement for task in self._there) or not self._there else self._idle + 1
        if self._idle > PATIENCE:
            raise RuntimeError(
                f"policy {self._policy.name} leaves all slots idle, with {len(self._there)} tasks waiting"
            )

    def _until_next_look(self, demands: Sequence[Demand], now: float) -> float:
        if self._in_transit():
            return SOON_S
        # Something has changed just after a decision.
        return SOON_S / 2 if self._about != self._what_matters(demands, now) else LOOK_S

    def _in_transit(self) -> bool:
        return any(task.is_leaving for task in self._there)

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
        decision = evened(self._policy.allocate(snapshot), snapshot)
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

    def _live(self) -> Live:
        found = Live(self._kind)
        for task in self._there:
            found.add(keys_of(task.truth.record), task.windows.values(), task.restart_s)
        return found

    def _demand(self, task: Replayed, live: Live, now: float) -> Demand:
        record, keys = task.truth.record, keys_of(task.truth.record)
        windows = tuple(task.windows.values())
        prior = self._profiles.similar(keys, None if windows else live.pasts)
        low, high = bounds(task, prior, self._per_node, self._most)
        batch = None if windows else live.batch(keys, self._batches)
        speed = self._speed(task, windows, prior, batch)
        usual = prior.restart_s if prior is not None else None
        return Demand(
            id=task.name,
            submitted_at=record.submitted_at,
            speed=speed,
            min_gpus=low,
            max_gpus=high,
            sizes=even_sizes(low, high, self._per_node) if low != high else None,
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
        tried = even_sizes(record.least, min(record.most, self._most), self._per_node)
        rates = (truth.rate(math.ceil(size / self._per_node), size) * min(1.0, share / size) for size in tried)
        return truth.costs.queued_s + truth.costs.starting_s + truth.total / max(rates)


def _is_compared(task: Replayed) -> bool:
    return task.truth.record.state == SUCCEEDED


def _submitted(task: Replayed) -> float:
    return task.truth.record.submitted_at
