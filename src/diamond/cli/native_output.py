"""What native libraries print, which no keyword of theirs silences, is not part of a command's output."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def to_stderr() -> Iterator[None]:
    """Meanwhile the process's standard output is its standard error, for C as well (HiGHS has such lines).

    For commands that compute in one thread: what Python prints meanwhile goes there, too.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
