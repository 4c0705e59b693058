"""Jobs inside of a pilot on this machine: a real local scheduler, a real steward in its pilot, real jobs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.gpus import GpuSlot
from diamond.agent.schedulers.base import HasProcesses, HasShells, HasWarnings, Observed
from diamond.agent.schedulers.local.scheduler import LocalScheduler
from diamond.agent.schedulers.pool_result import PILOT_ENDED
from diamond.agent.schedulers.pooled_local import PooledLocal
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, read_process_mark
from diamond.core.states import JobState
from diamond.core.wire import JobOrder
from testing.pools import job_id, pilot_order, pooled_order, stage

Until = Callable[..., Any]
SAVES = "trap 'echo saved; exit 85' USR1; echo ready; while :; do sleep 0.05; done"
GPUS = tuple(GpuSlot(index=index, visible=f"GPU-{index}", model="A100") for index in (2, 3))


class Bench:
    def __init__(self, jobs_dir: Path, until: Until) -> None:
        self.jobs_dir = jobs_dir
        self.until = until
        jobs_dir.mkdir()
        self.scheduler = self._make()

    def _make(self) -> PooledLocal:
        return PooledLocal(LocalScheduler(self.jobs_dir, cpus=4, gpus=GPUS, grace_s=1.0), self.jobs_dir)

    def again(self) -> None:
        """As an agent that was killed and started again."""
        self.scheduler.close()
        self.scheduler = self._make()

    def submit(self, order: JobOrder) -> RunDir:
        asked = stage(self.jobs_dir, order)
        self.scheduler.submit(asked)
        return RunDir(asked.run_dir)

    def seen(self, number: int) -> Observed:
        return self.scheduler.observe()[job_id(number)]

    def wait_for(self, number: int, state: JobState) -> Observed:
        self.until(lambda: self.seen(number).state is state, f"{number} is {state}; it is {self.seen(number)}")
        return self.seen(number)

    def over(self, number: int) -> Observed:
        self.until(lambda: self.seen(number).state.is_final, f"{number} is over; it is {self.seen(number)}")
        return self.seen(number)

    def pilot(self, number: int = 1, **more: Any) -> RunDir:
        run_dir = self.submit(pilot_order(number, **more))
        self.until(run_dir.pilot.exists, "the pilot has begun")
        return run_dir


@pytest.fixture
def bench(tmp_path: Path, until: Until) -> Iterator[Bench]:
    one = Bench(tmp_path / "jobs", until)
    yield one
    seen = one.scheduler.observe()
    one.scheduler.cancel(list(seen))
    for name in seen:
        until(lambda name=name: one.scheduler.observe()[name].state.is_final, f"{name} is over")
    one.scheduler.close()


def text(run_dir: RunDir) -> str:
    return run_dir.stream("log").read_text()


def test_what_it_can_do(bench: Bench) -> None:
    for kind in (HasProcesses, HasShells, HasWarnings):
        assert isinstance(bench.scheduler, kind)


def test_two_jobs_share_a_pilot(bench: Bench, until: Until) -> None:
    bench.submit(pooled_order(2, "echo early", 1))
    assert bench.over(2).reason is Reason.NODE_FAIL, "there is no such pilot"
    pilot = bench.pilot(gpus="A100")
    show = 'echo "gpus $CUDA_VISIBLE_DEVICES"; '
    first = bench.submit(pooled_order(3, show + SAVES, 1, gpus=True))
    second = bench.submit(pooled_order(4, show + SAVES, 1, gpus=True))
    until(lambda: "ready" in text(first) and "ready" in text(second))
    bench.wait_for(3, JobState.RUNNING)
    seen = bench.wait_for(4, JobState.RUNNING)
    assert seen.started_at and seen.hosts and seen is bench.seen(4)
    assert {text(one).split()[1] for one in (first, second)} == {"GPU-2", "GPU-3"}
    processes = {one.name: one for one in bench.scheduler.processes()}
    assert set(processes) == {job_id(3), job_id(4)}, "a pilot does nothing itself"
    assert sorted(processes[job_id(3)].gpus + processes[job_id(4)].gpus) == [2, 3]
    command = bench.scheduler.shell_argv(job_id(3), ["true"], tty=False)
    assert command.env["DIAMOND_TASK_ID"] == "tsk_00000003" and command.cwd == first.work_root
    used = bench.scheduler.usage()
    assert (used.cpus_used, used.jobs_running, used.jobs_queued) == (2, 3, 0)

    bench.scheduler.warn([job_id(3)])
    ended = bench.over(3)
    assert (ended.reason, ended.exit_code) == (Reason.EXIT_NONZERO, 85)  # a chain makes CONTINUED of it
    bench.scheduler.cancel([job_id(4)])
    assert bench.over(4).reason is Reason.CANCELLED
    bench.scheduler.forget([job_id(3), job_id(4)])
    assert set(bench.scheduler.observe()) == {job_id(1), job_id(2)}
    assert not list((pilot.path / "steps").glob(f"{job_id(3)}.*"))

    bench.scheduler.warn([job_id(1)])
    assert bench.over(1).reason is Reason.COMPLETED


def test_jobs_wait_for_a_pilot_that_waits_itself_and_can_be_given_up(bench: Bench, until: Until) -> None:
    bench.pilot(1, slots=4)
    bench.submit(pilot_order(2, slots=2))  # there is no room for it yet
    waiting, yielding, cancelled = (bench.submit(pooled_order(one, "echo ran", 2)) for one in (3, 4, 5))
    assert bench.seen(3).state is JobState.QUEUED and bench.seen(3).pending_reason == "its pilot has not begun"
    bench.scheduler.warn([job_id(4)])
    gave_up = bench.over(4)
    assert (gave_up.reason, gave_up.started_at) == (Reason.PREEMPTED, None)
    bench.scheduler.cancel([job_id(5)])
    assert bench.over(5).detail == "cancelled before it started"
    bench.again()
    assert bench.seen(4).reason is Reason.PREEMPTED and bench.seen(5).reason is Reason.CANCELLED
    assert bench.seen(3).state is JobState.QUEUED
    bench.scheduler.warn([job_id(1)])
    assert bench.over(3).reason is Reason.COMPLETED
    assert text(waiting) == "ran\n" and text(yielding) == text(cancelled) == ""


def test_a_new_one_finds_all_again(bench: Bench, until: Until) -> None:
    pilot = bench.pilot()
    runs, ends = bench.submit(pooled_order(2, SAVES, 1)), bench.submit(pooled_order(3, "exit 3", 1))
    until(lambda: "ready" in text(runs))
    until(lambda: pilot.step(job_id(3), "done").exists())
    bench.again()
    assert bench.seen(2).state is JobState.RUNNING
    assert (bench.over(3).reason, bench.over(3).exit_code) == (Reason.EXIT_NONZERO, 3)
    # Killed between handing a job over and noting that: it is submitted again, by name.
    bench.scheduler.submit(stage_anew(bench, 2))
    pilot.step(job_id(3), "done").unlink()
    bench.again()
    assert bench.seen(3).reason is Reason.EXIT_NONZERO, "what is certain stays"
    bench.scheduler.warn([job_id(2)])
    assert bench.over(2).exit_code == 85 and text(runs).count("ready") == 1
    assert text(ends) == ""


def stage_anew(bench: Bench, number: int) -> Any:
    """The submission of a job whose directory is there already."""
    spooled = bench.scheduler._jobs[job_id(number)].spooled
    return spooled.submission


def test_with_a_pilot_that_is_killed_its_jobs_end(bench: Bench, until: Until) -> None:
    bench.pilot()
    first = bench.submit(pooled_order(2, SAVES, 1))
    second = bench.submit(pooled_order(3, "trap '' TERM; echo ready; while :; do sleep 0.05; done", 1))
    until(lambda: "ready" in text(first) and "ready" in text(second))
    marks = [read_process_mark(one) for one in (first, second)]
    steward = json.loads((bench.jobs_dir / job_id(1) / "pilot.json").read_text())["pid"]
    os.kill(steward, signal.SIGKILL)
    for number in (2, 3):
        ended = bench.over(number)
        assert (ended.reason, ended.detail) == (Reason.NODE_FAIL, PILOT_ENDED)
    for mark in marks:
        assert mark is not None
        until(lambda mark=mark: not Path(f"/proc/{mark.pid}/exe").exists(), "nothing of it is left")


def test_with_a_pilot_that_is_cancelled_its_jobs_end(bench: Bench, until: Until) -> None:
    bench.pilot()
    run_dir = bench.submit(pooled_order(2, "echo ready; sleep 60", 1))
    until(lambda: "ready" in text(run_dir))
    bench.scheduler.cancel([job_id(1)])
    ended = bench.over(2)
    assert (ended.reason, ended.detail) == (Reason.NODE_FAIL, PILOT_ENDED)
    assert bench.over(1).reason is Reason.CANCELLED


def test_a_step_that_cannot_begin_says_why(bench: Bench) -> None:
    bench.pilot(gpus="A100")
    run_dir = bench.submit(pooled_order(2, "true", 1, slots=3, gpus=True))
    ended = bench.over(2)
    assert (ended.reason, ended.started_at) == (Reason.LAUNCH_FAILED, None)
    assert ended.detail == "it could not be started: it needs 3 GPUs, and 2 of the pilot's 2 are free"
    assert text(run_dir) == ""


def test_here_a_place_has_one_node(bench: Bench) -> None:
    bench.pilot()
    bench.submit(pooled_order(2, "true", 1, 9))
    ended = bench.over(2)
    assert ended.reason is Reason.REJECTED and "2 nodes of a pool; this endpoint has 1" in ended.detail


def test_several_ranks_are_warned_as_one(bench: Bench, until: Until) -> None:
    bench.pilot()
    run_dir = bench.submit(pooled_order(2, "echo rank $RANK of $WORLD_SIZE; " + SAVES, 1, slots=2))
    until(lambda: text(run_dir).count("ready") == 2)
    bench.scheduler.warn([job_id(2)])
    assert bench.over(2).exit_code == 85
    assert sorted(line for line in text(run_dir).splitlines() if "of" in line) == [
        "[0] rank 0 of 2",
        "[1] rank 1 of 2",
    ]
    assert json.loads(run_dir.exit.read_text())["more"] is True
