"""The thread that tells the server what is: states, stream bytes, use of the machine.

A final state leaves only in (or after) the report that carries the last byte of the job's streams, so nobody ever sees
a job that is over with a log that is not. What the server has not acknowledged is told again; nothing is dropped
because the server is away, full or restarting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from diamond.agent.link import Link, json_bytes
from diamond.agent.node_samples import NodeSamples
from diamond.agent.plain_curves import PlainCurves
from diamond.agent.secrets import Vault
from diamond.agent.session import Patience, Session
from diamond.agent.table import MAX_DETAIL, JobTable, Told, Tracked, reduced
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointUsage
from diamond.core.errors import DiamondError, InvalidInput, ProtocolError, TooLarge, Unauthenticated
from diamond.core.faults import fault_point
from diamond.core.reasons import Reason
from diamond.core.wire import (
    FIRST_STREAMS,
    MAX_REPORT_STREAM_BYTES,
    STREAMS,
    JobReport,
    Report,
    ReportAck,
    StreamChunk,
)

log = logging.getLogger(__name__)

_STREAM_PERIOD_S = 0.2
_FIRST_LINE_PERIOD_S = 0.03  # somebody may be waiting for a job's first line
_GAP_S = 0.03  # what happens within it goes into one report
HEARTBEAT_S = 10.0
_USAGE_EVERY_S = 5.0
_MAX_JOBS = 500
_MAX_LISTED_BYTES = 4 * 1024 * 1024  # of the outputs of all jobs of one report, about
_MAX_CHUNK_BYTES = 1024 * 1024  # so that one talkative job does not silence the others
_LONE_CHUNK_BYTES = 3 * 1024 * 1024  # for one that is alone in having so much to say
_MIN_CHUNK_BYTES = 16 * 1024
_LISTED_BYTES = 150  # of an output, beside its path
_PROBE_BYTES = 64 * 1024  # sent of a stream when only the server knows how much of it it holds
_QUIET_S = 60.0
_DOUBT_S = 10.0
_DOUBTS = 3  # refusals that may be a passing fault of the server (or of a proxy) before less is told
_STUCK_S = 1.0
# One job must not hold back what is to be told of the others.
_DRAFT_S = 0.5  # after so long, what was gathered is sent before more jobs are looked at
_JOB_S = 0.25  # a job that took longer gets less room next time
_REST = 3  # and waits so many times as long as it took


@dataclass
class _Draft:
    """A report being made, and whom it is about."""

    jobs: list[JobReport] = field(default_factory=list)
    chunks: list[StreamChunk] = field(default_factory=list)
    about: dict[str, tuple[Tracked, JobReport | None]] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)  # among those: jobs that have their result
    behind: set[str] = field(default_factory=set)  # among those: jobs with more to say than fits
    num_bytes: int = 0
    listed_bytes: int = 0
    is_cut: bool = False  # there was more than fits


class Reporter:
    def __init__(
        self,
        *,
        link: Link,
        session: Session,
        stop: threading.Event,
        table: JobTable,
        usage: Callable[[], EndpointUsage],
        on_delivered: Callable[[list[Tracked]], None],
        vault: Vault | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_delivered` takes jobs whose final state the server has acknowledged (or does not want)."""
        self._clock = clock
        self._vault = vault or Vault()
        self._samples = NodeSamples()
        self._curves = PlainCurves()
        self._link = link
        self._session = session
        self._stop = stop
        self._table = table
        self._usage = usage
        self._on_delivered = on_delivered
        self._news = threading.Event()
        self._max_jobs = _MAX_JOBS
        self._max_chunk_bytes = _LONE_CHUNK_BYTES
        self._behind: set[str] = set()  # as of the last report
        self._turn = 0
        self._last_sent = float("-inf")
        self._last_usage = float("-inf")
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self.patience = Patience("reporting", stop)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._news.set()
        self._thread.join(timeout_s)

    def wake(self) -> None:
        self._news.set()

    def _run(self) -> None:
        again = False
        while not self._stop.is_set():
            if not self._session.synced.wait(0.5):
                continue
            if not again:
                self._news.wait(self._wait_s())
                self._stop.wait(max(0.0, self._last_sent + _GAP_S - self._clock()))
            self._news.clear()
            try:
                again = self.report_once()
            except DiamondError as error:
                self.patience.failed(error)
                if self._session.streams != STREAMS:  # what comes back may be a newer server, which takes more
                    self._session.greet_again()
                again = True
            except Exception as error:  # the only voice the jobs have must not fall silent
                log.exception("reporting: unexpected error")
                self.patience.failed(ProtocolError(str(error)))
                again = True

    def _wait_s(self) -> float:
        due = self._last_sent + HEARTBEAT_S - self._clock()
        now = self._clock()
        with self._table.lock:
            streaming = [job for job in self._table.live() if job.has_streams]
            eager = any(job.eager_until > now and not job.acked.get("log") for job in streaming)
        period_s = _FIRST_LINE_PERIOD_S if eager else _STREAM_PERIOD_S
        return max(0.0, min(due, period_s) if streaming else due)

    def report_once(self) -> bool:
        """Tell what there is to tell; True when there is more.

        Raises:
            DiamondError: the server could not be told, by no fault of what was said.
        """
        self._session.greet()
        if not self._session.synced.is_set():  # another epoch: wait for what it holds
            return False
        draft = self._draft()
        now = self._clock()
        if not draft.about and now - self._last_sent < HEARTBEAT_S:
            return False
        usage = None
        if now - self._last_usage >= _USAGE_EVERY_S:
            usage = self._usage()
        epoch = self._session.epoch
        report = Report(epoch=epoch, jobs=tuple(draft.jobs), streams=tuple(draft.chunks), usage=usage)
        fault_point("agent.reporting")
        try:
            ack = decode(ReportAck, self._link.call("POST", "/agent/reports", body_of(report)))
        except DiamondError as error:
            if error.transient or isinstance(error, Unauthenticated) or not draft.about:
                raise
            if self._takes_less(draft):
                return True
            if usage is not None:
                self._last_usage = now  # once more without it, before a job is blamed
            else:
                self._narrow(draft, error)
            return True
        fault_point("agent.reported")
        self._last_sent = self._clock()
        self._last_usage = self._last_sent if usage is not None else self._last_usage
        self.patience.worked()
        if ack.epoch != epoch:
            # Another life of the database: what it says of our jobs counts only after a new beginning.
            self._session.greet_again()
            return True
        self._max_jobs = min(_MAX_JOBS, self._max_jobs * 2)
        self._max_chunk_bytes = min(_LONE_CHUNK_BYTES, self._max_chunk_bytes * 2)
        self._behind = draft.behind
        moved = self._take(draft, ack)
        return draft.is_cut and moved

    def tell_usage(self) -> None:
        """Tell the endpoint's use and warnings now, beside the reports of jobs.

        Raises:
            DiamondError: the server could not be told.
        """
        report = Report(epoch=self._session.epoch, usage=self._usage())
        self._link.call("POST", "/agent/reports", body_of(report), timeout_s=5.0)

    def _takes_less(self, draft: _Draft) -> bool:
        """Whether the report was refused for a stream that the server, an older one by now, no longer takes.

        Raises:
            DiamondError: it could not be asked.
        """
        before = self._session.streams
        if all(chunk.stream in FIRST_STREAMS for chunk in draft.chunks):
            return False
        self._session.greet_again()
        self._session.greet()
        return self._session.streams != before

    # Making a report

    def _draft(self) -> _Draft:
        draft = _Draft()
        live = self._table.live()
        if live:
            self._turn = (self._turn + 1) % len(live)
        began = self._clock()
        for job in live[self._turn :] + live[: self._turn]:
            now = self._clock()
            if job.quiet_until > began:
                continue
            if (
                len(draft.about) >= self._max_jobs
                or draft.num_bytes >= MAX_REPORT_STREAM_BYTES
                or draft.listed_bytes >= _MAX_LISTED_BYTES
                or (draft.about and now - began > _DRAFT_S)
            ):
                draft.is_cut = True
                break
            self._add(draft, job)
            self._pace(job, self._clock() - now)
        return draft

    def _pace(self, job: Tracked, spent_s: float) -> None:
        """Less at a time, and a rest, for a job that took long to read: secrets, a slow disk, or on purpose."""
        if spent_s <= _JOB_S:
            job.room_bytes = min(_LONE_CHUNK_BYTES, 2 * job.room_bytes)
            return
        job.room_bytes = max(_MIN_CHUNK_BYTES, min(job.room_bytes, self._max_chunk_bytes) // 2)
        job.quiet_until = max(job.quiet_until, self._clock() + _REST * spent_s)

    def _add(self, draft: _Draft, job: Tracked) -> None:
        with self._table.lock:
            report, result, told = job.report, job.result, job.told
            acked = dict(job.acked)
            has_streams = job.has_streams
        if job.tell == Told.LEAST:
            has_streams = False
        # Read after the result was there: a file of a job that is over grows no more.
        is_over = result is not None
        chunks, is_whole, problem = self._chunks(draft, job, acked, is_over) if has_streams else ([], True, "")
        say = report if report is not told else None
        if result is not None and is_whole:
            note = self._curves.note(job.job_id) if job.tell == Told.ALL and _printed_all(job, result) else ""
            say = _last_words(job, result, "; ".join(filter(None, (problem, note))))
        if not chunks and say is None:
            return
        draft.chunks += chunks
        draft.about[job.job_id] = (job, say)
        if result is not None:
            draft.over.add(job.job_id)
            draft.is_cut = draft.is_cut or not is_whole
        if say is not None:
            draft.jobs.append(self._vault.hide(job.order, job.run_dir, say))
            draft.listed_bytes += sum(len(output.path) + _LISTED_BYTES for output in say.outputs)

    def _chunks(
        self, draft: _Draft, job: Tracked, acked: dict[str, int], is_over: bool
    ) -> tuple[list[StreamChunk], bool, str]:
        """The next bytes of each stream, whether that is all there is, and what could not be read."""
        chunks = []
        problems: dict[str, list[str]] = {}
        is_whole = True
        alone = self._behind <= {job.job_id}
        most = min(self._max_chunk_bytes, job.room_bytes, _LONE_CHUNK_BYTES if alone else _MAX_CHUNK_BYTES)
        self._samples.gather(job.order, job.run_dir, is_over=is_over)
        if not self._curves.gather(job.order, job.run_dir, is_over=is_over):
            is_whole, draft.is_cut = False, True
        for stream in self._session.streams:
            offset = acked.get(stream, 0)
            room = min(MAX_REPORT_STREAM_BYTES - draft.num_bytes, most if stream in acked else min(most, _PROBE_BYTES))
            piece = self._vault.read(job.order, job.run_dir, stream, offset, room, is_over=is_over)
            if not piece.is_end:
                draft.is_cut = True
                draft.behind.add(job.job_id)
            if piece.data:
                chunks.append(StreamChunk.of(job.job_id, stream, offset, piece.data))
                draft.num_bytes += len(piece.data)
            if piece.problem:
                problems.setdefault(piece.problem, []).append(stream)
            is_whole = is_whole and piece.is_end
        told = "; ".join(f"{', '.join(streams)} cannot be read: {why}" for why, streams in problems.items())
        return chunks, is_whole, told

    # Taking the answer in

    def _take(self, draft: _Draft, ack: ReportAck) -> bool:
        """Note what the server holds now; False when nothing of what was sent got anywhere."""
        delivered: list[Tracked] = []
        moved = False
        sent: dict[str, dict[str, int]] = {}
        for chunk in draft.chunks:
            sent.setdefault(chunk.job_id, {})[chunk.stream] = chunk.offset
        for job_id, (job, said) in draft.about.items():
            if job_id in ack.unknown:
                self._disown(job, delivered)
                continue
            received = ack.received.get(job_id, {})
            moved = moved or any(received.get(stream, 0) > offset for stream, offset in sent.get(job_id, {}).items())
            state = ack.states.get(job_id)
            is_final_said = said is not None and said.state.is_final
            self._table.acknowledge(job, said if state is not None and not is_final_said else None, received)
            if is_final_said and state is not None and state.is_final:
                delivered.append(job)
            elif said is not None and state is None:
                job.quiet_until = self._clock() + _STUCK_S
            if (mine := sent.get(job_id)) and all(received.get(stream) == at for stream, at in mine.items()):
                job.quiet_until = self._clock() + _STUCK_S  # too fast for the server, which took nothing of it
        if delivered:
            self._samples.forget(job.job_id for job in delivered)
            self._curves.forget(job.job_id for job in delivered)
            self._on_delivered(delivered)
            moved = True
        return moved

    def _disown(self, job: Tracked, delivered: list[Tracked]) -> None:
        """The server does not know this job: let it run, tell nobody, and let it go when it is over."""
        if job.result is not None:
            delivered.append(job)
        else:
            log.warning("job %s is not known to the server; it goes on, unreported", job.job_id)
            self._table.orphan(job)

    def _narrow(self, draft: _Draft, error: DiamondError) -> None:
        """The server refuses what we say: say less at a time, to find whom it is about.

        A job that goes on is left out a while. One that is over must be able to end: less and less is told of it.
        """
        if len(draft.about) > 1:
            self._max_jobs = max(1, len(draft.about) // 2)
            return
        is_definite = isinstance(error, InvalidInput)
        if draft.num_bytes > _MIN_CHUNK_BYTES and (isinstance(error, TooLarge) or not is_definite):
            self._max_chunk_bytes = max(_MIN_CHUNK_BYTES, min(self._max_chunk_bytes, draft.num_bytes) // 2)
            return
        for job, _ in draft.about.values():
            log.error("the server refuses the report of job %s: %s", job.job_id, error)
            job.num_refused += 1
            if job.job_id not in draft.over or job.tell == Told.LEAST:
                job.quiet_until = self._clock() + _QUIET_S
            elif is_definite or job.num_refused > _DOUBTS:
                job.tell = Told(job.tell + 1)
                job.refusal = error.message
            else:
                job.quiet_until = self._clock() + _DOUBT_S


def _printed_all(job: Tracked, result: JobReport) -> bool:
    """Whether the output of a job is all its task prints. One that failed may not have come so far as to print."""
    return result.reason is Reason.COMPLETED or (result.reason is Reason.TIME_LIMIT and not job.order.chained)


def _last_words(job: Tracked, result: JobReport, problem: str) -> JobReport:
    if job.tell != Told.ALL:
        result = reduced(result, job.refusal)
    if not problem:
        return result
    detail = f"{result.detail}; {problem}" if result.detail else problem
    return replace(result, detail=detail[:MAX_DETAIL])


def body_of(report: Report) -> bytes:
    """The report as it travels. Looking through megabytes of base64 for something to escape would be half the work."""
    rest = encode(replace(report, streams=()))
    del rest["streams"]
    chunks = []
    for chunk in report.streams:
        about = encode(replace(chunk, data=""))
        del about["data"]
        chunks.append(b"".join((json_bytes(about)[:-1], b',"data":"', chunk.data.encode("ascii"), b'"}')))
    return b"".join((json_bytes(rest)[:-1], b',"streams":[', b",".join(chunks), b"]}"))
