"""Watches Slurm's queue: one query for all jobs, and what its answer means for each. Also cancels.

Belongs to the driver's watching thread; the table's lock is held while an answer is worked in, never while a program
runs. What is promised of a job of unknown fate: it is given to sbatch again only after a query that began when its
sbatch had ended showed no job of its name, and its run directory no trace of a start.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace

from diamond.agent.schedulers.slurm import queue
from diamond.agent.schedulers.slurm.commands import Answer, Commands
from diamond.agent.schedulers.slurm.jobs import Jobs, Phase, SlurmJob
from diamond.agent.schedulers.slurm.pace import Backoff, Scene, next_query_at
from diamond.agent.schedulers.slurm.pending import explain
from diamond.agent.schedulers.slurm.queue import MAX_IDS, Row
from diamond.agent.schedulers.slurm.states import Stage, meaning
from diamond.agent.schedulers.slurm.submit import still_submitting
from diamond.core.durations import format_duration
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, may_have_started

log = logging.getLogger(__name__)

_RECORD_S = 5.0  # a shared file system may show exit.json so much later than Slurm shows the end
_QUICK_RECORD_S = 1.0  # where Slurm's word alone decides
_GONE_S = 15.0  # a job Slurm does not know, of which nothing is found, is lost after this
_GONE_QUERIES = 2
_NO_CONTROLLER_S = 120.0  # with no answer for so long, a job's own record of its end must do
_PLACE_EVERY_S = 60.0
_PLACE_AFTER_S = 20.0  # places are for those who wait
_CLEANING_S = 15.0  # a clean-up that takes longer is worth a word
_STRANGE_HOST_S = 150.0  # the longest an sbatch left on another machine can go on trying
_BACK_QUERIES = 2
_PRESSING_S = 60.0
_SLOW = ("COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")


class Watcher:
    """Of one thread, but for `warning`."""

    def __init__(self, jobs: Jobs, commands: Commands, *, resubmit: Callable[[SlurmJob], None]) -> None:
        self._jobs = jobs
        self._commands = commands
        self._resubmit = resubmit
        self._backoff = Backoff()
        self._asked_at = 0.0
        self._answered_at = time.monotonic()
        self._not_before = 0.0
        self._trouble = ""
        self._trouble_since = 0.0
        self._places_at = 0.0
        self._has_sacct: bool | None = None
        self._strays: set[str] = set()
        self._adopted = {job.name for job in jobs.live() if job.phase is Phase.UNSURE}
        self.hides_others = False  # whether the site shows users only their own jobs
        self.has_accounting = False
        self.on_recovery: Callable[[], None] = lambda: None

    @property
    def warning(self) -> str:
        """What people should know of the controller; empty while it answers. Thread-safe."""
        trouble = self._trouble
        if not trouble:
            return ""
        return f"slurmctld does not answer since {format_duration(time.monotonic() - self._trouble_since)}: {trouble}"

    # When

    def due_at(self) -> float | None:
        """When the next query is due; None when there is nothing to watch."""
        now = time.monotonic()
        with self._jobs.lock:
            live = self._jobs.live()
            starts = [job.observed.expected_start_at for job in live if job.observed.expected_start_at is not None]
            scene = Scene(
                num_running=sum(job.is_running for job in live),
                num_waiting=sum(job.phase is Phase.PLACED and not job.is_running for job in live),
                changed_at=self._jobs.changed_at,
                is_urgent=any(_is_pressing(job, now) for job in live),
                starts_at=min(starts) - time.time() + now if starts else None,
                recent=self._commands.queries_within(60),
            )
        due = next_query_at(scene, last_at=self._asked_at, now=now)
        return None if due is None else max(due, self._not_before)

    # The query

    def ask(self) -> None:
        """One look at the whole queue."""
        self._asked_at = time.monotonic()
        self._note_orphans()
        answer = self._commands.query(queue.squeue_argv())
        if not answer.is_good:
            self._failed(answer)
            return
        self._succeeded(answer)
        rows: dict[str, list[Row]] = {}
        for row in queue.parse_rows(answer.out):
            rows.setdefault(row.name, []).append(row)
        with self._jobs.lock:
            for job in self._jobs.live():
                self._safely(job, lambda job=job: self._apply(job, rows.get(job.name, []), answer))  # type: ignore[misc]
        self._ask_more()

    def _failed(self, answer: Answer) -> None:
        if not self._trouble:
            self._trouble_since = answer.began_at
            log.warning("squeue: %s; what was known stays", answer.problem)
        self._trouble = answer.problem
        self._not_before = time.monotonic() + self._backoff.failed()
        if answer.ended_at - self._answered_at > _NO_CONTROLLER_S:
            with self._jobs.lock:
                for job in self._jobs.live():
                    if job.saw_end:
                        self._safely(job, lambda job=job: self._jobs.conclude(job))  # type: ignore[misc]

    def _succeeded(self, answer: Answer) -> None:
        self._backoff.succeeded()
        self._answered_at = answer.ended_at
        # A controller that needs ten seconds for an answer is not to be asked again at once.
        self._not_before = answer.ended_at + min(30.0, answer.ended_at - answer.began_at)
        if self._trouble:
            log.info("slurmctld answers again")
            self._trouble = ""
            self.on_recovery()

    def _safely(self, job: SlurmJob, action: Callable[[], None]) -> None:
        """An error nobody foresaw ends one job, and no other."""
        try:
            action()
        except Exception as error:
            log.exception("job %s: unexpected error; given up", job.name)
            if not job.is_over:
                self._jobs.never_ran(job, Reason.LOST, f"unexpected error: {type(error).__name__}")

    def _note_orphans(self) -> None:
        """An sbatch of an earlier life may still be at it: then this query says nothing about its job yet."""
        if not self._adopted:
            return
        with self._jobs.lock:
            unsure = [job for job in self._jobs.live() if job.name in self._adopted and job.phase is Phase.UNSURE]
        busy = still_submitting(job.name for job in unsure)
        for job in unsure:
            elsewhere = job.spooled.host != os.uname().nodename
            if job.name in busy or (elsewhere and time.time() - job.spooled.queued_at < _STRANGE_HOST_S):
                job.sure_after = math.inf
            elif job.sure_after == math.inf:
                job.sure_after = time.monotonic()
        self._adopted = {job.name for job in unsure}

    # What an answer means for one job

    def _apply(self, job: SlurmJob, rows: list[Row], answer: Answer) -> None:
        if job.phase in (Phase.READY, Phase.SUBMITTING):
            return
        row = self._choose(job, rows)
        if row is None:
            if answer.began_at > job.sure_after:
                self._missing(job)
            return
        if row.job_id != job.slurm_id or job.phase is Phase.UNSURE:
            job.spooled = replace(job.spooled, slurm_id=row.job_id)
            job.phase = Phase.PLACED
            job.status = None
        job.row, job.gone, job.num_gone = row, 0.0, 0
        if job.cause is not None and not job.cancel_due and meaning(row.state).stage is not Stage.OVER:
            job.cancel_due = time.monotonic()
        found = meaning(row.state)
        if found.stage is Stage.OVER:
            self._ended(job)
        elif found.stage is Stage.WAITING:
            self._waits(job, row, found.text, answer)
        elif found.stage is Stage.RUNNING:
            self._runs(job, row, found.text)
        elif found.text:
            self._jobs.show(job, replace(job.observed, pending_reason=found.text))

    def _choose(self, job: SlurmJob, rows: list[Row]) -> Row | None:
        """Which of the jobs of this name is the job. More than one is the trace of a crash; the newer may go."""
        rows = [row for row in rows if row.job_id == job.slurm_id or not _is_refusal(row)]
        if not rows:
            return None
        known = next((row for row in rows if row.job_id == job.slurm_id), None)
        # Whoever runs has the run directory; else who was first, and of those over, the one that ran last.
        best = min(rows, key=lambda row: (_RANK[meaning(row.state).stage], row.number))
        if known is None or (meaning(known.state).stage is Stage.OVER and meaning(best.state).stage is not Stage.OVER):
            known = best
        for row in rows:
            if row is not known and meaning(row.state).stage is Stage.WAITING:
                log.warning("job %s: Slurm has it twice, as %s and %s", job.name, known.job_id, row.job_id)
                self._strays.add(row.job_id)
        return known

    def _waits(self, job: SlurmJob, row: Row, text: str, answer: Answer) -> None:
        # Slurm calls a job running before its script can begin. One that began and waits was queued again, by hand or
        # after a failure; its script then begins anew, in the same directory.
        if job.cause is None and job.is_running:
            job.num_back += 1
            if answer.began_at <= max(job.saw_start, job.sure_after) or job.num_back < _BACK_QUERIES:
                return
            job.begins_anew()
            text = text or f"Slurm put it back into the queue; {explain(row.reason, row.job_id)}"
        self._jobs.waits(job, text.replace("ID", row.job_id) if text else explain(row.reason, row.job_id), row)

    def _runs(self, job: SlurmJob, row: Row, text: str) -> None:
        if row.state == "COMPLETING":
            job.ended = job.ended or time.monotonic()
            text = text if time.monotonic() - job.ended > _CLEANING_S else ""
        else:
            job.num_back = 0
        self._jobs.runs(job, row, text)

    def _ended(self, job: SlurmJob) -> None:
        """Slurm calls it over. Its own record may come a little later, over a shared file system."""
        assert job.row is not None
        now = time.monotonic()
        if job.ended == 0.0 or job.gone:
            job.ended, job.gone = now, 0.0
        if os.path.lexists(RunDir(job.run_dir).exit):
            self._jobs.conclude(job)
            return
        began = may_have_started(RunDir(job.run_dir)) and job.cause is None
        patience_s = _RECORD_S if job.row.state in _SLOW else _QUICK_RECORD_S
        if job.row.state == "FAILED" and job.status is None:
            return  # asked right after this
        if not began or now - job.ended >= patience_s:
            self._jobs.conclude(job)

    def _missing(self, job: SlurmJob) -> None:
        """A sound answer does not know the job."""
        now = time.monotonic()
        if job.row is not None and meaning(job.row.state).stage is not Stage.OVER:
            job.row = None
        if os.path.lexists(RunDir(job.run_dir).exit):
            self._jobs.conclude(job)
            return
        if job.phase is Phase.UNSURE and not (job.cause is None and may_have_started(RunDir(job.run_dir))):
            if job.cause is not None:
                self._jobs.never_ran(job, job.cause.reason, job.cause.detail)
            else:
                self._resubmit(job)
            return
        job.gone = job.gone or now
        job.num_gone += 1
        if job.cause is not None or (now - job.gone >= _GONE_S and job.num_gone >= _GONE_QUERIES):
            self._jobs.conclude(job)

    # What only some jobs need

    def _ask_more(self) -> None:
        self._ask_statuses()
        self._ask_accounting()
        self._ask_places()

    def _ask_statuses(self) -> None:
        """How the script ended, for jobs that failed and left no record."""
        with self._jobs.lock:
            wanted = {
                job.slurm_id: job
                for job in self._jobs.live()
                if job.row is not None
                and job.row.state == "FAILED"
                and job.status is None
                and job.phase is Phase.PLACED
            }
        ids = list(wanted)[:MAX_IDS]
        if not ids:
            return
        answer = self._commands.query(queue.status_argv(ids))
        found = queue.parse_statuses(answer.out)
        with self._jobs.lock:
            for job_id in ids:
                job = wanted[job_id]
                job.status = found.get(job_id)
                if not job.is_over and (job.status is not None or answer.is_good):
                    job.status = job.status or queue.Status(exit_code=1)
                    self._safely(job, lambda job=job: self._ended(job))  # type: ignore[misc]

    def _ask_accounting(self) -> None:
        """What became of jobs that Slurm forgot and that left nothing, where accounting can tell."""
        if not self.has_accounting or self._has_sacct is False:
            return
        with self._jobs.lock:
            wanted = {job.slurm_id: job for job in self._jobs.live() if job.gone and job.num_gone == 1 and job.slurm_id}
        ids = list(wanted)[:MAX_IDS]
        if not ids:
            return
        answer = self._commands.query(queue.sacct_argv(ids))
        self._has_sacct = answer.is_good
        with self._jobs.lock:
            for job_id, (row, status) in queue.parse_sacct(answer.out).items():
                job = wanted.get(job_id)
                if job is not None and not job.is_over and meaning(row.state).stage is Stage.OVER:
                    job.row, job.status = row, status
                    self._safely(job, lambda job=job: self._jobs.conclude(job))  # type: ignore[misc]

    def _ask_places(self) -> None:
        """Where those who wait stand in the line; rare, since it lists everybody's jobs."""
        now = time.monotonic()
        with self._jobs.lock:
            waiting = [
                job
                for job in self._jobs.live()
                if job.row is not None and job.row.state == "PENDING" and now - job.since > _PLACE_AFTER_S
                and job.row.reason in ("Priority", "Resources", "None")
            ]  # fmt: skip
        partitions = {name for job in waiting if job.row is not None for name in job.row.partition.split(",") if name}
        if not partitions or now < self._places_at or self.hides_others:
            return
        self._places_at = now + _PLACE_EVERY_S
        answer = self._commands.query(queue.place_argv(partitions))
        if not answer.is_good:
            return
        places = queue.parse_places(answer.out)
        with self._jobs.lock:
            for job in waiting:
                row = job.row
                if job.is_over or row is None:
                    continue
                found = [
                    (places[row.job_id, name], name)
                    for name in row.partition.split(",")
                    if (row.job_id, name) in places
                ]
                if found:
                    (place, total), name = min(found)
                    job.place = f"{queue.ordinal(place)} of {total} waiting in {name}"

    # Cancelling

    def cancel_at(self) -> float | None:
        with self._jobs.lock:
            due = [job.cancel_due for job in self._jobs.live() if job.cancel_due and job.slurm_id]
        if self._strays:
            due.append(0.0)
        return min(due, default=None)

    def cancel(self) -> None:
        """scancel those whose time has come; again, ever more rarely, until Slurm says that they are over."""
        now = time.monotonic()
        with self._jobs.lock:
            due = [job for job in self._jobs.live() if job.cancel_due and job.cancel_due <= now and job.slurm_id]
            ids = [job.slurm_id for job in due] + sorted(self._strays)
            self._strays.clear()
            for job in due:
                job.cancel_due = now + job.cancel_backoff.failed()
            if due:
                self._jobs.changed_at = now  # something is about to happen: look soon
        for first in range(0, len(ids), MAX_IDS):
            answer = self._commands.scancel(ids[first : first + MAX_IDS])
            if not answer.is_good:
                log.warning("scancel: %s", answer.problem)


def _is_pressing(job: SlurmJob, now: float) -> bool:
    """Whether the next answer is waited for: its fate is not known, or it is ending."""
    return job.phase is Phase.UNSURE or now - max(job.saw_end, job.ended, job.gone) < _PRESSING_S


_RANK = {Stage.RUNNING: 0, Stage.UNKNOWN: 1, Stage.WAITING: 2, Stage.OVER: 3}


def _is_refusal(row: Row) -> bool:
    """The trace that a refused sbatch leaves in some versions: a failed job that never had a node."""
    return row.state == "FAILED" and row.reason == "BadConstraints" and not row.nodes
