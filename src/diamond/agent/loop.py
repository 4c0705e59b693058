"""The reconcile loop: brings what is to what should be, one step at a time, each journaled before it is taken.

Order -> accepted (journal) -> staged -> submitting (journal) -> handed to the scheduler -> watched -> outputs ->
result -> delivered. After a crash every job is found again by name in the scheduler before anything is submitted, so
nothing is lost and nothing runs twice. Runs in one thread; slow work (downloads, uploads) is done by two small pools.

Must not speak HTTP (`poller`, `reporter`) nor know any particular scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from diamond.agent.accepting import Pilots, gave_up, record_of, take_up
from diamond.agent.cache import Cache
from diamond.agent.image_jobs import forget_payloads
from diamond.agent.journal import Journal, Record
from diamond.agent.outputs import Collector, OutputsStopped
from diamond.agent.policy_files import PolicyFile
from diamond.agent.recovery import recover
from diamond.agent.run_dirs import remove_old
from diamond.agent.schedulers.base import HasWarnings, Observed, Scheduler
from diamond.agent.session import Session
from diamond.agent.staging import Stager, StagingFailed, StagingStopped
from diamond.agent.table import MAX_DETAIL, JobTable, Phase, Tracked, finishing, report_of, verdict
from diamond.core.errors import Unavailable
from diamond.core.faults import fault_point
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, may_have_started
from diamond.core.states import Desired, JobState
from diamond.core.tasks import Output, TaskSpec
from diamond.core.wire import JobOrder, JobReport

log = logging.getLogger(__name__)

_MOMENT_S = 0.005
_STEP = 32  # jobs staged between two looks at everything else
_RETRY_S = 3.0  # after a full disk or a scheduler that cannot take jobs
_TIDY_EVERY_S = 5.0
_SWEEP_EVERY_S = 3600.0


class Loop:
    def __init__(
        self,
        *,
        jobs_dir: Path,
        scheduler: Scheduler,
        journal: Journal,
        table: JobTable,
        session: Session,
        policy: PolicyFile,
        stager: Stager,
        collector: Collector,
        cache: Cache,
        stop: threading.Event,
    ) -> None:
        self._jobs_dir = jobs_dir
        self._scheduler = scheduler
        self._journal = journal
        self._table = table
        self._session = session
        self._policy = policy
        self._stager = stager
        self._collector = collector
        self._cache = cache
        self._stop = stop
        self._wake = threading.Event()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._to_accept: dict[str, tuple[JobOrder, bool]] = {}
        self._to_stage: deque[Tracked] = deque()
        self._ready: dict[str, Tracked] = {}
        self._seen: dict[str, Observed] = {}
        self._unwritten: list[Record] = []
        self._delivered: dict[str, JobReport] = {}
        self._held_until = 0.0
        self._tidy_at = 0.0
        self._sweep_at = time.monotonic() + 60.0
        self._staging = ThreadPoolExecutor(4, thread_name_prefix="staging")
        self._collecting = ThreadPoolExecutor(4, thread_name_prefix="outputs")
        self._storage_problem = ""
        scheduler.wake = self._wake.set
        self._recover()

    # From other threads

    def take_orders(self, orders: list[JobOrder], full: bool) -> None:
        """New orders; `full`: these are all there are, with what the server holds of each. Thread-safe."""

        def act() -> None:
            for order in orders:
                self._take_order(order, full)
            if full:
                self._session.synced.set()

        self._do(act)

    def take_misfit(self, job_id: str, why: str) -> None:
        """An order this version cannot read: answered, so that its task does not wait for ever. Thread-safe."""
        spec = TaskSpec(run="true")
        order = JobOrder(job_id=job_id, task_id="", task_name="", attempt=1, desired=Desired.RUN, spec=spec)
        detail = f"this version of the agent cannot read the order: {why}"
        self._do(lambda: self._reject_unread(order, detail))

    def delivered(self, jobs: list[Tracked]) -> None:
        """The server has these jobs' results. Thread-safe."""

        def act() -> None:
            self._write([Record(job_id=job.job_id, phase="delivered") for job in jobs])
            self._delivered |= {job.job_id: job.result for job in jobs if job.result is not None}
            for job in jobs:
                self._seen.pop(job.job_id, None)
                self._stager.vault.forget(job.order, job.run_dir, job.acked)
            self._scheduler.forget(job.job_id for job in jobs)
            forget_payloads(job.run_dir for job in jobs if job.order.work is not None)

        # Out of the reporter's sight at once; the rest in this thread, behind what it may still be doing with them.
        self._table.remove(jobs)
        self._do(act)

    def warnings(self) -> tuple[str, ...]:
        """What the owner of the endpoint should know. Thread-safe."""
        orphans = sum(job.is_orphan for job in self._table.all())
        found = [self._policy.warning, self._policy.others_problem, self._policy.asked.warning, self._storage_problem]
        if orphans:
            found.append(f"{orphans} jobs run here that the server does not know")
        return tuple(text for text in found if text)

    def _do(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._wake.set()

    # The thread

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Work until told to stop (or `is_done`)."""
        while not self._stop.is_set() and not is_done():
            try:
                busy = self.step()
            except Exception:  # everybody's jobs hang on this thread
                log.exception("unexpected error; going on")
                self._stop.wait(0.5)
                continue
            if not busy:
                self._wake.wait(self._wait_s())
                # What happens within a moment is handled as one: one look, one journal write, one report.
                self._stop.wait(_MOMENT_S)
                self._wake.clear()
        self._read_inbox()  # what was delivered should be remembered as delivered
        self._staging.shutdown(wait=False, cancel_futures=True)
        self._collecting.shutdown(wait=False, cancel_futures=True)

    @property
    def is_idle(self) -> bool:
        """Whether everything ordered is done and delivered. Of the loop's own thread."""
        return self._session.synced.is_set() and not self._to_accept and len(self._table) == 0

    def wake(self) -> None:
        self._wake.set()

    def step(self) -> bool:
        """Everything that can be done now; True when there is more."""
        self._read_inbox()
        self._accept()
        self._stage()
        self._submit()
        self._observe()
        self._tidy()
        return bool(self._to_stage)

    def _read_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _wait_s(self) -> float:
        held = bool(self._to_accept or self._ready or self._unwritten)
        return min(_RETRY_S, 1.0) if held else _TIDY_EVERY_S

    # Orders

    def _take_order(self, order: JobOrder, full: bool) -> None:
        job = self._table.get(order.job_id)
        if job is not None:
            if full:
                self._table.resync(job, order.with_all_offsets())
            if order.desired == Desired.CANCEL and not job.is_cancelled:
                job.is_cancelled = True
                self._cancel(job)
            elif order.desired == Desired.YIELD and not job.yields:
                job.yields = True
                self._warn(job)
        elif order.job_id in self._delivered:
            self._answer_again(order)
        else:
            self._to_accept[order.job_id] = (order, full)

    def _answer_again(self, order: JobOrder) -> None:
        """The server forgot that it has this job's result (a restored backup): it must not run a second time."""
        job = Tracked(order.with_all_offsets(), self._dir(order.job_id), Phase.OVER)
        job.result = self._delivered[order.job_id]
        self._table.add([job])

    def _accept(self) -> None:
        if not self._to_accept or time.monotonic() < self._held_until:
            return
        self._refresh_policy()  # an edit holds for the very next job
        records: list[Record] = []
        jobs: list[Tracked] = []
        known = self._scheduler.observe()
        fresh: dict[str, Tracked] = {}
        pilots = Pilots(lambda job_id: fresh.get(job_id) or self._table.get(job_id), known)
        # Pilots first: what runs inside of one may come in the same answer.
        for order, _ in sorted(self._to_accept.values(), key=lambda asked: asked[0].pilot is None):
            if order.job_id in self._delivered:  # since the order was read
                self._answer_again(order)
                continue
            is_known = order.job_id in known
            job = fresh[order.job_id] = take_up(
                order,
                self._dir(order.job_id),
                is_known=is_known,
                pilots=pilots,
                refusal=self._policy.refusal,
            )
            records.append(record_of(job))
            jobs.append(job)
        try:
            self._journal.append(records)
        except Unavailable as error:
            self._hold(f"journal: {error.message}")
            return
        for _ in jobs:
            fault_point("agent.accepted")
        self._to_accept.clear()
        # Short jobs are over before anybody could read that they were staged: only slow staging is reported.
        for job in jobs:
            if job.report is not None and not job.order.spec.bundle_refs:
                job.report = None
        self._table.add(jobs)
        self._to_stage.extend(job for job in jobs if job.phase == Phase.ACCEPTED)
        self._ready |= {job.job_id: job for job in jobs if job.phase == Phase.READY}
        for job in jobs:
            if job.phase == Phase.SUBMITTED and job.is_cancelled:
                self._cancel(job)
            elif job.yields:
                self._warn(job)

    def _refresh_policy(self) -> None:
        if self._policy.refresh():
            log.info("the rules in force have changed")
            self._session.greet_again()
            self._table.on_news()  # the reporter is the first to be free for it

    def _reject_unread(self, order: JobOrder, detail: str) -> None:
        if self._table.get(order.job_id) is None:
            job = Tracked(order, self._dir(order.job_id), Phase.OVER)
            job.result = verdict(job, Reason.REJECTED, detail)
            self._table.add([job])

    def _cancel(self, job: Tracked) -> None:
        if job.phase == Phase.SUBMITTED:
            self._scheduler.cancel([job.job_id])
        elif job.phase in (Phase.ACCEPTED, Phase.READY):
            self._ready.pop(job.job_id, None)
            self._finish([(job, verdict(job, Reason.CANCELLED, "cancelled before it started"))])

    def _warn(self, job: Tracked) -> None:
        """Let it save and stop. One that the scheduler does not have yet is not handed over any more, see `_submit`."""
        if job.phase == Phase.SUBMITTED and isinstance(self._scheduler, HasWarnings):
            self._scheduler.warn([job.job_id])

    # Staging and submitting

    def _stage(self) -> None:
        for _ in range(min(_STEP, len(self._to_stage))):
            job = self._to_stage.popleft()
            if job.phase != Phase.ACCEPTED:
                continue
            if job.stages_slowly:
                self._staging.submit(self._stage_slowly, job)
            else:
                self._staged(job, self._try_stage(job))

    def _stage_slowly(self, job: Tracked) -> None:
        failure = self._try_stage(job)
        self._do(lambda: self._staged(job, failure))

    def _try_stage(self, job: Tracked) -> StagingFailed | StagingStopped | None:
        try:
            self._stager.stage(job.order, job.run_dir, lambda: job.is_cancelled)
        except (StagingFailed, StagingStopped) as failure:
            return failure
        except Exception as error:
            log.exception("staging job %s", job.job_id)
            return StagingFailed(Reason.STAGING_FAILED, f"unexpected error: {error}")
        return None

    def _staged(self, job: Tracked, failure: StagingFailed | StagingStopped | None) -> None:
        if job.phase != Phase.ACCEPTED or isinstance(failure, StagingStopped):
            return
        if failure is not None:
            self._finish([(job, verdict(job, failure.reason, failure.detail))])
            return
        fault_point("agent.staged")
        job.phase = Phase.READY
        self._ready[job.job_id] = job

    def _submit(self) -> None:
        yielding = [job for job in self._ready.values() if job.yields and not may_have_started(RunDir(job.run_dir))]
        for job in yielding:
            del self._ready[job.job_id]
        self._finish([(job, gave_up(job)) for job in yielding])
        if not self._ready or time.monotonic() < self._held_until:
            return
        jobs = sorted(self._ready.values(), key=lambda job: (-job.order.spec.priority, job.job_id))
        limit = self._policy.policy.max_concurrent_jobs
        if limit is not None:
            under_way = sum(job.phase == Phase.SUBMITTED for job in self._table.all())
            jobs, held = jobs[: max(0, limit - under_way)], jobs[max(0, limit - under_way) :]
            for job in held:
                self._say_held(job, f"policy.toml: max_concurrent_jobs = {limit}")
        if not jobs:
            return
        try:
            self._journal.append([Record(job_id=job.job_id, phase="submitting") for job in jobs])
        except Unavailable as error:
            self._hold(f"journal: {error.message}")
            return
        done = []
        for job in jobs:
            fault_point("agent.submitting")
            try:
                self._scheduler.submit(self._policy.submission(job))
            except Unavailable as error:
                self._hold(error.message)
                break
            fault_point("agent.submitted")
            job.phase = Phase.SUBMITTED
            del self._ready[job.job_id]
            done.append(job)
            if job.yields:
                self._warn(job)
        self._write([Record(job_id=job.job_id, phase="submitted") for job in done], sync=False)

    def _say_held(self, job: Tracked, why: str) -> None:
        if job.report is None or job.report.pending_reason != why:
            report = JobReport(job_id=job.job_id, state=JobState.QUEUED, pending_reason=why, run_dir=str(job.run_dir))
            self._table.set_report(job, report)

    # Watching and ending

    def _observe(self) -> None:
        over: list[tuple[Tracked, JobReport]] = []
        for name, seen in self._scheduler.observe().items():
            if self._seen.get(name) is seen:
                continue
            job = self._table.get(name)
            if job is None or job.phase != Phase.SUBMITTED:
                continue
            self._seen[name] = seen
            self._policy.asked.seen(job, seen)
            report = report_of(job, seen)
            if not seen.state.is_final:
                self._table.set_report(job, report)
            elif job.order.spec.outputs and seen.started_at is not None and report.reason != Reason.CONTINUED:
                job.phase = Phase.COLLECTING
                self._table.set_report(job, finishing(report))
                self._collecting.submit(self._collect, job, seen)
            else:
                over.append((job, report))
        self._finish(over)

    def _collect(self, job: Tracked, seen: Observed) -> None:
        outputs: tuple[Output, ...] = ()
        work = RunDir(job.run_dir).work_root
        try:
            most = self._policy.policy.output_limit(job.order)
            outputs, notes = self._collector.collect(work, job.order.spec.outputs, most)
        except OutputsStopped:
            return
        except Exception as error:
            log.exception("collecting outputs of job %s", job.job_id)
            notes = f"outputs could not be collected: {error}"
        report = report_of(job, seen)
        detail = "; ".join(text for text in (report.detail, notes) if text)[:MAX_DETAIL]
        self._do(lambda: self._finish([(job, replace(report, outputs=outputs, detail=detail))]))

    def _finish(self, results: list[tuple[Tracked, JobReport]]) -> None:
        results = [(job, self._stager.vault.end(job.order, job.run_dir, result)) for job, result in results]
        self._write([Record(job_id=job.job_id, phase="finished", result=result) for job, result in results])
        for job, result in results:
            self._table.set_result(job, result)
        if orphans := [job for job, _ in results if job.is_orphan]:  # nobody to tell
            self.delivered(orphans)

    # Storage

    def _write(self, records: list[Record], *, sync: bool = True) -> None:
        """Journal what can be found out again after a crash: a full disk delays it, and nothing else."""
        if not records and not self._unwritten:
            return
        pending, self._unwritten = [*self._unwritten, *records], []
        try:
            self._journal.append(pending, sync=sync)
            self._storage_problem = ""
        except Unavailable as error:
            self._unwritten = pending
            self._storage_problem = f"journal: {error.message}"

    def _hold(self, problem: str) -> None:
        if problem != self._storage_problem:
            log.warning("%s; new jobs wait", problem)
        self._storage_problem = problem
        self._held_until = time.monotonic() + _RETRY_S

    def _tidy(self) -> None:
        now = time.monotonic()
        if now < self._tidy_at:
            return
        self._tidy_at = now + _TIDY_EVERY_S
        self._refresh_policy()
        self._write([])
        if not self._unwritten and now >= self._held_until and not self._to_accept and not self._ready:
            self._storage_problem = ""
        self._journal.compact()
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_EVERY_S
            self._journal.compact(force=True)
            kept = self._journal.remembered()
            self._delivered = {job_id: result for job_id, result in self._delivered.items() if job_id in kept}
            self._staging.submit(self._sweep)

    def _sweep(self) -> None:
        kept = set(self._scheduler.observe()) | {job.job_id for job in self._table.all()}
        remove_old(self._jobs_dir, kept, self._policy.policy.keep_finished)
        with contextlib.suppress(OSError):
            self._cache.trim(self._policy.policy.cache_bytes)

    def _dir(self, job_id: str) -> Path:
        return self._jobs_dir / job_id

    def _recover(self) -> None:
        found = recover(self._journal.remembered(), self._scheduler.observe(), self._dir)
        self._delivered = found.delivered
        self._table.add(found.jobs)
        self._to_stage.extend(job for job in found.jobs if job.phase == Phase.ACCEPTED)
        self._ready = {job.job_id: job for job in found.jobs if job.phase == Phase.READY}
        self._write([Record(job_id=job.job_id, phase="finished", result=job.result) for job in found.lost])
        self._stager.vault.sweep(self._jobs_dir, [(job.order, job.phase == Phase.OVER) for job in found.jobs])
