"""Commands about images against a client that answers what a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import image_build, image_page, images, live
from diamond.core.errors import InvalidInput
from diamond.core.image_views import Build, EndpointImages, ImagePlan
from diamond.core.images import ReplicaState, StageRecord
from diamond.core.projects import Visibility
from diamond.core.recipes import Recipe
from diamond.core.states import TaskState
from diamond.sdk.follow import LogChunk, StateChange
from tests.unit.cli.conftest import BUILDING, DIGEST, FAILED, READY, Fake, Given, call, image, task


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "climate.yaml"
    path.write_text("base: python:3.12-slim\npip: [six]\nenvs: {A: 1}\n")
    return str(path)


def followed(*states: TaskState) -> Callable[..., Iterator[Any]]:
    def follow(task_id: str, **options: Any) -> Iterator[Any]:
        log = b"diamond: stage 1/2 base: base image\nfetched\ndiamond: stage base done in 2.5 s\n"
        yield LogChunk(attempt=1, offset=0, next_offset=len(log), data=log)
        for state in states:
            yield StateChange(task=task(state))

    return follow


def test_build_that_is_there_already(given: Given, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake = given(build=Build(image=image(READY), replica=READY, cached=True, how="cached"))
    options = ("--pip", "numpy", "--system", "git", "--env", "A=2", "--env", "B=x=y", "--infra", "hpc", "--fresh")
    assert call("build", recipe, *options, "--where", "login") == 0
    err = capsys.readouterr().err
    assert "READY climate at hpc, unchanged since it was built" in err
    assert DIGEST in err
    assert "3.0 GiB" in err
    assert "resources: {image_id: climate}" in err
    (sent,), asked = fake.asked("build")
    assert (sent.name, sent.pip, sent.system) == ("climate", ("six", "numpy"), ("git",))
    assert sent.envs == {"A": "2", "B": "x=y"}
    assert (asked["endpoint"], asked["where"], asked["fresh"]) == ("hpc", "login", True)


def test_build_that_is_followed(given: Given, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = Build(image=image(BUILDING), replica=BUILDING, task_id="tsk_000000001", why=("it is idle",))
    tasks = {"get": task(TaskState.PENDING), "follow": followed(TaskState.RUNNING, TaskState.SUCCEEDED)}
    given(tasks, build=made, get=image(READY))
    assert call("build", recipe) == 0
    shown = capsys.readouterr()
    assert "diamond: stage 1/2 base: base image\nfetched\n" in shown.out
    assert "Building climate at hpc\n" in shown.err
    assert "READY climate at hpc\n" in shown.err
    assert "1m 15s, 1 of 2 steps kept from earlier builds" in shown.err
    assert "debian 13, Python 3.12.3, 120 packages" in shown.err


def test_build_that_fails(given: Given, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = Build(image=image(BUILDING), replica=BUILDING, task_id="tsk_000000001")
    tasks = {"get": task(TaskState.PENDING), "follow": followed(TaskState.FAILED)}
    given(tasks, build=made, get=image(FAILED))
    assert call("build", recipe) == 1
    err = capsys.readouterr().err
    assert "FAILED climate at hpc" in err
    assert "stage pip: There is no package no-such-thing." in err
    assert "line: pip: no-such-thing==1" in err
    assert "| ERROR: No matching distribution found\n" in err  # nothing that moves the cursor
    assert "hint: check the spelling" in err
    assert "diamond image logs climate --infra hpc" in err


def test_leaving_does_not_stop_it(given: Given, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(task_id: str, **options: Any) -> Iterator[Any]:
        yield StateChange(task=task(TaskState.RUNNING))
        raise KeyboardInterrupt

    made = Build(image=image(BUILDING), replica=BUILDING, task_id="tsk_000000001")
    given({"get": task(TaskState.PENDING), "follow": interrupted}, build=made)
    assert call("build", recipe) == 0
    assert "diamond stop tsk_000000001" in capsys.readouterr().err


def test_detached_and_json(given: Given, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = Build(image=image(BUILDING), replica=BUILDING, task_id="tsk_000000001")
    tasks = {"get": task(TaskState.PENDING), "follow": followed(TaskState.SUCCEEDED)}
    given(tasks, build=made, get=image(READY))
    assert call("build", recipe, "-d") == 0
    shown = capsys.readouterr()
    assert shown.out == "img_000000001\n"
    assert "diamond image logs -f climate --infra hpc" in shown.err
    assert call("build", recipe, "-d", "--json") == 0
    assert json.loads(capsys.readouterr().out)["task_id"] == "tsk_000000001"
    assert call("build", recipe, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["type"] for line in lines] == ["log", "state", "image"]
    assert lines[-1]["image"]["replicas"][0]["state"] == "READY"


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ((), 2, "say what to build"),
        (("--base", "a b"), 2, "--base"),
        (("--base", "host", "--pip", "--pre"), 2, "--pip"),
        (("--base", "host", "--name", "../x"), 2, "--name"),
        (("--base", "host", "--env", "1=2"), 2, "--env"),
        (("--base", "host", "--where", "moon"), 2, "--where"),
        (("none.yaml",), 1, "no such file"),
    ],
)
def test_wrong_usage(
    given: Given, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, part: str
) -> None:
    given()
    assert call("build", *arguments) == code
    assert part in capsys.readouterr().err


def test_a_list_of_packages_needs_a_base(given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my-project"
    folder.mkdir()
    (folder / "requirements.txt").write_text("six\n")
    fake = given(build=Build(image=image(READY), replica=READY, cached=True))
    assert call("build", str(folder)) == 2
    err = capsys.readouterr().err
    assert "--base host" in err
    assert "requirements: requirements.txt" in err
    assert call("build", str(folder), "--base", "host") == 0
    (sent,), _ = fake.asked("build")
    assert (sent.name, sent.base, sent.pip) == ("my-project", "host", ("six",))
    assert image_build.name_of(str(folder / "requirements.txt")) == "my-project"
    assert image_build.name_of("/a/torch-env.yaml") == "torch-env"
    assert image_build.name_of("-") is None
    assert image_build.name_of("/a/..x y.yaml") is None


def test_errors_in_a_recipe_say_where(given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given()
    path = tmp_path / "image.yaml"
    path.write_text("base: host\nsystm: [git]\n")
    assert call("build", str(path)) == 1
    assert "image.yaml, line 2" in capsys.readouterr().err


def test_dry_run(given: Given, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ImagePlan(
        recipe=Recipe.parse({"base": "docker://python:3.12-slim", "pip": ["six"], "time_limit": "30m"}),
        recipe_digest=DIGEST,
        endpoint="hpc",
        builder="apptainer",
        where="login",
        why=("it has GPUs", "partition a fits"),
        others={"local": "it has no container runtime"},
        definition="Bootstrap: docker\nFrom: python:3.12-slim\n",
        stages=(StageRecord(name="base", title="base image", state="kept"),),
        expected_s=90.0,
    )
    given(plan=plan)
    assert call("build", recipe, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "Bootstrap: docker\n  From: python:3.12-slim" in out
    assert (
        "  - with apptainer, directly, not as a batch job\n  - it has GPUs\n  - for --where batch: partition a fits\n"
        in out
    )
    assert "base image  kept from an earlier build" in out
    assert "took 1m 30s as a rule" in out
    assert "not local: it has no container runtime" in out
    assert "time_limit: 30m" in out
    assert call("definition", recipe) == 0
    assert capsys.readouterr().out == "Bootstrap: docker\nFrom: python:3.12-slim\n"
    given(plan=replace(plan, definition="", endpoint=None))
    assert call("definition", recipe) == 1
    assert "it has no container runtime" in capsys.readouterr().err
    fake = given(plan=plan, get=image(READY))
    assert call("definition", "climate", "--json") == 0
    assert json.loads(capsys.readouterr().out)["builder"] == "apptainer"
    assert fake.asked("get")[0] == ("climate",)


def test_ls(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    shared = image(READY, replace(READY, endpoint="other"), is_mine=False, visibility=Visibility.PUBLIC)
    fake = given(list=[image(FAILED), shared], at=EndpointImages(endpoint="hpc", root="/i", layer_bytes=1024**3))
    assert call("ls") == 0
    mine, others = capsys.readouterr().out.splitlines()[1:]
    assert mine.split()[:3] == ["climate", "FAILED", "hpc"]
    assert others.startswith("ana/climate  READY   hpc, other  3.0 GiB")
    assert "sha256:abababababab " in others
    assert call("ls", "--infra", "hpc", "--all", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(found["images"]), found["endpoint"]["root"]] == [2, "/i"]
    assert fake.calls[-2][2] == {"endpoint": "hpc", "everything": True}
    given(list=[], at=EndpointImages(endpoint="hpc", root="/i", image_bytes=5, layer_bytes=1024**3))
    assert call("ls", "--infra", "hpc") == 0
    err = capsys.readouterr().err
    assert "No images there." in err
    assert "hpc in /i: images 5 B, kept steps of builds 1.0 GiB" in err


def test_show(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(get=image(READY, replace(FAILED, endpoint="other"), used_by=("tsk_9",), labels={"a": "b"}))
    assert call("show", "climate") == 0
    out = capsys.readouterr().out
    for part in (
        "READY climate  img_000000001", "used by  tsk_9", "a=b", "at hpc  READY  built there", DIGEST, "base image",
        "at other  FAILED", "hint: check the spelling", "base: docker://python:3.12-slim", "  build: |\n    a\n    b\n",
    ):  # fmt: skip
        assert part in out
    assert "\x1b" not in out
    assert call("show", "climate", "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "img_000000001"


def test_logs(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    ended = task(jobs=({"id": "j"},))
    fake = given({"get": ended, "logs": [b"one\n", b"two\n"]}, task_id="tsk_000000001")
    assert call("logs", "climate", "--infra", "hpc") == 0
    assert fake.asked("task_id") == (("climate",), {"endpoint": "hpc"})
    assert capsys.readouterr().out == "one\ntwo\n"
    given({"get": task(TaskState.PENDING, pending_reason="no room")}, task_id="tsk_000000001")
    assert call("logs", "climate", "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"task_id": "tsk_000000001", "text": ""}
    assert "no room" in shown.err


def test_copy_says_how_and_why(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    made = Build(image=image(BUILDING), replica=BUILDING, task_id="tsk_000000001", how="copied", why=("it fits",))
    copied = replace(READY, origin="copied")
    tasks = {"get": task(TaskState.PENDING), "follow": followed(TaskState.SUCCEEDED)}
    fake = given(tasks, copy=made, get=image(copied))
    assert call("copy", "climate", "--to", "hpc") == 0
    err = capsys.readouterr().err
    assert "Copying climate to hpc: it fits" in err
    assert "  time" not in err  # that of the build, elsewhere
    assert fake.asked("copy")[0] == ("climate", "hpc")


def test_share(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    fake = given(share=lambda ref, visibility, project: image(READY, visibility=Visibility(visibility), project="lab"))
    assert call("share", "climate") == 2
    assert call("share", "climate", "--public", "--private") == 2
    assert "--private and --public exclude each other" in capsys.readouterr().err
    assert call("share", "climate", "--public") == 0
    assert capsys.readouterr().out == "climate can be used by every user of this server as ana/climate\n"
    fake.calls.clear()
    assert call("share", "climate", "--project", "lab") == 0
    assert capsys.readouterr().out == "climate can be used by the members of project lab as ana/climate\n"
    assert fake.asked("share")[0] == ("climate", "project")
    assert call("share", "climate", "--private") == 0
    assert "for you alone" in capsys.readouterr().out


def test_rm_names_tasks_and_asks(
    given: Given, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answers = [False, True, True]

    def confirm(question: str, *, yes: bool) -> bool:
        asked.append(question)
        return yes or answers.pop(0)

    monkeypatch.setattr(images, "confirm", confirm)
    used = image(READY, used_by=("tsk_000000001",))
    fake = given({"get": task(TaskState.RUNNING, name="train")}, get=used, remove={"removed": ["hpc"]})
    assert call("rm", "climate") == 1
    shown = capsys.readouterr()
    assert "tsk_000000001  RUNNING  train" in shown.err
    assert "used by 1 task that has not ended" in shown.err
    assert "remove" not in [name for name, *_ in fake.calls]
    assert call("rm", "climate") == 0
    assert fake.asked("remove") == (("img_000000001",), {"endpoint": None, "force": True})
    assert call("rm", "climate", "--json") == 1  # there is nobody to ask
    fake = given(get=image(READY), remove={"removed": ["hpc"]})
    assert call("rm", "climate", "--infra", "hpc") == 0
    assert asked[-1] == "Remove climate at hpc?"
    assert fake.asked("remove")[1] == {"endpoint": "hpc", "force": False}
    answers.append(False)
    assert call("rm", "climate") == 1
    assert "Nothing was removed" in capsys.readouterr().err


def test_bases_and_prune(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"key": "pytorch", "title": "PyTorch", "reference": "docker://pytorch/pytorch", "note": ""}
    given(bases=[base])
    assert call("bases") == 0
    assert "pytorch" in capsys.readouterr().out
    there = EndpointImages(endpoint="hpc", layer_bytes=1024)
    fake = given({"wait": task()}, at=there, prune=task(TaskState.PENDING))
    assert call("prune", "--infra", "hpc") == 1  # nobody to ask
    assert call("prune", "--infra", "hpc", "--json") == 0
    assert fake.asked("prune")[0] == ("hpc",)


def test_export_keeps_what_is_there(given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given()
    target = tmp_path / "x"
    target.write_text("mine")
    assert call("export", "climate", str(target)) == 2
    assert "--force" in capsys.readouterr().err
    assert call("export", "climate", str(tmp_path / "none" / "x")) == 2  # before anything is asked of the endpoint
    assert f"mkdir -p {tmp_path}/none" in capsys.readouterr().err
    assert call("export", "climate", str(tmp_path), "--force") == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_build_view_shows_stages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    view = image_build.BuildView(clock=lambda: now[0])
    view.log(1, b"diamond: stage 2/5 pip: Python packages\nCollecting six\n", 0)
    now[0] = 134.0
    assert view._below(78) == ["███░░░░░░░░░░ 2/5 Python packages · 34s"]
    view.log(1, b"diamond: stage pip kept in 0.1 s\n", 0)
    view.close()
    out = capsys.readouterr().out
    assert "── 2/5 Python packages ──\nCollecting six\n" in out
    assert "   kept from an earlier build\n" in out
    assert issubclass(image_build.BuildView, live.LiveView)


def test_settled_waits_for_the_server_to_read(given: Given) -> None:
    looks = [image(BUILDING), image(BUILDING), image(READY)]
    client: Any = SimpleNamespace(images=Fake(get=lambda ref: looks.pop(0)))
    found = image_build.settled(client, "img_000000001", "hpc", sleep=lambda seconds: None)
    assert found.state is ReplicaState.READY


def test_a_recipe_is_shown_as_its_file_has_it() -> None:
    ref = "bundle:sha256:" + "cd" * 32
    found = Recipe.parse({"base": "host", "files": {"/opt/x": ref}, "labels": {"a": "b"}, "envs": {"A": "x\ny"}})
    lines = image_page.recipe_lines(found)
    assert lines == [
        "base: host", "files:", "  /opt/x: uploaded, sha256:cdcdcdcdcdcd…", "envs:", "  A: x y", "labels:", "  a: b",
    ]  # fmt: skip


def test_reading_needs_no_server(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        image_build.read(str(tmp_path / "none"), image_build.Options())
