"""How long a task would take on its own, with a fair share of the pool all the time; `outcomes` says what that is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from diamond.planner.pools.simulation.applications import Application, Floats
from diamond.planner.pools.simulation.running import counts_of
from diamond.planner.pools.snapshot import Node


def alone_s(application: Application, nodes: Sequence[Node], contention: float, max_gpus: int) -> float:
    """Seconds of training with 1/contention of these GPUs."""
    total = sum(node.gpus for node in nodes)
    share = total / max(1.0, contention)
    rates = np.zeros(application.epochs)
    for kind in sorted({node.gpu_type for node in nodes if node.gpus > 0}):
        if application.runs_on(kind):
            of_kind = [node.gpus for node in nodes if node.gpu_type == kind]
            most = min(sum(of_kind), application.most_gpus(kind), max_gpus)
            rates += sum(of_kind) / total * _shared_rates(application, kind, max(of_kind), most, share)
    return float((np.diff(application.ends, prepend=0.0) / rates).sum())


def _shared_rates(application: Application, kind: str, per_node: int, most: int, share: float) -> Floats:
    """By epoch: the best of all numbers of GPUs, each for as much of the time as the share allows."""
    best = np.zeros(application.epochs)
    for gpus in _sizes_up_to(most, per_node):
        counts = counts_of(math.ceil(gpus / per_node), gpus, per_node)
        best = np.maximum(best, application.best(kind, counts)[0] * min(1.0, share / gpus))
    return best


def _sizes_up_to(most: int, per_node: int) -> Sequence[int]:
    """Powers of two on a node, then whole nodes."""
    within = [2**power for power in range(16) if 2**power <= min(most, per_node)]
    return sorted({*within, *range(per_node, most + 1, per_node), most})
