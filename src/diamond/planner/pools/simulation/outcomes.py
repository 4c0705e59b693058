"""What came of a simulation: when each task was done, what it cost, how fair that was, and who was where when.

Finish-time fairness (rho) is the time from a task's submission to its end, over the time it would have taken on its
own with a fair share of the pool from start to end. That share is 1/N of the pool's GPUs, s = GPUs / N, where N is the
mean, over the task's life, of the number of tasks that had come and were not done. With s GPUs, its rate in an epoch is
the highest, over the numbers k of GPUs it can use, of rate(k) * min(1, s / k): with more than it can use it leaves the
rest, with fewer than k it uses k for part of the time. Its rate is the true one at its best batch; with several kinds
of GPUs it is the mean over them, weighted by how many there are. One start is added. The same holds for every policy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from diamond.planner.pools.snapshot import Placement


class Placed(NamedTuple):
    """From when on a task was where; an empty placement: it waited, or was done."""

    at: float
    task: str
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class TaskOutcome:
    """One task.

    Attributes:
        started_at: when it first had GPUs.
        gpu_s: GPU seconds it held, with those of its starts.
        restarts: starts after the first.
        lost_s: seconds that these took, and that failures undid; lost_gpu_s: the same, by GPU.
        contention: mean number of tasks in the pool while it was there.
        alone_s: what it would have taken with a fair share from start to end.
    """

    name: str
    application: str
    submitted_at: float
    started_at: float
    ended_at: float
    gpu_s: float
    restarts: int
    lost_s: float
    lost_gpu_s: float
    contention: float = 1.0
    alone_s: float = 0.0

    @property
    def completion_s(self) -> float:
        return self.ended_at - self.submitted_at

    @property
    def wait_s(self) -> float:
        return self.started_at - self.submitted_at

    @property
    def rho(self) -> float:
        return self.completion_s / self.alone_s if self.alone_s > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One workload under one policy.

    Attributes:
        tasks: in order of submission.
        timeline: every change of who is where, in order.
        decisions_s: how long each decision took, on the machine that simulated it.
        total_gpus: of the pool.
    """

    policy: str
    tasks: tuple[TaskOutcome, ...]
    timeline: tuple[Placed, ...] = ()
    decisions_s: tuple[float, ...] = ()
    total_gpus: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """Figures of the whole: seconds, GPU-hours, shares and counts, as the names say."""
        completion = np.array([one.completion_s for one in self.tasks])
        waits = np.array([one.wait_s for one in self.tasks])
        rho = np.array([one.rho for one in self.tasks])
        makespan = max(one.ended_at for one in self.tasks) - min(one.submitted_at for one in self.tasks)
        gpu_s = sum(one.gpu_s for one in self.tasks)
        decisions = np.array(self.decisions_s or (0.0,))
        return {
            "tasks": float(len(self.tasks)),
            "completion_mean_s": float(completion.mean()),
            "completion_median_s": float(np.median(completion)),
            "completion_p99_s": float(np.percentile(completion, 99)),
            "makespan_s": float(makespan),
            "gpu_hours": gpu_s / 3600,
            "utilisation": gpu_s / (self.total_gpus * makespan) if self.total_gpus and makespan else 0.0,
            "rho_mean": float(rho.mean()),
            "rho_worst": float(rho.max()),
            "rho_over_1_share": float((rho > 1).mean()),
            "restarts_mean": float(np.mean([one.restarts for one in self.tasks])),
            "lost_gpu_hours": sum(one.lost_gpu_s for one in self.tasks) / 3600,
            "wait_mean_s": float(waits.mean()),
            "wait_p99_s": float(np.percentile(waits, 99)),
            "decisions": float(len(self.decisions_s)),
            "decision_mean_s": float(decisions.mean()),
            "decision_max_s": float(decisions.max()),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "settings": dict(self.settings),
            "total_gpus": self.total_gpus,
            "summary": self.summary(),
            "tasks": [
                {**asdict(one), "completion_s": one.completion_s, "wait_s": one.wait_s, "rho": one.rho}
                for one in self.tasks
            ],
            "timeline": [[one.at, one.task, [list(node) for node in one.placement]] for one in self.timeline],
        }


class Contention:
    """How many tasks were in the pool, on average between two moments."""

    def __init__(self, lives: Sequence[tuple[float, float]]) -> None:
        changes: dict[float, int] = {}
        for came, went in lives:
            changes[came] = changes.get(came, 0) + 1
            changes[went] = changes.get(went, 0) - 1
        self._times = sorted(changes)
        self._numbers = np.cumsum([changes[time] for time in self._times])
        spans = np.diff(self._times)
        self._sums = np.concatenate([[0.0], np.cumsum(spans * self._numbers[:-1])])

    def mean(self, came: float, went: float) -> float:
        if went <= came:
            return float(self._numbers[max(0, bisect_right(self._times, came) - 1)])
        return (self._sum(went) - self._sum(came)) / (went - came)

    def _sum(self, until: float) -> float:
        last = bisect_right(self._times, until) - 1
        return float(self._sums[last] + (until - self._times[last]) * self._numbers[last]) if last >= 0 else 0.0
