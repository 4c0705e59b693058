"""The server's half of the conversation with agents: what should be, and what is.

Every call is safe to repeat. An agent touches only jobs of its own endpoint; whatever else it names is ignored
and answered as unknown.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import check_relative_path, is_digest
from diamond.core.codec import decode, encode
from diamond.core.endpoints import ONLINE_WITHIN_S
from diamond.core.errors import Conflict, InvalidInput, NotFound, ProtocolError, TooLarge
from diamond.core.faults import fault_point
from diamond.core.images import ImageUse
from diamond.core.reasons import Reason
from diamond.core.states import FINAL_JOB_STATES, Desired, JobState, TaskState, job_advances
from diamond.core.tasks import Output, TaskSpec
from diamond.core.wire import (
    PROTOCOL,
    STREAMS,
    DesiredState,
    Hello,
    JobOrder,
    JobReport,
    Report,
    ReportAck,
    StreamChunk,
    Welcome,
)
from diamond.server.services import chains, image_work, lifecycle, snapshots
from diamond.server.services.context import Context
from diamond.server.services.snapshots import is_online
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow, JobRow, TaskRow, UserRow

_FINAL = [state.value for state in FINAL_JOB_STATES]
_MAX_DETAIL = 4000
_MAX_OUTPUTS = 10_000
_MAX_REPORTED_JOBS = 10_000
_LATEST = 4e9  # a Unix time after which no agent's clock is believed
_TOUCH_EVERY_S = 5.0
_DEFAULT_REASON = {
    JobState.SUCCEEDED: Reason.COMPLETED,
    JobState.FAILED: Reason.EXIT_NONZERO,
    JobState.CANCELLED: Reason.CANCELLED,
}


def hello(ctx: Context, endpoint_id: str, message: Hello, instance: str = "") -> Welcome:
    """An agent introduces itself and its endpoint's facts.

    Raises:
        Conflict: another agent home speaks for this endpoint.
    """
    if message.protocol > PROTOCOL:
        raise ProtocolError(
            f"the agent speaks protocol {message.protocol}, this server up to {PROTOCOL}",
            hint="update the server, or install the agent of the server's version",
        )
    with ctx.db.write() as session:
        row = _locked_endpoint(session, endpoint_id)
        if row.instance not in (None, instance):
            if not message.take_over:
                refuse_second_home(ctx, session, row)
            release(ctx, session, row)
        row.instance = instance or None
        row.facts = encode(snapshots.with_last_known(message.facts, row.facts))
        _touch(ctx, session, row)
        name = row.name
    # Tasks may have waited for exactly these facts.
    ctx.hub.notify("planning", "events")
    from diamond import __version__

    return Welcome(endpoint_id=endpoint_id, endpoint_name=name, epoch=ctx.epoch, server_version=__version__)


def _locked_endpoint(session: Session, endpoint_id: str) -> EndpointRow:
    row = session.scalars(sa.select(EndpointRow).where(EndpointRow.id == endpoint_id).with_for_update()).one_or_none()
    if row is None:
        raise NotFound("this agent's endpoint was removed", hint="create it again and use its new token")
    return row


def refuse_second_home(ctx: Context, session: Session, row: EndpointRow) -> None:
    """Two homes would each run every job. A home that is silent and has nothing in hand may be replaced."""
    online = is_online(row.last_seen_at, ctx.clock())
    live = [JobRow.endpoint_id == row.id, JobRow.state.not_in(_FINAL), JobRow.delivered_at.is_not(None)]
    in_hand = session.execute(sa.select(sa.func.count()).select_from(JobRow).where(*live)).scalar_one()
    if online or in_hand:
        host = (row.facts or {}).get("hostname") or "another machine"
        raise Conflict(
            f"another agent already speaks for endpoint {row.name} (on {host}, with {in_hand} jobs in hand)",
            hint="an endpoint has one agent: stop the other, or create an endpoint of its own for this one. If the "
            "other's home is lost, start this one with --take-over; the jobs it had are then given up",
        )


def release(ctx: Context, session: Session, row: EndpointRow) -> None:
    """The home that spoke for this endpoint is lost, and with it whatever it was running."""
    row.instance = None
    jobs = session.scalars(
        sa.select(JobRow).where(
            JobRow.endpoint_id == row.id, JobRow.state.not_in(_FINAL), JobRow.delivered_at.is_not(None)
        )
    ).all()
    now = ctx.clock()
    for job in jobs:
        task = session.get(TaskRow, job.task_id, options=[undefer(TaskRow.spec)])
        assert task is not None
        job.state, job.reason, job.ended_at = JobState.FAILED.value, Reason.LOST.value, now
        job.detail = "the agent that had it was replaced by another"
        chains.drop(ctx, session, lifecycle.follow_job(session, task, job, now))


def _check_instance(row: EndpointRow, instance: str) -> None:
    if row.instance not in (None, instance):
        raise Conflict(
            f"another agent now speaks for endpoint {row.name}", hint="stop this one; its jobs were given up"
        )


def _touch(ctx: Context, session: Session, row: EndpointRow) -> None:
    now = ctx.clock()
    if not is_online(row.last_seen_at, now):
        data = {"name": row.name}
        record_event(session, at=now, kind="endpoint.online", owner_id=row.owner_id, endpoint_id=row.id, data=data)
    row.last_seen_at = now


def goodbye(ctx: Context, endpoint_id: str, instance: str = "") -> None:
    """The agent stops on purpose: its endpoint is offline at once, not a minute later."""
    with ctx.db.write() as session:
        row = _locked_endpoint(session, endpoint_id)
        _check_instance(row, instance)
        row.last_seen_at = ctx.clock() - ONLINE_WITHIN_S
        data = {"name": row.name}
        at = ctx.clock()
        record_event(session, at=at, kind="endpoint.offline", owner_id=row.owner_id, endpoint_id=row.id, data=data)
    ctx.hub.notify("planning", "events")


def desired(
    ctx: Context, endpoint_id: str, epoch: str, since: int, instance: str = "", *, is_call: bool = True
) -> DesiredState:
    """What should be, of the jobs whose order changed after `since` (all live ones for another epoch or 0).

    `is_call` is False when a waiting call looks again: that says nothing about whether the agent is still there.
    """
    full = epoch != ctx.epoch or since <= 0
    with ctx.db.read() as session:
        row = session.get(EndpointRow, endpoint_id)
        if row is None:
            raise NotFound("this agent's endpoint was removed", hint="create it again and use its new token")
        _check_instance(row, instance)
        revision = row.revision
        if not full and revision <= since and not (is_call and _is_stale(ctx, row)):
            return DesiredState(epoch=ctx.epoch, revision=revision, full=False)
    with ctx.db.write() as session:
        # Noted before they are told: a cancel may then no longer assume that nobody knows of the job.
        endpoint = _locked_endpoint(session, endpoint_id)
        revision = endpoint.revision
        if is_call and _is_stale(ctx, endpoint):
            _touch(ctx, session, endpoint)
        mine = [JobRow.endpoint_id == endpoint_id, JobRow.state.not_in(_FINAL)]
        if not full:
            mine.append(JobRow.revision > since)
        session.execute(
            sa.update(JobRow).where(*mine, JobRow.delivered_at.is_(None)).values(delivered_at=ctx.clock()),
            execution_options={"synchronize_session": False},
        )
        rows = session.execute(
            sa.select(JobRow, TaskRow, UserRow.name)
            .join(TaskRow, TaskRow.id == JobRow.task_id)
            .join(UserRow, UserRow.id == TaskRow.owner_id)
            .where(*mine)
            .order_by(JobRow.revision)
            .options(undefer(TaskRow.spec), undefer(TaskRow.work))
        ).all()
        orders = [_order(job, task, user) for job, task, user in rows]
    held = ctx.streams.sizes([order.job_id for order in orders]) if full else {}
    fault_point("server.ordering")
    return DesiredState(
        epoch=ctx.epoch,
        revision=revision,
        full=full,
        orders=tuple(_with_received(order, held.get(order.job_id, {})) for order in orders),
    )


def _is_stale(ctx: Context, row: EndpointRow) -> bool:
    return row.last_seen_at is None or ctx.clock() - row.last_seen_at > _TOUCH_EVERY_S


def _order(job: JobRow, task: TaskRow, user: str) -> JobOrder:
    return JobOrder(
        job_id=job.id,
        task_id=task.id,
        task_name=task.name,
        attempt=job.attempt,
        desired=Desired(job.desired),
        spec=decode(TaskSpec, task.spec),
        time_limit_s=job.time_limit_s,
        partition=job.partition,
        gpu_type=job.gpu_type,
        chained=job.chained,
        continues=job.continues or "",
        after=job.after or "",
        user=user,
        image=decode(ImageUse, job.image) if job.image else None,
        work=image_work.order_of(task) if task.kind != "command" else None,
    )


def _with_received(order: JobOrder, received: dict[str, int]) -> JobOrder:
    if not received:
        return order
    return JobOrder(**{**order.__dict__, "received": received})


def report(ctx: Context, endpoint_id: str, message: Report, instance: str = "") -> ReportAck:
    """Take in what is. Bytes first, states after: a final state is never visible before its log."""
    if message.epoch != ctx.epoch:
        return ReportAck(epoch=ctx.epoch)  # the agent sees the difference and introduces itself anew
    named = {item.job_id for item in message.jobs} | {item.job_id for item in message.streams}
    if len(named) > _MAX_REPORTED_JOBS:
        raise TooLarge(f"a report about {len(named)} jobs", hint=f"send at most {_MAX_REPORTED_JOBS} at a time")
    own, task_of = _own_jobs(ctx, endpoint_id, named, instance)
    received = _store_streams(ctx, message.streams, own)
    fault_point("server.receiving")
    states = dict(own)
    topics: set[str] = set()
    if _has_news(ctx, endpoint_id, message, own):
        with ctx.db.write() as session:
            endpoint = _locked_endpoint(session, endpoint_id)
            _touch(ctx, session, endpoint)
            if message.usage is not None:
                endpoint.usage = encode(message.usage)
            topics |= _apply(ctx, session, message.jobs, states)
            session.flush()
            fault_point("server.committing")
    fault_point("server.received")
    topics |= {f"task:{task_of[job_id]}" for job_id in received}
    ctx.hub.notify(*topics)
    return ReportAck(
        epoch=ctx.epoch,
        states={item.job_id: states[item.job_id] for item in message.jobs if item.job_id in states},
        received=received,
        unknown=tuple(sorted(named - own.keys())),
    )


def _own_jobs(
    ctx: Context, endpoint_id: str, named: set[str], instance: str
) -> tuple[dict[str, JobState], dict[str, str]]:
    """State and task id of those jobs that are this endpoint's."""
    query = sa.select(JobRow.id, JobRow.state, JobRow.task_id)
    with ctx.db.read() as session:
        if (endpoint := session.get(EndpointRow, endpoint_id)) is not None:
            _check_instance(endpoint, instance)
        rows = session.execute(query.where(JobRow.endpoint_id == endpoint_id, JobRow.id.in_(named))).all()
    return {job: JobState(state) for job, state, _ in rows}, {job: task for job, _, task in rows}


def _store_streams(
    ctx: Context, chunks: tuple[StreamChunk, ...], own: dict[str, JobState]
) -> dict[str, dict[str, int]]:
    received: dict[str, dict[str, int]] = {}
    for chunk in chunks:
        if chunk.job_id not in own:
            continue
        if chunk.stream not in STREAMS or chunk.offset < 0:
            raise ProtocolError(f"no stream {chunk.stream[:40]!r} at offset {chunk.offset}")
        try:
            data = chunk.raw()
        except ValueError as error:
            raise ProtocolError("stream bytes are not base64") from error
        size = ctx.streams.append(chunk.job_id, chunk.stream, chunk.offset, data)
        if chunk.stream != "log":
            ctx.series.ingest(chunk.job_id, chunk.stream)
        received.setdefault(chunk.job_id, {})[chunk.stream] = size
    return received


def _has_news(ctx: Context, endpoint_id: str, message: Report, own: dict[str, JobState]) -> bool:
    if message.usage is not None:
        return True
    return any(item.job_id in own and not own[item.job_id].is_final for item in message.jobs)


def _apply(ctx: Context, session: Session, items: tuple[JobReport, ...], states: dict[str, JobState]) -> set[str]:
    """Advance jobs and their tasks; `states` becomes what is now true."""
    wanted = [item.job_id for item in items if item.job_id in states]
    task_ids = sa.select(JobRow.task_id).where(JobRow.id.in_(wanted))
    tasks = {
        row.id: row
        for row in session.scalars(
            sa.select(TaskRow)
            .where(TaskRow.id.in_(task_ids))
            .order_by(TaskRow.id)
            .options(undefer(TaskRow.spec))
            .with_for_update()
        )
    }
    jobs = {
        row.id: row
        for row in session.scalars(sa.select(JobRow).where(JobRow.id.in_(wanted)).order_by(JobRow.id).with_for_update())
    }
    topics: set[str] = set()
    for item in items:
        job = jobs.get(item.job_id)
        if job is None:
            continue
        task = tasks[job.task_id]
        if (woken := _advance(ctx, session, task, job, item)) is not None:
            topics |= {f"task:{task.id}", "events"} | woken
            if job.state in _FINAL:
                topics.add("planning")
        states[job.id] = JobState(job.state)
    return topics


def _advance(ctx: Context, session: Session, task: TaskRow, job: JobRow, item: JobReport) -> set[str] | None:
    """Take in a report; topics to wake beside the usual ones, None when it was no news."""
    newest = job.attempt == task.attempt
    if item.state is JobState.QUEUED:
        job.pending_reason = _text(item.pending_reason, 500)
        job.expected_start_at = _time(item.expected_start_at)
        if newest and TaskState(task.state) is TaskState.QUEUED:
            task.pending_reason, task.expected_start_at = job.pending_reason, job.expected_start_at
    if item.state.value == job.state and not item.state.is_final:
        _note_place(job, item)  # a scheduler may say later where a job runs than that it runs
    if not job_advances(JobState(job.state), item.state):
        return None
    now = ctx.clock()
    job.state = item.state.value
    job.detail = _text(item.detail, _MAX_DETAIL)
    job.exit_code, job.signal = item.exit_code, item.signal
    _note_place(job, item)
    job.queued_at = _time(item.queued_at) or job.queued_at
    job.started_at = _time(item.started_at) or job.started_at
    job.ended_at = _time(item.ended_at) or job.ended_at
    if item.state.is_final:
        job.reason = (item.reason or _DEFAULT_REASON[item.state]).value
        job.ended_at = job.ended_at or now
        if newest:
            task.outputs = [encode(entry) for entry in _checked_outputs(item)]
    return chains.follow(ctx, session, task, job)


def _note_place(job: JobRow, item: JobReport) -> None:
    job.scheduler_id = _text(item.scheduler_id or job.scheduler_id or "", 200) or None
    job.hosts = [_text(host, 255) for host in item.hosts[:10_000]] or job.hosts
    job.run_dir = _text(item.run_dir, 4096) or job.run_dir
    job.partition = _text(item.partition, 200) or job.partition


def _text(raw: str, limit: int) -> str:
    """What an agent says, as the database can hold it: PostgreSQL refuses NUL, and lone surrogates are not text."""
    return raw[:limit].replace("\x00", "").encode(errors="replace").decode()


def _time(raw: float | None) -> float | None:
    return raw if raw is not None and 0 < raw < _LATEST else None


def _checked_outputs(item: JobReport) -> list[Output]:
    """An agent is not believed about paths and digests: an entry that leads elsewhere is left out."""
    kept = []
    for entry in item.outputs[:_MAX_OUTPUTS]:
        try:
            normal = check_relative_path(entry.path, "output") == entry.path
        except InvalidInput:
            continue
        named = is_digest(f"sha256:{entry.sha256}") or not (entry.sha256 or entry.stored)
        if normal and named and 0 <= entry.size_bytes < 2**60:
            kept.append(entry)
    return kept
