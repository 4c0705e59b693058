"""The benches on which every scheduler is tried: real run directories, real jobs, deadlines instead of sleeps."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from diamond.agent.schedulers.base import Observed, Scheduler, Submission
from diamond.agent.schedulers.local.scheduler import LocalScheduler
from diamond.core.rundir import EXIT_ROOM_BYTES, RunDir
from diamond.core.scripts import ScriptPlan, env_file, job_script
from diamond.core.states import JobState
from diamond.train import launch
from testing import waiting
from testing.minihpc import Node, Partition, Site
from testing.slurm_driver_host import BINDS, RemoteScheduler

DEADLINE_S = 20.0
GRACE_S = 1.0


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until the condition holds; its value."""
    return waiting.eventually(condition, within_s=deadline_s, every_s=0.01, what=what)


def is_alive(pid: int, proc: Path = Path("/proc")) -> bool:
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Bench:
    """One scheduler at a time on one jobs directory. `start` makes one; a second `start` is a restart.

    Attributes:
        jobs_dir: as the scheduler knows it.
        python: an interpreter jobs can use.
        patience_s: what the end of everything may take.
        quick_s: what a cancel takes when nothing has to be killed; `repeats`: how often that is tried.
        many: how many short jobs are many here, and `many_s` the seconds they may take.
        faults: where a scheduler can be made to die at the worst moment.
    """

    python = sys.executable
    patience_s = DEADLINE_S
    quick_s, repeats = 0.9, 10
    many, many_s = 300, 15.0
    faults: tuple[str, ...] = ()
    kind = ""

    def __init__(self, jobs_dir: Path) -> None:
        self.jobs_dir = jobs_dir
        self._count = itertools.count()
        self._scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Any:
        return self._scheduler or self.start()

    def start(self, **options: Any) -> Any:
        if self._scheduler is not None:
            self._scheduler.close()
        self._scheduler = self._make(**options)
        return self._scheduler

    def _make(self, **options: Any) -> Scheduler:
        raise NotImplementedError

    def outside(self, path: Path) -> Path:
        """A path of the scheduler's as this process sees it."""
        return path

    def new_name(self) -> str:
        return f"job_{next(self._count):08d}"

    def prepare(self, run: str, *, name: str | None = None, setup: str | None = None, **asked: Any) -> Submission:
        """A complete run directory and its submission."""
        name = name or self.new_name()
        inside = RunDir(self.jobs_dir / name)
        run_dir = RunDir(self.outside(inside.path))
        run_dir.work.mkdir(parents=True)
        run_dir.run.write_text(run)
        if setup is not None:
            run_dir.setup.write_text(setup)
        run_dir.env.write_bytes(env_file({"DIAMOND_JOB_ID": name}))
        run_dir.exit_room.write_bytes(b" " * EXIT_ROOM_BYTES)
        plan = ScriptPlan(
            job_id=name,
            run_dir=str(inside.path),
            ranks_per_node=1,
            has_setup=setup is not None,
            scheduler="local" if asked.get("on_login") else self.kind,
            num_nodes=asked.get("num_nodes", 1),
        )
        run_dir.script.write_text(job_script(plan))
        self._hand_over(run_dir)
        return Submission(name=name, run_dir=inside.path, script=inside.script, **asked)

    def _hand_over(self, run_dir: RunDir) -> None:
        """Make the run directory what the scheduler's user finds after staging."""

    def submit(self, run: str, **asked: Any) -> Submission:
        job = self.prepare(run, **asked)
        self.scheduler.submit(job)
        return job

    def seen(self, job: Submission) -> Observed | None:
        return self.scheduler.observe().get(job.name)

    def until(self, job: Submission, *states: JobState, within_s: float = DEADLINE_S) -> Observed:
        def look() -> Observed | None:
            seen = self.seen(job)
            return seen if seen is not None and seen.state in states else None

        try:
            return eventually(look, f"{job.name} is {states}", within_s)
        except AssertionError as error:
            said = f"it is {self.seen(job)}; log: {self.log(job)[-500:]}"
            raise AssertionError(f"{error}; {said}{self._explain()}") from None

    def _explain(self) -> str:
        return ""

    def result(self, job: Submission, within_s: float = DEADLINE_S) -> Observed:
        return self.until(job, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, within_s=within_s)

    def log(self, job: Submission) -> str:
        path = RunDir(self.outside(job.run_dir)).stream("log")
        return path.read_text() if path.exists() else ""

    def said(self, job: Submission, text: str) -> str:
        return eventually(lambda: text in self.log(job) and self.log(job), f"{job.name} says {text!r}")

    def alive(self, pid: int) -> bool:
        """Whether a process, by the number a job knows it by, runs."""
        return is_alive(pid)

    def spool_in_another_process(self, jobs: list[Submission], fault: str = "") -> Any:
        """Submit jobs from a process of its own, which then waits to be killed (or dies at the fault point).

        The answer has `wait(seconds)`, `kill()`, and has submitted everything unless it died.
        """
        raise NotImplementedError

    def close(self) -> None:
        scheduler = self.scheduler
        scheduler.cancel(list(scheduler.observe()))

        def is_done() -> bool:
            return all(one.state.is_final for one in scheduler.observe().values())

        eventually(is_done, "everything is cancelled", self.patience_s)
        scheduler.close()


class LocalBench(Bench):
    faults = ("local.spooled:2", "local.started:1", "local.started:2")
    kind = "local"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "jobs")
        self.jobs_dir.mkdir(parents=True)
        self._helpers: list[_LocalHelper] = []

    def _make(self, **options: Any) -> Scheduler:
        return LocalScheduler(self.jobs_dir, **({"cpus": 2, "grace_s": GRACE_S} | options))

    def spool_in_another_process(self, jobs: list[Submission], fault: str = "") -> Any:
        helper = _LocalHelper(self.jobs_dir, jobs, fault)
        self._helpers.append(helper)
        if not fault:
            assert helper.process.stdout is not None
            assert helper.process.stdout.readline() == "submitted\n"
        return helper

    def close(self) -> None:
        for helper in self._helpers:
            helper.kill()
        super().close()


class _LocalHelper:
    CODE = (
        "import sys, time, pathlib\n"
        "from diamond.agent.schedulers.local.scheduler import LocalScheduler\n"
        "from diamond.agent.schedulers.base import Submission\n"
        "scheduler = LocalScheduler(pathlib.Path(sys.argv[1]), cpus=2, grace_s=1.0)\n"
        "for name in sys.argv[2:]:\n"
        "    folder = pathlib.Path(sys.argv[1]) / name\n"
        "    scheduler.submit(Submission(name=name, run_dir=folder, script=folder / 'job.sh'))\n"
        "print('submitted', flush=True)\n"
        "time.sleep(600)\n"
    )

    def __init__(self, jobs_dir: Path, jobs: list[Submission], fault: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(jobs_dir), *[job.name for job in jobs]],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DIAMOND_FAULT": fault},
        )

    def wait(self, within_s: float) -> int:
        return self.process.wait(within_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


# One small node, so that jobs get into each other's way as they do on one machine.
CONTRACT_NODES = (Node(name="c1", cpus=2, memory_mib=8192, gpu_type="a100", num_gpus=2),)
CONTRACT_PARTITIONS = (Partition(name="debug", nodes=("c1",), options={"Default": "YES", "MaxTime": "1-00:00:00"}),)
QUICK = {
    "KillWait": "2",
    "SchedulerParameters": "sched_interval=1,batch_sched_delay=0,bf_interval=1,bf_continue,default_queue_depth=1000",
}


def contract_site(release: str) -> Site:
    return Site(
        f"contract-{release}",
        release=release,
        nodes=CONTRACT_NODES,
        partitions=CONTRACT_PARTITIONS,
        conf=QUICK,
        binds=BINDS,
    )


class SlurmBench(Bench):
    """The driver on the login node of a site, as user1; jobs and their files are the site's."""

    python = "python3"
    patience_s = 60.0  # a node that died keeps its jobs until Slurm notices
    quick_s, repeats = 3.0, 3
    many, many_s = 25, 60.0
    faults = ("slurm.spooled:2", "slurm.sbatch:1", "slurm.submitted:2")
    kind = "slurm"

    def __init__(self, site: Site, env: Mapping[str, str] | None = None) -> None:
        self.site = site
        self.env = dict(env or {})
        self.home = f"/home/user1/bench-{secrets.token_hex(4)}"
        super().__init__(Path(self.home) / "jobs")
        site.run(["mkdir", "-p", str(self.jobs_dir)])
        self._log: IO[str] = self.outside(Path(self.home, "driver.log")).open("a")
        self._prefix = secrets.token_hex(4)
        self._drivers: list[RemoteScheduler] = []

    def _make(self, *, env: Mapping[str, str] | None = None, **_: Any) -> Any:
        driver = RemoteScheduler(self.site, str(self.jobs_dir), log=self._log, env={**self.env, **(env or {})})
        self._drivers.append(driver)
        return driver

    def outside(self, path: Path) -> Path:
        return self.site.path(str(path))

    def new_name(self) -> str:
        # Slurm remembers the jobs of the tests before.
        return f"job_{self._prefix}_{next(self._count):04d}"

    def _hand_over(self, run_dir: RunDir) -> None:
        shutil.copy(launch.__file__, run_dir.launcher)
        run_dir.stream("log").touch(0o600)
        for path in (run_dir.path, *run_dir.path.rglob("*")):
            os.chown(path, 1000, 1000)

    def alive(self, pid: int) -> bool:
        return is_alive(pid, self.site.path("/proc"))

    def spool_in_another_process(self, jobs: list[Submission], fault: str = "") -> Any:
        driver = self._make(env={"DIAMOND_FAULT": fault} if fault else None)
        try:
            for job in jobs:
                driver.submit(job)
        except BrokenPipeError:
            assert fault
        return driver

    def _explain(self) -> str:
        driver = self.outside(Path(self.home, "driver.log")).read_text()[-1500:]
        listed = self.site.run(["squeue", "--all", "--states=all"], check=False).stdout[-1500:]
        return f"\ndriver: {driver}\n{listed}"

    def ids(self, job: Submission) -> list[str]:
        """Every job of this name that Slurm knows."""
        argv = ["squeue", "--all", "--states=all", "--noheader", f"--name={job.name}", "--format=%A"]
        return self.site.run(argv).stdout.split()

    def close(self) -> None:
        try:
            super().close()
        finally:
            for driver in self._drivers:
                driver.end()
            self._log.close()
