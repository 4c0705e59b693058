"""What every task of a snapshot could be given: kinds of GPU and numbers of them, with how fast it would be.

One flat table of numpy columns, tasks in order of id, so that a decision asks every `Speed` once and computes with
whole columns after that. Nothing a broken `Speed` answers gets beyond this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from diamond.planner.pools.packing import fewest_nodes
from diamond.planner.pools.snapshot import Demand, Shape, Snapshot

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# A task whose speed is not known beyond some size may go to twice that size and be measured there.
EXPLORED = 2
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
class Options:
    """Rows of task, kind, GPUs, nodes and goodput; rows `start[i]` to `start[i + 1]` are task i's, smallest first.

    Attributes:
        tasks: who may be given something in this decision, in order of id. Immovable ones that run are not among them.
        now: by task, the row that is what it holds; -1 for none.
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

    def __len__(self) -> int:
        return len(self.task)

    def rows(self, task: int) -> range:
        return range(int(self.start[task]), int(self.start[task + 1]))


def options(
    snapshot: Snapshot, pool: Pool, shapes: Mapping[str, Shape], closed: Mapping[int, float] | None = None
) -> Options:
    """Every size of every kind that a task takes and the pool has, where it runs at all.

    Args:
        shapes: what tasks hold, and can go on with.
        closed: kinds on which no immovable task starts, unless its priority is above that.
    """
    tasks = tuple(sorted((one for one in snapshot.demands if one.id not in pool.held), key=lambda one: one.id))
    ladders = [_ladder(sizes, int(free)) for sizes, free in zip(pool.sizes, pool.free, strict=True)]
    most = _near_fair(len(tasks), int(pool.free.sum()))
    rows: list[tuple[int, int, int, int, float, float]] = []
    start = [0]
    held = np.full(len(tasks), -1, dtype=np.int64)
    for index, demand in enumerate(tasks):
        now = shapes.get(demand.id)
        for row, is_now in _rows(demand, now, pool, ladders, most, closed or {}):
            if is_now:
                held[index] = len(rows)
            rows.append((index, *row))
        start.append(len(rows))
    table = np.array(rows, dtype=np.float64).reshape(-1, 6).T
    task, kind, gpus, nodes = table[:4].astype(np.int64)
    starts = np.array(start, dtype=np.int64)
    return Options(tasks, starts, task, kind, gpus, nodes, goodput=table[4], doubt=table[5], now=held)


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
    closed: Mapping[int, float],
) -> list[tuple[tuple[int, int, int, float, float], bool]]:
    """(kind, GPUs, nodes, goodput, doubt) of a task, and whether that is what it holds; smallest first."""
    shapes: list[tuple[int, Shape, bool]] = []
    for kind, name in enumerate(pool.kinds):
        if not demand.runs_on(name) or (not demand.movable and demand.priority <= closed.get(kind, -math.inf)):
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


def _believed(
    demand: Demand, shapes: list[tuple[int, Shape, bool]]
) -> list[tuple[tuple[int, int, int, float, float], bool]]:
    found = []
    broken = []
    known = 0
    for kind, shape, is_now in shapes:
        goodput, doubt = _asked(demand, shape)
        if math.isnan(goodput):
            broken.append((kind, shape, is_now))
        elif goodput > 0.0:
            known = max(known, shape.gpus if is_now or doubt <= UNSURE or not known else 0)
            if is_now or shape.gpus <= EXPLORED * known:
                found.append(((kind, shape.gpus, shape.nodes, goodput, doubt), is_now))
    if not found and broken:  # nobody can say how fast it is, but it can run: at what it has, or at its smallest
        kind, shape, is_now = next((one for one in broken if one[2]), broken[0])
        return [((kind, shape.gpus, shape.nodes, 1.0, 1.0), is_now)]
    return _sublinear(found)


def _asked(demand: Demand, shape: Shape) -> tuple[float, float]:
    """Goodput (NaN for what makes no sense) and doubt of a shape."""
    try:
        goodput, doubt = float(demand.speed.goodput(shape)), float(demand.speed.doubt(shape))
    except (ArithmeticError, ValueError, TypeError):
        return math.nan, 1.0
    if not math.isfinite(goodput) or goodput < 0.0:
        return math.nan, 1.0
    return goodput, doubt if math.isfinite(doubt) and doubt >= 0.0 else 1.0


def _sublinear(
    found: list[tuple[tuple[int, int, int, float, float], bool]],
) -> list[tuple[tuple[int, int, int, float, float], bool]]:
    """With no step up by more than the GPUs that are added explain: one absurd figure must not draw all GPUs."""
    smallest: dict[int, tuple[int, float]] = {}
    believed = []
    for (kind, gpus, nodes, goodput, doubt), is_now in found:
        before, speed = smallest.setdefault(kind, (gpus, goodput))
        believed.append(((kind, gpus, nodes, min(goodput, speed * SUPERLINEAR * gpus / before), doubt), is_now))
    return believed
