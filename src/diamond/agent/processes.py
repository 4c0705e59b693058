"""What /proc tells of processes: who belongs to a job, who catches a signal, how much memory is in use.

Owns no process and keeps no state. Everything here is read-only but `send`, and everything tolerates processes that
end while they are being looked at.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table. `cpu_ticks` is user and system time together."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    cpu_ticks: int
    start_ticks: int
    rss_bytes: int

    @property
    def is_live(self) -> bool:
        return self.state not in "ZX"


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return "none"


def boot_clock_s() -> float:
    """Seconds since boot, suspended time included: the clock in which the kernel notes process starts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def unix_time_of_start(start_ticks: int) -> float:
    return time.time() - (boot_clock_s() - start_ticks / TICKS_PER_S)


def read_process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in brackets may itself hold brackets and blanks; the fields begin after the last one.
            fields = file.read().rpartition(b")")[2].split()
        return Process(
            pid=pid,
            state=fields[0].decode(),
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start_ticks=int(fields[19]),
            rss_bytes=int(fields[21]) * PAGE_BYTES,
        )
    except (OSError, ValueError, IndexError):
        return None


def is_running(pid: int, start_ticks: int) -> bool:
    """Whether this very process (not a later one of the same number) is there and not a zombie.

    `start_ticks` 0 means that whoever recorded the process could not read its start.
    """
    found = read_process(pid)
    return found is not None and found.is_live and start_ticks in (0, found.start_ticks)


def scan() -> list[Process]:
    """All live processes of this machine that we may see."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None and process.is_live]


def members(leader: int, table: Iterable[Process]) -> list[Process]:
    """The processes of a job: its leader's session, and everything descended from a process of it.

    Number 0 is nobody's and 1 everybody's ancestor: whoever passes them does not know the leader, and gets no one.
    """
    if leader <= 1:
        return []
    table = list(table)
    inside = {process.pid for process in table if process.session == leader or process.pid == leader}
    if not inside:
        return []
    children: dict[int, list[int]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process.pid)
    todo = list(inside)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in inside:
                inside.add(child)
                todo.append(child)
    return [process for process in table if process.pid in inside]


def environment_value(pid: int, name: str) -> str | None:
    """A variable in the environment a process was started with; None when unset or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = file.read()
    except OSError:
        return None
    prefix = name.encode() + b"="
    for pair in found.split(b"\0"):
        if pair.startswith(prefix):
            return pair[len(prefix) :].decode(errors="replace")
    return None


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal. The default action of SIGUSR1 would kill it."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send(process: Process, number: signal.Signals) -> None:
    """Signal this very process: a pidfd cannot come to mean another one between the look and the signal."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            now = read_process(process.pid)
            if now is not None and now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def shared_out_bytes(pid: int) -> int | None:
    """Memory of a process with shared pages divided among their users (PSS); None when the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def memory_in_use(processes: Iterable[Process], limit_bytes: int) -> int:
    """Bytes a job holds. Exact only when it matters.

    Resident sizes added up count a page that eight data loaders share eight times. So when the cheap sum is over the
    limit, the kernel is asked for each process's share before anybody is accused of anything.
    """
    processes = list(processes)
    total = sum(process.rss_bytes for process in processes)
    if total <= limit_bytes:
        return total
    shares = [(process, shared_out_bytes(process.pid)) for process in processes]
    return sum(process.rss_bytes if share is None else share for process, share in shares)
