"""Podman and Docker where they cannot work: what is said of it, and what to do. (Real builds: tests/contract.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diamond.agent.builders.base import Builder, BuildProblem
from diamond.agent.builders.containers import DockerBuilder, PodmanBuilder, explain
from diamond.agent.builders.refs import REF_FILE, Ref
from diamond.core.recipes import Recipe

BUILDERS: list[Builder] = [PodmanBuilder(), DockerBuilder()]


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only program on PATH, beside a shell: it says what the real one says where the test cannot have that."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
def test_one_that_is_not_installed_says_so(builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert builder.version() == ""
    assert builder.problem().startswith(f"{builder.name} is not installed here")


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.name)
def test_no_container_without_a_base_for_one(builder: Builder) -> None:
    with pytest.raises(BuildProblem, match="`host` is none"):
        builder.check(Recipe.parse({"base": "host"}))
    with pytest.raises(BuildProblem, match=r"cannot build on /x/y\.sif"):
        builder.check(Recipe.parse({"base": "/x/y.sif"}))
    builder.check(Recipe.parse({"base": "debian:13", "system": ["git"], "conda": ["numpy"]}))


@pytest.mark.parametrize(
    ("said", "version"),
    [("podman version 4.3.1", "4.3.1"), ("podman version 5.4.2-dev", "5.4.2"), ("nonsense", "")],
)
def test_versions(said: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "podman", f"echo {said}", monkeypatch)
    assert PodmanBuilder().version() == version


def test_one_that_is_too_old_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "podman", "echo podman version 2.1.0", monkeypatch)
    assert PodmanBuilder().problem() == "podman 2.1.0 is too old to build with; version 3.4 or newer is needed"


def test_podman_under_the_name_of_docker_is_not_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "docker", "echo podman version 4.3.1", monkeypatch)
    assert DockerBuilder().version() == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "does not answer"),
        ("permission denied while trying to connect to the Docker daemon socket", "have it added to the group docker"),
    ],
)
def test_an_engine_that_cannot_be_reached(
    error: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        f'case "$1" in --version) echo Docker version 28.2.2, build e6534b4 ;; *) echo "{error}" >&2; exit 1 ;; esac'
    )
    program(tmp_path / "bin", "docker", script, monkeypatch)
    assert DockerBuilder().version() == "28.2.2"
    assert said in DockerBuilder().problem()


# As Podman 4.3 says it on machines where these are so.
COMPLAINTS = {
    "Error: crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted: OCI permission denied": "default_ulimits",
    "Error: OCI runtime error: crun: cgroups in hybrid mode not supported, drop all controllers from cgroupv2": "runc",
    'Error: cannot find newuidmap: exec: "newuidmap": executable file not found in $PATH': "/etc/subuid",
    'time="x" level=error msg="no subuid ranges found for user \\"bob\\" in /etc/subuid"': "/etc/subuid",
    "cannot clone: Operation not permitted\nError: cannot re-exec process": "user.max_user_namespaces",
    "Error: mkdir /var/lib/x: No space left on device": "podman system df",
}


@pytest.mark.parametrize("said", COMPLAINTS)
def test_complaints_are_explained_with_the_fix(said: str) -> None:
    assert COMPLAINTS[said] in explain(said)


def test_a_complaint_nobody_knows_is_passed_on() -> None:
    assert explain("first\nError: the moon is full\n").endswith("Error: the moon is full")


def test_a_ref_is_read_as_it_was_written(tmp_path: Path) -> None:
    ref = Ref(name="localhost/diamond/img_1", id="0" * 64, size_bytes=185_274_510)
    ref.write(tmp_path / REF_FILE)
    assert Ref.read(tmp_path / REF_FILE) == Ref.read(tmp_path) == ref
    assert ref.digest == "sha256:" + "0" * 64


def test_removing_what_is_no_image_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "podman", f"touch {tmp_path}/called", monkeypatch)
    (tmp_path / "image.ref").write_text("not a ref")
    PodmanBuilder().remove(tmp_path / "image.ref")
    PodmanBuilder().remove(tmp_path / "not there")
    assert not os.path.exists(tmp_path / "called")
