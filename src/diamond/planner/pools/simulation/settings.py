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

WIDEST = 10.0  # of a logarithm: more is no measurement any more, and leaves what a number can hold
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
    _check_numbers(settings)
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


def _check_numbers(settings: Settings) -> None:
    for field, usual in (("interval_s", 60), ("checkpoint_s", 600)):
        seconds = getattr(settings, field)
        if not 0 < seconds < math.inf:
            raise InvalidInput(f"{seconds:g} s is no interval", hint=f"Use {usual}.", field=field)
    if settings.restart_s is not None and not 0 <= settings.restart_s < math.inf:
        raise InvalidInput(f"{settings.restart_s:g} s is no time", hint="Use 30, or 0.", field="restart_s")
    for field in ("noise", "variety", "declared_error"):
        spread = getattr(settings, field)
        if not 0 <= spread <= WIDEST:
            raise InvalidInput(f"{spread:g} is out of range", hint=f"Use 0 to {WIDEST:g}, such as 0.1.", field=field)
    for field, least in (("seed", 0), ("max_gpus", 1)):
        if getattr(settings, field) < least:
            raise InvalidInput(f"{getattr(settings, field)} is too small", hint=f"Use {least} or more.", field=field)


def _check_arrivals(
    arrivals: Sequence[Arrival], nodes: Sequence[Node], applications: Mapping[str, Application]
) -> None:
    room: dict[str, int] = {}
    for node in nodes:
        room[node.gpu_type] = room.get(node.gpu_type, 0) + node.gpus
    for one in arrivals:
        if not 0 <= one.at < math.inf or (one.duration_s is not None and not 0 < one.duration_s < math.inf):
            raise InvalidInput(
                f"{one.name[:40]}: comes at {one.at:g} s and lasts {one.duration_s or 0:g} s",
                hint="Give numbers of seconds, and durations above 0.",
                field="workload",
            )
        if not one.recorded and one.application not in applications:
            raise InvalidInput(
                f"{one.name[:40]}: application {one.application[:40]!r} is unknown",
                hint=f"Known are {', '.join(sorted(applications)) or 'none'}.",
                field="applications",
            )
        kinds = [kind for kind in room if one.recorded or applications[one.application].runs_on(kind)]
        if not kinds:
            raise InvalidInput(
                f"{one.name[:40]}: {one.application[:40]} runs on none of {', '.join(sorted(room))}",
                hint="Give nodes of a kind it was measured on.",
                field="nodes",
            )
        most = max(room[kind] for kind in kinds)
        if one.gpus > most:
            raise InvalidInput(
                f"task {one.name[:40]} asks for {one.gpus} GPUs of a kind, and there are {most}",
                hint="Give more nodes, or leave the task out.",
                field="nodes",
            )
        if not one.recorded and one.batch is not None and one.batch > applications[one.application].largest:
            raise InvalidInput(
                f"task {one.name[:40]} asks for a batch of {one.batch}, and {one.application[:40]} was measured up to "
                f"{applications[one.application].largest}",
                hint="Give it a smaller batch, or leave it out.",
                field="workload",
            )
