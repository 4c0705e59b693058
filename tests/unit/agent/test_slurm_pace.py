"""How often Slurm is asked, and who is handed to sbatch when: pure decisions over a given time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diamond.agent.schedulers.slurm.commands import Commands, without_slurm
from diamond.agent.schedulers.slurm.pace import (
    MAX_BACKOFF_S,
    MAX_PER_MINUTE,
    MAX_RUNNING_S,
    MAX_WAITING_S,
    MIN_S,
    Backoff,
    Scene,
    next_query_at,
)
from diamond.agent.schedulers.slurm.submit import EVERYBODY, Lines, still_submitting

A, B = ("a", "-", "-"), ("b", "-", "-")


def interval(**scene: object) -> float | None:
    due = next_query_at(Scene(**scene), last_at=1000.0, now=1000.0)  # type: ignore[arg-type]
    return None if due is None else due - 1000.0


def test_nothing_to_watch_nothing_to_ask() -> None:
    assert interval() is None


@pytest.mark.parametrize(
    ("quiet_s", "running", "expected"),
    [
        (0, 1, MIN_S),
        (15, 1, MIN_S),
        (60, 1, 6.0),
        (600, 1, MAX_RUNNING_S),
        (600, 0, MAX_WAITING_S),
        (100, 0, 10.0),
    ],
)
def test_rarer_the_longer_nothing_happens(quiet_s: float, running: int, expected: float) -> None:
    assert interval(num_running=running, num_waiting=1, changed_at=1000.0 - quiet_s) == pytest.approx(expected)


def test_quick_when_something_is_due() -> None:
    assert interval(num_waiting=1, changed_at=0.0, is_urgent=True) == pytest.approx(MIN_S)
    assert interval(num_waiting=1, changed_at=0.0, starts_at=1010.0) == pytest.approx(5.0)
    assert interval(num_waiting=1, changed_at=0.0, starts_at=1000.0) == pytest.approx(MIN_S)
    assert interval(num_waiting=1, changed_at=0.0, starts_at=900.0) == MAX_WAITING_S, "an estimate long past"
    assert interval(is_urgent=True) == pytest.approx(MIN_S)


def test_never_more_than_so_many_a_minute() -> None:
    """An hour of urgency, with other queries in between: no minute of it has more than 40."""
    now, last, asked = 0.0, -10.0, [0.5, 1.0, 1.2, 20.0, 20.1, 20.2]
    while now < 600:
        recent = sorted(at for at in asked if now - 60 < at <= now)
        due = next_query_at(Scene(num_running=1, is_urgent=True, recent=recent), last_at=last, now=now)
        assert due is not None
        if due <= now:
            asked.append(now)
            last = now
        now += 0.1
    for begin in range(540):
        assert sum(begin <= at < begin + 60 for at in asked) <= MAX_PER_MINUTE + 2
    assert len(asked) > 350


def test_back_off() -> None:
    backoff = Backoff()
    delays = [backoff.failed() for _ in range(12)]
    assert 1.5 <= delays[0] <= 2 and all(one <= MAX_BACKOFF_S for one in delays) and delays[-1] >= 45
    backoff.succeeded()
    assert backoff.failed() <= 2


def names(lines: Lines, now: float, count: int) -> list[str | None]:
    return [lines.pick(now)[0] for _ in range(count)]


def test_the_most_important_first() -> None:
    lines = Lines()
    for name, queue, priority, order in (("a", A, 0, 1), ("b", B, 5, 2), ("c", A, 5, 3), ("d", A, -1, 0)):
        lines.add(name, queue, priority=priority, order=order)
    lines.remove("a")
    assert names(lines, 0.0, 4) == ["b", "c", "d", None] and len(lines) == 0


def test_one_probes_for_everybody() -> None:
    lines = Lines()
    for order, name in enumerate("abcdef"):
        lines.add(name, A if order % 2 else B, priority=0, order=order)
    assert names(lines, 0.0, 2) == ["a", "b"]
    lines.held(B, "no controller", 0.0, everybody=True)
    lines.held(A, "no controller", 0.1, everybody=True)  # two at once are one failure
    lines.back(A)
    lines.back(B)
    name, _, look_at = lines.pick(0.2)
    assert name is None and look_at is not None and 1.4 < look_at < 2.1
    assert lines.why(A) == lines.why(B) == "no controller"
    assert names(lines, 3.0, 2) == ["c", None], "one goes first"
    lines.back(B)  # it came to nothing: another may try
    assert names(lines, 3.0, 2) == ["d", None]
    lines.taken(A)
    lines.back(A)
    assert names(lines, 3.0, 3) == ["e", "f", None] and not lines.why(A)


def test_a_full_queue_holds_only_itself() -> None:
    lines = Lines()
    for order, (name, queue) in enumerate([("a", A), ("b", B), ("c", A)]):
        lines.add(name, queue, priority=0, order=order)
    assert names(lines, 0.0, 1) == ["a"]
    lines.held(A, "too many", 0.0, everybody=False)
    lines.back(A)
    assert (lines.why(A), lines.why(B)) == ("too many", "")
    assert names(lines, 0.0, 2) == ["b", None]
    assert lines.pick(0.0)[2] is not None, "when to look again"
    assert EVERYBODY not in (A, B)
    assert names(lines, 10.0, 1) == ["c"]


def test_an_sbatch_left_by_an_earlier_life(tmp_path: Path) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/bash\nread\n")
    program.chmod(0o755)
    left = subprocess.Popen([program, "--parsable", "--job-name=job_x"], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 5
        while still_submitting(["job_x", "job_y"]) != {"job_x"}:
            assert time.monotonic() < deadline
    finally:
        left.kill()
        left.communicate()
    assert still_submitting(["job_x"]) == still_submitting([]) == set()


def test_commands_are_counted_and_bounded(tmp_path: Path) -> None:
    hanging = tmp_path / "squeue"
    # Its child keeps the pipe open: a killed program must not be waited for through its children.
    hanging.write_text("#!/bin/bash\necho partly; sleep 60 & wait\n")
    hanging.chmod(0o755)
    commands = Commands(environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout_s=0.3)
    old_path, os.environ["PATH"] = os.environ["PATH"], f"{tmp_path}:{os.environ['PATH']}"
    try:
        began = time.monotonic()
        answer = commands.query(["squeue"])
        assert (answer.status, answer.is_good) == (None, False) and time.monotonic() - began < 3
        assert "no answer within" in answer.problem
        gone = commands.query(["no-such-program-anywhere"])
        assert gone.status == 127 and "not found on PATH" in gone.problem
        good = commands.query(
            [sys.executable, "-c", "import os; print(os.environ['LC_ALL'], os.environ['SLURM_TIME_FORMAT'])"]
        )
        assert good.out == "C %s\n"
        shot = commands.query(["bash", "-c", "kill -9 $$"])
        assert "signal 9" in shot.problem
        failed = commands.query(["bash", "-c", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1"])
        assert failed.problem == "Unable to contact"
        assert (commands.queries, commands.most_at_once, commands.counts["squeue"]) == (5, 1, 1)
        assert len(commands.queries_within(60)) == 5
        commands.close()
        assert commands.query(["bash", "-c", "true"]).status is None
    finally:
        os.environ["PATH"] = old_path


def test_only_slurms_address_is_kept_of_its_variables() -> None:
    env = {
        "SLURM_CONF": "/c",
        "SLURM_JOB_ID": "1",
        "SQUEUE_FORMAT": "x",
        "SBATCH_EXPORT": "NONE",
        "PATH": "/bin",
        "SLURMY": "z",
    }
    assert without_slurm(env) == {"SLURM_CONF": "/c", "PATH": "/bin", "SLURMY": "z"}
