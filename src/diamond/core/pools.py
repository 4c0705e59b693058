"""Pools: nodes that pilots hold, inside of which the planner runs several tasks and gives each what it can use.

A *pilot* is an ordinary job of one node that does nothing itself: the steward in it starts what the agent lays into its
run directory. A *slot* is what tasks are given a number of: a GPU, or some cores where a pool has no GPUs. Nothing in a
pool listens: server, agent and stewards tell each other what should be in the ways they have (ADR 0009).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diamond.core.codec import decode, encode
from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput
from diamond.core.fields import parse_name
from diamond.core.ids import is_id
from diamond.core.pool_scripts import SlotShare
from diamond.core.projects import parse_project
from diamond.core.resources import parse_cpus, parse_memory, parse_one_accelerator
from diamond.core.slurm import SlurmOptions

MOST_NODES = 10_000  # that are believed of one that is there
MOST_ASKED_NODES = 1000  # of a new one
MOST_SLOTS = 1024  # of a node
SHORTEST_WALLTIME_S = 60
_RANGE = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")  # an endpoint's and "-pool" fit
_RESERVED = ("new",)  # /pools/new makes one


def parse_nodes(raw: object) -> str:
    """``"2..8"`` or ``4``, all as text."""
    text = str(raw).strip() if isinstance(raw, int | str) and not isinstance(raw, bool) else ""
    found = _RANGE.fullmatch(text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not found or not 0 <= low <= high or not 1 <= high <= MOST_NODES:
        raise ValueError(f'{str(raw)[:40]!r} is not a number of nodes; write 4, or "2..8" for from two to eight')
    return f"{low}..{high}" if low != high else str(low)


def _parse_slots(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 1 <= raw <= MOST_SLOTS:
        raise ValueError(f"must be a whole number from 1 to {MOST_SLOTS}, not {str(raw)[:40]!r}")
    return raw


def _parse_walltime(raw: object) -> int:
    seconds = parse_duration(raw)
    if seconds < SHORTEST_WALLTIME_S:
        raise ValueError(f"must be at least {SHORTEST_WALLTIME_S} seconds: pilots are to hold their nodes for a while")
    return seconds


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """A pool as its user describes it.

    Attributes:
        endpoint: the name of the one whose nodes are held.
        nodes: at least and at most so many at once; "0..8" lets all of them go when there is nothing to do.
        accelerators: GPUs of each node, ``"A100:4"``; each is a slot. None for a pool of cores.
        slots: of each node, where there are no GPUs.
        cpus, memory: of each slot.
        walltime: how long one pilot holds its node; the next one is asked for before that is over.
        idle: how long a node above the least may have nothing to do.
    """

    name: str = field(metadata={"parse": parse_name})
    endpoint: str = field(metadata={"parse": parse_name})
    project: str | None = field(default=None, metadata={"parse": parse_project})
    nodes: str = field(default="1", metadata={"parse": parse_nodes})
    accelerators: str | None = field(default=None, metadata={"parse": parse_one_accelerator})
    slots: int | None = field(default=None, metadata={"parse": _parse_slots})
    cpus: str = field(default="1", metadata={"parse": parse_cpus})
    memory: str | None = field(default=None, metadata={"parse": parse_memory})
    walltime: int = field(default=4 * 3600, metadata={"parse": _parse_walltime})
    idle: int = field(default=600, metadata={"parse": parse_duration})
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

    def __post_init__(self) -> None:
        if self.accelerators is not None and self.slots is not None:
            raise InvalidInput(
                "GPUs are slots already", hint="leave slots out, or accelerators for a pool of cores", field="slots"
            )
        if self.accelerators is None and self.slots is None:
            raise InvalidInput(
                "it is not said what its nodes are cut into",
                hint='give accelerators ("A100:4": four GPUs a node), or slots for a pool of cores',
                field="slots",
            )

    @staticmethod
    def parse(raw: object) -> PoolSpec:
        """Validate what a person wrote.

        Raises:
            InvalidInput: naming the field and the fix.
        """
        spec = decode(PoolSpec, raw, strict=True)
        _check_name(spec.name)
        _check_number(spec)
        return spec

    def changed(self, changes: Mapping[str, Any]) -> PoolSpec:
        """With other values of some fields, checked as `parse` does. Its name stays, whatever it is: older ones may
        have one that a new pool cannot have.

        Raises:
            InvalidInput: naming the field and the fix.
        """
        written = {name: value for name, value in encode(self).items() if value is not None}
        spec = decode(PoolSpec, {**written, **changes}, strict=True)
        if "nodes" in changes:
            _check_number(spec)
        return replace(spec, name=self.name)

    @property
    def least_nodes(self) -> int:
        return int(self.nodes.partition("..")[0])

    @property
    def most_nodes(self) -> int:
        low, _, high = self.nodes.partition("..")
        return int(high or low)

    @property
    def slots_per_node(self) -> int:
        return int(self.accelerators.partition(":")[2]) if self.accelerators else self.slots or 1

    @property
    def has_gpus(self) -> bool:
        return self.accelerators is not None

    @property
    def kind(self) -> str:
        """Of its slots: a model of GPU, "gpu" for any, "cpu" for cores."""
        return self.accelerators.partition(":")[0] if self.accelerators else "cpu"


def _check_name(name: str) -> None:
    """Names stand in addresses and on command lines. What is there already keeps its own: not in `decode`."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name[:60]!r} is not the name of a pool",
            hint="use lower-case letters, digits, dots, dashes and underscores, at most 80, a letter or digit first",
            field="name",
        )
    if name in _RESERVED:
        raise InvalidInput(f"{name!r} is the name of a page", hint="choose another name", field="name")
    if is_id(name):
        raise InvalidInput(f"{name!r} looks like an id", hint="choose another name", field="name")


def _check_number(spec: PoolSpec) -> None:
    if spec.most_nodes > MOST_ASKED_NODES:
        raise InvalidInput(
            f"a pool has at most {MOST_ASKED_NODES} nodes, not {spec.most_nodes}",
            hint="give fewer, or make several pools",
            field="nodes",
        )


# ---- what the agent is told ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PoolNode:
    """So many slots of the node that this pilot, a job, holds."""

    pilot: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class PoolPlace:
    """Where in a pool a job runs: its nodes, the first one first. Each slot is `cpus` cores, a GPU with `has_gpus`.

    Attributes:
        global_batch: that Diamond chose for this job's training; None leaves it to the training.
    """

    pool_id: str
    nodes: tuple[PoolNode, ...]
    cpus: int = 1
    mem_bytes: int = 0  # of a slot; 0: no limit
    has_gpus: bool = False
    global_batch: int | None = None

    @property
    def slots(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def share(self) -> SlotShare:
        """What one slot is to the script of a job there."""
        return SlotShare(cpus=self.cpus, has_gpus=self.has_gpus, mem_bytes=self.mem_bytes)


@dataclass(frozen=True, kw_only=True)
class PilotOrder:
    """That a job is a pilot: its program is the steward."""

    pool_id: str
    slots: int
    cpus: int = 1  # of a slot
    has_gpus: bool = False


# ---- how a pool stands -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """A pilot that waits for its node, or holds it. `used`: slots that tasks have now."""

    task_id: str
    job_id: str
    state: str
    host: str = ""
    slots: int = 0
    used: int = 0
    started_at: float | None = None
    ends_at: float | None = None
    pending_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class PoolTask:
    """A task of a pool: what it has, what it may have, and why.

    Attributes:
        task_id: "" for a task that the viewer may not see; `name` is made of its number then.
        number: among all tasks that the pool ever had, from 1.
        slots, nodes: now; 0 while it waits.
        least, most: what it may be given.
        moving: it saves its state and goes on with another number of slots.
        reason: why it has what it has, in words.
        goodput: samples a second as estimated, there; `alone`: on its fair share of the pool, for itself.
        predicted_end_at: if it kept what it has. None: nobody can say.
        batch: samples of a step on all its ranks together; `batch_chosen`: whether Diamond chose it; `first_batch`: the
            one its learning rate belongs to; `batch_reason`: why it is what it is, in words.
        noise_scale: of its gradient, in samples: batches much larger than this gain little.
        parallel: how its model is spread over ranks (ddp, fsdp, hybrid, none); `parallel_reason`: with why, in words.
        samples, until_samples: trained on, and to be trained on where its end is counted in them.
    """

    task_id: str
    name: str
    owner: str
    state: str
    number: int = 0
    slots: int = 0
    nodes: int = 0
    hosts: tuple[str, ...] = ()
    least: int = 1
    most: int = 1
    resizable: bool = False
    moving: bool = False
    reason: str = ""
    goodput: float | None = None
    alone: float | None = None
    step: int | None = None
    until: int | None = None
    restarts: int = 0
    submitted_at: float = 0.0
    ended_at: float | None = None
    predicted_end_at: float | None = None
    batch: int | None = None
    first_batch: int | None = None
    batch_chosen: bool = False
    batch_reason: str = ""
    noise_scale: float | None = None
    parallel: str = ""
    parallel_reason: str = ""
    samples: int | None = None
    until_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class PoolDecision:
    """One change: a task was given another number of slots, or none to make room for others, and why.

    `number`: the task's, as `PoolTask` has it.
    """

    at: float
    task_id: str
    task_name: str
    slots: int
    before: int
    reason: str
    number: int = 0
    goodput: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pool:
    """How a pool stands.

    Attributes:
        slots, used: of the nodes held now.
        wanted_nodes: how many it would like to hold now.
        goodput: work a second now, over what the same tasks would do with fixed equal shares (estimated); None where
            nothing is known.
        closed_at: when it was told to end; its tasks go on elsewhere or wait.
    """

    id: str
    name: str
    spec: PoolSpec
    owner: str = ""
    project: str = ""
    endpoint: str = ""
    created_at: float = 0.0
    closed_at: float | None = None
    nodes: int = 0
    wanted_nodes: int = 0
    slots: int = 0
    used: int = 0
    waiting: int = 0
    running: int = 0
    goodput: float | None = None
    note: str = ""  # what the pool waits for, in words
    is_mine: bool = True
    pilots: tuple[Pilot, ...] = ()  # only in the detail view, as all below
    tasks: tuple[PoolTask, ...] = ()
    decisions: tuple[PoolDecision, ...] = ()  # the newest first
