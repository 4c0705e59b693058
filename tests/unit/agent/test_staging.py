from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from diamond.agent.builders.build import ImageJob
from diamond.agent.cache import Cache
from diamond.agent.image_jobs import Surroundings, why_missing
from diamond.agent.link import Link
from diamond.agent.staging import Stager, StagingFailed, StagingStopped, place
from diamond.core import onefile
from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput, ServerUnreachable
from diamond.core.images import ImageUse, ImageWork
from diamond.core.reasons import Reason
from diamond.core.recipes import Recipe
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder

DIGEST = "sha256:" + "0" * 64


def order(**spec: Any) -> JobOrder:
    return JobOrder(
        job_id="job_00000001",
        task_id="tsk_00000001",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=TaskSpec.parse({"run": "true", **spec}),
    )


def folder(*paths: str, **links: str) -> Manifest:
    files = [BundleFile(path=path, digest=DIGEST) for path in paths]
    files += [BundleFile(path=path, link_to=target) for path, target in links.items()]
    return Manifest(files=tuple(sorted(files, key=lambda item: item.path)))


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def stager(server: Any, tmp_path: Path, stop: threading.Event) -> Any:
    stager = Stager(cache=Cache(tmp_path / "cache", cast(Link, server)), stop=stop)
    yield stager
    stager.close()


def test_mounts_beside_the_workdir() -> None:
    single = Manifest(files=(BundleFile(path="weights.bin", digest=DIGEST),), is_file=True)
    placed = place({".": folder("a.py", "pkg/b.py"), "data/set": folder("x"), "pkg/w.bin": single})
    assert [one.path for one in placed] == ["a.py", "pkg/b.py", "data/set/x", "pkg/w.bin"]


@pytest.mark.parametrize(
    ("bundles", "words"),
    [
        ({".": folder("data/x"), "data": folder("x")}, ["file_mounts.data", "'data/x'", "workdir"]),
        ({".": folder("data"), "data": folder("x")}, ["file_mounts.data", "a file"]),
        ({".": folder("a", data="a"), "data": folder("x")}, ["file_mounts.data", "a link"]),
        ({"a": folder("x"), "a/x": folder("y")}, ["file_mounts.a/x"]),
    ],
)
def test_collisions_are_refused_by_name(bundles: dict[str, Manifest], words: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        place(bundles)
    assert all(word in str(caught.value) for word in words)


def test_makes_a_complete_directory(stager: Stager, tmp_path: Path, server: Any) -> None:
    ref = server.bundle({"a b/c.txt": b"content", "empty": b""})
    path = tmp_path / "jobs" / "job_00000001"
    asked = order(run="echo 'x'\n", setup="true", workdir=ref, ranks_per_node=2, envs={"A": "1\n2"})
    stager.stage(asked, path)
    assert (path / "work/a b/c.txt").read_bytes() == b"content"
    assert (path / "work/empty").read_bytes() == b""
    assert (path / "run.sh").read_text() == "echo 'x'\n"
    assert b"A=1\n2\0" in (path / "env").read_bytes()
    assert (path / "launch.py").exists() and (path / "exit.tmp").stat().st_size == 1024
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "log").read_bytes() == b""
    stager.stage(asked, path)  # an interrupted attempt is done over
    assert (path / "work/a b/c.txt").read_bytes() == b"content"


def test_executables_and_links(stager: Stager, tmp_path: Path, server: Any) -> None:
    server.bundle({"x": b"#!/bin/sh\n"})
    digest, data = next(iter(server.blobs.items()))
    manifest = Manifest(
        files=(
            BundleFile(path="bin/run", digest=digest, size_bytes=len(data), executable=True),
            BundleFile(path="link", link_to="bin/run"),
        )
    )
    server.manifests[manifest.digest] = manifest
    stager.stage(order(workdir=manifest.ref), tmp_path / "job")
    assert os.access(tmp_path / "job/work/bin/run", os.X_OK)
    assert os.readlink(tmp_path / "job/work/link") == "bin/run"


@pytest.mark.parametrize(
    "item",
    [
        BundleFile(path="../evil", digest=DIGEST),
        BundleFile(path="/etc/evil", digest=DIGEST),
        BundleFile(path="a//b", digest=DIGEST),
        BundleFile(path="evil", link_to="/etc/passwd"),
        BundleFile(path="a/evil", link_to="../../x"),
        BundleFile(path="x", digest="sha256:../../../etc/passwd"),
    ],
)
def test_a_hostile_manifest_writes_nothing(stager: Stager, tmp_path: Path, server: Any, item: BundleFile) -> None:
    manifest = Manifest(files=(item,))
    server.manifests[manifest.digest] = manifest
    with pytest.raises(StagingFailed) as caught:
        stager.stage(order(workdir=manifest.ref), tmp_path / "jobs" / "job")
    assert caught.value.reason == Reason.STAGING_FAILED
    assert list((tmp_path / "jobs/job/work").iterdir()) == []


def test_a_file_below_a_link_is_refused(stager: Stager, tmp_path: Path, server: Any) -> None:
    manifest = Manifest(files=(BundleFile(path="a", link_to="b"), BundleFile(path="a/x", digest=DIGEST)))
    server.manifests[manifest.digest] = manifest
    with pytest.raises(StagingFailed):
        stager.stage(order(workdir=manifest.ref), tmp_path / "job")


def test_another_manifest_than_asked_for_is_refused(stager: Stager, tmp_path: Path, server: Any) -> None:
    server.manifests[DIGEST] = folder("x")
    with pytest.raises(StagingFailed, match="another one"):
        stager.stage(order(workdir=f"bundle:{DIGEST}"), tmp_path / "job")


def test_a_damaged_blob_is_refused(stager: Stager, tmp_path: Path, server: Any) -> None:
    ref = server.bundle({"x": b"content"})
    server.blobs[next(iter(server.blobs))] = b"cOntent"
    with pytest.raises(StagingFailed, match="damaged"):
        stager.stage(order(workdir=ref), tmp_path / "job")


def test_a_download_goes_on_where_it_stopped(stager: Stager, tmp_path: Path, server: Any) -> None:
    ref = server.bundle({"x": b"0123456789"})
    digest = next(iter(server.blobs))
    (tmp_path / "cache/partial" / digest.removeprefix("sha256:")).write_bytes(b"01234")
    offsets = []
    real = server.download
    server.download = lambda path, offset=0: offsets.append(offset) or real(path, offset=offset)
    stager.stage(order(workdir=ref), tmp_path / "job")
    assert (tmp_path / "job/work/x").read_bytes() == b"0123456789"
    assert offsets == [5]
    stager.stage(order(workdir=ref), tmp_path / "again")
    assert offsets == [5], "the second job finds it in the cache"


def test_a_cancelled_job_stops_waiting(stager: Stager, tmp_path: Path, server: Any) -> None:
    ref = server.bundle({"x": b"content"})
    server.problem[f"/bundles/{ref.removeprefix('bundle:')}"] = ServerUnreachable("gone")
    asked: list[int] = []
    with pytest.raises(StagingStopped):
        stager.stage(order(workdir=ref), tmp_path / "job", lambda: asked.append(1) or len(asked) > 2)  # type: ignore[func-returns-value]


def test_the_cache_throws_out_what_was_longest_not_used(tmp_path: Path, server: Any) -> None:
    cache = Cache(tmp_path / "cache", cast(Link, server))
    server.bundle({"a": b"a" * 100, "b": b"b" * 100, "c": b"c" * 100})
    digests = list(server.blobs)
    for age, digest in enumerate(digests):
        os.utime(cache.fetch(digest, 100), (1000 - age, 1000 - age))
    with cache.pinned([digests[2]]):
        assert cache.trim(200) == 100
    assert cache.missing(digests) == [digests[1]]


def test_what_is_in_the_way_is_removed(stager: Stager, shared: Path, as_nobody: Callable[..., Any]) -> None:
    def try_it() -> list[str]:
        (shared / "job/work/pkg/sub").mkdir(parents=True)
        (shared / "job/work/pkg/sub").chmod(0o555)
        (shared / "job/work/pkg").chmod(0o555)
        stager.stage(order(), shared / "job")
        return os.listdir(shared / "job/work")

    assert as_nobody(try_it) == []


# Images


def image_order(image: ImageUse, **spec: Any) -> JobOrder:
    return replace(order(**spec), image=image)


def test_the_way_into_an_image(stager: Stager, tmp_path: Path) -> None:
    image = tmp_path / "image.sif"
    image.write_bytes(b"12345")
    asked = image_order(
        ImageUse(kind="apptainer", path=str(image), image_id="img_00000001", size_bytes=5),
        run="echo 'x'\n",
        setup="true",
        envs={"A": "it's\n2"},
    )
    path = tmp_path / "jobs/job_00000001"
    stager.stage(asked, path)
    assert "inside.sh" in (path / "job.sh").read_text() and 'run.sh") 2>&3' not in (path / "job.sh").read_text()
    assert str(image) in (path / "inside.sh").read_text()
    assert "export A='it'\"'\"'s\n2'\n" in (path / "env.sh").read_text()
    assert (path / "run.sh").read_text() == "echo 'x'\n"
    assert os.access(path / "shield/squashfuse_ll", os.X_OK)
    assert (path / "enter.sh").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "/not/there.sif"}, "No such file"),
        ({"size_bytes": 6}, "5 bytes instead of 6"),
        ({"path": "/dev/null"}, "neither a file nor a folder"),
        ({"kind": "docker", "path": "no-such-image:1"}, "docker has no image no-such-image:1"),
    ],
)
def test_an_image_that_is_not_there_is_noticed(
    stager: Stager, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    image = tmp_path / "image.sif"
    image.write_bytes(b"12345")
    use = replace(ImageUse(kind="apptainer", path=str(image), size_bytes=5), **change)
    with pytest.raises(StagingFailed, match=words) as caught:
        stager.stage(image_order(use), tmp_path / "jobs/job_00000001")
    assert caught.value.reason == Reason.IMAGE_MISSING


def test_a_task_with_an_image_never_runs_outside_of_one(stager: Stager, tmp_path: Path) -> None:
    for spec in ({"resources": {"image_id": "tools"}}, {"image": {"base": "python:3.12"}}):
        with pytest.raises(StagingFailed, match="did not say where") as caught:
            stager.stage(order(**spec), tmp_path / "jobs/job_00000001")
        assert caught.value.reason == Reason.IMAGE_MISSING


def test_a_job_of_images_has_no_words_of_its_order_in_its_scripts(server: Any, tmp_path: Path) -> None:
    around = Surroundings(image_root=tmp_path / "elsewhere", max_image_bytes=7)
    cache = Cache(tmp_path / "cache", cast(Link, server))
    stager = Stager(cache=cache, stop=threading.Event(), scheduler="slurm", around=lambda: around)
    hostile = {"run": "touch pwned", "setup": "touch pwned", "envs": {"PATH": "/evil"}, "ranks_per_node": 4}
    work = ImageWork(action="build", image_id="img_00000001", recipe=Recipe(base="host"), builder="venv")
    path = tmp_path / "jobs/job_00000001"
    stager.stage(replace(order(**hostile), work=work), path)
    stager.close()
    texts = [(path / name).read_text() for name in ("job.sh", "run.sh", "env")]
    assert not any("pwned" in text or "/evil" in text for text in texts)
    assert not (path / "setup.sh").exists() and not (path / "launch.py").exists()
    assert "SLURM" not in texts[0], "a job of the login node is started by the agent itself"
    job = decode(ImageJob, json.loads((path / "image-work.json").read_bytes()))
    assert job == ImageJob(
        work=work, root=str(tmp_path / "elsewhere"), job_id="job_00000001", run_dir=str(path), max_image_bytes=7
    )


def test_no_file_in_the_way_becomes_part_of_a_job_of_images(stager: Stager, tmp_path: Path) -> None:
    asked = replace(order(), work=ImageWork(action="remove", image_id="img_00000001"))
    earlier, path = tmp_path / "home/jobs/job_00000002", tmp_path / "home/jobs/job_00000001"
    evil = f"open({str(tmp_path / 'RAN')!r}, 'w')\n"
    stager.stage(replace(order(), job_id="job_00000002"), earlier)
    (earlier / "work/json.py").write_text(evil)
    stager.stage(replace(asked, continues="job_00000002"), path)
    assert not (path / "work").is_symlink() and list((path / "work").iterdir()) == []
    for name in ("json.py", "sitecustomize.py", "usercustomize.py", "runpy.py", "os.py", "diamond.py"):
        (path / "work" / name).write_text(evil)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ":.", "PYTHONSTARTUP": str(path / "work/json.py")}
    done = subprocess.run(["bash", str(path / "job.sh")], env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"diamond: image img_00000001 was not here\n"), done.stderr
    assert not (tmp_path / "RAN").exists()


def test_an_image_under_a_name_that_was_given_to_another_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind, prefix in (("podman", ""), ("docker", "sha256:")):
        (tmp_path / kind).write_text(f"#!/bin/sh\necho {prefix}{'1' * 64}\n")
        (tmp_path / kind).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for kind in ("podman", "docker"):
        use = ImageUse(kind=kind, path="localhost/diamond/img_00000001", digest="sha256:" + "1" * 64)
        assert why_missing(use) == why_missing(replace(use, digest="")) == ""
        assert "is another image than it was" in why_missing(replace(use, digest="sha256:" + "2" * 64))


def test_a_job_of_images_starts_this_agents_own_code(stager: Stager, tmp_path: Path) -> None:
    """Also from one file: what runs is what the agent is."""
    pyz = tmp_path / "it's an agent.pyz"
    pyz.write_bytes(onefile.build())
    program = """
import json, sys, threading
from pathlib import Path
from diamond.agent.staging import Stager
from diamond.core.codec import decode
from diamond.core.wire import JobOrder
order = decode(JobOrder, json.loads(sys.argv[1]))
Stager(cache=None, stop=threading.Event()).stage(order, Path(sys.argv[2]))
"""
    asked = replace(order(), work=ImageWork(action="remove", image_id="img_00000001"))
    path = tmp_path / "home/jobs/job_00000001"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(pyz)}
    argv = [sys.executable, "-c", program, json.dumps(encode(asked)), str(path)]
    subprocess.run(argv, env=env, check=True, timeout=60)
    done = subprocess.run(["bash", str(path / "job.sh")], env={"PATH": env["PATH"]}, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"diamond: image img_00000001 was not here\n"), done.stderr
    assert (tmp_path / "home/images/store").is_dir()
