"""A pool's run as it was: nodes that came and went, tasks, their jobs and what they measured. No names, no code.

Written by the server, replayed by the simulator. All moments are seconds since the first thing that is recorded; who
owns what, and which tasks are alike, is told by numbers that mean nothing elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diamond.core.codec import decode
from diamond.core.errors import InvalidInput
from diamond.core.pools import MOST_NODES, MOST_SLOTS

KIND = "diamond pool record"  # by which a file is recognised
FORMAT = 1
_MOST = MOST_NODES * MOST_SLOTS
LONGEST_S = 1e10
MOST_WORK = 1e18


def _seconds(raw: object) -> float:
    return _number(raw, LONGEST_S, "seconds")


def _work(raw: object) -> float:
    return _number(raw, MOST_WORK, "samples")


def _number(raw: object, most: float, what: str) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not 0 <= raw <= most:
        raise ValueError(f"must be a number of {what} from 0 to {most:.0e}, not {str(raw)[:40]!r}")
    return float(raw)


def _count(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 1 <= raw <= _MOST:
        raise ValueError(f"must be a whole number from 1 to {_MOST}, not {str(raw)[:40]!r}")
    return raw


def _at(**more: Any) -> Any:
    return field(metadata={"parse": _seconds}, **more)


def _samples(**more: Any) -> Any:
    return field(metadata={"parse": _work}, **more)


def _counted(**more: Any) -> Any:
    return field(metadata={"parse": _count}, **more)


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node while a pilot held it.

    Attributes:
        ended_at: None while it is held; `reason`: why the pilot ended, as jobs have it.
        walltime_s: how long it might hold it.
    """

    began_at: float = _at()
    ended_at: float | None = _at(default=None)
    slots: int = _counted()
    walltime_s: float | None = _at(default=None)
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """What a task did at one size, the last time it had it: steps of so many seconds."""

    nodes: int = _counted()
    slots: int = _counted()
    global_batch: int = 1
    step_s: float = _at()


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One stay of a task in the pool.

    Attributes:
        asked_at: when the round gave it these slots; `started_at`: when it ran there.
        first_at, first_samples: when it began to train, and what earlier jobs had done by then; `told_at`: when it
            first said so.
        last_at, last_samples: the newest that it said of itself.
        stop_asked_at: when it was asked to save and stop, so that the task goes on with other slots.
        reason: why it ended, as jobs have it.
    """

    asked_at: float = _at()
    started_at: float | None = _at(default=None)
    ended_at: float | None = _at(default=None)
    slots: int = _counted()
    nodes: int = _counted()
    first_at: float | None = _at(default=None)
    first_samples: float | None = _samples(default=None)
    last_at: float | None = _at(default=None)
    last_samples: float | None = _samples(default=None)
    told_at: float | None = _at(default=None)
    stop_asked_at: float | None = _at(default=None)
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """A task, and all it did.

    Attributes:
        least, most: slots it may have; as many as the pool has, where `is_free`: nothing was said, so Diamond picks.
        sizes: "even": any number on one node, whole nodes beyond; "one": just `least`.
        can_move: whether it goes on with other slots, once it has measured itself.
        like: numbers that tasks of the same code, the same command and the same name share.
        state: as tasks have it; one that is not over has no `ended_at`.
        total_samples: from start to end; None where it did not say.
        restart_s: from the start of a job to its first step, as the pool came to expect it.
        saves_s: time between two checkpoints.
    """

    id: int
    least: int = _counted()
    most: int = _counted()
    is_free: bool = False
    sizes: str = "even"
    can_move: bool = False
    priority: int = 0
    owner: int = 0
    like: tuple[int, ...] = ()
    submitted_at: float = _at()
    ended_at: float | None = _at(default=None)
    state: str = ""
    total_samples: float | None = _samples(default=None)
    global_batch: int | None = None
    windows: tuple[WindowRecord, ...] = ()
    restart_s: float | None = _at(default=None)
    saves_s: float | None = _at(default=None)
    jobs: tuple[JobRecord, ...] = ()

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least is {self.least} and most {self.most}: give them the other way round")
        if self.ended_at is not None and self.ended_at < self.submitted_at:
            raise ValueError("ended_at is before submitted_at")


@dataclass(frozen=True, kw_only=True)
class PoolRecord:
    """A pool from its first pilot or task until `recorded_at`.

    Attributes:
        slot_kind: a model of GPU, "gpu" for any, "cpu" for cores.
        most_nodes: that the pool may hold.
    """

    kind: str = KIND
    format: int = FORMAT
    slot_kind: str = "gpu"
    slots_per_node: int = _counted()
    most_nodes: int = _counted()
    recorded_at: float = _at()
    nodes: tuple[NodeRecord, ...] = ()
    tasks: tuple[TaskRecord, ...] = ()

    @staticmethod
    def parse(raw: object) -> PoolRecord:
        """Of a file.

        Raises:
            InvalidInput: it is none, or a newer one; names the field.
        """
        if not isinstance(raw, dict) or raw.get("kind") != KIND:
            raise InvalidInput(
                "is no record of a pool", hint="give what `diamond pool record NAME` wrote", field="kind"
            )
        found = raw.get("format")
        if found != FORMAT:
            raise InvalidInput(
                f"is a record in format {str(found)[:20]}, and this Diamond reads {FORMAT}",
                hint="use the version of Diamond that wrote it",
                field="format",
            )
        record = decode(PoolRecord, raw)
        ids = [task.id for task in record.tasks]
        if len(set(ids)) != len(ids):
            raise InvalidInput("two tasks have the same id", hint="give each its own", field="tasks")
        return record
