"""The Slurm driver: jobs of one user on one cluster, through the commands every user has. No root, no slurmdbd.

Durable state is in the run directories (`spool`); a new object for the same directory finds every job again.
Three kinds of threads work on one table (`jobs`): a few that run sbatch (`submit`), one that watches the
queue and cancels (`watch`), one that looks at run directories between two queries. A fourth finds out what the
cluster has (`discovery`). No job runs twice: job.sh itself decides by an O_EXCL file who starts a directory.

Must not know the server, the journal or the agent's loop.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from diamond.agent.schedulers.base import Observed, ShellCommand, Submission
from diamond.agent.schedulers.causes import KillCause, claim, save_cause
from diamond.agent.schedulers.slurm import spool
from diamond.agent.schedulers.slurm.commands import Answer, Commands
from diamond.agent.schedulers.slurm.discovery import FRESH_S, Discovery, Found
from diamond.agent.schedulers.slurm.facts import has_accounting, why_never
from diamond.agent.schedulers.slurm.jobs import HANDING_OVER, LOOKING, Jobs, Looker, Phase, SlurmJob
from diamond.agent.schedulers.slurm.sbatch import Kind, parse_job_id, refusal, sbatch_argv, sbatch_env
from diamond.agent.schedulers.slurm.shells import slurm_shell_argv
from diamond.agent.schedulers.slurm.submit import Submitter
from diamond.agent.schedulers.slurm.watch import Watcher
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.errors import NotFound
from diamond.core.faults import fault_point
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, may_have_started

log = logging.getLogger(__name__)

_IDLE_S = 5.0
_CLOSE_S = 5.0
_FACTS_FILE = "slurm-facts.json"


class SlurmScheduler:
    """See `Scheduler` for what every method promises.

    Attributes:
        commands: runs and counts Slurm's programs.
        on_new_facts: called, from any thread, when `capacity` has other news than before.
    """

    def __init__(self, jobs_dir: Path, *, commands: Commands | None = None) -> None:
        """Take up the work of `jobs_dir`, which holds the run directories, one a job, named by job id."""
        self.wake: Callable[[], None] = lambda: None
        self.on_new_facts: Callable[[], None] = lambda: None
        self.commands = commands or Commands()
        self._jobs = Jobs()
        self._jobs.on_over = self._release
        self._looker = Looker(self._jobs)
        self._behind: dict[str, list[str]] = {}  # jobs that wait for the number of another, by that one's name
        self._host = os.uname().nodename
        self._closing = threading.Event()
        self._ring = threading.Event()
        self._submitter = Submitter(self._submit_one)
        self._discovery = Discovery(self.commands, jobs_dir.parent / _FACTS_FILE, run_root=jobs_dir)
        self._discovery.on_change = lambda: self.on_new_facts()
        self._discovery.on_found = self._learn
        self._discovery.is_busy = lambda: bool(self._jobs.live())
        found = spool.load_all(jobs_dir)
        with self._jobs.lock:
            for spooled in found:
                self._admit(spooled, is_new=False)
        if found:
            log.info("took up %d jobs, %d of them not over", len(found), len(self._jobs.live()))
        self._watcher = Watcher(self._jobs, self.commands, resubmit=self._ready)
        self._watcher.on_recovery = self._discovery.refresh
        self._threads = [
            threading.Thread(target=self._watch, name="slurm-watch", daemon=True),
            threading.Thread(target=self._look, name="slurm-look", daemon=True),
        ]
        self._submitter.start()
        self._discovery.start()
        for thread in self._threads:
            thread.start()

    # The protocol

    def submit(self, submission: Submission) -> str:
        with self._jobs.lock:
            known = self._jobs.by_name.get(submission.name)
        if known is not None:
            return known.slurm_id
        # Whatever wrote one there before may have come as far as sbatch.
        is_new = not spool.exists(submission.run_dir)
        spooled = spool.Spooled(submission=submission, order=time.time_ns(), host=self._host)
        spool.save(spooled)
        fault_point("slurm.spooled")
        with self._jobs.lock:
            if submission.name not in self._jobs.by_name:
                self._admit(spooled, is_new=is_new)
            job = self._jobs.by_name[submission.name]
        self._ring.set()
        return job.slurm_id

    def observe(self) -> dict[str, Observed]:
        with self._jobs.lock:
            return {name: job.observed for name, job in self._jobs.by_name.items()}

    def cancel(self, names: Iterable[str]) -> None:
        with self._jobs.lock:
            for name in names:
                job = self._jobs.by_name.get(name)
                if job is not None and not job.is_over and job.cause is None:
                    self._cancel(job)
        self._jobs.write_results()
        self._ring.set()

    def forget(self, names: Iterable[str]) -> None:
        self._jobs.forget(names)

    def capacity(self) -> EndpointFacts:
        return self._discovery.facts()

    def usage(self) -> EndpointUsage:
        with self._jobs.lock:
            live = self._jobs.live()
            own_cpus = sum(job.row.cpus for job in live if job.is_running and job.row is not None)
            own_gpus: dict[str, int] = {}
            for job in live:
                if job.is_running and job.submission.gpus:
                    model = job.submission.gpu_type or "gpu"
                    own_gpus[model] = own_gpus.get(model, 0) + job.submission.gpus * job.submission.num_nodes
            running = sum(job.is_running for job in live)
        found = self._discovery.found
        models = {*found.gpus_used, *own_gpus}
        warning = self._watcher.warning
        return EndpointUsage(
            at=time.time(),
            cpus_used=max(own_cpus, found.cpus_used),
            mem_bytes_reserved=found.mem_bytes_used,
            gpus_used={model: max(found.gpus_used.get(model, 0), own_gpus.get(model, 0)) for model in sorted(models)},
            jobs_running=running,
            jobs_queued=len(live) - running,
            warnings=(warning,) if warning else (),
            nodes=found.nodes,
            nodes_at=found.nodes_at,
        )

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._ring.set()
        self._submitter.close(_CLOSE_S)
        self.commands.close()
        self._submitter.join()
        self._discovery.close()
        for thread in self._threads:
            thread.join()
        self._jobs.write_results()

    @property
    def cluster_name(self) -> str:
        return self._discovery.found.config.get("ClusterName", "")

    def shell_argv(self, name: str, argv: Sequence[str], tty: bool, node: int = 0) -> ShellCommand:
        with self._jobs.lock:
            job = self._jobs.by_name.get(name)
            if job is None or not job.is_running or not job.slurm_id or node >= job.submission.num_nodes:
                raise NotFound(f"no such job runs here, or not on a node {node}: {name}")
            hosts = job.observed.hosts
        asked = job.submission
        return slurm_shell_argv(
            job.slurm_id,
            asked.run_dir,
            argv,
            tty,
            environ=self._environment(asked),
            mark=secrets.token_hex(8),
            node=node,
            host=hosts[node] if node < len(hosts) else "",
            cpus=asked.cpus,
            modules=asked.slurm.modules,
        )

    def _environment(self, submission: Submission) -> dict[str, str]:
        return sbatch_env(submission, self.commands.environ, python_dir=os.path.dirname(sys.executable))

    @property
    def warning(self) -> str:
        """What people should know of the controller; empty while it answers."""
        return self._watcher.warning

    # Taking jobs up; under the lock

    def _admit(self, spooled: spool.Spooled, *, is_new: bool) -> None:
        run_dir = RunDir(spooled.submission.run_dir)
        untouched = is_new and not may_have_started(run_dir) and not os.path.lexists(run_dir.exit)
        phase = Phase.PLACED if spooled.slurm_id else Phase.READY if untouched else Phase.UNSURE
        job = SlurmJob(spooled, phase)
        self._jobs.by_name[job.name] = job
        self._jobs.changed_at = time.monotonic()
        self._jobs.has_news = True
        if spooled.result is not None:
            job.phase, job.observed = Phase.OVER, spooled.result
        elif job.cause is not None:
            cause, job.cause = job.cause, None
            self._cancel(job, cause)
        elif phase is Phase.READY:
            self._ready(job)
        else:
            self._looker.look_at(job)  # who runs should be known as running from the first moment

    def _ready(self, job: SlurmJob) -> None:
        """Let it go to sbatch, behind the one it has to follow."""
        job.phase = Phase.READY
        job.sure_after = 0.0
        after = self._jobs.by_name.get(job.submission.after)
        if after is not None and not after.is_over and not after.slurm_id and after is not job:
            self._behind.setdefault(after.name, []).append(job.name)
            self._jobs.waits(job, f"waiting for {after.name}, which is being handed to Slurm")
            return
        self._jobs.waits(job, self._submitter.why(job.submission) or HANDING_OVER)
        self._submitter.add(job.submission, job.spooled.order)

    def _release(self, job: SlurmJob) -> None:
        """It has a number, or needs none any more: those behind it may go."""
        for name in self._behind.pop(job.name, ()):
            waiting = self._jobs.by_name.get(name)
            if waiting is not None and waiting.phase is Phase.READY:
                self._ready(waiting)

    def _cancel(self, job: SlurmJob, cause: KillCause | None = None) -> None:
        before = "stopped on request" if job.is_running else "cancelled before it started"
        job.cause = cause or KillCause(reason=Reason.CANCELLED, detail=before, at=time.time())
        save_cause(job.run_dir, job.cause)
        # A directory whose start is taken runs nothing, also if Slurm cannot be told in time.
        is_free = not job.is_running and claim(RunDir(job.run_dir))
        if job.phase is Phase.READY and is_free:
            self._submitter.remove(job.name)
            self._jobs.never_ran(job, job.cause.reason, job.cause.detail)
            return
        if job.phase is Phase.READY:  # somebody's script was quicker than this cancel: find out whose
            self._submitter.remove(job.name)
            job.phase = Phase.UNSURE
            job.sure_after = time.monotonic()
        job.cancel_due = time.monotonic()

    # Submitting; in the submitter's threads

    def _submit_one(self, name: str) -> None:
        with self._jobs.lock:
            job = self._jobs.by_name.get(name)
            if job is None or job.phase is not Phase.READY or job.cause is not None or self._closing.is_set():
                return
            after = self._jobs.by_name.get(job.submission.after)
            after_id = after.slurm_id if after is not None and not after.is_over else ""
            if job.without_dependency:
                after_id = ""
            job.phase = Phase.SUBMITTING
        if why := self._why_never(job.submission):
            self._settled(job, lambda: self._jobs.never_ran(job, Reason.REJECTED, why))
            return
        argv = sbatch_argv(job.submission, after_id=after_id, refuses=self._discovery.found.refuses)
        env = self._environment(job.submission)
        fault_point("slurm.sbatch")
        answer = self.commands.sbatch(argv, env)
        fault_point("slurm.submitted")
        number = parse_job_id(answer.out) if answer.is_good else ""
        if number:
            self._placed(job, number)
        else:
            self._not_placed(job, answer, bool(after_id))

    def _why_never(self, job: Submission) -> str:
        """What the cluster is known not to have. Some Slurms take such a job and let it wait for ever."""
        self._discovery.facts()  # at a first start, worth a moment's wait
        found = self._discovery.found
        return why_never(job, found.facts) if found.at and time.monotonic() - found.at < FRESH_S else ""

    def _placed(self, job: SlurmJob, number: str) -> None:
        with self._jobs.lock:
            job.spooled = replace(job.spooled, slurm_id=number)
            job.phase = Phase.PLACED
            job.sure_after = time.monotonic()
            self._jobs.changed_at = job.sure_after
            if job.cause is not None:
                job.cancel_due = job.sure_after
            if job.is_running:
                self._jobs.runs(job, None)
            else:
                self._jobs.waits(job, "Slurm has it and has not looked at it yet")
            self._release(job)
        self._submitter.taken(job.submission)
        self._jobs.write(job)
        self._announce()

    def _not_placed(self, job: SlurmJob, answer: Answer, had_dependency: bool) -> None:
        """sbatch failed, or nobody knows whether it did."""
        said = refusal(answer.status if not answer.is_good else None, answer.err or answer.out)
        if said.kind is Kind.REFUSED and not (said.dependency and had_dependency):
            self._submitter.taken(job.submission)
            self._settled(job, lambda: self._jobs.never_ran(job, said.reason, said.text))
            return
        if said.kind is Kind.REFUSED:
            job.without_dependency = True  # the job it was to follow is over, and Slurm has forgotten it
        else:
            log.warning("sbatch for %s: %s", job.name, said.text)
            self._submitter.held(job.submission, said.text, everybody=said.kind is not Kind.LIMIT)
        with self._jobs.lock:
            if said.kind is Kind.UNKNOWN:
                job.phase = Phase.UNSURE
                job.sure_after = answer.ended_at
                self._jobs.waits(job, f"{LOOKING} (sbatch: {said.text})")
            elif job.cause is not None:
                self._jobs.never_ran(job, job.cause.reason, job.cause.detail)
            else:
                self._ready(job)
                if said.kind is Kind.LIMIT:
                    self._jobs.waits(job, said.text)
                elif said.kind is Kind.BUSY:
                    self._jobs.waits(job, f"Slurm cannot take jobs now: {said.text}; it is tried again")
        self._announce()

    def _settled(self, job: SlurmJob, end: Callable[[], None]) -> None:
        with self._jobs.lock:
            if job.cause is not None:
                self._jobs.never_ran(job, job.cause.reason, job.cause.detail)
            else:
                end()
        self._jobs.write_results()
        self._announce()

    def _announce(self) -> None:
        self._ring.set()
        if self._jobs.take_news():
            self.wake()

    # Watching

    def _learn(self, found: Found) -> None:
        self._watcher.hides_others = "jobs" in found.config.get("PrivateData", "")
        self._watcher.has_accounting = has_accounting(found.config)

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self._step()
            except Exception:  # everybody's jobs hang on this thread
                log.exception("slurm driver: unexpected error; going on")
                self._closing.wait(0.5)

    def _step(self) -> None:
        now = time.monotonic()
        cancel_at, ask_at = self._watcher.cancel_at(), self._watcher.due_at()
        if cancel_at is not None and cancel_at <= now:
            self._watcher.cancel()
        elif ask_at is not None and ask_at <= now:
            self._watcher.ask()
            self._jobs.write_results()
        else:
            due = [at for at in (cancel_at, ask_at) if at is not None]
            self._ring.wait(min(_IDLE_S, max(0.01, min(due) - now)) if due else _IDLE_S)
            self._ring.clear()
        if self._jobs.take_news():
            self.wake()

    def _look(self) -> None:
        pause_s = self._looker.EVERY_S
        while not self._closing.wait(pause_s):
            try:
                pause_s = self._looker.look()
            except Exception:
                log.exception("slurm driver: unexpected error while looking; going on")
            with self._jobs.lock:
                news = self._jobs.has_news
                pressing = any(job.saw_end and not job.ended for job in self._jobs.by_name.values() if not job.is_over)
            if news or pressing:
                self._announce()

    @property
    def num_looks(self) -> int:
        """How many files the looks between queries asked for; for tests and measurements."""
        return self._looker.num_looks
