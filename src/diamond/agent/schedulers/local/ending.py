"""How jobs of the local scheduler are made to end: time limits, memory limits, cancelling, and what they leave behind.

The order of things: the cause is on disk before the first signal, so a crash in between changes no reason. SIGTERM
goes to the job's whole session; whoever is left after the grace gets SIGKILL, the job's own shell last, so that it
can still record the exit status.

All methods run under the scheduler's lock; nothing here blocks.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from diamond.agent.processes import (
    Process,
    boot_clock_s,
    catches,
    environment_value,
    members,
    memory_in_use,
    scan,
    send,
)
from diamond.agent.schedulers import causes
from diamond.agent.schedulers.base import Observed, Submission
from diamond.agent.schedulers.local import spool
from diamond.core.durations import format_duration
from diamond.core.reasons import Reason

log = logging.getLogger(__name__)

_NUDGES_S = (0.3, 1.0)
_DRAIN_POLL_S = 0.1
_LEADER_S = 1.0  # from the SIGKILL of everybody else to that of the job's own shell
_STUCK_S = 10.0  # after that, a process that SIGKILL does not end (dead file system, GPU driver) is left behind
_WARN_AGAIN_S = 1.0
_MEMORY_EVERY_S = 1.0
_SWEEP_S = 1.0


class LocalJob:
    """A job in the scheduler's memory. Guarded by the scheduler's lock."""

    def __init__(self, spooled: spool.Spooled, observed: Observed) -> None:
        self.spooled = spooled
        self.observed = observed
        self.child: subprocess.Popen[bytes] | None = None  # None for adopted jobs
        self.pid = 0  # of the leader, whose session it names; 0 before the start
        self.start_ticks = 0
        self.pidfd = -1
        self.gpus: tuple[int, ...] = ()
        self.has_slots = False
        self.oom_kills: int | None = None
        self.cause: causes.KillCause | None = None
        self.kill_at_s: float | None = None  # on the boot clock
        self.told: set[tuple[int, int]] = set()  # pid and start of whom SIGTERM was sent to
        self.first_refused_s = 0.0
        self.known_since_s = boot_clock_s()

    @property
    def submission(self) -> Submission:
        return self.spooled.submission

    @property
    def run_dir(self) -> Path:
        return self.spooled.submission.run_dir

    @property
    def is_over(self) -> bool:
        return self.observed.state.is_final


class Timers:
    """What is to be done at which second of the boot clock (which goes on through a suspend)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None], LocalJob | None]] = []
        self._count = itertools.count()
        self._tidy_at = 1000

    def add(self, in_s: float, action: Callable[[], None], job: LocalJob | None = None) -> None:
        """Do `action` in `in_s` seconds, unless `job` is over by then."""
        heapq.heappush(self._heap, (boot_clock_s() + in_s, next(self._count), action, job))
        if len(self._heap) > self._tidy_at:
            # Limits of a day outlive jobs of a second.
            self._heap = [one for one in self._heap if one[3] is None or not one[3].is_over]
            heapq.heapify(self._heap)
            self._tidy_at = 2 * len(self._heap) + 1000

    def next_in_s(self) -> float | None:
        return max(0.0, self._heap[0][0] - boot_clock_s()) if self._heap else None

    def run_due(self, for_job: Callable[[LocalJob, Callable[[], None]], object]) -> None:
        """`for_job` does what is to be done for a job, and keeps its errors to that job."""
        now = boot_clock_s()
        while self._heap and self._heap[0][0] <= now:
            _, _, action, job = heapq.heappop(self._heap)
            if job is None:
                action()
            elif not job.is_over:
                for_job(job, action)


class Endings:
    def __init__(self, *, timers: Timers, grace_s: float, finish: Callable[[LocalJob], None]) -> None:
        self._timers = timers
        self._grace_s = grace_s
        self._finish = finish
        self._limited: dict[str, LocalJob] = {}  # running jobs with a memory limit
        self._watching_memory = False
        self._left_behind: dict[str, LocalJob] = {}  # ended, not yet swept up after

    # Limits

    def keep_limits(self, job: LocalJob, began_s: float) -> None:
        """Watch the time and memory limits of a job that runs since `began_s` (boot clock)."""
        limit_s, warn_s = job.submission.time_limit_s, job.submission.warning_s
        if limit_s is not None and warn_s is not None:
            ran_s = boot_clock_s() - began_s
            # Late is better than never: an agent that was away when it was due warns at once. Without a warning, a
            # link of a chain that is ended by the limit would count as having finished its task.
            self._timers.add(max(0.0, limit_s - warn_s - ran_s), lambda: self._warn(job), job)
            detail = f"the limit was {format_duration(limit_s)}"
            self._timers.add(max(0.0, limit_s - ran_s), lambda: self.end(job, Reason.TIME_LIMIT, detail), job)
        if job.submission.mem_bytes:
            self._limited[job.submission.name] = job
            if not self._watching_memory:
                self._watching_memory = True
                self._timers.add(_MEMORY_EVERY_S, self._check_memory)

    def _warn(self, job: LocalJob, told: frozenset[int] = frozenset()) -> None:
        """Who listens; again, for a program that has just begun, while that is nobody but the script around it."""
        if job.cause is not None:
            return
        listening = [one for one in scan() if one.group == job.pid and catches(one.pid, signal.SIGUSR1)]
        for process in listening:
            if process.pid not in told:
                send(process, signal.SIGUSR1)
        heard = told | {process.pid for process in listening}
        if heard <= {job.pid}:
            self._timers.add(_WARN_AGAIN_S, lambda: self._warn(job, heard), job)

    def _check_memory(self) -> None:
        running = [job for job in self._limited.values() if job.cause is None]
        table = scan() if running else []
        for job in running:
            limit = job.submission.mem_bytes
            used = memory_in_use(members(job.pid, table), limit)
            if used > limit:
                detail = f"it used {used / 1024**2:.0f} MiB; resources.memory allows {limit / 1024**2:.0f} MiB"
                self.end(job, Reason.OUT_OF_MEMORY, detail)
        self._watching_memory = bool(self._limited)
        if self._limited:
            self._timers.add(_MEMORY_EVERY_S, self._check_memory)

    # Killing

    def end(self, job: LocalJob, reason: Reason, detail: str) -> None:
        """Begin to end a running job. Does nothing when that has begun, or the job is over."""
        if job.is_over or job.cause is not None or not job.pid:
            return
        job.cause = causes.KillCause(reason=reason, detail=detail, at=time.time())
        causes.save_cause(job.run_dir, job.cause)
        self.resume(job)

    def resume(self, job: LocalJob) -> None:
        """Send the signals for a cause that is on record (perhaps by a scheduler that died since)."""
        # Memory that is gone hurts everybody now; a program over its limit has no claim to a grace.
        over_memory = job.cause is not None and job.cause.reason == Reason.OUT_OF_MEMORY
        grace_s = 0.0 if over_memory else self._grace_s
        job.kill_at_s = boot_clock_s() + grace_s
        if not over_memory:
            for process in scan():
                if process.session == job.pid:
                    self._terminate(job, process)
            for delay_s in _NUDGES_S:
                self._timers.add(delay_s, lambda: self._nudge(job), job)
        self._timers.add(grace_s, lambda: self._kill(job), job)

    def _terminate(self, job: LocalJob, process: Process) -> None:
        job.told.add((process.pid, process.start_ticks))
        send(process, signal.SIGTERM)

    def _nudge(self, job: LocalJob) -> None:
        """Tell what the job's shell started just after everybody was told: the step from setup to run, say.

        Only its own children: what a program starts in order to end well (a copy of its results) is left in peace.
        """
        for process in scan():
            if process.parent == job.pid and (process.pid, process.start_ticks) not in job.told:
                self._terminate(job, process)

    def _kill(self, job: LocalJob, rounds: int = 0) -> None:
        with_leader = rounds > 0
        for process in _belonging({job.submission.name: job}, scan()):
            if process.pid != job.pid or with_leader:
                send(process, signal.SIGKILL)
        self._timers.add(_LEADER_S, lambda: self._kill(job, rounds + 1), job)

    # After the leader

    @staticmethod
    def status(job: LocalJob) -> int | None:
        """Exit status of a child without reaping it: while it is a zombie nobody else can get its number."""
        assert job.child is not None
        info = os.waitid(os.P_PID, job.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def leader_gone(self, job: LocalJob) -> None:
        """The job's shell ended. What it left running is killed, but keeps what is left of a grace it was given."""
        if job.kill_at_s is not None:
            now = boot_clock_s()
            left = [process for process in scan() if process.session == job.pid]
            # SIGTERM ends the shell around a training program at once, while the program saves its state.
            if left and now < job.kill_at_s + _STUCK_S:
                self._timers.add(_DRAIN_POLL_S, lambda: self.leader_gone(job), job)
                return
        elif job.child is not None:
            with contextlib.suppress(OSError):
                os.killpg(job.pid, signal.SIGKILL)  # safe: our zombie still holds the number
        self._finish(job)

    def over(self, job: LocalJob) -> None:
        """The job has its result: stop watching it, and soon look for processes that left its session."""
        name = job.submission.name
        self._limited.pop(name, None)
        if job.pid:
            if not self._left_behind:
                self._timers.add(_SWEEP_S, self._sweep)
            self._left_behind[name] = job

    def _sweep(self) -> None:
        ended, self._left_behind = self._left_behind, {}
        for process in _belonging(ended, scan()):
            log.info("killing process %d, left behind by a job that is over", process.pid)
            send(process, signal.SIGKILL)


def _belonging(jobs: dict[str, LocalJob], table: list[Process]) -> list[Process]:
    """The processes of these jobs, found by session, by descent, and by the run directory in their environment.

    The last finds daemons that left the session and lost their parent. A session number whose leader is gone may have
    been taken by a stranger since; such a process must not be counted, so the environment has the last word.
    """
    folders = {str(job.run_dir) for job in jobs.values()}
    first_ticks = min((job.start_ticks for job in jobs.values()), default=0)
    recent = [process for process in table if process.start_ticks >= first_ticks]
    inside = {process.pid for job in jobs.values() for process in members(job.pid, recent)}
    found = []
    for process in recent:
        owner = environment_value(process.pid, "DIAMOND_RUN_DIR")
        if owner in folders or (process.pid in inside and owner is None):
            found.append(process)
    return found
