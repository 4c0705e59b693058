"""Small real file systems, to fill them up for real."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path


@lru_cache
def why_not() -> str | None:
    """What keeps these tests from running here; None when nothing does."""
    if os.geteuid() != 0:
        return "mounting a small tmpfs, to fill a disk for real, needs root"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(_mount(Path(folder), 1), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"mounting a small tmpfs, to fill a disk for real, is not allowed here ({done.stderr.strip()})"
        subprocess.run(["umount", folder], check=True)
    return None


def _mount(path: Path, mib: int) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0700", "tmpfs", str(path)]


@contextmanager
def small_disk(path: Path, mib: int) -> Iterator[Path]:
    """A tmpfs of `mib` MiB mounted at `path`."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(_mount(path, mib), check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_up_to(folder: Path, *, leave: int) -> Path:
    """Fill the disk but for `leave` bytes; removing the returned file makes room again."""
    filler = folder / "filler"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler.write_bytes(b"\0" * (free - leave))
    return filler


def fill(path: Path) -> Path:
    """Take every last block of the file system `path` is on; returns the file to delete for relief."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return filler
