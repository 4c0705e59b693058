"""A batch scheduler for one machine: a queue, slots, and processes that outlive whoever watches them.

One thread owns every process: it waits on pidfds (which tell the end of adopted processes as promptly as that of
children), starts the next job the moment a slot is free, and keeps the time limits. All durable state is in the run
directories (`spool`), so after kill -9 a new object for the same directory finds every job again, queued,
running or over, and no job runs twice: job.sh itself decides by an O_EXCL file who starts a directory.

Must not know the server, the journal or the agent's loop. What a job's end means is decided in `result`; how
jobs are made to end, in `ending`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from diamond.agent.gpus import GpuMonitor, GpuSlot
from diamond.agent.machine import OomCounter, is_disk_full, mem_bytes_total, num_cpus
from diamond.agent.processes import TICKS_PER_S, boot_clock_s, boot_id, is_running, read_process, unix_time_of_start
from diamond.agent.schedulers import causes
from diamond.agent.schedulers.base import JobProcesses, Observed, Submission, final_state
from diamond.agent.schedulers.local import spool
from diamond.agent.schedulers.local.ending import Endings, LocalJob, Timers
from diamond.agent.schedulers.local.facts import facts_of, usage_of
from diamond.agent.schedulers.local.queue import Line, Slots
from diamond.agent.schedulers.local.shells import LocalShells
from diamond.agent.schedulers.local.start import spawn
from diamond.agent.schedulers.result import Ending, conclude, lost
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.errors import DiamondError
from diamond.core.faults import fault_point
from diamond.core.reasons import Reason
from diamond.core.rundir import ProcessMark, RunDir, may_have_started, read_exit, read_process_mark
from diamond.core.scripts import ALREADY_STARTED
from diamond.core.states import JobState

log = logging.getLogger(__name__)

T = TypeVar("T")

_WAITING = "waiting for a free slot"
_EXPLAIN_EVERY_S = 2.0  # how often the head of the line is told what it waits for
_SETTLE_S = 0.1
_SETTLE_TRIES = 20  # a mark that is empty for longer than this was cut short by a crash or a full disk
_LAUNCH_PATIENCE_S = 60.0  # how long "cannot fork" is taken for a passing shortage


class LocalScheduler(LocalShells):
    """See `Scheduler` for what every method promises."""

    def __init__(
        self,
        jobs_dir: Path,
        *,
        cpus: int | None = None,
        mem_bytes: int | None = None,
        gpus: Sequence[GpuSlot] | None = None,
        grace_s: float = 10.0,
        nice: int = 0,
    ) -> None:
        """Take up the work of `jobs_dir`.

        Args:
            jobs_dir: holds the run directories, one a job, named by job id.
            cpus, mem_bytes, gpus: what may be handed out; by default what the machine has.
            grace_s: seconds from SIGTERM to SIGKILL.
            nice: how far jobs stand back behind what else the machine does, up to 19.
        """
        self.wake: Callable[[], None] = lambda: None
        self._jobs_dir = jobs_dir
        self._nice = nice
        self._slots = Slots(
            cpus=num_cpus() if cpus is None else cpus,
            mem_bytes=mem_bytes_total() if mem_bytes is None else mem_bytes,
            gpus=GpuMonitor().inventory() if gpus is None else gpus,
        )
        self._has_gpus = bool(self._slots.gpus)
        self._host = socket.gethostname()
        self._boot_id = boot_id()
        self._oom = OomCounter()
        self._lock = threading.RLock()
        self._jobs: dict[str, LocalJob] = {}
        self._submissions: dict[str, Submission] = {}  # of the jobs in line
        self._line = Line()
        self._timers = Timers()
        self._selector = selectors.DefaultSelector()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._endings = Endings(timers=self._timers, grace_s=grace_s, finish=self._conclude)
        self._changed = False
        self._closing = False
        self._explain_at = 0.0
        self._adopt_all()
        self._thread = threading.Thread(target=self._run, name="local-scheduler", daemon=True)
        self._thread.start()

    # The protocol

    def submit(self, submission: Submission) -> str:
        with self._lock:
            known = self._jobs.get(submission.name)
        if known is not None:
            return known.observed.scheduler_id or ""
        spooled = spool.Spooled(submission=submission, order=time.time_ns(), oom_kills=self._oom.read())
        spool.save(spooled)
        fault_point("local.spooled")
        with self._lock:
            if submission.name not in self._jobs:
                job = LocalJob(spooled, _queued(spooled))
                self._safely(job, partial(self._admit, job))
            job = self._jobs[submission.name]
        self._ring()
        return job.observed.scheduler_id or ""

    def observe(self) -> dict[str, Observed]:
        with self._lock:
            return {name: job.observed for name, job in self._jobs.items()}

    def cancel(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                job = self._jobs.get(name)
                if job is not None:
                    self._cancel(job)
        self._ring()

    def forget(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                job = self._jobs.get(name)
                if job is not None and job.is_over:
                    del self._jobs[name]
                    spool.remove(job.run_dir)

    def capacity(self) -> EndpointFacts:
        return facts_of(self._slots, host=self._host, jobs_dir=self._jobs_dir)

    def usage(self) -> EndpointUsage:
        with self._lock:
            running = sum(job.observed.state == JobState.RUNNING for job in self._jobs.values())
            return usage_of(self._slots, running=running, queued=len(self._line))

    def processes(self) -> tuple[JobProcesses, ...]:
        with self._lock:
            return tuple(
                JobProcesses(
                    name=name,
                    run_dir=job.run_dir,
                    pid=job.pid,
                    started_at=job.observed.started_at or 0.0,
                    gpus=job.gpus,
                )
                for name, job in self._jobs.items()
                if job.observed.state == JobState.RUNNING and job.pid
            )

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for job in self._jobs.values():
            if job.pidfd >= 0:
                os.close(job.pidfd)
                job.pidfd = -1
            if job.child is not None:
                job.child.returncode = 0  # it goes on without us, as it should: no warning about that
        self._selector.close()
        os.close(self._alarm)

    # Taking jobs up

    def _adopt_all(self) -> None:
        found = spool.load_all(self._jobs_dir)
        for spooled in found:
            job = LocalJob(spooled, _queued(spooled))
            self._safely(job, partial(self._admit, job))
        if found:
            log.info("took up %d jobs, %d of them waiting", len(found), len(self._line))

    def _admit(self, job: LocalJob) -> None:
        """Put a job where its run directory says it is: over, running, or in the line."""
        name = job.submission.name
        self._jobs[name] = job
        run_dir = RunDir(job.run_dir)
        # Who started it comes first: as long as that process runs, an exit.json is the job's own invention.
        if may_have_started(run_dir):
            self._adopt(job)
        elif os.path.lexists(run_dir.exit):
            self._conclude(job)
        elif causes.load_cause(job.run_dir) is not None:
            self._cancel(job)
        elif why := self._slots.why_never(job.submission):
            self._over(job, Reason.REJECTED, why)
        else:
            asked = job.submission
            self._line.add(name, priority=asked.priority, order=job.spooled.order, user=asked.user)
            self._submissions[name] = job.submission

    def _adopt(self, job: LocalJob, tries: int = 0) -> None:
        """Watch whoever started this directory."""
        run_dir = RunDir(job.run_dir)
        mark = read_process_mark(run_dir)
        if mark is None and tries < _SETTLE_TRIES and read_exit(run_dir) is None:
            # Made but not yet filled: the script is between two system calls.
            self._timers.add(_SETTLE_S, lambda: self._adopt(job, tries + 1), job)
        elif mark is None or mark.pid <= 1 or mark.boot_id != self._boot_id:
            self._conclude(job, other_boot=mark is not None and mark.pid > 1)
        elif not self._watch(job, mark):
            self._conclude(job)

    def _watch(self, job: LocalJob, mark: ProcessMark) -> bool:
        try:
            pidfd = os.pidfd_open(mark.pid)
        except OSError:
            return False
        if not is_running(mark.pid, mark.start_ticks):
            os.close(pidfd)
            return False
        ticks = mark.start_ticks
        began_s = ticks / TICKS_PER_S if ticks else boot_clock_s()
        self._slots.take(job.submission, job.spooled.gpus)
        job.gpus = job.spooled.gpus
        job.cause = causes.load_cause(job.run_dir)
        self._runs(job, pid=mark.pid, pidfd=pidfd, start_ticks=ticks, began_s=began_s)
        if job.cause is not None:
            self._endings.resume(job)
        return True

    def _runs(self, job: LocalJob, *, pid: int, pidfd: int, start_ticks: int, began_s: float) -> None:
        job.pid, job.pidfd, job.start_ticks = pid, pidfd, start_ticks
        job.has_slots = True
        self._selector.register(pidfd, selectors.EVENT_READ, job)
        job.observed = Observed(
            state=JobState.RUNNING,
            scheduler_id=str(pid),
            hosts=(self._host,),
            queued_at=job.spooled.queued_at,
            started_at=unix_time_of_start(start_ticks) if start_ticks else time.time(),
        )
        self._changed = True
        self._endings.keep_limits(job, began_s)

    # The thread

    def _run(self) -> None:
        while True:
            try:
                with self._lock:
                    self._dispatch()
                    timeout_s = self._timers.next_in_s()
                    changed, self._changed = self._changed, False
                if changed:
                    self.wake()
                ready = self._selector.select(timeout_s)
                with self._lock:
                    if self._closing:
                        return
                    for key, _ in ready:
                        if key.data is None:
                            os.eventfd_read(self._alarm)
                        elif not key.data.is_over:
                            self._safely(key.data, partial(self._on_exit, key.data))
                    self._timers.run_due(self._safely)
            except Exception:  # the thread holds everybody's jobs: it must not die of one
                log.exception("local scheduler: unexpected error; going on")
                time.sleep(0.5)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._alarm, 1)

    def _dispatch(self) -> None:
        now = boot_clock_s()
        while len(self._line):
            name, waiting = self._line.next(self._slots, self._submissions, now)
            if name is None:
                self._explain(waiting, now)
                return
            job = self._jobs[name]
            if not self._safely(job, partial(self._start, job, now)):
                return

    def _explain(self, waiting: dict[str, str], now: float) -> None:
        """Say what jobs wait for; not at every change, since each is a message to the server."""
        if now < self._explain_at:
            return
        self._explain_at = now + _EXPLAIN_EVERY_S
        self._timers.add(_EXPLAIN_EVERY_S + 0.01, lambda: None)
        for name, why in waiting.items():
            job = self._jobs[name]
            if job.observed.pending_reason != why and now - job.known_since_s > _EXPLAIN_EVERY_S:
                job.observed = _queued(job.spooled, why)
                self._changed = True

    # Starting

    def _start(self, job: LocalJob, now: float) -> bool:
        """Start a job that fits; False when the machine cannot start anything just now."""
        submission = job.submission
        job.gpus = self._slots.take(submission)
        job.has_slots = True
        job.oom_kills = self._oom.read()
        try:
            if job.gpus:
                # Noted before the start: whoever adopts the job must know which devices are taken.
                job.spooled = spool.with_gpus(job.spooled, job.gpus)
                spool.save(job.spooled)
            slots = [self._slots.gpus[index] for index in job.gpus]
            child = spawn(submission, slots, self._has_gpus, self._nice)
        except (OSError, DiamondError, ValueError) as error:
            job.first_refused_s = job.first_refused_s or now
            passes = isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM)
            if passes and now - job.first_refused_s < _LAUNCH_PATIENCE_S:
                self._give_back(job)
                self._timers.add(1.0, lambda: None)
                return False
            self._drop_from_line(submission.name)
            full = is_disk_full(job.run_dir)
            self._over(job, Reason.DISK_FULL if full else Reason.LAUNCH_FAILED, f"cannot start bash: {error}")
            return True
        fault_point("local.started")
        self._drop_from_line(submission.name)
        job.child = child
        found = read_process(child.pid)
        with contextlib.suppress(OSError), open(f"/proc/{child.pid}/oom_score_adj", "w") as file:
            file.write("500")  # if memory runs out, a job goes before the agent and the server do
        ticks = found.start_ticks if found is not None else 0
        self._runs(job, pid=child.pid, pidfd=os.pidfd_open(child.pid), start_ticks=ticks, began_s=boot_clock_s())
        return True

    # Ending

    def _cancel(self, job: LocalJob) -> None:
        if job.is_over or job.cause is not None:
            return
        if not job.pid:
            cause = causes.KillCause(reason=Reason.CANCELLED, detail="cancelled before it started", at=time.time())
            causes.save_cause(job.run_dir, causes.load_cause(job.run_dir) or cause)
            self._drop_from_line(job.submission.name)
            if causes.claim(RunDir(job.run_dir)):
                self._over(job, Reason.CANCELLED, cause.detail)
            else:
                self._adopt(job)  # somebody's script was quicker; adopting resumes the kill
            return
        self._endings.end(job, Reason.CANCELLED, "stopped on request")

    def _unwatch(self, job: LocalJob) -> None:
        if job.pidfd >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(job.pidfd)
            os.close(job.pidfd)
            job.pidfd = -1

    def _on_exit(self, job: LocalJob) -> None:
        """The leader is gone."""
        self._unwatch(job)
        if job.child is not None and self._endings.status(job) == ALREADY_STARTED:
            run_dir = RunDir(job.run_dir)
            mark = read_process_mark(run_dir)
            if os.path.lexists(run_dir.started) and (mark is None or mark.pid != job.pid):
                job.child.wait()
                job.child, job.pid = None, 0
                self._give_back(job)
                self._adopt(job)
                return
        self._endings.leader_gone(job)

    def _conclude(self, job: LocalJob, *, other_boot: bool = False) -> None:
        """Nothing of the job runs any more: read what it left behind."""
        status = job.child.wait() if job.child is not None else None
        if job.child is None and job.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(job.pid, os.WNOHANG)  # a child of an earlier scheduler in this process
        base = job.spooled.oom_kills if job.oom_kills is None else job.oom_kills
        oom_rose = not other_boot and self._oom.read() > base
        ending = self._ending(job, status, oom_rose=oom_rose, other_boot=other_boot)
        try:
            job.observed = conclude(job.run_dir, ending)
        except Exception as error:
            log.exception("job %s: what it left cannot be made sense of", job.submission.name)
            job.observed = lost(ending, f"what it left cannot be made sense of: {type(error).__name__}")
        self._settle(job)

    def _ending(self, job: LocalJob, status: int | None, *, oom_rose: bool = False, other_boot: bool = False) -> Ending:
        seen = job.observed
        return Ending(
            status=status, host=self._host, oom_rose=oom_rose, other_boot=other_boot, submission=job.submission,
            scheduler_id=seen.scheduler_id, queued_at=job.spooled.queued_at, started_at=seen.started_at,
        )  # fmt: skip

    def _safely(self, job: LocalJob, action: Callable[[], T]) -> T | bool:
        """Do something for one job. An error nobody foresaw ends that job, and no other; then the answer is True."""
        try:
            return action()
        except Exception as error:
            log.exception("job %s: unexpected error; given up", job.submission.name)
            if not job.is_over:
                self._jobs[job.submission.name] = job
                self._unwatch(job)
                self._drop_from_line(job.submission.name)
                job.observed = lost(self._ending(job, None), f"unexpected error: {type(error).__name__}")
                self._settle(job)
            return True

    def _over(self, job: LocalJob, reason: Reason, detail: str) -> None:
        """End a job that never ran."""
        job.observed = Observed(
            state=final_state(reason),
            reason=reason,
            detail=detail,
            queued_at=job.spooled.queued_at,
            ended_at=time.time(),
        )
        self._settle(job)

    def _settle(self, job: LocalJob) -> None:
        self._give_back(job)
        self._endings.over(job)
        self._changed = True

    def _give_back(self, job: LocalJob) -> None:
        if job.has_slots:
            job.has_slots = False
            self._slots.give_back(job.submission, job.gpus)

    def _drop_from_line(self, name: str) -> None:
        self._line.remove(name)
        self._submissions.pop(name, None)


def _queued(spooled: spool.Spooled, why: str = _WAITING) -> Observed:
    return Observed(state=JobState.QUEUED, pending_reason=why, queued_at=spooled.queued_at)
