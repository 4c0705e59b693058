"""Orders that have to do with pools: whether they make sense, and what of them becomes part of scripts. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from diamond.core.ids import is_id
from diamond.core.pools import MOST_NODES, MOST_SLOTS
from diamond.core.wire import JobOrder

_MOST_CPUS = 1_000_000
# measure.sh looks for the cgroup of the Slurm job it runs in; that is the pilot's, and holds other jobs as well.
_OF_THE_JOB, _OF_THE_STEP = "(.*/job_[0-9]+)", "(.*/job_[0-9]+/step_[0-9]+)"
_RUN = """\
python=$(command -v {python} || command -v python3)
if [[ -z $python ]]; then echo "diamond: there is no Python 3 on this node" >&2; exit 127; fi
exec "$python" "$DIAMOND_RUN_DIR/steward.py"
"""


def malformed(order: JobOrder) -> str:
    """What is wrong with an order of a pool, whatever the rules are; empty when it is none, or as it should be."""
    spec, place, pilot = order.spec, order.place, order.pilot
    if place is None and pilot is None:
        return ""
    if place is not None and pilot is not None:
        return "pilot, place: a pilot cannot itself run in a pool"
    if order.work is not None:
        return "work: jobs that look after images do not run in pools"
    if pilot is not None:
        if spec.num_nodes != 1:
            return f"num_nodes: a pilot holds one node, not {spec.num_nodes}"
        return "" if 1 <= pilot.slots <= MOST_SLOTS else f"pilot.slots: must be from 1 to {MOST_SLOTS}"
    assert place is not None
    names = [node.pilot for node in place.nodes]
    if not 1 <= len(names) <= MOST_NODES or len(set(names)) < len(names):
        return "place.nodes: must name each pilot once, and at least one"
    if not all(is_id(name, "job") for name in names):  # they become paths
        return "place.nodes: a pilot is named by the id of its job"
    if not all(1 <= node.slots <= MOST_SLOTS for node in place.nodes) or not 1 <= place.cpus <= _MOST_CPUS:
        return f"place: slots must be from 1 to {MOST_SLOTS}, and cpus from 1 on"
    if place.mem_bytes < 0:
        return "place.mem_bytes: must not be negative"
    if spec.num_nodes != len(names):
        return f"place: {len(names)} pilots for a task of {spec.num_nodes} nodes"
    if len(names) > 1 and spec.ranks_per_node < 1:
        return "ranks_per_node: on several nodes of a pool the ranks are started by Diamond"
    return ""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What orders say to Slurm about who pays and where, each name once."""

    accounts: tuple[str, ...]
    partitions: tuple[str, ...]
    qos: tuple[str, ...]


def asked_of_slurm(orders: Iterable[JobOrder]) -> Asked:
    """What is charged and used by a job: its own order, and in a pool those of its pilots."""
    orders = list(orders)
    options = [order.spec.slurm for order in orders]
    named = [order.partition or order.spec.slurm.partition or "" for order in orders]
    return Asked(
        accounts=_each_once(each.account for each in options),
        partitions=_each_once(name for names in named for name in names.split(",")),
        qos=_each_once(each.qos for each in options),
    )


def _each_once(names: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))


def pilot_run(python: str) -> str:
    """The program of a pilot, with the agent's Python where the node has it, else with its own."""
    return _RUN.format(python=shlex.quote(python))


def step_measure(measure: str) -> str:
    """measure.sh for a step of its own inside a pilot."""
    assert _OF_THE_JOB in measure, "measure.sh looks for its cgroup in another way than it did"
    return measure.replace(_OF_THE_JOB, _OF_THE_STEP)
