"""An image that lies elsewhere on this file system, made one of ours: by a link where nobody else can change it, by a
copy everywhere else.

A link to what another account may write means whatever that account puts there later, whatever was checked before: it
would run in our jobs. So such an image is copied first, and what was copied is what is checked.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from diamond.agent.builders.store import measure

_CHUNK_BYTES = 4 * 1024 * 1024


def borrow(source: Path, target: Path) -> tuple[str, bool]:
    """Make the image `source` be at `target`; its digest as it is there, and whether it was copied.

    Raises:
        OSError: it cannot be read, or not be written here.
    """
    real = Path(os.path.realpath(source, strict=True))
    if is_ours(real):
        os.symlink(real, target)
        return measure(target)[0], False
    if real.is_dir():
        shutil.copytree(real, target, symlinks=True)
    else:
        _copy(real, target)
    return measure(target)[0], True


def is_ours(path: Path) -> bool:
    """Whether only this account, and root, can change what is at `path`, or put something else there.

    `path` must be free of links. Permissions that access control lists give show in those of the group.
    """
    return all(_is_kept(place) for place in path.parents) and _is_whole(path)


def _is_whole(path: Path) -> bool:
    if not _is_closed(found := path.lstat()):
        return False
    if not stat.S_ISDIR(found.st_mode):
        return True
    for current, folders, names in os.walk(path, onerror=_raise):
        for name in (*folders, *names):
            entry = os.lstat(os.path.join(current, name))
            if not stat.S_ISLNK(entry.st_mode) and not _is_closed(entry):
                return False
    return True


def _is_closed(found: os.stat_result) -> bool:
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_kept(folder: Path) -> bool:
    """Whether nobody else can rename what lies in a folder: in a sticky one, others only what is theirs."""
    found = folder.lstat()
    return found.st_uid in (os.getuid(), 0) and (
        not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or bool(found.st_mode & stat.S_ISVTX)
    )


def _copy(source: Path, target: Path) -> None:
    # Without waiting for the other end of what turns out to be a pipe.
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "it is not a plain file", str(source))
        with target.open("xb") as copy:
            shutil.copyfileobj(file, copy, _CHUNK_BYTES)


def _raise(error: OSError) -> None:
    raise error
