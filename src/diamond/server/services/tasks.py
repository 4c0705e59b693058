"""Creating, reading and cancelling tasks. How a task moves on afterwards is in `lifecycle` and `planning`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import digest_of_ref
from diamond.core.codec import decode, encode
from diamond.core.durations import format_duration
from diamond.core.errors import IdempotencyMismatch, InvalidInput, NotFound, TooLarge
from diamond.core.faults import fault_point
from diamond.core.ids import is_id, new_id
from diamond.core.jobs import Job
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Output, Task, TaskSpec
from diamond.server.services import bundles, chains, lifecycle, planning
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, IdempotencyRow, JobRow, TaskRow

MAX_KEY = 200
MAX_PAGE = 1000
MAX_BATCH = 1000


def create(ctx: Context, user_id: str, raw_spec: object, idempotency_key: str | None = None) -> tuple[Task, bool]:
    """Make a task; True when this call made it, False when an earlier call with the same key had.

    Raises:
        InvalidInput: the spec cannot be accepted; nothing was written.
        IdempotencyMismatch: the key was used for another spec.
    """
    spec = checked_spec(ctx, raw_spec)
    if idempotency_key is not None:
        _check_key(idempotency_key)
    ((task, made),) = _create_all(ctx, user_id, [spec], [idempotency_key])
    return task, made


def create_many(
    ctx: Context, user_id: str, raw_specs: Sequence[object], idempotency_key: str | None = None
) -> tuple[list[Task], bool]:
    """Make several tasks, all or none; True when this call made any.

    Raises:
        InvalidInput: naming the first spec that cannot be accepted, by its number from 0; nothing was written.
        IdempotencyMismatch: the key was used for other specs.
    """
    if not 1 <= len(raw_specs) <= MAX_BATCH:
        raise TooLarge(f"has {len(raw_specs)} tasks; 1 to {MAX_BATCH} are allowed", field="specs")
    keys: list[str | None] = [None] * len(raw_specs)
    if idempotency_key is not None:
        _check_key(idempotency_key)
        keys = [f"{idempotency_key}/{number}" for number in range(len(raw_specs))]
    specs = []
    for number, raw in enumerate(raw_specs):
        try:
            specs.append(checked_spec(ctx, raw))
        except InvalidInput as error:
            raise _numbered(error, number) from error
    done = _create_all(ctx, user_id, specs, keys, is_batch=True)
    return [task for task, _ in done], any(made for _, made in done)


def _numbered(error: InvalidInput, number: int) -> InvalidInput:
    field = f"specs[{number}].{error.field}" if error.field else f"specs[{number}]"
    return type(error)(error.message, hint=error.hint, field=field)


def _create_all(
    ctx: Context, user_id: str, specs: Sequence[TaskSpec], keys: Sequence[str | None], *, is_batch: bool = False
) -> list[tuple[Task, bool]]:
    """Each task, and whether it was made now, in one transaction."""
    hashes = [_hash(spec, len(specs) if is_batch else 0) for spec in specs]
    done: list[tuple[Task | str, bool]] = []
    topics: set[str] = set()
    try:
        with ctx.db.write() as session:
            if len(specs) > 1:
                planning.begin_batch(session)
            # Looked up inside: of two requests at once, the second waits here for the first.
            known = _lookup_keys(session, user_id, keys, hashes)
            for number, (spec, key, body_hash) in enumerate(zip(specs, keys, hashes, strict=True)):
                if (earlier := known.get(key)) is not None:
                    done.append((earlier, False))
                    continue
                try:
                    task, woken = _insert(ctx, session, user_id, spec)
                except InvalidInput as error:
                    raise (_numbered(error, number) if len(specs) > 1 else error) from error
                topics |= set(woken)
                if key is not None:
                    _remember_key(ctx, session, user_id, key, body_hash, task.id)
                done.append((task, True))
            if len(specs) > 1:
                planning.end_batch(session)
            fault_point("server.creating")
    except exc.IntegrityError:
        # PostgreSQL: both requests got past the look-up; the key's uniqueness decided, and the other one won.
        with ctx.db.read() as session:
            known = _lookup_keys(session, user_id, keys, hashes)
        if not all(key in known for key in keys):
            raise
        done, topics = [(known[key], False) for key in keys], set()
    fault_point("server.created")
    ctx.hub.notify(*topics)
    return [(get(ctx, user_id, task) if isinstance(task, str) else task, made) for task, made in done]


def checked_spec(ctx: Context, raw_spec: object, *, uploaded: bool = True) -> TaskSpec:
    """Validate a spec; with `uploaded`, also that every bundle it names is wholly here."""
    spec = TaskSpec.parse(raw_spec)
    if uploaded:
        spec.check_uploaded()
        for target, ref in spec.bundle_refs.items():
            bundles.require(ctx, digest_of_ref(ref), "workdir" if target == "." else f"file_mounts.{target}")
        if spec.workdir:
            bundles.check_mounts(ctx, digest_of_ref(spec.workdir), spec.file_mounts)
    return spec


def _insert(ctx: Context, session: Session, user_id: str, spec: TaskSpec) -> tuple[Task, list[str]]:
    now = ctx.clock()
    row = TaskRow(
        id=new_id("tsk"),
        owner_id=user_id,
        name=spec.name or _default_name(spec),
        spec=encode(spec),
        state=TaskState.PENDING.value,
        desired=Desired.RUN.value,
        priority=spec.priority,
        created_at=now,
        attempt=0,
        failures=0,
        detail="",
        pending_reason="",
        outputs=[],
    )
    session.add(row)
    lifecycle.record(session, row, "task.created", now, {"name": row.name})
    placed = planning.place_task(ctx, session, row, spec, refuse_impossible=True)
    known = {placed.endpoint.id: _Where.of(placed.endpoint, now)} if placed.endpoint else {}
    jobs = (to_job(placed.job, known),) if placed.job else ()
    return to_task(row, known, spec=spec, jobs=jobs), placed.topics


def _remember_key(ctx: Context, session: Session, user_id: str, key: str, body_hash: str, task_id: str) -> None:
    row = IdempotencyRow(owner_id=user_id, key=key, body_hash=body_hash, task_id=task_id, created_at=ctx.clock())
    planning.add_after_task(session, row)


def _default_name(spec: TaskSpec) -> str:
    """Something recognisable in a list: the first word of the command."""
    words = spec.run.split()
    word = words[0].rsplit("/", 1)[-1] if words else "task"
    return "".join(c for c in word if c.isprintable())[:40] or "task"


def _check_key(key: str) -> None:
    if not key or len(key) > MAX_KEY or not key.isprintable():
        raise InvalidInput(
            f"must be 1 to {MAX_KEY} printable characters", hint="a random UUID is a good key", field="Idempotency-Key"
        )


def _hash(spec: TaskSpec, batch: int) -> str:
    """What a key stands for: a spec, and of how large a batch it was part (0: of none)."""
    text = json.dumps(encode(spec), sort_keys=True) + (f" of {batch}" if batch else "")
    return hashlib.sha256(text.encode()).hexdigest()


def _lookup_keys(
    session: Session, user_id: str, keys: Sequence[str | None], hashes: Sequence[str]
) -> dict[str | None, str]:
    """What was made with those of the keys that were used before."""
    wanted = {key: body_hash for key, body_hash in zip(keys, hashes, strict=True) if key is not None}
    if not wanted:
        return {}
    query = sa.select(IdempotencyRow).where(IdempotencyRow.owner_id == user_id, IdempotencyRow.key.in_(list(wanted)))
    rows = session.scalars(query).all()
    for row in rows:
        if row.body_hash != wanted[row.key]:
            raise IdempotencyMismatch(
                f"the key {row.key!r} was used before for another task ({row.task_id})",
                hint="use a new key for a new task",
                field="Idempotency-Key",
            )
    return {row.key: row.task_id for row in rows}


def plan(ctx: Context, user_id: str, raw_spec: object) -> dict[str, Any]:
    """What `create` would do, without doing it. Files need not be uploaded yet."""
    spec = checked_spec(ctx, raw_spec, uploaded=False)
    with ctx.db.read() as session:
        return planning.explain(ctx, session, spec)


def get(ctx: Context, user_id: str, task_id: str) -> Task:
    """One task with its spec, jobs and outputs."""
    with ctx.db.read() as session:
        row = find(session, user_id, task_id, undefer(TaskRow.spec), undefer(TaskRow.outputs))
        known = whereabouts(ctx, session)
        jobs = session.scalars(sa.select(JobRow).where(JobRow.task_id == task_id).order_by(JobRow.attempt)).all()
        return to_task(
            row,
            known,
            spec=decode(TaskSpec, row.spec),
            jobs=tuple(to_job(job, known) for job in jobs),
            outputs=tuple(decode(Output, item) for item in row.outputs),
        )


def find(session: Session, user_id: str, task_id: str, *options: Any, for_update: bool = False) -> TaskRow:
    query = sa.select(TaskRow).where(TaskRow.id == task_id, TaskRow.owner_id == user_id).options(*options)
    if for_update:
        query = query.with_for_update()
    row = session.scalars(query).one_or_none() if is_id(task_id, "tsk") else None
    if row is None:
        raise NotFound(f"there is no task {task_id[:60]!r}", hint="`diamond ps -a` lists your tasks")
    return row


def list_tasks(
    ctx: Context,
    user_id: str,
    states: Sequence[TaskState] = (),
    name: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    id_prefix: str | None = None,
) -> tuple[list[Task], str | None, int]:
    """A page of tasks, newest first; the cursor of the next page; how many there are in all."""
    if not 1 <= limit <= MAX_PAGE:
        raise TooLarge(f"must be from 1 to {MAX_PAGE}", field="limit")
    if cursor is not None and not is_id(cursor, "tsk"):
        raise InvalidInput("is not a cursor this server gave out", hint="start again without it", field="cursor")
    where: list[Any] = [TaskRow.owner_id == user_id]
    if states:
        where.append(TaskRow.state.in_([state.value for state in states]))
    if name is not None:
        where.append(TaskRow.name == name)
    if id_prefix is not None:
        where.append(TaskRow.id.startswith(id_prefix, autoescape=True))
    with ctx.db.read() as session:
        total = session.execute(sa.select(sa.func.count()).select_from(TaskRow).where(*where)).scalar_one()
        page = sa.select(TaskRow).where(*where).order_by(TaskRow.id.desc()).limit(limit + 1)
        if cursor is not None:
            page = page.where(TaskRow.id < cursor)
        rows = session.scalars(page).all()
        known = whereabouts(ctx, session)
        tasks = [to_task(row, known) for row in rows[:limit]]
    return tasks, (tasks[-1].id if len(rows) > limit else None), total


def cancel(ctx: Context, user_id: str, task_id: str) -> Task:
    """Ask for a task to be stopped; harmless when it already ended or was asked before."""
    with ctx.db.write() as session:
        seen = find(session, user_id, task_id)
        if seen.endpoint_id:
            # Endpoint before task: the order in which every transaction takes its locks.
            session.execute(sa.select(EndpointRow.id).where(EndpointRow.id == seen.endpoint_id).with_for_update())
        session.expire(seen)
        topics = _cancel(ctx, session, find(session, user_id, task_id, for_update=True))
    ctx.hub.notify(*topics)
    return get(ctx, user_id, task_id)


def _cancel(ctx: Context, session: Session, task: TaskRow) -> list[str]:
    if TaskState(task.state).is_final or task.desired == Desired.CANCEL:
        return []
    now = ctx.clock()
    task.desired = Desired.CANCEL.value
    lifecycle.record(session, task, "task.cancel_requested", now)
    job = session.scalars(
        sa.select(JobRow).where(JobRow.task_id == task.id, JobRow.attempt == task.attempt).with_for_update()
    ).one_or_none()
    topics = [f"task:{task.id}", "events"]
    ahead = session.scalars(sa.select(JobRow).where(JobRow.task_id == task.id, JobRow.attempt > task.attempt)).all()
    topics += chains.drop(ctx, session, list(ahead))
    if job is None or JobState(job.state).is_final:
        lifecycle.end_task(session, task, now, reason=Reason.CANCELLED)
    elif job.delivered_at is None:
        # No agent has ever been told of it, so there is nobody to ask.
        job.state, job.reason, job.ended_at = JobState.CANCELLED.value, Reason.CANCELLED.value, now
        lifecycle.end_task(session, task, now, reason=Reason.CANCELLED)
    else:
        job.desired = Desired.CANCEL.value
        job.revision = chains.next_revision(session, job.endpoint_id)
        topics.append(f"endpoint:{job.endpoint_id}")
    return topics


def find_job(ctx: Context, user_id: str, task_id: str, attempt: int | None = None) -> tuple[Task, Job | None]:
    """A task (without its spec) and one of its jobs: the newest, or that of `attempt`."""
    with ctx.db.read() as session:
        row = find(session, user_id, task_id)
        known = whereabouts(ctx, session)
        wanted = row.attempt if attempt is None else attempt
        job = session.scalars(
            sa.select(JobRow).where(JobRow.task_id == task_id, JobRow.attempt == wanted)
        ).one_or_none()
        if job is None and attempt is not None:
            raise NotFound(
                f"task {task_id} has no attempt {attempt}",
                hint=f"it has had {row.attempt}; they count from 1",
                field="attempt",
            )
        return to_task(row, known), to_job(job, known) if job else None


def output(ctx: Context, user_id: str, task_id: str, path: str) -> Output:
    """The output file of that name."""
    task = get(ctx, user_id, task_id)
    for item in task.outputs:
        if item.path == path:
            if not item.stored:
                run_dir = task.jobs[-1].run_dir if task.jobs else ""
                raise NotFound(
                    f"{path!r} is too large to be kept at the server ({item.size_bytes} bytes)",
                    hint=f"it is on endpoint {task.endpoint} in {run_dir}/work",
                    field="path",
                )
            return item
    have = ", ".join(item.path for item in task.outputs[:20]) or "none"
    raise NotFound(f"task {task_id} has no output {path[:80]!r}", hint=f"its outputs: {have}", field="path")


def counts(ctx: Context) -> dict[str, int]:
    """How many tasks are in each state, for monitoring."""
    with ctx.db.read() as session:
        rows = session.execute(sa.select(TaskRow.state, sa.func.count()).group_by(TaskRow.state)).all()
        return {str(state): int(number) for state, number in rows}


class _Where(NamedTuple):
    """An endpoint's name, and for how long its agent has been silent (None: it is online)."""

    name: str
    silent_s: float | None

    @staticmethod
    def of(row: EndpointRow, now: float) -> _Where:
        if planning.is_online(row.last_seen_at, now):
            return _Where(row.name, None)
        return _Where(row.name, now - (row.last_seen_at or row.created_at))

    def explain(self, state: TaskState) -> str:
        silent = f"endpoint {self.name} is offline: its agent has been silent for {format_duration(self.silent_s or 0)}"
        if state is TaskState.QUEUED:
            return f"{silent}; the task waits until it returns"
        return f"{silent}; what is shown may be out of date"


def whereabouts(ctx: Context, session: Session) -> dict[str, _Where]:
    return {row.id: _Where.of(row, ctx.clock()) for row in session.scalars(sa.select(EndpointRow))}


def to_task(row: TaskRow, endpoints: dict[str, _Where], **detail: Any) -> Task:
    where = endpoints.get(row.endpoint_id) if row.endpoint_id else None
    state = TaskState(row.state)
    stuck = where is not None and where.silent_s is not None and not state.is_final and state is not TaskState.PENDING
    return Task(
        id=row.id,
        name=row.name,
        state=state,
        desired=Desired(row.desired),
        reason=Reason(row.reason) if row.reason else None,
        detail=row.detail,
        endpoint=where.name if where else None,
        attempt=row.attempt,
        exit_code=row.exit_code,
        priority=row.priority,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        next_attempt_at=row.next_attempt_at,
        pending_reason=where.explain(state) if where and stuck else row.pending_reason,
        expected_start_at=row.expected_start_at,
        **detail,
    )


def to_job(row: JobRow, endpoints: dict[str, _Where]) -> Job:
    return Job(
        id=row.id,
        task_id=row.task_id,
        attempt=row.attempt,
        endpoint=endpoints[row.endpoint_id].name if row.endpoint_id in endpoints else row.endpoint_id,
        state=JobState(row.state),
        reason=Reason(row.reason) if row.reason else None,
        detail=row.detail,
        exit_code=row.exit_code,
        signal=row.signal,
        scheduler_id=row.scheduler_id,
        hosts=tuple(row.hosts),
        run_dir=row.run_dir,
        partition=row.partition,
        continues=row.continues,
        pending_reason=row.pending_reason,
        expected_start_at=row.expected_start_at,
        created_at=row.created_at,
        queued_at=row.queued_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )
