"""Removes run directories, whatever jobs have put there: read-only folders, trees deeper than any path is long.

Must be told which are needed: it knows no jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from diamond.core.rundir import RunDir

log = logging.getLogger(__name__)

_MAX_PROBLEMS = 1000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def remove_old(jobs_dir: Path, kept: set[str], older_than_s: float) -> None:
    """Remove run directories that are not `kept`, have not changed for so long, and hold nothing a kept one needs."""
    oldest = time.time() - older_than_s
    old: list[Path] = []
    needed: set[Path] = set()
    with contextlib.suppress(OSError):
        for folder in list(jobs_dir.iterdir()):
            with contextlib.suppress(OSError):
                if folder.name not in kept and os.lstat(folder).st_mtime < oldest:
                    old.append(folder)
                else:
                    needed.add(RunDir(folder).work_root.parent)  # of the first job of its chain
    for folder in old:
        if folder not in needed:
            remove(folder)


def remove(folder: Path) -> bool:
    """Remove a folder and all that is in it. False, and a line in the log, when something remains.

    Links are removed, not followed. Inner folders are moved up beside each other first, so neither depth nor
    length of paths matters, and permissions the owner took away are given back.
    """
    problems: list[str] = []
    try:
        with _opened(folder) as top:
            _empty(top, problems)
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder)
        return True
    except OSError as error:
        _note(problems, error)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        log.warning("%s cannot be removed: %s%s", folder, problems[0], more)
    return not problems


def _empty(top: int, problems: list[str]) -> None:
    numbers = itertools.count()
    stuck: set[str] = set()  # not tried again
    while True:
        names = [name for name in os.listdir(top) if name not in stuck]
        if not names:
            return
        for name in names:
            try:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
                    os.unlink(name, dir_fd=top)
                    continue
                with _opened(name, top) as inner:
                    _flatten(inner, top, numbers, problems)
                os.rmdir(name, dir_fd=top)
            except FileNotFoundError:
                continue
            except OSError as error:
                stuck.add(name)
                _note(problems, error)


def _flatten(inner: int, top: int, numbers: itertools.count[int], problems: list[str]) -> None:
    """Remove the files of a folder, and move its folders up."""
    for name in os.listdir(inner):
        try:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=inner).st_mode):
                os.unlink(name, dir_fd=inner)
                continue
            with _opened(name, inner):  # moving a folder writes to it
                pass
            while os.path.lexists(f"/proc/self/fd/{top}/{(new := f'.removing-{next(numbers)}')}"):
                pass
            os.rename(name, new, src_dir_fd=inner, dst_dir_fd=top)
        except FileNotFoundError:
            continue
        except OSError as error:
            _note(problems, error)


@contextlib.contextmanager
def _opened(name: str | Path, dir_fd: int | None = None) -> Iterator[int]:
    """A folder, with all its owner may do in it. By descriptor, so that a link put in its place is not followed."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        mode = stat.S_IMODE(os.fstat(place).st_mode)
        if mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{place}", mode | 0o700)
        fd = os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)
    try:
        yield fd
    finally:
        os.close(fd)


def _note(problems: list[str], error: OSError) -> None:
    if len(problems) < _MAX_PROBLEMS:
        problems.append(f"{error.filename!r}: {error.strerror}")
