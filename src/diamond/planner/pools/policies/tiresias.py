"""Least attained service in two queues, after Tiresias (NSDI 2019), with the threshold of Pollux's public simulator.

A task starts in the first queue and falls into the second once it has had 16 GPU hours. The first queue goes before
the second, each is served in the order of submission, and nothing has to be known of how long tasks take. As in that
simulator, no task returns to the first queue.
"""

from __future__ import annotations

from diamond.planner.pools.policies.ledger import Ledger
from diamond.planner.pools.policies.queues import serve
from diamond.planner.pools.policies.words import decide
from diamond.planner.pools.snapshot import Decision, Demand, Snapshot

THRESHOLD_S = 16 * 3600.0


class Tiresias:
    """Priorities go before queues. Tasks that could use several numbers of GPUs get the largest.

    Args:
        threshold_s: GPU seconds after which a task belongs to the second queue.
    """

    name = "tiresias"
    adapts_batch = False

    def __init__(self, threshold_s: float = THRESHOLD_S) -> None:
        self.threshold_s = threshold_s

    def allocate(self, snapshot: Snapshot) -> Decision:
        ledger = Ledger(snapshot)
        queue = sorted(ledger.waiting(), key=lambda one: (-one.priority, self._demoted(one), one.submitted_at, one.id))
        return decide(ledger, serve(ledger, queue), "others have had less, or came first")

    def _demoted(self, demand: Demand) -> bool:
        return demand.attained_s >= self.threshold_s
