"""The bench on which every scheduler is tried: real run directories, real processes, deadlines instead of sleeps."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.schedulers.base import Observed, Scheduler, Submission
from diamond.agent.schedulers.local import LocalScheduler
from diamond.core.rundir import EXIT_ROOM_BYTES, RunDir
from diamond.core.scripts import ScriptPlan, env_file, job_script
from diamond.core.states import JobState
from testing import waiting

DEADLINE_S = 20.0
GRACE_S = 1.0


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until the condition holds; its value."""
    return waiting.eventually(condition, within_s=deadline_s, every_s=0.01, what=what)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Bench:
    """One scheduler at a time on one jobs directory. `start` makes one; a second `start` is a restart."""

    def __init__(self, jobs_dir: Path, make: Callable[..., Scheduler]) -> None:
        self.jobs_dir = jobs_dir
        self._make = make
        self._count = itertools.count()
        self._scheduler: Scheduler | None = None
        self._helpers: list[subprocess.Popen[str]] = []
        self.jobs_dir.mkdir(parents=True)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler or self.start()

    def start(self, **options: Any) -> Scheduler:
        if self._scheduler is not None:
            self._scheduler.close()
        self._scheduler = self._make(self.jobs_dir, **options)
        return self._scheduler

    def prepare(self, run: str, *, name: str | None = None, setup: str | None = None, **asked: Any) -> Submission:
        """A complete run directory and its submission."""
        name = name or f"job_{next(self._count):08d}"
        run_dir = RunDir(self.jobs_dir / name)
        run_dir.work.mkdir(parents=True)
        run_dir.run.write_text(run)
        if setup is not None:
            run_dir.setup.write_text(setup)
        run_dir.env.write_bytes(env_file({"DIAMOND_JOB_ID": name}))
        run_dir.exit_room.write_bytes(b" " * EXIT_ROOM_BYTES)
        plan = ScriptPlan(job_id=name, run_dir=str(run_dir.path), ranks_per_node=1, has_setup=setup is not None)
        run_dir.script.write_text(job_script(plan))
        return Submission(name=name, run_dir=run_dir.path, script=run_dir.script, **asked)

    def submit(self, run: str, **asked: Any) -> Submission:
        job = self.prepare(run, **asked)
        self.scheduler.submit(job)
        return job

    def seen(self, job: Submission) -> Observed | None:
        return self.scheduler.observe().get(job.name)

    def until(self, job: Submission, *states: JobState) -> Observed:
        def look() -> Observed | None:
            seen = self.seen(job)
            return seen if seen is not None and seen.state in states else None

        return eventually(look, f"{job.name} is {states}; it is {self.seen(job)}; log: {self.log(job)[-500:]}")

    def result(self, job: Submission) -> Observed:
        return self.until(job, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    def log(self, job: Submission) -> str:
        path = RunDir(job.run_dir).stream("log")
        return path.read_text() if path.exists() else ""

    def said(self, job: Submission, text: str) -> str:
        return eventually(lambda: text in self.log(job) and self.log(job), f"{job.name} says {text!r}")

    def spool_in_another_process(self, jobs: list[Submission], fault: str = "") -> subprocess.Popen[str]:
        """Submit jobs from a process of its own, which then waits to be killed (or dies at the fault point)."""
        code = (
            "import sys, time, pathlib\n"
            "from diamond.agent.schedulers.local import LocalScheduler\n"
            "from diamond.agent.schedulers.base import Submission\n"
            "scheduler = LocalScheduler(pathlib.Path(sys.argv[1]), cpus=2, grace_s=1.0)\n"
            "for name in sys.argv[2:]:\n"
            "    folder = pathlib.Path(sys.argv[1]) / name\n"
            "    scheduler.submit(Submission(name=name, run_dir=folder, script=folder / 'job.sh'))\n"
            "print('submitted', flush=True)\n"
            "time.sleep(600)\n"
        )
        helper = subprocess.Popen(
            [sys.executable, "-c", code, str(self.jobs_dir), *[job.name for job in jobs]],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DIAMOND_FAULT": fault},
        )
        self._helpers.append(helper)
        return helper

    def close(self) -> None:
        for helper in self._helpers:
            helper.kill()
            helper.wait()
            assert helper.stdout is not None
            helper.stdout.close()
        scheduler = self.scheduler
        scheduler.cancel(list(scheduler.observe()))
        eventually(lambda: all(one.state.is_final for one in scheduler.observe().values()), "everything is cancelled")
        scheduler.close()


def _local(jobs_dir: Path, **options: Any) -> Scheduler:
    return LocalScheduler(jobs_dir, **({"cpus": 2, "grace_s": GRACE_S} | options))


@pytest.fixture(params=[pytest.param(_local, id="local")])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "jobs", request.param)
    yield bench
    bench.close()


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    return eventually


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return is_alive


@pytest.fixture
def kill_9() -> Callable[[subprocess.Popen[str]], None]:
    def kill(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    return kill
