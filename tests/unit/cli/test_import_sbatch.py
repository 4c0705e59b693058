"""`diamond import`: what it writes where, and what it never overwrites."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from diamond.cli import main
from diamond.sdk import taskfile

SCRIPT = "#!/bin/bash\n#SBATCH -J train -t 10 -o log\npython train.py\n"


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(["import", *arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = folder / "job.sbatch"
    path.write_text(SCRIPT)
    return path


def test_to_standard_output(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("job.sbatch") == 0
    shown = capsys.readouterr()
    spec = taskfile.parse(shown.out).spec()
    assert (spec.name, spec.workdir, spec.slurm.time_s) == ("train", ".", 600)
    assert "things to check" in shown.err


def test_to_a_file_which_the_sdk_can_load(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("job.sbatch", "-o", "task.yaml") == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "line 2  -o log  Diamond keeps the log" in shown.err
    assert "diamond launch task.yaml --dry-run" in shown.err
    assert taskfile.load("task.yaml").spec().workdir == str(script.parent)


def test_workdir_is_the_scripts_folder_seen_from_the_task_file(script: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    assert call("job.sbatch", "-o", str(tmp_path / "tasks/t.yaml")) == 0
    assert taskfile.load(tmp_path / "tasks/t.yaml").spec().workdir == str(script.parent)


def test_a_home_folder_is_not_sent_along(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(script.parent))
    assert call("job.sbatch") == 0
    out = capsys.readouterr().out
    assert taskfile.parse(out).spec().workdir is None
    assert "no folder is sent along" in out


def test_nothing_is_overwritten_unasked(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = script.with_name("task.yaml")
    other.write_text("mine")
    assert call("job.sbatch", "-o", "task.yaml") == 1
    assert "--force" in capsys.readouterr().err
    assert other.read_text() == "mine"
    assert call("job.sbatch", "-o", "task.yaml", "--force") == 0
    assert other.read_text().startswith("# Imported from job.sbatch")


def test_the_script_itself_is_never_overwritten(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.with_name("link").symlink_to(script)
    for name in ("job.sbatch", "link"):
        assert call("job.sbatch", "-o", name, "--force") == 2
        assert "the script itself" in capsys.readouterr().err
    assert script.read_text() == SCRIPT


def test_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("job.sbatch", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["task"]["name"] == "train"
    assert {"line": 2, "source": "-J train", "kind": "kept", "text": "name"} in said["notes"]
    assert said["written"] is None
    assert said["yaml"].startswith("# Imported")


def test_from_standard_input(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"#!/bin/sh\ntrue\n")))
    assert call("-") == 0
    assert "Imported from standard input" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "part"), [("nope", "No such file"), (".", "Is a directory"), ("binary", "not a text file")]
)
def test_what_cannot_be_read_is_said(script: Path, capsys: pytest.CaptureFixture[str], name: str, part: str) -> None:
    script.with_name("binary").write_bytes(b"\x7fELF\0")
    assert call(name) == 1
    assert part in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_said(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("job.sbatch", "-o", "no/where.yaml") == 2
    assert call("job.sbatch", "-o", "no/where.yaml", "--force") == 2
    assert "no/where.yaml" in capsys.readouterr().err
