"""A task in words: how it stands, why, what it waits for, and how it ended. Everything given back has been cleaned."""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli.session import program, say
from diamond.core.reasons import MEANINGS
from diamond.core.states import TaskState
from diamond.core.tasks import Output, Task

if TYPE_CHECKING:
    from diamond.sdk.client import Client
    from diamond.sdk.follow import AttemptEnded

SPARK = 12
# How metrics are called that say how well it does, and those that only count on.
_TELLING = re.compile(
    r"acc|err|(?<![a-z0-9])(auc|f1|val|valid|validation|test|eval|score|r2|l2|rmse|mse|mae|iou)(?![a-z0-9])"
)
_COUNTING = re.compile(
    r"learning_rate|(?<![a-z0-9])(epochs?|lr|steps?|iter|iteration|time|elapsed|seconds|sec|s|ms|eta)(?![a-z0-9])"
)


def status_text(task: Task, now: float | None = None) -> str:
    """State, name, endpoint, attempt and time in one line."""
    parts = [f"{task.state} {render.clean(task.name)}"]
    if task.desired == "cancel" and not task.state.is_final:
        parts[0] = f"STOPPING {render.clean(task.name)}"
    if task.endpoint:
        parts.append(f"on {render.clean(task.endpoint)}")
    if task.attempt > 1:
        parts.append(f"attempt {task.attempt}")
    now = time.time() if now is None else now
    if task.state in (TaskState.PENDING, TaskState.QUEUED):
        if why := waiting_text(task, now):
            parts.append(why)
    elif elapsed := render.duration(task.started_at, task.ended_at, now):
        parts.append(elapsed)
    return " · ".join(parts)


def waiting_text(task: Task, now: float | None = None) -> str:
    """What a task waits for; empty when it does not wait, or nobody says."""
    if task.state not in (TaskState.PENDING, TaskState.QUEUED):
        return ""
    if task.next_attempt_at:
        return next_text(task.next_attempt_at, now)
    reason = render.clean(task.pending_reason).removeprefix("waits: ")
    said = [reason if not reason or reason.startswith("waiting") else f"waiting: {reason}"]
    said += [render.expected(task.expected_start_at, now)] if task.expected_start_at else []
    return "; ".join(filter(None, said))


def next_text(at: float, now: float | None = None) -> str:
    left = at - (time.time() if now is None else now)
    return f"next attempt in {render.countdown(left)}" if left > 0 else "next attempt is due"


def ended_text(item: AttemptEnded, now: float | None = None) -> str:
    """``attempt 1 failed: EXIT_NONZERO: the command ended with exit code 7; next attempt in 2s``."""
    job = item.job
    text = f"attempt {item.attempt} {'failed' if job is None or job.state == 'FAILED' else str(job.state).lower()}"
    if job and job.reason:
        text += f": {job.reason}: {render.clean(job.detail or MEANINGS[job.reason].sentence).rstrip('.')}"
    return text if item.next_attempt_at is None else f"{text}; {next_text(item.next_attempt_at, now)}"


def note_lines(task: Task) -> list[str]:
    """What is to be said of a task although it succeeded, e.g. an output that matched no file."""
    return [f"note: {render.clean(task.detail)}"] if task.detail and task.state is TaskState.SUCCEEDED else []


def reason_lines(task: Task) -> list[str]:
    """Why it did not succeed: what holds for the reason in general, then what is particular to this case."""
    if task.state is TaskState.SUCCEEDED or not task.reason:
        return []
    detail = render.clean(task.detail)
    if detail.lower().rstrip(".") == task.sentence.lower().rstrip("."):
        detail = ""
    known = not task.exit_code or str(task.exit_code) in detail or task.state is TaskState.CANCELLED
    sentence = task.sentence if known else f"{task.sentence} (exit code {task.exit_code})"
    return [sentence, detail] if detail else [sentence]


def metric_line(series: dict[str, list[float]], step: float, width: int) -> str:
    """The newest values with their curves, most telling first, as many as fit."""
    if not series:
        return ""
    line = f"step {render.number(step)}"
    for key in sorted(series, key=metric_rank):
        values = series[key]
        part = f"   {render.clean(key)} {render.measured(key, values[-1])}"
        spark = render.sparkline(values, SPARK) if len(values) > 1 else ""
        if len(line) + len(part) + len(spark) + 1 > width:
            break
        line += f"{part} {spark}".rstrip()
    return line


def metric_rank(key: str) -> tuple[int, str]:
    """Loss first, then how well it does, then the rest by name; then what only counts on; single ranks last."""
    low = key.lower()
    if "@rank" in low:
        return 5, low
    if low in ("loss", "train_loss", "train/loss"):
        return 0, low
    if _COUNTING.search(low):
        return 4, low
    if "loss" in low:
        return 1, low
    return (2 if _TELLING.search(low) else 3), low


def show_summary(client: Client, task: Task) -> None:
    """How it ended, why, and how to get what it made."""
    took = render.duration(task.started_at, task.ended_at)
    say("")
    head = render.paint(str(task.state), render.STATE_COLOURS.get(task.state, "") + ";1", sys.stderr)
    say(f"{head} {render.clean(task.name)} ({task.id})" + (f" after {took}" if took else ""))
    for line in reason_lines(task) + note_lines(task):
        say(f"  {line}")
    found = [series for series in client.tasks.metrics(task.id) if series.stream == "metrics"] if task.attempt else []
    width = max(4, min(24, shutil.get_terminal_size().columns - 32))
    for series in sorted(found, key=lambda each: metric_rank(each.key))[:6]:
        curve = client.tasks.curve(task.id, series.key, max_points=200)
        spark = render.sparkline([point.mean for point in curve.points], width)
        say(f"  {render.clean(series.key):<16} {render.measured(series.key, series.last_value):>10}  {spark}")
    stored = [item for item in task.outputs if item.stored]
    if stored:
        say(f"  outputs: {_files_text(stored)}")
        say(f"  fetch:   {program()} outputs {task.id} --to .")
    if kept := [item for item in task.outputs if not item.stored]:
        say(f"  on the endpoint only: {_files_text(kept)}")
        if folder := work_dir(task):
            say(f"  in:      {folder}")
    if task.state is TaskState.FAILED:
        say(f"  details: {program()} show {task.id}")


def _files_text(items: list[Output]) -> str:
    names = ", ".join(render.clean(item.path) for item in items[:4])
    more = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return f"{names}{more} ({render.size(sum(item.size_bytes for item in items))})"


def work_dir(task: Task) -> str:
    """Where the newest attempt's files are on its endpoint; empty when unknown."""
    job = next((job for job in reversed(task.jobs) if job.run_dir), None)
    return f"{render.clean(job.endpoint)}:{render.clean(job.run_dir)}/work" if job else ""
