"""States of tasks and jobs and which may follow which. Nothing else may decide a transition.

Jobs only advance: a late or repeated report of an earlier state changes nothing. A task follows its newest job, and
returns to PENDING only when another attempt is due.
"""

from __future__ import annotations

from diamond.core.compat import StrEnum
from diamond.core.errors import InvalidInput


class TaskState(StrEnum):
    PENDING = "PENDING"  # wanted; no job yet, or waiting for its next attempt
    QUEUED = "QUEUED"  # a job exists; its endpoint has not started it
    RUNNING = "RUNNING"
    FINISHING = "FINISHING"  # the program ended; logs and outputs are on their way
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in FINAL_TASK_STATES


def parse_task_states(text: str, field: str) -> list[TaskState]:
    """States from ``RUNNING,queued``.

    Raises:
        InvalidInput: naming `field` and the valid states.
    """
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(TaskState(word.upper()))
        except ValueError:
            raise InvalidInput(
                f"{word[:40]!r} is not a state of a task", hint=f"states: {', '.join(TaskState)}", field=field
            ) from None
    return found


FINAL_TASK_STATES = frozenset({TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED})

_LIVE = frozenset({TaskState.PENDING, TaskState.QUEUED, TaskState.RUNNING, TaskState.FINISHING})
TASK_TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.QUEUED}) | FINAL_TASK_STATES,
    TaskState.QUEUED: (_LIVE - {TaskState.QUEUED}) | FINAL_TASK_STATES,
    TaskState.RUNNING: frozenset({TaskState.FINISHING, TaskState.PENDING}) | FINAL_TASK_STATES,
    TaskState.FINISHING: frozenset({TaskState.PENDING}) | FINAL_TASK_STATES,
    TaskState.SUCCEEDED: frozenset(),
    TaskState.FAILED: frozenset(),
    TaskState.CANCELLED: frozenset(),
}


class JobState(StrEnum):
    PLANNED = "PLANNED"  # the server wants it; the agent has not spoken of it yet
    STAGING = "STAGING"  # the agent is putting files in place
    QUEUED = "QUEUED"  # the endpoint's scheduler has it
    RUNNING = "RUNNING"
    FINISHING = "FINISHING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in FINAL_JOB_STATES

    @property
    def task_state(self) -> TaskState:
        """What a task in this stage of its newest job is called (final ones only when no attempt follows)."""
        early = {JobState.PLANNED, JobState.STAGING, JobState.QUEUED}
        return TaskState.QUEUED if self in early else TaskState(self.value)


FINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

_PROGRESS = {
    JobState.PLANNED: 0,
    JobState.STAGING: 1,
    JobState.QUEUED: 2,
    JobState.RUNNING: 3,
    JobState.FINISHING: 4,
    JobState.SUCCEEDED: 5,
    JobState.FAILED: 5,
    JobState.CANCELLED: 5,
}


def may_follow(current: TaskState, new: TaskState) -> bool:
    return new in TASK_TRANSITIONS[current]


def job_advances(current: JobState, new: JobState) -> bool:
    """Whether `new` is news: strictly further on, so repeats and old messages are harmless."""
    return _PROGRESS[new] > _PROGRESS[current]


class Desired(StrEnum):
    """What the server wants of a job or task."""

    RUN = "run"
    YIELD = "yield"  # of a job: save, stop, and let the next one go on elsewhere
    CANCEL = "cancel"
