"""Runs what might destroy files where it cannot: in a mount namespace, all read-only but for a fresh tmpfs.

    python -m testing.caged MODULE:FUNCTION

calls FUNCTION(folder) there, with a folder in the tmpfs, and prints what it returns as JSON. Root is enough, or user
namespaces. A process that finds anything writable but the tmpfs ends before the function is called.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_SYS_MOUNT_SETATTR = 442  # on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MS_PRIVATE = 1, 1 << 18
_PLACES = ("/tmp", "/var/tmp", "/mnt", "/media", "/srv")  # noqa: S108 - hidden by the tmpfs
_PROBED = ("/", "/etc", "/usr", "/var", "/home", "/root", "/dev/shm", str(ROOT), os.path.expanduser("~"))  # noqa: S108
_NOT_CAGED = 97
_PATIENCE_S = 240


@lru_cache
def why_not() -> str | None:
    """What keeps a cage from being made here; None when nothing does."""
    done = _run("testing.caged:nothing")
    return None if done.returncode == 0 else f"a namespace with read-only file systems: {done.stderr.strip()[-200:]}"


def run(function: str) -> Any:
    """What MODULE:FUNCTION returns in a cage."""
    done = _run(function)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def nothing(folder: Path) -> None:
    """To see whether there can be a cage."""


def _run(function: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))}
    argv = [sys.executable, "-B", "-m", "testing.caged", function]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def _enter() -> Path:
    """Make the cage around this process; the folder in it that can be written."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    _check(libc.unshare(_CLONE_NEWNS | (0 if uid == 0 else _CLONE_NEWUSER)), "unshare")
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    wanted = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY, propagation=_MS_PRIVATE)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    where = (ctypes.c_int(_AT_FDCWD), b"/", ctypes.c_uint(_AT_RECURSIVE))
    _check(libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *where, ctypes.byref(wanted), size), "mount_setattr")
    ours = [os.path.realpath(path) for path in (ROOT, sys.prefix, sys.base_prefix)]
    place = next(p for p in _PLACES if os.path.isdir(p) and not any(path.startswith(f"{p}/") for path in ours))
    _check(
        libc.mount(b"tmpfs", place.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=64m,nr_inodes=20000,mode=0755"),
        "mount",
    )
    for folder in _PROBED:
        if os.path.isdir(folder) and not os.path.samefile(folder, place):
            _check_read_only(folder)
    os.chdir(place)
    os.environ["TMPDIR"] = tempfile.tempdir = place
    folder = Path(place) / "caged"
    folder.mkdir()
    return folder


def _check_read_only(folder: str) -> None:
    probe = os.path.join(folder, ".diamond-cage-probe")
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT):
            return
        raise
    os.unlink(probe)
    raise OSError(errno.EPERM, "can still be written", folder)


def _check(answer: int, what: str) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def main(function: str) -> int:
    try:
        folder = _enter()
    except (OSError, StopIteration) as error:
        print(f"no cage: {error}", file=sys.stderr)
        return _NOT_CAGED
    module, _, name = function.partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
