"""What jobs make the server keep: capped, counted for their owners, and cut where a quota is used up."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.routing import APIRoute

from diamond.core.errors import QuotaExceeded, TooLarge
from diamond.core.states import JobState
from diamond.core.tasks import Output, Task
from diamond.core.wire import STREAMS, JobReport, Report, ReportAck, StreamChunk
from diamond.server.api.agent import router as agent_routes
from diamond.server.services import agents, kept, removals, usage
from diamond.server.services.allowances import Caps
from diamond.server.services.context import Context
from diamond.server.store import series
from diamond.server.store.models import EventRow, JobRow, TaskRow
from diamond.server.store.series import SeriesStore
from diamond.server.store.streams import StreamStore
from testing.context import Clock
from testing.quotas import World
from testing.uploads import upload

KIB = 1024


@pytest.fixture
def world(ctx: Context, clock: Clock, user_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Everything a thousandth of its size."""
    monkeypatch.setattr(kept, "WEIGH_EVERY_BYTES", 8 * KIB)
    monkeypatch.setattr(kept, "SQUEEZED_BYTES", 8 * KIB)
    monkeypatch.setattr(series, "MIN_WINDOW_BYTES", 2 * KIB)
    streams = StreamStore(tmp_path / "streams", segment_bytes=4 * KIB, cap_bytes=64 * KIB)
    stores = {"streams": streams, "series": SeriesStore(tmp_path / "series", streams, cap_bytes=64 * KIB)}
    return World(replace(ctx, **stores, caps=Caps(output_bytes=1000)), clock, user_id)


def send(world: World, task: Task, stream: str, data: bytes, at_once: int = 3000) -> None:
    job = world.task(task).jobs[-1].id
    begin = world.ctx.streams.size(job, stream)
    for first in range(0, len(data), at_once):
        chunk = StreamChunk.of(job, stream, begin + first, data[first : first + at_once])
        agents.report(world.ctx, world.endpoint, Report(epoch=world.ctx.epoch, streams=(chunk,)))


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b'{"step": %d, "t": %d, "loss": %d}\n' % (n, n, n % 977) for n in range(first, first + count))


def on_disk(world: World, task: Task) -> int:
    return kept.held_bytes(world.ctx, world.task(task).jobs[-1].id)


def counted(world: World) -> tuple[int, int]:
    return world.used("user", "alice").storage_bytes, world.used().storage_bytes


@pytest.mark.parametrize(
    ("stream", "most_kib"), [("log", 64 + 8), ("train", 12 + 8), ("metrics", 64 + 16), ("util", 64 + 16)]
)
def test_no_stream_of_a_job_grows_past_its_cap(world: World, stream: str, most_kib: int) -> None:
    task = world.launch()
    world.run(task)
    for first in range(0, 20_000, 2000):
        send(world, task, stream, lines(2000, first))
    assert on_disk(world, task) < most_kib * KIB < 20_000 * 30 / 4


def test_logs_and_curves_count_while_a_job_runs_after_it_and_not_when_it_is_removed(world: World) -> None:
    task = world.launch()
    world.run(task)
    send(world, task, "log", b"x" * 20 * KIB)
    while_it_runs = counted(world)
    assert 16 * KIB <= while_it_runs[0] == while_it_runs[1] <= 20 * KIB
    send(world, task, "metrics", lines(100))
    world.end(task)
    held = on_disk(world, task)
    assert held > 20 * KIB
    assert counted(world) == (held, held)
    usage.charge_ended(world.ctx)
    assert counted(world) == (held, held)
    removals.remove(world.ctx, world.users["alice"], task.id)
    assert counted(world) == (0, 0)


def test_what_comes_after_the_end_counts_too(world: World) -> None:
    task = world.launch()
    world.run(task)
    world.end(task)
    usage.charge_ended(world.ctx)
    send(world, task, "log", b"x" * 32 * KIB)
    assert counted(world)[0] == pytest.approx(32 * KIB, abs=8 * KIB)


def test_counts_that_are_off_are_mended(world: World) -> None:
    running, ended = world.launch(), world.launch()
    for task in (running, ended):
        world.run(task)
        send(world, task, "log", b"x" * 5 * KIB)
    world.end(ended)
    usage.charge_ended(world.ctx)
    assert counted(world)[0] == 5 * KIB, "what runs is weighed when it has sent more"
    with world.ctx.db.write() as session:
        session.get_one(JobRow, world.task(ended).jobs[-1].id).stream_bytes += 777
    assert kept.recount(world.ctx) == 2
    assert counted(world)[0] == 10 * KIB - 777, "the count is mended by as much as the job's was off"
    assert kept.recount(world.ctx) == 0


def test_a_job_goes_on_when_the_quota_is_used_up_and_little_of_it_is_kept(world: World) -> None:
    world.limit("user", "alice", storage_bytes=8 * KIB)
    task = world.launch()
    world.run(task)
    for first in range(0, 10_000, 2000):
        send(world, task, "metrics", lines(2000, first))
        send(world, task, "log", b"a line\n" * 3000)
    job = world.task(task).jobs[-1]
    assert on_disk(world, task) < 40 * KIB
    assert world.ctx.series.unusable(job.id)["metrics"].squeezed
    (info,) = world.ctx.series.keys(job.id)
    assert (info.count, info.last_value, info.thinned) == (10_000, 9999 % 977, True)
    log = world.ctx.streams.read_tail(job.id, "log", 10**6).data
    assert b"storage quota of its owner or project is used up" in log
    error = world.refused(lambda: world.launch())
    assert "there is no room for what this task prints" in error.message
    world.launch("bob")
    world.end(task)
    assert world.task(task).jobs[-1].state is JobState.SUCCEEDED


def test_a_job_with_room_is_not_cut_for_its_neighbours_sake(world: World) -> None:
    world.limit("user", "alice", storage_bytes=4 * KIB)
    task = world.launch("bob")
    world.run(task)
    send(world, task, "log", b"x" * 40 * KIB)
    assert on_disk(world, task) == 40 * KIB


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def test_a_job_brings_no_more_files_than_it_may(world: World) -> None:
    task = world.launch(outputs=["*"])
    world.run(task)
    agents.check_upload(world.ctx, world.endpoint, 1000)
    upload(world.ctx, world.endpoint, b"a" * 600)
    agents.check_upload(world.ctx, world.endpoint, 400)
    with pytest.raises(TooLarge, match="more than 1000 for each"):
        agents.check_upload(world.ctx, world.endpoint, 401)
    world.ctx.blobs.put_chunk(digest_of(b"b" * 300), 300, 0, [b"b" * 200], world.endpoint)
    with pytest.raises(TooLarge):
        agents.check_upload(world.ctx, world.endpoint, 201)
    agents.check_upload(world.ctx, world.endpoint, 300, [digest_of(b"b" * 300)])  # to go on with it
    other = world.launch(outputs=["*"])
    world.run(other)
    agents.check_upload(world.ctx, world.endpoint, 1200)
    output = Output(path="a", size_bytes=600, sha256=digest_of(b"a" * 600)[7:], stored=True)
    world.end(task, outputs=(output,))
    agents.check_upload(world.ctx, world.endpoint, 800)  # what was counted as a result is pending no longer


def test_files_of_jobs_without_room_are_refused_and_those_of_others_not(world: World) -> None:
    world.limit("user", "alice", storage_bytes=500)
    world.run(world.launch(outputs=["*"]))
    agents.check_upload(world.ctx, world.endpoint, 500)
    with pytest.raises(QuotaExceeded, match="user alice: no storage is left"):
        agents.check_upload(world.ctx, world.endpoint, 501)
    world.run(world.launch("bob", outputs=["*"]))
    agents.check_upload(world.ctx, world.endpoint, 501)


def test_a_list_of_outputs_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_LISTED_BYTES", 100)
    task = world.launch(outputs=["*"])
    world.run(task)
    world.end(
        task, outputs=tuple(Output(path=f"{'x' * 30}{n}", size_bytes=1, sha256="", stored=False) for n in range(9))
    )
    assert len(world.task(task).outputs) == 3


def test_a_job_over_its_rate_is_heard_later_and_ends_with_its_whole_log(world: World) -> None:
    ctx = replace(world.ctx, caps=Caps(job_bytes_per_s=10))
    fast, slow = world.launch(), world.launch()
    for task in (fast, slow):
        world.run(task)
    jobs = {name: world.task(task).jobs[-1].id for name, task in (("fast", fast), ("slow", slow))}

    def report(*chunks: StreamChunk, ended: str = "") -> ReportAck:
        said = (JobReport(job_id=ended, state=JobState.SUCCEEDED),) if ended else ()
        return agents.report(ctx, world.endpoint, Report(epoch=ctx.epoch, streams=chunks, jobs=said))

    first = report(StreamChunk.of(jobs["fast"], "log", 0, b"x" * 1000))
    assert first.received == {jobs["fast"]: {"log": 1000}}
    last = StreamChunk.of(jobs["fast"], "log", 1000, b"the end")
    second = report(last, StreamChunk.of(jobs["slow"], "log", 0, b"hello"), ended=jobs["fast"])
    assert second.received == {jobs["fast"]: {"log": 1000}, jobs["slow"]: {"log": 5}}
    assert second.states == {}, "its end is not believed before the end of its log is here"
    ctx.__dict__.pop("ingestion")  # time passes
    third = report(last, ended=jobs["fast"])
    assert third.received == {jobs["fast"]: {"log": 1007}}
    assert third.states == {jobs["fast"]: JobState.SUCCEEDED}


def test_notes_say_what_is_in_no_curve_and_why(world: World) -> None:
    task = world.launch()
    world.run(task)
    job = world.task(task).jobs[-1].id
    send(world, task, "metrics", lines(10) + b"not a metric\n")
    assert notes_of(world, job) == ["1 line or value could not be read as metrics."]
    send(world, task, "metrics", lines(20_000))
    assert "Of loss, some older samples are no longer kept, since it logged very much." in notes_of(world, job)[0]
    send(world, task, "metrics", b"".join(b'{"key%d": 1}\n' % n for n in range(600)))
    assert any("values are not shown: a job has at most 512 metrics" in note for note in notes_of(world, job))


def notes_of(world: World, job: str) -> list[str]:
    return kept.curve_notes(world.ctx, job, world.ctx.series.keys(job))


def test_everything_an_agent_can_have_kept_is_listed_with_its_bound() -> None:
    routes = {
        route.path.removeprefix("/api/v1") for route in agent_routes.routes if isinstance(route, APIRoute)
    }  # files and shells are others: files are outputs, of shells nothing is kept
    said = {field.name for field in dataclasses.fields(JobReport)}
    assert kept.BOUNDS.keys() == {*STREAMS, *said, *routes}


def test_what_is_said_of_a_job_is_cut_to_what_its_row_may_hold(world: World) -> None:
    task = world.launch(outputs=["*"])
    world.run(task)
    words = {field.name: "x" * 50_000 for field in dataclasses.fields(JobReport) if field.type in ("str", "str | None")}
    outputs = tuple(Output(path=f"{'d' * 200}/{'d' * 200}/{n}", size_bytes=1) for n in range(12_000))
    words.pop("job_id")
    world.end(task, outputs=outputs, hosts=("h" * 1000,) * 12_000, **words)
    with world.ctx.db.read() as session:
        job = session.get_one(JobRow, world.task(task).jobs[-1].id)
        row = {column.key: getattr(job, column.key) for column in sa.inspect(JobRow).columns}
        listed = session.get_one(TaskRow, task.id).outputs
    assert len(row.pop("hosts")) == 10_000
    assert all(len(str(value)) <= 4096 for value in row.values())
    assert sum(len(entry["path"]) for entry in listed) <= kept.MAX_LISTED_BYTES


def test_taking_leave_again_and_again_leaves_one_event(world: World) -> None:
    def events() -> int:
        with world.ctx.db.read() as session:
            kinds = session.scalars(sa.select(EventRow.kind)).all()
        return kinds.count("endpoint.offline")

    for _ in range(5):
        agents.goodbye(world.ctx, world.endpoint)
    assert events() == 1
