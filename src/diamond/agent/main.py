"""The agent as a program: one per home, until it is told to stop. Jobs go on without it and are taken up again.

Home: policy.toml, journal.jsonl, agent.lock, jobs/<job_id>/, cache/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TextIO

from diamond import __version__
from diamond.agent.cache import Cache
from diamond.agent.centre import CENTRE, StopWatch
from diamond.agent.config import instance_of
from diamond.agent.credentials import Credentials
from diamond.agent.gpus import GpuMonitor
from diamond.agent.image_jobs import Surroundings
from diamond.agent.journal import Journal
from diamond.agent.link import Link
from diamond.agent.lock import LOCK_FILE, held
from diamond.agent.loop import Loop
from diamond.agent.machine import disk
from diamond.agent.outputs import Collector
from diamond.agent.policy_files import PolicyFile
from diamond.agent.poller import Poller
from diamond.agent.private import account_home, own_folders
from diamond.agent.reporter import Reporter
from diamond.agent.sampler import Sampler
from diamond.agent.schedulers.base import HasProcesses, HasShells, HasWarnings, LearnsFacts, Scheduler
from diamond.agent.schedulers.choice import choose
from diamond.agent.secrets import Vault
from diamond.agent.session import Session
from diamond.agent.shells import Shells
from diamond.agent.site_facts import SiteWatch
from diamond.agent.staging import Stager
from diamond.agent.table import JobTable, Tracked
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.errors import DiamondError, InstallationProblem
from diamond.core.inside import shown
from diamond.core.shells import ShellOrder

log = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """One JSON object a line, so that a cluster's log collector needs no rules of its own."""

    def format(self, record: logging.LogRecord) -> str:
        raw = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "from": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            raw["traceback"] = self.formatException(record.exc_info)
        return json.dumps(raw, ensure_ascii=False)


def set_up_logging(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("diamond")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def only_one(home: Path, on_lost: Callable[[str], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Hold agent.lock: two agents on one home would each start the other's jobs.

    Raises:
        Conflict: naming the process that holds it.
    """
    return held(home / LOCK_FILE, on_lost)


class Agent:
    """All parts of one agent, wired together. `run` blocks; `stop` may be called from any thread or signal handler."""

    def __init__(
        self,
        *,
        link: Link,
        home: Path,
        scheduler: Callable[[Path], Scheduler] | None = None,
        take_over: bool = False,
        centre: Path = CENTRE,
    ) -> None:
        """`scheduler` makes one for a jobs directory; by default what `choose` finds for this home. `centre` holds what
        this machine's centre says to every agent; no user of an agent can name another folder.

        Raises:
            InstallationProblem: policy.toml is wrong, or the centre's.
        """
        jobs_dir = home / "jobs"
        jobs_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._home = home
        self._stop = threading.Event()
        self._policy = PolicyFile(home / "policy.toml", centre=centre)
        self._link = link
        self._session = Session(link, self._facts, take_over=take_over, on_owner=self._policy.asked.told)
        self._table = JobTable()
        self._journal = Journal(home / "journal.jsonl")
        self._scheduler = (scheduler or choose(None, home))(jobs_dir)
        cache = Cache(home / "cache", self._link)
        kind = self._scheduler.capacity().scheduler
        vault = Vault(self._link)
        self._stager = Stager(
            cache=cache,
            stop=self._stop,
            scheduler=kind,
            around=self._around,
            vault=vault,
            is_other=self._policy.asked.is_other,
        )
        self._loop = Loop(
            jobs_dir=jobs_dir,
            scheduler=self._scheduler,
            journal=self._journal,
            table=self._table,
            session=self._session,
            policy=self._policy,
            stager=self._stager,
            collector=Collector(link=self._link, stop=self._stop),
            cache=cache,
            stop=self._stop,
        )
        self._shells = Shells(
            link=self._link,
            scheduler=self._scheduler,
            is_running=self._table.is_running,
            refusal=self._shell_refusal,
        )
        self._poller = Poller(
            link=self._link,
            session=self._session,
            stop=self._stop,
            on_orders=self._loop.take_orders,
            on_misfit=self._loop.take_misfit,
            shells=self._shells,
            on_rotate=(lambda: link.credentials.rotate(link.call)) if link.credentials.can_rotate else None,
        )
        self._reporter = Reporter(
            link=self._link,
            session=self._session,
            stop=self._stop,
            table=self._table,
            usage=self._usage,
            on_delivered=self._delivered,
            vault=vault,
        )
        self._table.on_news = self._reporter.wake
        source = self._scheduler
        self._sampler = Sampler(source, GpuMonitor()) if isinstance(source, HasProcesses) else None
        if isinstance(source, LearnsFacts):
            source.on_new_facts = self._say_again
        self._centre = StopWatch(centre, self._stop, self._end_for_centre)
        self._site = SiteWatch(
            home,
            run_root=jobs_dir,
            image_root=lambda: self._policy.image_root,
            cluster_name=lambda: str(getattr(source, "cluster_name", "")),
            on_change=self._say_again,
        )

    def run(self, *, once: bool = False) -> None:
        """Work until `stop`; with `once`, until every order there was is delivered."""
        self._poller.start()
        self._reporter.start()
        if self._sampler is not None:
            self._sampler.start()
        self._site.start()
        self._centre.start()
        try:
            self._loop.run(lambda: once and self._loop.is_idle)
        finally:
            self.stop()
            self._site.close()
            self._shells.close(within_s=3.0)
            self._session.take_leave()
            self._link.close()  # ends the long poll
            if self._sampler is not None:
                self._sampler.close()
            self._reporter.join(5)
            self._poller.join(5)
            self._stager.close()
            self._scheduler.close()
            self._journal.close()

    @property
    def stopped_by_centre(self) -> bool:
        return bool(self._centre.reason)

    def _end_for_centre(self, _why: str) -> None:
        with contextlib.suppress(DiamondError):  # a last word, so that users see why nothing starts any more
            self._reporter.tell_usage()
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._loop.wake()
        self._reporter.wake()

    def _shell_refusal(self, shell: ShellOrder) -> str:
        """Whose task it is stands in the job's order, which the policy has let in; not in the shell's."""
        job = self._table.get(shell.job_id)
        is_other = job is None or self._policy.asked.is_other(job.order)
        user = job.order.user if job is not None else shell.user
        return self._policy.policy.shell_refusal(user, is_other=is_other)

    def _say_again(self) -> None:
        self._session.greet_again()
        self._reporter.wake()

    def _delivered(self, jobs: list[Tracked]) -> None:
        self._loop.delivered(jobs)
        if any(job.order.work is not None for job in jobs):
            self._site.look_again()  # there are other images than before

    def _around(self) -> Surroundings:
        policy, site = self._policy.policy, self._site.facts
        return Surroundings(
            image_root=self._policy.image_root,
            binds=policy.binds((*site.binds, *shown(site.filesystems))),
            guest_binds=policy.image_binds,
            modules=site.container_modules,
            home=account_home(),
            hidden=own_folders(self._home),
            max_image_bytes=policy.max_image_bytes or 0,
        )

    def _facts(self) -> EndpointFacts:
        policy = self._policy.policy
        site = self._site.facts
        facts = dataclasses.replace(
            self._scheduler.capacity(),
            os_user=_user(),
            agent_version=__version__,
            python=platform.python_version(),
            policy=policy.describe(),
            policy_files=self._policy.files,
            policy_changed_at=self._policy.changed_at,
            others_problem=self._policy.others_problem,
            runtimes=site.runtimes,
            filesystems=site.filesystems,
            site=site.site,
            site_name=site.site_name,
            allows_shells=isinstance(self._scheduler, HasShells),
            takes_secrets=True,
            holds_pools=isinstance(self._scheduler, HasWarnings),
            architecture=platform.machine(),
            builders=site.builders,
            builder_problems=site.builder_problems,
            image_root=str(self._policy.image_root),
            image_bytes=site.image_bytes,
            layer_bytes=site.layer_bytes,
        )
        return policy.filter_facts(facts)

    def _usage(self) -> EndpointUsage:
        space = disk(self._home)
        used = self._scheduler.usage()
        warnings = [*used.warnings, *self._loop.warnings(), *self._site.facts.warnings]
        if self._centre.reason:
            warnings.append(f"this centre has stopped all Diamond agents ({self._centre.reason})")
        if space.is_full:
            warnings.append(f"{self._home}: disk full")
        return dataclasses.replace(
            used,
            at=time.time(),
            cpu_percent=self._sampler.cpu_percent if self._sampler else 0.0,
            mem_bytes_used=self._sampler.mem_bytes_used if self._sampler else 0,
            disk_free_bytes=space.free_bytes,
            disk_total_bytes=space.total_bytes,
            warnings=tuple(warnings),
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def run(
    *,
    server_url: str,
    token: str | Credentials,
    home: Path,
    ca_file: Path | None = None,
    once: bool = False,
    take_over: bool = False,
    scheduler: str | None = None,
) -> int:
    """Be the agent of `home`. Blocks until SIGTERM or SIGINT, which end the agent and leave its jobs alone.

    Args:
        server_url: e.g. ``https://diamond.example.org``.
        token: the endpoint's agent token.
        home: the agent's directory; made if need be.
        ca_file: the one authority to trust over HTTPS, instead of the system's.
        once: return as soon as everything ordered so far is done and delivered.
        take_over: replace another home that spoke for this endpoint and is lost.
        scheduler: "slurm", "local" or "auto"; None takes what the home says.

    Returns:
        The exit status: 0, or 1 when the centre has stopped its agents, so that what keeps this one running starts it
        again once it may run.

    Raises:
        Conflict: another agent works in this home.
        InstallationProblem: policy.toml is wrong, or the home cannot be written.
    """
    home = home.absolute()
    set_up_logging()
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InstallationProblem(f"{home}: {error.strerror}") from error
    with only_one(home, lambda _other: agent.stop()):
        link = Link(server_url, token, instance=instance_of(home), ca_file=ca_file)
        agent = Agent(link=link, home=home, scheduler=choose(scheduler, home), take_over=take_over)

        def on_signal(number: int, _frame: FrameType | None) -> None:
            log.info("%s: stopping; jobs go on", signal.Signals(number).name)
            agent.stop()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        # Not in this thread: a signal handler that sets an event its own thread is waiting on would wait for itself.
        with ThreadPoolExecutor(1, thread_name_prefix="loop") as worker:
            work = worker.submit(agent.run, once=once)
        try:
            work.result()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 1 if agent.stopped_by_centre else 0
