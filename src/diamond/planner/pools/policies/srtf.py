"""Shortest remaining time first, with preemption: the least mean completion time on one machine, if estimates hold."""

from __future__ import annotations

import math

from diamond.planner.pools.policies.ledger import Ledger, sound
from diamond.planner.pools.policies.queues import serve
from diamond.planner.pools.policies.words import decide
from diamond.planner.pools.snapshot import Decision, Demand, Snapshot


class Srtf:
    """By priority, then by the time that is left at the size it asks for. Where nobody can say: last, by age."""

    name = "srtf"
    adapts_batch = False

    def allocate(self, snapshot: Snapshot) -> Decision:
        ledger = Ledger(snapshot)
        left_s = {demand.id: _left_s(ledger, demand) for demand in snapshot.demands}
        queue = sorted(ledger.waiting(), key=lambda one: (-one.priority, left_s[one.id], one.submitted_at, one.id))
        return decide(ledger, serve(ledger, queue), "others have less left to do")


def _left_s(ledger: Ledger, demand: Demand) -> float:
    size = ledger.asked(demand)
    kinds = ledger.by_speed(demand, size) if size else []
    if demand.left is None or not kinds or not math.isfinite(demand.left.expected):
        return math.inf
    return sound(demand.left.expected) / ledger.goodput(demand, kinds[0], size)
