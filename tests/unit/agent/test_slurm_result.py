"""How jobs under Slurm ended, from Slurm's last word and from what they left; and what the driver keeps on disk."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.schedulers.base import Observed, Submission
from diamond.agent.schedulers.causes import KillCause, save_cause
from diamond.agent.schedulers.choice import choose
from diamond.agent.schedulers.pooled_local import local_with_pools
from diamond.agent.schedulers.pooled_slurm import slurm_with_pools
from diamond.agent.schedulers.slurm.queue import Row, Status
from diamond.agent.schedulers.slurm.result import Last, end_of
from diamond.agent.schedulers.slurm.scheduler import spool
from diamond.core.errors import InstallationProblem
from diamond.core.reasons import Reason
from diamond.core.slurm import SlurmOptions
from diamond.core.states import JobState

ENDED_AT = 1_000_100.0


class Left:
    """A run directory as a job left it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "job_1"
        (self.folder / "work").mkdir(parents=True)
        self.submission = Submission(
            name="job_1", run_dir=self.folder, script=self.folder / "job.sh", time_limit_s=3600.0
        )

    def record(self, code: int, *, ended_at: float = ENDED_AT, phase: str = "run", **more: Any) -> Left:
        self.started()
        raw = {"phase": phase, "exit_code": code, "started_at": 1_000_000.0, "ended_at": ended_at, "host": "c1", **more}
        (self.folder / "exit.json").write_text(json.dumps(raw))
        return self

    def started(self) -> Left:
        (self.folder / "started").write_text("1 2 x\n")
        return self

    def end(
        self, state: str = "", *, reason: str = "None", nodes: str = "c1", status: Status | None = None
    ) -> Observed:
        row = Row(job_id="7", name="job_1", state=state, reason=reason, nodes=nodes, end_at=ENDED_AT) if state else None
        hosts = (nodes,) if nodes and row else ()
        return end_of(Last(submission=self.submission, row=row, status=status, scheduler_id="7", hosts=hosts))


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


@pytest.mark.parametrize(
    ("state", "code", "reason", "words"),
    [
        ("COMPLETED", 0, Reason.COMPLETED, ""),
        ("FAILED", 3, Reason.EXIT_NONZERO, "exit code 3"),
        ("FAILED", 75, Reason.EXIT_NONZERO, "exit code 75"),
        ("FAILED", 139, Reason.SIGNALLED, "SIGSEGV"),
        ("FAILED", 0, Reason.COMPLETED, ""),
        ("TIMEOUT", 143, Reason.TIME_LIMIT, "the limit was 1h 00m"),
        ("TIMEOUT", 0, Reason.TIME_LIMIT, "the limit was"),
        ("DEADLINE", 143, Reason.TIME_LIMIT, "--deadline"),
        ("PREEMPTED", 0, Reason.PREEMPTED, "higher priority"),
        ("CANCELLED", 143, Reason.CANCELLED, "outside Diamond"),
        ("NODE_FAIL", 1, Reason.NODE_FAIL, "(c1)"),
        ("NODE_FAIL", 0, Reason.COMPLETED, ""),
        ("BOOT_FAIL", 1, Reason.NODE_FAIL, "could not be started"),
        ("OUT_OF_MEMORY", 137, Reason.OUT_OF_MEMORY, "more memory"),
        ("OUT_OF_MEMORY", 0, Reason.COMPLETED, ""),
        ("REVOKED", 1, Reason.LOST, "federation"),
        ("", 4, Reason.EXIT_NONZERO, "exit code 4"),
    ],
)
def test_with_a_record(left: Left, state: str, code: int, reason: Reason, words: str) -> None:
    seen = left.record(code).end(state)
    assert (seen.reason, seen.exit_code) == (reason, code)
    assert words in seen.detail
    assert (seen.scheduler_id, seen.started_at, seen.ended_at, seen.hosts) == ("7", 1_000_000.0, ENDED_AT, ("c1",))


@pytest.mark.parametrize(
    ("state", "status", "reason", "words"),
    [
        ("COMPLETED", None, Reason.COMPLETED, "no readable exit record"),
        ("FAILED", Status(exit_code=3), Reason.EXIT_NONZERO, "exit code 3"),
        ("FAILED", Status(signal=9), Reason.SIGNALLED, "SIGKILL"),
        ("FAILED", Status(signal=53), Reason.LAUNCH_FAILED, "could not enter"),
        ("FAILED", Status(exit_code=75), Reason.LOST, "earlier submission"),
        ("FAILED", None, Reason.EXIT_NONZERO, "Slurm says that it failed (NonZeroExitCode)"),
        ("", None, Reason.LOST, "does not know the job any more"),
    ],
)
def test_without_a_record(left: Left, state: str, status: Status | None, reason: Reason, words: str) -> None:
    seen = left.started().end(state, reason="NonZeroExitCode", status=status)
    assert seen.reason == reason and words in seen.detail


@pytest.mark.parametrize("state", ["FAILED", ""], ids=["Slurm says that it failed", "Slurm has forgotten it"])
@pytest.mark.parametrize(
    ("code", "ran_s", "more", "reason"),
    [
        (138, 3545, {"warned": 1}, Reason.TIME_LIMIT),
        (138, 3480, {"warned": 1}, Reason.TIME_LIMIT),  # Slurm warns up to a minute early
        (138, 600, {"warned": 1}, Reason.SIGNALLED),  # somebody's own scancel --signal
        (138, 3590, {"warned": 0}, Reason.SIGNALLED),
        (138, 3590, {}, Reason.SIGNALLED),
        (139, 3590, {"warned": 1}, Reason.SIGNALLED),
        (143, 3601, {"warned": 1}, Reason.TIME_LIMIT),
        (143, 600, {"warned": 1}, Reason.SIGNALLED),
        (138, 3590, {"warned": 1, "phase": "setup"}, Reason.SETUP_FAILED),
        (138, 3590, {"warned": 1, "more": True}, Reason.SIGNALLED),  # a link of a chain: it goes on
        (1, 3590, {"warned": 1}, Reason.EXIT_NONZERO),
    ],
)
def test_ended_by_a_signal_as_its_time_was_over(
    left: Left, state: str, code: int, ran_s: float, more: dict[str, Any], reason: Reason
) -> None:
    seen = left.record(code, ended_at=1_000_000.0 + ran_s, **more).end(state)
    assert (seen.reason, seen.exit_code) == (reason, code)
    assert ("the limit was 1h 00m" in seen.detail) is (reason is Reason.TIME_LIMIT)


def test_a_training_that_ends_in_time_says_so(left: Left) -> None:
    """It may need longer to save than the scheduler warns ahead."""
    (left.folder / "out-of-time").touch()
    seen = left.record(138, ended_at=1_003_000.0, warned=0).end("FAILED")
    assert (seen.state, seen.reason) == (JobState.FAILED, Reason.TIME_LIMIT)
    left.submission = dataclasses.replace(left.submission, time_limit_s=None)
    seen = left.end("FAILED")
    assert seen.reason == Reason.TIME_LIMIT and seen.detail.endswith("its time was about to be over")
    assert left.record(139, ended_at=1_003_000.0).end("FAILED").reason == Reason.SIGNALLED, "it crashed all the same"


def test_what_never_began(left: Left) -> None:
    assert left.end("FAILED", status=Status(exit_code=73)).reason == Reason.LAUNCH_FAILED
    refused = left.end("FAILED", reason="BadConstraints", nodes="")
    assert (refused.reason, refused.started_at) == (Reason.REJECTED, None)
    cancelled = left.end("CANCELLED", nodes="")
    assert (cancelled.state, cancelled.started_at, cancelled.hosts) == (JobState.CANCELLED, None, ())
    by = left.end("CANCELLED", reason="by uid 1001", nodes="")
    assert "by uid 1001" in by.detail


def test_cancelled_by_diamond(left: Left) -> None:
    save_cause(left.folder, KillCause(reason=Reason.CANCELLED, detail="stopped on request", at=ENDED_AT - 1))
    seen = left.record(143).end("CANCELLED")
    assert (seen.state, seen.detail) == (JobState.CANCELLED, "stopped on request")
    assert left.record(0, ended_at=ENDED_AT - 2).end("COMPLETED").reason == Reason.COMPLETED, "it was over before"


def test_memory_where_slurm_has_no_state_for_it(left: Left) -> None:
    assert left.record(137).end("FAILED").reason == Reason.SIGNALLED
    (left.folder / "log").write_text("x" * 10000 + "\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.batch\n")
    seen = left.end("FAILED")
    assert (seen.state, seen.reason) == (JobState.FAILED, Reason.OUT_OF_MEMORY) and "memory" in seen.detail


def test_a_directory_that_is_gone(left: Left) -> None:
    for path in (left.folder / "work", left.folder):
        path.rmdir()
    assert "is gone" in left.end("").detail


# The spool


def full_submission(folder: Path) -> Submission:
    return Submission(
        name=folder.name, run_dir=folder, script=folder / "job.sh", cpus=3, gpus=2, gpu_type="a100", mem_bytes=5,
        time_limit_s=60.0, warn_s=6.0, priority=-2, num_nodes=2, envs={"A": "b\nc"}, partition="p", after="job_0",
        slurm=SlurmOptions(account="acc", time="00:01:30", exclusive=True, modules=("cuda/12",), extra=("--nice=1",)),
    )  # fmt: skip


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "job_1"
    folder.mkdir()
    assert spool.load(folder) is None and not spool.exists(folder)
    seen = Observed(state=JobState.FAILED, reason=Reason.NODE_FAIL, hosts=("c1", "c2"), ended_at=3.0, detail="x")
    spooled = spool.Spooled(
        submission=full_submission(folder), order=time.time_ns(), slurm_id="4711", host="login1", result=seen
    )
    spool.save(spooled)
    assert spool.load(folder) == spooled and spool.exists(folder)
    assert spool.load_all(tmp_path) == [spooled]
    spool.remove(folder)
    spool.remove(folder)
    assert spool.load_all(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpus", "1e999"), ("time_limit_s", "NaN"), ("priority", '"high"'), ("order", "-5"), ("envs", "[1]"),
        ("gpu_type", "{}"), ("name", '"../other"'), ("script", "null"), ("slurm", "7"), ("num_nodes", "0"),
        ("slurm", '{"extra": ["--uid=0"]}'), ("slurm", '{"account": "two words"}'), ("result", '{"state": "HAPPY"}'),
    ],
)  # fmt: skip
def test_a_file_no_driver_wrote_is_not_taken_up(tmp_path: Path, field: str, value: str) -> None:
    folder = tmp_path / "job_1"
    folder.mkdir()
    spool.save(spool.Spooled(submission=full_submission(folder), order=1))
    path = folder / "slurm.json"
    raw = {name: json.dumps(one) for name, one in json.loads(path.read_text()).items()} | {field: value}
    path.write_text("{" + ",".join(f'"{name}":{one}' for name, one in raw.items()) + "}")
    assert spool.load(folder) is None


def test_a_file_of_another_version(tmp_path: Path) -> None:
    folder = tmp_path / "job_1"
    folder.mkdir()
    job = full_submission(folder)
    spool.save(spool.Spooled(submission=job, order=1))
    path = folder / "slurm.json"
    raw: dict[str, Any] = json.loads(path.read_text()) | {"invented_later": 1}
    del raw["after"]
    path.write_text(json.dumps(raw))
    found = spool.load(folder)
    assert found is not None and found.submission == dataclasses.replace(job, after="")


# The choice of the scheduler


def test_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert choose("auto", tmp_path) is choose(None, tmp_path) is choose("local", tmp_path) is local_with_pools
    with pytest.raises(InstallationProblem, match="sbatch, squeue, scancel, scontrol cannot be found"):
        choose("slurm", tmp_path)
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    assert choose("auto", tmp_path) is choose(None, tmp_path) is choose("slurm", tmp_path) is slurm_with_pools
    assert choose("local", tmp_path) is local_with_pools
    (tmp_path / "agent.json").write_text('{"scheduler": "local"}')
    assert choose(None, tmp_path) is local_with_pools and choose("slurm", tmp_path) is slurm_with_pools
    (tmp_path / "agent.json").write_text('{"scheduler": "lsf"}')
    with pytest.raises(InstallationProblem, match="lsf"):
        choose(None, tmp_path)
