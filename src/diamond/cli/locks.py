"""Who runs on this home: read from lock files, never from process numbers alone.

The system drops a lock however its holder ended, and no other program that was given the same process number can hold
it. Only looks; taking locks is the business of the server and the agent.
"""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import time
from pathlib import Path


def holder(lock: Path) -> int | None:
    """Process that holds `lock`: its number, 0 when that cannot be known here, None when nobody does."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pid, _, node = os.pread(fd, 200, 0).decode("utf-8", errors="replace").strip().partition(" on ")
    except OSError:
        return None
    finally:
        os.close(fd)
    # On a shared file system the holder may be a process of another machine.
    return int(pid) if pid.isdecimal() and node in ("", platform.node()) else 0


def runs(pid: int) -> bool:
    """Whether a process still runs; a zombie that nobody has collected yet does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty when it is not ours to read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", errors="replace").split("\0")
    except OSError:
        return []


def end(pid: int, lock: Path, wait_s: float) -> bool:
    """Ask the holder of `lock` to end (SIGTERM) and wait; whether it did.

    Raises:
        PermissionError: it belongs to another user.
    """
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    ends_at = time.monotonic() + wait_s
    while holder(lock) == pid or runs(pid):
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.05)
    return True
