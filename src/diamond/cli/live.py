"""Following a task in the terminal: log lines stream past, a status line and the newest metrics stay below them.

Three faces of the same items: a live view on a terminal, plain lines elsewhere (log bytes exact on standard output,
states on standard error), and JSON lines.
"""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from diamond.cli import render
from diamond.cli.session import emit, exit_code_of, say, task_json
from diamond.core.states import TaskState
from diamond.core.tasks import Task

if TYPE_CHECKING:
    from diamond.sdk.client import Client
    from diamond.sdk.metrics import Series

SPARK = 12
_HISTORY = 400


class View(Protocol):
    """What a face of the follower does with each item."""

    def state(self, task: Task) -> None: ...
    def log(self, attempt: int, data: bytes, dropped: int) -> None: ...
    def metric(self, series: Series) -> None: ...
    def link(self, connected: bool, detail: str) -> None: ...
    def close(self) -> None: ...


def follow(client: Client, task: Task, *, as_json: bool, from_start: bool = True, summary: bool = True) -> int:
    """Follow until the task has ended; gives the exit code. Ctrl-C detaches: 0, and the task goes on."""
    from diamond.sdk.follow import LinkChange, LogChunk, MetricPoint, StateChange

    view: View = JsonView() if as_json else LiveView() if _is_terminal() else PlainView()
    last = task
    try:
        for item in client.tasks.follow(task.id, from_start=from_start):
            if isinstance(item, StateChange):
                last = item.task
                view.state(item.task)
            elif isinstance(item, LogChunk):
                view.log(item.attempt, item.data, item.dropped)
            elif isinstance(item, MetricPoint):
                view.metric(item.series)
            elif isinstance(item, LinkChange):
                view.link(item.connected, item.detail)
    except KeyboardInterrupt:
        view.close()
        if as_json:
            return 0
        say("")
        say("Stopped following; the task goes on." if not last.state.is_final else "")
        say(f"  come back:  diamond logs -f {task.id}")
        say(f"  stop it:    diamond stop {task.id}")
        return 0
    finally:
        view.close()
    if summary and not as_json:
        show_summary(client, last)
    return exit_code_of(last.state)


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class JsonView:
    """One JSON object a line; `type` says what it is."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._attempt = 0

    def state(self, task: Task) -> None:
        emit({"type": "state", "task": task_json(task)}, line=True)

    def log(self, attempt: int, data: bytes, dropped: int) -> None:
        if attempt != self._attempt:
            self._decoder.reset()
            self._attempt = attempt
        emit({"type": "log", "attempt": attempt, "text": self._decoder.decode(data), "dropped": dropped}, line=True)

    def metric(self, series: Series) -> None:
        emit({"type": "metric", "key": series.key, "step": series.last_step, "value": series.last_value}, line=True)

    def link(self, connected: bool, detail: str) -> None:
        emit({"type": "link", "connected": connected, "detail": detail}, line=True)

    def close(self) -> None:
        pass


class PlainView:
    """For pipes and files: log bytes exactly as written; what happens goes to standard error."""

    def __init__(self) -> None:
        self._said = ""

    def state(self, task: Task) -> None:
        line = status_text(task)
        if line != self._said:
            say(f"[{time.strftime('%H:%M:%S')}] {line}")
            self._said = line

    def log(self, attempt: int, data: bytes, dropped: int) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def metric(self, series: Series) -> None:
        pass

    def link(self, connected: bool, detail: str) -> None:
        say("the server answers again" if connected else f"{render.clean(detail)}; trying again …")

    def close(self) -> None:
        sys.stdout.flush()


class LiveView:
    """The terminal's face. Everything shown has been cleaned; see `render`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._task: Task | None = None
        self._series: dict[str, deque[float]] = {}
        self._step = 0.0
        self._outage = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._attempt = 0
        self._partial = ""
        self._console = Console(highlight=False, no_color=not render.use_colour() or None)
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()
        self._open = True

    def state(self, task: Task) -> None:
        before, self._task = self._task, task
        if before and task.attempt > before.attempt > 0:
            self._flush()
            self._print(render.paint(f"── attempt {task.attempt} ──", "2"))
            self._series.clear()

    def log(self, attempt: int, data: bytes, dropped: int) -> None:
        if attempt != self._attempt:
            self._flush()
            self._attempt = attempt
        text = self._partial + self._decoder.decode(data)
        *lines, self._partial = text.split("\n")
        if len(self._partial) > 64 * 1024:  # a line without end
            lines, self._partial = [*lines, self._partial], ""
        elif "\r" in self._partial.rstrip("\r"):
            self._partial = self._partial[self._partial.rstrip("\r").rindex("\r") + 1 :]
        if lines:
            self._print("\n".join(render.clean_log(line) for line in lines))

    def metric(self, series: Series) -> None:
        if series.stream == "metrics":
            self._series.setdefault(series.key, deque(maxlen=_HISTORY)).append(series.last_value)
            self._step = max(self._step, series.last_step if series.last_step == series.last_step else 0)

    def link(self, connected: bool, detail: str) -> None:
        self._outage = "" if connected else "the server does not answer; the task goes on; trying again …"

    def close(self) -> None:
        if self._open:
            self._open = False
            self._flush()
            self._live.stop()

    def _flush(self) -> None:
        rest, self._partial = self._partial + self._decoder.decode(b"", final=True), ""
        if rest.strip():
            self._print(render.clean_log(rest))

    def _print(self, text: str) -> None:
        # Cropping to the window would take seconds for a megabyte, and the terminal wraps long lines by itself.
        self._console.print(_Raw(text), crop=False)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        width = self._console.width
        rows = []
        if self._partial.strip():
            shown = render.clean_log(self._partial)
            rows.append(Text.from_ansi(shown, no_wrap=True, overflow="ellipsis"))
        if self._task:
            colour = {"33": "yellow", "36": "cyan", "32": "green", "31": "red", "35": "magenta"}
            state = str(self._task.state)
            line = Text(
                "● ", style=colour.get(render.STATE_COLOURS.get(state, ""), ""), no_wrap=True, overflow="ellipsis"
            )
            line.append(status_text(self._task), style="bold")
            rows.append(line)
        metrics = metric_line({key: list(values) for key, values in self._series.items()}, self._step, width - 2)
        if metrics:
            rows.append(Text("  " + metrics, no_wrap=True, overflow="ellipsis"))
        if self._outage:
            rows.append(Text("  " + self._outage, style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*rows)


class _Raw:
    """Cleaned text printed as it is: rich would spend seconds on wrapping a long log, and lose its colours."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.segment import Segment

        yield Segment(self._text + "\n")


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
        if task.next_attempt_at and task.next_attempt_at > now:
            parts.append(f"next attempt in {render.format_duration(task.next_attempt_at - now)}")
        elif task.pending_reason:
            parts.append(render.clean(task.pending_reason))
    elif elapsed := render.duration(task.started_at, task.ended_at, now):
        parts.append(elapsed)
    return " · ".join(parts)


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
        part = f"   {render.clean(key)} {render.number(values[-1])}"
        spark = render.sparkline(values, SPARK) if len(values) > 1 else ""
        if len(line) + len(part) + len(spark) + 1 > width:
            break
        line += f"{part} {spark}".rstrip()
    return line


def metric_rank(key: str) -> tuple[int, str]:
    """Loss first, then how well it does, then the rest by name; numbers of single ranks last."""
    low = key.lower()
    if "@rank" in low:
        return 4, low
    if low in ("loss", "train_loss", "train/loss"):
        return 0, low
    if "loss" in low:
        return 1, low
    return (2 if any(word in low for word in ("acc", "error", "auc", "f1")) else 3), low


def show_summary(client: Client, task: Task) -> None:
    """How it ended, why, and how to get what it made."""
    took = render.duration(task.started_at, task.ended_at)
    say("")
    head = render.paint(str(task.state), render.STATE_COLOURS.get(task.state, "") + ";1", sys.stderr)
    say(f"{head} {render.clean(task.name)} ({task.id})" + (f" after {took}" if took else ""))
    for line in reason_lines(task):
        say(f"  {line}")
    found = [series for series in client.tasks.metrics(task.id) if series.stream == "metrics"] if task.attempt else []
    width = max(4, min(24, shutil.get_terminal_size().columns - 32))
    for series in sorted(found, key=lambda each: metric_rank(each.key))[:6]:
        curve = client.tasks.curve(task.id, series.key, max_points=200)
        spark = render.sparkline([point.mean for point in curve.points], width)
        say(f"  {render.clean(series.key):<16} {render.number(series.last_value):>10}  {spark}")
    if task.outputs:
        total = sum(item.size_bytes for item in task.outputs)
        names = ", ".join(render.clean(item.path) for item in task.outputs[:4])
        more = f" and {len(task.outputs) - 4} more" if len(task.outputs) > 4 else ""
        say(f"  outputs: {names}{more} ({render.size(total)})")
        say(f"  fetch:   diamond outputs {task.id} --to .")
    if task.state is TaskState.FAILED:
        say(f"  details: diamond show {task.id}")
