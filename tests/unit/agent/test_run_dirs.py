from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import run_dirs
from diamond.agent.run_dirs import remove, remove_old


def deep(folder: Path, levels: int) -> None:
    """A tree deeper than Python recurses, and longer than any path may be."""
    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(levels):
            os.mkdir("folder")
            os.chdir("folder")
        Path("file").touch()
    finally:
        os.chdir(before)


def test_read_only_folders_are_removed(shared: Path, as_nobody: Callable[..., Any]) -> None:
    def try_it() -> list[str]:
        for name, mode in (("a", 0o555), ("b", 0o000), ("c", 0o700)):
            sub = shared / "jobs" / name / "work/pkg/sub"
            sub.mkdir(parents=True)
            (sub / "inner").mkdir()
            (sub / "file").touch()
            sub.chmod(mode)
            sub.parent.chmod(mode)
            os.utime(shared / "jobs" / name, (1, 1))
        remove_old(shared / "jobs", {"c"}, 1.0)
        return [path.name for path in (shared / "jobs").iterdir()]

    assert as_nobody(try_it) == ["c"]


def test_only_old_ones_nobody_needs(tmp_path: Path) -> None:
    for name in ("old", "kept", "new"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1, 1) if name != "new" else None)
    remove_old(tmp_path, {"kept"}, 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new"]


def test_trees_without_end(tmp_path: Path) -> None:
    deep(tmp_path / "deep", 3000)
    assert remove(tmp_path / "deep")
    assert not (tmp_path / "deep").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "file").touch()
    outside.chmod(0o500)
    (folder / "in").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "in/link").symlink_to(outside)
    os.mkfifo(folder / "in/pipe")
    (folder / ".removing-0").touch()
    (folder / "in/x/y").mkdir(parents=True)
    assert remove(folder) and not folder.exists()
    assert (outside / "file").exists() and outside.stat().st_mode & 0o777 == 0o500
    (tmp_path / "link").symlink_to(outside)
    assert remove(tmp_path / "link") and remove(tmp_path / "link")
    assert (outside / "file").exists()


def test_what_remains_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job/work").mkdir(parents=True)
    (tmp_path / "job/work/held").touch()
    real = os.unlink

    def unlink(path: Any, **options: Any) -> None:
        if path == "held":
            raise PermissionError(1, "Operation not permitted", path)
        real(path, **options)

    monkeypatch.setattr(run_dirs.os, "unlink", unlink)
    monkeypatch.setattr(logging.getLogger("diamond"), "propagate", True)
    assert not remove(tmp_path / "job")
    assert "'held': Operation not permitted" in caplog.text
