"""How often the cluster's controller is bothered: when the next look at the queue is due. Pure; time is given.

Quick while something is about to change, slow while everything waits, never more than `MAX_PER_MINUTE` queries of any
kind a minute, and ever more patient with a controller that does not answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_S = 1.65  # with the rare other queries just below the most: a wait for room would last seconds
MAX_WAITING_S = 20.0  # all jobs have long been waiting
MAX_RUNNING_S = 10.0  # ends show in the run directories; only what Slurm itself does needs the query
MAX_PER_MINUTE = 39  # of all queries together
_QUIET_SHARE = 0.1  # after a minute without news, every six seconds
_FIRST_BACKOFF_S = 2.0
MAX_BACKOFF_S = 60.0


class Backoff:
    """Delays that double with every failure, with a little chance in them so that many agents do not march in step."""

    def __init__(self, first_s: float = _FIRST_BACKOFF_S, most_s: float = MAX_BACKOFF_S) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self.failures = 0

    def failed(self) -> float:
        """Seconds to wait now."""
        self.failures += 1
        delay_s = min(self._most_s, self._first_s * 2.0 ** min(self.failures - 1, 20))
        return delay_s * random.uniform(0.75, 1.0)  # noqa: S311 - nothing secret hangs on it

    def succeeded(self) -> None:
        self.failures = 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is being watched. Times are on the monotonic clock.

    Attributes:
        changed_at: when anything last changed.
        is_urgent: whether a job is known to have ended, or one's fate must be known before anything can go on.
        starts_at: the earliest start Slurm expects of a waiting job.
    """

    num_running: int = 0
    num_waiting: int = 0
    changed_at: float = 0.0
    is_urgent: bool = False
    starts_at: float | None = None
    recent: Sequence[float] = field(default_factory=tuple)  # when the queries of the last minute began


def next_query_at(scene: Scene, *, last_at: float, now: float) -> float | None:
    """When to ask next; None when there is nothing to ask about."""
    if not scene.num_running and not scene.num_waiting and not scene.is_urgent:
        return None
    most_s = MAX_RUNNING_S if scene.num_running else MAX_WAITING_S
    interval_s = MIN_S
    if not scene.is_urgent:
        interval_s = min(most_s, max(MIN_S, (now - scene.changed_at) * _QUIET_SHARE))
        if scene.starts_at is not None and scene.starts_at > now - MAX_WAITING_S:
            interval_s = min(interval_s, max(MIN_S, (scene.starts_at - now) / 2))
    due = last_at + interval_s
    within = [at for at in scene.recent if at > now - 60]
    if len(within) >= MAX_PER_MINUTE:
        due = max(due, within[-MAX_PER_MINUTE] + 60)
    return due
