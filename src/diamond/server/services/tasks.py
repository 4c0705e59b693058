"""Creating, reading and cancelling tasks. How a task moves on afterwards is in `lifecycle` and `planning`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import digest_of_ref
from diamond.core.codec import decode, encode
from diamond.core.errors import Forbidden, IdempotencyMismatch, InvalidInput, NotFound, TooLarge
from diamond.core.faults import fault_point
from diamond.core.ids import is_id, new_id
from diamond.core.projects import Role
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Output, Task, TaskSpec
from diamond.server.services import (
    access,
    bundles,
    chains,
    dry_runs,
    image_placing,
    image_progress,
    lifecycle,
    places,
    planning,
    pools,
    projects,
    quota_notices,
    quotas,
    secrets,
    snapshots,
    task_views,
)
from diamond.server.services.context import Context
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow, IdempotencyRow, ImageRow, JobRow, TaskRow, UserRow

MAX_KEY = 200
MAX_PAGE = 1000
MAX_BATCH = 1000
KINDS = ("command", "build", "transfer", "pilot")


def create(ctx: Context, user_id: str, raw_spec: object, idempotency_key: str | None = None) -> tuple[Task, bool]:
    """Make a task; True when this call made it, False when an earlier call with the same key had.

    Raises:
        InvalidInput: the spec cannot be accepted; nothing was written.
        IdempotencyMismatch: the key was used for another spec.
    """
    spec = checked_spec(ctx, user_id, raw_spec)
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
            specs.append(checked_spec(ctx, user_id, raw))
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
            quotas.lock(session, [user_id])
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


def checked_spec(ctx: Context, user_id: str, raw_spec: object, *, uploaded: bool = True) -> TaskSpec:
    """Validate a spec; with `uploaded`, also that every bundle it names is wholly here, and the user's to use."""
    spec = TaskSpec.parse(raw_spec)
    if uploaded:
        spec.check_uploaded()
        for target, ref in spec.bundle_refs.items():
            bundles.require(ctx, user_id, digest_of_ref(ref), "workdir" if target == "." else f"file_mounts.{target}")
        for target, ref in (spec.image.files if spec.image else {}).items():
            bundles.require(ctx, user_id, digest_of_ref(ref), f"image.files.{target}")
        if spec.workdir:
            bundles.check_mounts(ctx, digest_of_ref(spec.workdir), spec.file_mounts)
    return spec


def _insert(ctx: Context, session: Session, user_id: str, spec: TaskSpec) -> tuple[Task, list[str]]:
    now = ctx.clock()
    project = _project_of(session, user_id, spec)
    warnings = quotas.admit(ctx, session, user_id, project.id, spec)
    quota_notices.tell(ctx, session, user_id, warnings)
    secrets.check(session, user_id, project.id, spec)
    image, _ = image_placing.resolve(ctx, session, user_id, spec, project)
    if image is not None:
        session.add(image)  # of a recipe nobody has had before
    row = TaskRow(
        id=new_id("tsk"),
        owner_id=user_id,
        name=spec.name or _default_name(spec),
        kind="command",
        work=None,
        pool_id=pools.for_task(session, user_id, project.id, spec),
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
        project_id=project.id,
        visibility=projects.default_visibility(project).value,
    )
    session.add(row)
    lifecycle.record(session, row, "task.created", now, {"name": row.name, "project": project.name})
    # Not before it has its place: it is written once then, not made and changed. Images are made on the way.
    with session.no_autoflush if image is None else nullcontext():
        placed = planning.place_task(ctx, session, row, spec, refuse_impossible=True)
    there = placed.endpoint
    known = {there.id: task_views.Where.of(there.name, there.last_seen_at, there.created_at, now)} if there else {}
    jobs = (task_views.to_job(placed.job, known),) if placed.job else ()
    named = {project.id: project.name, user_id: session.get_one(UserRow, user_id).name}
    image_name = task_views.image_name(session, row, spec, user_id)
    warnings = (*warnings, *filter(None, [places.readers(session, user_id, _goes_to(session, row, placed), spec)]))
    return task_views.to_task(
        row, known, named, spec=spec, jobs=jobs, image=image_name, warnings=warnings,
        why=placed.decided.placement.why if placed.decided is not None else (),
    ), placed.topics  # fmt: skip


def _goes_to(session: Session, row: TaskRow, placed: planning.Placed) -> EndpointRow | None:
    """Where a new task will run, though it may wait for its image, for a quota or for its turn in a pool."""
    if placed.decided is not None:
        return placed.decided.endpoint
    endpoint_id = pools.endpoint_of(session, row.pool_id)
    return session.get(EndpointRow, endpoint_id) if endpoint_id else None


def _project_of(session: Session, user_id: str, spec: TaskSpec) -> ProjectRow:
    try:
        return projects.resolve(session, user_id, spec.project)
    except NotFound as error:
        raise InvalidInput(error.message, hint=error.hint, field="project") from error


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
    spec = checked_spec(ctx, user_id, raw_spec, uploaded=False)
    with ctx.db.read() as session:
        return dry_runs.explain(ctx, session, user_id, spec)


def get(ctx: Context, user_id: str, task_id: str) -> Task:
    """One task with its spec, jobs and outputs."""
    with ctx.db.read() as session:
        row = find(session, user_id, task_id, whole=True)
        jobs = session.scalars(_JOBS, {"task": task_id}).all()
        known = task_views.whereabouts(ctx, session, [row, *jobs])
        spec = decode(TaskSpec, row.spec)
        if row.image_id and row.state == TaskState.PENDING:
            row.pending_reason += image_progress.stage_text(ctx, session, row)
        return task_views.to_task(
            row,
            known,
            task_views.names_of(session, [row]),
            spec=spec,
            image=task_views.image_name(session, row, spec, user_id),
            jobs=tuple(task_views.to_job(job, known) for job in jobs),
            outputs=tuple(decode(Output, item) for item in row.outputs),
        )


def find(session: Session, user_id: str, task_id: str, *, whole: bool = False, for_update: bool = False) -> TaskRow:
    """A task that the user sees, with its spec and outputs if `whole`; `for_update`: that they may stop. What looks
    after an image goes by that image.

    Raises:
        NotFound: there is none, or it is another's.
    """
    row = None
    if is_id(task_id, "tsk"):
        row = session.scalars(_finding(whole, for_update), {"viewer": user_id, "task": task_id}).one_or_none()
    if row is None:
        raise NotFound(f"there is no task {task_id[:60]!r}", hint="`diamond ps -a` lists your tasks")
    return row


@cache
def _finding(whole: bool, for_update: bool) -> sa.Select[TaskRow]:
    """Built once: nearly every request about a task asks this, and putting it together costs more than running it."""
    viewer: sa.BindParameter[str] = sa.bindparam("viewer")
    rule = access.manages if for_update else access.sees
    whose = sa.select(ImageRow.id).where(rule(ImageRow, viewer))
    if not for_update:
        whose = whose.where(ImageRow.removed_at.is_(None))
    of_image = sa.and_(TaskRow.kind != "command", TaskRow.image_id.in_(whose))
    query = sa.select(TaskRow).where(TaskRow.id == sa.bindparam("task"), sa.or_(rule(TaskRow, viewer), of_image))
    if whole:
        query = query.options(undefer(TaskRow.spec), undefer(TaskRow.outputs))
    return query.with_for_update() if for_update else query


_JOBS = sa.select(JobRow).where(JobRow.task_id == sa.bindparam("task")).order_by(JobRow.attempt)
_NEWEST = (
    sa.select(TaskRow)
    .where(TaskRow.owner_id == sa.bindparam("viewer"), TaskRow.kind == sa.bindparam("kind"))
    .order_by(TaskRow.id.desc())
    .limit(sa.bindparam("number", type_=sa.Integer))
)


def list_tasks(
    ctx: Context,
    user_id: str,
    states: Sequence[TaskState] = (),
    name: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    id_prefix: str | None = None,
    kind: str = "command",
    project: str | None = None,
    owner: str | None = None,
) -> tuple[list[Task], str | None, int]:
    """A page of tasks, newest first; the cursor of the next page; how many there are in all. `kind` "all": any kind.

    The user's own, unless `project` or `owner` is named: then all of that project and that owner which they see.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise TooLarge(f"must be from 1 to {MAX_PAGE}", field="limit")
    if cursor is not None and not is_id(cursor, "tsk"):
        raise InvalidInput("is not a cursor this server gave out", hint="start again without it", field="cursor")
    for field, text in (("name", name), ("id_prefix", id_prefix), ("owner", owner)):
        if text is not None and "\x00" in text:  # PostgreSQL refuses it
            raise InvalidInput("contains a NUL character", field=field)
    if kind not in (*KINDS, "all"):
        raise InvalidInput(f"{kind[:40]!r} is not one of {', '.join(KINDS)}, all", field="kind")
    by_name = id_prefix is not None or project is not None or owner is not None
    where: list[Any] = [access.sees(TaskRow, user_id) if by_name else TaskRow.owner_id == user_id]
    if owner is not None:
        where.append(TaskRow.owner_id.in_(sa.select(UserRow.id).where(UserRow.name == owner)))
    if kind != "all" and id_prefix is None:  # whoever types an id means that task
        where.append(TaskRow.kind == kind)
    if states:
        where.append(TaskRow.state.in_([state.value for state in states]))
    if name is not None:
        where.append(TaskRow.name == name)
    if id_prefix is not None:
        where.append(TaskRow.id.startswith(id_prefix, autoescape=True))
    with ctx.db.read() as session:
        if project is not None:
            there = projects.look_up(session, user_id, project, Role.VIEWER)
            where.append(TaskRow.project_id == (there.id if there else ""))
        if by_name or states or name is not None or kind == "all" or cursor is not None:
            before = [] if cursor is None else [TaskRow.id < cursor]
            page = sa.select(TaskRow).where(*where, *before).order_by(TaskRow.id.desc()).limit(limit + 1)
            rows = session.scalars(page).all()
        else:
            rows = session.scalars(_NEWEST, {"viewer": user_id, "kind": kind, "number": limit + 1}).all()
        total = len(rows)
        if cursor is not None or total > limit:  # otherwise these are all
            total = session.execute(sa.select(sa.func.count()).select_from(TaskRow).where(*where)).scalar_one()
        known = task_views.whereabouts(ctx, session, rows)
        named = task_views.names_of(session, rows[:limit])
        names = task_views.image_names(session, user_id, rows[:limit])
        tasks = [task_views.to_task(row, known, named, image=names.get(row.image_id or "", "")) for row in rows[:limit]]
    return tasks, (tasks[-1].id if len(rows) > limit else None), total


def cancel(ctx: Context, user_id: str, task_id: str) -> Task:
    """Ask for a task to be stopped; harmless when it already ended or was asked before."""
    with ctx.db.write() as session:
        seen = find(session, user_id, task_id)
        lock_endpoint(session, seen)
        try:
            row = find(session, user_id, task_id, for_update=True)
        except NotFound:
            owner = session.get_one(UserRow, seen.owner_id).name
            raise Forbidden(
                f"task {task_id} is {owner}'s: you can look at it, not stop it",
                hint=f"ask {owner}, or an owner of its project",
            ) from None
        topics = cancel_row(ctx, session, row, by=lifecycle.as_project_owner(session, row, user_id))
    ctx.hub.notify(*topics)
    return get(ctx, user_id, task_id)


def lock_endpoint(session: Session, seen: TaskRow) -> None:
    """Endpoint before task: the order in which every transaction takes its locks. The task is read again after it."""
    if endpoint_id := seen.endpoint_id or pools.endpoint_of(session, seen.pool_id):
        session.execute(sa.select(EndpointRow.id).where(EndpointRow.id == endpoint_id).with_for_update())
    session.expire(seen)


_LIVE_JOBS = (
    sa.select(JobRow)
    .where(JobRow.task_id == sa.bindparam("task"), JobRow.attempt >= sa.bindparam("attempt"))
    .order_by(JobRow.id)
    .with_for_update()
)


def cancel_row(ctx: Context, session: Session, task: TaskRow, *, by: str = "") -> list[str]:
    """`by`: who it is, if not its owner, who is told."""
    if TaskState(task.state).is_final or task.desired == Desired.CANCEL:
        return []
    now = ctx.clock()
    lifecycle.ask_to_stop(session, task, now, by)
    # The newest, and those queued behind it in advance.
    found = session.scalars(_LIVE_JOBS, {"task": task.id, "attempt": task.attempt}).all()
    job = next((one for one in found if one.attempt == task.attempt), None)
    topics = [f"task:{task.id}", "events", "planning"]  # somebody may wait for what it makes, or holds
    topics += chains.drop(ctx, session, [one for one in found if one is not job])
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
