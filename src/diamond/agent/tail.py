"""Reads what jobs append to their stream files, from a given offset on. Knows no server and keeps no state."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # shortages of this process or machine: they pass
_STRANGE = "not a plain file"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The next bytes of a stream, and whether they are the last there are now.

    What cannot be read has ended, with `problem` saying why: nobody waits for it for ever.
    """

    data: bytes = b""
    is_end: bool = True
    problem: str = ""


def read_from(path: Path, offset: int, limit_bytes: int) -> Piece:
    """At most `limit_bytes` from `offset` on; none at the end, also of a file that was made shorter or went away.

    A job can put anything in place of its files. A link is not followed (it might show other files of this user to
    whoever may read the log), and a pipe is not waited for.
    """
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        return _failed(error)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Piece(problem=_STRANGE)
        wanted = min(limit_bytes, found.st_size - offset)
        if wanted <= 0:
            return Piece(is_end=found.st_size <= offset)
        data = os.pread(fd, wanted, offset)
        return Piece(data=data, is_end=not data or offset + len(data) >= found.st_size)
    except OSError as error:
        return _failed(error)
    finally:
        os.close(fd)


def _failed(error: OSError) -> Piece:
    if error.errno in _OUR_OWN:
        return Piece(is_end=False)
    if error.errno in _ABSENT:
        return Piece()
    # ELOOP is how O_NOFOLLOW refuses a link; ENXIO, how a socket refuses to be opened.
    strange = error.errno in (errno.ELOOP, errno.ENXIO)
    return Piece(problem=_STRANGE if strange else error.strerror or type(error).__name__)
