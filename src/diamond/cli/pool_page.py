"""A pool in the terminal: its nodes, who has what and why, what was decided. Everything shown is cleaned."""

from __future__ import annotations

import time
from collections.abc import Sequence

from diamond.cli import render
from diamond.core import training_words
from diamond.core.pools import Pilot, Pool, PoolDecision, PoolTask

_DECISIONS = 10
_ENDED = 5


def print_page(pool: Pool, now: float | None = None) -> None:
    now = time.time() if now is None else now
    state = render.paint("closed", "2") if pool.closed_at is not None else render.paint("open", "32")
    print(f"{render.paint(render.clean(pool.name), '1')}  {state}  {render.clean(pool.id)}")
    _print_rows(_about(pool))
    if pool.pilots:
        _heading("nodes")
        _nodes(pool.pilots, now)
    live = [task for task in pool.tasks if task.ended_at is None]
    if live:
        _heading("tasks")
        _tasks(live, now)
    if ended := [task for task in pool.tasks if task.ended_at is not None]:
        _heading("ended")
        _ended_tasks(ended)
    if pool.decisions:
        _heading("newest decisions")
        _print_decisions(pool.decisions, now)


def bar(used: int, slots: int) -> str:
    return render.gauge(used / slots) if slots else ""


def times(gain: float | None) -> str:
    """``1.4x``; empty where nothing is known."""
    return f"{gain:.2g}x" if gain is not None else ""


def _about(pool: Pool) -> list[tuple[str, str]]:
    spec = pool.spec
    cut = spec.accelerators or render.count(spec.slots_per_node, "slot")
    each = f"{spec.cpus} {'core' if spec.cpus == '1' else 'cores'}" + (f", {spec.memory} GiB" if spec.memory else "")
    slurm = [f"{name} {value}" for name in ("partition", "account", "qos") if (value := getattr(spec.slurm, name))]
    wanted = f", {pool.wanted_nodes} wanted" if pool.wanted_nodes != pool.nodes and pool.closed_at is None else ""
    return [
        ("endpoint", render.clean(", ".join([pool.endpoint, *slurm]))),
        ("owner", "" if pool.is_mine else render.clean(pool.owner)),
        ("project", render.clean(pool.project)),
        ("nodes", f"{pool.nodes} held of {spec.nodes}{wanted}"),
        ("each node", f"{render.clean(cut)}; a slot has {render.clean(each)}"),
        ("slots", f"{bar(pool.used, pool.slots)}  {pool.used} of {pool.slots}".strip()),
        ("tasks", f"{pool.running} running, {pool.waiting} waiting"),
        ("gain", f"{times(pool.goodput)} the work of fixed equal shares (estimated)" if pool.goodput else ""),
        (
            "walltime",
            f"{render.written_duration(spec.walltime)}; let go after {render.written_duration(spec.idle)} idle",
        ),
        ("note", render.clean(pool.note)),
    ]


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    shown = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        print(f"  {name.ljust(width)}  {value}")


def _heading(title: str) -> None:
    print(f"\n{render.paint(title, '1')}")


def _nodes(pilots: Sequence[Pilot], now: float) -> None:
    rows = [
        (
            render.clean(pilot.host) or "-",
            render.clean(pilot.state),
            f"{bar(pilot.used, pilot.slots)}  {pilot.used} of {pilot.slots}" if pilot.host else "",
            render.duration(pilot.started_at, None, now),
            f"in {render.countdown(pilot.ends_at - now)}" if pilot.ends_at is not None else "",
            render.clean(pilot.task_id),
        )
        for pilot in pilots
    ]
    below = ["" if pilot.started_at else render.clean(pilot.pending_reason) for pilot in pilots]
    render.print_table(
        ("NODE", "STATE", "SLOTS", ">HELD", ">ENDS", "TASK"),
        rows,
        flexible={"NODE": 8},
        droppable=("TASK", "HELD"),
        indent=2,
        below=below,
    )


def _tasks(tasks: Sequence[PoolTask], now: float) -> None:
    rows = [
        (
            render.clean(task.name),
            render.clean(task.task_id),
            render.clean(task.owner),
            _state(task),
            _slots(task),
            render.clean(",".join(filter(None, task.hosts))),
            _rate(task),
            _steps(task),
            _ends(task, now),
            str(task.restarts or ""),
        )
        for task in tasks
    ]
    render.print_table(
        ("NAME", "TASK", "OWNER", "STATE", "SLOTS", "NODES", ">SAMPLES/S", ">STEP", ">DONE", ">RESTARTS"),
        rows,
        flexible={"NAME": 10, "NODES": 6},
        droppable=("RESTARTS", "NODES", "OWNER", "STEP", "SAMPLES/S"),
        indent=2,
        below=[render.clean(_why(task)) for task in tasks],
    )


def _why(task: PoolTask) -> str:
    """Why it has its slots, its batch and its technique."""
    return "; ".join(filter(None, [task.reason, task.batch_reason, task.parallel_reason]))


def _state(task: PoolTask) -> str:
    return "saving to move" if task.moving else render.clean(task.state)


def _slots(task: PoolTask) -> str:
    """``4 of 1..8``; one number where the task leaves no choice."""
    bounds = f"{task.least}..{task.most}" if task.least != task.most else str(task.most)
    fixed = "" if task.resizable or task.least == task.most or not task.slots else ", stays"
    fixed = ", not measured yet" if fixed and task.step is None else fixed
    return f"{task.slots} of {bounds}{fixed}"


def _rate(task: PoolTask) -> str:
    """With how many times what a fair share of the pool would do for it."""
    if task.goodput is None:
        return ""
    ratio = f" ({times(task.goodput / task.alone)})" if task.alone else ""
    return f"{training_words.rate(task.goodput)}{ratio}"


def _steps(task: PoolTask) -> str:
    if task.step is None:
        return ""
    return f"{task.step}/{task.until}" if task.until is not None else str(task.step)


def _ends(task: PoolTask, now: float) -> str:
    if task.predicted_end_at is None:
        return ""
    return f"in {render.countdown(task.predicted_end_at - now)}" if task.predicted_end_at > now else "any moment"


def _ended_tasks(tasks: Sequence[PoolTask]) -> None:
    rows = [
        (
            render.clean(task.name),
            render.clean(task.task_id),
            render.clean(task.owner),
            render.clean(task.state),
            render.duration(task.submitted_at, task.ended_at),
            render.ago(task.ended_at),
            str(task.restarts or ""),
        )
        for task in tasks[:_ENDED]
    ]
    heads = ("NAME", "TASK", "OWNER", "STATE", ">TOOK", "ENDED", ">RESTARTS")
    render.print_table(heads, rows, flexible={"NAME": 10}, droppable=("RESTARTS", "OWNER"), indent=2)
    _more(len(tasks) - _ENDED)


def _print_decisions(decisions: Sequence[PoolDecision], now: float) -> None:
    rows = [
        (
            render.ago(one.at, now),
            render.clean(one.task_name),
            _change(one),
        )
        for one in decisions[:_DECISIONS]
    ]
    below = [render.clean(one.reason) for one in decisions[:_DECISIONS]]
    render.print_table(("WHEN", "TASK", "CHANGE"), rows, flexible={"TASK": 10}, indent=2, below=below)
    _more(len(decisions) - _DECISIONS)


def _change(one: PoolDecision) -> str:
    if not one.slots:
        return f"makes room: {render.count(one.before, 'slot')} freed"
    if one.before in (0, one.slots):
        return f"{'goes on' if one.before else 'begins'} with {render.count(one.slots, 'slot')}"
    return f"{one.before} → {render.count(one.slots, 'slot')}"


def _more(number: int) -> None:
    if number > 0:
        print(f"  and {number} more (--json has them)")
