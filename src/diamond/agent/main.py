"""The agent as a program: one per home, until it is told to stop. Jobs go on without it and are taken up again.

Home: policy.toml, journal.jsonl, agent.lock, jobs/<job_id>/, cache/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import getpass
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TextIO

from diamond import __version__
from diamond.agent.cache import Cache
from diamond.agent.gpus import GpuMonitor
from diamond.agent.journal import Journal
from diamond.agent.link import Link
from diamond.agent.loop import Loop
from diamond.agent.machine import disk
from diamond.agent.outputs import Collector
from diamond.agent.policy import PolicyFile
from diamond.agent.poller import Poller
from diamond.agent.reporter import Reporter
from diamond.agent.sampler import Sampler
from diamond.agent.schedulers.base import HasProcesses, Scheduler
from diamond.agent.schedulers.local import LocalScheduler
from diamond.agent.session import Session
from diamond.agent.staging import Stager
from diamond.agent.table import JobTable
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.errors import Conflict, InstallationProblem
from diamond.core.ids import new_id
from diamond.core.rundir import write_atomic

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


@contextlib.contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Hold agent.lock: two agents on one home would each start the other's jobs.

    Raises:
        Conflict: naming the process that holds it.
    """
    fd = os.open(home / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "unknown"
            raise Conflict(
                f"another agent already works in {home} (process {holder})", hint="stop it first, or use another home"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


class Agent:
    """All parts of one agent, wired together. `run` blocks; `stop` may be called from any thread or signal handler."""

    def __init__(
        self,
        *,
        link: Link,
        home: Path,
        scheduler: Callable[[Path], Scheduler] | None = None,
        take_over: bool = False,
    ) -> None:
        """`scheduler` makes one for a jobs directory; by default the local one.

        Raises:
            InstallationProblem: policy.toml is wrong.
        """
        jobs_dir = home / "jobs"
        jobs_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._home = home
        self._stop = threading.Event()
        self._policy = PolicyFile(home / "policy.toml")
        self._link = link
        self._session = Session(link, self._facts, take_over=take_over)
        self._table = JobTable()
        self._journal = Journal(home / "journal.jsonl")
        self._scheduler = (scheduler or LocalScheduler)(jobs_dir)
        cache = Cache(home / "cache", self._link)
        self._stager = Stager(cache=cache, stop=self._stop)
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
        self._poller = Poller(
            link=self._link,
            session=self._session,
            stop=self._stop,
            on_orders=self._loop.take_orders,
            on_misfit=self._loop.take_misfit,
        )
        self._reporter = Reporter(
            link=self._link,
            session=self._session,
            stop=self._stop,
            table=self._table,
            usage=self._usage,
            on_delivered=self._loop.delivered,
        )
        self._table.on_news = self._reporter.wake
        source = self._scheduler
        self._sampler = Sampler(source, GpuMonitor()) if isinstance(source, HasProcesses) else None

    def run(self, *, once: bool = False) -> None:
        """Work until `stop`; with `once`, until every order there was is delivered."""
        self._poller.start()
        self._reporter.start()
        if self._sampler is not None:
            self._sampler.start()
        try:
            self._loop.run(lambda: once and self._loop.is_idle)
        finally:
            self.stop()
            self._session.take_leave()
            self._link.close()  # ends the long poll
            if self._sampler is not None:
                self._sampler.close()
            self._reporter.join(5)
            self._poller.join(5)
            self._stager.close()
            self._scheduler.close()
            self._journal.close()

    def stop(self) -> None:
        self._stop.set()
        self._loop.wake()
        self._reporter.wake()

    def _facts(self) -> EndpointFacts:
        policy = self._policy.policy
        return dataclasses.replace(
            self._scheduler.capacity(),
            os_user=_user(),
            agent_version=__version__,
            python=platform.python_version(),
            max_walltime_s=policy.max_walltime,
            policy=policy.describe(),
        )

    def _usage(self) -> EndpointUsage:
        space = disk(self._home)
        warnings = list(self._loop.warnings())
        if space.is_full:
            warnings.append(f"{self._home}: disk full")
        return dataclasses.replace(
            self._scheduler.usage(),
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


def instance_of(home: Path) -> str:
    """What this home is called, from its first start on: the server lets only one speak for an endpoint."""
    path = home / "instance"
    try:
        if name := path.read_text().strip():
            return name
    except FileNotFoundError:
        pass
    name = new_id("agt")
    write_atomic(path, name.encode())
    return name


def run(*, server_url: str, token: str, home: Path, once: bool = False, take_over: bool = False) -> int:
    """Be the agent of `home`. Blocks until SIGTERM or SIGINT, which end the agent and leave its jobs alone.

    Args:
        server_url: e.g. ``https://diamond.example.org``.
        token: the endpoint's agent token.
        home: the agent's directory; made if need be.
        once: return as soon as everything ordered so far is done and delivered.
        take_over: replace another home that spoke for this endpoint and is lost.

    Returns:
        The exit status, 0.

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
    with only_one(home):
        agent = Agent(link=Link(server_url, token, instance=instance_of(home)), home=home, take_over=take_over)

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
    return 0
