from __future__ import annotations

import os
from pathlib import Path

import pytest

from diamond.agent.outputs import find


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    for name in ("model.pt", "a/one.txt", "a/two.log", "a/deep/er/three.txt", ".hidden/x", "sp ace/[odd].txt"):
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "secret").write_text("secret")
    return work


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("model.pt", ["model.pt"]),
        ("*.pt", ["model.pt"]),
        ("*.txt", []),
        ("a", ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]),
        ("a/", ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]),
        ("./a/*.txt", ["a/one.txt"]),
        ("**/*.txt", ["a/deep/er/three.txt", "a/one.txt", "sp ace/[odd].txt"]),
        ("a/**", ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]),
        ("a/**/three.txt", ["a/deep/er/three.txt"]),
        ("?/one.txt", ["a/one.txt"]),
        ("[ab]/*.log", ["a/two.log"]),
        (".hidden/x", [".hidden/x"]),
        ("sp*/[[]odd].txt", ["sp ace/[odd].txt"]),
    ],
)
def test_patterns(work: Path, pattern: str, paths: list[str]) -> None:
    found = find(work, (pattern,))
    assert list(found.files) == paths
    assert bool(found.notes) == (not paths)


def test_overlapping_patterns_name_a_file_once(work: Path) -> None:
    found = find(work, ("a/one.txt", "a", "*/one.txt"))
    assert list(found.files) == ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]
    assert not found.notes


@pytest.mark.parametrize("pattern", ["link", "*", "folder/secret", "folder", "folder/*", "**"])
def test_nothing_outside_the_work_directory(work: Path, pattern: str) -> None:
    (work / "link").symlink_to("../secret")
    (work / "folder").symlink_to("..")
    found = find(work, (pattern,))
    assert not any("secret" in real.read_text() for real in found.files.values())
    assert not any(path.startswith("folder") for path in found.files)


@pytest.mark.parametrize("pattern", ["../secret", "/etc/passwd", "~/x", "a/../../secret", ""])
def test_patterns_that_lead_outside_are_noted(work: Path, pattern: str) -> None:
    found = find(work, (pattern, "model.pt"))
    assert list(found.files) == ["model.pt"]
    assert len(found.notes) == 1


def test_links_inside_are_followed_and_loops_end(work: Path) -> None:
    (work / "latest").symlink_to("a")
    (work / "a/loop").symlink_to("..")
    (work / "best.pt").symlink_to("model.pt")
    found = find(work, ("latest", "best.pt", "**/*.txt"))
    assert found.files["best.pt"].name == "model.pt"
    assert "latest/one.txt" in found.files


def test_what_is_no_file_is_left_out(work: Path) -> None:
    os.mkfifo(work / "pipe")
    (work / "dangling").symlink_to("nowhere")
    assert not find(work, ("pipe", "dangling", "*")).files.keys() & {"pipe", "dangling"}
