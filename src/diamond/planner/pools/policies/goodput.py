"""Diamond's own policy: GPUs go where they bring most work forward, within what every task is promised.

Promised are, in this order: a turn to whoever has waited too long, the smallest share to higher priorities, capacity
for the load of services, enough speed for deadlines that can be kept. What is left is one optimisation over all
options of all tasks; `valuing` says what an option is worth, `choosing` solves it, `packing` finds nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from diamond.planner.pools.admitting import Admission, Admitted, drained
from diamond.planner.pools.choosing import Problem, choose
from diamond.planner.pools.explaining import explain
from diamond.planner.pools.options import Ints, Options, Pool, options
from diamond.planner.pools.packing import fewest_nodes
from diamond.planner.pools.policies.ledger import Ledger, sound
from diamond.planner.pools.snapshot import Decision, Placement, Shape, Snapshot
from diamond.planner.pools.valuing import Taste, Worth, worth

# Of the time for a decision, the part in which options are weighed; the rest finds nodes and words.
WEIGHING = 0.6
# A task that got more nodes than it needs, and less than this part of the speed it was to have, gets fewer GPUs.
TOO_SLOW = 0.9
REPACKED = 4


class Goodput:
    """See the module.

    Args:
        taste: what the pool's owner prefers.
        clock: seconds, for the deadline of a decision alone.
    """

    name = "diamond"
    adapts_batch = True

    def __init__(self, taste: Taste | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._taste = taste or Taste()
        self._clock = clock

    def allocate(self, snapshot: Snapshot) -> Decision:
        until = self._clock() + WEIGHING * max(snapshot.seconds, 0.0)
        ledger = Ledger(snapshot)
        pool = Pool.of(snapshot, ledger.shapes)
        table = options(snapshot, pool, ledger.shapes, drained(snapshot, pool, self._taste))
        value = worth(snapshot, table, int(pool.free.sum()), self._taste)
        bounds = _bounds(snapshot, pool, ledger, table)
        admitted = Admission(snapshot, pool, table, value, bounds, self._taste).run()
        chosen, exact = _chosen(pool, table, value, bounds, admitted, (until, self._clock))
        placed = _placed(ledger, pool, table, chosen)
        reasons = explain(snapshot, ledger, pool, table, value, chosen, placed, self._taste)
        return Decision(placed=placed, reasons=reasons, exact=exact)


def _bounds(snapshot: Snapshot, pool: Pool, ledger: Ledger, table: Options) -> tuple[Ints, Ints]:
    """By task, the number of its owner's bound (-1: none); by owner, what is left of the quota."""
    left = {owner: max(quota, 0) for owner, quota in snapshot.quotas.items()}
    for demand in snapshot.demands:
        if demand.id in pool.held and demand.owner in left:
            left[demand.owner] = max(left[demand.owner] - ledger.shapes[demand.id].gpus, 0)
    wanted: dict[str, int] = {}
    for task, demand in enumerate(table.tasks):
        if rows := table.rows(task):
            wanted[demand.owner] = wanted.get(demand.owner, 0) + int(table.gpus[rows[-1]])
    owners = sorted(owner for owner, gpus in left.items() if wanted.get(owner, 0) > gpus)
    index = {owner: number for number, owner in enumerate(owners)}
    return (
        np.array([index.get(demand.owner, -1) for demand in table.tasks], dtype=np.int64),
        np.array([left[owner] for owner in owners], dtype=np.int64),
    )


def _chosen(
    pool: Pool,
    table: Options,
    value: Worth,
    bounds: tuple[Ints, Ints],
    admitted: Admitted,
    deadline: tuple[float, Callable[[], float]],
) -> tuple[Ints, bool]:
    """By task, its row of the table; the rows that are not allowed are taken out for the choice."""
    rows = np.flatnonzero(admitted.allowed & (value.value > 0.0) | np.isin(np.arange(len(table)), admitted.given))
    number = np.full(len(table) + 1, -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    counts = np.bincount(table.task[rows], minlength=len(table.tasks))
    problem = Problem(
        start=np.concatenate([[0], np.cumsum(counts)]),
        kind=table.kind[rows],
        gpus=table.gpus[rows],
        value=value.value[rows],
        capacity=pool.free,
        owner=bounds[0],
        bounds=bounds[1],
        must=admitted.must,
        given=number[admitted.given],
    )
    chosen, exact = choose(problem, *deadline)
    return np.where(chosen >= 0, rows[chosen] if len(rows) else -1, -1), exact


def _placed(ledger: Ledger, pool: Pool, table: Options, chosen: Ints) -> dict[str, Placement]:
    """Nodes for all that was chosen; who would be slowed by lying on too many nodes gets the next smaller number."""
    chosen = chosen.copy()
    placed: dict[str, Placement] = {}
    for _ in range(REPACKED):
        ledger.wanted = {name: one for name, one in ledger.wanted.items() if name in pool.held}
        for task in np.flatnonzero(chosen >= 0):
            ledger.take(table.tasks[task], pool.kinds[table.kind[chosen[task]]], int(table.gpus[chosen[task]]))
        placed = ledger.places()
        cut = [
            (number, row)
            for number in map(int, np.flatnonzero(chosen >= 0))
            if (row := _smaller(pool, table, placed, chosen, number)) >= 0
        ]
        if not cut:
            break
        for smaller, row in cut:
            chosen[smaller] = row
    return placed


def _smaller(pool: Pool, table: Options, placed: dict[str, Placement], chosen: Ints, task: int) -> int:
    """The row a task should have instead; -1 where it is well off, or nothing is better."""
    row, demand = int(chosen[task]), table.tasks[task]
    placement = placed.get(demand.id, ())
    kind = int(table.kind[row])
    if row == table.now[task] or (placement and len(placement) <= fewest_nodes(int(table.gpus[row]), pool.sizes[kind])):
        return -1
    shape = Shape(pool.kinds[kind], len(placement), int(table.gpus[row]))
    speed = sound(float(demand.speed.goodput(shape))) if placement else 0.0
    if speed >= TOO_SLOW * table.goodput[row]:
        return -1
    rows = [one for one in table.rows(task) if table.kind[one] == kind and table.gpus[one] < table.gpus[row]]
    return rows[-1] if rows and table.goodput[rows[-1]] >= speed else -1
