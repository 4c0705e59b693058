"""Images that are being made, and slips: what the commands say where a person could lose the thread."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diamond.cli import image_page
from diamond.core.image_views import Build, BuildProgress
from diamond.core.images import BuildFailure, ReplicaState, StageRecord
from diamond.core.states import TaskState
from diamond.core.tasks import Task
from tests.unit.cli.conftest import BUILDING, FAILED, READY, Given, call, image, task


def test_a_recipe_without_a_name_that_is_there(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(build=Build(image=image(READY), replica=READY, cached=True, how="cached"))
    assert call("build", "--base", "host") == 0
    assert "this recipe is already there as climate" in capsys.readouterr().err
    assert call("build", "--base", "host", "--name", "climate") == 0
    assert "already there as" not in capsys.readouterr().err


def test_ls_names_failed_ones_that_it_hides(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = image(READY), image(FAILED, id="img_000000002")
    given(list=lambda *, endpoint, everything: [newer, older] if everything else [older])
    assert call("ls") == 0
    assert "1 build that failed not shown (climate): diamond image ls -a" in capsys.readouterr().err
    assert call("ls", "-a") == 0
    assert "not shown" not in capsys.readouterr().err


def test_show_has_the_stages_of_a_build_that_runs(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    stages = (
        StageRecord(name="base", title="base image", state="kept"),
        StageRecord(name="system", title="system packages", state="done", seconds=12.0),
        StageRecord(name="pip", title="Python packages", state="running"),
    )
    now = BuildProgress(
        image_id="img_000000001", endpoint="hpc", state=ReplicaState.BUILDING, stages=stages, number=3, total=5
    )
    fake = given(get=image(BUILDING), progress=now)
    assert call("show", "climate") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for words in ("base image kept", "system packages 12 s", "Python packages running", "2 steps to come"):
        assert words.split() in shown
    assert fake.asked("progress") == (("img_000000001",), {"endpoint": "hpc"})
    given(get=image(BUILDING), progress=replace(now, stages=(), total=0, detail="it waits for room"))
    assert call("show", "climate") == 0
    assert "it waits for room" in capsys.readouterr().out
    assert image_page.failure_lines(BuildFailure(stage="", message="it was stopped"))[0] == "it was stopped"


def test_stop_ends_what_makes_it(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    stopped: list[str] = []

    def cancel(task_id: str) -> Task:
        stopped.append(task_id)
        return task(TaskState.RUNNING)

    elsewhere = replace(BUILDING, endpoint="other", task_id="tsk_000000002")
    given({"cancel": cancel}, get=image(BUILDING, elsewhere, replace(READY, endpoint="third")))
    assert call("stop", "climate", "--infra", "hpc") == 0
    assert capsys.readouterr().out == "stopping the making of climate at hpc (tsk_000000001)\n"
    assert stopped == ["tsk_000000001"]
    assert call("stop", "climate", "--json") == 0
    assert [len(json.loads(capsys.readouterr().out)["tasks"]), len(stopped)] == [2, 3]
    given(get=image(READY))
    assert call("stop", "climate") == 0
    assert "climate is not being made: READY" in capsys.readouterr().err


def test_usage_and_json_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", "--help") == 0
    assert "Usage: diamond image export [OPTIONS] IMAGE FILE\n" in capsys.readouterr().out
    assert call("ls", "--help") == 0
    assert '{"images": [Image' in capsys.readouterr().out
