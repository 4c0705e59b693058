"""Which project a task is launched in: what the spec says, else what the environment says."""

from __future__ import annotations

import pytest

from diamond.core.errors import InvalidInput
from diamond.core.tasks import TaskSpec
from diamond.sdk.taskfile import PROJECT_ENV, in_project


def test_the_spec_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROJECT_ENV, raising=False)
    assert in_project(TaskSpec(run="x")).project is None
    monkeypatch.setenv(PROJECT_ENV, "lab")
    assert in_project(TaskSpec(run="x")).project == "lab"
    assert in_project(TaskSpec(run="x", project="other")).project == "other"
    monkeypatch.setenv(PROJECT_ENV, " ")
    assert in_project(TaskSpec(run="x")).project is None


def test_a_name_that_is_none_is_said_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROJECT_ENV, "The Lab")
    with pytest.raises(InvalidInput, match="'The Lab' is not the name of a project") as caught:
        in_project(TaskSpec(run="x"))
    assert caught.value.field == PROJECT_ENV
