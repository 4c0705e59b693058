"""What the file stores share: a lock that dies with its holder, whole writes, and "disk full" said for people."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from diamond.core.errors import StorageFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def storage_full(what: str) -> Iterator[None]:
    """Turn the two ways a file system says "full" into the error users are shown."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFull(
            f"the server has no disk space left to store {what}",
            hint="free space in the server's data directory (or raise its quota), then repeat: nothing stored is lost",
        ) from error


@contextmanager
def locked(path: str, *, create: bool = True, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file at `path` exclusively; yields whether it is held.

    Yields False, holding nothing, when `create` is off and the folder does not exist, or when `wait` is off and
    someone else holds it. The holder may unlink the lock file (or its folder): whoever waited for the old file sees
    that it is no longer the one at `path` and starts over on the new one.
    """
    fd = _acquire(path, create=create, wait=wait)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _acquire(path: str, *, create: bool, wait: bool) -> int | None:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            if not create:
                return None
            os.makedirs(os.path.dirname(path), exist_ok=True)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass  # unlinked while this call waited for it
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write every byte: a nearly full disk makes the kernel accept only some before it reports the error."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def bytes_in(folder: str) -> int:
    """How many bytes the files of a folder and the folders in it have; 0 if it does not exist."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        total += bytes_in(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # removed since it was listed
    except FileNotFoundError:
        return 0
    return total


def sync_folder(path: str) -> None:
    """Make names that were made, changed or removed in a folder outlast a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
