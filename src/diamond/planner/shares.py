"""Fair shares: whose task is next in the service's own queue. Pure: the same snapshot always gives the same order.

Priority comes first, then who has had least, then age. What somebody has had is what their jobs used, fading with a
half-life of a week, plus what they hold now. Whoever is given something is charged for it at once, so that two users
with a hundred tasks each take turns; and since only who is served is charged, everybody's turn comes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

HALF_LIFE_S = 7 * 86_400.0
# What is held counts as if it went on for an hour: how long it will take is not known.
AHEAD_S = 3600.0
# Older use weighs less than a thousandth, and is not looked at.
FORGOTTEN_S = 10 * HALF_LIFE_S


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A task in the queue. `cost` is what its user is charged when it is placed (see `price`)."""

    id: str
    user: str
    priority: int
    created_at: float
    cost: float = AHEAD_S


def rate(num_nodes: int, num_gpus: int) -> float:
    """What a second of a job costs: its nodes and its GPUs."""
    return float(num_nodes + num_gpus)


def price(num_nodes: int, num_gpus: int) -> float:
    """What is charged for a job that has just been placed."""
    return rate(num_nodes, num_gpus) * AHEAD_S


def faded(amount: float, age_s: float) -> float:
    """What use of some time ago still weighs."""
    return float(amount * 0.5 ** (max(0.0, age_s) / HALF_LIFE_S))


class Turns:
    """Whose turn it is, over any number of rounds.

    Args:
        standings: what each user has had by now; nothing for those it does not name.
    """

    def __init__(self, standings: Mapping[str, float] | None = None) -> None:
        self._had = dict(standings or {})

    def charge(self, user: str, cost: float) -> None:
        """Somebody was given something."""
        self._had[user] = self._had.get(user, 0.0) + max(0.0, cost)

    def each(self, waiting: Iterable[Waiting]) -> Iterator[Waiting]:
        """Every one of them, the next one chosen after the caller has charged for the one before."""
        lines: dict[tuple[int, str], deque[Waiting]] = {}
        for one in sorted(waiting, key=lambda one: (one.created_at, one.id)):
            lines.setdefault((-one.priority, one.user), deque()).append(one)
        heap = [self._entry(key, line) for key, line in lines.items()]
        heapq.heapify(heap)
        while heap:
            rank, had, _, _, user = heap[0]
            line = lines[rank, user]
            if had != self._had.get(user, 0.0):  # charged since: they may have to stand back
                heapq.heapreplace(heap, self._entry((rank, user), line))
                continue
            yield line.popleft()
            if line:
                heapq.heapreplace(heap, self._entry((rank, user), line))
            else:
                heapq.heappop(heap)

    def _entry(self, key: tuple[int, str], line: deque[Waiting]) -> tuple[int, float, float, str, str]:
        rank, user = key
        return rank, self._had.get(user, 0.0), line[0].created_at, line[0].id, user


def arrange(waiting: Iterable[Waiting], standings: Mapping[str, float] | None = None) -> list[Waiting]:
    """The order in which they go if all of them can be placed."""
    turns = Turns(standings)
    found = []
    for one in turns.each(waiting):
        found.append(one)
        turns.charge(one.user, one.cost)
    return found
