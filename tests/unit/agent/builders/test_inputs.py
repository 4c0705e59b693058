"""A recipe's text as files: byte for byte, and nothing from outside."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from diamond.agent.builders.base import BuildProblem
from diamond.agent.builders.inputs import constraints, pinned_conda, pinned_system, write_inputs
from diamond.core.errors import InvalidInput
from diamond.core.images import ImageWork, Lock, Package
from diamond.core.recipes import Recipe

REF = "bundle:sha256:" + "0" * 64
HOSTILE = 'it\'s "q"\n$(touch pwned) `id` \\ \t é 名\r\n\nEOF\n%post\n'


def written(tmp_path: Path, recipe: Recipe, **work: object) -> Path:
    (tmp_path / "work").mkdir(exist_ok=True)
    target = tmp_path / "inputs"
    order = ImageWork(action="build", image_id="img_00000001", **work)  # type: ignore[arg-type]
    write_inputs(target, recipe, order, tmp_path / "work")
    return target


def test_every_file_is_there_if_need_be_empty(tmp_path: Path) -> None:
    inputs = written(tmp_path, Recipe.parse({"base": "host"}))
    assert {path.name for path in inputs.iterdir()} == {
        *("system.txt", "conda.txt", "channels.txt", "requirements.txt", "constraints.txt", "env.sh", "commands.sh"),
        *("test.sh", "runner.sh", "files"),
    }
    assert (inputs / "commands.sh").read_bytes() == b""
    assert list((inputs / "files").iterdir()) == []


def test_text_is_not_changed(tmp_path: Path) -> None:
    raw = {"base": "host", "build": HOSTILE, "test": HOSTILE, "envs": {"A": HOSTILE, "EMPTY": ""}}
    inputs = written(tmp_path, Recipe.parse(raw))
    assert (inputs / "commands.sh").read_bytes() == (inputs / "test.sh").read_bytes() == HOSTILE.encode()
    for shell in ("sh", "bash"):
        argv = [shell, "-c", '. "$1"; printf "%s|%s" "$A" "${EMPTY-unset}"', "sh", str(inputs / "env.sh")]
        assert subprocess.run(argv, capture_output=True, check=True, cwd=tmp_path).stdout == f"{HOSTILE}|".encode()
    assert not (tmp_path / "pwned").exists()


def test_files_go_to_their_places(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "in" / "tree" / "sub").mkdir(parents=True)
    (work / "in" / "tree" / "sub" / "program").write_text("#!/bin/sh\n")
    (work / "in" / "tree" / "sub" / "program").chmod(0o755)
    (work / "in" / "tree" / "link").symlink_to("sub/program")
    (work / "in" / "one").write_bytes(b"\0\xff")
    recipe = Recipe.parse({"base": "host", "files": {"/opt/my tree": REF, "/opt/my tree/more/one": REF}})
    inputs = written(
        tmp_path, recipe, files={"/opt/my tree": "in/tree", "/opt/my tree/more/one": "in/one"}
    )  # fmt: skip
    tree = inputs / "files" / "opt" / "my tree"
    assert os.access(tree / "sub" / "program", os.X_OK)
    assert os.readlink(tree / "link") == "sub/program"
    assert (tree / "more" / "one").read_bytes() == b"\0\xff"


@pytest.mark.parametrize("leads", ["/etc/passwd", "../../secret", "sub/../../../secret"])
def test_links_that_lead_out_are_refused(tmp_path: Path, leads: str) -> None:
    tree = tmp_path / "work" / "tree" / "sub"
    tree.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tree / "link").symlink_to(leads)
    with pytest.raises(BuildProblem, match="leads out"):
        written(tmp_path, Recipe.parse({"base": "host"}), files={"/opt/tree": "tree"})


def test_a_link_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "work" / "alone").symlink_to(tmp_path / "secret")
    with pytest.raises(BuildProblem, match="is a link"):
        written(tmp_path, Recipe.parse({"base": "host"}), files={"/opt/x": "alone"})


@pytest.mark.parametrize(
    ("target", "source"), [("/opt/../../x", "in"), ("/opt/x", "../in"), ("/opt/x", "/etc/passwd"), ("/", "in")]
)
def test_paths_that_lead_out_are_refused(tmp_path: Path, target: str, source: str) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "in").write_text("x")
    with pytest.raises((InvalidInput, BuildProblem)):
        written(tmp_path, Recipe.parse({"base": "host"}), files={target: source})
    assert not (tmp_path / "x").exists()


def test_a_file_that_did_not_arrive(tmp_path: Path) -> None:
    with pytest.raises(BuildProblem, match="did not arrive"):
        written(tmp_path, Recipe.parse({"base": "host"}), files={"/opt/x": "in"})


def test_a_lock_gives_exact_versions() -> None:
    lock = Lock(
        packages=(
            Package(kind="conda", name="numpy", version="2.3.1"),
            Package(kind="deb", name="git", version="1:2.47.3-0"),
            Package(kind="pip", name="Six_Pack", version="1.0"),
            Package(kind="pip", name="here", version="2.0"),
        )
    )
    recipe = Recipe.parse(
        {
            "base": "host",
            "system": ["git", "tree", "make=4.3"],
            "conda": ["numpy>=2", "scipy"],
            "pip": ["six-pack", "here @ https://example.org/here.whl"],
            "constraints": ["other<3"],
        }
    )
    assert pinned_system(recipe, lock) == ["git=1:2.47.3-0", "tree", "make=4.3"]
    assert pinned_conda(recipe, lock) == ["numpy=2.3.1", "scipy"]
    assert constraints(recipe, lock) == ["other<3", "Six_Pack==1.0"]
    assert constraints(Recipe.parse({"base": "host"}), lock) == []


@pytest.mark.parametrize("version", ["1.0\n--index-url=https://example.org", "--root=/x", "1.0 ; x", ""])
def test_a_lock_brings_nothing_but_names_and_versions(version: str) -> None:
    recipe = Recipe.parse({"base": "docker://debian:13", "system": ["git"], "conda": ["git"], "pip": ["git"]})
    for kind, read in (("deb", pinned_system), ("conda", pinned_conda), ("pip", constraints)):
        with pytest.raises((BuildProblem, InvalidInput)):
            read(recipe, Lock(packages=(Package(kind=kind, name="git", version=version),)))
