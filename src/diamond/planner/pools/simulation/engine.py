"""Replays a workload: snapshots go to the policy as in production, and what it decides is carried out.

Decisions are made at multiples of the interval, while tasks are there. Between two of them nothing that runs depends
on anything else that runs, so every task moves on in closed form: through its start, its epochs, to its end. The same
arguments always give the same outcome, but for how long decisions took.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from diamond.planner.pools.pace import RESTART_S
from diamond.planner.pools.profiles import Prior, Profiles
from diamond.planner.pools.simulation.applications import Application
from diamond.planner.pools.simulation.fairness import alone_s
from diamond.planner.pools.simulation.knowledge import (
    Asked,
    Known,
    Learnt,
    Stated,
    asked_rate,
    declared_work,
    remember,
    so_far,
)
from diamond.planner.pools.simulation.outcomes import Contention, Outcome, Placed, TaskOutcome
from diamond.planner.pools.simulation.running import Recorded, Running, Told
from diamond.planner.pools.simulation.settings import Failure, Knowledge, Settings, check
from diamond.planner.pools.simulation.workloads import Arrival
from diamond.planner.pools.snapshot import Decision, Demand, Node, Placement, Policy, Snapshot, faults

PATIENCE = 10_000  # decisions in a row that leave all GPUs idle, before a simulation is given up


def simulate(
    workload: Iterable[Arrival],
    policy: Policy,
    nodes: Sequence[Node],
    *,
    applications: Mapping[str, Application] | None = None,
    interval_s: float = 60.0,
    restart_s: float | None = None,
    knowledge: Knowledge = "estimated",
    noise: float = 0.0,
    variety: float = 0.0,
    seed: int = 0,
    declared: bool = False,
    declared_error: float = 0.2,
    probed: bool = False,
    profiles: Profiles | None = None,
    failures: Sequence[Failure] = (),
    charge_moves: bool = True,
    max_gpus: int = 64,
    checkpoint_s: float = 600.0,
    quotas: Mapping[str, int] | None = None,
    decision_s: float = 1.0,
) -> Outcome:
    """Replays a workload under a policy.

    A policy with `adapts_batch = False` gets tasks at the GPUs and the batch that the workload asks for; with others,
    they are elastic, and train at the batch that what is known of them says is best.

    Args:
        applications: true behaviour by the names that the workload uses; recorded tasks need none.
        interval_s: decisions are made at multiples of it.
        restart_s: what a start costs; without, what the application says.
        knowledge: what a task's speed is taken from. "estimated": its own measurements. "warm": those, and the
            profiles of tasks of its application that were done before. "oracle": the truth.
        noise: standard deviation of the logarithm of what is measured.
        variety: the same of the work of tasks of one application; without, they all are as long as it was recorded.
        declared: each user says how much work a task is, off by `declared_error` (of the logarithm), and, where the
            policy leaves GPUs and batch as asked for, how fast it is there.
        probed: every task comes with a measured step on one GPU of each kind.
        profiles: of earlier simulations; those of this one are added to it.
        charge_moves: False: what moves to as many GPUs on as many nodes goes on at once.
        max_gpus: that one task may have. Without a profile it gets at most twice of what it was measured on.
        checkpoint_s: how often a task saves what it did; a failed node undoes what came after.
        decision_s: how long a decision may take, as the snapshot says.

    Raises:
        InvalidInput: a workload, pool or setting that cannot be.
        RuntimeError: the policy's decision cannot be carried out, or leaves tasks waiting for ever.
    """
    settings = Settings(
        interval_s=interval_s,
        restart_s=restart_s,
        knowledge=knowledge,
        noise=noise,
        variety=variety,
        seed=seed,
        declared=declared,
        declared_error=declared_error,
        probed=probed,
        charge_moves=charge_moves,
        max_gpus=max_gpus,
        checkpoint_s=checkpoint_s,
        decision_s=decision_s,
    )
    arrivals = sorted(workload, key=lambda one: (one.at, one.name))
    check(arrivals, nodes, settings, applications or {}, failures)
    run = _Replay(arrivals, policy, nodes, settings, applications or {}, profiles, failures, quotas or {})
    return run.outcome()


class _Replay:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        policy: Policy,
        nodes: Sequence[Node],
        settings: Settings,
        applications: Mapping[str, Application],
        profiles: Profiles | None,
        failures: Sequence[Failure],
        quotas: Mapping[str, int],
    ) -> None:
        self._policy = policy
        self._nodes = tuple(nodes)
        self._kinds = {node.name: node.gpu_type for node in nodes}
        self._settings = settings
        self._applications = applications
        self._profiles = profiles if profiles is not None else Profiles()
        self._failures = failures
        self._quotas = quotas
        self._coming = list(reversed(arrivals))
        self._active: dict[str, Running] = {}
        self._unstarted: dict[str, Demand] = {}
        self._finished: list[Running] = []
        self._timeline: list[Placed] = []
        self._decisions_s: list[float] = []
        self._idle = 0
        usable = [node for node in nodes if node.gpus > 0]
        self._per_node = {
            kind: max(node.gpus for node in usable if node.gpu_type == kind) for kind in {n.gpu_type: 0 for n in usable}
        }
        # What cannot be moved is only looked at when something came, ended or broke.
        self._each_round = not all(one.recorded for one in arrivals)

    def outcome(self) -> Outcome:
        now = self._round_after(self._coming[-1].at)
        while self._coming or self._active:
            self._arrive(now)
            self._break(now)
            if self._active:
                self._decide(now)
            then = self._next(now)
            self._advance(now, then)
            now = then
        return Outcome(
            policy=self._policy.name,
            tasks=self._outcomes(),
            timeline=tuple(sorted(self._timeline, key=lambda one: one.at)),
            decisions_s=tuple(self._decisions_s),
            total_gpus=sum(node.gpus for node in self._nodes),
            settings=dict(vars(self._settings)),
        )

    def _round_after(self, moment: float) -> float:
        return math.ceil(moment / self._settings.interval_s - 1e-9) * self._settings.interval_s

    def _next(self, now: float) -> float:
        """When the next decision is due."""
        soonest = now + self._settings.interval_s
        if self._active and self._each_round:
            return soonest
        moments = [one.at for one in self._coming[-1:]]
        moments += [now + one.ends_in_s() for one in self._active.values() if one.placement]
        moments += [moment for moment in self._breaks() if moment > now]
        return max(soonest, self._round_after(min(moments, default=soonest)))

    def _arrive(self, now: float) -> None:
        while self._coming and self._coming[-1].at <= now:
            arrival = self._coming.pop()
            self._active[arrival.name] = self._begun(arrival)

    def _begun(self, arrival: Arrival) -> Running:
        if arrival.duration_s is not None:
            told: Told = Stated(arrival.gpus, arrival.limit_s)
            return Running(arrival, Recorded(arrival.duration_s), told, Recorded.restart_s)
        application = self._applications[arrival.application]
        if self._settings.variety:
            factor = math.exp(self._settings.variety * self._random(arrival, "work").standard_normal())
            application = application.scaled(factor)
        return Running(arrival, application, self._told(arrival, application), self._restart_s(application))

    def _random(self, arrival: Arrival, what: str) -> np.random.Generator:
        """A task's own, so that what one meets does not depend on who else is there."""
        return np.random.default_rng([self._settings.seed, zlib.crc32(f"{what} of {arrival.name}".encode())])

    def _restart_s(self, application: Application) -> float:
        return application.restart_s if self._settings.restart_s is None else self._settings.restart_s

    def _told(self, arrival: Arrival, application: Application) -> Told:
        adapts = getattr(self._policy, "adapts_batch", True)
        asked = Asked(
            per_node=self._per_node,
            gpus=None if adapts else arrival.gpus,
            total=None if adapts else arrival.batch,
            most_gpus=self._settings.max_gpus,
        )
        if self._settings.knowledge == "oracle":
            return Known(application, asked, self._restart_s(application))
        random = self._random(arrival, "measurements")
        prior = self._similar(arrival.application) if self._settings.knowledge == "warm" else None
        return Learnt(
            application,
            asked,
            random,
            noise=self._settings.noise,
            prior=prior,
            size=self._size(application, prior, random),
            said_rate=asked_rate(application, asked) if self._settings.declared else None,
            probed=self._settings.probed,
        )

    def _similar(self, application: str) -> Prior | None:
        """What tasks of the application that were done before suggest, else those that run."""
        told = (task.told for task in self._active.values() if task.arrival.application == application)
        live = [so_far(one) for one in told if isinstance(one, Learnt) and one.measurements]
        return self._profiles.similar([application], {application: live})

    def _size(self, application: Application, prior: Prior | None, random: np.random.Generator) -> Prior | None:
        """What can be known of a task's work before it is done."""
        if not self._settings.declared:
            return prior
        error = self._settings.declared_error
        return declared_work(application.total * math.exp(error * random.standard_normal()), error)

    def _decide(self, now: float) -> None:
        for task in self._active.values():
            task.look_back()
        snapshot = self._snapshot(now)
        began = time.perf_counter()
        decision = self._policy.allocate(snapshot)
        self._decisions_s.append(time.perf_counter() - began)
        wrong = faults(snapshot, decision)
        if wrong:
            raise RuntimeError(f"policy {self._policy.name} at {now:g} s: {'; '.join(wrong[:5])}")
        self._carry_out(now, decision)
        self._idle = 0 if any(task.placement for task in self._active.values()) else self._idle + 1
        if self._idle > PATIENCE:
            raise RuntimeError(
                f"policy {self._policy.name} leaves all GPUs idle, with {len(self._active)} tasks waiting"
            )

    def _snapshot(self, now: float) -> Snapshot:
        gone = {one.node for one in self._failures if one.speed <= 0 and one.at <= now < one.until}
        return Snapshot(
            now=now,
            nodes=tuple(node for node in self._nodes if node.name not in gone),
            demands=tuple(self._demand_of(task) for task in self._active.values()),
            placed={name: task.placement for name, task in self._active.items() if task.placement},
            quotas=self._quotas,
            seconds=self._settings.decision_s,
        )

    def _demand_of(self, task: Running) -> Demand:
        """What is recorded as a whole does not change while it waits."""
        if not task.arrival.recorded or task.starts:
            return self._demand(task)
        name = task.arrival.name
        if name not in self._unstarted:
            self._unstarted[name] = self._demand(task)
        return self._unstarted[name]

    def _demand(self, task: Running) -> Demand:
        fewest, most = task.told.gpus()
        return Demand(
            id=task.arrival.name,
            submitted_at=task.arrival.at,
            speed=task.told.speed(task.epoch),
            min_gpus=fewest,
            max_gpus=most,
            gpu_types=self._runs_on(task),
            movable=not task.arrival.recorded,
            priority=task.arrival.priority,
            owner=task.arrival.owner,
            left=task.told.left(task.done),
            done=task.done,
            attained_s=task.attained_s,
            running_s=task.running_s,
            restarts=task.restarts,
            restart_s=self._expected_restart_s(task),
        )

    def _expected_restart_s(self, task: Running) -> float:
        """As measured, or as that of others like it."""
        if task.starts > 1 or (task.starts == 1 and not task.starting_s):
            return task.restart_s
        usual = task.told.usual_restart_s
        return RESTART_S if usual is None else usual

    def _runs_on(self, task: Running) -> frozenset[str] | None:
        if not isinstance(task.truth, Application):
            return None
        kinds = frozenset(kind for kind in self._per_node if task.truth.runs_on(kind))
        return None if len(kinds) == len(self._per_node) else kinds

    def _carry_out(self, now: float, decision: Decision) -> None:
        for name, task in self._active.items():
            placement = decision.placed.get(name, ())
            if placement != task.placement:
                self._place(now, task, placement)

    def _place(self, now: float, task: Running, placement: Placement) -> None:
        kind = self._kinds[placement[0][0]] if placement else ""
        same = kind == task.gpu_type and [gpus for _, gpus in placement] == list(task.counts)
        task.place(now, placement, kind, charged=self._settings.charge_moves or not same)
        self._timeline.append(Placed(now, task.arrival.name, placement))

    def _advance(self, now: float, then: float) -> None:
        """Up to the next decision, with a halt wherever a node breaks or is mended."""
        moments = [now, *sorted({moment for moment in self._breaks() if now < moment < then}), then]
        for begin, end in pairwise(moments):
            self._break(begin)
            for task in self._active.values():
                task.advance(begin, end - begin)
            self._bring_in()

    def _breaks(self) -> Iterable[float]:
        return (moment for one in self._failures for moment in (one.at, one.until) if moment < math.inf)

    def _break(self, now: float) -> None:
        if not self._failures:
            return
        speeds: dict[str, float] = {}
        for one in self._failures:
            if one.at <= now < one.until:
                speeds[one.node] = min(one.speed, speeds.get(one.node, 1.0))
        for task in self._active.values():
            pace = min((speeds.get(node, 1.0) for node, _ in task.placement), default=1.0)
            if pace > 0:
                task.pace = pace
                continue
            task.fail(now, self._settings.checkpoint_s)
            self._timeline.append(Placed(now, task.arrival.name, ()))

    def _bring_in(self) -> None:
        """Those that are done leave, and what they measured stays."""
        for name in [name for name, task in self._active.items() if task.ended_at is not None]:
            task = self._active.pop(name)
            self._unstarted.pop(name, None)
            self._finished.append(task)
            self._timeline.append(Placed(float(task.ended_at or 0.0), name, ()))
            if isinstance(task.told, Learnt):
                remember(self._profiles, [task.arrival.application], task.told, task.done, task.restart_s)

    def _outcomes(self) -> tuple[TaskOutcome, ...]:
        tasks = sorted(self._finished, key=lambda one: (one.arrival.at, one.arrival.name))
        contention = Contention([(task.arrival.at, float(task.ended_at or 0.0)) for task in tasks])
        found = []
        for task in tasks:
            number = contention.mean(task.arrival.at, float(task.ended_at or 0.0))
            found.append(
                TaskOutcome(
                    name=task.arrival.name,
                    application=task.arrival.application,
                    submitted_at=task.arrival.at,
                    started_at=float(task.started_at or 0.0),
                    ended_at=float(task.ended_at or 0.0),
                    gpu_s=task.attained_s,
                    restarts=task.restarts,
                    lost_s=task.lost_s,
                    lost_gpu_s=task.lost_gpu_s,
                    contention=number,
                    alone_s=self._alone_s(task, number),
                )
            )
        return tuple(found)

    def _alone_s(self, task: Running, contention: float) -> float:
        if isinstance(task.truth, Application):
            return task.restart_s + alone_s(task.truth, self._nodes, contention, self._settings.max_gpus)
        share = sum(node.gpus for node in self._nodes) / max(1.0, contention)
        return float(task.truth.ends[-1]) / min(1.0, share / task.arrival.gpus)
