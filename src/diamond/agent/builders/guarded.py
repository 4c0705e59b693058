"""Writes and reads files of an image's folder from outside a container, never through a link.

A base archive or a command of a recipe can leave a link anywhere in the folder; followed from here it would lead to the
account's own files. Each folder on the way is opened by itself, so that none of them can be one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from diamond.agent.builders.base import BuildProblem

_MAX_BYTES = 16 * 1024 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_inside(image: Path, name: str, text: str | bytes, mode: int = 0o644) -> None:
    """Put a new file at `name` of the folder, in place of one that is there: that may be shared with a layer.

    Raises:
        BuildProblem: a link, or something else that is no file, is in the way.
    """
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    with _parent(image, name, make=True) as (folder, last):
        try:
            if not stat.S_ISREG(os.lstat(last, dir_fd=folder).st_mode):
                raise _refused(name)
            os.unlink(last, dir_fd=folder)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(last, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)


def read_inside(image: Path, name: str) -> bytes | None:
    """What a file of the folder holds; None when there is none, or one that nobody would write by hand.

    Raises:
        BuildProblem: a link, or something else that is no file, is in the way.
    """
    try:
        with _parent(image, name, make=False) as (folder, last):
            # Without O_NONBLOCK a pipe would keep us waiting for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(last, flags, dir_fd=folder), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise _refused(name)
                return file.read() if found.st_size <= _MAX_BYTES else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _refused(name) from error
        raise


@contextlib.contextmanager
def _parent(image: Path, name: str, *, make: bool) -> Iterator[tuple[int, str]]:
    """The folder that `name` is in, opened, and the last part of it."""
    *parts, last = name.split("/")
    assert all(part not in ("", ".", "..") for part in (*parts, last)), name
    folder = os.open(image, _FOLDER)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=folder)
            try:
                below = os.open(part, _FOLDER, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise _refused(name) from error
                raise
            os.close(folder)
            folder = below
        yield folder, last
    finally:
        os.close(folder)


def _refused(name: str) -> BuildProblem:
    return BuildProblem(
        f"/{name} of the image, or a folder on the way to it, is a link or no plain file",
        hint="Diamond writes a file there itself: leave it out of the base and of the recipe's commands",
        code="link",
    )
