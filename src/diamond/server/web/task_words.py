"""Tasks, jobs and what happened to them, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from diamond.core.durations import format_duration
from diamond.core.events import Event
from diamond.core.jobs import Job
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.states import Desired, TaskState
from diamond.core.tasks import Task
from diamond.server.services.planning import NO_ENDPOINT
from diamond.server.web.pages import sentence


class Step(NamedTuple):
    """Something that happened. `look` is a state of static/app.css; `after_s` the time since the step before."""

    at: float
    title: str
    words: str
    look: str
    after_s: float | None


class Run(NamedTuple):
    """A job with its waits. `why` says how it ended, or what it waits for."""

    job: Job
    why: str
    waited_s: float | None
    ran_s: float | None
    log_path: str


_LOOKS = {
    "RUNNING": "running", "FINISHING": "running", "SUCCEEDED": "good", "FAILED": "bad", "CANCELLED": "ended",
}  # fmt: skip
_STATES = {
    "PENDING": "Waits for another attempt",
    "QUEUED": "In the queue",
    "RUNNING": "Running",
    "FINISHING": "The program ended; logs and outputs are on their way",
    "SUCCEEDED": "Succeeded",
    "FAILED": "Failed",
    "CANCELLED": "Stopped",
}


def why(task: Task) -> str:
    """How the task stands, beyond its state: what it waits for, or how it ended and what to do next."""
    if not task.state.is_final:
        words = ["it is being stopped", task.detail] if task.desired is Desired.CANCEL else [_waits(task)]
    else:
        words = _ended(task.reason, task.exit_code, task.detail)
    return _sentences(words)


def lacks_endpoint(task: Task) -> bool:
    return task.pending_reason.startswith(NO_ENDPOINT)


def _waits(task: Task) -> str:
    """For a page, which leads there itself where the words name a command."""
    return NO_ENDPOINT if lacks_endpoint(task) else task.pending_reason


def short(task: Task) -> str:
    """The same for a cell of a table: what is particular to this one comes first."""
    if task.state.is_final and task.detail and task.state is not TaskState.SUCCEEDED:
        return sentence(task.detail)
    return why(task)


def _ended(reason: Reason | None, exit_code: int | None, detail: str, signal: int | None = None) -> list[str]:
    words = [detail]
    if exit_code and f"exit code {exit_code}" not in detail:
        words.append(f"exit code {exit_code}")
    if signal and "signal" not in detail:
        words.append(f"signal {signal}")
    if reason is not None and reason is not Reason.COMPLETED:
        meaning = MEANINGS[reason].sentence
        if reason is Reason.EXIT_NONZERO and "ended with exit code" in detail:  # that much is said
            meaning = meaning.partition("; ")[2]
        words.append(meaning)
    return words


def _sentences(words: Sequence[str]) -> str:
    return " ".join(sentence(each) for each in words if each)


def ran_s(task: Task, now: float) -> float | None:
    if task.started_at is None:
        return None
    return max(0.0, (task.ended_at if task.ended_at is not None else now) - task.started_at)


def run_of(job: Job, now: float, log_path: str) -> Run:
    began = job.queued_at or job.created_at
    waited = (job.started_at if job.started_at is not None else job.ended_at or now) - began
    ran = None if job.started_at is None else max(0.0, (job.ended_at or now) - job.started_at)
    words = [job.pending_reason if job.started_at is None else "", job.detail]
    if job.reason:
        words = _ended(job.reason, job.exit_code, job.detail, job.signal)
    return Run(job, _sentences(words), max(0.0, waited), ran, log_path)


def steps(events: Sequence[Event]) -> list[Step]:
    """Oldest first."""
    made: list[Step] = []
    before: float | None = None
    for event in events:
        title, words, look = _step(event.kind, event.data)
        made.append(Step(event.at, title, words, look, None if before is None else max(0.0, event.at - before)))
        before = event.at
    return made


def _step(kind: str, data: dict[str, Any]) -> tuple[str, str, str]:
    if kind == "task.state":
        state = str(data.get("state", ""))
        given, code = data.get("reason"), data.get("exit_code")
        reason = Reason(given) if isinstance(given, str) and given in Reason.__members__ else None
        words = _ended(reason, code if isinstance(code, int) else None, str(data.get("detail") or ""))
        words.append(str(data.get("next") or ""))
        title = _STATES.get(state, state.capitalize())
        attempt = data.get("attempt")
        if state in ("QUEUED", "RUNNING") and isinstance(attempt, int) and attempt > 1:
            title += f", attempt {attempt}"
        return title, _sentences(words), _LOOKS.get(state, "waiting")
    if kind == "task.cancel_requested":
        return "Asked to stop", sentence(f"by {data['by']}") if data.get("by") else "", "ended"
    if kind == "task.shared":
        where = f" in project {data.get('project')}" if data.get("project") else ""
        return f"Seen by: {data.get('visibility', '')}{where}", "", "ended"
    if kind == "task.moved":
        return f"Moved to {data.get('endpoint') or 'another endpoint'}", str(data.get("detail") or ""), "waiting"
    if kind == "task.resizing":
        before, after = data.get("from"), data.get("to")
        then = f"it goes on with {after} slots instead of {before}" if after else "it waits until there is room again"
        return "Saves its state, to go on elsewhere in the pool", sentence(then), "running"
    if kind == "task.image":
        words = [str(data[key]) for key in ("name", "detail", "how") if data.get(key)]
        return "Its image", _sentences(words), "waiting"
    named = {
        "task.created": "Launched", "task.transferred": "Given to somebody else", "shell.opened": "A shell was opened",
        "shell.closed": "A shell was closed",
    }  # fmt: skip
    return named.get(kind, kind), "", "waiting"


def span(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)
