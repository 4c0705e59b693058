"""The Apptainer builder without Apptainer: what it says of a machine that lacks something. Builds: see the contract."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from diamond.agent.builders import apptainer
from diamond.agent.builders.apptainer import ApptainerBuilder
from diamond.agent.builders.base import BuildProblem
from diamond.core.recipes import Recipe


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, to be filled."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(apptainer, "_SBIN", ())
    apptainer._version.cache_clear()
    return folder


def put(folder: Path, name: str, text: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_what_is_missing_is_named_with_the_fix(programs: Path) -> None:
    builder = ApptainerBuilder()
    assert "module load apptainer" in builder.problem()
    assert builder.version() == ""
    apptainer._version.cache_clear()
    put(programs, "apptainer", "echo apptainer version 1.0.3-1.el8")
    assert "Apptainer 1.0.3 is too old" in builder.problem()
    apptainer._version.cache_clear()
    put(programs, "apptainer", "echo apptainer version 1.4.5")
    assert builder.version() == "1.4.5"
    assert "mksquashfs and unsquashfs" in builder.problem()
    put(programs, "mksquashfs")
    put(programs, "unsquashfs")
    assert builder.problem() == ""


def test_machines_without_user_namespaces(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    for name in ("self/ns", "sys/user", "sys/kernel"):
        (proc / name).mkdir(parents=True)
    assert apptainer._no_namespaces(proc) == "the kernel has none"
    (proc / "self/ns/user").touch()
    assert apptainer._no_namespaces(proc) == ""
    (proc / "sys/kernel/unprivileged_userns_clone").write_text("0\n")
    assert "unprivileged_userns_clone is 0" in apptainer._no_namespaces(proc)
    (proc / "sys/user/max_user_namespaces").write_text("0\n")
    assert "max_user_namespaces is 0" in apptainer._no_namespaces(proc)


def test_the_endpoints_own_system_is_no_base() -> None:
    with pytest.raises(BuildProblem, match="no base for a container"):
        ApptainerBuilder().check(Recipe(base="host"))


@pytest.mark.parametrize("path", ["/plain", "/with,comma", '/with "quotes"', "/with:colon", "/it's"])
def test_paths_of_every_kind_are_mounted(path: str) -> None:
    option, text = apptainer._bind(Path(path), path, read_only=True)
    assert option == "--mount"
    assert next(csv.reader([text])) == ["type=bind", f"source={path}", f"destination={path}", "ro"]


def test_an_image_is_sent_and_taken_without_a_copy_where_possible(tmp_path: Path) -> None:
    (tmp_path / "image.sif").write_bytes(b"image")
    builder = ApptainerBuilder()
    builder.save(tmp_path / "image.sif", tmp_path / "payload", None)  # type: ignore[arg-type]
    assert os.path.samefile(tmp_path / "image.sif", tmp_path / "payload")
    builder.load(tmp_path / "payload", tmp_path / "loaded.sif", None)  # type: ignore[arg-type]
    assert (tmp_path / "loaded.sif").read_bytes() == b"image"
    assert not list(tmp_path.glob("*.part"))
