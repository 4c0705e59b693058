"""Pools and their tasks in words."""

from __future__ import annotations

from typing import NamedTuple

from diamond.core.durations import format_duration
from diamond.core.pools import Pool, PoolDecision, PoolSpec, PoolTask
from diamond.core.states import TaskState
from diamond.server.services import pool_history
from diamond.server.services.pool_history import History
from diamond.server.web import pool_drawing

EVEN = 0.05  # fairness that differs from 1 by less says nothing: it is estimated


class TaskLine(NamedTuple):
    """A task with its mark on the page. `fair`: its finish-time fairness, None where it cannot be told."""

    task: PoolTask
    number: int | None
    look: str
    resizing: str
    progress: str
    speed: str
    fair: float | None


class Fairness(NamedTuple):
    """Of all tasks of which it is known. `slower`: how many take longer than alone on an equal share."""

    known: int
    mean: float
    worst: float
    whose: TaskLine
    slower: int


def lines(pool: Pool, history: History) -> tuple[list[TaskLine], list[TaskLine]]:
    """Those that run, then those that wait; and those that have ended."""
    made = [_line(task, history) for task in pool.tasks]
    live = [one for one in made if not _has_ended(one.task)]
    return sorted(live, key=lambda one: not one.task.slots), [one for one in made if _has_ended(one.task)]


def _line(task: PoolTask, history: History) -> TaskLine:
    number = history.number_of(task)
    fair = pool_history.fairness(task, history.decided_at)
    if _has_ended(task):
        fair = history.actual.get(number) if number is not None else None
    return TaskLine(
        task=task,
        number=number,
        look=pool_drawing.look_of(number) if number is not None else "",
        resizing=resizing(task),
        progress=progress(task),
        speed=f"{task.goodput / task.alone:.2f}×" if task.goodput and task.alone else "",
        fair=fair,
    )


def _has_ended(task: PoolTask) -> bool:
    return task.state in TaskState.__members__ and TaskState(task.state).is_final


def resizing(task: PoolTask) -> str:
    """Whether it may be given another number of slots while it runs, or why not."""
    if task.moving:
        return "saves its state now, to go on with another number"
    if task.resizable:
        return "can be resized"
    if task.least == task.most:
        return "stays as it is: it asks for one number"
    if not task.slots:
        return "begins with what fits; resized once it measures itself"
    return "stays as it is until it measures itself (diamond.train)"


def progress(task: PoolTask) -> str:
    if task.step is None:
        return ""
    if task.until_samples and task.samples is not None:  # steps of several sizes are no measure
        share = min(1.0, task.samples / task.until_samples)
        return f"{task.samples:,} of {task.until_samples:,} samples ({share:.0%})"
    if not task.until:
        return f"step {task.step:,}"
    return f"{task.step:,} of {task.until:,} steps ({min(1.0, task.step / task.until):.0%})"


def bounds(task: PoolTask) -> str:
    return str(task.least) if task.least == task.most else f"{task.least}..{task.most}"


def gain(pool: Pool) -> str:
    """Work now against fixed equal shares; "" where nothing is known."""
    return f"{pool.goodput:.2f}×" if pool.goodput is not None else ""


def fairness(known: list[TaskLine]) -> Fairness | None:
    found = [(one.fair, one) for one in known if one.fair is not None]
    if not found:
        return None
    worst, whose = max(found, key=lambda pair: pair[0])
    return Fairness(
        known=len(found),
        mean=sum(fair for fair, _ in found) / len(found),
        worst=worst,
        whose=whose,
        slower=sum(fair > 1 + EVEN for fair, _ in found),
    )


def fair_words(value: float) -> str:
    if value > 1 + EVEN:
        return "later than alone"
    return "sooner than alone" if value < 1 - EVEN else "as alone"


def change(decision: PoolDecision) -> str:
    if not decision.slots:
        return f"makes room: {_slots(decision.before)} freed"
    if not decision.before:
        return f"gets {_slots(decision.slots)}"
    if decision.slots == decision.before:
        return f"goes on with {_slots(decision.slots)}"
    return f"{decision.before} → {_slots(decision.slots)}"


def of_node(spec: PoolSpec) -> str:
    """What a node of the pool is cut into."""
    if spec.accelerators is not None:
        kind = "GPU" if spec.kind.lower() == "gpu" else spec.kind
        words = f"{spec.slots_per_node} {kind}{'s' if spec.slots_per_node != 1 and kind == 'GPU' else ''} a node"
    else:
        words = f"{_slots(spec.slots_per_node)} a node"
    words += f"; {spec.cpus} core{'s' if spec.cpus != '1' else ''}"
    return words + (f" and {spec.memory} GiB" if spec.memory else "") + " each"


def held_for(spec: PoolSpec) -> str:
    return f"{format_duration(spec.walltime)} at a time; let go after {format_duration(spec.idle)} without work"


def of_task(task: PoolTask) -> str:
    """For the page of a task: what it has now, and what it may have."""
    now = f"{_slots(task.slots)}" if task.slots else "no slots yet"
    if task.nodes > 1:
        now += f" on {task.nodes} nodes"
    return f"{now}, of {bounds(task)}"


def _slots(number: int) -> str:
    return f"{number} slot{'s' if number != 1 else ''}"
