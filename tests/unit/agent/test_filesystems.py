"""File systems: which, what kind, how full; and one that does not answer, for real."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diamond.agent import filesystems, programs
from diamond.agent.filesystems import Candidate, Mount, look, places, read_mounts
from testing import disks

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
nas1:/export/home /home nfs4 rw,hard 0 0
10.0.0.1@o2ib:/lus /lustre/scratch lustre rw,flock 0 0
gpfs0 /gpfs/a\\040b gpfs rw 0 0
tmpfs /home/late tmpfs rw 0 0
short
"""


def test_mounts() -> None:
    mounts = read_mounts(MOUNTS)
    assert [mount.kind for mount in mounts] == ["ext4", "proc", "nfs4", "lustre", "gpfs", "tmpfs"]

    def on(path: str) -> tuple[str, str]:
        found = filesystems._mount_of(path, mounts)
        return found.kind, found.device

    assert on("/home/user1") == ("nfs4", "nas1:/export/home")
    assert on("/home") == ("nfs4", "nas1:/export/home")
    assert on("/homework") == ("ext4", "/dev/sda1")
    assert on("/home/late/x") == ("tmpfs", "tmpfs")
    assert on("/lustre/scratch/u") == ("lustre", "10.0.0.1@o2ib:/lus")
    assert on("/gpfs/a b/c") == ("gpfs", "gpfs0")
    assert filesystems._mount_of("/x", []) == Mount(device="", point="", kind="")
    assert any(mount.point == "/" for mount in read_mounts())


def test_places_come_from_variables_that_name_folders() -> None:
    environ = {
        "SCRATCH": "/scratch/u",
        "PSCRATCH": "/pscratch/u",
        "WORK": "/work/u",
        "MEMBERWORK": "/lustre/orion",
        "PROJECT": "not/absolute",
        "WORKSPACE": "/nothing/of/the/kind",
        "SCRATCH2": "/",
        "CFS": "/global/cfs\n/cdirs",
    }
    found = places(
        home="/home/u", run_root="/home/u/jobs", environ=environ, user="u", more=[Candidate("project", ("/p",))]
    )
    assert [(each.role, each.paths) for each in found] == [
        ("home", ("/home/u",)),
        ("scratch", ("/pscratch/u",)),
        ("scratch", ("/scratch/u",)),
        ("project", ("/lustre/orion",)),
        ("project", ("/work/u",)),
        ("project", ("/p",)),
        ("scratch", ("/scratch/u", "/scratch")),
        ("runs", ("/home/u/jobs",)),
    ]


def test_only_what_is_there_and_once(tmp_path: Path) -> None:
    home, scratch, runs = tmp_path / "home", tmp_path / "scratch", tmp_path / "elsewhere"
    for folder in (home, home / "jobs", scratch, runs):
        folder.mkdir()
    (tmp_path / "link").symlink_to(scratch)
    (tmp_path / "file").write_text("x")
    found, warnings = look(
        [
            Candidate("home", (str(home),)),
            Candidate("scratch", (str(tmp_path / "none"), str(scratch))),
            Candidate("scratch", (str(tmp_path / "link"),)),
            Candidate("project", (str(tmp_path / "none"),)),
            Candidate("project", (str(tmp_path / "file"),)),
            Candidate("runs", (str(home / "jobs"),)),
            Candidate("runs", (str(runs),)),
        ]
    )
    assert [(each.role, each.path) for each in found] == [
        ("home", str(home)),
        ("scratch", str(scratch)),
        ("runs", str(runs)),
    ]
    stat = os.statvfs(home)
    assert found[0].total_bytes == stat.f_blocks * stat.f_frsize
    assert 0 < found[0].free_bytes <= found[0].total_bytes
    assert found[0].kind == filesystems._mount_of(os.path.realpath(home), read_mounts()).kind != ""
    assert warnings == []


def test_the_size_of_a_small_disk(tmp_path: Path) -> None:
    if reason := disks.why_not():
        pytest.skip(reason)
    with disks.small_disk(tmp_path / "disk", 4) as disk:
        (found,), _ = look([Candidate("scratch", (str(disk),))])
        assert (found.kind, found.total_bytes) == ("tmpfs", 4 << 20)


@contextmanager
def silent_file_system(path: Path) -> Iterator[None]:
    """A FUSE mount whose server never answers: whoever looks at it hangs, as with a file server that is gone."""
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if libc.mount(b"silent", os.fsencode(path), b"fuse.silent", 0, options) != 0:
            pytest.skip(f"cannot mount a silent file system here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(path), 2)  # MNT_DETACH
    finally:
        os.close(fd)


def test_a_file_system_that_hangs_does_not_hang_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting a file system that never answers needs root and /dev/fuse")
    monkeypatch.setattr(programs, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(programs.ask_all, "__kwdefaults__", {"timeout_s": 1.0})
    (tmp_path / "home").mkdir()
    with silent_file_system(tmp_path / "gone"):
        began = time.monotonic()
        gone = str(tmp_path / "gone" / "user1")
        found, warnings = look([Candidate("home", (str(tmp_path / "home"),)), Candidate("scratch", (gone,))])
        assert time.monotonic() - began < 10
    assert [(each.role, each.kind, each.total_bytes > 0) for each in found] == [
        ("home", found[0].kind, True),
        ("scratch", "fuse.silent", False),
    ]
    assert warnings == [f"{gone} does not answer"]
    until = time.monotonic() + 10
    while programs.num_left() and time.monotonic() < until:
        time.sleep(0.05)
    assert programs.num_left() == 0
