"""Jobs inside of pilots on this machine: seen in its process table, and ended with their pilot."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from diamond.agent.processes import boot_id, environment_value, is_running, members, scan, send, unix_time_of_start
from diamond.agent.schedulers.base import JobProcesses, ShellCommand, Submission
from diamond.agent.schedulers.local.scheduler import LocalScheduler
from diamond.agent.schedulers.local.shells import LocalShells
from diamond.agent.schedulers.pool_result import pilots_of
from diamond.agent.schedulers.pooled import Pooled, PooledJob
from diamond.core.rundir import ProcessMark, RunDir, read_json, read_process_mark


class PooledLocal(Pooled):
    """Around a `LocalScheduler`. A place there has one node."""

    def __init__(self, base: LocalScheduler, jobs_dir: Path) -> None:
        self._local = base
        super().__init__(base, jobs_dir)

    def processes(self) -> tuple[JobProcesses, ...]:
        """The jobs that run, without pilots, which do nothing themselves."""
        mine = self._local.processes()
        pilots = {one.name: one for one in mine if RunDir(one.run_dir).steward.exists()}
        with self._lock:
            inside = [job for job in self._jobs.values() if job.is_running]
        found = [one for one in mine if one.name not in pilots]
        for job in inside:
            mark = _mark(job)
            if mark is not None:
                found.append(
                    JobProcesses(
                        name=job.name,
                        run_dir=job.run_dir.path,
                        pid=mark.pid,
                        started_at=unix_time_of_start(mark.start_ticks) if mark.start_ticks else 0.0,
                        gpus=_gpus(job, pilots.get(job.spooled.place.nodes[0].pilot)),
                    )
                )
        return tuple(found)

    def shell_argv(self, name: str, argv: Sequence[str], tty: bool, node: int = 0) -> ShellCommand:
        if self._job(name) is None:
            return self._local.shell_argv(name, argv, tty, node)
        return LocalShells.shell_argv(self, name, argv, tty, node)

    def _refusal(self, submission: Submission) -> str:
        if submission.num_nodes > 1:
            return f"the task asks for {submission.num_nodes} nodes of a pool; this endpoint has 1"
        return ""

    def _end_what_is_left(self, job: PooledJob) -> None:
        """A steward that was killed cannot end its steps, and they are in sessions of their own."""
        mark = _mark(job)
        if mark is None:
            return
        folder = str(job.run_dir.path)
        for process in members(mark.pid, scan()):
            if environment_value(process.pid, "DIAMOND_RUN_DIR") in (folder, None):
                send(process, signal.SIGKILL)


def _mark(job: PooledJob) -> ProcessMark | None:
    """Its script, if it runs on this machine."""
    mark = read_process_mark(job.run_dir)
    if mark is None or mark.pid <= 1 or mark.boot_id != boot_id() or not is_running(mark.pid, mark.start_ticks):
        return None
    return mark


def _gpus(job: PooledJob, pilot: JobProcesses | None) -> tuple[int, ...]:
    """Which devices it has: the steward notes their places among those of the pilot."""
    noted = read_json(pilots_of(job.spooled)[0].step(job.name, "run")).get("gpus")
    if pilot is None or not isinstance(noted, list):
        return ()
    return tuple(pilot.gpus[one] for one in noted if isinstance(one, int) and 0 <= one < len(pilot.gpus))


def local_with_pools(jobs_dir: Path) -> PooledLocal:
    """This machine's own queue, and jobs in the pilots that it runs."""
    return PooledLocal(LocalScheduler(jobs_dir), jobs_dir)
