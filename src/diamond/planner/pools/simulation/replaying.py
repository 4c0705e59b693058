"""A recorded pool, replayed: what the simulator predicts beside what really happened."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from diamond.core.errors import InvalidInput
from diamond.core.pool_records import PoolRecord
from diamond.planner.pools.simulation.outcomes import Outcome
from diamond.planner.pools.simulation.recorded import SUCCEEDED, NodeTime, node_times, truths
from diamond.planner.pools.simulation.rounds import Rounds
from diamond.planner.pools.snapshot import Policy


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One task that was finished in both: seconds from submission to end, and how often it was moved."""

    task: int
    recorded_s: float
    predicted_s: float
    recorded_restarts: int
    predicted_restarts: int

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.recorded_s if self.recorded_s > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A replay beside its record.

    Attributes:
        tasks: those that succeeded, in order of submission.
        recorded_utilisation, predicted_utilisation: the part of the held slots that tasks had, until the last ended.
        left_out: tasks of the record that never ran.
        outcome: of the replay, until all of these were done.
    """

    policy: str
    tasks: tuple[Compared, ...]
    recorded_utilisation: float
    predicted_utilisation: float
    left_out: int
    outcome: Outcome

    @property
    def recorded_mean_s(self) -> float:
        return statistics.fmean(one.recorded_s for one in self.tasks)

    @property
    def predicted_mean_s(self) -> float:
        return statistics.fmean(one.predicted_s for one in self.tasks)

    @property
    def ratio(self) -> float:
        """Of the means: 1.1 where the simulator expects tasks to take a tenth longer than they did."""
        return self.predicted_mean_s / self.recorded_mean_s if self.recorded_mean_s > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "recorded_mean_s": self.recorded_mean_s,
            "predicted_mean_s": self.predicted_mean_s,
            "ratio": self.ratio,
            "recorded_utilisation": self.recorded_utilisation,
            "predicted_utilisation": self.predicted_utilisation,
            "left_out": self.left_out,
            "tasks": [
                {
                    "task": one.task,
                    "recorded_s": one.recorded_s,
                    "predicted_s": one.predicted_s,
                    "ratio": one.ratio,
                    "recorded_restarts": one.recorded_restarts,
                    "predicted_restarts": one.predicted_restarts,
                }
                for one in self.tasks
            ],
        }


def replay(record: PoolRecord, policy: Policy) -> Agreement:
    """What the same pool would have done under a policy.

    Raises:
        InvalidInput: nothing in the record succeeded, it has no nodes, or it takes much longer than it did.
        RuntimeError: the policy's decision cannot be carried out, or leaves tasks waiting for ever.
    """
    tasks, nodes = truths(record), node_times(record)
    rounds = Rounds(
        policy,
        tasks,
        nodes,
        slot_kind=record.slot_kind,
        per_node=record.slots_per_node,
        most_nodes=record.most_nodes,
        lasted_s=record.recorded_at,
    )
    if not any(task.record.state == SUCCEEDED and task.record.ended_at is not None for task in tasks):
        raise InvalidInput("holds no task that succeeded", hint="record the pool once some have", field="tasks")
    outcome = rounds.outcome()
    return Agreement(
        policy=policy.name,
        tasks=_compared(record, outcome),
        recorded_utilisation=_recorded_utilisation(record),
        predicted_utilisation=_predicted_utilisation(nodes, outcome),
        left_out=len(record.tasks) - len(tasks),
        outcome=outcome,
    )


def _compared(record: PoolRecord, outcome: Outcome) -> tuple[Compared, ...]:
    predicted = {int(one.name): one for one in outcome.tasks}
    return tuple(
        Compared(
            task=task.id,
            recorded_s=task.ended_at - task.submitted_at,
            predicted_s=predicted[task.id].completion_s,
            recorded_restarts=max(0, sum(job.started_at is not None for job in task.jobs) - 1),
            predicted_restarts=predicted[task.id].restarts,
        )
        for task in sorted(record.tasks, key=lambda one: (one.submitted_at, one.id))
        if task.state == SUCCEEDED and task.ended_at is not None and task.id in predicted
    )


def _recorded_utilisation(record: PoolRecord) -> float:
    last = max((task.ended_at or record.recorded_at for task in record.tasks), default=0.0)
    used = sum(
        job.slots * ((job.ended_at if job.ended_at is not None else last) - job.started_at)
        for task in record.tasks
        for job in task.jobs
        if job.started_at is not None
    )
    held = sum(node.slots * max(0.0, min(_or(node.ended_at), last) - node.began_at) for node in record.nodes)
    return used / held if held > 0 else 0.0


def _predicted_utilisation(nodes: list[NodeTime], outcome: Outcome) -> float:
    last = max(one.ended_at for one in outcome.tasks)
    held = sum(node.slots * max(0.0, min(node.leaving_at, node.lost_at, last) - node.began_at) for node in nodes)
    return sum(one.gpu_s for one in outcome.tasks) / held if held > 0 else 0.0


def _or(ended_at: float | None) -> float:
    return math.inf if ended_at is None else ended_at
