"""What a job prints becomes points, each once, whoever else writes and whenever the agent dies."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import plain_curves
from diamond.agent.plain_curves import PlainCurves
from diamond.core.rundir import RunDir
from diamond.core.tasks import TaskSpec
from diamond.core.wire import STREAMS, Desired, JobOrder

FIRST, SECOND = "job_00000000000000000000000001", "job_00000000000000000000000002"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_curves, "_PERIOD_S", 0.0)
    monkeypatch.setattr(plain_curves, "_HOLD_S", 0.0)
    monkeypatch.setattr(plain_curves, "_REST", 0)


def order(job_id: str = FIRST, continues: str = "", **spec: Any) -> JobOrder:
    return JobOrder(
        job_id=job_id,
        task_id="t",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=TaskSpec.parse({"run": "true", **spec}),
        received=dict.fromkeys(STREAMS, 0),
        continues=continues,
    )


def say(folder: Path, text: str) -> None:
    with open(RunDir(folder).stream("log"), "a") as file:
        file.write(text)


def points(folder: Path) -> list[dict[str, Any]]:
    path = RunDir(folder).stream("metrics")
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in record.items() if key != "t"} for record in found]


def test_lines_become_points_as_they_come(tmp_path: Path) -> None:
    curves = PlainCurves()
    assert curves.gather(order(), tmp_path, is_over=False)
    assert not RunDir(tmp_path).curves.exists()
    say(tmp_path, "hello\nEpoch 1/3 loss: 0.5\nEpoch 2/3 lo")
    curves.gather(order(), tmp_path, is_over=False)
    assert points(tmp_path) == [{"step": 1, "loss": 0.5}]
    say(tmp_path, "ss: 0.25\nEpoch 3/3 loss: 0.125")
    curves.gather(order(), tmp_path, is_over=False)
    assert curves.gather(order(), tmp_path, is_over=True)
    curves.gather(order(), tmp_path, is_over=True)
    assert points(tmp_path) == [{"step": n, "loss": 2.0**-n} for n in (1, 2, 3)]


@pytest.mark.parametrize("spec", [{}, {"curves": ["loss: {loss}"]}])
def test_dying_anywhere_neither_loses_nor_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    chance = random.Random(5)
    monkeypatch.setattr(plain_curves, "_PIECE_BYTES", 40)

    class Killed(BaseException):
        pass

    def die(point: str) -> None:
        if chance.random() < 0.3:
            raise Killed

    monkeypatch.setattr(plain_curves, "fault_point", die)
    curves = PlainCurves()
    for n in range(200):
        text = f"x {'y' * (n % 7)}\nloss: {n}.5\n"
        cut = chance.randrange(len(text))
        for part in (text[:cut], text[cut:]):
            say(tmp_path, part)
            if spec and chance.random() < 0.2:
                with open(RunDir(tmp_path).stream("metrics"), "a") as file:
                    file.write(json.dumps({"step": n, "own": n}) + "\n")
            try:
                curves.gather(order(**spec), tmp_path, is_over=False)
            except Killed:
                curves = PlainCurves()
    while True:
        try:
            if curves.gather(order(**spec), tmp_path, is_over=True):
                break
        except Killed:
            curves = PlainCurves()
    assert [one for one in points(tmp_path) if "loss" in one] == [{"step": n, "loss": n + 0.5} for n in range(200)]


def test_a_program_that_logs_itself_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_curves, "_HOLD_S", 60.0)
    curves = PlainCurves()
    say(tmp_path, "step 0 loss: 0.5\n")
    curves.gather(order(), tmp_path, is_over=False)
    assert points(tmp_path) == [], "it may be about to log"
    own = {"step": 0, "loss": 0.5}
    RunDir(tmp_path).stream("metrics").write_text(json.dumps(own) + "\n")
    curves.gather(order(), tmp_path, is_over=False)
    curves.gather(order(), tmp_path, is_over=True)
    PlainCurves().gather(order(), tmp_path, is_over=True)
    assert points(tmp_path) == [own]
    asked = order(curves=["step {step} loss: {seen}"])
    PlainCurves().gather(asked, tmp_path, is_over=True)
    assert points(tmp_path) == [own, {"step": 0, "seen": 0.5}], "what is asked for is there beside it"


def test_a_short_job_need_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_curves, "_HOLD_S", 60.0)
    say(tmp_path, "loss: 0.5")
    assert PlainCurves().gather(order(), tmp_path, is_over=True)
    assert points(tmp_path) == [{"step": 0, "loss": 0.5}]


def test_off_is_off(tmp_path: Path) -> None:
    say(tmp_path, "loss: 0.5\n")
    PlainCurves().gather(order(curves=False), tmp_path, is_over=True)
    assert sorted(os.listdir(tmp_path)) == ["log"]


def test_the_next_job_of_a_chain_counts_on(tmp_path: Path) -> None:
    spec = {"curves": ["loss {loss}"]}
    for job_id in (FIRST, SECOND):
        (tmp_path / job_id).mkdir()
    say(tmp_path / FIRST, "loss 3\nloss 2\n")
    PlainCurves().gather(order(**spec), tmp_path / FIRST, is_over=True)
    say(tmp_path / SECOND, "loss 1\n")
    PlainCurves().gather(order(SECOND, continues=FIRST, **spec), tmp_path / SECOND, is_over=True)
    assert points(tmp_path / SECOND) == [{"step": 2, "loss": 1}]


def test_only_rank_0_counts_where_there_are_several(tmp_path: Path) -> None:
    say(tmp_path, "[1] loss: 9\n[0] loss: 0.5\n[2] loss: 8\n")
    PlainCurves().gather(order(ranks_per_node=3), tmp_path, is_over=True)
    assert points(tmp_path) == [{"step": 0, "loss": 0.5}]


@pytest.mark.parametrize(
    "state",
    [
        '{"offset": 0, "own_bytes": 0, "at": 0, "lines": "\\ud800"}',  # no encoding has it
        "",
        "{}",
        "[]",
        '{"offset": -1}',
        '{"offset": true}',
        "\x00" * 100,
    ],
)
def test_a_state_that_cannot_be_read_makes_a_gap(tmp_path: Path, state: str) -> None:
    say(tmp_path, "loss: 0.5\n")
    RunDir(tmp_path).curves.write_text(state)
    curves = PlainCurves()
    curves.gather(order(), tmp_path, is_over=False)
    say(tmp_path, "loss: 0.25\n")
    curves.gather(order(), tmp_path, is_over=True)
    assert points(tmp_path) == [{"step": 0, "loss": 0.25}]


def test_what_a_job_puts_in_place_of_its_files_is_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    job = tmp_path / "job"
    job.mkdir()
    say(job, "loss: 0.5\n")
    RunDir(job).stream("metrics").symlink_to(victim)
    assert PlainCurves().gather(order(), job, is_over=True)
    assert victim.read_text() == ""


def test_a_full_disk_only_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(tmp_path, "loss: 0.5\nloss: 0.25\n")
    curves = PlainCurves()
    real = os.write

    def torn(fd: int, data: bytes) -> int:
        return real(fd, data[: len(data) * 2 // 3])

    with monkeypatch.context() as patch:
        patch.setattr(plain_curves.os, "write", torn)
        curves.gather(order(), tmp_path, is_over=False)
    curves.gather(order(), tmp_path, is_over=True)
    lines = RunDir(tmp_path).stream("metrics").read_text().splitlines()
    whole = [json.loads(line)["loss"] for line in lines if line.endswith("}")]
    assert whole == [0.5, 0.25]


def test_a_flood_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_curves, "_LAST_BYTES", 1000)
    say(tmp_path, "loss: 9 words\n" * 10_000 + "loss: 0.5\n")
    curves = PlainCurves()
    while not curves.gather(order(), tmp_path, is_over=True):
        pass
    found = points(tmp_path)
    assert 50 < len(found) < 80
    assert found[-1]["loss"] == 0.5


def test_patterns_that_matched_nothing_are_named_at_the_end(tmp_path: Path) -> None:
    asked = order(curves=["loss {loss}", "Acc: {acc}", "lr={lr}"])
    curves = PlainCurves()
    say(tmp_path, "loss 3\n")
    curves.gather(asked, tmp_path, is_over=False)
    assert curves.note(FIRST) == "", "they may still come"
    say(tmp_path, "acc: 0.5\nlr=0.1")
    assert curves.gather(asked, tmp_path, is_over=True)
    said = "curve pattern 'Acc: {acc}' matched no line of the output; compare with the log, where capitals count"
    assert curves.note(FIRST) == said
    again = PlainCurves()  # another process, which goes on from what the first one kept
    again.gather(asked, tmp_path, is_over=True)
    assert again.note(FIRST) == said
    assert curves.note(SECOND) == "", "nothing was read of it"


def test_many_patterns_that_matched_nothing(tmp_path: Path) -> None:
    curves = PlainCurves()
    say(tmp_path, "nothing\n")
    curves.gather(order(curves=[f"p{place}: {{v}}" for place in range(5)]), tmp_path, is_over=True)
    assert curves.note(FIRST).startswith("curve patterns 'p0: {v}', 'p1: {v}', 'p2: {v}' and 2 more matched no line")


def test_what_matched_in_an_earlier_job_of_a_chain_counts(tmp_path: Path) -> None:
    spec = {"curves": ["loaded {seconds} s", "loss {loss}"]}
    for job_id in (FIRST, SECOND):
        (tmp_path / job_id).mkdir()
    say(tmp_path / FIRST, "loaded 3 s\n")
    curves = PlainCurves()
    curves.gather(order(**spec), tmp_path / FIRST, is_over=True)
    curves.gather(order(SECOND, continues=FIRST, **spec), tmp_path / SECOND, is_over=True)
    assert "'loss {loss}' matched no line" in curves.note(SECOND) and "loaded" not in curves.note(SECOND)


@pytest.mark.parametrize("spec", [{}, {"curves": False}, {"curves": ["loss: {loss}"]}])
def test_no_note_where_nobody_asked_or_all_is_well(tmp_path: Path, spec: dict[str, Any]) -> None:
    curves = PlainCurves()
    say(tmp_path, "loss: 1\n" if isinstance(spec.get("curves"), list) else "hello\n")
    curves.gather(order(**spec), tmp_path, is_over=True)
    assert curves.note(FIRST) == ""


@pytest.mark.parametrize("state", ["{}", '{"offset": 0, "own_bytes": 0, "at": 0, "lines": "", "reader": {"place": 1}}'])
def test_no_note_where_lines_may_have_been_missed(tmp_path: Path, state: str) -> None:
    """A state that cannot be read, and one of an agent that kept no such thing."""
    say(tmp_path, "hello\n")
    RunDir(tmp_path).curves.write_text(state)
    curves = PlainCurves()
    curves.gather(order(curves=["loss: {loss}"]), tmp_path, is_over=True)
    assert curves.note(FIRST) == ""


def test_no_note_after_a_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_curves, "_LAST_BYTES", 1000)
    say(tmp_path, "words\n" * 10_000)
    curves = PlainCurves()
    curves.gather(order(curves=["loss: {loss}"]), tmp_path, is_over=True)
    assert curves.note(FIRST) == ""
