"""Charliecloud where it cannot work, and what it leaves in folders. (Real builds: tests/contract.)"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from diamond.agent.builders.base import Builder, BuildProblem, Commands
from diamond.agent.builders.charliecloud import CharliecloudBuilder, _label, _open_up, _set_variables, explain
from diamond.core.recipes import Recipe

BUILDER: Builder = CharliecloudBuilder()


def ch_run(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only program on PATH: it says what the real one says where the test cannot have that."""
    (folder / "ch-run").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "ch-run").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_one_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert BUILDER.version() == ""
    assert "not installed" in BUILDER.problem()


def test_one_that_cannot_install_packages_says_which_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ch_run(tmp_path, "echo 0.31 >&2", monkeypatch)  # it does say so on the second output
    assert BUILDER.version() == "0.31"
    assert "0.32 or newer" in BUILDER.problem()
    ch_run(tmp_path, 'case "$1" in --feature*) exit 1 ;; *) echo 0.38 ;; esac', monkeypatch)
    assert "without seccomp" in BUILDER.problem()


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("ch-run[1125]: error: can't init user+mount namespaces: No space left on device", "max_user_namespaces"),
        ("ch-run[1]: error: can't overlay: --write-fake: Invalid argument", "5.11"),
        ("ch-run[1]: error: the moon is full", "the moon is full"),
        ("", "said nothing"),
    ],
)
def test_complaints_are_explained(said: str, fix: str) -> None:
    assert fix in explain(said)


def test_no_container_without_a_base_for_one() -> None:
    with pytest.raises(BuildProblem, match="`host` is none"):
        BUILDER.check(Recipe.parse({"base": "host"}))
    with pytest.raises(BuildProblem, match=r"cannot build on /x/y\.sif"):
        BUILDER.check(Recipe.parse({"base": "/x/y.sif"}))


def test_a_folder_can_be_read_and_removed_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "image"
    (folder / "closed/in").mkdir(parents=True)
    (folder / "closed/in/secret").write_text("x")
    (folder / "program").write_text("x")
    (folder / "link").symlink_to("/not/there")
    (folder / "program").chmod(0o111)
    (folder / "closed/in/secret").chmod(0)
    (folder / "closed/in").chmod(0)
    (folder / "closed").chmod(0o1700)
    _open_up(folder)
    modes = {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}
    assert modes == {"closed": 0o1755, "closed/in": 0o755, "closed/in/secret": 0o644, "program": 0o755, "link": 0o777}


def test_labels_stand_beside_what_is_known_and_in_no_shared_file(tmp_path: Path) -> None:
    image, layer = tmp_path / "image", tmp_path / "layer.json"
    (image / "ch").mkdir(parents=True)
    layer.write_text(json.dumps({"arch": "amd64", "labels": {"old": "1"}}))
    os.link(layer, image / "ch/metadata.json")
    _label(image, {"purpose": 'a "test"'})
    assert json.loads((image / "ch/metadata.json").read_text()) == {
        "arch": "amd64",
        "labels": {"old": "1", "purpose": 'a "test"'},
    }
    assert json.loads(layer.read_text())["labels"] == {"old": "1"}


@pytest.mark.parametrize("name", ["ch", "ch/metadata.json", "ch/environment"])
def test_no_link_is_followed_out_of_the_image(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    for own in ("metadata.json", "environment"):
        (tmp_path / "outside" / own).write_text('{"secret": 1}')
    link = tmp_path / "image" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "outside" / name.removeprefix("ch").lstrip("/"))
    refused = 0
    try:
        _label(tmp_path / "image", {"a": "b"})
    except BuildProblem:
        refused += 1
    try:
        _set_variables(tmp_path / "image", ["A=b"])
    except BuildProblem:
        refused += 1
    assert refused == (2 if name == "ch" else 1)
    for path in (tmp_path / "outside").iterdir():
        assert path.name in ("metadata.json", "environment")
        assert path.read_text() == '{"secret": 1}'
    copied = [path for path in (tmp_path / "image").rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any("secret" in path.read_text() for path in copied)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "bin").mkdir(parents=True)
    (image / "bin/tool with 'quotes'").write_bytes(b"\0\1")
    (image / "bin/tool with 'quotes'").chmod(0o755)
    (image / "bin/link").symlink_to("../elsewhere")
    os.link(image / "bin/tool with 'quotes'", image / "bin/same")
    BUILDER.save(image, tmp_path / "payload", Commands())
    BUILDER.load(tmp_path / "payload", tmp_path / "again", Commands())
    said = subprocess.run(
        ["diff", "-r", "--no-dereference", str(image), str(tmp_path / "again")], capture_output=True, text=True
    )
    assert (said.returncode, said.stdout) == (0, "")
    assert (tmp_path / "again/bin/same").samefile(tmp_path / "again/bin/tool with 'quotes'")
    assert stat.S_IMODE((tmp_path / "again/bin/same").stat().st_mode) == 0o755
