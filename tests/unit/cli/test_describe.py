"""Tasks in words: states, reasons, notes, attempts, specs."""

from __future__ import annotations

import pytest

from diamond.cli import describe, live, spec
from diamond.core.codec import encode
from diamond.core.jobs import Job
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Output, Task, TaskSpec
from diamond.sdk.follow import AttemptEnded, StateChange


def job(attempt: int = 1, **more: object) -> Job:
    known = {"id": "job_1", "task_id": "tsk_1", "endpoint": "hpc", "state": JobState.FAILED}
    return Job(**{**known, "attempt": attempt, **more})  # type: ignore[arg-type]


def test_status_text_and_reasons() -> None:
    task = Task(id="tsk_1", name="a\x1b[2J", state=TaskState.RUNNING, endpoint="hpc", attempt=2, started_at=100.0)
    assert describe.status_text(task, 165.0) == "RUNNING a · on hpc · attempt 2 · 1m 05s"
    waiting = Task(id="tsk_1", name="a", state=TaskState.PENDING, pending_reason="no endpoint is online")
    assert describe.status_text(waiting, 1.0) == "PENDING a · waiting: no endpoint is online"
    waiting = Task(id="tsk_1", name="a", state=TaskState.QUEUED, pending_reason="waiting for 2 cores")
    assert describe.status_text(waiting, 1.0) == "QUEUED a · waiting for 2 cores"
    stopping = Task(id="tsk_1", name="a", state=TaskState.RUNNING, desired=Desired.CANCEL)
    assert describe.status_text(stopping, 1.0).startswith("STOPPING")
    failed = Task(id="t", name="a", state=TaskState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=3, detail="it said 3")
    assert describe.reason_lines(failed) == [failed.sentence, "it said 3"]
    assert describe.note_lines(failed) == []


def test_a_task_that_succeeded_can_carry_a_note() -> None:
    done = Task(
        id="t", name="a", state=TaskState.SUCCEEDED, reason=Reason.COMPLETED, detail="output 'x*' \x1b[2Jmatches"
    )
    assert describe.reason_lines(done) == []
    assert describe.note_lines(done) == ["note: output 'x*' matches"]


@pytest.mark.parametrize(("left", "text"), [(0.2, "in 1s"), (1.2, "in 2s"), (59.5, "in 1m 00s"), (-3.0, "is due")])
def test_countdowns_round_up(left: float, text: str) -> None:
    assert describe.next_text(100.0 + left, 100.0) == f"next attempt {text}"
    task = Task(id="t", name="a", state=TaskState.PENDING, next_attempt_at=100.0 + left, pending_reason="stale")
    assert describe.waiting_text(task, 100.0) == f"next attempt {text}"


def test_an_attempt_that_failed_is_announced() -> None:
    failed = job(reason=Reason.EXIT_NONZERO, detail="the command ended with exit code 7")
    item = AttemptEnded(attempt=1, job=failed, next_attempt_at=101.5)
    assert describe.ended_text(item, 100.0) == (
        "attempt 1 failed: EXIT_NONZERO: the command ended with exit code 7; next attempt in 2s"
    )
    past = AttemptEnded(attempt=1, job=job(reason=Reason.NODE_FAIL), next_attempt_at=None)
    assert describe.ended_text(past) == "attempt 1 failed: NODE_FAIL: A node of the job failed"


def test_plain_view_tells_attempts_apart_and_says_why_it_waits_once(capsys: pytest.CaptureFixture[str]) -> None:
    def waits(reason: str) -> Task:
        return Task(id="t", name="a", state=TaskState.QUEUED, pending_reason=reason)

    class Tasks:
        def follow(self, task_id: str, *, from_start: bool) -> list[object]:
            again = Task(id="t", name="a", state=TaskState.RUNNING, attempt=2)
            pending = Task(id="t", name="a", state=TaskState.PENDING, attempt=1, next_attempt_at=1e12)
            done = Task(id="t", name="a", state=TaskState.SUCCEEDED, attempt=2, detail="a note")
            return [
                StateChange(task=waits("endpoint c is offline: silent for 1m 02s")),
                StateChange(task=waits("endpoint c is offline: silent for 2m 03s")),
                StateChange(task=waits("all nodes are busy")),
                StateChange(task=pending),
                AttemptEnded(attempt=1, job=job(reason=Reason.LOST, detail="gone"), next_attempt_at=1e12),
                StateChange(task=again),
                AttemptEnded(attempt=2, job=None, next_attempt_at=None),
                StateChange(task=done),
            ]

        def metrics(self, task_id: str) -> list[object]:
            return []

    class Client:
        tasks = Tasks()

    code = live.follow(Client(), waits(""), as_json=False)  # type: ignore[arg-type]
    assert code == 0
    lines = [
        line.removeprefix("[")[10:] if line.startswith("[") else line for line in capsys.readouterr().err.split("\n")
    ]
    assert lines[0] == "QUEUED a · waiting: endpoint c is offline: silent for 1m 02s"
    assert lines[1] == "QUEUED a · waiting: all nodes are busy"
    assert lines[2].startswith("attempt 1 failed: LOST: gone; next attempt in ")
    assert lines[3] == "── attempt 2 ──"
    assert lines[4].startswith("RUNNING a")
    assert lines[5:7] == ["attempt 2 failed", "── attempt 3 ──"]
    assert "  note: a note" in lines


def test_metric_line_puts_loss_first_and_fits() -> None:
    series = {"lr": [0.1], "val/acc": [0.5, 0.6], "loss": [1.0, 0.5], "loss@rank1": [9.0]}
    line = describe.metric_line(series, 7, 80)
    assert line.startswith("step 7   loss 0.5 █▁   val/acc 0.6 ▁█   lr 0.1")
    assert len(describe.metric_line(series, 7, 30)) <= 30


def test_metrics_that_tell_come_before_those_that_count() -> None:
    keys = ["epoch", "epoch_time", "learning_rate", "lr", "grad_norm", "val/error", "test_rel_l2", "val_loss", "loss"]
    ranked = sorted(keys, key=describe.metric_rank)
    assert ranked[0] == "loss"
    assert ranked[1] == "val_loss"
    assert set(ranked[2:4]) == {"val/error", "test_rel_l2"}
    assert ranked[4] == "grad_norm"


def test_summary_says_which_outputs_stayed_on_the_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    task = Task(
        id="tsk_1",
        name="a",
        state=TaskState.SUCCEEDED,
        outputs=(Output(path="m.pt", size_bytes=5, stored=True), Output(path="big.bin", size_bytes=2048)),
        jobs=(job(state=JobState.SUCCEEDED, run_dir="/scratch/job_1"),),
    )
    describe.show_summary(None, task)  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert "  outputs: m.pt (5 B)\n" in err
    assert "  on the endpoint only: big.bin (2.0 KiB)\n" in err
    assert "hpc:/scratch/job_1/work" in err


def test_spec_is_shown_as_people_write_it() -> None:
    ref = "bundle:sha256:b48c" + "0" * 60
    raw = {
        "run": "a\nb\n",
        "workdir": ref,
        "file_mounts": {"d": ref},
        "resources": {"memory": "500MB", "cpus": 2},
        "retry": {"max_retries": 1, "on": ["LOST", "NODE_FAIL"], "backoff": "90s"},
        "max_duration": "10m",
        "outputs": ["a", "b"],
    }
    lines = list(spec.lines(encode(TaskSpec.parse(raw))))
    assert "workdir: uploaded, sha256:b48c…" in lines
    assert "  d: uploaded, sha256:b48c…" in lines
    assert "  memory: 500 MiB" in lines
    assert "  on: LOST, NODE_FAIL" in lines
    assert "  backoff: 1m30s" in lines
    assert "max_duration: 10m" in lines
    assert "outputs: a, b" in lines
    assert not any("max_backoff" in line or "num_nodes" in line for line in lines)
    assert spec.memory("16+") == "16 GiB or more"
    assert spec.memory("16") == "16 GiB"
