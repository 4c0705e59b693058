"""`diamond.train.log` and `context`: what reaches the file, and what never reaches the training loop."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diamond import train
from diamond.train import metrics

JOB_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "DIAMOND_NUM_NODES"),
    *("DIAMOND_TASK_ID", "DIAMOND_JOB_ID", "DIAMOND_ATTEMPT", "DIAMOND_RUN_DIR", "DIAMOND_OUTPUT_DIR"),
    *("DIAMOND_METRICS_FILE", "DIAMOND_TRAIN_QUIET"),
)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    state = metrics._State()
    monkeypatch.setattr(metrics, "_state", state)
    yield
    state.close()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("DIAMOND_METRICS_FILE", str(path))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "t"} for line in lines(path)]


# What is written


def test_a_line_has_step_time_and_values(file: Path) -> None:
    before = time.time()
    train.log(step=12, loss=0.25)
    train.log({"val/error": 0.5, "lr": 1e-3}, step=13, loss=1)
    assert values(file) == [{"step": 12, "loss": 0.25}, {"step": 13, "val/error": 0.5, "lr": 0.001, "loss": 1}]
    assert before - 0.01 <= lines(file)[0]["t"] <= time.time() + 0.01
    assert file.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (3, 3),
        (0.1, 0.1),
        (True, 1),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array(2.5), 2.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor([2.0], dtype=torch.bfloat16), 2.0),
        (torch.tensor(True), 1),
        (math.nan, "NaN"),
        (torch.tensor(math.inf), "Infinity"),
        (-math.inf, "-Infinity"),
        (2**70, float(2**70)),
        pytest.param(10**400, "Infinity", id="huge"),
        pytest.param(-(10**400), "-Infinity", id="-huge"),
    ],
)
def test_numbers_of_every_kind(file: Path, value: object, written: object) -> None:
    train.log(step=0, x=value)
    assert values(file) == [{"step": 0, "x": written}]
    assert type(values(file)[0]["x"]) is type(written)


@pytest.mark.parametrize(
    "value", ["0.3", None, [1.0], 1j, np.complex64(1), torch.ones(2), np.str_("a"), Fraction(1, 2)]
)
def test_what_is_no_number_is_named(file: Path, value: object) -> None:
    with pytest.raises(TypeError, match="'bad/loss'"):
        train.log({"bad/loss": value}, step=0)
    assert not file.exists()


def test_reserved_names_and_wrong_calls(file: Path) -> None:
    with pytest.raises(ValueError, match="'t' is reserved"):
        train.log(t=1.0)
    with pytest.raises(ValueError, match="'step' is reserved"):
        train.log({"step": 1})
    with pytest.raises(TypeError, match="step must be an integer"):
        train.log(step=1.5, loss=1.0)
    with pytest.raises(TypeError, match="must be text"):
        train.log({1: 1.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="by name"):
        train.log(0.3)  # type: ignore[arg-type]
    assert not file.exists()


def test_steps_count_on_by_themselves(file: Path) -> None:
    train.log(x=0)
    train.log(x=0)
    train.log(step=torch.tensor(10), x=0)
    train.log(x=0)
    train.log(step=5)  # nothing to record
    assert [line["step"] for line in lines(file)] == [0, 1, 10, 11]


def test_only_rank_0_writes_unless_asked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable:
        def item(self) -> float:
            raise AssertionError("other ranks must not wait for their GPU")

    monkeypatch.setenv("RANK", "1")
    train.log(step=0, loss=Untouchable())
    train.log(step=1, loss=0.5, all_ranks=True)
    monkeypatch.setenv("RANK", "0")
    train.log(step=1, loss=0.25, all_ranks=True)
    assert values(file) == [{"step": 1, "loss@rank1": 0.5}, {"step": 1, "loss@rank0": 0.25}]


def test_a_new_file_is_taken_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train.log(x=1)
    other = file.with_name("other.jsonl")
    monkeypatch.setenv("DIAMOND_METRICS_FILE", str(other))
    train.log(x=2)
    assert [len(lines(path)) for path in (file, other)] == [1, 1]


# Several writers


def test_processes_and_threads_never_tear_lines(file: Path) -> None:
    code = """
import sys, threading
from diamond import train
def work(thread):
    for step in range(500): train.log(step=step, **{"x" * (1 + step % 300): step}, all_ranks=True)
threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ, RANK=str(rank))) for rank in range(4)
    ]
    assert [proc.wait() for proc in running] == [0] * 4
    assert len(lines(file)) == 4 * 2 * 500


def test_a_forked_child_writes_its_own_lines_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os
from diamond import train
path = os.environ["DIAMOND_METRICS_FILE"]
train.log(step=1, parent=1)
os.environ["DIAMOND_METRICS_FILE"] = "/nowhere/metrics.jsonl"
train.log(step=2, parent=1)                      # kept in memory for a later try
os.environ["DIAMOND_METRICS_FILE"] = path
pid = os.fork()
if pid == 0:
    train.log(step=3, child=1)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
train.log(step=4, parent=1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1
    assert values(file) == [
        {"step": 1, "parent": 1},
        {"step": 3, "child": 1},
        {"step": 2, "parent": 1},
        {"step": 4, "parent": 1},
    ]


def test_logging_from_a_signal_handler_does_not_deadlock(file: Path) -> None:
    previous = signal.signal(signal.SIGUSR1, lambda *_: train.log(handler=1))
    try:
        with metrics._state._lock:
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert values(file) == [{"step": 0, "handler": 1}]


# Trouble


def test_an_unwritable_file_warns_once_and_is_tried_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    late = file.parent / "late" / "metrics.jsonl"
    monkeypatch.setenv("DIAMOND_METRICS_FILE", str(late))
    for step in range(3):
        train.log(step=step, loss=1.0)
    assert capfd.readouterr().err.count("\n") == 1
    late.parent.mkdir()
    train.log(step=3, loss=1.0)
    assert [line["step"] for line in lines(late)] == [0, 1, 2, 3]


def test_a_full_disk_tears_no_later_line(file: Path) -> None:
    # A limit on file size does what a full disk does: the last write is taken in part, the next one refused.
    code = """
import resource, signal
from diamond import train
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
train.log(step=0, loss=0.5)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
for step in range(1, 6): train.log(step=step, loss=0.5)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
train.log(step=6, loss=0.5)
train.log(step=7, loss=0.5)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1
    assert "training goes on" in done.stderr
    whole, torn = [], []
    for line in file.read_text().splitlines():
        try:
            whole.append(json.loads(line)["step"])
        except ValueError:
            torn.append(line)
    assert whole == list(range(8))
    assert len(torn) == 1


def test_memory_stays_bounded_while_the_file_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIAMOND_METRICS_FILE", str(tmp_path / "late" / "m"))
    for step in range(metrics.MAX_PENDING_LINES + 5):
        train.log(step=step, x=1)
    (tmp_path / "late").mkdir()
    train.log(step=9999, x=1)
    steps = [line["step"] for line in lines(tmp_path / "late" / "m")]
    assert (len(steps), steps[-1]) == (metrics.MAX_PENDING_LINES, 9999)


def test_a_closed_stderr_is_no_reason_to_stop() -> None:
    code = "import sys; sys.stderr.close(); from diamond import train; train.log(loss=1.0); print('on')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"on\n"


# Without Diamond


def test_alone_it_prints_at_most_once_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    train.log(step=1, loss=0.123456)
    train.log({"val/error": 0.5}, step=2)
    train.log(step=3, loss=0.2)
    now[0] += 1.0
    train.log(step=4, loss=math.nan, n=7)
    shown = capsys.readouterr()
    assert shown.err == "step 1  loss 0.1235\nstep 4  val/error 0.5  loss NaN  n 7\n"
    assert shown.out == ""


@pytest.mark.parametrize("variable", ["RANK", "DIAMOND_TRAIN_QUIET"])
def test_alone_it_can_be_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    train.log(step=1, loss=0.5, all_ranks=True)
    assert capsys.readouterr() == ("", "")


# Context


def test_context_under_diamond(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "DIAMOND_NUM_NODES": "2",
        "DIAMOND_TASK_ID": "tsk_1",
        "DIAMOND_JOB_ID": "job_2",
        "DIAMOND_ATTEMPT": "3",
        "DIAMOND_RUN_DIR": str(tmp_path / "run"),
        "DIAMOND_OUTPUT_DIR": str(tmp_path / "out"),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert train.context() == train.Context(
        rank=5,
        local_rank=1,
        world_size=8,
        node_rank=1,
        num_nodes=2,
        task_id="tsk_1",
        job_id="job_2",
        attempt=3,
        run_dir=tmp_path / "run",
        output_dir=tmp_path / "out",
    )


def test_context_alone_and_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train.context()
    assert (alone.rank, alone.local_rank, alone.world_size, alone.node_rank, alone.num_nodes) == (0, 0, 1, 0, 1)
    assert (alone.task_id, alone.job_id, alone.attempt, alone.run_dir) == (None, None, 1, None)
    assert alone.output_dir == Path.cwd()
    for name, value in {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "RANK": "x"}.items():
        monkeypatch.setenv(name, value)
    torchrun = train.context()
    assert (torchrun.rank, torchrun.world_size, torchrun.num_nodes, torchrun.node_rank) == (0, 8, 2, 1)


def test_importing_costs_nothing() -> None:
    code = "import sys; from diamond import train; print(sorted({'torch', 'numpy', 'httpx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def test_threads_share_one_counter(file: Path) -> None:
    threads = [threading.Thread(target=lambda: [train.log(x=1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["step"] for line in lines(file)) == list(range(200))
