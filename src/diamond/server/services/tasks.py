"""Creating, reading and cancelling tasks. How a task moves on afterwards is in `lifecycle` and `planning`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import digest_of_ref
from diamond.core.codec import decode, encode
from diamond.core.errors import IdempotencyMismatch, InvalidInput, NotFound, TooLarge
from diamond.core.faults import fault_point
from diamond.core.ids import is_id, new_id
from diamond.core.jobs import Job
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Output, Task, TaskSpec
from diamond.server.services import (
    bundles,
    chains,
    dry_runs,
    image_placing,
    image_progress,
    images,
    lifecycle,
    planning,
    snapshots,
    task_views,
)
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, IdempotencyRow, ImageRow, JobRow, TaskRow

MAX_KEY = 200
MAX_PAGE = 1000
MAX_BATCH = 1000
KINDS = ("command", "build", "transfer")


def create(ctx: Context, user_id: str, raw_spec: object, idempotency_key: str | None = None) -> tuple[Task, bool]:
    """Make a task; True when this call made it, False when an earlier call with the same key had.

    Raises:
        InvalidInput: the spec cannot be accepted; nothing was written.
        IdempotencyMismatch: the key was used for another spec.
    """
    spec = checked_spec(ctx, raw_spec)
    if idempotency_key is not None:
        check_key(idempotency_key)
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
        check_key(idempotency_key)
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
            if any(spec.image or spec.resources.image_id for spec in specs):
                snapshots.endpoints(session, lock=True)  # an image may have to be brought
            if len(specs) > 1:
                planning.begin_batch(session)
            # Looked up inside: of two requests at once, the second waits here for the first.
            known = lookup_keys(session, user_id, keys, hashes)
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
            known = lookup_keys(session, user_id, keys, hashes)
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
        for target, ref in (spec.image.files if spec.image else {}).items():
            bundles.require(ctx, digest_of_ref(ref), f"image.files.{target}")
        if spec.workdir:
            bundles.check_mounts(ctx, digest_of_ref(spec.workdir), spec.file_mounts)
    return spec


def _insert(ctx: Context, session: Session, user_id: str, spec: TaskSpec) -> tuple[Task, list[str]]:
    now = ctx.clock()
    image, _ = image_placing.resolve(ctx, session, user_id, spec)
    if image is not None:
        session.add(image)  # of a recipe nobody has had before
    row = TaskRow(
        id=new_id("tsk"),
        owner_id=user_id,
        name=spec.name or _default_name(spec),
        kind="command",
        work=None,
        image_id=image.id if image else None,
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
    known = {placed.endpoint.id: task_views.Where.of(placed.endpoint, now)} if placed.endpoint else {}
    jobs = (task_views.to_job(placed.job, known),) if placed.job else ()
    return task_views.to_task(
        row, known, spec=spec, jobs=jobs, image=task_views.image_name(session, row, spec, user_id)
    ), placed.topics


def _remember_key(ctx: Context, session: Session, user_id: str, key: str, body_hash: str, task_id: str) -> None:
    row = IdempotencyRow(owner_id=user_id, key=key, body_hash=body_hash, task_id=task_id, created_at=ctx.clock())
    planning.add_after_task(session, row)


def _default_name(spec: TaskSpec) -> str:
    """Something recognisable in a list: the first word of the command."""
    words = spec.run.split()
    word = words[0].rsplit("/", 1)[-1] if words else "task"
    return "".join(c for c in word if c.isprintable())[:40] or "task"


def check_key(key: str) -> None:
    if not key or len(key) > MAX_KEY or not key.isprintable():
        raise InvalidInput(
            f"must be 1 to {MAX_KEY} printable characters", hint="a random UUID is a good key", field="Idempotency-Key"
        )


def _hash(spec: TaskSpec, batch: int) -> str:
    """What a key stands for: a spec, and of how large a batch it was part (0: of none)."""
    text = json.dumps(encode(spec), sort_keys=True) + (f" of {batch}" if batch else "")
    return hashlib.sha256(text.encode()).hexdigest()


def lookup_keys(
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
        return dry_runs.explain(ctx, session, user_id, spec)


def get(ctx: Context, user_id: str, task_id: str) -> Task:
    """One task with its spec, jobs and outputs."""
    with ctx.db.read() as session:
        row = find(session, user_id, task_id, undefer(TaskRow.spec), undefer(TaskRow.outputs))
        known = task_views.whereabouts(ctx, session)
        jobs = session.scalars(sa.select(JobRow).where(JobRow.task_id == task_id).order_by(JobRow.attempt)).all()
        spec = decode(TaskSpec, row.spec)
        if row.image_id and row.state == TaskState.PENDING:
            row.pending_reason += image_progress.stage_text(ctx, session, row)
        return task_views.to_task(
            row,
            known,
            spec=spec,
            image=task_views.image_name(session, row, spec, user_id),
            jobs=tuple(task_views.to_job(job, known) for job in jobs),
            outputs=tuple(decode(Output, item) for item in row.outputs),
        )


def find(session: Session, user_id: str, task_id: str, *options: Any, for_update: bool = False) -> TaskRow:
    """A task of the user's own, or one that looks after an image of theirs; to read, also of an image shared with them.

    Raises:
        NotFound: there is none, or it is another's.
    """
    whose = [ImageRow.owner_id == user_id] if for_update else images.visible_to(user_id)
    of_image = sa.and_(TaskRow.kind != "command", TaskRow.image_id.in_(sa.select(ImageRow.id).where(*whose)))
    mine = sa.or_(TaskRow.owner_id == user_id, of_image)
    query = sa.select(TaskRow).where(TaskRow.id == task_id, mine).options(*options)
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
    kind: str = "command",
) -> tuple[list[Task], str | None, int]:
    """A page of tasks, newest first; the cursor of the next page; how many there are in all. `kind` "all": any kind."""
    if not 1 <= limit <= MAX_PAGE:
        raise TooLarge(f"must be from 1 to {MAX_PAGE}", field="limit")
    if cursor is not None and not is_id(cursor, "tsk"):
        raise InvalidInput("is not a cursor this server gave out", hint="start again without it", field="cursor")
    for field, text in (("name", name), ("id_prefix", id_prefix)):
        if text is not None and "\x00" in text:  # PostgreSQL refuses it
            raise InvalidInput("contains a NUL character", field=field)
    if kind not in (*KINDS, "all"):
        raise InvalidInput(f"{kind[:40]!r} is not one of {', '.join(KINDS)}, all", field="kind")
    where: list[Any] = [TaskRow.owner_id == user_id]
    if kind != "all" and id_prefix is None:  # whoever types an id means that task
        where.append(TaskRow.kind == kind)
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
        known = task_views.whereabouts(ctx, session)
        names = task_views.image_names(session, user_id, rows[:limit])
        tasks = [task_views.to_task(row, known, image=names.get(row.image_id or "", "")) for row in rows[:limit]]
    return tasks, (tasks[-1].id if len(rows) > limit else None), total


def cancel(ctx: Context, user_id: str, task_id: str) -> Task:
    """Ask for a task to be stopped; harmless when it already ended or was asked before."""
    with ctx.db.write() as session:
        seen = find(session, user_id, task_id)
        if seen.endpoint_id:
            # Endpoint before task: the order in which every transaction takes its locks.
            session.execute(sa.select(EndpointRow.id).where(EndpointRow.id == seen.endpoint_id).with_for_update())
        session.expire(seen)
        topics = cancel_row(ctx, session, find(session, user_id, task_id, for_update=True))
    ctx.hub.notify(*topics)
    return get(ctx, user_id, task_id)


def cancel_row(ctx: Context, session: Session, task: TaskRow) -> list[str]:
    if TaskState(task.state).is_final or task.desired == Desired.CANCEL:
        return []
    now = ctx.clock()
    task.desired = Desired.CANCEL.value
    lifecycle.record(session, task, "task.cancel_requested", now)
    job = session.scalars(
        sa.select(JobRow).where(JobRow.task_id == task.id, JobRow.attempt == task.attempt).with_for_update()
    ).one_or_none()
    topics = [f"task:{task.id}", "events"]
    if task.kind != "command":
        topics.append("planning")  # somebody may wait for what it makes
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
        known = task_views.whereabouts(ctx, session)
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
        return task_views.to_task(row, known), task_views.to_job(job, known) if job else None


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
