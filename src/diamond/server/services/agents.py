"""The server's half of the conversation with agents: what should be, and what is.

Every call is safe to repeat. An agent touches only jobs of its own endpoint; whatever else it names is ignored
and answered as unknown.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core import bounds
from diamond.core.bundles import check_relative_path, is_digest
from diamond.core.codec import decode, encode
from diamond.core.endpoints import ONLINE_WITHIN_S
from diamond.core.errors import Conflict, Forbidden, InvalidInput, ProtocolError, QuotaExceeded, TooLarge
from diamond.core.faults import fault_point
from diamond.core.images import ImageUse
from diamond.core.pools import PoolPlace
from diamond.core.reasons import Reason
from diamond.core.states import FINAL_JOB_STATES, Desired, JobState, TaskState, job_advances
from diamond.core.tasks import Output, TaskSpec
from diamond.core.wire import (
    MAX_REPORTED,
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
from diamond.server.services import (
    approvals,
    chains,
    holdings,
    image_work,
    kept,
    lifecycle,
    pilots,
    policies,
    pool_placing,
    presence,
    proofs,
    quotas,
    snapshots,
    withdrawals,
)
from diamond.server.services.context import Context
from diamond.server.services.snapshots import is_online
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow, JobRow, TaskRow, UserRow, table_of
from diamond.server.store.series import SOURCES

_FINAL = [state.value for state in FINAL_JOB_STATES]
_MAX_DETAIL = 4000
_MAX_OUTPUT_BYTES = 2**50  # of one job; more would be no number that a database can add up
_MAX_STATUS = 255  # of a process, and more than there are signals
_LATEST = 4e9  # a Unix time after which no agent's clock is believed
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
    facts, cut = bounds.fitted(message.facts)
    facts = replace(facts, cut=cut)
    with ctx.db.write() as session:
        row = presence.locked(session, endpoint_id)
        if row.instance not in (None, instance):
            if not message.take_over:
                refuse_second_home(ctx, session, row)
            release(ctx, session, row)
            proofs.forget(row)  # it may be another machine now
            approvals.ask_anew(session, row, ctx.clock(), has_new_owner=False)
        row.instance = instance or None
        facts = policies.bounded(facts, ctx.clock())
        policies.note_change(session, row, facts, ctx.clock())
        row.facts = encode(snapshots.with_last_known(facts, row.facts))
        presence.touch(ctx, session, row)
        name, owner = row.name, session.get_one(UserRow, row.owner_id).name
    # Tasks may have waited for exactly these facts.
    ctx.hub.notify("planning", "events")
    from diamond import __version__

    return Welcome(
        endpoint_id=endpoint_id,
        endpoint_name=name,
        epoch=ctx.epoch,
        server_version=__version__,
        owner=owner,
        streams=STREAMS,
    )


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


def goodbye(ctx: Context, endpoint_id: str, instance: str = "") -> None:
    """The agent stops on purpose: its endpoint is offline at once, not a minute later."""
    with ctx.db.write() as session:
        row = presence.locked(session, endpoint_id)
        presence.check_instance(row, instance)
        if not is_online(row.last_seen_at, ctx.clock()):
            return  # it has said so before
        row.last_seen_at = row.silence_told = ctx.clock() - ONLINE_WITHIN_S
        data = {"name": row.name}
        at = ctx.clock()
        record_event(session, at=at, kind="endpoint.offline", owner_id=row.owner_id, endpoint_id=row.id, data=data)
    ctx.hub.notify("planning", "events")


# Built once, like all that agents ask often: putting a query together costs more than running it.
_CHANGED = (
    JobRow.endpoint_id == sa.bindparam("endpoint"),
    JobRow.state.not_in(_FINAL),
    JobRow.revision > sa.bindparam("since"),
)
_DELIVER = (
    sa.update(table_of(JobRow)).where(*_CHANGED, JobRow.delivered_at.is_(None)).values(delivered_at=sa.bindparam("now"))
)
_ORDERED = (
    sa.select(JobRow, TaskRow, UserRow.name)
    .join(TaskRow, TaskRow.id == JobRow.task_id)
    .join(UserRow, UserRow.id == TaskRow.owner_id)
    .where(*_CHANGED)
    .order_by(JobRow.revision)
    .options(undefer(TaskRow.spec), undefer(TaskRow.work))
)


def desired(
    ctx: Context, endpoint_id: str, epoch: str, since: int, instance: str = "", *, is_call: bool = True
) -> DesiredState:
    """What should be, of the jobs whose order changed after `since` (all live ones for another epoch or 0).

    `is_call` is False when a waiting call looks again: that says nothing about whether the agent is still there.
    """
    full = epoch != ctx.epoch or since <= 0
    with ctx.db.read() as session:
        told = presence.told(session, endpoint_id, instance)
        if told is None:
            raise presence.gone()
        if not full and told.revision <= since and not (is_call and presence.is_stale(ctx, told.last_seen_at)):
            return DesiredState(epoch=ctx.epoch, revision=told.revision, full=False)
    with ctx.db.write() as session:
        # Noted before they are told: a cancel may then no longer assume that nobody knows of the job.
        endpoint = presence.locked(session, endpoint_id)
        revision = endpoint.revision
        if is_call and presence.is_stale(ctx, endpoint.last_seen_at):
            presence.touch(ctx, session, endpoint)
        topics = withdrawals.take_back(ctx, session, endpoint_id)
        session.flush()
        asked = {"endpoint": endpoint_id, "since": -1 if full else since}
        session.connection().execute(_DELIVER, {**asked, "now": ctx.clock()})
        rows = session.execute(_ORDERED, asked).all()
        askers = _askers(session, [task for _, task, _ in rows])
        orders = [_order(job, task, askers.get(task.id, user)) for job, task, user in rows]
    ctx.hub.notify(*topics)
    held = ctx.streams.sizes([order.job_id for order in orders]) if full else {}
    fault_point("server.ordering")
    return DesiredState(
        epoch=ctx.epoch,
        revision=revision,
        full=full,
        orders=tuple(_with_received(order, held.get(order.job_id, {})) for order in orders),
    )


def _askers(session: Session, tasks: list[TaskRow]) -> dict[str, str]:
    """Names of those for whom a task is done, by its id, where that is not its owner (see `image_work`)."""
    ids = {task.id: asker for task in tasks if (asker := image_work.asker_of(task)) != task.owner_id}
    if not ids:
        return {}
    named = session.execute(sa.select(UserRow.id, UserRow.name).where(UserRow.id.in_(set(ids.values()))))
    names = {str(key): str(name) for key, name in named}
    return {task_id: names[asker] for task_id, asker in ids.items() if asker in names}


def _order(job: JobRow, task: TaskRow, user: str) -> JobOrder:
    spec = decode(TaskSpec, task.spec)
    place = decode(PoolPlace, job.place) if job.place else None
    return JobOrder(
        job_id=job.id,
        task_id=task.id,
        task_name=task.name,
        attempt=job.attempt,
        desired=Desired(job.desired),
        spec=pool_placing.spec_there(spec, place) if place is not None else spec,
        time_limit_s=job.time_limit_s,
        partition=job.partition,
        gpu_type=job.gpu_type,
        chained=job.chained,
        continues=job.continues or "",
        after=job.after or "",
        user=user,
        image=decode(ImageUse, job.image) if job.image else None,
        work=image_work.order_of(task) if task.kind != "command" else None,
        pilot=pilots.order_of(task) if task.kind == "pilot" else None,
        place=place,
    )


def _with_received(order: JobOrder, received: dict[str, int]) -> JobOrder:
    if not received:
        return order
    return JobOrder(**{**order.__dict__, "received": received})


def check_upload(ctx: Context, endpoint_id: str, more_bytes: int = 0, digests: Collection[str] = ()) -> None:
    """What an agent brings are results of jobs it has in hand: without any, it has nothing to bring.

    Raises:
        Forbidden: it has none.
        TooLarge: its jobs would bring more than `output_cap_bytes` each.
        QuotaExceeded: all of them are of users or projects that have no room for it.
    """
    live = [JobRow.endpoint_id == endpoint_id, JobRow.state.not_in(_FINAL), JobRow.delivered_at.is_not(None)]
    whose = sa.select(TaskRow.owner_id, TaskRow.project_id, sa.func.count(), sa.func.min(JobRow.created_at))
    with ctx.db.read() as session:
        found = session.execute(
            whose.join(TaskRow, TaskRow.id == JobRow.task_id)
            .where(*live)
            .group_by(TaskRow.owner_id, TaskRow.project_id)
        ).all()
        if not found:
            raise Forbidden(
                "this endpoint has no live job whose results could be uploaded", hint="upload before the job's end"
            )
        if more_bytes <= 0:
            return
        since, num_jobs = min(row[3] for row in found), sum(row[2] for row in found)
        brought = kept.brought_bytes(session, endpoint_id, since) + ctx.blobs.unfinished_bytes(endpoint_id, digests)
        if brought + more_bytes > num_jobs * ctx.caps.output_bytes:
            raise TooLarge(
                f"the {num_jobs} live jobs here have brought {brought} bytes that are not yet counted as results; "
                f"with these {more_bytes} it would be more than {ctx.caps.output_bytes} for each",
                hint="the files stay at the endpoint; the operator can raise `output_cap_bytes`",
            )
        full = [quotas.over_storage(session, owner, project, brought + more_bytes) for owner, project, *_ in found]
        if all(full):
            raise QuotaExceeded(
                f"{', '.join(sorted({who for some in full for who in some}))}: no storage is left for these results",
                hint="the files stay at the endpoint; remove images or tasks that are no longer needed",
            )


def report(ctx: Context, endpoint_id: str, message: Report, instance: str = "") -> ReportAck:
    """Take in what is. Bytes first, states after: a final state is never visible before its log."""
    if message.epoch != ctx.epoch:
        return ReportAck(epoch=ctx.epoch)  # the agent sees the difference and introduces itself anew
    named = {item.job_id for item in message.jobs} | {item.job_id for item in message.streams}
    for field, count in (("jobs", len(message.jobs)), ("streams", len(message.streams))):
        if count > MAX_REPORTED:
            raise TooLarge(f"has {count} entries", hint=f"send at most {MAX_REPORTED} at a time", field=field)
    ctx.ingestion.report(endpoint_id, sum(len(chunk.data) * 3 // 4 for chunk in message.streams))
    own, task_of, told = _own_jobs(ctx, endpoint_id, named, instance)
    received, later = _store_streams(ctx, message.streams, own)
    fault_point("server.receiving")
    states = dict(own)
    topics: set[str] = set()
    # Of a job whose bytes were not taken no state is believed either: its last one comes with the end of its log.
    jobs = tuple(item for item in message.jobs if item.job_id not in later)
    news = tuple(item for item in jobs if item.job_id in own and not own[item.job_id].is_final)
    usage = encode(bounds.fitted(message.usage)[0]) if message.usage is not None else None
    if news or (
        usage is not None and (told is None or usage != told.usage or presence.is_stale(ctx, told.last_seen_at))
    ):
        with ctx.db.write() as session:
            endpoint = presence.locked(session, endpoint_id)
            presence.touch(ctx, session, endpoint)
            if usage is not None:
                endpoint.usage = usage
            if news:
                topics |= _apply(ctx, session, news, states)
            session.flush()
            fault_point("server.committing")
    fault_point("server.received")
    topics |= {f"task:{task_of[job_id]}" for job_id in received}
    ctx.hub.notify(*topics)
    return ReportAck(
        epoch=ctx.epoch,
        states={item.job_id: states[item.job_id] for item in jobs if item.job_id in states},
        received=received,
        unknown=tuple(sorted(named - own.keys())),
    )


_NAMED = JobRow.id.in_(sa.bindparam("named", expanding=True))
_OWN_JOBS = sa.select(JobRow.id, JobRow.state, JobRow.task_id).where(
    JobRow.endpoint_id == sa.bindparam("endpoint"), _NAMED
)
_TASKS = (
    sa.select(TaskRow)
    .where(TaskRow.id.in_(sa.select(JobRow.task_id).where(_NAMED)))
    .order_by(TaskRow.id)
    .options(undefer(TaskRow.spec))
    .with_for_update()
)
_JOBS = sa.select(JobRow).where(_NAMED).order_by(JobRow.id).with_for_update()


def _own_jobs(
    ctx: Context, endpoint_id: str, named: set[str], instance: str
) -> tuple[dict[str, JobState], dict[str, str], presence.Told | None]:
    """State and task id of those jobs that are this endpoint's, and what was said of it before."""
    with ctx.db.read() as session:
        told = presence.told(session, endpoint_id, instance)
        asked = {"endpoint": endpoint_id, "named": list(named)}
        rows = session.execute(_OWN_JOBS, asked).all() if named else []
    return {job: JobState(state) for job, state, _ in rows}, {job: task for job, _, task in rows}, told


def _store_streams(
    ctx: Context, chunks: tuple[StreamChunk, ...], own: dict[str, JobState]
) -> tuple[dict[str, dict[str, int]], set[str]]:
    """How much is held now of the streams that are named, and the jobs that send too fast to be listened to."""
    received: dict[str, dict[str, int]] = {}
    heavy: set[str] = set()
    later: set[str] = set()
    for chunk in chunks:
        if chunk.job_id not in own:
            continue
        if chunk.stream not in STREAMS or chunk.offset < 0:
            raise ProtocolError(f"no stream {chunk.stream[:40]!r} at offset {chunk.offset}")
        try:
            data = chunk.raw()
        except ValueError as error:
            raise ProtocolError("stream bytes are not base64") from error
        if chunk.job_id in later or not ctx.ingestion.takes(chunk.job_id, len(data)):
            later.add(chunk.job_id)
            received.setdefault(chunk.job_id, {})[chunk.stream] = ctx.streams.size(chunk.job_id, chunk.stream)
            continue
        size = ctx.streams.append(chunk.job_id, chunk.stream, chunk.offset, data)
        if chunk.stream in SOURCES:
            ctx.series.gather(chunk.job_id, chunk.stream, chunk.offset, size)
        if kept.is_due(chunk.offset, size):
            heavy.add(chunk.job_id)
        received.setdefault(chunk.job_id, {})[chunk.stream] = size
    for job_id in heavy:
        kept.weigh(ctx, job_id)
    return received, later


def _apply(ctx: Context, session: Session, items: tuple[JobReport, ...], states: dict[str, JobState]) -> set[str]:
    """Advance jobs and their tasks; `states` becomes what is now true."""
    wanted = [item.job_id for item in items if item.job_id in states]
    tasks = {row.id: row for row in session.scalars(_TASKS, {"named": wanted})}
    jobs = {row.id: row for row in session.scalars(_JOBS, {"named": wanted})}
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
            if task.pool_id is not None:
                topics |= {"pools", f"pool:{task.pool_id}"}
        states[job.id] = JobState(job.state)
    return topics


def _advance(ctx: Context, session: Session, task: TaskRow, job: JobRow, item: JobReport) -> set[str] | None:
    """Take in a report; topics to wake beside the usual ones, None when it was no news."""
    newest = job.attempt == task.attempt
    was = JobState(job.state)
    if item.state is JobState.QUEUED and (was is JobState.QUEUED or job_advances(was, item.state)):
        job.pending_reason = _text(item.pending_reason, 500)
        job.expected_start_at = _time(item.expected_start_at)
        if newest and TaskState(task.state) is TaskState.QUEUED:
            task.pending_reason, task.expected_start_at = job.pending_reason, job.expected_start_at
    if item.state.value == job.state and not item.state.is_final:
        _note_place(job, item)  # a scheduler may say later where a job runs than that it runs
    if not job_advances(was, item.state):
        return None
    now = ctx.clock()
    job.state = item.state.value
    if item.state is not JobState.QUEUED:  # it waits no longer
        job.pending_reason, job.expected_start_at = "", None
    job.detail = _text(item.detail, _MAX_DETAIL)
    job.exit_code, job.signal = _status(item.exit_code), _status(item.signal)
    _note_place(job, item)
    job.queued_at = _past(item.queued_at, now) or job.queued_at
    job.started_at = _past(item.started_at, now) or job.started_at
    job.ended_at = _past(item.ended_at, now) or job.ended_at
    if item.state.is_final:
        job.reason = (item.reason or _DEFAULT_REASON[item.state]).value
        job.ended_at = job.ended_at or now
        proofs.note(session.get_one(EndpointRow, job.endpoint_id), task, job)
        job.stream_bytes = kept.held_bytes(ctx, job.id)
        if newest:
            _keep_outputs(ctx, session, task, job, _brought(session, job.endpoint_id, _checked_outputs(item)))
    return chains.follow(ctx, session, task, job)


def _keep_outputs(ctx: Context, session: Session, task: TaskRow, job: JobRow, outputs: list[Output]) -> None:
    """These are the task's outputs now, instead of those of the job before; the difference is what it stores more.

    What counts is what is here, not what the agent says of it: each blob once, as large as it is.
    """
    if task.kind == "command":
        counted = sa.select(sa.func.coalesce(sa.func.sum(JobRow.stored_bytes), 0))
        before = session.execute(counted.where(JobRow.task_id == task.id, JobRow.id != job.id)).scalar_one()
        digests = {f"sha256:{entry.sha256}" for entry in outputs if entry.stored}
        job.stored_bytes = sum(ctx.blobs.size(digest) for digest in digests) - int(before)
    task.outputs = [encode(entry) for entry in outputs]


def _brought(session: Session, endpoint_id: str, outputs: list[Output]) -> list[Output]:
    """Only what this endpoint sent is here for it: who reports the digest of another's file does not get it so."""
    sent = holdings.held_in(session, endpoint_id, [f"sha256:{entry.sha256}" for entry in outputs if entry.stored])
    return [replace(entry, stored=entry.stored and f"sha256:{entry.sha256}" in sent) for entry in outputs]


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


def _past(raw: float | None, now: float) -> float | None:
    """When something was: now at the latest, whatever a clock there says. Durations are reckoned from it."""
    found = _time(raw)
    return min(found, now) if found is not None else None


def _status(raw: int | None) -> int | None:
    """An exit status or the number of a signal, if it can be one: not every number fits into a database."""
    return raw if raw is not None and 0 <= raw <= _MAX_STATUS else None


def _checked_outputs(item: JobReport) -> list[Output]:
    """An agent is not believed about paths and digests: an entry that leads elsewhere is left out."""
    checked: list[Output] = []
    total = listed = 0
    for entry in item.outputs[: kept.MAX_OUTPUTS]:
        try:
            normal = check_relative_path(entry.path, "output") == entry.path
        except InvalidInput:
            continue
        named = is_digest(f"sha256:{entry.sha256}") or not (entry.sha256 or entry.stored)
        listed += len(entry.path.encode())
        if listed > kept.MAX_LISTED_BYTES:
            break
        if normal and named and 0 <= entry.size_bytes <= _MAX_OUTPUT_BYTES - total:
            checked.append(entry)
            total += entry.size_bytes
    return checked
