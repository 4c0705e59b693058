"""Who works in an agent's home: one process, on one machine, even where the home is shared by several login nodes.

The kernel's lock decides on one machine and on file systems that pass locks on. Where they do not, the lock file
itself tells: it names process and machine, and its holder touches it every few seconds. Whoever finds that another
machine has written its name into it lets go.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diamond.core.errors import Conflict

log = logging.getLogger(__name__)

LOCK_FILE = "agent.lock"
BEAT_S = 20.0
FRESH_S = 150.0  # attributes of files on NFS may be a minute old
_TRIES = 10
_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Process number (0: unknown) and machine. `since` is when it last said so, as Unix time."""

    pid: int
    host: str
    seen_at: float

    @property
    def is_here(self) -> bool:
        return self.host in ("", platform.node())

    def __str__(self) -> str:
        return f"process {self.pid or '?'}" + (f" on {self.host}" if self.host else "")


def holder(path: Path) -> Holder | None:
    """Who holds a lock file; None when nobody does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        said = _read(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return said or Holder(pid=0, host="", seen_at=0.0)
        except OSError:  # a file system without locks: what the file says is all there is
            return said if said and _is_fresh(said) else None
        # Nobody on this machine. On another one, the lock may not reach us, but its beat does.
        return said if said and not said.is_here and _is_fresh(said) else None
    finally:
        os.close(fd)


@contextlib.contextmanager
def held(path: Path, on_lost: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold a lock file. `on_lost` is called, on another thread, when another machine took it all the same.

    Raises:
        Conflict: naming who holds it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    done = threading.Event()
    try:
        _take(fd, path)
        other = _read(fd)
        if other and not other.is_here and _is_fresh(other):
            raise _taken(path, other)
        mine = f"{os.getpid()} on {platform.node()}\n".encode()
        os.ftruncate(fd, 0)
        os.pwrite(fd, mine, 0)
        beat = threading.Thread(target=_keep_beating, args=(path, fd, mine, done, on_lost), name="beat", daemon=True)
        beat.start()
        try:
            yield
        finally:
            done.set()
            beat.join(5)
            with contextlib.suppress(OSError):
                if path.read_bytes() == mine:  # nobody need wait for a beat that will not come
                    os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _take(fd: int, path: Path) -> None:
    for left in range(_TRIES, -1, -1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # Somebody who only looks holds it for a moment as well.
            if not left:
                raise _taken(path, _read(fd)) from None
            time.sleep(_PAUSE_S)
        except OSError as error:
            log.warning("%s: this file system has no locks (%s); going by what the file says", path, error.strerror)
            return


def _taken(path: Path, other: Holder | None) -> Conflict:
    where = f" ({other})" if other else ""
    hint = "stop it first, or use another home"
    if other and not other.is_here:
        hint = f"stop it on {other.host}; if that machine is gone, wait {FRESH_S / 60:.0f} minutes and try again"
    return Conflict(f"another agent already works in {path.parent}{where}", hint=hint)


def _keep_beating(
    path: Path, fd: int, mine: bytes, done: threading.Event, on_lost: Callable[[str], None] | None
) -> None:
    while not done.wait(BEAT_S):
        with contextlib.suppress(OSError):
            said = path.read_bytes()
            if said and said != mine:
                text = said[:200].decode(errors="replace").strip()
                log.error("another agent has taken %s (process %s); this one stops", path.parent, text)
                if on_lost is not None:
                    on_lost(text)
                return
            os.utime(fd)


def _read(fd: int) -> Holder | None:
    pid, found, host = os.pread(fd, 200, 0).decode(errors="replace").strip().partition(" on ")
    if not found and not pid.isdecimal():
        return None
    return Holder(pid=int(pid) if pid.isdecimal() else 0, host=host, seen_at=os.fstat(fd).st_mtime)


def _is_fresh(said: Holder) -> bool:
    return time.time() - said.seen_at < FRESH_S
