"""What this machine has and how busy it is: cores, memory, out-of-memory kills, load, disk.

Reads /proc, /sys and statvfs; changes nothing. Numbers the kernel does not tell are 0.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

FULL_BYTES = 1024 * 1024
FULL_FRACTION = 0.0001
_PROBE_BYTES = 64 * 1024
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def num_cpus() -> int:
    """Cores this process may use, which in a container or a batch job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) or 1


def _memory_info() -> dict[str, int]:
    numbers: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            numbers[name] = int(rest.split()[0]) * 1024
    return numbers


def _memory_cgroup() -> list[Path]:
    """The directories of our memory cgroup and of those above it, nearest first (version 1 or 2)."""
    found: list[Path] = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            number, controllers, path = line.rstrip("\n").split(":", 2)
            for root in ["/sys/fs/cgroup/memory"] * ("memory" in controllers.split(",")) + ["/sys/fs/cgroup"] * (
                number == "0"
            ):
                here = Path(root + path)
                found += [here, *[up for up in here.parents if str(up).startswith(root)]]
    return found


def mem_bytes_total() -> int:
    """Memory jobs can have: the machine's, or the smallest limit of a cgroup we are in."""
    total = _memory_info().get("MemTotal", 0)
    for folder in _memory_cgroup():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                total = min(total, int((folder / name).read_text()))
    return total


class OomCounter:
    """How often the kernel has killed a process for want of memory, as far as this machine tells."""

    def __init__(self) -> None:
        folders = _memory_cgroup()[:1]
        names = ("memory.events", "memory.oom_control")
        files = [folder / name for folder in folders for name in names]
        self._files = [Path("/proc/vmstat"), *[file for file in files if file.exists()]]

    def read(self) -> int:
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for line in file.read_text().splitlines():
                    if line.startswith("oom_kill "):
                        total += int(line.split()[1])
        return total


@dataclass(frozen=True, kw_only=True)
class Disk:
    free_bytes: int
    total_bytes: int

    @property
    def is_full(self) -> bool:
        return self.total_bytes > 0 and self.free_bytes < max(FULL_BYTES, self.total_bytes * FULL_FRACTION)


def disk(path: Path) -> Disk:
    try:
        stat = os.statvfs(path)
    except OSError:
        return Disk(free_bytes=0, total_bytes=0)
    return Disk(free_bytes=stat.f_bavail * stat.f_frsize, total_bytes=stat.f_blocks * stat.f_frsize)


def is_disk_full(path: Path) -> bool:
    """Whether nothing more can be written there. A quota shows only when one tries, so this tries."""
    if disk(path).is_full:
        return True
    probe = path / ".diamond-probe"
    with contextlib.suppress(OSError):
        probe.unlink()
    try:
        # A new file only: a job may have put a pipe there, which would wait for its reader.
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"\1" * _PROBE_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno in FULL_ERRORS
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return False


class NodeLoad:
    """The machine's own load, by anyone: CPU percent since the last look, memory in use."""

    def __init__(self) -> None:
        self._last = self._ticks()

    @staticmethod
    def _ticks() -> tuple[int, int]:
        with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat") as file:
            numbers = [int(text) for text in file.readline().split()[1:9]]
            return sum(numbers) - numbers[3] - numbers[4], sum(numbers)
        return 0, 0

    def cpu_percent(self) -> float:
        """Of all cores together, 0 to 100."""
        busy, total = self._ticks()
        busy_before, total_before = self._last
        if total <= total_before:
            return 0.0
        self._last = (busy, total)
        return round(100 * (busy - busy_before) / (total - total_before), 1)

    @staticmethod
    def mem_bytes_used() -> int:
        numbers = _memory_info()
        return max(0, numbers.get("MemTotal", 0) - numbers.get("MemAvailable", 0))
