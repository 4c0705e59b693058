"""`diamond template`: what comes with Diamond, and saving one's own, by the real command against a real service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("templates") / "home") as running:
        yield running


def run(service: Service, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["diamond", *words], env=service.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_template_as_a_task_file_can_be_launched(service: Service, tmp_path: Path) -> None:
    listed = run(service, "template", "ls").stdout
    assert "parameter-sweep" in listed and "Diamond" in listed
    text = run(service, "template", "show", "parameter-sweep").stdout
    assert text.startswith("# Every combination")
    file = tmp_path / "task.yaml"
    file.write_text(text.replace("0.01,0.03,0.1,0.3", "0.1"))
    done = run(service, "launch", str(file))
    assert "best:" in done.stdout


def test_saved_with_its_files_and_removed(service: Service, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("forty-two\n")
    file = tmp_path / "task.yaml"
    file.write_text("workdir: .\nrun: cat data.txt\n")
    made = json.loads(run(service, "template", "save", str(file), "--name", "mine", "--json").stdout)
    assert made["spec"]["workdir"].startswith("bundle:sha256:")
    again = run(service, "template", "save", str(file), "--name", "mine", code=1)
    assert "already" in again.stderr
    (tmp_path / "other.yaml").write_text(run(service, "template", "show", "mine").stdout)
    assert "forty-two" in run(service, "launch", str(tmp_path / "other.yaml")).stdout
    assert "mine" in run(service, "template", "ls", "--search", "MINE").stdout
    assert "-y removes" in run(service, "template", "rm", "mine", code=1).stderr
    run(service, "template", "rm", "mine", "-y")
    assert json.loads(run(service, "template", "ls", "--search", "mine", "--json").stdout) == {"templates": []}
    assert "comes with Diamond" in run(service, "template", "rm", "fine-tune", "-y", code=1).stderr
