"""Decisions of Diamond's policy in words: what every task gets, against what it had, and why."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from diamond.planner.pools.admitting import is_owed, waited_s
from diamond.planner.pools.options import UNSURE, Ints, Options, Pool
from diamond.planner.pools.policies.ledger import Ledger, smallest
from diamond.planner.pools.policies.words import gpus, minutes, obstacle
from diamond.planner.pools.snapshot import Demand, Placement, Snapshot
from diamond.planner.pools.valuing import Taste, Worth, needed_for_load, restart_of


def explain(
    snapshot: Snapshot,
    ledger: Ledger,
    pool: Pool,
    table: Options,
    value: Worth,
    chosen: Ints,
    placed: Mapping[str, Placement],
    taste: Taste,
) -> dict[str, str]:
    """A reason for every task of the snapshot."""
    words = _Words(snapshot, ledger, pool, table, placed, taste)
    found = {name: f"keeps {gpus(ledger.shapes[name].gpus)}: it cannot be moved" for name in pool.held}
    for task, demand in enumerate(table.tasks):
        placement = placed.get(demand.id, ())
        found[demand.id] = words.of_served(task, placement) if placement else words.of_waiting(task)
    return found


class _Words:
    def __init__(
        self,
        snapshot: Snapshot,
        ledger: Ledger,
        pool: Pool,
        table: Options,
        placed: Mapping[str, Placement],
        taste: Taste,
    ) -> None:
        self._snapshot, self._ledger, self._pool, self._table, self._taste = snapshot, ledger, pool, table, taste
        self._heads = {reservation.task for reservation in table.reserved.values()}
        self._texts: dict[Hashable, str] = {}
        self._kinds = {node.name: node.gpu_type for node in snapshot.nodes}
        self._ends = _ends(snapshot, ledger, pool, table, placed)
        self._free = {kind: int(total) for kind, total in zip(pool.kinds, pool.total, strict=True)}
        self._holds: dict[str, int] = {}
        self._highest = max((demand.priority for demand in snapshot.demands if placed.get(demand.id)), default=0)
        owners = {demand.id: demand.owner for demand in snapshot.demands}
        for name, placement in placed.items():
            number = sum(one for _, one in placement)
            self._free[self._kinds[placement[0][0]]] -= number
            self._holds[owners[name]] = self._holds.get(owners[name], 0) + number

    def of_served(self, task: int, placement: Placement) -> str:
        demand = self._table.tasks[task]
        number, kind = sum(one for _, one in placement), self._kinds[placement[0][0]]
        now = self._ledger.shapes.get(demand.id)
        tail = self._promise(demand)
        if now is None:
            many = f" on {len(placement)} nodes" if len(placement) > 1 else ""
            return f"starts with {gpus(number, kind)}{many}{tail}"
        if placement == self._ledger.standing[demand.id]:
            return f"keeps {gpus(number)}{tail}"
        cost = f"a restart of {minutes(restart_of(demand))}"
        ratio = self._faster(task, kind, number)
        if kind != now.gpu_type:
            return f"moves from {gpus(now.gpus, now.gpu_type)} to {gpus(number, kind)}{_times(ratio)}, for {cost}{tail}"
        if number == now.gpus:
            return f"moves with its {gpus(number)}: others fit only if it does, for {cost}{tail}"
        if number > now.gpus and self._is_a_try(task, kind, number):
            return f"grows from {now.gpus} to {gpus(number)}, to see how fast it is there, for {cost}{tail}"
        if number > now.gpus:
            return f"grows from {now.gpus} to {gpus(number)}{_times(ratio)}, worth {cost}{tail}"
        why = "fewer are faster for it" if ratio > 1.0 else "what it gives up does more for others"
        return f"shrinks from {now.gpus} to {gpus(number)}{_times(ratio)}; {why}{tail}"

    def _promise(self, demand: Demand) -> str:
        if demand.load is not None:
            return f", enough for {needed_for_load(demand, self._taste):.3g} requests a second as far as there is room"
        if is_owed(self._snapshot, demand, self._taste):
            return f"; its turn after waiting {minutes(waited_s(self._snapshot, demand))}"
        return ""

    def _faster(self, task: int, kind: str, number: int) -> float:
        """How many times as fast as now; 0.0 where that is not known."""
        table, now, row = self._table, int(self._table.now[task]), self._row(task, kind, number)
        return float(table.goodput[row] / table.goodput[now]) if row >= 0 and now >= 0 else 0.0

    def _is_a_try(self, task: int, kind: str, number: int) -> bool:
        """Whether nobody knows how fast it is there."""
        row = self._row(task, kind, number)
        return row >= 0 and bool(self._table.doubt[row] > UNSURE)

    def _row(self, task: int, kind: str, number: int) -> int:
        """-1 where the table does not hold it."""
        table = self._table
        rows = (
            row for row in table.rows(task) if table.gpus[row] == number and self._pool.kinds[table.kind[row]] == kind
        )
        return next(rows, -1)

    def of_waiting(self, task: int) -> str:
        demand = self._table.tasks[task]
        now = self._ledger.shapes.get(demand.id)
        head = "waits" if now is None else f"stops, and gives back {gpus(now.gpus)}"
        if not self._table.rows(task):
            return f"{head}: {self._unable(demand)}"
        least = smallest(demand)
        kinds = [kind for kind in self._pool.kinds if demand.runs_on(kind)]
        quota = self._snapshot.quotas.get(demand.owner)
        if quota is not None and self._holds.get(demand.owner, 0) + least > quota:
            return f"{head}: its owner holds {self._holds.get(demand.owner, 0)} of {gpus(quota)} allowed"
        cause = f"the {gpus(least)} it needs {'does' if least == 1 else 'do'} more for others"
        if self._highest > demand.priority:
            cause = "tasks of higher priority come first"
        return f"{head}: {cause}{self._when(kinds, least)}{self._turn(demand)}"

    def _unable(self, demand: Demand) -> str:
        """Why there is nothing to choose from for a task; worked out once for all that are alike."""
        if demand.id in self._heads:
            return self._without_options(demand)
        like = (demand.movable, self._ledger.likeness(demand))
        if like not in self._texts:
            self._texts[like] = obstacle(self._ledger, demand) or self._without_options(demand)
        return self._texts[like]

    def _without_options(self, demand: Demand) -> str:
        least = smallest(demand)
        for reservation in self._table.reserved.values():
            if reservation.task == demand.id:
                after_s = reservation.after_s
                soon = f"; it is expected to start in {minutes(after_s)}" if after_s < np.inf else ""
                return f"tasks that cannot be moved hold what it needs{soon}"
        free = [
            number
            for number, kind in enumerate(self._pool.kinds)
            if demand.runs_on(kind) and least <= int(self._pool.free[number])
        ]
        if not free:
            return "tasks that cannot be moved hold what it needs"
        if any(number in self._table.reserved for number in free) and not demand.movable:
            return "it could not be moved out of the way of a task that comes first"
        return "it is not known to run on what is here"

    def _when(self, kinds: list[str], least: int) -> str:
        soonest = min((self._free_at(kind, least) for kind in kinds), default=np.inf)
        if not np.isfinite(soonest) or soonest <= 0.0:
            return ""
        comes = "comes" if least == 1 else "come"
        return f"; {gpus(least)} {comes} free in about {minutes(soonest)}"

    def _free_at(self, kind: str, least: int) -> float:
        """In how many seconds so many GPUs of a kind are free if nobody else takes them."""
        free = self._free[kind]
        if free >= least:
            return 0.0
        seconds, freed = self._ends[kind]
        at = int(np.searchsorted(freed, least - free))
        return float(seconds[at]) if at < len(seconds) else np.inf

    def _turn(self, demand: Demand) -> str:
        if not np.isfinite(self._taste.wait_s) or is_owed(self._snapshot, demand, self._taste):
            return ""
        ran = max(demand.running_s, 0.0) if np.isfinite(demand.running_s) else 0.0
        rest = self._taste.wait_s * (1.0 + ran // self._taste.turn_s) - waited_s(self._snapshot, demand)
        return f"; its turn comes in {minutes(rest)} at the latest, if there is room for all whose turn it is"


def _times(ratio: float) -> str:
    return f": {ratio:.2g} times as fast" if ratio > 0.0 else ""


def _ends(
    snapshot: Snapshot, ledger: Ledger, pool: Pool, table: Options, placed: Mapping[str, Placement]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By kind, in how many seconds tasks are expected to end, and how many GPUs are free by then."""
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in pool.kinds}
    speeds = {
        demand.id: float(table.goodput[row]) for demand, row in zip(table.tasks, table.now, strict=True) if row >= 0
    }
    for demand in snapshot.demands:
        shape = ledger.shapes.get(demand.id)
        if shape is not None and demand.id in placed and demand.left is not None and demand.id in speeds:
            found[shape.gpu_type].append((max(demand.left.expected, 0.0) / speeds[demand.id], shape.gpus))
    ends = {}
    for kind, pairs in found.items():
        pairs.sort()
        ends[kind] = (np.array([one for one, _ in pairs]), np.cumsum([number for _, number in pairs]))
    return ends
