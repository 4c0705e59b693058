"""What is told of jobs, also to a server that refuses to hear it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from diamond.agent import reporter as module
from diamond.agent.link import Link
from diamond.agent.reporter import Reporter, body_of
from diamond.agent.schedulers.base import Observed
from diamond.agent.secrets import Vault
from diamond.agent.session import Session
from diamond.agent.table import JobTable, Tracked, reduced, report_of
from diamond.agent.tail import Piece
from diamond.core.codec import encode
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.errors import DiamondError, InvalidInput, NotFound, TooLarge
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.states import Desired, JobState
from diamond.core.tasks import Output, TaskSpec
from diamond.core.wire import STREAMS, JobOrder, JobReport, Report, ReportAck, StreamChunk, Welcome

MIB = 1024 * 1024


class Bench:
    """A reporter without its thread, and the server it speaks to, of which `refuse` says what it takes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.table = JobTable()
        self.sent: list[Report] = []
        self.refuse: Callable[[dict[str, Any]], DiamondError | None] = lambda _: None
        self.refused = 0
        self.delivered: list[Tracked] = []
        self.log = bytearray()
        session = Session(cast(Link, self), lambda: EndpointFacts(scheduler="local"))
        session.greet()
        session.synced.set()
        self.reporter = Reporter(
            link=cast(Link, self),
            session=session,
            stop=threading.Event(),
            table=self.table,
            usage=lambda: EndpointUsage(at=1.0),
            on_delivered=self._take,
            **options,
        )
        self.reporter._last_usage = float("inf")

    where = "fake://server"

    def _take(self, jobs: list[Tracked]) -> None:
        self.delivered += jobs
        self.table.remove(jobs)

    def call(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        if path == "/agent/hello":
            return encode(Welcome(endpoint_id="e", endpoint_name="e", epoch="1"))
        raw = json.loads(body)
        error = self.refuse(raw)
        if error is not None:
            self.refused += 1
            raise error
        report = Report(
            epoch=raw["epoch"],
            jobs=tuple(JobReport(**{**one, "state": JobState(one["state"])}) for one in raw["jobs"]),
            streams=tuple(StreamChunk(**one) for one in raw["streams"]),
        )
        self.sent.append(report)
        received: dict[str, dict[str, int]] = {}
        for chunk in report.streams:
            data = chunk.raw()
            self.log += data if chunk.stream == "log" else b""
            received.setdefault(chunk.job_id, {})[chunk.stream] = chunk.offset + len(data)
        return encode(ReportAck(epoch="1", states={one.job_id: one.state for one in report.jobs}, received=received))

    def job(
        self, name: str = "job_00000001", log: bytes = b"", curves: tuple[str, ...] | None = None, **result: Any
    ) -> Tracked:
        run_dir = RunDir(self.folder / name)
        run_dir.path.mkdir()
        run_dir.stream("log").write_bytes(log)
        order = JobOrder(
            job_id=name,
            task_id="t",
            task_name="t",
            attempt=1,
            desired=Desired.RUN,
            spec=TaskSpec(run="true", curves=curves),
            received=dict.fromkeys(STREAMS, 0),
        )
        job = Tracked(order, run_dir.path)
        self.table.add([job])
        if result:
            self.table.set_result(job, JobReport(job_id=name, **{"state": JobState.SUCCEEDED, **result}))
        else:
            self.table.set_report(job, JobReport(job_id=name, state=JobState.RUNNING))
        return job

    def settle(self, most: int = 100) -> None:
        """Report until there is nothing left to tell at once."""
        for _ in range(most):
            if not self.reporter.report_once():
                return
        raise AssertionError("it does not come to an end")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


OUTPUTS = (Output(path="\udcff", size_bytes=1),)


def bad_outputs(raw: dict[str, Any]) -> DiamondError | None:
    return InvalidInput("half of a surrogate pair\x07") if any(one["outputs"] for one in raw["jobs"]) else None


def test_a_refused_result_is_told_without_what_was_refused(bench: Bench) -> None:
    bench.refuse = bad_outputs
    job = bench.job(
        log=b"x" * 100_000, outputs=OUTPUTS, detail="a\nb", exit_code=0, signal=10**30, started_at=float("nan")
    )
    bench.settle()
    assert bench.delivered == [job]
    said = bench.sent[-1].jobs[0]
    assert (said.state, said.exit_code, said.signal, said.started_at) == (JobState.SUCCEEDED, 0, None, None)
    assert not said.outputs
    assert said.detail.startswith("a?b; the server refused the full report (half of a surrogate pair?)")
    assert bytes(bench.log) == b"x" * 100_000, "the log still comes first"
    assert bench.refused == 1


def test_streams_the_server_refuses_do_not_hold_the_result(bench: Bench) -> None:
    bench.refuse = lambda raw: InvalidInput("no streams today") if raw["streams"] else None
    job = bench.job(log=b"x" * 5000, exit_code=0)
    bench.settle()
    assert bench.delivered == [job]
    assert "no streams today" in bench.sent[-1].jobs[0].detail


def test_a_proxy_that_takes_only_small_messages(bench: Bench) -> None:
    bench.refuse = lambda raw: TooLarge("413") if len(json.dumps(raw)) > 500_000 else None
    job = bench.job(log=b"x" * 2_000_000, exit_code=0, detail="fine")
    bench.settle()
    assert bench.delivered == [job]
    assert bytes(bench.log) == b"x" * 2_000_000
    assert bench.sent[-1].jobs[0].detail == "fine", "nothing had to be left out"


def test_a_fault_that_may_pass_costs_nothing_at_first(bench: Bench) -> None:
    bench.refuse = lambda raw: NotFound("the proxy knows no such page") if raw["jobs"] else None
    job = bench.job(log=b"x", outputs=(Output(path="a", size_bytes=1),), exit_code=0)
    bench.settle()
    assert job.quiet_until > 0
    bench.refuse = lambda _: None
    job.quiet_until = 0
    bench.settle()
    assert bench.delivered == [job]
    assert bench.sent[-1].jobs[0].outputs


def test_a_fault_that_does_not_pass_does_not_last_for_ever(bench: Bench) -> None:
    bench.refuse = lambda raw: NotFound("no") if any(one["outputs"] for one in raw["jobs"]) else None
    job = bench.job(log=b"x", outputs=(Output(path="a", size_bytes=1),), exit_code=0)
    for _ in range(10):
        job.quiet_until = 0
        bench.settle()
    assert bench.delivered == [job]


def test_one_that_is_refused_costs_the_others_nothing(bench: Bench) -> None:
    bench.refuse = bad_outputs
    jobs = [bench.job(f"job_{number:08d}", log=b"x", exit_code=0) for number in range(9)]
    jobs.append(bench.job("job_00000009", outputs=OUTPUTS, exit_code=0))
    bench.settle()
    assert {job.job_id for job in bench.delivered} == {job.job_id for job in jobs}
    assert sum("refused" in one.detail for report in bench.sent for one in report.jobs) == 1


def test_a_refused_state_of_a_running_job_is_left_out_a_while(bench: Bench) -> None:
    bench.refuse = lambda raw: InvalidInput("no") if any(one["state"] == "RUNNING" for one in raw["jobs"]) else None
    job = bench.job(log=b"x")
    bench.settle()
    assert job.quiet_until > 0 and not bench.delivered
    bench.table.set_result(job, JobReport(job_id=job.job_id, state=JobState.FAILED, exit_code=1))
    bench.settle()
    assert bench.delivered == [job], "the end is told at once, and whole"
    assert bench.sent[-1].jobs[0].detail == ""


def test_usage_the_server_refuses_is_no_fault_of_a_job(bench: Bench) -> None:
    bench.reporter._last_usage = float("-inf")
    bench.refuse = lambda raw: InvalidInput("no usage") if raw["usage"] else None
    job = bench.job(outputs=(Output(path="a", size_bytes=1),), exit_code=0)
    bench.settle()
    assert bench.delivered == [job]
    assert bench.sent[-1].jobs[0].outputs


def test_a_stream_that_cannot_be_read_is_noted_and_holds_nothing(bench: Bench) -> None:
    job = bench.job(exit_code=0, detail="done")
    for stream in ("metrics", "util"):
        RunDir(job.run_dir).stream(stream).mkdir()
    bench.settle()
    assert bench.sent[-1].jobs[0].detail == "done; metrics, util cannot be read: not a plain file"


def test_a_log_that_may_not_be_read_holds_nothing(shared: Path, as_nobody: Callable[..., Any]) -> None:
    def try_it() -> str:
        bench = Bench(shared)
        job = bench.job(log=b"secret", exit_code=0)
        RunDir(job.run_dir).stream("log").chmod(0)
        bench.settle()
        return bench.sent[-1].jobs[0].detail

    assert as_nobody(try_it) == "log cannot be read: Permission denied"


def test_a_lone_backlog_goes_in_large_chunks(bench: Bench) -> None:
    job = bench.job(log=b"x" * (10 * MIB), exit_code=0)
    bench.settle()
    assert bench.delivered == [job] and len(bench.log) == 10 * MIB
    sizes = [len(chunk.raw()) for report in bench.sent for chunk in report.streams]
    assert sizes == [3 * MIB, 3 * MIB, 3 * MIB, MIB]
    assert not bench.sent[-2].jobs and bench.sent[-1].jobs


def test_several_backlogs_share_a_report(bench: Bench) -> None:
    for number in range(3):
        bench.job(f"job_{number:08d}", log=b"x" * (4 * MIB), exit_code=0)
    bench.settle()
    assert len(bench.delivered) == 3
    assert sorted(len(chunk.raw()) for chunk in bench.sent[1].streams) == [MIB, MIB, MIB]


def test_full_reports_do_not_wait_for_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GAP_S", 2.0)
    bench.job(log=b"x" * (20 * MIB), exit_code=0)
    done = threading.Event()
    bench.reporter._on_delivered = lambda jobs: (bench._take(jobs), done.set())
    bench.reporter.start()
    assert done.wait(5)
    bench.reporter._stop.set()
    bench.reporter.join(5)


def test_many_lists_of_outputs_go_in_several_reports(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LISTED_BYTES", 1000)
    for number in range(6):
        outputs = tuple(Output(path=f"{number}/{one}", size_bytes=1) for one in range(4))
        bench.job(f"job_{number:08d}", outputs=outputs, exit_code=0)
    bench.settle()
    assert len(bench.delivered) == 6
    assert max(len(report.jobs) for report in bench.sent) == 2


def test_the_body_is_the_report(bench: Bench) -> None:
    chunks = tuple(StreamChunk.of("j", stream, 3, raw) for stream, raw in (("log", b"\xff\x00"), ("util", b"")))
    jobs = (JobReport(job_id="é\ud800", state=JobState.RUNNING),)
    for report in (Report(epoch="e"), Report(epoch="e", jobs=jobs), Report(epoch="e", streams=chunks)):
        text = body_of(report).decode()
        assert json.loads(text) == json.loads(json.dumps(encode(report)).replace("\\ud800", "?"))
        assert "\\u" not in text


def test_details_are_bounded(bench: Bench) -> None:
    job = bench.job()
    seen = Observed(state=JobState.FAILED, reason=Reason.LOST, detail="x" * 100_000)
    assert len(report_of(job, seen).detail) == 4000
    result = JobReport(job_id="j", state=JobState.FAILED, reason=Reason.LOST, detail="x" * 100_000)
    assert len(reduced(result, "y" * 100_000).detail) < 1000


@pytest.mark.parametrize(
    ("reason", "chained", "detail", "said"),
    [
        (Reason.COMPLETED, False, "", "{note}"),
        (Reason.COMPLETED, True, "", "{note}"),
        (Reason.TIME_LIMIT, False, "the limit was 1m", "the limit was 1m; {note}"),
        (Reason.TIME_LIMIT, True, "the limit was 1m", "the limit was 1m"),
        (Reason.CONTINUED, True, "it goes on", "it goes on"),
        (Reason.EXIT_NONZERO, False, "exit code 1", "exit code 1"),
    ],
)
def test_a_curve_pattern_that_matched_nothing_is_told_with_the_result(
    bench: Bench, reason: Reason, chained: bool, detail: str, said: str
) -> None:
    job = bench.job(log=b"Loss: 1\n", curves=("loss: {loss}",))
    job.order = replace(job.order, chained=chained)
    state = JobState.SUCCEEDED if reason in (Reason.COMPLETED, Reason.CONTINUED) else JobState.FAILED
    bench.table.set_result(job, JobReport(job_id=job.job_id, state=state, reason=reason, detail=detail))
    bench.settle()
    note = "curve pattern 'loss: {loss}' matched no line of the output; compare with the log, where capitals count"
    assert bench.delivered == [job]
    assert bench.sent[-1].jobs[0].detail == said.replace("{note}", note)


class SlowVault(Vault):
    """Reading one job's streams takes long."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.slow = slow
        self.now = 1000.0
        self.rooms: list[int] = []

    def read(self, order: JobOrder, run_dir: Path, stream: str, offset: int, room: int, *, is_over: bool) -> Piece:
        piece = super().read(order, run_dir, stream, offset, room, is_over=is_over)
        if order.job_id == self.slow and piece.data:
            self.now += 2.0 * len(piece.data) / MIB
            self.rooms.append(len(piece.data))
        return piece


def test_a_job_that_is_slow_to_read_does_not_hold_back_the_others(tmp_path: Path) -> None:
    vault = SlowVault("job_00000001")
    bench = Bench(tmp_path, vault=vault, clock=lambda: vault.now)
    bench.job("job_00000001", log=b"s" * 8 * MIB)
    quick = bench.job("job_00000002", log=b"q" * 4 * MIB)
    began = vault.now
    slow_s = 0.0
    while quick.acked["log"] < 4 * MIB:
        before = vault.now
        bench.reporter.report_once()
        slow_s += vault.now - before
        vault.now += 0.01
    assert vault.now - began < 10, "the slow job alone would take 16 seconds"
    while vault.now < began + 60:
        bench.reporter.report_once()
        vault.now += 0.05
    assert min(vault.rooms) < MIB / 4, "it is read in smaller pieces"
    share = 2.0 * sum(vault.rooms) / MIB / (vault.now - began)
    assert share < 0.6
    assert bench.log.count(b"s") == sum(vault.rooms), "and what was read is told once"


def test_what_was_gathered_leaves_before_more_is_read(tmp_path: Path) -> None:
    """Many jobs that are each a little slow: the first report does not wait for the last of them."""
    now = [1000.0]

    class Dragging(Vault):
        def read(self, order: JobOrder, run_dir: Path, *given: Any, **more: Any) -> Piece:
            now[0] += 0.05
            return super().read(order, run_dir, *given, **more)

    bench = Bench(tmp_path, vault=Dragging(), clock=lambda: now[0])
    for number in range(20):
        bench.job(f"job_{number:08}", log=b"x" * 100)
    bench.reporter.report_once()
    assert 1 <= len(bench.sent[0].streams) < 10
    for _ in range(20):
        bench.reporter.report_once()
    assert bytes(bench.log) == b"x" * 2000
