"""Jobs inside of pilots, around any scheduler: what has a place is laid into the run directory of its first pilot.

A pilot is a job of the scheduler around which this is. Its steward (`diamond.agent.steward`) starts, warns and ends
what it finds there; this object writes those files and reads what became of them. Nothing is kept but in run
directories, so a new object finds every job again, and a job handed over twice starts once.

Must not know the server, nor decide what runs where: an order says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from diamond.agent.schedulers import pool_spool as spool
from diamond.agent.schedulers.base import Observed, Scheduler, Submission
from diamond.agent.schedulers.causes import KillCause, claim, load_cause, save_cause
from diamond.agent.schedulers.pool_result import PILOT_ENDED, PilotFile, look, never_ran, pilots_of, read_pilot
from diamond.agent.schedulers.pool_spool import Spooled
from diamond.core.durations import format_duration
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, write_atomic
from diamond.core.states import JobState

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_IDLE_S = 5.0
_KINDS = ("json", "warn", "stop", "run", "err", "done")
_GAVE_UP = "it gave up its place before it began"


class PooledJob:
    """A job in memory. Guarded by the lock of `Pooled`."""

    def __init__(self, spooled: Spooled) -> None:
        self.spooled = spooled
        self.observed = spooled.result or Observed(
            state=JobState.QUEUED, pending_reason="its pilot has not begun", queued_at=spooled.queued_at
        )
        self.is_handed_over = False
        self.problem = ""  # why its files could not be read or written, last time

    @property
    def name(self) -> str:
        return self.spooled.submission.name

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.spooled.submission.run_dir)

    @property
    def is_over(self) -> bool:
        return self.observed.state.is_final

    @property
    def is_running(self) -> bool:
        return self.observed.state is JobState.RUNNING


class Pooled:
    """See `Scheduler` for what every method promises, and `HasWarnings`. Facts are those of the scheduler around which
    this is, and so is everything that has no place."""

    def __init__(self, base: Scheduler, jobs_dir: Path) -> None:
        """`jobs_dir` holds the run directories of both, one a job, named by job id."""
        self._base = base
        self._jobs_dir = jobs_dir
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._jobs = {one.submission.name: PooledJob(one) for one in spool.load_all(jobs_dir)}
        self._closing = threading.Event()
        self._ring = threading.Event()
        self._look()  # who runs should be known as running from the first moment
        self._thread = threading.Thread(target=self._run, name="pooled", daemon=True)
        self._thread.start()

    # The protocol

    @property
    def wake(self) -> Callable[[], None]:
        return self._wake

    @wake.setter
    def wake(self, call: Callable[[], None]) -> None:
        self._wake = call
        self._base.wake = self._on_base_news

    def submit(self, submission: Submission) -> str:
        if submission.place is None:
            return self._base.submit(submission)
        with self._lock:
            if submission.name not in self._jobs:
                spooled = spool.load(submission.run_dir) or Spooled(submission=submission, order=time.time_ns())
                spool.save(spooled)
                self._jobs[submission.name] = PooledJob(spooled)
            job = self._jobs[submission.name]
        self._look_at([job])
        self._ring.set()
        return job.observed.scheduler_id or ""

    def observe(self) -> dict[str, Observed]:
        seen = self._base.observe()
        with self._lock:
            return {**seen, **{name: job.observed for name, job in self._jobs.items()}}

    def cancel(self, names: Iterable[str]) -> None:
        named = list(names)
        with self._lock:
            for job in self._mine(named):
                before = "stopped on request" if job.is_running else "cancelled before it started"
                self._stop(job, Reason.CANCELLED, before)
        self._base.cancel(named)
        self._ring.set()

    def warn(self, names: Iterable[str]) -> None:
        named = list(names)
        with self._lock:
            for job in self._mine(named):
                if claim(job.run_dir):
                    self._never_begins(job, Reason.PREEMPTED, _GAVE_UP)
                else:
                    _touch(pilots_of(job.spooled)[0].step(job.name, "warn"))
        for name in named:
            if (pilot := RunDir(self._jobs_dir / name)).steward.exists():
                _touch(pilot.pilot_end)
        self._ring.set()

    def forget(self, names: Iterable[str]) -> None:
        named = list(names)
        with self._lock:
            for name in named:
                job = self._jobs.get(name)
                if job is not None and job.is_over:
                    del self._jobs[name]
                    pilot = pilots_of(job.spooled)[0]
                    for kind in _KINDS:
                        with contextlib.suppress(OSError):
                            pilot.step(name, kind).unlink()
                    spool.remove(job.run_dir.path)
        self._base.forget(named)

    def capacity(self) -> EndpointFacts:
        return self._base.capacity()

    def usage(self) -> EndpointUsage:
        """What pilots hold is in use; the jobs in them hold nothing more."""
        used = self._base.usage()
        with self._lock:
            live = [job for job in self._jobs.values() if not job.is_over]
        running = sum(job.is_running for job in live)
        return replace(
            used,
            jobs_running=used.jobs_running + running,
            jobs_queued=used.jobs_queued + len(live) - running,
        )

    def close(self) -> None:
        self._closing.set()
        self._ring.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._base.close()

    # For those around a particular scheduler

    def _job(self, name: str) -> PooledJob | None:
        with self._lock:
            return self._jobs.get(name)

    def _refusal(self, submission: Submission) -> str:
        """Why a job can never run in pilots of this scheduler; empty when it can."""
        return ""

    def _end_what_is_left(self, job: PooledJob) -> None:
        """Its pilot is over. Where nobody else sees to it that nothing of a job outlives its pilot, do so."""

    # Stopping; under the lock

    def _mine(self, names: Iterable[str]) -> list[PooledJob]:
        found = (self._jobs.get(name) for name in names)
        return [job for job in found if job is not None and not job.is_over]

    def _stop(self, job: PooledJob, reason: Reason, detail: str) -> None:
        if load_cause(job.run_dir.path) is None:
            save_cause(job.run_dir.path, KillCause(reason=reason, detail=detail, at=time.time()))
        # A directory whose start is taken runs nothing, also if its pilot cannot be told in time.
        if claim(job.run_dir):
            self._never_begins(job, reason, detail)
        else:
            _touch(pilots_of(job.spooled)[0].step(job.name, "stop"))

    def _never_begins(self, job: PooledJob, reason: Reason, detail: str) -> None:
        if load_cause(job.run_dir.path) is None:
            save_cause(job.run_dir.path, KillCause(reason=reason, detail=detail, at=time.time()))
        _touch(pilots_of(job.spooled)[0].step(job.name, "stop"))
        self._settle(job, never_ran(job.spooled, reason, detail))

    def _settle(self, job: PooledJob, seen: Observed) -> None:
        job.observed = seen
        job.spooled = spool.ended(job.spooled, seen)

    # Looking

    def _on_base_news(self) -> None:
        self._ring.set()  # a pilot may be over
        self._wake()

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                is_idle = all(job.is_over for job in self._jobs.values())
            self._ring.wait(_IDLE_S if is_idle else _LOOK_S)
            self._ring.clear()
            if self._closing.wait(0.02):  # not faster than that, however often it is rung
                return
            try:
                if self._look():
                    self._wake()
            except Exception:  # everybody's jobs hang on this thread
                log.exception("pools: unexpected error; going on")

    def _look(self) -> bool:
        """Find out how every job stands; whether that is news."""
        with self._lock:
            live = [job for job in self._jobs.values() if not job.is_over]
        return self._look_at(live)

    def _look_at(self, jobs: list[PooledJob]) -> bool:
        if not jobs:
            return False
        seen = self._base.observe()
        over: dict[str, float | None] = {}
        for pilot in {node.pilot for job in jobs for node in job.spooled.place.nodes}:
            one = seen.get(pilot)
            if one is None or one.state.is_final:
                over[pilot] = one.ended_at if one is not None else None
        news = False
        for job in jobs:
            problem = ""
            try:
                news |= self._look_at_one(job, over)
            except OSError as error:  # a full disk, say: it is tried again, and says nothing of the others
                problem = str(error)
            if problem and problem != job.problem:
                log.warning("job %s: %s", job.name, problem)
            job.problem = problem
        return news

    def _look_at_one(self, job: PooledJob, over: dict[str, float | None]) -> bool:
        if not job.is_handed_over and not job.is_over and not self._hand_over(job, over):
            return job.is_over
        found = look(job.spooled, over)
        if found.state.is_final:
            self._end_what_is_left(job)
        with self._lock:
            if job.is_over:
                return False
            if found.state.is_final:
                claim(job.run_dir)  # should it never have begun, it never will
                self._settle(job, found)
                return True
            is_news = found != job.observed
            if is_news:
                job.observed = found
            if any(node.pilot in over for node in job.spooled.place.nodes):
                self._stop(job, Reason.NODE_FAIL, PILOT_ENDED)
            return is_news or job.is_over

    # Handing over

    def _hand_over(self, job: PooledJob, over: dict[str, float | None]) -> bool:
        """Lay it into its first pilot's directory once all of its pilots have begun; False when it ended here."""
        with self._lock:
            if job.is_over:
                return False
            if why := self._refusal(job.spooled.submission):
                claim(job.run_dir)
                self._never_begins(job, Reason.REJECTED, why)
                return False
            pilots = pilots_of(job.spooled)
            if any(pilot.path.name in over for pilot in pilots):
                return True  # `look` says what that means
            found = [read_pilot(pilot) for pilot in pilots]
            begun = [one for one in found if one is not None]
            if len(begun) < len(found):
                return True
            target = pilots[0].step(job.name, "json")
            if not target.exists():
                self._write_step(job, begun, target)
            job.is_handed_over = True
        return True

    def _write_step(self, job: PooledJob, pilots: list[PilotFile], target: Path) -> None:
        asked, place = job.spooled.submission, job.spooled.place
        nodes = [
            {"slurm_id": pilot.slurm_id, "host": pilot.host, "slots": node.slots}
            for pilot, node in zip(pilots, place.nodes, strict=True)
        ]
        if len(nodes) > 1:
            lines = [f"{node['slurm_id']} {node['host']} {node['slots']}\n" for node in nodes]
            write_atomic(job.run_dir.pilots, "".join(lines).encode())
        first = place.nodes[0].slots
        limit_s = asked.time_limit_s
        raw = {
            "script": str(asked.script),
            "run_dir": str(asked.run_dir),
            "log": str(job.run_dir.stream("log")),
            "slots": first,
            "cpus": first * place.cpus,
            "gpus": first if place.has_gpus else 0,
            "mem_bytes": first * place.mem_bytes,
            "nodes": nodes,
            "envs": dict(asked.envs),
            "time_limit_s": limit_s,
            "warn_s": asked.warning_s,
            "limit_text": f"the limit was {format_duration(limit_s)}" if limit_s is not None else "",
        }
        write_atomic(target, json.dumps(raw).encode())


def _touch(path: Path) -> None:
    """A word to a steward. One whose directory is gone needs none."""
    with contextlib.suppress(OSError):
        if not path.exists():
            write_atomic(path, b"")
