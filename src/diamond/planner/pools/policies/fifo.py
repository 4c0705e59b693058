"""First come, first served, with EASY backfill: what batch systems do.

Nothing that runs is moved or resized. The first task that does not fit gets a reservation for the moment at which, by
the estimates, enough GPUs are free; later ones may start before it only where that does not delay it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from diamond.planner.pools.policies.ledger import Ledger, sound
from diamond.planner.pools.policies.queues import lacking
from diamond.planner.pools.policies.words import decide, minutes
from diamond.planner.pools.snapshot import Decision, Demand, Snapshot


@dataclass
class _Reservation:
    """`spare`: GPUs of that kind which the task it is for leaves over when it starts, in `after_s` seconds."""

    task: str
    kind: str
    after_s: float
    spare: int


class Fifo:
    """By priority, then by submission. Tasks that could use several numbers of GPUs get the largest."""

    name = "fifo"
    adapts_batch = False

    def allocate(self, snapshot: Snapshot) -> Decision:
        ledger = Ledger(snapshot)
        queue = sorted(snapshot.demands, key=lambda one: (-one.priority, one.submitted_at, one.id))
        why = _keep_running(ledger, queue)
        held: _Reservation | None = None
        stuck: dict[Hashable, str] = {}  # what tasks like one that lacked something will hear, until another one starts
        for demand in queue:
            if demand.id in ledger.wanted or demand.id in ledger.shapes:
                continue
            like = ledger.likeness(demand)
            if like in stuck:
                why[demand.id] = stuck[like]
                continue
            size = ledger.asked(demand)
            kinds = ledger.by_speed(demand, size) if size else []
            fitting = [kind for kind in kinds if ledger.room(demand, kind) >= size]
            allowed = [kind for kind in fitting if held is None or not _delays(ledger, demand, kind, size, held)]
            if allowed:
                why.update(_start(ledger, demand, allowed[0], size, held))
                stuck.clear()
            elif fitting and held is not None:
                why[demand.id] = f"it would delay {held.task}, which came first"
            else:
                why[demand.id] = stuck[like] = lacking(ledger, demand, size, kinds)
                if held is None and kinds and ledger.quota(demand) >= size:
                    held = _reserve(ledger, demand, kinds, size)
                    why[demand.id] += f"; expected in {minutes(held.after_s)}" if held.after_s < math.inf else ""
        return decide(ledger, why, "others came first", hold=True)


def _keep_running(ledger: Ledger, queue: Sequence[Demand]) -> dict[str, str]:
    """All that runs goes on, but for what a quota that was lowered does not allow."""
    why = {}
    for demand in queue:
        shape = ledger.shapes.get(demand.id)
        if shape is None or demand.id in ledger.wanted:
            continue
        if ledger.room(demand, shape.gpu_type) >= shape.gpus:
            ledger.keep(demand)
        else:
            why[demand.id] = f"its owner may hold {ledger.snapshot.quotas.get(demand.owner)} GPUs"
    return why


def _start(ledger: Ledger, demand: Demand, kind: str, size: int, held: _Reservation | None) -> dict[str, str]:
    ledger.take(demand, kind, size)
    if held is None:
        return {}
    if kind == held.kind and not _in_time(ledger, demand, kind, size, held):
        held.spare -= size
    return {demand.id: f"before its turn, as that does not delay {held.task}"}


def _delays(ledger: Ledger, demand: Demand, kind: str, size: int, held: _Reservation) -> bool:
    return kind == held.kind and size > held.spare and not _in_time(ledger, demand, kind, size, held)


def _in_time(ledger: Ledger, demand: Demand, kind: str, size: int, held: _Reservation) -> bool:
    """Whether it ends before the reservation begins."""
    return math.inf > _lasts_s(ledger, demand, kind, size) <= held.after_s


def _reserve(ledger: Ledger, demand: Demand, kinds: Sequence[str], size: int) -> _Reservation:
    """On the kind of GPU where it can start first."""
    found = [_earliest(ledger, demand, kind, size) for kind in kinds]
    return min(found, key=lambda one: one.after_s)


def _earliest(ledger: Ledger, demand: Demand, kind: str, size: int) -> _Reservation:
    tasks = {one.id: one for one in ledger.snapshot.demands}
    ends = sorted(
        (_lasts_s(ledger, tasks[name], kind, one.gpus), one.gpus)
        for name, one in ledger.wanted.items()
        if one.gpu_type == kind
    )
    free, after_s = ledger.free[kind], 0.0
    for end_s, gpus in ends:
        if free >= size and end_s > after_s:
            break
        free, after_s = free + gpus, end_s
    return _Reservation(demand.id, kind, after_s, free - size)


def _lasts_s(ledger: Ledger, demand: Demand, kind: str, gpus: int) -> float:
    """Seconds from now to its end; infinite where nobody can say."""
    speed = ledger.goodput(demand, kind, gpus)
    if demand.left is None or not speed or not math.isfinite(demand.left.expected):
        return math.inf
    return sound(demand.left.expected) / speed
