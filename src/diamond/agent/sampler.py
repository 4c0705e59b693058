"""Every two seconds: what each running job uses of CPU, memory and its GPUs, appended to the job's util.jsonl.

Reads the process table of this machine, so it serves schedulers that run jobs here (`HasProcesses`). Jobs younger
than one period are not looked at: short tasks cost nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from diamond.agent.gpus import GpuMonitor
from diamond.agent.machine import NodeLoad
from diamond.agent.processes import TICKS_PER_S, Process, members, scan
from diamond.agent.schedulers.base import HasProcesses, JobProcesses
from diamond.core.rundir import RunDir

PERIOD_S = 2.0


class Sampler:
    """A thread. `cpu_percent` and `mem_bytes_used` are the machine's own, for heartbeats."""

    def __init__(self, source: HasProcesses, gpus: GpuMonitor, *, period_s: float = PERIOD_S) -> None:
        self._source = source
        self._gpus = gpus
        self._period_s = period_s
        self._stop = threading.Event()
        self._load = NodeLoad()
        self._ticks: dict[str, tuple[float, dict[tuple[int, int], int]]] = {}
        self.cpu_percent = 0.0
        self.mem_bytes_used = self._load.mem_bytes_used()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.cpu_percent = self._load.cpu_percent()
            self.mem_bytes_used = self._load.mem_bytes_used()
            self.sample()

    def sample(self) -> None:
        """Take one sample of every job that is old enough."""
        now = time.time()
        jobs = [job for job in self._source.processes() if now - job.started_at >= self._period_s]
        self._ticks = {job.name: self._ticks[job.name] for job in jobs if job.name in self._ticks}
        if not jobs:
            return
        table = scan()
        for job in jobs:
            record = self._measure(job, members(job.pid, table), now)
            append(RunDir(job.run_dir).stream("util"), record)

    def _measure(self, job: JobProcesses, processes: list[Process], now: float) -> dict[str, float]:
        ticks = {(process.pid, process.start_ticks): process.cpu_ticks for process in processes}
        record: dict[str, float] = {"t": round(now, 3)}
        if job.name in self._ticks:
            then, before = self._ticks[job.name]
            spent = sum(count - before.get(key, 0) for key, count in ticks.items())
            record["sys/cpu_percent"] = round(100 * spent / TICKS_PER_S / max(0.001, now - then), 1)
        self._ticks[job.name] = (now, ticks)
        record["sys/rss_bytes"] = sum(process.rss_bytes for process in processes)
        for position, index in enumerate(job.gpus):
            sample = self._gpus.sample(index)
            if sample is not None:
                record[f"sys/gpu{position}_percent"], record[f"sys/gpu{position}_mem_bytes"] = sample
        return record


def append(path: Path, *records: Mapping[str, float]) -> None:
    """Add lines to a job's samples; a link or pipe in their place is left alone."""
    data = b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)
    with contextlib.suppress(OSError):  # a full disk stops samples, not jobs
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
