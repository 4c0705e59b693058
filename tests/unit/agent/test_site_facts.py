"""What an endpoint has beside its scheduler."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from diamond.agent import site_facts
from diamond.agent.site_facts import SiteFacts, SiteWatch, discover, recognise, runtimes
from diamond.core import sites
from diamond.core.recipes import BUILDERS


@pytest.fixture
def programs_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but a shell; programs put there are run for real."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_runtimes_and_their_versions(programs_on_path: Path) -> None:
    assert runtimes() == ()
    put(programs_on_path, "apptainer", "echo apptainer version 1.4.5-1")
    put(programs_on_path, "singularity", "echo apptainer version 1.4.5-1")  # the same under its old name
    put(programs_on_path, "ch-run", "echo 0.31 >&2")
    put(programs_on_path, "podman", "echo podman version 4.9.4-rhel")
    put(programs_on_path, "docker", 'echo "Cannot connect to the Docker daemon" >&2; exit 1')
    put(programs_on_path, "enroot", "echo 3.4.1")
    put(programs_on_path, "shifter", "echo FAILED to parse; exit 1")
    assert runtimes() == ("apptainer 1.4.5-1", "charliecloud 0.31", "podman 4.9.4-rhel", "enroot 3.4.1")


def test_a_singularity_of_its_own_and_a_docker_that_answers(programs_on_path: Path) -> None:
    put(programs_on_path, "singularity", "echo singularity-ce version 4.1.0")
    put(programs_on_path, "docker", 'test "$1 $2" = "version --format" && echo 27.3.1')
    assert runtimes() == ("singularity 4.1.0", "docker 27.3.1")


def test_a_runtime_that_hangs_is_left_out(programs_on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_facts.programs.ask_all, "__kwdefaults__", {"timeout_s": 0.5})
    put(programs_on_path, "apptainer", "echo apptainer version 1.3.0")
    put(programs_on_path, "podman", "exec /bin/sleep 60")
    began = time.monotonic()
    assert runtimes() == ("apptainer 1.3.0",)
    assert time.monotonic() - began < 5


def test_what_only_a_module_brings(programs_on_path: Path) -> None:
    vista, delta = sites.find("vista"), sites.find("delta")
    assert runtimes(vista) == ("apptainer (module load tacc-apptainer, in jobs only)",)
    assert runtimes(delta) == ()
    put(programs_on_path, "apptainer", "echo apptainer version 1.3.0")
    assert runtimes(vista) == ("apptainer 1.3.0",)


def test_recognised_by_full_name_before_weaker_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "login1")
    monkeypatch.setattr("socket.getfqdn", lambda name="": "login1.vista.tacc.utexas.edu")
    found = recognise({"NERSC_HOST": "perlmutter"})
    assert found is sites.find("vista")
    monkeypatch.setattr("socket.getfqdn", lambda name="": "login1")
    assert recognise({"NERSC_HOST": "perlmutter"}) is sites.find("perlmutter")
    assert recognise({}) is None


def test_discover_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, scratch = tmp_path / "u", tmp_path / "scratch"
    (home / "agent" / "jobs").mkdir(parents=True)
    scratch.mkdir()
    monkeypatch.setenv("HOME", str(home))
    found = discover(home / "agent", environ={"SCRATCH": str(scratch), "HOME": str(home)})
    places = {each.role: each.path for each in found.filesystems if each.path.startswith(str(tmp_path))}
    assert places == {"home": str(home), "scratch": str(scratch)}
    assert all(each.total_bytes > 0 and each.kind for each in found.filesystems)
    assert (found.site, found.site_name, found.warnings) == ("", "", ())
    elsewhere = tmp_path / "runs"
    elsewhere.mkdir()
    found = discover(home / "agent", run_root=elsewhere, environ={})
    assert ("runs", str(elsewhere)) in [(each.role, each.path) for each in found.filesystems]


def test_discover_at_a_known_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda name="": "login3.stampede3.tacc.utexas.edu")
    monkeypatch.setattr("socket.gethostname", lambda: "login3")
    work = tmp_path / "work"
    work.mkdir()
    found = discover(tmp_path, environ={"WORK": str(work), "SCRATCH": "/no/such/folder"})
    assert (found.site, found.site_name) == ("stampede3", "Stampede3, Texas Advanced Computing Center (TACC)")
    assert found.modules == ("python", "tacc-apptainer")
    assert ("project", str(work)) in [(each.role, each.path) for each in found.filesystems]
    assert "/no/such/folder" not in [each.path for each in found.filesystems]


def test_a_watch_tells_of_changes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([SiteFacts(site="a"), SiteFacts(site="a"), SiteFacts(site="a", warnings=("/x does not answer",))])
    last = SiteFacts(site="b")
    told: list[SiteFacts] = []
    done = threading.Event()

    def look(home: Path, name: str, *, run_root: Path | None, image_root: Path | None) -> SiteFacts:
        assert (home, name, run_root, image_root) == (tmp_path, "alpha", None, tmp_path / "images")
        found = next(looks, last)
        if found.warnings:
            raise RuntimeError("a strange machine")
        return found

    def change() -> None:
        told.append(watch.facts)
        if len(told) == 2:
            done.set()

    monkeypatch.setattr(site_facts, "discover", look)
    images = tmp_path / "images"
    watch = SiteWatch(
        tmp_path, cluster_name=lambda: "alpha", image_root=lambda: images, on_change=change, refresh_s=0.01
    )
    assert watch.facts == SiteFacts()
    watch.start()
    assert done.wait(10)
    watch.close()
    assert told == [SiteFacts(site="a"), replace(last)]


def test_a_watch_looks_again_when_asked(tmp_path: Path) -> None:
    looked = threading.Event()
    watch = SiteWatch(tmp_path, refresh_s=600, on_change=looked.set)
    watch.start()
    assert looked.wait(60)
    assert (watch.facts.image_bytes, watch.facts.layer_bytes) == (0, 0)
    looked.clear()
    image, layer = tmp_path / "images/store/img_00000001", tmp_path / "images/layers/venv/0123456789abcdef"
    for folder in (image, layer):
        folder.mkdir(parents=True)
    (image / "image.json").write_text('{"size_bytes": 70}')
    (layer / "layer.json").write_text('{"size_bytes": 11}')
    watch.look_again()
    assert looked.wait(60)
    watch.close()
    assert (watch.facts.image_bytes, watch.facts.layer_bytes) == (70, 11)
    assert "venv" in watch.facts.builders
    assert {*watch.facts.builders, *watch.facts.builder_problems} == set(BUILDERS), (
        "every way works, or it says why not"
    )
    assert not set(watch.facts.builders) & set(watch.facts.builder_problems)


def test_a_watch_ends_when_told(tmp_path: Path) -> None:
    watch = SiteWatch(tmp_path, refresh_s=60)
    watch.start()
    watch.close()
    watch._thread.join(20)
    assert not watch._thread.is_alive()
    assert os.getpid()
