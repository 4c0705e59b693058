"""How often to save: between losing work and losing time to saving. Pure arithmetic on what was measured.

The cost that counts is what a checkpoint *blocks*, not how long it takes to reach the disk. Young's interval
sqrt(2 C M) is the first-order optimum for a blocking cost C and a mean time between failures M; Daly's refinement holds
where C is not small against M. Standard library only, Python 3.8 syntax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DEFAULT_MTBF_S = 24 * 3600.0  # of a whole job, while nothing is known of its machine
_PRIOR_FAILURES = 1.0


def mean_between_failures(hours_run: float, failures: int, *, prior_s: float = DEFAULT_MTBF_S) -> float:
    """Seconds between failures, from how much was run and how often that ended badly; `prior_s` counts as one look."""
    seen = hours_run * 3600.0 + prior_s * _PRIOR_FAILURES
    return seen / (failures + _PRIOR_FAILURES)


def interval_s(blocks_s: float, writes_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints.

    Args:
        blocks_s: for how long training stands still for one.
        writes_s: until it is safe on disk; the next one cannot begin before that.
        mtbf_s: mean time between failures, preemptions among them.
    """
    if mtbf_s <= 0:
        raise ValueError("a mean time between failures is above 0")
    cost = max(blocks_s, 0.0)
    if cost >= mtbf_s / 2:
        best = mtbf_s
    else:
        part = math.sqrt(cost / (2 * mtbf_s))
        best = math.sqrt(2 * cost * mtbf_s) * (1 + part / 3 + part * part / 9) - cost
    # Saving that costs nothing is still worth no more than a step now and then, and cannot overtake itself.
    return max(best, writes_s * 1.1, 1.0)


def expected_loss(interval: float, blocks_s: float, mtbf_s: float) -> float:
    """What part of the time goes into saving and into work done twice: what `interval_s` makes small."""
    return blocks_s / (interval + blocks_s) + (interval / 2 + blocks_s) / mtbf_s


def percentile(values: Sequence[float], part: float) -> float:
    """By the nearest rank: of few values the largest, which is the cautious answer."""
    if not values:
        return 0.0
    ordered: list[float] = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(part * len(ordered)) - 1))]
