"""Process 1 of a site: puts the site's file system together, moves into it and then only reaps orphans.

Run as `unshare … python init.py CONFIG`, in fresh namespaces. It lives as long as its standard input is open: when
whoever started the site is gone, however it went, the pipe closes, this process ends, and the kernel ends every other
process of the site with it. Standard library only, and everything is imported before the root changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MS_REMOUNT, MS_RDONLY = (
    2,
    4,
    8,
    4096,
    1 << 14,
    1 << 18,
    32,
    1,
)
MNT_DETACH = 2
# Apptainer's image mounts use fuse, which distributions leave open to everyone.
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
FUSE = (10, 229)
NUM_FAKE_GPUS = 8

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = _libc.mount(source.encode(), str(target).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {kind or 'bind'} {source} on {target} ({options})")


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, flags=MS_BIND | MS_REC)
    if read_only:
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def assemble(lower: str, folder: Path, binds: dict[str, str], memory: str) -> Path:
    """The site's root: its own changes in memory over the shared file system, homes and scratch on disk."""
    # An overlay's upper layer may not lie on an overlay, which a container's disk often is; a tmpfs always serves.
    layers = folder / "layers"
    layers.mkdir()
    mount("tmpfs", layers, "tmpfs", options="mode=755")
    for name in ("upper", "work", "root"):
        (layers / name).mkdir()
    root = layers / "root"
    mount("overlay", root, "overlay", options=f"lowerdir={lower},upperdir={layers}/upper,workdir={layers}/work")
    for name in ("home", "scratch"):
        bind(folder / name, root / name)
    mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("sysfs", root / "sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if memory:
        mount("tmpfs", root / "sys/fs/cgroup", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        bind(Path(memory), root / "sys/fs/cgroup/memory")
    mount("tmpfs", root / "run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    devices(root / "dev")
    for inside, source in binds.items():
        bind(Path(source), root / inside.lstrip("/"), read_only=True)
    return root


def devices(dev: Path) -> None:
    """A /dev of the site's own: the machine's disks have no place in it."""
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=755")
    nodes = {**DEVICES, "fuse": FUSE}
    # Slurm wants a file for every GPU it counts; these are as good as /dev/null, because they are.
    nodes |= {f"fakegpu{number}": DEVICES["null"] for number in range(NUM_FAKE_GPUS)}
    for name, (major, minor) in nodes.items():
        os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name in ("pts", "shm", "mqueue"):
        (dev / name).mkdir()
    mount("devpts", dev / "pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", dev / "shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    with contextlib.suppress(OSError):  # POSIX message queues are an option of the kernel that nothing here needs
        mount("mqueue", dev / "mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}
    for name, to in {**links, "stderr": "/proc/self/fd/2"}.items():
        (dev / name).symlink_to(to)


def enter(root: Path) -> None:
    """Make `root` the root and let go of the old one. A chroot would not do: Apptainer needs a real mount above it."""
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), f"pivot_root to {root}")
    # The old root now lies over the new one at the same place; this takes it away.
    _check(_libc.umount2(b".", MNT_DETACH), "unmounting the old root")
    os.chdir("/")


def reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    os.umask(0o022)
    socket.sethostname(config["hostname"])
    enter(assemble(config["lower"], Path(config["folder"]), config["binds"], config["memory"]))
    signal.signal(signal.SIGCHLD, reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    # Nothing is ever written to it; the read ends when the last writer is gone.
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    main()
