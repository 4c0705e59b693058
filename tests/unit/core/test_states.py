"""Transitions: final is final, jobs only advance, and the reason table is complete."""

import itertools

import pytest

from diamond.core.reasons import DEFAULT_RETRY_ON, MEANINGS, Reason
from diamond.core.states import (
    FINAL_JOB_STATES,
    FINAL_TASK_STATES,
    TASK_TRANSITIONS,
    JobState,
    TaskState,
    job_advances,
    may_follow,
)


def test_nothing_follows_a_final_task_state() -> None:
    for final, other in itertools.product(FINAL_TASK_STATES, TaskState):
        assert not may_follow(final, other)


def test_every_live_task_state_can_end_in_every_way() -> None:
    for state in TaskState:
        assert state in TASK_TRANSITIONS
        assert not may_follow(state, state)
        if not state.is_final:
            assert TASK_TRANSITIONS[state] >= FINAL_TASK_STATES


def test_jobs_advance_in_one_direction_only() -> None:
    for a, b in itertools.permutations(JobState, 2):
        assert not (job_advances(a, b) and job_advances(b, a))
    for final, other in itertools.product(FINAL_JOB_STATES, JobState):
        assert not job_advances(final, other)


@pytest.mark.parametrize("state", list(JobState))
def test_every_job_state_names_a_task_state(state: JobState) -> None:
    assert isinstance(state.task_state, TaskState)
    assert state.task_state.is_final == state.is_final


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Reason)
    for meaning in MEANINGS.values():
        assert TaskState(meaning.outcome).is_final
        assert meaning.sentence.endswith(".")
        assert not (meaning.retryable and meaning.outcome != "FAILED")
    assert Reason.CANCELLED not in DEFAULT_RETRY_ON
    assert Reason.COMPLETED not in DEFAULT_RETRY_ON
