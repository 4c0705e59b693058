"""What a launcher knows of its ranks: a line to each, over which it sees where they are and why they stand still.

Copied beside launch.py into job directories: standard library only, Python 3.8 syntax, no import of Diamond's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterable
from typing import NamedTuple

PULSE = struct.Struct("<qqqddq")  # pid, step, phase, since, limit in s (0: ours), steps of this process
# In the order in which a rank comes through them between two steps.
PHASES = ("starting", "saving", "waiting for data", "in the training loop", "in backward", "in the optimizer")
STACK_SIGNAL = int(signal.SIGRTMIN) + 11 if hasattr(signal, "SIGRTMIN") else 0
PEER_LOST = 86  # a rank's exit code: another one is gone, and nothing else is wrong
HUNG = 87  # the launcher's: a rank stood still for too long
HANG_S = 600.0  # at least; no step of an honest program takes that much longer than all before it
HANG_TIMES = 20.0
START_S = 1800.0
STACK_BYTES = 64 * 1024


class Sign(NamedTuple):
    """Where a rank is. `since` is of the system's monotonic clock; `limit_s` 0: the launcher's own."""

    pid: int
    step: int
    phase: int
    since: float
    limit_s: float
    steps: int


class Line:
    """The launcher's end. `fds` are inherited by the process, which finds them in DIAMOND_LAUNCH_FDS."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._pulse, self._stack = _memory(PULSE.size), _memory(STACK_BYTES)
        self.fds = (self._theirs.fileno(), self._pulse, self._stack)
        self.env = {"DIAMOND_LAUNCH_FDS": ",".join(map(str, self.fds))}
        self._heard = b""
        self.longest_s = 0.0  # between two steps, so far
        self._last = Sign(0, 0, 0, 0.0, 0.0, 0)

    def started(self) -> None:
        """The process has its copies."""
        self._theirs.close()

    def said(self) -> set[str]:
        """What it has said since it was started: `here`, when it uses `diamond.train.run`; `cuda`, when it has a GPU
        already, which no standby may; `saved`, when there is a checkpoint; `failed`, when it ends by its own error."""
        with contextlib.suppress(OSError):
            while True:
                more = self._ours.recv(4096)
                if not more:
                    break
                self._heard += more
        return set(self._heard.decode("ascii", "replace").split())

    def tell(self, env: dict[str, str]) -> bool:
        """Send a standby to work, with these variables."""
        try:
            self._ours.sendall(json.dumps(env).encode() + b"\n")
        except OSError:
            return False
        return True

    def sign(self) -> Sign:
        raw = os.pread(self._pulse, PULSE.size, 0)
        found = Sign(*PULSE.unpack(raw)) if len(raw) == PULSE.size else Sign(0, 0, 0, 0.0, 0.0, 0)
        if found.steps > self._last.steps and self._last.steps:
            self.longest_s = max(self.longest_s, found.since - self._last.since)
        self._last = found
        return found

    def limit_s(self) -> float:
        """After how long without a sign it counts as hung."""
        found = self._last
        return found.limit_s or max(HANG_S, HANG_TIMES * self.longest_s)

    def stack(self, pid: int) -> str:
        """Where the threads of the process are, as far as it still answers."""
        if not pid or not STACK_SIGNAL:
            return ""
        with contextlib.suppress(OSError):
            os.ftruncate(self._stack, 0)
            os.lseek(self._stack, 0, os.SEEK_SET)
            os.kill(pid, STACK_SIGNAL)
            ends = time.monotonic() + 2.0
            size = -1
            while time.monotonic() < ends and size != os.fstat(self._stack).st_size:
                size = os.fstat(self._stack).st_size
                time.sleep(0.2 if size > 0 else 0.5)
            return os.pread(self._stack, STACK_BYTES, 0).decode("utf-8", "replace")
        return ""

    def close(self) -> None:
        self._ours.close()
        for fd in (self._pulse, self._stack):
            os.close(fd)


def _memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("diamond", 0)
    else:
        fd, path = tempfile.mkstemp(prefix="diamond-")
        os.unlink(path)
    os.ftruncate(fd, size)
    os.set_inheritable(fd, True)
    return fd


def process_state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0].decode()
    return ""


def hung(lines: dict[int, Line], now: float, awake_since: float = 0.0) -> list[int]:
    """Ranks that gave no sign for too long. The first step takes what it takes (data, compilers): it has longer."""
    signs = {rank: line.sign() for rank, line in lines.items()}
    if any(one.phase == 0 for one in signs.values()):  # not in the loop yet, or out of it again
        return []
    since = {rank: max(one.since, awake_since) for rank, one in signs.items()}
    late = {rank: now - since[rank] - (0.0 if one.steps else START_S) for rank, one in signs.items()}
    return [rank for rank, waited in late.items() if waited > lines[rank].limit_s()]


def blamed(signs: dict[int, Sign]) -> list[int]:
    """Who holds the others up: those that came least far. Ranks wait for each other in what comes later in a step."""
    least = min((one.step, one.phase) for one in signs.values())
    return sorted(rank for rank, one in signs.items() if (one.step, one.phase) == least)


def hang_report(lines: dict[int, Line], pids: dict[int, int], now: float) -> tuple[int, str, str]:
    """Who stands still, a sentence that says so, and the stacks."""
    signs = {rank: line.sign() for rank, line in lines.items()}
    guilty = blamed(signs)
    guilty = [rank for rank in guilty if process_state(pids[rank]) in ("T", "D")] or guilty
    first = signs[guilty[0]]
    where = PHASES[first.phase] if 0 <= first.phase < len(PHASES) else "somewhere"
    names = "rank " + str(guilty[0]) if len(guilty) == 1 else "ranks " + ", ".join(map(str, guilty[:8]))
    text = f"{names} gave no sign of life for {now - first.since:.0f} s, at step {first.step}, {where}"
    stacks = []
    for rank in guilty[:4]:
        state = process_state(pids[rank])
        stack = _decisive(lines[rank].stack(pids[rank]))
        if not stack:
            why = {"D": "it waits in the kernel: a dead file system or device", "T": "it was stopped by a signal"}
            stack = f"no stack: {why.get(state, 'it does not answer')}"
        stacks.append(f"rank {rank}: {stack}")
    return guilty[0], text, "\n".join(stacks)


def _decisive(dump: str) -> str:
    """Of a dump of all threads the main one, most recent call first; other threads only wait."""
    parts = dump.split("\n\n")
    chosen = [part for part in parts if "Current thread" in part.split("\n", 1)[0]] or parts[-1:]
    return "\n".join(line.strip() for line in chosen[0].strip().split("\n")[1:13])


def resident_bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
            total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def free_bytes(used: int) -> int:
    """What the job may still take of this node's memory, whoever limits it; `used` is what its ranks have."""
    found = [_available()]
    with contextlib.suppress(KeyError, ValueError):
        found.append(int(os.environ["SLURM_MEM_PER_NODE"]) * 2**20 - used)
    found += _left_in_cgroups()
    return max(0, min(found))


def _available() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _left_in_cgroups(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> list[int]:
    """Of the group this process is in and those above it. Pages of files do not count as taken: they give way."""
    found = []
    lines = []
    with contextlib.suppress(OSError):
        lines = _text(own).splitlines()
    for line in lines:
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        top = f"{root}/memory" if kind else root
        limit, used = _V1 if kind else _V2
        folder = top + path.rstrip("/")
        while folder.startswith(top):
            with contextlib.suppress(OSError, ValueError):
                stat = _text(f"{folder}/memory.stat").split()
                cache = int(stat[stat.index("inactive_file") + 1])
                found.append(int(_text(f"{folder}/{limit}")) - int(_text(f"{folder}/{used}")) + cache)
            folder = folder.rpartition("/")[0]
    return found


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = ("memory.max", "memory.current")  # where the first says "max", it is no number, and no limit


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
