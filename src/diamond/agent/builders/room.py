"""How much an archive may become, and whether the disk has room for it.

A few kilobytes can say that they are terabytes, or a million empty files. What an archive may turn into is therefore
bounded by its own size and by fixed limits, and the disk is looked at while files are written: an import that would
fill it ends while everybody else can still write.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from diamond.agent.builders.base import BuildProblem

_GIB = 1024**3
_LOOK_EVERY_BYTES = 64 * 1024 * 1024
_LOOK_EVERY_ENTRIES = 1000
_ENTRY_BYTES = 512  # what an entry takes at least, somewhere
_SHOWN_CHARS = 120
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Attributes:
    max_bytes: of everything that is unpacked.
    max_ratio: of unpacked bytes to bytes of the archive, beyond the first `free_bytes`. Images compress to between a
        half and a tenth; gzip can do a thousand to one.
    keep_free_bytes: left on the disk, or a twentieth of the disk where that is less. Of the disk's places for files a
        twentieth is left, too.
    """

    max_entries: int = 2_000_000
    max_bytes: int = 256 * _GIB
    max_ratio: int = 100
    free_bytes: int = 2 * _GIB
    keep_free_bytes: int = _GIB

    def bytes_of(self, archive_bytes: int) -> int:
        return min(self.max_bytes, self.free_bytes + self.max_ratio * archive_bytes)


LIMITS = Limits()


class Room:
    """Counts what one archive becomes, in all of its layers, in a folder."""

    def __init__(self, archive: Path, folder: Path, limits: Limits = LIMITS) -> None:
        self._archive, self._folder, self._limits = archive, folder, limits
        self.max_bytes = limits.bytes_of(archive.stat().st_size)
        self._bytes = self._entries = 0
        self._look(0)

    def enter(self, name: str) -> None:
        """There is one more entry. Raises BuildProblem: it is one too many."""
        self._entries += 1
        if self._entries > self._limits.max_entries:
            raise self._too_large(name, f"is one more than the {self._limits.max_entries:,} entries an image may have")
        self._unseen_entries += 1
        self.take(name, _ENTRY_BYTES)

    def take(self, name: str, size_bytes: int) -> None:
        """Room for `size_bytes` more, asked for before they are written. Raises BuildProblem: there is none."""
        self._bytes += size_bytes
        if self._bytes > self.max_bytes:
            raise self._too_large(
                name, f"brings it to more than {self.max_bytes / 1e9:.1f} GB unpacked, the limit for a file of its size"
            )
        self._unseen_bytes += size_bytes
        if self._unseen_bytes >= self._bytes_till_look or self._unseen_entries >= self._entries_till_look:
            self._look(size_bytes)

    def explain(self, error: OSError, name: str) -> BuildProblem:
        """What to say of an error that came up while an entry was unpacked."""
        if error.errno in _FULL:
            return self._full(f"{os.strerror(error.errno or 0)} at {show(name)}")
        return BuildProblem(
            f"{self._archive} cannot be unpacked here: its entry {show(name)}: {error.strerror or error}",
            hint="the archive holds what this file system or account cannot make",
            code="base",
        )

    def _look(self, coming_bytes: int) -> None:
        self._unseen_bytes = self._unseen_entries = 0
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        left = free - min(self._limits.keep_free_bytes, disk.f_blocks * disk.f_frsize // 20)
        if left < coming_bytes:
            raise self._full(f"{free / 1e6:,.0f} MB are left")
        # Some file systems make places for files as they are needed, and count none.
        places = disk.f_favail - disk.f_files // 20 if disk.f_files else _LOOK_EVERY_ENTRIES * 4
        if places < 1:
            raise self._full(f"it has room for {disk.f_favail:,} more files")
        # More often the less there is, since others write, too.
        self._bytes_till_look = min(_LOOK_EVERY_BYTES, (left - coming_bytes) // 4)
        self._entries_till_look = min(_LOOK_EVERY_ENTRIES, places // 4)

    def _full(self, why: str) -> BuildProblem:
        return BuildProblem(
            f"{self._archive} was not unpacked to its end: the disk of {self._folder} is nearly full ({why})",
            hint="remove images and kept layers you do not need (diamond image prune), or have the agent keep images "
            "on a larger file system: image_root in its policy.toml",
            code="disk_full",
        )

    def _too_large(self, name: str, why: str) -> BuildProblem:
        return BuildProblem(
            f"{self._archive} is refused: its entry {show(name)} {why}",
            hint="an archive like this is made to fill disks; if it is not, make a smaller image, or unpack it "
            "yourself and give the folder as the base",
            code="too_large",
        )


def show(name: str) -> str:
    """A name from an archive, fit for a message."""
    return repr(name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}…")
