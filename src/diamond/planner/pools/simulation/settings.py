"""What a simulation is told besides its workload and its pool, and whether all of it can be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diamond.core.errors import InvalidInput
from diamond.planner.pools.simulation.applications import Application
from diamond.planner.pools.simulation.workloads import Arrival
from diamond.planner.pools.snapshot import Node

Knowledge = Literal["estimated", "warm", "oracle"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A node that is gone from `at` to `until`, or, with a speed above 0, does everything only so fast."""

    node: str
    at: float
    until: float = math.inf
    speed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See `simulate`."""

    interval_s: float = 60.0
    restart_s: float | None = None
    knowledge: Knowledge = "estimated"
    noise: float = 0.0
    variety: float = 0.0
    seed: int = 0
    declared: bool = False
    declared_error: float = 0.2
    probed: bool = False
    charge_moves: bool = True
    max_gpus: int = 64
    checkpoint_s: float = 600.0
    decision_s: float = 1.0


def check(
    arrivals: Sequence[Arrival],
    nodes: Sequence[Node],
    settings: Settings,
    applications: Mapping[str, Application],
    failures: Sequence[Failure],
) -> None:
    """Raises InvalidInput for what cannot be simulated, and says what to do."""
    if not arrivals:
        raise InvalidInput("holds no task", hint="Give at least one arrival.", field="workload")
    if not any(node.gpus > 0 for node in nodes):
        raise InvalidInput("hold no GPU", hint="Give at least one node with a GPU.", field="nodes")
    if not settings.interval_s > 0:
        raise InvalidInput(f"{settings.interval_s:g} s is no interval", hint="Use 60.", field="interval_s")
    if not settings.checkpoint_s > 0:
        raise InvalidInput(f"{settings.checkpoint_s:g} s is no interval", hint="Use 600.", field="checkpoint_s")
    if settings.knowledge not in ("estimated", "warm", "oracle"):
        raise InvalidInput(
            f"{settings.knowledge!r} is unknown", hint="Use estimated, warm or oracle.", field="knowledge"
        )
    names = {node.name for node in nodes}
    for failure in failures:
        if failure.node not in names:
            raise InvalidInput(f"{failure.node} is none of the nodes", hint="Name one of the pool.", field="failures")
        if not (failure.at < failure.until and 0 <= failure.speed <= 1):
            hint = "It ends after it began, and leaves a speed of 0 to 1."
            raise InvalidInput(f"{failure} cannot be", hint=hint, field="failures")
    _check_arrivals(arrivals, nodes, applications)


def _check_arrivals(
    arrivals: Sequence[Arrival], nodes: Sequence[Node], applications: Mapping[str, Application]
) -> None:
    room: dict[str, int] = {}
    for node in nodes:
        room[node.gpu_type] = room.get(node.gpu_type, 0) + node.gpus
    for one in arrivals:
        if not one.recorded and one.application not in applications:
            raise InvalidInput(
                f"{one.name}: application {one.application!r} is unknown",
                hint=f"Known are {', '.join(sorted(applications)) or 'none'}.",
                field="applications",
            )
        if not one.recorded and not any(applications[one.application].runs_on(kind) for kind in room):
            raise InvalidInput(
                f"{one.name}: {one.application} runs on none of {', '.join(sorted(room))}",
                hint="Give nodes of a kind it was measured on.",
                field="nodes",
            )
        if one.gpus > max(room.values()):
            raise InvalidInput(
                f"{one.name} asks for {one.gpus} GPUs of a kind, and there are {max(room.values())}",
                hint="Give more nodes, or leave the task out.",
                field="nodes",
            )
