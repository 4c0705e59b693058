"""Who gets at least its smallest share before anybody grows: owed turns, priorities, services, deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from diamond.planner.pools.options import Bools, Ints, Options, Pool
from diamond.planner.pools.snapshot import Demand, Snapshot
from diamond.planner.pools.valuing import Taste, Worth, needed_for_load, restart_of


@dataclass(frozen=True)
class Admitted:
    """By task: whether it must run, with the row that is set aside for it. By row: whether it may be chosen."""

    must: Bools
    given: Ints
    allowed: Bools


def waited_s(snapshot: Snapshot, demand: Demand) -> float:
    """How long a task has held nothing since it was submitted, all together."""
    waited = snapshot.now - demand.submitted_at - max(demand.running_s, 0.0)
    return waited if math.isfinite(waited) and waited > 0.0 else 0.0


def is_owed(snapshot: Snapshot, demand: Demand, taste: Taste) -> bool:
    """Whether it has waited long enough for a turn, and has not had that turn in full."""
    ran = max(demand.running_s, 0.0) if math.isfinite(demand.running_s) else 0.0
    return waited_s(snapshot, demand) >= taste.wait_s * (1.0 + ran // taste.turn_s)


def drained(snapshot: Snapshot, pool: Pool, taste: Taste) -> dict[int, float]:
    """Kinds of GPU that immovable tasks hold too much of for somebody, with the priority one needs to start there.

    An immovable task that starts where a larger one waits for room would put it off for ever.
    """
    found: dict[int, float] = {}
    for demand in snapshot.demands:
        if demand.id in pool.held:
            continue
        kinds = [kind for kind, name in enumerate(pool.kinds) if demand.runs_on(name)]
        least = min((one for one in demand.sizes or () if demand.takes(one)), default=max(demand.min_gpus, 1))
        if any(least <= pool.free[kind] for kind in kinds):
            continue
        bar = math.inf if is_owed(snapshot, demand, taste) else float(demand.priority)
        for kind in kinds:
            if least <= pool.total[kind]:
                found[kind] = max(found.get(kind, -math.inf), bar)
    return found


class Admission:
    """Sets rows aside, one task after the other, as long as there is room."""

    def __init__(
        self, snapshot: Snapshot, pool: Pool, table: Options, worth: Worth, bounds: tuple[Ints, Ints], taste: Taste
    ) -> None:
        self._snapshot, self._table, self._worth, self._taste = snapshot, table, worth, taste
        self._owner, self._unspent = bounds[0], bounds[1].copy()
        self._room = pool.free.copy()
        self._given = np.full(len(table.tasks), -1, dtype=np.int64)
        self._allowed = np.ones(len(table), dtype=np.bool_)

    def run(self) -> Admitted:
        tasks = [task for task in range(len(self._table.tasks)) if self._table.rows(task)]
        lowest = min((self._table.tasks[task].priority for task in tasks), default=0)
        owed = {task for task in tasks if is_owed(self._snapshot, self._table.tasks[task], self._taste)}
        for task in sorted(owed, key=self._by_wait):
            self._admit(task, self._smallest(task))
        for task in sorted(set(tasks) - owed, key=self._by_priority):
            demand = self._table.tasks[task]
            if demand.load is not None:
                self._reserve(task)
            elif demand.priority > lowest:
                self._admit(task, self._smallest(task))
        for task in owed:
            if self._table.tasks[task].load is not None:
                self._reserve(task)
        self._share(tasks)
        self._meet_deadlines(tasks)
        must = self._given >= 0
        self._keep_what_runs(tasks)
        return Admitted(must, self._given, self._allowed)

    def _share(self, tasks: list[int]) -> None:
        """Where all that wait or run fit with their smallest share, they all run: nobody waits for others to grow."""
        before = self._given.copy(), self._room.copy(), self._unspent.copy()
        rest = [task for task in tasks if self._given[task] < 0 and self._within_quota(task)]
        rest.sort(key=lambda task: (-int(self._table.gpus[self._table.rows(task)[0]]), task))
        if not all(self._admit(task, self._smallest(task)) for task in rest):
            self._given, self._room, self._unspent = before

    def _within_quota(self, task: int) -> bool:
        """Whom the quota of its owner keeps waiting does not keep others from sharing."""
        return int(self._owner[task]) < 0

    def _by_wait(self, task: int) -> tuple[bool, float, str]:
        demand = self._table.tasks[task]
        return self._table.now[task] < 0, -waited_s(self._snapshot, demand), demand.id

    def _by_priority(self, task: int) -> tuple[int, bool, float, str]:
        """Within a priority services first, then who is worth most for a GPU."""
        demand, first = self._table.tasks[task], self._table.rows(task)[0]
        density = float(self._worth.value[first]) / float(self._table.gpus[first])
        return -demand.priority, demand.load is None, -density, demand.id

    def _smallest(self, task: int) -> list[int]:
        """Its rows with the fewest GPUs: first the one it has, then those of which most is left."""
        rows = self._table.rows(task)
        least = self._table.gpus[rows[0]]
        now = self._table.now[task]
        first = [row for row in rows if self._table.gpus[row] == least]
        kind = self._table.kind
        return sorted(first, key=lambda row: (now < 0 or kind[row] != kind[now], -self._room[kind[row]], row))

    def _admit(self, task: int, rows: list[int]) -> bool:
        return any(self._take(task, row) for row in rows) or any(self._squeeze_in(task, row) for row in rows)

    def _take(self, task: int, row: int) -> bool:
        """Sets a row aside instead of what was, where there is room."""
        table, had, owner = self._table, int(self._given[task]), int(self._owner[task])
        back = int(table.gpus[had]) if had >= 0 else 0
        gpus, kind = int(table.gpus[row]), int(table.kind[row])
        if gpus - (back if had >= 0 and table.kind[had] == kind else 0) > self._room[kind]:
            return False
        if owner >= 0 and gpus - back > self._unspent[owner]:
            return False
        if had >= 0:
            self._room[table.kind[had]] += back
        self._room[kind] -= gpus
        if owner >= 0:
            self._unspent[owner] -= gpus - back
        self._given[task] = row
        return True

    def _squeeze_in(self, task: int, row: int) -> bool:
        """Where another one that was admitted can use a kind of GPU that this one cannot."""
        table, kind = self._table, self._table.kind[row]
        if (np.delete(self._room, kind) <= 0).all():
            return False
        short = int(table.gpus[row]) - int(self._room[kind])
        for other in np.flatnonzero(self._given >= 0):
            held = int(self._given[other])
            if table.kind[held] != kind or table.gpus[held] < short or table.tasks[other].load is not None:
                continue
            for another in self._smallest(int(other)):
                if table.kind[another] != kind and self._take(int(other), another):
                    if self._take(task, row):
                        return True
                    self._take(int(other), held)
        return False

    def _reserve(self, task: int) -> None:
        """What a service needs for its load; the most that there is, where that is not enough."""
        table = self._table
        rows = table.rows(task)
        needed = needed_for_load(table.tasks[task], self._taste)
        enough = [row for row in rows if table.goodput[row] >= needed]
        now = int(table.now[task])
        enough.sort(key=lambda row: (table.gpus[row], row != now, row))
        if not self._admit(task, enough):
            self._admit(task, sorted(rows, key=lambda row: (-table.goodput[row], table.gpus[row], row)))
        if self._given[task] >= 0:
            reserved = min(needed, float(table.goodput[self._given[task]]))
            for row in rows:
                self._allowed[row] = table.goodput[row] >= reserved

    def _meet_deadlines(self, tasks: list[int]) -> None:
        """The soonest first: the smallest option that is fast enough even if a little more is left than expected."""
        table = self._table
        due = [task for task in tasks if table.tasks[task].deadline is not None and table.tasks[task].left is not None]
        for task in sorted(due, key=lambda one: (table.tasks[one].deadline or 0.0, table.tasks[one].id)):
            rate = self.rate_for_deadline(task)
            rows = [row for row in table.rows(task) if table.goodput[row] >= rate]
            rows.sort(key=lambda row: (table.gpus[row], -table.goodput[row], row))
            if rate > 0.0 and any(self._take(task, row) for row in rows):
                for row in table.rows(task):
                    self._allowed[row] = table.goodput[row] >= rate

    def rate_for_deadline(self, task: int) -> float:
        demand = self._table.tasks[task]
        if demand.left is None or demand.deadline is None:
            return 0.0
        seconds = demand.deadline - self._snapshot.now - restart_of(demand)
        left = max(demand.left.expected, demand.left.high)
        return left / seconds if seconds > 0.0 and math.isfinite(left) and left > 0.0 else 0.0

    def _keep_what_runs(self, tasks: list[int]) -> None:
        """The rest begins with what it has, as far as that goes: a choice that is cut short should change little."""
        table, value = self._table, self._worth.value
        running = [task for task in tasks if self._given[task] < 0 and table.now[task] >= 0]
        for task in sorted(running, key=lambda one: (-value[table.now[one]] / table.gpus[table.now[one]], one)):
            row = int(table.now[task])
            if self._allowed[row]:
                self._take(task, row)
