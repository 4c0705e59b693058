from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.gpus import GpuSlot, short_model
from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.local import spool
from diamond.agent.schedulers.local.queue import PATIENCE_S, Line, Slots

GPUS = [GpuSlot(index=0, model="H100"), GpuSlot(index=1, model="A100"), GpuSlot(index=2, model="H100")]


def job(name: str, **asked: Any) -> Submission:
    return Submission(name=name, run_dir=Path("/x"), script=Path("/x/job.sh"), **asked)


class Queue:
    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.line = Line()
        self.jobs: dict[str, Submission] = {}

    def add(self, name: str, **asked: Any) -> None:
        self.jobs[name] = job(name, **asked)
        self.line.add(name, priority=asked.get("priority", 0), order=len(self.jobs), user=self.jobs[name].user)

    def start(self, now_s: float = 0.0) -> list[str]:
        started = []
        while (name := self.line.next(self.slots, self.jobs, now_s)[0]) is not None:
            self.slots.take(self.jobs[name])
            self.line.remove(name)
            started.append(name)
        return started

    def end(self, name: str) -> None:
        self.slots.give_back(self.jobs[name], ())


def test_a_stream_of_small_jobs_cannot_starve_a_large_one() -> None:
    queue = Queue(Slots(cpus=2, mem_bytes=0))
    queue.add("first")
    queue.add("large", cpus=2)
    queue.add("small-1")
    assert queue.start(0.0) == ["first", "small-1"]
    queue.end("small-1")
    queue.add("small-2")
    assert queue.start(PATIENCE_S - 1) == ["small-2"]
    queue.end("small-2")
    queue.add("small-3")
    assert queue.start(PATIENCE_S + 1) == []
    queue.end("first")
    assert queue.start(PATIENCE_S + 2) == ["large"]


def test_a_higher_priority_is_not_overtaken_by_what_would_delay_it() -> None:
    queue = Queue(Slots(cpus=2, mem_bytes=0))
    queue.add("first")
    assert queue.start() == ["first"]
    queue.add("big", cpus=2, priority=5)
    queue.add("small", priority=0)
    queue.add("smaller", priority=-5)
    assert queue.start(1.0) == []
    queue.end("first")
    assert queue.start(2.0) == ["big"]
    queue.end("big")
    assert queue.start(3.0) == ["small", "smaller"]


def test_what_delays_nobody_may_pass_anybody() -> None:
    queue = Queue(Slots(cpus=4, mem_bytes=0, gpus=GPUS[:1]))
    queue.add("holds the gpu", gpus=1)
    assert queue.start() == ["holds the gpu"]
    queue.add("wants the gpu", gpus=1, priority=9)
    queue.add("cpu only", cpus=2)
    queue.add("too much", cpus=1)
    assert queue.start(PATIENCE_S * 5) == ["cpu only"]
    queue.end("cpu only")
    assert queue.start(PATIENCE_S * 6) == ["too much"]


def test_gpus_by_type_and_index() -> None:
    slots = Slots(cpus=8, mem_bytes=0, gpus=GPUS)
    assert slots.take(job("a", gpus=2, gpu_type="h100")) == (0, 2)
    assert slots.why_not_now(job("b", gpus=1, gpu_type="H100")) == "waiting for 1 GPU; 0 free"
    assert slots.take(job("c", gpus=1)) == (1,)
    slots.give_back(job("a", gpus=2, gpu_type="H100"), (0, 2))
    assert slots.free_gpus == {0, 2}
    assert slots.why_never(job("d", gpus=3, gpu_type="H100")) == (
        "the task asks for 3 H100 GPUs; this machine has 2 (it has A100, H100)"
    )


def test_memory_is_a_slot_too() -> None:
    slots = Slots(cpus=8, mem_bytes=10 << 30)
    slots.take(job("a", mem_bytes=6 << 30))
    assert "memory" in slots.why_not_now(job("b", mem_bytes=6 << 30))
    assert slots.why_not_now(job("c", mem_bytes=4 << 30)) == ""
    assert "11 GiB" in slots.why_never(job("d", mem_bytes=11 << 30))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("Something Else", "Something-Else"),
    ],
)
def test_models_as_users_call_them(name: str, model: str) -> None:
    assert short_model(name) == model


def test_a_type_is_recognised_however_it_is_written() -> None:
    slot = GpuSlot(index=0, model="RTX-A6000")
    assert all(slot.is_type(asked) for asked in ("RTX-A6000", "rtxa6000", "A6000", None))
    assert not slot.is_type("A600")


def test_users_take_turns_however_many_jobs_one_of_them_has() -> None:
    queue = Queue(Slots(cpus=4, mem_bytes=0))
    for number in range(6):
        queue.add(f"alice-{number}", user="alice")
    for number in range(3):
        queue.add(f"bob-{number}", user="bob")
    assert queue.start() == ["alice-0", "bob-0", "alice-1", "bob-1"]
    queue.end("bob-0")
    assert queue.start() == ["bob-2"]
    queue.end("alice-0")
    queue.end("bob-1")
    assert queue.start() == ["alice-2", "alice-3"]


def test_priority_goes_before_whose_turn_it_is() -> None:
    queue = Queue(Slots(cpus=2, mem_bytes=0))
    queue.add("alice-0", user="alice")
    queue.add("bob-0", user="bob")
    queue.add("alice-1", user="alice", priority=1)
    queue.add("alice-2", user="alice", priority=1)
    assert queue.start() == ["alice-1", "alice-2"]


def test_a_large_job_that_lost_patience_is_kept_at_the_head_though_its_user_holds_more() -> None:
    queue = Queue(Slots(cpus=3, mem_bytes=0))
    queue.add("alice-0", user="alice")
    assert queue.start(0.0) == ["alice-0"]
    queue.add("alice-large", user="alice", cpus=3)
    assert queue.start(0.0) == []
    for number in range(3):  # bob holds less each time, and his job would go first
        queue.add(f"bob-{number}", user="bob")
    assert queue.start(1.0) == ["bob-0", "bob-1"]
    queue.end("bob-0")
    assert queue.start(PATIENCE_S + 1) == []
    queue.end("alice-0")
    queue.end("bob-1")
    assert queue.start(PATIENCE_S + 2) == ["alice-large"]


def test_a_long_line_of_many_users_is_looked_through_quickly() -> None:
    queue = Queue(Slots(cpus=1, mem_bytes=0))
    for number in range(20_000):
        queue.add(f"job-{number}", user=f"user-{number % 200}")
    began = time.perf_counter()
    for number in range(200):
        assert queue.start() == [f"job-{number}"]
        queue.end(f"job-{number}")
    assert (time.perf_counter() - began) / 200 < 0.02
    assert len(queue.line) == 20_000 - 200


def test_whose_job_it_is_survives_the_scheduler(tmp_path: Path) -> None:
    run_dir = tmp_path / "job_1"
    run_dir.mkdir()
    asked = Submission(name="job_1", run_dir=run_dir, script=run_dir / "job.sh", user="alice")
    spool.save(spool.Spooled(submission=asked, order=1))
    (found,) = spool.load_all(tmp_path)
    assert found.submission == asked
    raw = json.loads((run_dir / "local.json").read_text())
    del raw["user"]  # as older agents wrote it
    (run_dir / "local.json").write_text(json.dumps(raw))
    (found,) = spool.load_all(tmp_path)
    assert (found.submission.name, found.submission.user) == ("job_1", "")
