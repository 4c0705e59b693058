"""Following a task in the terminal: log lines stream past, a status line and the newest metrics stay below them.

Three faces of the same items: a live view on a terminal, plain lines elsewhere (log bytes exact on standard output,
states on standard error), and JSON lines.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from diamond.cli import render
from diamond.cli.describe import ended_text, metric_line, show_summary, status_text
from diamond.cli.session import emit, exit_code_of, program, say, task_json
from diamond.core.codec import encode
from diamond.core.states import TaskState
from diamond.core.tasks import Task

if TYPE_CHECKING:
    from diamond.sdk.client import Client
    from diamond.sdk.follow import AttemptEnded
    from diamond.sdk.metrics import Series

_HISTORY = 400
_LENGTH_OF_TIME = re.compile(r"\b\d+[smhd]\b")


class View(Protocol):
    """What a face of the follower does with each item."""

    def state(self, task: Task) -> None: ...
    def log(self, attempt: int, data: bytes, dropped: int) -> None: ...
    def metric(self, series: Series) -> None: ...
    def link(self, connected: bool, detail: str) -> None: ...
    def ended(self, item: AttemptEnded) -> None: ...
    def begin(self, attempt: int) -> None: ...
    def close(self) -> None: ...


def follow(client: Client, task: Task, *, as_json: bool, from_start: bool = True, summary: bool = True) -> int:
    """Follow until the task has ended; gives the exit code. Ctrl-C detaches: 0, and the task goes on."""
    code, _ = watch(client, task, as_json=as_json, from_start=from_start, summary=summary)
    return code


def watch(
    client: Client,
    task: Task,
    *,
    as_json: bool,
    from_start: bool = True,
    summary: bool = True,
    terminal: Callable[[], View] | None = None,
) -> tuple[int, Task]:
    """As `follow`; also the task as it was seen last, which has not ended if the person left.

    `terminal` makes another face than `LiveView` for a terminal.
    """
    from diamond.sdk.follow import AttemptEnded, LinkChange, LogChunk, MetricPoint, StateChange

    view: View = JsonView() if as_json else (terminal or LiveView)() if is_terminal() else PlainView()
    last = task
    awaited = 0  # the attempt that was announced and has not begun yet
    try:
        for item in client.tasks.follow(task.id, from_start=from_start):
            if isinstance(item, StateChange):
                last = item.task
                if awaited and last.attempt >= awaited:
                    view.begin(awaited)
                    awaited = 0
                view.state(item.task)
            elif isinstance(item, LogChunk):
                view.log(item.attempt, item.data, item.dropped)
            elif isinstance(item, MetricPoint):
                view.metric(item.series)
            elif isinstance(item, AttemptEnded):
                view.ended(item)
                if item.next_attempt_at is None:
                    view.begin(item.attempt + 1)
                else:
                    awaited = item.attempt + 1
            elif isinstance(item, LinkChange):
                view.link(item.connected, item.detail)
    except KeyboardInterrupt:
        view.close()
        if as_json:
            return 0, last
        say("")
        say("Stopped following; the task goes on." if not last.state.is_final else f"The task is {last.state}.")
        say(f"  come back:  {program()} logs -f {task.id}")
        if not last.state.is_final:
            say(f"  stop it:    {program()} stop {task.id}")
        return 0, last
    finally:
        view.close()
    if summary and not as_json:
        show_summary(client, last)
    return exit_code_of(last.state), last


def is_terminal() -> bool:
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

    def ended(self, item: AttemptEnded) -> None:
        emit({"type": "attempt_ended", **encode(item)}, line=True)

    def begin(self, attempt: int) -> None:
        pass

    def close(self) -> None:
        pass


class PlainView:
    """For pipes and files: log bytes exactly as written; what happens goes to standard error."""

    def __init__(self) -> None:
        self._said = ""

    def state(self, task: Task) -> None:
        if task.state is TaskState.PENDING and task.next_attempt_at:
            return  # `ended` says so, after the last byte of the log
        line = status_text(task)
        if (news := _LENGTH_OF_TIME.sub("", line)) != self._said:
            say(f"[{time.strftime('%H:%M:%S')}] {line}")
            self._said = news

    def log(self, attempt: int, data: bytes, dropped: int) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def metric(self, series: Series) -> None:
        pass

    def link(self, connected: bool, detail: str) -> None:
        say("the server answers again" if connected else f"{render.clean(detail)}; trying again …")

    def ended(self, item: AttemptEnded) -> None:
        say(f"[{time.strftime('%H:%M:%S')}] {ended_text(item)}")

    def begin(self, attempt: int) -> None:
        say(f"── attempt {attempt} ──")

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
        self._task = task

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
            self._print("\n".join(self._shown(line) for line in lines))

    def metric(self, series: Series) -> None:
        if series.stream == "metrics":
            self._series.setdefault(series.key, deque(maxlen=_HISTORY)).append(series.last_value)
            self._step = max(self._step, series.last_step if series.last_step == series.last_step else 0)

    def link(self, connected: bool, detail: str) -> None:
        self._outage = "" if connected else "the server does not answer; the task goes on; trying again …"

    def ended(self, item: AttemptEnded) -> None:
        self._flush()
        self._print(render.paint(ended_text(item), "31"))

    def begin(self, attempt: int) -> None:
        self._flush()
        self._print(render.paint(f"── attempt {attempt} ──", "2"))
        self._series.clear()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._flush()
            self._live.stop()

    def _flush(self) -> None:
        rest, self._partial = self._partial + self._decoder.decode(b"", final=True), ""
        if rest.strip():
            self._print(self._shown(rest))

    def _shown(self, line: str) -> str:
        """A line of the log as it is printed."""
        return render.clean_log(line)

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
        rows += [Text("  " + line, no_wrap=True, overflow="ellipsis") for line in self._below(width - 2)]
        metrics = metric_line({key: list(values) for key, values in self._series.items()}, self._step, width - 2)
        if metrics:
            rows.append(Text("  " + metrics, no_wrap=True, overflow="ellipsis"))
        if self._outage:
            rows.append(Text("  " + self._outage, style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*rows)

    def _below(self, width: int) -> list[str]:
        """Lines under the status line, beside the metrics."""
        return []


class _Raw:
    """Cleaned text printed as it is: rich would spend seconds on wrapping a long log, and lose its colours."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.segment import Segment

        yield Segment(self._text + "\n")
