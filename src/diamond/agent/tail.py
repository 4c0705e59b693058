"""Reads what jobs append to their stream files, from a given offset on. Knows no server and keeps no state."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def size_of(path: Path) -> int:
    """Bytes in a stream; 0 for one that is not there or is no plain file."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def read_from(path: Path, offset: int, limit_bytes: int) -> bytes:
    """The next bytes, at most `limit_bytes`; empty at the end, also of a file that was made shorter or went away.

    A job can put anything in place of its files. A link is not followed (it might show other files of this user to
    whoever may read the log), and a pipe is not waited for.
    """
    if limit_bytes <= 0 or size_of(path) <= offset:
        return b""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        return os.pread(fd, limit_bytes, offset)
    except OSError:
        return b""
    finally:
        os.close(fd)
