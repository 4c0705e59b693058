"""How big an endpoint is, from its partitions. Partitions overlap, so nodes are counted by name, each once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from diamond.core.endpoints import EndpointFacts, NodeGroup, Partition

_BRACKETS = re.compile(r"([^,\[\]]*)\[([\d,-]+)\]([^,\[\]]*)|([^,\[\]]+)")
_MAX_NAMES = 100_000  # more than any cluster has


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What there is, and how much of it can be used now (is not down or drained)."""

    nodes: int = 0
    usable_nodes: int = 0
    cpus: int = 0
    gpus: dict[str, int] = field(default_factory=dict)  # by model
    usable_gpus: dict[str, int] = field(default_factory=dict)


def of_endpoint(facts: EndpointFacts) -> Amounts:
    """All of an endpoint; without partitions, its nodes are all alike."""
    if not facts.partitions:
        gpus = {gpu.model: gpu.count * facts.nodes for gpu in facts.gpus_per_node}
        cpus = facts.nodes * facts.cpus_per_node
        return Amounts(nodes=facts.nodes, usable_nodes=facts.nodes, cpus=cpus, gpus=gpus, usable_gpus=gpus)
    return _sum(group for partition in facts.partitions for group in partition.groups)


def of_partition(partition: Partition) -> Amounts:
    return _sum(iter(partition.groups))


def _sum(groups: Iterator[NodeGroup]) -> Amounts:
    seen: set[str] = set()
    nodes = usable = cpus = 0
    gpus: dict[str, int] = {}
    usable_gpus: dict[str, int] = {}
    # The largest first: what the others repeat of it is then known.
    for index, group in enumerate(sorted(groups, key=lambda each: -each.count)):
        names = set(_names(group.nodes)) or {f"{index}/{number}" for number in range(group.count)}
        new = len(names - seen) * group.count // len(names)
        seen |= names
        if not new:
            continue
        # Which of a group's nodes are down is not told; of a part, no more than there are.
        down = min(group.unusable, new)
        nodes, usable, cpus = nodes + new, usable + new - down, cpus + new * group.cpus
        for gpu in group.gpus:
            gpus[gpu.model] = gpus.get(gpu.model, 0) + new * gpu.count
            usable_gpus[gpu.model] = usable_gpus.get(gpu.model, 0) + (new - down) * gpu.count
    return Amounts(nodes=nodes, usable_nodes=usable, cpus=cpus, gpus=gpus, usable_gpus=usable_gpus)


def _names(text: str) -> Iterator[str]:
    """The names in ``c[1-2,7],login1``; what has brackets of another kind counts as one name."""
    left = _MAX_NAMES
    for found in _BRACKETS.finditer(text):
        before, numbers, after, plain = found.groups()
        if plain is not None:
            yield plain
            continue
        for piece in numbers.split(","):
            low, _, high = piece.partition("-")
            if not low.isdecimal() or not (high or low).isdecimal():
                continue
            for number in range(int(low), int(high or low) + 1):
                left -= 1
                if left < 0:
                    return
                yield f"{before}{str(number).zfill(len(low))}{after}"
