"""Serving a queue from its head, with preemption: who comes first gets all it asks for, who does not fit waits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from diamond.planner.pools.policies.ledger import Ledger
from diamond.planner.pools.policies.words import gpus, obstacle
from diamond.planner.pools.snapshot import Demand


def serve(ledger: Ledger, queue: Iterable[Demand]) -> dict[str, str]:
    """Promises GPUs in the order of the queue; says why to those that got none."""
    why: dict[str, str] = {}
    stuck: dict[Hashable, str] = {}  # what tasks like one that lacked something will hear, until another one is served
    for demand in queue:
        like = ledger.likeness(demand)
        if like in stuck:
            why[demand.id] = stuck[like]
            continue
        size = ledger.asked(demand)
        kinds = ledger.by_speed(demand, size) if size else []
        fitting = [kind for kind in kinds if ledger.room(demand, kind) >= size]
        if fitting:
            ledger.take(demand, fitting[0], size)
            stuck.clear()
        else:
            why[demand.id] = stuck[like] = lacking(ledger, demand, size, kinds)
    return why


def lacking(ledger: Ledger, demand: Demand, size: int, kinds: list[str]) -> str:
    """What a task that asks for `size` GPUs of these kinds lacks now."""
    if hindrance := obstacle(ledger, demand):
        return hindrance
    if not kinds:
        return "by its estimate it runs on no kind of GPU here"
    if ledger.quota(demand) < size:
        return f"{gpus(size)} asked for, and its owner's quota has {max(ledger.quota(demand), 0)} left"
    return f"{gpus(size)} asked for, {max(ledger.free[kind] for kind in kinds)} free"
