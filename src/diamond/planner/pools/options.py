"""What every task of a snapshot could be given: kinds of GPU and numbers of them, with how fast it would be.

One flat table of numpy columns, tasks in order of id, so that a decision asks every `Speed` once and computes with
whole columns after that. Nothing a broken `Speed` answers gets beyond this module.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from diamond.planner.pools.packing import fewest_nodes
from diamond.planner.pools.policies.ledger import sane, sound
from diamond.planner.pools.snapshot import Demand, Shape, Snapshot

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
# (kind, GPUs, nodes, goodput, doubt), and whether that is what the task holds.
_Row = tuple[tuple[int, int, int, float, float], bool]

# A task of which nothing is known may begin with twice its least. One whose speed is not known beyond some size may try
# four times that size, and is measured there: with twice, who gains little from a second node would not see a fourth.
GUESSED = 2
EXPLORED = 4
# Doubt (a standard deviation of the logarithm) above which a speed counts as not known.
UNSURE = 0.35
# No task is believed to gain more than this from every GPU that is added, whatever its measurements say.
SUPERLINEAR = 1.5
# Beyond this many tasks a decision looks at sizes near the fair share only.
MANY_TASKS = 1000


@dataclass(frozen=True)
class Pool:
    """The GPUs of a snapshot by kind, less what immovable tasks hold.

    Attributes:
        kinds: their names in order.
        sizes: GPUs of every node by kind, largest first.
        total, free: GPUs by kind, with and without what immovable tasks hold.
        held: immovable tasks that run: what they have stays theirs.
    """

    kinds: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    total: Ints
    free: Ints
    held: frozenset[str]

    @staticmethod
    def of(snapshot: Snapshot, shapes: Mapping[str, Shape]) -> Pool:
        types = snapshot.types()
        kinds = tuple(types)
        sizes = tuple(tuple(sorted((max(node.gpus, 0) for node in types[kind]), reverse=True)) for kind in kinds)
        total = np.array([sum(one) for one in sizes], dtype=np.int64)
        free = total.copy()
        held = frozenset(demand.id for demand in snapshot.demands if not demand.movable and demand.id in shapes)
        for name in held:
            free[kinds.index(shapes[name].gpu_type)] -= shapes[name].gpus
        return Pool(kinds, sizes, total, np.maximum(free, 0), held)


@dataclass(frozen=True)
class Reservation:
    """GPUs of one kind that a task waits for: immovable ones that start there must not put it off.

    Attributes:
        task: who waits for them.
        after_s: seconds until enough of them are expected to be free.
        before: immovable tasks whose turn comes before.
        spare: by task, GPUs that it may hold beyond that moment, as they will not be needed.
    """

    task: str
    after_s: float
    before: frozenset[str]
    spare: Mapping[str, int]

    def allows(self, demand: Demand, gpus: int, goodput: float) -> bool:
        """Whether an immovable task may start so."""
        if demand.id in self.before or gpus <= self.spare.get(demand.id, 0):
            return True
        return math.inf > longest_s(demand, goodput) <= self.after_s


def longest_s(demand: Demand, goodput: float) -> float:
    """Seconds that a task lasts at most if it starts now; infinite where nobody can say."""
    if demand.left is None or demand.load is not None or not goodput > 0.0:
        return math.inf
    left = max(demand.left.expected, demand.left.high)
    seconds = max(demand.restart_s, 0.0) + left / goodput if left >= 0.0 else math.inf
    return seconds if math.isfinite(seconds) else math.inf


@dataclass(frozen=True)
class Options:
    """Rows of task, kind, GPUs, nodes and goodput; rows `start[i]` to `start[i + 1]` are task i's, smallest first.

    Attributes:
        tasks: who may be given something in this decision, in order of id. Immovable ones that run are not among them.
        now: by task, the row that is what it holds; -1 for none.
        reserved: by kind, for whom it is kept free.
    """

    tasks: tuple[Demand, ...]
    start: Ints
    task: Ints
    kind: Ints
    gpus: Ints
    nodes: Ints
    goodput: Floats
    doubt: Floats
    now: Ints
    reserved: Mapping[int, Reservation] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.task)

    @cached_property
    def _starts(self) -> list[int]:
        return list(self.start.tolist())

    def rows(self, task: int) -> range:
        return range(self._starts[task], self._starts[task + 1])


def options(
    snapshot: Snapshot, pool: Pool, shapes: Mapping[str, Shape], reserved: Mapping[int, Reservation] | None = None
) -> Options:
    """Every size of every kind that a task takes and the pool has, where it runs at all.

    Args:
        shapes: what tasks hold, and can go on with.
        reserved: kinds on which immovable tasks only start where that puts nobody off.
    """
    waiting = (sane(one, snapshot.now) for one in snapshot.demands if one.id not in pool.held)
    tasks = tuple(sorted(waiting, key=lambda one: one.id))
    ladders = [_ladder(sizes, int(free)) for sizes, free in zip(pool.sizes, pool.free, strict=True)]
    most = _near_fair(len(tasks), int(pool.free.sum()))
    rows: list[tuple[int, int, int, int, float, float]] = []
    start = [0]
    held = np.full(len(tasks), -1, dtype=np.int64)
    reserved = reserved or {}
    alike: dict[Hashable, list[_Row]] = {}
    for index, demand in enumerate(tasks):
        now = shapes.get(demand.id)
        like = (
            demand.id if now else (id(demand.speed), demand.min_gpus, demand.max_gpus, demand.sizes, demand.gpu_types)
        )
        if like not in alike:
            alike[like] = _rows(demand, now, pool, ladders, most)
        for row, is_now in _unreserved(demand, alike[like], reserved):
            if is_now:
                held[index] = len(rows)
            rows.append((index, *row))
        start.append(len(rows))
    table = np.array(rows, dtype=np.float64).reshape(-1, 6).T
    task, kind, gpus, nodes = table[:4].astype(np.int64)
    starts = np.array(start, dtype=np.int64)
    return Options(
        tasks, starts, task, kind, gpus, nodes, goodput=table[4], doubt=table[5], now=held, reserved=reserved
    )


def _near_fair(tasks: int, gpus: int) -> int:
    return max(8, 16 * gpus // max(tasks, 1)) if tasks > MANY_TASKS else gpus


def _ladder(sizes: tuple[int, ...], free: int) -> tuple[int, ...]:
    """Powers of two within a node, whole nodes beyond, in steps of at most a half."""
    node = sizes[0] if sizes else 0
    within = [2**power for power in range(node.bit_length()) if 2**power < node]
    nodes = [*range(1, 5), *(start * 2**power for power in range(1, 12) for start in (3, 4))]
    return tuple(one for one in sorted({*within, *(node * number for number in nodes)}) if 0 < one <= free)


@lru_cache(maxsize=4096)
def _sizes_of(
    least: int, most: int, sizes: tuple[int, ...] | None, ladder: tuple[int, ...], free: int, near: int
) -> tuple[int, ...]:
    least = max(least, 1)
    if sizes is not None:
        found = {one for one in sizes if least <= one <= min(most, free)}
        bounded = {one for one in found if one <= near}
        return tuple(sorted(bounded or set(sorted(found)[:1])))
    found = {one for one in ladder if least <= one <= min(most, max(near, least))}
    return tuple(sorted(one for one in found | {least, min(most, near)} if least <= one <= min(most, free)))


def _rows(
    demand: Demand,
    now: Shape | None,
    pool: Pool,
    ladders: Sequence[tuple[int, ...]],
    near: int,
) -> list[_Row]:
    """(kind, GPUs, nodes, goodput, doubt) of a task, and whether that is what it holds; smallest first."""
    shapes: list[tuple[int, Shape, bool]] = []
    for kind, name in enumerate(pool.kinds):
        if not demand.runs_on(name):
            continue
        free = int(pool.free[kind])
        gpus = _sizes_of(demand.min_gpus, demand.max_gpus, demand.sizes, ladders[kind], free, near)
        held = now.gpus if now is not None and now.gpu_type == name else 0
        for one in sorted({*gpus, held} - {0}):
            if one == held and now is not None:
                shapes.append((kind, now, True))
            else:
                shapes.append((kind, Shape(name, fewest_nodes(one, pool.sizes[kind]), one), False))
    shapes.sort(key=lambda one: (one[1].gpus, one[0]))
    return _believed(demand, shapes)


def _unreserved(demand: Demand, rows: list[_Row], reserved: Mapping[int, Reservation]) -> list[_Row]:
    if demand.movable or not reserved:
        return rows
    return [
        one
        for one in rows
        if one[0][0] not in reserved or reserved[one[0][0]].allows(demand, gpus=one[0][1], goodput=one[0][3])
    ]


def _believed(demand: Demand, shapes: list[tuple[int, Shape, bool]]) -> list[_Row]:
    found = []
    broken = []
    known, explored = 0, GUESSED
    for kind, shape, is_now in shapes:
        goodput, doubt = asked(demand, shape)
        if math.isnan(goodput):
            broken.append((kind, shape, is_now))
        elif goodput > 0.0:
            if is_now or doubt <= UNSURE:
                known, explored = max(known, shape.gpus), EXPLORED
            known = known or shape.gpus
            if is_now or shape.gpus <= explored * known:
                found.append(((kind, shape.gpus, shape.nodes, goodput, doubt), is_now))
    if not found and broken:  # nobody can say how fast it is, but it can run: at what it has, or at its smallest
        kind, shape, is_now = next((one for one in broken if one[2]), broken[0])
        return [((kind, shape.gpus, shape.nodes, 1.0, 1.0), is_now)]
    return _sublinear(found)


def asked(demand: Demand, shape: Shape) -> tuple[float, float]:
    """Goodput (NaN for what makes no sense) and doubt of a shape."""
    try:
        goodput, doubt = float(demand.speed.goodput(shape)), float(demand.speed.doubt(shape))
    except (ArithmeticError, ValueError, TypeError):
        return math.nan, 1.0
    if not math.isfinite(goodput) or goodput < 0.0:
        return math.nan, 1.0
    return sound(goodput), doubt if math.isfinite(doubt) and doubt >= 0.0 else 1.0


def _sublinear(
    found: list[_Row],
) -> list[_Row]:
    """With no step up by more than the GPUs that are added explain: one absurd figure must not draw all GPUs."""
    smallest: dict[int, tuple[int, float]] = {}
    believed = []
    for (kind, gpus, nodes, goodput, doubt), is_now in found:
        before, speed = smallest.setdefault(kind, (gpus, goodput))
        believed.append(((kind, gpus, nodes, min(goodput, speed * SUPERLINEAR * gpus / before), doubt), is_now))
    return believed
