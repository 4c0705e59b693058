"""Images as a user of the command line has them, against a real service, with virtual environments on this machine.

Packages come from a folder of wheels made here, by the endpoint's own settings of pip: no network is needed.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import Conflict
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually
from testing.wheels import make_wheel

RECIPE = """\
name: tools
base: host
requirements: requirements.txt
envs: {GREETING: "it's $HOME", WHO: recipe}
files: {/opt/data.txt: data.txt}
build: |
  echo built-once
test: python -c "import tinytool; assert tinytool.VERSION == '1.2'"
labels: {purpose: test}
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where pip finds packages, for every agent that starts in this module."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.1", "1.2", "2.0"):
        make_wheel(folder, "tinytool", version)
    make_wheel(folder, "othertool", "3.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        yield folder


@pytest.fixture(scope="module")
def service(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("images")) as running:
        wait_for_builders(running)
        yield running


def wait_for_builders(service: Service) -> None:
    """An agent is online before it has found out what its machine can do."""

    def known() -> bool:
        with service.client() as client:
            facts = client.endpoints.get("local").facts
            return facts is not None and "venv" in facts.builders

    eventually(known, within_s=60, what="the agent knows its builders")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "requirements.txt").write_text("tinytool  # small\n-c limits.txt\n")
    (tmp_path / "limits.txt").write_text("tinytool<2\nothertool<1\n")
    (tmp_path / "data.txt").write_text("brought along\n")
    (tmp_path / "image.yaml").write_text(RECIPE)
    return tmp_path


def run(service: Service, *argv: str, code: int = 0, stdin: str | None = None) -> str:
    done = service.diamond(*argv, timeout_s=180, stdin=stdin)
    assert done.returncode == code, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def run_json(service: Service, *argv: str) -> Any:
    done = service.diamond(*argv, "--json", timeout_s=180)
    assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def replica(image: dict[str, Any]) -> dict[str, Any]:
    (found,) = image["replicas"]
    return dict(found)


def test_the_tour(service: Service, folder: Path, tmp_path_factory: pytest.TempPathFactory, index: Path) -> None:
    plan = run(service, "image", "build", str(folder), "--dry-run")
    assert "with venv" in plan
    assert "Python packages" in plan
    out = run(service, "image", "build", str(folder))
    assert "diamond: stage " in out
    assert "READY tools at local" in out
    assert "built-once" in out

    began = time.monotonic()
    again = run(service, "image", "build", str(folder))
    assert time.monotonic() - began < 2
    assert "unchanged since it was built" in again

    shown = run_json(service, "image", "show", "tools")
    facts = replica(shown)["facts"]
    assert replica(shown)["state"] == "READY"
    assert facts["digest"].startswith("sha256:")
    assert shown["labels"] == {"purpose": "test"}
    page = run(service, "image", "show", "tools")
    assert facts["digest"] in page
    assert "tinytool" in page
    assert "tools" in run(service, "image", "ls")
    assert "images " in run(service, "image", "ls", "--infra", "local")
    log = run(service, "image", "logs", "tools")
    assert "built-once" in log

    task = folder / "task.yaml"
    task.write_text(
        "name: in-it\nenvs: {WHO: task}\nrun: |\n"
        '  python -c \'import tinytool, os; print(tinytool.VERSION, os.environ["GREETING"], os.environ["WHO"])\'\n'
        '  cat "$DIAMOND_IMAGE_ROOT/opt/data.txt"\n'
    )
    out = run(service, "launch", str(task), "--image", "tools")
    assert "1.2 it's $HOME task" in out
    assert "brought along" in out
    assert "tools" in run(service, "show", "in-it")
    dry = run(service, "launch", str(task), "--image", f"tools@{facts['digest']}", "--dry-run")
    assert "inside.sh" in dry
    assert "ready there" in dry
    refused = run(service, "launch", str(task), "--image", "toosl", code=1)
    assert "did you mean tools" in refused
    out = run(service, "image", "test", "tools", "python -c 'import tinytool; print(tinytool.__file__)'")
    assert "tinytool.py" in out

    assert "tools" in run(service, "image", "share", "tools", "--public")
    assert run_json(service, "image", "show", "tools")["visibility"] == "public"

    export = folder / "tools.diamond"
    run(service, "image", "export", "tools", str(export))
    assert "is there already" in run(service, "image", "export", "tools", str(export), code=2)
    with Service(tmp_path_factory.mktemp("elsewhere")) as other:
        wait_for_builders(other)
        run(other, "image", "import", str(export), "--name", "theirs")
        out = run(other, "launch", str(task), "--image", "theirs")
        assert "1.2 it's $HOME task" in out
        assert "brought along" in out
        found = run_json(other, "image", "show", "theirs")
        assert replica(found)["origin"] in ("imported", "rebuilt")
        assert found["recipe"]["files"] == shown["recipe"]["files"]

    data = bytearray(export.read_bytes())
    data[-20_000] ^= 1
    export.write_bytes(data)
    assert "other contents than its SHA-256" in run(service, "image", "import", str(export), "--name", "bad", code=1)

    sleeper = folder / "sleeper.yaml"
    sleeper.write_text("name: sleeper\nrun: sleep 600\nresources: {image_id: tools}\n")
    run(service, "launch", str(sleeper), "-d")
    service.wait_for_task("sleeper", TaskState.RUNNING)
    refused = run(service, "image", "rm", "tools", "-y", code=1)
    assert run_json(service, "show", "sleeper")["id"] in refused
    run(service, "stop", "sleeper")
    service.wait_for_task("sleeper", TaskState.CANCELLED)
    run(service, "image", "rm", "tools", "-y")
    assert "there is no image" in run(service, "image", "show", "tools", code=1)
    eventually(lambda: not Path(facts["path"]).exists(), what="its files are gone")


def test_a_changed_last_step_keeps_the_first_ones(service: Service, folder: Path) -> None:
    recipe = folder / "image.yaml"
    recipe.write_text(RECIPE.replace("name: tools", "name: layers"))
    run(service, "image", "build", str(recipe))
    recipe.write_text(RECIPE.replace("name: tools", "name: layers").replace("built-once", "built-twice"))
    out = run(service, "image", "build", str(recipe))
    assert "diamond: stage pip kept" in out
    assert "built-twice" in out
    assert "kept from earlier builds" in out
    out = run(service, "image", "build", str(recipe), "--fresh")
    assert "diamond: stage pip done" in out
    run(service, "image", "rm", "layers", "-y")
    run(service, "image", "prune", "--infra", "local", "-y")


def test_a_build_that_fails_says_why(service: Service, tmp_path: Path) -> None:
    options = ("--base", "host", "--name", "broken")
    out = run(service, "image", "build", *options, "--pip", "no-such-package-anywhere==9", code=1)
    assert "FAILED broken at local" in out
    assert "stage pip" in out
    assert "no-such-package-anywhere" in out
    assert "hint:" in out
    found = run_json(service, "image", "show", "broken")
    assert replica(found)["failure"]["stage"] == "pip"
    assert replica(found)["facts"] is None
    task = tmp_path / "t.yaml"
    task.write_text("run: echo never\nresources: {image_id: broken}\n")
    out = run(service, "launch", str(task), code=1)
    assert "never" not in out.replace("echo never", "")
    assert "no-such-package-anywhere" in out
    recipe = tmp_path / "test.yaml"
    recipe.write_text("base: host\nbuild: |\n  true\n  false # here\ntest: python -c 1\n")
    out = run(service, "image", "build", str(recipe), code=1)
    assert "stage commands" in out
    assert "false" in out
    recipe.write_text('base: host\ntest: python -c "import nothing_like_this"\n')
    out = run(service, "image", "build", str(recipe), code=1)
    assert "stage test" in out


def test_a_task_that_describes_its_image(service: Service, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("othertool\n")
    task = tmp_path / "inline.yaml"
    task.write_text(
        "name: inline\nimage:\n  base: host\n  requirements: requirements.txt\n"
        "run: python -c 'import othertool; print(\"it has\", othertool.VERSION)'\n"
    )
    out = run(service, "launch", str(task))
    assert "it has 3.0" in out
    began = time.monotonic()
    assert "it has 3.0" in run(service, "launch", str(task))
    assert time.monotonic() - began < 20
    task.write_text("run: x\nimage: {base: host}\nresources: {image_id: tools}\n")
    assert "names an image and describes one" in run(service, "launch", str(task), code=1)


def test_detaching_and_json(service: Service, folder: Path) -> None:
    (folder / "image.yaml").write_text(RECIPE.replace("name: tools", "name: away").replace("echo", "sleep 2; echo"))
    out = run(service, "image", "build", str(folder), "-d")
    assert out.startswith("img_")
    out = run(service, "image", "logs", "-f", "away")
    assert "built-once" in out
    eventually(lambda: run_json(service, "image", "show", "away")["replicas"][0]["state"] == "READY", what="ready")
    (folder / "image.yaml").write_text(RECIPE.replace("name: tools", "name: lines"))
    done = service.diamond("image", "build", str(folder), "--json", timeout_s=180)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["type"] == "image"
    assert lines[-1]["image"]["replicas"][0]["state"] == "READY"
    assert run_json(service, "image", "build", str(folder))["cached"] is True
    assert "python3 -m venv" in run(service, "image", "definition", "lines")
    assert any(each["key"] == "pytorch" for each in run_json(service, "image", "bases")["bases"])


def test_a_terminal_sees_stages(service: Service, folder: Path) -> None:
    (folder / "image.yaml").write_text(RECIPE.replace("name: tools", "name: seen"))
    main_end, other_end = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "diamond.cli", "image", "build", str(folder), "--fresh"],
        env={**service.env, "TERM": "xterm-256color", "COLUMNS": "100"},
        stdin=other_end, stdout=other_end, stderr=other_end,
    )  # fmt: skip
    os.close(other_end)
    shown = b""
    try:
        while piece := os.read(main_end, 65536):
            shown += piece
    except OSError:
        pass  # the terminal is gone with its last user
    assert child.wait(timeout=30) == 0
    text = shown.decode(errors="replace")
    assert "Python packages ──" in text
    assert "diamond: stage" not in text
    assert "READY" in text


def test_from_python_with_a_draft(service: Service, tmp_path: Path) -> None:
    """The same from a program: a recipe described in steps, built, waited for, and used."""
    (tmp_path / "tool.txt").write_text("from python\n")
    with service.client() as client:
        drafts = client.images.drafts
        draft = drafts.create()
        for step, contents in (
            ("endpoint", {"endpoint": "local"}),
            ("base", {"name": "drafted", "base": "host"}),
            ("dependencies", {"pip": ["--pre"]}),
            ("envs", {"envs": {"A": "1"}}),
            ("commands", {"test": "python -c 'import tinytool'"}),
        ):
            draft = drafts.save(draft.id, step, contents, version=draft.version)
        wrong = next(step for step in draft.steps if step.name == "dependencies")
        assert "option of pip" in wrong.errors[0].message
        with pytest.raises(Conflict):
            drafts.save(draft.id, "dependencies", {"pip": ["tinytool"]}, version=1)
        draft = drafts.save(draft.id, "dependencies", {"pip": ["tinytool"]}, version=draft.version)
        draft = drafts.get(draft.id)
        assert draft.plan is not None and "venv" in draft.plan.definition
        built = drafts.submit(draft.id, version=draft.version)
        image = client.images.wait(built.image.id, timeout_s=120)
        assert image.state == "READY"
        assert [stage.name for stage in client.images.stages("drafted")] == ["base", "pip", "pack", "test"]
        assert client.images.progress("drafted").state == "READY"
        lock = json.loads(client.images.file("drafted", "lock.json"))
        assert {"kind": "pip", "name": "tinytool", "version": "2.0"} in lock["packages"]
        assert json.loads(client.images.file("drafted", "sbom.cdx.json"))["bomFormat"] == "CycloneDX"
        recipe = {"base": "image:drafted", "name": "on-top", "files": {"/opt/tool.txt": str(tmp_path / "tool.txt")}}
        assert client.images.wait(client.images.build(recipe).image.id, timeout_s=120).state == "READY"
        task = client.tasks.create(
            {"run": 'cat "$DIAMOND_IMAGE_ROOT/opt/tool.txt"; python -c "import tinytool; print(tinytool.VERSION)"',
             "resources": {"image_id": "on-top"}}
        )  # fmt: skip
        assert client.tasks.wait(task.id, timeout_s=60).state == "SUCCEEDED"
        assert b"".join(client.tasks.logs(task.id)) == b"from python\n2.0\n"
        drafts.remove(draft.id)
        assert draft.id not in [each.id for each in drafts.list()]
