"""A decision of the planner made one that a pool can carry out: a task has as many slots on each of its nodes."""

from __future__ import annotations

from dataclasses import replace

from diamond.planner.pools.snapshot import Decision, Demand, Placement, Snapshot


def evened(decision: Decision, snapshot: Snapshot) -> Decision:
    """Who would lie unevenly stays where it is, gets what fits, or waits; what that frees goes to those who wait."""
    uneven = [one for one in snapshot.demands if len({slots for _, slots in decision.placed.get(one.id, ())}) > 1]
    if not uneven:
        return decision
    names = {one.id for one in uneven}
    placed = {name: where for name, where in decision.placed.items() if name not in names}
    free = {node.name: node.gpus for node in snapshot.nodes}
    for where in placed.values():
        _take(free, where)
    reasons = dict(decision.reasons)
    for one in [*uneven, *(one for one in snapshot.demands if one.id not in decision.placed)]:
        if where := _fitting(one, snapshot, free):
            placed[one.id] = where
            _take(free, where)
            reasons[one.id] = "gets what lies evenly on nodes"
        elif one.id in names:
            reasons[one.id] = "waits: what is free does not lie evenly on nodes"
    return replace(decision, placed=placed, reasons=reasons)


def _take(free: dict[str, int], where: Placement) -> None:
    for node, slots in where:
        free[node] -= slots


def _fitting(demand: Demand, snapshot: Snapshot, free: dict[str, int]) -> Placement:
    now = snapshot.placed.get(demand.id, ())
    if now and all(free.get(node, 0) >= slots for node, slots in now):
        return now
    per_node = max(node.gpus for node in snapshot.nodes)
    whole = [name for name, left in free.items() if left == per_node]
    roomiest = max(free, key=lambda name: free[name])
    sizes = demand.sizes or range(demand.min_gpus, demand.max_gpus + 1)
    for size in sorted(filter(demand.takes, sizes), reverse=True):
        if size <= free[roomiest]:
            return ((roomiest, size),)
        if size % per_node == 0 and size // per_node <= len(whole):
            return tuple((name, per_node) for name in whole[: size // per_node])
    return ()
