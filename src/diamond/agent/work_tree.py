"""Looks into a folder that somebody else is changing meanwhile, and never out of it.

A job may put a link in the place of a folder between two looks at it. So the folder is opened once, and everything in
it is reached from there, one component at a time, each opened by itself. Links are followed here, not by the kernel,
as far as they stay inside. Reads only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_LINKS = 40  # as the kernel has it


class LeadsOut(Exception):
    """A link on the way leads out of the folder."""


class WorkTree:
    """The folder `root`, pinned. Use it as a context manager.

    Attributes:
        is_link: there was a link in its place, or in that of the folder around it; then it is empty.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_link = os.path.islink(root) or os.path.islink(root.parent)
        self._real = os.path.realpath(root)
        self._fd = self._last_fd = -1
        self._last, self._last_real = "", list[str]()
        if not self.is_link:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._fd = _pin(root)
        if self._fd >= 0 and not stat.S_ISDIR(os.fstat(self._fd).st_mode):  # a link was quicker than we were
            self.__exit__()
            self.is_link = True

    def __enter__(self) -> WorkTree:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._fd, self._last_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._last_fd = -1

    def resolve(self, relative: str) -> tuple[str, int]:
        """Where a path below the folder is, without links, and the mode of what is there.

        Raises:
            LeadsOut: a link leads elsewhere.
            OSError: there is no such file, or it cannot be reached.
        """
        with self._reached(relative) as (fd, real):
            return "/".join(real), os.fstat(fd).st_mode

    def entries(self, relative: str) -> list[tuple[str, bool]]:
        """Names in a folder and whether each is a folder itself, sorted. Raises as `resolve`."""
        with (
            self._reached(relative) as (fd, real),
            _opened(".", _FOLDER, fd) as folder,
            os.scandir(folder) as entries,
        ):
            self._keep(relative, real, fd)
            return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)

    @contextlib.contextmanager
    def open(self, real: str) -> Iterator[int]:
        """A plain file, to be read, at a path that `resolve` gave. Raises OSError if there is a link by now."""
        *folders, name = real.split("/")
        with self._reached("/".join(folders), follow=False) as (folder, _), _opened(name, _FILE, folder) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "is not a plain file any more")
            yield fd

    @contextlib.contextmanager
    def _reached(self, relative: str, *, follow: bool = True) -> Iterator[tuple[int, list[str]]]:
        """What a path leads to, opened with O_PATH, and its components without links."""
        here, real, rest = self._start(relative, follow)
        todo = list(reversed(rest.split("/")))
        links = 0
        try:
            while todo:
                part = todo.pop()
                if part in ("", "."):
                    continue
                if part == "..":
                    if not real:
                        raise LeadsOut(relative)
                    here = self._again(here, todo, real[:-1], real)
                    continue
                next_fd = os.open(part, _PLACE, dir_fd=here)
                if not stat.S_ISLNK(os.fstat(next_fd).st_mode):
                    os.close(here)
                    here = next_fd
                    real.append(part)
                    continue
                with _closing(next_fd):
                    target = os.readlink("", dir_fd=next_fd)
                links += 1
                if links > _MAX_LINKS or not follow:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith("/"):
                    target = self._below(target)
                    here = self._again(here, todo, [], real)
                todo.extend(reversed(target.split("/")))
            yield here, real
        finally:
            os.close(here)

    def _start(self, relative: str, follow: bool) -> tuple[int, list[str], str]:
        """At the folder that was last listed, where that is on the way, and what is left to go."""
        if self._last_fd >= 0:
            known = self._last if follow else "/".join(self._last_real)
            if relative == known or relative.startswith(f"{known}/"):
                return os.dup(self._last_fd), list(self._last_real), relative[len(known) :]
        return os.dup(self._root()), [], relative

    def _keep(self, relative: str, real: list[str], fd: int) -> None:
        """Trees may be thousands of folders deep, and have thousands of files down there."""
        if relative:
            kept, self._last_fd = self._last_fd, os.dup(fd)
            self._last, self._last_real = relative, list(real)
            if kept >= 0:
                os.close(kept)

    def _again(self, here: int, todo: list[str], parts: list[str], real: list[str]) -> int:
        """Begin at the top again, to go to `parts` first: what was a folder's parent may be so no longer."""
        todo.extend(reversed(parts))
        real.clear()
        os.close(here)
        return os.dup(self._root())

    def _root(self) -> int:
        if self._fd < 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
        return self._fd

    def _below(self, target: str) -> str:
        if target != self._real and not target.startswith(f"{self._real}/"):
            raise LeadsOut(target)
        return target[len(self._real) :]


def _pin(root: Path) -> int:
    with _opened(str(root.parent), _PLACE | os.O_DIRECTORY) as parent:
        return os.open(root.name, _PLACE, dir_fd=parent)


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
    fd = os.open(name, flags, dir_fd=folder)
    with _closing(fd):
        yield fd


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
