"""Removes what others made: trees of any depth, with any modes, never through a link."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_HAND = 64  # folders open at once; what lies deeper is moved up first


def remove_tree(path: Path) -> None:
    """Remove a file or folder that is ours, as far as that can be done. One that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_at(parent, path.name, quietly=True)
        finally:
            os.close(parent)


def remove_at(parent: int, name: str, *, quietly: bool = False) -> None:
    """Remove `name`, a single component, from the folder that is open as `parent`.

    Raises:
        OSError: something of it stays; not with `quietly`.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name[:80]!r} is not the name of an entry")
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            if not quietly:
                raise
            return
        _Removal(quietly).remove(parent, name)


class _Removal:
    """Of one folder. Recursion ends at a fixed depth: a folder beyond is moved up to the top, and removed there."""

    def __init__(self, quietly: bool) -> None:
        self._quietly = quietly
        self._top = -1
        self._moved: list[str] = []

    def remove(self, parent: int, name: str) -> None:
        with self._tolerant():
            self._top = _open(parent, name)
            try:
                self._empty(self._top, 1)
                while self._moved:
                    self._remove_below(self._top, self._moved.pop(), 1)
            finally:
                os.close(self._top)
            os.rmdir(name, dir_fd=parent)

    def _remove_below(self, folder: int, name: str, depth: int) -> None:
        with self._tolerant():
            below = _open(folder, name)
            try:
                self._empty(below, depth + 1)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=folder)

    def _empty(self, folder: int, depth: int) -> None:
        with os.scandir(folder) as entries:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in inside:
            if not is_folder:
                with self._tolerant():
                    os.unlink(name, dir_fd=folder)
            elif depth < _AT_HAND:
                self._remove_below(folder, name, depth)
            else:
                with self._tolerant():
                    os.close(_open(folder, name))  # moving a folder elsewhere takes the right to write into it
                    new = f".gone-{secrets.token_hex(8)}"
                    os.rename(name, new, src_dir_fd=folder, dst_dir_fd=self._top)
                    self._moved.append(new)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass  # somebody else was quicker
        except OSError:
            if not self._quietly:
                raise


def _open(parent: int, name: str) -> int:
    """A folder that can be emptied; images hold some that their owner may not enter."""
    pinned = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        mode = stat.S_IMODE(os.fstat(pinned).st_mode)
        if mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):
                os.chmod(f"/proc/self/fd/{pinned}", mode | 0o700)
        return os.open(".", _FOLDER, dir_fd=pinned)
    finally:
        os.close(pinned)
