"""Following a task as it happens: log bytes, states and metric values, through restarts, outages and retries.

Owns the loop over the cursor API. Every byte of the log is given exactly once: the position is the server's own
`Diamond-Next-Offset`, and a request that failed is sent again with the same offset.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

from diamond.core.codec import decode
from diamond.core.errors import NotFound, Unavailable
from diamond.core.jobs import Job
from diamond.core.states import TaskState
from diamond.core.tasks import Task
from diamond.sdk.metrics import Series
from diamond.sdk.transport import API, Transport

CHUNK_BYTES = 1024 * 1024
WAIT_S = 2.0  # how long a poll waits for log bytes; also how old a shown state can be
METRICS_EVERY_S = 2.0
PENDING_WAIT_S = 10.0
_SECONDS = re.compile(r"\b\d+s\b")
_OUTAGE_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """Bytes of the log of one attempt, in order.

    Attributes:
        offset: position of the first byte; `next_offset` is the position after the last.
        dropped: bytes before this chunk which the server no longer holds.
    """

    attempt: int
    offset: int
    next_offset: int
    data: bytes
    dropped: int = 0


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """The task moved on (or this is the first look at it)."""

    task: Task


@dataclass(frozen=True, kw_only=True)
class AttemptEnded:
    """An attempt ended and is followed by another. Comes after the last byte of its log.

    Attributes:
        job: the attempt as it ended; None when the server does not tell.
        next_attempt_at: when the next one is due (Unix seconds); None when it has begun already.
    """

    attempt: int
    job: Job | None
    next_attempt_at: float | None


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """A newer value of one metric. Values in between are in the curve (`Tasks.curve`)."""

    attempt: int
    series: Series


@dataclass(frozen=True, kw_only=True)
class LinkChange:
    """The server stopped answering, or answers again. The task itself does not depend on this."""

    connected: bool
    detail: str = ""


FollowItem = LogChunk | StateChange | AttemptEnded | MetricPoint | LinkChange
T = TypeVar("T")
Step = Generator[FollowItem, None, T]  # gives items on the way, and an answer at its end


class Follower:
    """One pass over one task; see `Tasks.follow`."""

    def __init__(
        self,
        transport: Transport,
        task_id: str,
        *,
        logs: bool,
        from_start: bool,
        metrics: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._transport = transport
        self._path = f"{API}/tasks/{task_id}"
        self._logs = logs
        self._from_start = from_start
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep or time.sleep
        self._seen: dict[str, tuple[int, float]] = {}
        self._metrics_due = -math.inf
        self._failures = 0
        self._told_end = 0
        self._shown: Task | None = None
        self._event_cursor: int | None = None

    def items(self) -> Iterator[FollowItem]:
        """What happens, until the task has ended and everything was given."""
        task = yield from self._look()
        attempt = 1 if self._from_start else max(task.attempt, 1)
        offset: int | None = 0 if self._from_start else None
        while True:
            if task.attempt < attempt:
                if task.state.is_final:  # ended before (another) attempt began
                    return
                yield from self._until_event()
                task = yield from self._look()
                continue
            if self._logs:
                eof, offset, state = yield from self._log(attempt, offset)
            else:
                eof, state = self._job_final(task, attempt), task.state
            yield from self._new_metrics(attempt, final=eof)
            # Why a job waits can change without its state changing.
            if eof or not self._logs or state is not task.state or state is TaskState.QUEUED:
                task = yield from self._look()
            if not eof:
                if not self._logs:
                    yield from self._until_event()
                    task = yield from self._look()
                continue
            if task.state.is_final and task.attempt == attempt:
                return
            yield from self._ended(task, attempt)
            if task.attempt > attempt:
                attempt, offset, self._seen = attempt + 1, 0, {}
            else:  # the job ended, and the task waits for its next attempt
                yield from self._until_event()
                task = yield from self._look()

    def _ended(self, task: Task, attempt: int) -> Iterator[FollowItem]:
        job = next((job for job in task.jobs if job.attempt == attempt), None)
        if attempt > self._told_end and (job is None or job.state.is_final):
            self._told_end = attempt
            waits = task.attempt == attempt
            yield AttemptEnded(attempt=attempt, job=job, next_attempt_at=task.next_attempt_at if waits else None)

    def _log(self, attempt: int, offset: int | None) -> Step[tuple[bool, int, TaskState]]:
        """One poll; returns (end of this attempt's log, next offset, task state)."""
        # Asking for the end of the log is a question of now; only what comes after it is waited for.
        wait_s = 0.0 if offset is None else WAIT_S
        params: dict[str, object] = {"attempt": attempt, "limit": CHUNK_BYTES, "wait_s": wait_s}
        params |= {"tail": 0} if offset is None else {"offset": offset}
        answer = yield from self._trying(
            lambda: self._transport.request("GET", f"{self._path}/logs", params=params, wait_s=wait_s, retries=0)
        )
        start = int(answer.headers["Diamond-Offset"])
        following = int(answer.headers["Diamond-Next-Offset"])
        dropped = int(answer.headers.get("Diamond-Dropped", 0))
        if answer.content or dropped:
            yield LogChunk(attempt=attempt, offset=start, next_offset=following, data=answer.content, dropped=dropped)
        return answer.headers.get("Diamond-Eof") == "1", following, TaskState(answer.headers["Diamond-Task-State"])

    def _look(self) -> Step[Task]:
        raw = yield from self._trying(lambda: self._transport.json("GET", self._path, retries=0))
        task = decode(Task, raw)
        if self._shown is None or _stage(task) != _stage(self._shown):
            yield StateChange(task=task)
        self._shown = task
        return task

    def _until_event(self) -> Step[None]:
        """Wait until something happens to the task, or a few seconds."""
        wait_s = 0.0 if self._event_cursor is None else PENDING_WAIT_S
        params = {"since": self._event_cursor or 0, "limit": 500, "wait_s": wait_s or None}
        page = yield from self._trying(
            lambda: self._transport.json("GET", f"{self._path}/events", params=params, wait_s=wait_s, retries=0)
        )
        events = page["events"]
        self._event_cursor = max(self._event_cursor or 0, *(int(event["seq"]) for event in events), 0)

    def _new_metrics(self, attempt: int, *, final: bool) -> Step[None]:
        if not self._metrics or (not final and self._clock() < self._metrics_due):
            return
        try:
            page = yield from self._trying(
                lambda: self._transport.json("GET", f"{self._path}/metrics", params={"attempt": attempt}, retries=0)
            )
        except NotFound:
            page = {"series": []}
        self._metrics_due = self._clock() + METRICS_EVERY_S
        for series in map(Series.of, page["series"]):
            mark = (series.count, series.last_step)
            if self._seen.get(series.key) != mark:
                self._seen[series.key] = mark
                yield MetricPoint(attempt=attempt, series=series)

    def _trying(self, call: Callable[[], T]) -> Step[T]:
        """The call's answer, however long the server is away meanwhile."""
        while True:
            try:
                answer = call()
            except Unavailable as error:
                if self._failures == 2:  # one broken connection is not worth a word
                    yield LinkChange(connected=False, detail=error.message)
                self._sleep(_OUTAGE_DELAYS_S[min(self._failures, len(_OUTAGE_DELAYS_S) - 1)])
                self._failures += 1
                continue
            if self._failures > 2:
                yield LinkChange(connected=True)
            self._failures = 0
            return answer

    @staticmethod
    def _job_final(task: Task, attempt: int) -> bool:
        return (
            task.state.is_final
            or task.attempt > attempt
            or any(job.attempt == attempt and job.state.is_final for job in task.jobs)
        )


def _stage(task: Task) -> tuple[object, ...]:
    # "silent for 3m 05s" would otherwise be news every time it is read.
    why = _SECONDS.sub("", task.pending_reason)
    return (task.state, task.attempt, task.endpoint, task.desired, why, task.next_attempt_at)
