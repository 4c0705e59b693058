"""How a training stands, over all jobs of its task; on every database."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts, NodeGroup, Partition
from diamond.core.errors import NotFound
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.core.training import Training
from diamond.core.wire import STREAMS, Hello, JobReport, Report, StreamChunk
from diamond.server.services import agents, planning, tasks, training
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow

HOUR = 3600


class Trainer:
    """An endpoint with a walltime of an hour, whose jobs train; its agent is this test."""

    def __init__(self, ctx: Context, user_id: str, clock: Any) -> None:
        self.ctx, self.user_id, self.clock = ctx, user_id, clock
        self.sent: dict[str, int] = {}
        with ctx.db.read() as session:
            self.id = session.scalars(sa.select(EndpointRow.id)).one()
        partition = Partition(name="gpu", max_walltime_s=HOUR, groups=(NodeGroup(count=4, cpus=8),))
        facts = EndpointFacts(scheduler="slurm", nodes=4, cpus_per_node=8, partitions=(partition,))
        self.welcome = agents.hello(ctx, self.id, Hello(facts=facts))

    def launch(self, **fields: Any) -> str:
        return tasks.create(self.ctx, self.user_id, {"run": "true", **fields})[0].id

    def start(self, task_id: str) -> str:
        """The next job begins to run."""
        planning.run_due(self.ctx)
        orders = agents.desired(self.ctx, self.id, self.ctx.epoch, 0).orders
        job_id = max((order for order in orders if order.task_id == task_id), key=lambda order: order.attempt).job_id
        self._tell(JobReport(job_id=job_id, state=JobState.RUNNING, started_at=self.clock()))
        return job_id

    def end(self, job_id: str, reason: Reason) -> None:
        state = JobState.FAILED if reason is Reason.TIME_LIMIT else JobState.SUCCEEDED
        self._tell(JobReport(job_id=job_id, state=state, reason=reason, ended_at=self.clock()))

    def finish(self, job_id: str) -> None:
        """Its program has ended."""
        self._tell(JobReport(job_id=job_id, state=JobState.FINISHING))

    def write(self, job_id: str, raw: bytes) -> None:
        offset = self.sent.get(job_id, 0)
        chunk = StreamChunk.of(job_id, "train", offset, raw)
        ack = agents.report(self.ctx, self.id, Report(epoch=self.ctx.epoch, streams=(chunk,)))
        assert ack.received == {job_id: {"train": offset + len(raw)}}
        self.sent[job_id] = offset + len(raw)

    def measure(self, job_id: str, step: int, **fields: Any) -> None:
        line = {"t": self.clock(), "step": step, "until": 1000, "steps": 10, "step_s": 10.0, "samples_per_s": 6.4,
                "world": 2, "nodes": 1, "global_batch": 64, "saves": {"count": 1, "took_s": 0.0}}  # fmt: skip
        self.write(job_id, json.dumps(line | fields).encode() + b"\n")

    def _tell(self, job: JobReport) -> None:
        agents.report(self.ctx, self.id, Report(epoch=self.ctx.epoch, jobs=(job,)))

    def stands(self, task_id: str) -> Training:
        return training.of_task(self.ctx, self.user_id, task_id)


@pytest.fixture
def trainer(ctx: Context, user_id: str, clock: Any) -> Trainer:
    return Trainer(ctx, user_id, clock)


def test_the_server_says_which_streams_it_takes(trainer: Trainer) -> None:
    assert trainer.welcome.streams == STREAMS and "train" in STREAMS


def test_the_jobs_that_are_to_follow(trainer: Trainer) -> None:
    task_id = trainer.launch(max_duration="10h")
    assert trainer.stands(task_id) == Training()
    first = trainer.start(task_id)
    trainer.clock.advance(400)
    trainer.measure(first, 10)  # ten steps took 100 s, so the first began after 300
    found = trainer.stands(task_id)
    # 9,900 s remain: 3,200 of them in this job, 3,300 in each that follows.
    assert (found.remaining_s, found.jobs_expected, found.walltime_s) == (9900.0, 3, HOUR) and found.chained
    assert found.over_s is None and found.latest is not None and found.latest.step == 10
    trainer.clock.advance(3200)
    trainer.measure(first, 330)
    assert trainer.stands(task_id).jobs_expected == 3, "6,700 s in jobs of 3,300"
    trainer.end(first, Reason.TIME_LIMIT)
    found = trainer.stands(task_id)
    assert (found.jobs_expected, found.stage) == (3, "waiting"), "none runs now"
    second = trainer.start(task_id)
    assert trainer.stands(task_id).jobs_expected == 2, "it has begun, though its program has not"
    trainer.clock.advance(400)
    trainer.measure(second, 660, step_s=1.0, steps=100, world=4, nodes=2, samples_per_s=64.0)
    found = trainer.stands(task_id)
    assert (found.jobs_expected, found.remaining_s, found.stage) == (0, 340.0, "running")
    assert [(row.nodes, row.samples_per_s, row.windows) for row in found.by_size] == [(2, 64.0, 1), (1, 6.4, 2)]
    trainer.finish(second)
    assert trainer.stands(task_id).stage == "ending", "its outputs are on their way"
    trainer.end(second, Reason.COMPLETED)
    found = trainer.stands(task_id)
    assert found.stage == "over"
    assert (found.remaining_s, found.jobs_expected, len(found.by_size)) == (None, None, 2), "it is over"


def test_a_task_that_will_not_be_done_in_its_time(trainer: Trainer) -> None:
    task_id = trainer.launch(max_duration="30m")
    job = trainer.start(task_id)
    trainer.clock.advance(100)
    trainer.measure(job, 0)
    found = trainer.stands(task_id)
    assert (found.chained, found.walltime_s, found.over_s) == (False, 1800, 10_000 + 100 - 1800)
    assert found.jobs_expected == 5, "needed, if there were any"


def test_it_is_seen_by_those_who_see_the_task(trainer: Trainer, other_id: str) -> None:
    task_id = trainer.launch()
    with pytest.raises(NotFound):
        training.of_task(trainer.ctx, other_id, task_id)
    with pytest.raises(NotFound):
        trainer.stands("tsk_none")


def test_lines_that_come_in_pieces_and_nonsense_between(trainer: Trainer) -> None:
    task_id = trainer.launch()
    job = trainer.start(task_id)
    line = json.dumps({"t": 1.0, "step": 5, "until": 6}).encode() + b"\n"
    trainer.write(job, line[:10])
    assert trainer.stands(task_id) == Training()
    trainer.write(job, line[10:] + b"\xff\xfe{}\n[[[[\n" + line.replace(b"5", b"7") + line[:20])
    for _ in range(3):
        found = trainer.stands(task_id).latest
        assert found is not None and found.step == 7
    trainer.write(job, line[20:])
    found = trainer.stands(task_id).latest
    assert found is not None and found.step == 5


def test_nothing_of_it_becomes_a_curve(trainer: Trainer) -> None:
    task_id = trainer.launch()
    job = trainer.start(task_id)
    lines = (json.dumps({"t": 1.0, "step": step, "samples_per_s": 1.0}) + "\n" for step in range(8000))
    trainer.write(job, "".join(lines).encode())
    assert trainer.ctx.series.keys(job) == []


def test_a_job_that_writes_without_end(trainer: Trainer) -> None:
    """What is kept of it is bounded, what is read of it at once too, and the newest line still counts."""
    task_id = trainer.launch()
    job = trainer.start(task_id)
    trainer.measure(job, 1)
    assert trainer.stands(task_id).latest is not None
    for _ in range(16):  # 64 MiB, without a single end of a line in half of them
        trainer.write(job, b'{"t": 1, "step": 1, "world": 3, "samples_per_s": 1}' * 80_000)
        trainer.write(job, (b"x" * 99 + b"\n") * 1000)
    trainer.write(job, b"\n")
    trainer.measure(job, 2)
    found = trainer.stands(task_id)
    assert found.latest is not None and found.latest.step == 2 and len(found.by_size) == 1
    folder = next(trainer.ctx.home.server.glob(f"streams/*/{job}/train"))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 24 * 2**20
    # Another process, which has read nothing of it so far, finds the same end.
    del trainer.ctx.__dict__["measures"]
    found = trainer.stands(task_id)
    assert found.latest is not None and found.latest.step == 2
