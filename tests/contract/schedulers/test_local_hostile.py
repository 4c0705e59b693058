"""Jobs that tamper with their own run directory: it costs them something, and nobody else anything."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.machine import is_disk_full
from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.local import scheduler as module
from diamond.agent.schedulers.local import spool
from diamond.agent.schedulers.result import Ending, conclude
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.states import JobState

NO_RECORD = "no readable exit record"


@pytest.mark.parametrize(
    ("run", "reason", "code"),
    [
        ("rm ../exit.tmp; mkfifo ../exit.tmp", Reason.COMPLETED, 0),
        ("mkfifo ../exit.node0.json; exit 1", Reason.EXIT_NONZERO, 1),
        ("truncate -s 700M ../exit.node0.json; exit 1", Reason.EXIT_NONZERO, 1),
        ("mkfifo ../kill.json", Reason.COMPLETED, 0),
        ("mkfifo ../.diamond-probe; exit 2", Reason.EXIT_NONZERO, 2),
        ("mkdir ../exit.json; exit 4", Reason.EXIT_NONZERO, 4),
        ("mkdir ../exit.json", Reason.COMPLETED, 0),
        ("rm ../started ../exit.tmp; mkfifo ../started; mkdir ../exit.tmp; exit 5", Reason.EXIT_NONZERO, 5),
    ],
)
def test_what_jobs_put_in_place_of_files(bench: Any, run: str, reason: Reason, code: int) -> None:
    seen = bench.result(bench.submit(run))
    assert (seen.reason, seen.exit_code) == (reason, code)
    assert bench.result(bench.submit("true")).reason == Reason.COMPLETED
    bench.start()
    assert bench.result(bench.submit("true")).reason == Reason.COMPLETED, "also after a restart"


def test_a_kill_that_a_pipe_stands_in_the_way_of(bench: Any) -> None:
    job = bench.submit(f"mkfifo ../.kill.json.{os.getpid()}.new ../kill.json; echo ready; sleep 60")
    bench.said(job, "ready")
    bench.scheduler.cancel([job.name])
    assert bench.result(job).state.is_final
    assert bench.result(bench.submit("true")).reason == Reason.COMPLETED


def test_a_log_that_is_a_pipe_keeps_nobody_waiting(bench: Any, wait_for: Any) -> None:
    job = bench.prepare("echo hello")
    os.mkfifo(RunDir(job.run_dir).stream("log"))
    bench.scheduler.submit(job)
    wait_for(lambda: bench.seen(job).reason == Reason.LAUNCH_FAILED, "it is not started")
    assert bench.result(bench.submit("true")).reason == Reason.COMPLETED


@pytest.mark.parametrize("field", ['"exit_code":1e999', '"exit_code":' + "9" * 30, '"started_at":NaN', '"host":3'])
def test_exit_records_that_make_no_sense(bench: Any, field: str) -> None:
    good = {"phase": '"run"', "exit_code": "0", "started_at": "1", "ended_at": "2", "host": '"x"'}
    pairs = [f'"{name}":{value}' for name, value in good.items() if not field.startswith(f'"{name}"')] + [field]
    job = bench.submit("cat > ../exit.json <<'E'\n{" + ",".join(pairs) + "}\nE\nkill -9 $PPID; sleep 60")
    assert bench.result(job).reason == Reason.SIGNALLED
    bench.start()
    assert bench.result(job).reason == Reason.LOST
    assert bench.result(bench.submit("true")).reason == Reason.COMPLETED


def test_an_exit_record_of_a_job_that_still_runs(bench: Any) -> None:
    record = '{"phase":"run","exit_code":0,"started_at":1,"ended_at":2,"host":"x"}'
    job = bench.submit(f"echo '{record}' > ../exit.json; echo ready; sleep 1; exit 3")
    bench.said(job, "ready")
    bench.start()
    assert bench.seen(job).state == JobState.RUNNING
    assert bench.result(job).exit_code == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpus", "1e999"),
        ("time_limit_s", "NaN"),
        ("time_limit_s", '"soon"'),
        ("priority", "9" * 30),
        ("order", "-5"),
        ("envs", "[1]"),
        ("gpu_type", "{}"),
        ("assigned_gpus", "7"),
        ("name", '"../other"'),
        ("script", "null"),
    ],
)
def test_a_submission_that_makes_no_sense_is_not_taken_up(bench: Any, field: str, value: str) -> None:
    job = bench.submit("sleep 60")
    bench.until(job, JobState.RUNNING)
    path = job.run_dir / "local.json"
    text = path.read_text()
    raw = {name: json.dumps(one) for name, one in json.loads(text).items()} | {field: value}
    path.write_text("{" + ",".join(f'"{name}":{one}' for name, one in raw.items()) + "}")
    assert spool.load(job.run_dir) is None
    bench.start()
    assert bench.result(bench.submit("true")).reason == Reason.COMPLETED
    path.write_text(text)
    bench.start()
    bench.until(job, JobState.RUNNING)


def test_one_directory_that_fails_keeps_nothing_from_starting(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, worse, good = (bench.prepare("true") for _ in range(3))
    for job in (bad, worse, good):
        spool.save(spool.Spooled(submission=job, order=time.time_ns()))
    RunDir(bad.run_dir).exit.mkdir()
    load, conclude = spool.load, module.conclude

    def fail_one(run_dir: Path) -> Any:
        if run_dir == worse.run_dir:
            raise OverflowError("unforeseen")
        return load(run_dir)

    def fail(run_dir: Path, *more: Any) -> Any:
        if run_dir == bad.run_dir:
            raise OverflowError("unforeseen")
        return conclude(run_dir, *more)

    monkeypatch.setattr(spool, "load", fail_one)
    monkeypatch.setattr(module, "conclude", fail)
    bench.start()
    seen = bench.result(bad)
    assert (seen.reason, worse.name in bench.scheduler.observe()) == (Reason.LOST, False)
    monkeypatch.undo()
    assert bench.result(good).reason == Reason.COMPLETED


def test_an_error_nobody_foresaw_ends_one_job(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Submission, *_: Any) -> Any:
        if job.name == "job_bad":
            raise OverflowError("unforeseen")
        return spawn(job, *_)

    spawn = module.spawn
    monkeypatch.setattr(module, "spawn", fail)
    bad, good = bench.submit("true", name="job_bad"), bench.submit("true")
    assert bench.result(bad).reason == Reason.LOST
    assert bench.result(good).reason == Reason.COMPLETED
    assert bench.scheduler.usage().cpus_used == 0


# What a status alone tells


def ended(run_dir: Path, status: int | None) -> Any:
    return conclude(run_dir, Ending(status=status, host="h", started_at=1.0))


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        (0, Reason.COMPLETED, 0),
        (3, Reason.EXIT_NONZERO, 3),
        (73, Reason.EXIT_NONZERO, 73),
        (127, Reason.EXIT_NONZERO, 127),
        (139, Reason.SIGNALLED, 139),
    ],
)
def test_a_known_status_is_believed_without_a_record(tmp_path: Path, status: int, reason: Reason, code: int) -> None:
    (tmp_path / "started").write_text("1 1 boot\n")
    (tmp_path / "exit.json").mkdir()
    seen = ended(tmp_path, status)
    assert (seen.reason, seen.exit_code) == (reason, code)
    assert NO_RECORD in seen.detail


@pytest.mark.parametrize("status", [73, 75, 126, 127])
def test_a_script_that_never_began(tmp_path: Path, status: int) -> None:
    assert ended(tmp_path, status).reason == Reason.LAUNCH_FAILED


def test_nothing_is_known_of_a_process_that_was_not_ours(tmp_path: Path) -> None:
    (tmp_path / "started").write_text("1 1 boot\n")
    assert ended(tmp_path, None).reason == Reason.LOST
    assert ended(tmp_path / "gone", 0).reason == Reason.LOST


def test_the_probe_of_the_disk_waits_for_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".diamond-probe")
    assert not is_disk_full(tmp_path)
    assert not list(tmp_path.iterdir())
