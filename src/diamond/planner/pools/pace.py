"""How a pool is run: how often it is looked at, for what it waits how long, and which sizes a task may have.

The server goes by this, and a replay of what it did goes by the same. Imports nothing that takes a while to load.
"""

from __future__ import annotations

ROUND_S = 60.0  # a new decision at least so often, while something runs
LOOK_S = ROUND_S / 4  # whether there is anything to do
SOON_S = 2.0  # decisions are not made more often than that
DECIDE_S = 1.0  # what one may take
RESTART_S = 30.0  # what a move costs a task, until that was measured
ENDING_S = 3.0  # of that, before the job has ended: to finish the step and to save
HANDOVER_S = 1.5  # of that, from the end of a job to the start of the next
_LEAVE_S = 60.0


def leave_s(walltime_s: float) -> float:
    """How long before a pilot's end its tasks are moved elsewhere, if there is room: no sooner than they must, since
    the next pilot may be waiting for this very node."""
    return min(_LEAVE_S, walltime_s / 10)


def free_bounds(tried: int, per_node: int, most: int, *, is_known: bool) -> tuple[int, int]:
    """At least and at most so many slots, of a task that leaves its size to Diamond.

    It begins with one: it may be a script that several ranks would only repeat. Once it has measured itself it may have
    more, up to twice of what it was measured on or a node, so that a guess is not expensive.

    Args:
        tried: the most slots it was measured on; 0 for none.
        most: slots of the whole pool.
        is_known: whether tasks like it were measured: then it may have all of them.
    """
    if is_known:
        return 1, most
    return 1, min(max(per_node, 2 * tried), most) if tried else 1


def even_sizes(low: int, high: int, per_node: int) -> tuple[int, ...]:
    """Evenly on nodes: any number of slots on one, whole nodes beyond."""
    found = [size for size in range(low, high + 1) if size <= per_node or size % per_node == 0]
    return tuple(found or [low])
