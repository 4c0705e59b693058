"""Unpacks entries of tar archives into a folder, and nowhere else, whatever the archive says.

Every folder on the way to an entry is opened by itself, from the root down, and no call here is given a path of more
than one component. A link that an earlier entry left is read as the image would read it: its target begins at the
folder, not at this machine's root. Owners are given up, since an ordinary account has only one, and so are devices,
pipes and the rights to become another account.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path

from diamond.agent.builders.removing import remove_at
from diamond.agent.builders.room import Room, show
from diamond.agent.builders.tars import BadArchive, check_depth, members, parts_of

_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # asks nothing of a file system on the network
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40
_MAX_TARGET_BYTES = 4095
_MAX_TIME = 2**33
_CHUNK_BYTES = 1024 * 1024
_GONE = ".wh."
_ALL_GONE = ".wh..wh..opq"
_NOTHING = ("", ".", "..")


class Unpacker:
    """Puts archives, one over the other, into one folder. Use it as a context manager.

    Args:
        root: the folder, which must exist; nobody else may write in it meanwhile.
        whiteouts: the archives are layers of an image: `.wh.NAME` takes NAME of the layers below away.
        closed: refuse symbolic links that lead out of the folder.
        leave: folders at the top whose contents are left out.
    """

    def __init__(
        self, root: Path, room: Room, *, whiteouts: bool = False, closed: bool = False, leave: Collection[str] = ()
    ) -> None:
        self._root = os.open(root, _PLACE)
        self._room, self._whiteouts, self._closed, self._leave = room, whiteouts, closed, leave
        self._made: set[tuple[str, ...]] = set()  # by this layer: what it takes away are only files of those below it

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def apply(self, archive: tarfile.TarFile) -> None:
        """Unpack an archive from `tars.open_tar`.

        Raises:
            BadArchive: an entry of it is refused.
            BuildProblem: it is too large, there is no room, or an entry cannot be made here.
        """
        self._made.clear()
        for member in members(archive):
            self._room.enter(member.name)
            try:
                self._unpack(archive, member)
            except OSError as error:
                raise self._room.explain(error, member.name) from error

    def _unpack(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        *folders, name = parts_of(member.name) or ("",)
        if not name:
            if member.isdir():
                return  # the folder itself
            raise BadArchive(f"{show(member.name)} is no name of a file")
        if folders and folders[0] in self._leave:
            return
        if self._whiteouts and name.startswith(_GONE):
            self._take_away(tuple(folders), name, member.name)
            return
        if not (member.isdir() or member.isreg() or member.issym() or member.islnk()):
            return
        with self._folder(tuple(folders), member.name, make=True) as (folder, path):
            self._make(archive, member, folder, path, name)
            if self._whiteouts:
                made = (*path, name)
                self._made.update(made[:count] for count in range(1, len(made) + 1))

    # -- making --------------------------------------------------------------------------------------------------

    def _make(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, path: tuple[str, ...], name: str
    ) -> None:
        if member.isdir():
            _make_folder(folder, name, _mode(member) | 0o700)
        elif member.isreg():
            self._room.take(member.name, member.size)
            remove_at(folder, name)
            self._write(archive, member, folder, name)
        elif member.issym():
            self._check_target(member, path)
            remove_at(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
        else:
            self._link(member, folder, path, name)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        source = archive.extractfile(member)
        assert source is not None, member.name
        with os.fdopen(os.open(name, _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
            written = 0
            while piece := source.read(min(_CHUNK_BYTES, member.size - written)):
                file.write(piece)
                written += len(piece)
            if written != member.size:
                raise BadArchive(f"the archive ends in the middle of {show(member.name)}")
            file.flush()
            os.fchmod(file.fileno(), _mode(member) | 0o600)
            time_s = _time(member)
            os.utime(file.fileno(), (time_s, time_s))

    def _check_target(self, member: tarfile.TarInfo, path: tuple[str, ...]) -> None:
        target = member.linkname
        if not target or "\0" in target or len(os.fsencode(target)) > _MAX_TARGET_BYTES:
            raise BadArchive(f"{show(member.name)} is a link to {show(target)}, which is no path")
        if not self._closed:
            return
        parts = [part for part in target.split("/") if part not in ("", ".")]
        up = next((count for count, part in enumerate(parts) if part != ".."), len(parts))
        # `path` holds no link, so as many steps up as it has parts stay inside. After a name a step up might follow
        # another link, which nobody can count.
        if target.startswith("/") or up > len(path) or ".." in parts[up:]:
            raise BadArchive(f"{show(member.name)} is a link to {show(target)}, which leads out of its folder")

    def _link(self, member: tarfile.TarInfo, folder: int, path: tuple[str, ...], name: str) -> None:
        *folders, last = parts_of(member.linkname, member.name) or ("",)
        if not last:
            raise BadArchive(f"{show(member.name)} is a hard link to {show(member.linkname)}, which is no file")
        try:
            with self._folder(tuple(folders), member.name, make=False) as (source, source_path):
                if stat.S_ISDIR(os.stat(last, dir_fd=source, follow_symlinks=False).st_mode):
                    raise BadArchive(f"{show(member.name)} is a hard link to {show(member.linkname)}, a folder")
                if (*source_path, last) == (*path, name):
                    return
                remove_at(folder, name)
                os.link(last, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError as error:
            raise BadArchive(
                f"{show(member.name)} is a hard link to {show(member.linkname)}, which is not there"
            ) from error

    # -- taking away ---------------------------------------------------------------------------------------------

    def _take_away(self, folders: tuple[str, ...], name: str, entry: str) -> None:
        gone = name[len(_GONE) :]
        if gone in _NOTHING:
            raise BadArchive(f"{show(entry)} takes nothing away that has a name")
        if gone.startswith(_GONE) and name != _ALL_GONE:
            return  # what a file system that once kept layers noted for itself
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            self._folder(folders, entry, make=False) as (folder, path),
        ):
            if name == _ALL_GONE:
                self._clear(folder, path)
            elif (*path, gone) not in self._made:
                remove_at(folder, gone)
            else:
                with _opened(folder, gone) as below:
                    self._clear(below, (*path, gone))

    def _clear(self, folder: int, path: tuple[str, ...]) -> None:
        """Take away what other layers put into a folder."""
        with _opened(folder, ".") as opened:
            names = os.listdir(opened)
        for name in names:
            if (*path, name) not in self._made:
                remove_at(folder, name)
            elif stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                with _opened(folder, name) as below:
                    self._clear(below, (*path, name))

    # -- finding -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _folder(self, parts: tuple[str, ...], entry: str, *, make: bool) -> Iterator[tuple[int, tuple[str, ...]]]:
        """A folder of the image, opened, and its path without links. With `make`, it is made where it is missing."""
        walk = _Walk(self._root, entry)
        try:
            walk.go(parts, make=make)
            yield walk.here, tuple(walk.path)
        finally:
            walk.close()


class _Walk:
    """From the root of an image down, one component at a time."""

    def __init__(self, root: int, entry: str) -> None:
        self._root, self._entry = root, entry
        self._opened: list[int] = []
        self._links = 0
        self.path: list[str] = []

    @property
    def here(self) -> int:
        return self._opened[-1] if self._opened else self._root

    def close(self) -> None:
        while self._opened:
            self._up()

    def go(self, parts: tuple[str, ...], *, make: bool) -> None:
        todo = list(reversed(parts))
        while todo:
            part = todo.pop()
            if part == "..":  # of a link
                self._up()
            elif part not in _NOTHING:
                target = self._enter(part, make)
                if target.startswith("/"):
                    self.close()
                todo.extend(reversed(target.split("/")))

    def _up(self) -> None:
        if self._opened:  # above the root there is only the root
            os.close(self._opened.pop())
            self.path.pop()

    def _enter(self, part: str, make: bool) -> str:
        """Go into a folder; or, where there is a link, stay and say where it leads."""
        try:
            below = os.open(part, _PLACE, dir_fd=self.here)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                if stat.S_ISLNK(os.stat(part, dir_fd=self.here, follow_symlinks=False).st_mode):
                    return self._target(part)
                if not make:
                    raise
                os.unlink(part, dir_fd=self.here)
            elif error.errno != errno.ENOENT or not make:
                raise
            os.mkdir(part, 0o755, dir_fd=self.here)
            below = os.open(part, _PLACE, dir_fd=self.here)
        self._opened.append(below)
        self.path.append(part)
        length = sum(len(os.fsencode(one)) + 1 for one in self.path)
        check_depth(len(self.path) + 1, length, show(self._entry))
        return ""

    def _target(self, part: str) -> str:
        self._links += 1
        if self._links > _MAX_LINKS:
            raise BadArchive(f"on the way to {show(self._entry)} there are too many links")
        return os.readlink(part, dir_fd=self.here)


def _make_folder(parent: int, name: str, mode: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            remove_at(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
    with _opened(parent, name) as folder:
        os.fchmod(folder, mode)


@contextlib.contextmanager
def _opened(parent: int, name: str) -> Iterator[int]:
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def _mode(member: tarfile.TarInfo) -> int:
    return stat.S_IMODE(member.mode) & 0o1777  # rights of another account mean nothing here


def _time(member: tarfile.TarInfo) -> float:
    return min(max(float(member.mtime), 0.0), _MAX_TIME) if math.isfinite(member.mtime) else 0.0
