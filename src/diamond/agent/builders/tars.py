"""Reads tar archives that somebody may have made to do harm.

Names become tuples of components that can only mean a place below the folder they are taken from. Headers, which the
standard library reads into memory whatever they say of their length, are bounded, and so is what compressed data
becomes. Nothing is written here.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from diamond.agent.builders.room import show

MAX_DEPTH = 128
MAX_NAME_BYTES = 255  # of a component: what file systems take
MAX_PATH_BYTES = 3000  # with the folder it is unpacked into, less than what the kernel takes
_MAX_HEADER_BYTES = 256 * 1024  # of all that is said about one entry
_MAX_XZ_BYTES = 512 * 1024 * 1024  # of memory, which an xz file asks for
_CHUNK_BYTES = 64 * 1024
_DAMAGED = (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)

# Everything the standard library raises for an archive that is none.
NO_TAR = (tarfile.TarError, *_DAMAGED, KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError,
          OverflowError)  # fmt: skip


class BadArchive(ValueError):
    """The archive holds something that is refused. The message names the entry."""


def parts_of(name: str, entry: str = "") -> tuple[str, ...]:
    """The components of a name in an archive, below the folder it is unpacked into; none for that folder itself.

    Raises:
        BadArchive: it leads elsewhere, or cannot be the name of a file.
    """
    said = show(entry or name) if not entry or entry == name else f"{show(entry)}, a link to {show(name)},"
    if "\0" in name:
        raise BadArchive(f"the name {said} holds a zero byte")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise BadArchive(f"{said} leads out of the archive's folder (..)")
    try:
        lengths = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError as error:
        raise BadArchive(f"the name {said} cannot be written in this machine's encoding") from error
    if max(lengths, default=0) > MAX_NAME_BYTES:
        raise BadArchive(f"{said} has a part of {max(lengths)} bytes; {MAX_NAME_BYTES} are allowed")
    check_depth(len(parts), sum(lengths) + len(parts), said)
    return parts


def check_depth(depth: int, path_bytes: int, said: str) -> None:
    """Raises BadArchive: the path is so deep or long that other programs could not use it."""
    if depth > MAX_DEPTH:
        raise BadArchive(f"{said} lies {depth} folders deep; {MAX_DEPTH} are allowed")
    if path_bytes > MAX_PATH_BYTES:
        raise BadArchive(f"{said} is a path of {path_bytes} bytes; {MAX_PATH_BYTES} are allowed")


@contextlib.contextmanager
def open_tar(source: Path | IO[bytes], max_bytes: int) -> Iterator[tarfile.TarFile]:
    """The archive, uncompressed on the way: plain, gzip, bzip2 or xz. `max_bytes` is how much may come of it.

    Go through it with `members`.
    """
    with contextlib.ExitStack() as opened:
        raw = opened.enter_context(source.open("rb")) if isinstance(source, Path) else source
        file = opened.enter_context(contextlib.closing(_uncompressed(raw)))
        guard = _Guard(file, max_bytes)
        # tarfile asks for nothing but read, seek and tell; it reads the first header at once.
        yield opened.enter_context(tarfile.TarFile(fileobj=cast(IO[bytes], guard), mode="r"))


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The entries of an archive from `open_tar`, without keeping them in memory. Raises what is in NO_TAR."""
    guard, kept = cast(_Guard, tar.fileobj), cast(Any, tar).members
    while True:
        with guard.reading_header():
            member = tar.next()
        kept.clear()
        if member is None:
            return
        if member.size < 0:
            raise BadArchive(f"{show(member.name)} has a size of {member.size} bytes")
        yield member


def _uncompressed(raw: IO[bytes]) -> IO[bytes]:
    start = raw.read(6)
    raw.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if start.startswith(b"BZh"):
        return cast(IO[bytes], bz2.BZ2File(raw))
    if start == b"\xfd7zXZ\x00":
        return cast(IO[bytes], io.BufferedReader(_Xz(raw), _CHUNK_BYTES))
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        raise BadArchive("it is compressed with zstd, which cannot be read here")
    return raw


class _Xz(io.RawIOBase):
    """Like LZMAFile, with a limit on memory: an xz file says itself how much of it is wanted, up to four gigabytes."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._rewind()

    def _rewind(self) -> None:
        self._raw.seek(0)
        self._at = 0
        self._reader: lzma.LZMADecompressor | None = None
        self._left = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        while True:
            if self._reader is None or self._reader.eof:
                rest = (self._reader.unused_data if self._reader else self._left) or self._raw.read(_CHUNK_BYTES)
                if not rest.strip(b"\0"):  # the end, or padding between streams
                    if not rest:
                        return b""
                    self._reader, self._left = None, b""
                    continue
                self._reader, self._left = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_BYTES), rest
            given = self._left or (self._raw.read(_CHUNK_BYTES) if self._reader.needs_input else b"")
            if not given and self._reader.needs_input:
                raise EOFError("the compressed data ends in the middle")
            self._left = b""
            if data := self._reader.decompress(given, size):
                self._at += len(data)
                return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        target = offset + (self._at if whence == os.SEEK_CUR else 0)
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the length is not known")
        if target < self._at:
            self._rewind()
        while self._at < target and self._read(min(_CHUNK_BYTES, target - self._at)):
            pass
        return self._at


class _Guard:
    """A file with limits: on how far it is read, and on how much of it is read into memory for one header."""

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._header_left: int | None = _MAX_HEADER_BYTES

    @contextlib.contextmanager
    def reading_header(self) -> Iterator[None]:
        self._header_left = _MAX_HEADER_BYTES
        try:
            yield
        finally:
            self._header_left = None

    def read(self, size: int = -1) -> bytes:
        if self._header_left is not None:
            if not 0 <= size <= self._header_left:
                raise BadArchive(f"more than {_MAX_HEADER_BYTES // 1024} KiB are said about one of its entries")
            self._header_left -= size
        with _damage_as_such():
            data = self._file.read(size)
        self._check(self._file.tell())
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            self._check(offset)
        with _damage_as_such():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def _check(self, at: int) -> None:
        if at > self._max_bytes:
            raise BadArchive(
                f"it becomes more than {self._max_bytes / 1e9:.1f} GB when it is uncompressed, the limit for its size"
            )


@contextlib.contextmanager
def _damage_as_such() -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise BadArchive(f"its compressed data is damaged ({error})") from error
    except OSError as error:
        if error.errno is None:  # how bz2 says it
            raise BadArchive(f"its compressed data is damaged ({error})") from error
        raise
