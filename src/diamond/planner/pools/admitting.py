"""Who gets at least its smallest share before anybody grows: owed turns, priorities, services, deadlines."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from diamond.planner.pools.options import Bools, Ints, Options, Pool, Reservation, asked, longest_s
from diamond.planner.pools.packing import fewest_nodes
from diamond.planner.pools.policies.ledger import smallest
from diamond.planner.pools.snapshot import Demand, Shape, Snapshot
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


def drained(snapshot: Snapshot, pool: Pool, taste: Taste) -> dict[int, Reservation]:
    """Kinds of GPU of which too many are, or are about to be, held by immovable tasks for somebody that waits.

    An immovable task that starts where a larger one waits for room would put it off for ever, unless it ends in time
    or does without what that one needs.
    """
    if all(demand.movable for demand in snapshot.demands):
        return {}
    plan = _Plan(snapshot, pool)
    waiting = {demand.id: demand for demand in snapshot.demands if demand.id not in pool.held}
    turns = [_turn(snapshot, demand, taste) for demand in waiting.values()]
    heapq.heapify(turns)
    while turns and not plan.is_full():
        plan.add(waiting[heapq.heappop(turns)[-1]])
    return plan.reserved()


def _turn(snapshot: Snapshot, demand: Demand, taste: Taste) -> tuple[bool, int, float, str]:
    """Sorts by whose turn it is: those that are owed one, then priorities, then by how long they wait."""
    owed = is_owed(snapshot, demand, taste)
    return not owed, 0 if owed else -demand.priority, -waited_s(snapshot, demand), demand.id


class _Plan:
    """Who could start now, in the order of their turns, if all that is held by immovable tasks ends as expected."""

    def __init__(self, snapshot: Snapshot, pool: Pool) -> None:
        self._pool = pool
        self._room = [int(free) for free in pool.free]
        self._quotas = dict(snapshot.quotas)
        self._ends: list[list[tuple[float, int]]] = [[] for _ in pool.kinds]
        self._before: list[set[str]] = [set() for _ in pool.kinds]
        self._found: dict[int, Reservation] = {}
        self._spare: dict[int, int] = {}
        self._granted: dict[int, dict[str, int]] = {}
        for demand in snapshot.demands:
            shape = snapshot.shape_of(snapshot.placed.get(demand.id, ())) if demand.id in pool.held else None
            if shape is not None:
                kind = pool.kinds.index(shape.gpu_type)
                self._ends[kind].append((ends_in_s(demand, shape), shape.gpus))
                self._spend(demand, shape.gpus)

    def is_full(self) -> bool:
        """Whether nobody that comes later can change anything."""
        return len(self._found) == len(self._room) and not any(
            spare > 0 and self._room[kind] > 0 for kind, spare in self._spare.items()
        )

    def reserved(self) -> dict[int, Reservation]:
        return {kind: replace(one, spare=self._granted[kind]) for kind, one in self._found.items()}

    def add(self, demand: Demand) -> None:
        """Gives it a place in the plan, or keeps one for it."""
        pool, least = self._pool, smallest(demand)
        kinds = [kind for kind, name in enumerate(pool.kinds) if demand.runs_on(name) and 0 < least <= pool.total[kind]]
        if least > self._quotas.get(demand.owner, least) or not kinds:
            return
        fitting = [kind for kind in kinds if least <= self._room[kind]]
        if not fitting:
            if any(kind not in self._found for kind in kinds):
                self._reserve(demand, kinds, least)
        elif not demand.movable:
            self._start(demand, fitting, least)

    def _start(self, demand: Demand, kinds: list[int], gpus: int) -> None:
        for kind in sorted(kinds, key=lambda one: -self._room[one]):
            seconds = longest_s(demand, self._goodput(demand, kind, gpus))
            if kind not in self._found:
                self._before[kind].add(demand.id)
                self._ends[kind].append((seconds, gpus))
            elif not math.inf > seconds <= self._found[kind].after_s:
                if gpus > self._spare[kind]:
                    continue
                self._spare[kind] -= gpus
                self._granted[kind][demand.id] = gpus
            self._room[kind] -= gpus
            self._spend(demand, gpus)
            return

    def _reserve(self, demand: Demand, kinds: list[int], gpus: int) -> None:
        """On the kind where it can start first; only the first of those that wait for a kind has a claim on it."""
        starts = {kind: self._enough(kind, gpus) for kind in kinds}
        kind = min(kinds, key=lambda one: (starts[one][0], one))
        if kind not in self._found:
            after_s, left = starts[kind]
            self._found[kind] = Reservation(demand.id, after_s, frozenset(self._before[kind]), {})
            self._spare[kind], self._granted[kind] = left - gpus, {}

    def _enough(self, kind: int, gpus: int) -> tuple[float, int]:
        """In how many seconds so many GPUs are free, and how many are by then."""
        free, after_s = self._room[kind], 0.0
        for end_s, number in sorted(self._ends[kind]):
            if free >= gpus and end_s > after_s:
                break
            free, after_s = free + number, end_s
        return after_s, free

    def _goodput(self, demand: Demand, kind: int, gpus: int) -> float:
        shape = Shape(self._pool.kinds[kind], fewest_nodes(gpus, self._pool.sizes[kind]), gpus)
        return asked(demand, shape)[0]

    def _spend(self, demand: Demand, gpus: int) -> None:
        if demand.owner in self._quotas:
            self._quotas[demand.owner] -= gpus


def ends_in_s(demand: Demand, shape: Shape) -> float:
    """Of a task that runs; infinite where nobody can say."""
    if demand.left is None or demand.load is not None or not math.isfinite(demand.left.expected):
        return math.inf
    goodput = asked(demand, shape)[0]
    return max(demand.left.expected, 0.0) / goodput if goodput > 0.0 else math.inf


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
        tasks = np.flatnonzero(np.diff(self._table.start) > 0).tolist()
        lowest = min((self._table.tasks[task].priority for task in tasks), default=0)
        owed = {
            task
            for task in tasks
            if is_owed(self._snapshot, self._table.tasks[task], self._taste) and not self._fills_gaps(task)
        }
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

    def _fills_gaps(self, task: int) -> bool:
        """Whether it may only start now as that puts off nobody whose turn it is: which of those do, their values say.

        GPUs are kept free for it in turn, once all that have waited longer run.
        """
        table = self._table
        demand, reserved = table.tasks[task], table.reserved
        if demand.movable or not reserved:
            return False
        kinds = {int(table.kind[row]) for row in table.rows(task)}
        return all(kind in reserved and demand.id not in reserved[kind].before for kind in kinds)

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
