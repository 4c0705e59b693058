"""The driver without a container: what it says, where it works, what it leaves. A venv serves as the real builder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.builders import __main__ as program
from diamond.agent.builders import build
from diamond.agent.builders.base import BuildProblem, CommandFailed, Commands
from diamond.agent.builders.build import ImageJob
from diamond.core import images
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.core.images import ImageWork, Lock
from diamond.core.recipes import Recipe


def job(tmp_path: Path, **work: Any) -> ImageJob:
    given: dict[str, Any] = {"action": "build", "image_id": "img_00000001", "builder": "venv"} | work
    run_dir = tmp_path / "run"
    (run_dir / "work").mkdir(parents=True, exist_ok=True)
    return ImageJob(
        work=ImageWork(**given), root=str(tmp_path / "images"), job_id="job_00000001", run_dir=str(run_dir)
    )  # fmt: skip


def start(order: ImageJob) -> subprocess.CompletedProcess[str]:
    path = Path(order.run_dir) / "image-work.json"
    path.write_text(json.dumps(encode(order)))
    argv = [sys.executable, "-m", "diamond.agent.builders", str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def failure(order: ImageJob) -> dict[str, Any]:
    found = json.loads((Path(order.run_dir) / "work" / images.FAILURE_FILE).read_text())
    assert isinstance(found, dict)
    return found


def test_a_recipe_the_builder_cannot_make_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    order = job(tmp_path, recipe=Recipe.parse({"base": "host", "system": ["git"]}))
    done = start(order)
    assert done.returncode == 1
    assert "git" in failure(order)["message"]
    assert failure(order)["hint"]
    assert f"diamond: failed: {failure(order)['message']}" in done.stdout
    assert list((tmp_path / "images" / "tmp").glob("[!.]*")) == []


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ({"action": "explode"}, "explode"),
        ({}, "no recipe"),
        ({"builder": "kaniko", "recipe": Recipe(base="docker://debian")}, "kaniko"),
        ({"image_id": "../x", "recipe": Recipe(base="host")}, "not the id of an image"),
        ({"action": "import", "image_id": "img_00000001"}, "did not arrive"),
        ({"action": "link", "source_path": "relative", "digest": "x"}, "cannot be shared"),
    ],
)
def test_orders_that_make_no_sense_are_sentences(tmp_path: Path, work: dict[str, Any], says: str) -> None:
    order = job(tmp_path, **work)
    assert start(order).returncode == 1
    shown = failure(order)["message"]
    assert says in shown or (says == "cannot be shared" and "is not an image" in shown)


def test_papers_of_an_earlier_start_are_not_taken_for_this_one(tmp_path: Path) -> None:
    order = job(tmp_path, action="remove")
    work = Path(order.run_dir) / "work"
    for name in images.BUILD_OUTPUTS:
        (work / name).write_text("{}")
    assert start(order).returncode == 0
    assert list(work.iterdir()) == []


def test_a_full_disk_is_said_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build.bench(job(tmp_path), Commands()) as at:
        build.check_space(at, 1)
        with pytest.raises(BuildProblem, match="GB left") as caught:
            build.check_space(at, 1 << 60)
    assert caught.value.code == "disk_full"
    assert "prune" in caught.value.hint


def test_large_files_go_where_they_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APPTAINER_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert build.temporary_parent(Path("/plain/root")) is None
    wanted = tmp_path / "local"
    wanted.mkdir()
    monkeypatch.setenv("TMPDIR", str(wanted))
    assert build.temporary_parent(Path("/plain/root")) == wanted / f"diamond-builds-{os.getuid()}"
    assert (wanted / f"diamond-builds-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TMPDIR", "relative")
    assert build.temporary_parent(Path("/plain/root")) is None
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    assert build.temporary_parent(Path("/plain/root")) is None
    monkeypatch.setattr("tempfile.tempdir", str(wanted))
    odd = build.temporary_parent(Path("/it's/root"))
    assert odd is not None and odd.parent == wanted


def test_a_folder_of_that_name_that_leads_elsewhere_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("APPTAINER_TMPDIR", raising=False)
    (tmp_path / "victim").mkdir()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / f"diamond-builds-{os.getuid()}").symlink_to(tmp_path / "victim")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    assert build.temporary_parent(Path("/plain/root")) is None


def test_every_error_becomes_a_sentence(tmp_path: Path) -> None:
    order = job(tmp_path, recipe=Recipe.parse({"base": "host", "pip": ["nothing-like-it"]}))
    said = program.explain(order, "pip", BuildProblem("it broke", hint="mend it", code="x"))
    assert (said.stage, said.message, said.hint, said.code) == ("pip", "it broke", "mend it", "x")
    assert program.explain(order, "pip", InvalidInput("odd", hint="h")).message == "odd"
    full = program.explain(order, "pip", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"))
    assert full.code == "disk_full"
    odd = program.explain(order, "base", RecursionError("too deep"))
    assert "too deep" in odd.message and odd.hint and odd.code == "internal"
    tail = "ERROR: No matching distribution found for nothing-like-it"
    assert "nothing-like-it" in program.explain(order, "pip", CommandFailed(["pip"], 1, tail)).line


def test_a_program_is_ended_with_its_job(tmp_path: Path) -> None:
    """One that does not heed the first signal is killed, and waited for."""
    code = (
        "import signal, sys; from diamond.agent.builders import base; base.STOP_S = 0.2\n"
        "def stop(*_): raise SystemExit(3)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "base.Commands().run(['sh', '-c', 'trap \"\" TERM; echo pid $$; while :; do sleep 0.1; done'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline().split()[1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 3
    process.stdout.close()
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/stat").exists()


def test_output_of_programs_is_shown_and_its_end_kept(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    commands = Commands()
    with pytest.raises(CommandFailed) as caught:
        commands.run(["sh", "-c", "for i in $(seq 300); do echo line $i; done; echo last >&2; exit 9"])
    assert caught.value.returncode == 9
    assert caught.value.tail.splitlines()[-2:] == ["line 300", "last"]
    assert len(caught.value.tail.splitlines()) == 200
    assert b"line 1\n" in capfdbinary.readouterr().out
    assert commands.run(["echo", "said"], quiet=True) == "said"
    assert capfdbinary.readouterr().out == b""
    with pytest.raises(CommandFailed, match="127"):
        commands.run(["/no/such/program"])


def test_a_lock_has_its_place_in_the_keys() -> None:
    """Pinned and unpinned builds never share a layer."""
    from diamond.core.recipes import stages

    recipe = Recipe.parse({"base": "host", "pip": ["six"]})
    assert [s.key for s in stages(recipe, builder="venv", pins=encode(Lock(python="3")))] != [
        s.key for s in stages(recipe, builder="venv", pins={})
    ]
