"""The simulator: replays workloads through the same `Policy.allocate` that production calls."""

from diamond.planner.pools.simulation.applications import Application, pollux_applications, sia_applications
from diamond.planner.pools.simulation.engine import simulate
from diamond.planner.pools.simulation.outcomes import Outcome, TaskOutcome
from diamond.planner.pools.simulation.settings import Failure
from diamond.planner.pools.simulation.workloads import Arrival, in_bursts, read_arrivals

__all__ = [
    "Application",
    "Arrival",
    "Failure",
    "Outcome",
    "TaskOutcome",
    "in_bursts",
    "pollux_applications",
    "read_arrivals",
    "sia_applications",
    "simulate",
]
