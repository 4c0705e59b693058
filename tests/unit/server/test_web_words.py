"""What pages say: about tasks, in titles, and of what was typed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diamond.core.jobs import Job
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import Task
from diamond.server.services.build_places import Place
from diamond.server.services.planning import NO_ENDPOINT
from diamond.server.web import image_builder, manual, task_words
from diamond.server.web.pages import code


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain & <b>", "plain &amp; &lt;b&gt;"),
        ("use `diamond run <x>`, or `y`", "use <code>diamond run &lt;x&gt;</code>, or <code>y</code>"),
        ("one ` alone", "one ` alone"),
        ("`<script>`", "<code>&lt;script&gt;</code>"),
        ("", ""),
    ],
)
def test_what_stands_between_backticks_is_code(text: str, shown: str) -> None:
    assert str(code(text)) == shown


def test_how_a_command_ended_is_said_once() -> None:
    ended = Task(
        id="tsk_1", name="x", state=TaskState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=1,
        detail="the command ended with exit code 1",
    )  # fmt: skip
    assert task_words.why(ended) == "The command ended with exit code 1. The last lines of the log say why."
    untold = Task(id="tsk_1", name="x", state=TaskState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=1)
    assert task_words.why(untold).startswith("Exit code 1. The command ended with an error;")


def test_a_page_names_no_command_where_it_has_a_link() -> None:
    waits = Task(
        id="tsk_1", name="x", state=TaskState.PENDING, pending_reason=f"{NO_ENDPOINT} (diamond endpoint create NAME)"
    )
    assert task_words.lacks_endpoint(waits) and "diamond endpoint" not in task_words.why(waits)
    other = Task(id="tsk_1", name="x", state=TaskState.PENDING, pending_reason="the cluster is full")
    assert not task_words.lacks_endpoint(other) and task_words.why(other) == "The cluster is full."


def test_a_job_that_runs_does_not_wait() -> None:
    waits = Job(
        id="job_1", task_id="tsk_1", attempt=1, endpoint="here", state=JobState.QUEUED, pending_reason="no free slot"
    )
    assert task_words.run_of(waits, 2.0, "").why == "No free slot."
    assert task_words.run_of(replace(waits, state=JobState.RUNNING, started_at=1.0), 2.0, "").why == ""


def test_decisions_are_told_from_guides() -> None:
    titles = manual.titles()
    assert titles["user-guide"] == "User guide"
    assert all(title.startswith("ADR 0") for name, title in titles.items() if name.startswith("adr/"))


def test_builders_that_are_not_there_come_last_and_say_so() -> None:
    near = Place(name="near", online=True, builders=("venv",))
    far = Place(name="far", online=True, builders=("apptainer", "venv"))
    shown = dict(image_builder._builders([near, far], near))
    assert list(shown)[:2] == ["auto", "venv"] and shown["apptainer"] == "apptainer (not at near)"
    shown = dict(image_builder._builders([near, far], None))
    assert shown["apptainer"] == "apptainer" and shown["docker"] == "docker (at none of your endpoints)"
    assert shown == shown | dict.fromkeys(["auto"], "The best one there")
    unknown = Place(name="new", online=False)
    assert "not at" not in str(image_builder._builders([unknown], unknown)), "nobody knows yet"
