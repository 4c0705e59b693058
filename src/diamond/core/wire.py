"""Messages between an agent and the server. Decoded leniently on both sides, so versions may differ.

The agent asks "what should be?" (`DesiredState`) and says "what is" (`Report`). Every message may be lost,
repeated or arrive late without harm: orders are states, not commands; job reports only advance; stream
bytes carry offsets.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, replace

from diamond.core import bounds
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.images import ImageUse, ImageWork
from diamond.core.pools import PilotOrder, PoolPlace
from diamond.core.reasons import Reason
from diamond.core.shells import ShellOrder
from diamond.core.states import Desired, JobState
from diamond.core.tasks import Output, TaskSpec

PROTOCOL = 1
# Names the agent's home. One endpoint has one: two homes would each run every job.
INSTANCE_HEADER = "Diamond-Agent"
STREAMS = ("log", "metrics", "util", "train")
FIRST_STREAMS = ("log", "metrics", "util")  # what a server takes that does not say what it takes
MAX_REPORTED = 10_000  # jobs, or chunks of streams, in one report
MAX_REPORT_STREAM_BYTES = 4 * 1024 * 1024  # raw bytes of all chunks of one report together


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Agent -> server, once per start and after every change of facts. POST /api/v1/agent/hello"""

    facts: EndpointFacts
    protocol: int = PROTOCOL
    take_over: bool = False  # the home that spoke for this endpoint is lost; its jobs are to be given up


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """`epoch` names this life of the database; it changes when a backup is restored."""

    endpoint_id: str
    endpoint_name: str
    epoch: str
    server_version: str = ""
    owner: str = ""  # name of the user the endpoint belongs to; the agent believes the first it is told
    streams: tuple[str, ...] = FIRST_STREAMS  # those the server takes; it refuses reports with any other


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """What should be of one job. `received` says how many bytes of each stream the server holds.

    A chain is a task that outlasts the walltime: `chained` says that a job which ends for want of time, or asks to go
    on (see `diamond.core.chains`), is followed by another, which `continues` it in the same work directory. `after`
    names a job, still live, that this one queues behind.
    """

    job_id: str
    task_id: str
    task_name: str
    attempt: int
    desired: Desired
    spec: TaskSpec
    time_limit_s: int | None = None
    received: dict[str, int] = field(default_factory=dict)
    partition: str = ""  # as the planner resolved it; empty leaves it to the scheduler
    gpu_type: str = ""  # the scheduler's own name of the GPU model, as resolved
    chained: bool = False
    continues: str = ""
    after: str = ""
    user: str = ""  # who asked, for the endpoint's policy and records
    image: ImageUse | None = None  # what it runs in; None: the endpoint's own system
    work: ImageWork | None = None  # a job that looks after images; its spec holds only what schedulers need
    pilot: PilotOrder | None = None  # a job that holds a node of a pool
    place: PoolPlace | None = None  # where in a pool it runs; None: the scheduler's own business

    def with_all_offsets(self) -> JobOrder:
        """With a number for every stream: of one that is not named, the server holds nothing."""
        return replace(self, received={stream: self.received.get(stream, 0) for stream in STREAMS})


@dataclass(frozen=True, kw_only=True)
class DesiredState:
    """Server -> agent. GET /api/v1/agent/desired?epoch=…&since=REVISION&wait_s=25

    Orders that changed after `since`; with since=0 (or another epoch) every job of this endpoint that is not final
    (`full`). The next poll passes `revision`.
    """

    epoch: str
    revision: int
    full: bool
    orders: tuple[JobOrder, ...] = ()
    shells: tuple[ShellOrder, ...] = ()  # wanted, and not named in the question as known
    rotate: bool = False  # the agent is to take a new token, see `diamond.core.enrolment`


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """What is, of one job. A final state is sent only after all stream bytes and outputs were received."""

    job_id: str
    state: JobState
    reason: Reason | None = None
    detail: str = field(default="", metadata=bounds.text(4000))
    exit_code: int | None = None
    signal: int | None = None
    scheduler_id: str | None = None
    hosts: tuple[str, ...] = field(default=(), metadata=bounds.items(10_000))
    run_dir: str = field(default="", metadata=bounds.text(4096))
    pending_reason: str = field(default="", metadata=bounds.text(500))
    partition: str = ""
    expected_start_at: float | None = None
    queued_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    outputs: tuple[Output, ...] = field(default=(), metadata=bounds.items(10_000))


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """Bytes of one stream from `offset` on, base64."""

    job_id: str
    stream: str
    offset: int
    data: str = field(metadata=bounds.text(2 * MAX_REPORT_STREAM_BYTES))

    @staticmethod
    def of(job_id: str, stream: str, offset: int, raw: bytes) -> StreamChunk:
        return StreamChunk(job_id=job_id, stream=stream, offset=offset, data=base64.b64encode(raw).decode("ascii"))

    def raw(self) -> bytes:
        return base64.b64decode(self.data, validate=True)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Agent -> server. POST /api/v1/agent/reports. Streams are stored before states are believed."""

    epoch: str
    jobs: tuple[JobReport, ...] = field(default=(), metadata=bounds.items(MAX_REPORTED, refuses=True))
    streams: tuple[StreamChunk, ...] = field(default=(), metadata=bounds.items(MAX_REPORTED, refuses=True))
    usage: EndpointUsage | None = None


@dataclass(frozen=True, kw_only=True)
class ReportAck:
    """What the server now holds. The agent forgets a job once its final state appears in `states`."""

    epoch: str
    states: dict[str, JobState] = field(default_factory=dict)
    received: dict[str, dict[str, int]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # jobs the server does not have for this endpoint
