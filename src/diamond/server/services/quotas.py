"""Quotas: what users and projects may have, refused or made to wait where it is more.

A task is refused when it would be one too many, or could never run within the limits. One that only has to wait for
others to end waits in the service's own queue. Transactions that add to what is limited come one after the other for
each user and project: they call `lock` before they take any other lock.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput, NotFound, QuotaExceeded
from diamond.core.quotas import (
    EVERYBODY,
    WARN_FRACTION,
    Limits,
    Quota,
    QuotaSetting,
    Use,
    check_kind,
    left_of,
    month_of,
    shown,
)
from diamond.core.tasks import TaskSpec
from diamond.server.services import access, audit, seen, usage
from diamond.server.services.context import Context
from diamond.server.services.quota_rows import set_for
from diamond.server.store.identity_models import MemberRow, ProjectRow, QuotaRow
from diamond.server.store.models import TaskRow, UserRow

_LOCKS = 7421002  # names our kind of lock to PostgreSQL
_BOUNDS = "quota_bounds"
_HELD = "quota_held"
_HOURS = "quota_hours"
_RAISE = "an administrator can raise it (`diamond quota` shows how you stand)"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The limits of one user or project that something counts towards."""

    kind: str
    subject_id: str
    name: str
    limits: Limits
    own: bool

    @property
    def who(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def whose(self) -> usage.Whose:
        return usage.of_user(self.subject_id) if self.kind == "user" else usage.of_project(self.subject_id)


def bounds(session: Session, user_id: str, project_id: str | None) -> list[Bound]:
    """The limits of this user and of this project, if they have any. Looked up once in a transaction."""
    kept: dict[tuple[str, str | None], list[Bound]] = session.info.setdefault(_BOUNDS, {})
    if (user_id, project_id) not in kept:
        kept[user_id, project_id] = _find_bounds(session, user_id, project_id)
    return kept[user_id, project_id]


def _find_bounds(session: Session, user_id: str, project_id: str | None) -> list[Bound]:
    found = set_for(session, [user_id], [project_id] if project_id else [])
    known: list[Bound] = []
    if not found:
        return known
    if limits := found.get(("user", user_id), found.get(("every-user", ""))):
        name = session.scalars(sa.select(UserRow.name).where(UserRow.id == user_id)).one()
        known.append(_bound("user", user_id, name, limits, found))
    if project_id and (limits := found.get(("project", project_id), found.get(("every-project", "")))):
        project = session.get(ProjectRow, project_id)
        if project is not None and project.personal_of is None:
            known.append(_bound("project", project_id, project.name, limits, found))
    return known


def _bound(kind: str, subject_id: str, name: str, limits: Limits, found: dict[tuple[str, str], Limits]) -> Bound:
    return Bound(kind=kind, subject_id=subject_id, name=name, limits=limits, own=(kind, subject_id) in found)


def lock(session: Session, user_ids: Iterable[str], project_ids: Iterable[str] | None = None) -> None:
    """Let nobody else add to what these users and projects have until this transaction ends. Before any other lock.

    Args:
        project_ids: None: all in which the users are members.
    """
    if session.get_bind().dialect.name == "sqlite":  # one writer at a time, whoever it is
        return
    users = list(user_ids)
    theirs = sa.select(MemberRow.project_id).where(MemberRow.user_id.in_(users))
    found = set_for(session, users, project_ids)
    if not found:
        return
    projects = session.scalars(theirs).all() if project_ids is None else list(project_ids)
    wanted = [("user", one) for one in users if ("user", one) in found or ("every-user", "") in found]
    wanted += [("project", one) for one in projects if ("project", one) in found or ("every-project", "") in found]
    for number in sorted({zlib.crc32(f"{kind} {one}".encode()) - 2**31 for kind, one in wanted}):
        session.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCKS, number)))


def lock_tasks(session: Session, task_ids: list[str]) -> None:
    """The same for the owners and projects of these tasks."""
    if session.get_bind().dialect.name != "sqlite":
        found = session.execute(sa.select(TaskRow.owner_id, TaskRow.project_id).where(TaskRow.id.in_(task_ids))).all()
        lock(session, {owner for owner, _ in found}, {project for _, project in found if project})


def _held(session: Session, bound: Bound) -> list[int]:
    """Nodes and GPUs held, with those handed out in this transaction; looked up once in it, for many tasks may wait.

    Meanwhile others can only give back, since `lock` keeps them from taking.
    """
    kept: dict[tuple[str, str], list[int]] = session.info.setdefault(_HELD, {})
    key = (bound.kind, bound.subject_id)
    if key not in kept:
        kept[key] = list(usage.held(session, bound.whose))
    return kept[key]


def take(session: Session, task: TaskRow, num_nodes: int, num_gpus: int) -> None:
    """Note that the task was given these, in this transaction."""
    kept: dict[tuple[str, str], list[int]] = session.info.get(_HELD, {})
    for bound in bounds(session, task.owner_id, task.project_id) if kept else ():
        if (held := kept.get((bound.kind, bound.subject_id))) is not None:
            held[0] += num_nodes
            held[1] += num_gpus


def _hours(ctx: Context, session: Session, bound: Bound) -> float:
    """GPU-hours of this month, likewise."""
    kept: dict[tuple[str, str], float] = session.info.setdefault(_HOURS, {})
    key = (bound.kind, bound.subject_id)
    if key not in kept:
        kept[key] = usage.gpu_hours(session, bound.whose, ctx.clock())
    return kept[key]


# ---- tasks ---------------------------------------------------------------------------------------------------------


def admit(ctx: Context, session: Session, user_id: str, project_id: str | None, spec: TaskSpec) -> tuple[str, ...]:
    """Refuse a new task that is more than its user or project may have; else what to tell whoever asks for it.

    Raises:
        QuotaExceeded: naming the limit, what is used, and what was asked.
    """
    notes: list[str] = []
    nodes = 0 if spec.pool else spec.num_nodes  # a pool's pilots hold its nodes
    gpus = nodes * spec.resources.gpus
    hours = (spec.max_duration or spec.slurm.time_s or 0) / 3600
    asked = Use(tasks=1, nodes=nodes, gpus=gpus, gpu_hours=gpus * hours)
    for bound in bounds(session, user_id, project_id):
        limits = bound.limits
        if limits.tasks is not None:
            have = usage.unfinished(session, bound.whose)
            if have + 1 > limits.tasks:
                raise QuotaExceeded(
                    f"{bound.who} may have {limits.tasks} unfinished tasks at once and has {have}; "
                    "this would be one more",
                    hint=f"wait for one to end, or stop one; {_RAISE}",
                )
            notes += _note(bound, "tasks", "unfinished tasks", have, 1, limits.tasks)
        notes += _admit_held(session, bound, asked)
        if asked.gpus and limits.gpu_hours is not None:
            hours = _hours(ctx, session, bound)
            _check_hours(ctx, bound, hours, asked.gpu_hours)
            notes += _note(bound, "gpu_hours", "GPU-hours of this month", hours, asked.gpu_hours, limits.gpu_hours)
        if limits.storage_bytes is not None:
            stored = usage.stored(session, bound.whose)
            if spec.outputs:
                _check_room(bound, stored, 0, "this task leaves outputs", field="outputs")
            elif stored > limits.storage_bytes:  # at the limit, what a task prints may still just pass it
                _check_room(bound, stored, 0, "there is no room for what this task prints", field="")
    return tuple(notes)


def _admit_held(session: Session, bound: Bound, asked: Use) -> list[str]:
    notes: list[str] = []
    limits = bound.limits
    if limits.nodes is None and (limits.gpus is None or not asked.gpus):
        return notes
    nodes, gpus = _held(session, bound)
    for name, noun, have, want, field in (
        ("nodes", "nodes", nodes, asked.nodes, "num_nodes"),
        ("gpus", "GPUs", gpus, asked.gpus, "resources.accelerators"),
    ):
        limit = getattr(limits, name)
        if limit is None or not want:
            continue
        if want > limit:
            raise QuotaExceeded(
                _held_text(bound, noun, limit, have, want),
                hint=f"ask for {limit} or fewer; {_RAISE}" if limit else _RAISE,
                field=field,
            )
        if have + want > limit:
            notes.append(_held_text(bound, noun, limit, have, want) + " and waits until others end")
        else:
            notes += _note(bound, name, f"{noun} at once", have, want, limit)
    return notes


def _note(bound: Bound, name: str, noun: str, have: float, more: float, limit: float) -> list[str]:
    if have + more <= WARN_FRACTION * limit:
        return []
    return [f"{bound.who}: with this task {shown(name, have + more)} of {shown(name, limit)} {noun}"]


def _held_text(bound: Bound, noun: str, limit: int, have: int, want: int) -> str:
    noun = noun.removesuffix("s") if limit == 1 else noun
    return f"{bound.who} may hold {limit} {noun} at once and holds {have}; this task asks for {want}"


def _check_hours(ctx: Context, bound: Bound, used: float, at_most: float) -> None:
    limit = bound.limits.gpu_hours
    if limit is None or (used < limit and used + at_most <= limit):
        return
    asked = f"; this task may use {shown('gpu_hours', at_most)}" if at_most and used < limit else ""
    hint = f"they renew on {_renews(ctx.clock())}; {_RAISE}"
    raise QuotaExceeded(
        f"{bound.who} may use {shown('gpu_hours', limit)} GPU-hours a month and has used "
        f"{shown('gpu_hours', used)}{asked}",
        hint=f"give it a shorter max_duration; {hint}" if asked else hint,
        field="max_duration" if asked else "resources.accelerators",
    )


def _renews(now: float) -> str:
    return time.strftime("%-d %B (UTC)", time.gmtime(month_of(now)[1]))


def why_waits(
    ctx: Context,
    session: Session,
    user_id: str,
    project_id: str | None,
    spec: TaskSpec,
    *,
    new_for_s: int | None = None,
) -> str:
    """What keeps a task from having its next job now; empty when nothing does.

    Args:
        new_for_s: the task is being launched, and this is how long its job may run: then it is refused, not kept
            waiting, when it could use more GPU-hours than there are.
    """
    gpus = spec.num_nodes * spec.resources.gpus
    for bound in bounds(session, user_id, project_id):
        limits = bound.limits
        if limits.nodes is not None or limits.gpus is not None:
            nodes_held, gpus_held = _held(session, bound)
            if limits.nodes is not None and nodes_held + spec.num_nodes > limits.nodes:
                text = _held_text(bound, "nodes", limits.nodes, nodes_held, spec.num_nodes)
                return f"{text} and goes on by itself when others end"
            if limits.gpus is not None and gpus and gpus_held + gpus > limits.gpus:
                text = _held_text(bound, "GPUs", limits.gpus, gpus_held, gpus)
                return f"{text} and goes on by itself when others end"
        if limits.gpu_hours is not None and gpus:
            used = _hours(ctx, session, bound)
            if new_for_s is not None:
                _check_hours(ctx, bound, used, gpus * new_for_s / 3600)
            elif used >= limits.gpu_hours:
                return (
                    f"{bound.who} has used {shown('gpu_hours', used)} of {shown('gpu_hours', limits.gpu_hours)} "
                    f"GPU-hours of this month; it goes on by itself on {_renews(ctx.clock())}, or when an "
                    "administrator raises the limit"
                )
    return ""


def out_of_hours(ctx: Context, session: Session, task: TaskRow, num_gpus: int) -> bool:
    """Whether the GPU-hours of its user or project are used up, so that a chain's next job must not be asked for."""
    return bool(num_gpus) and any(
        bound.limits.gpu_hours is not None and _hours(ctx, session, bound) >= bound.limits.gpu_hours
        for bound in bounds(session, task.owner_id, task.project_id)
    )


# ---- storage -------------------------------------------------------------------------------------------------------


def check_storage(
    session: Session, user_id: str, project_id: str | None, more_bytes: int, what: str, *, field: str = ""
) -> None:
    """Refuse what would not fit: an upload of so many bytes, or (0) something whose size nobody knows yet.

    Raises:
        QuotaExceeded: naming the limit, what is used, and what was asked.
    """
    for bound in bounds(session, user_id, project_id):
        if bound.limits.storage_bytes is not None:
            _check_room(bound, usage.stored(session, bound.whose), more_bytes, what, field=field)


def over_storage(session: Session, user_id: str, project_id: str | None, more_bytes: int = 0) -> list[str]:
    """Who of these, user or project, stores more than they may, or would with so many bytes more."""
    return [
        bound.who
        for bound in bounds(session, user_id, project_id)
        if bound.limits.storage_bytes is not None
        and usage.stored(session, bound.whose) + more_bytes > bound.limits.storage_bytes
    ]


def check_upload(ctx: Context, user_id: str | None, more_bytes: int, digests: Collection[str]) -> None:
    """The same for these blobs on their way to the server, beside uploads begun and not finished. Agents: None."""
    if user_id is not None and more_bytes > 0:
        with ctx.db.read() as session:
            if any(bound.limits.storage_bytes is not None for bound in bounds(session, user_id, None)):
                begun = ctx.blobs.unfinished_bytes(user_id, besides=digests)
                text = f"this upload has {shown('storage_bytes', more_bytes)}"
                text += f", those begun and not finished {shown('storage_bytes', begun)}" if begun else ""
                check_storage(session, user_id, None, more_bytes + begun, text)


def _check_room(bound: Bound, used: int, more_bytes: int, what: str, *, field: str) -> None:
    limit = bound.limits.storage_bytes
    if limit is None or (used + more_bytes <= limit if more_bytes else used < limit):
        return
    raise QuotaExceeded(
        f"{bound.who} may store {shown('storage_bytes', limit)} and stores {shown('storage_bytes', used)}; {what}",
        hint=f"remove images (`diamond image rm`) or tasks (`diamond rm`) you no longer need; {_RAISE}",
        field=field,
    )


# ---- what people see and administrators set --------------------------------------------------------------------------


def list_quotas(ctx: Context, user_id: str) -> list[Quota]:
    """How the user stands, then each of the projects they are in, by name."""
    with ctx.db.read() as session:
        name = session.scalars(sa.select(UserRow.name).where(UserRow.id == user_id)).one()
        subjects = [("user", user_id, name)]
        mine = sa.select(ProjectRow.id, ProjectRow.name).where(
            ProjectRow.id.in_(access.projects_of(user_id)), ProjectRow.personal_of.is_(None)
        )
        subjects += [("project", one, named) for one, named in session.execute(mine.order_by(ProjectRow.name))]
        return _standing(ctx, session, subjects)


def get(ctx: Context, kind: str, name: str) -> Quota:
    """How one user or project stands; for every-…, what holds by default."""
    check_kind(kind, name)
    with ctx.db.read() as session:
        if kind.startswith("every-"):
            limits = set_for(session, [], []).get((kind, ""))
            return Quota(
                kind=kind, name=EVERYBODY, limits=limits or Limits(), used=Use(), own=limits is not None,
                renews_at=month_of(ctx.clock())[1],
            )  # fmt: skip
        return _standing(ctx, session, [(kind, _subject(session, kind, name), name)])[0]


def _standing(ctx: Context, session: Session, subjects: list[tuple[str, str, str]]) -> list[Quota]:
    now = ctx.clock()
    ids = [one for _, one, _ in subjects]
    found = set_for(session, ids, ids)
    quotas = []
    for kind, subject_id, name in subjects:
        limits = found.get((kind, subject_id), found.get((f"every-{kind}", ""), Limits()))
        bound = _bound(kind, subject_id, name, limits, found)
        used = usage.use(session, bound.whose, now)
        quotas.append(
            Quota(
                kind=kind,
                name=name,
                limits=limits,
                used=used,
                left=left_of(limits, used),
                own=bound.own,
                renews_at=month_of(now)[1],
            )
        )
    return quotas


def list_set(ctx: Context) -> list[QuotaSetting]:
    """Everything administrators have set: defaults first."""
    with ctx.db.read() as session:
        names = {("user", one): name for one, name in session.execute(sa.select(UserRow.id, UserRow.name))}
        names |= {("project", one): name for one, name in session.execute(sa.select(ProjectRow.id, ProjectRow.name))}
        rows = session.scalars(sa.select(QuotaRow)).all()
    found = [
        QuotaSetting(
            kind=row.kind,
            name=names.get((row.kind, row.subject_id), row.subject_id) or EVERYBODY,
            limits=decode(Limits, row.limits),
            updated_at=row.updated_at,
        )
        for row in rows
    ]
    return sorted(found, key=lambda one: (not one.kind.startswith("every-"), one.kind, one.name))


def set_limits(ctx: Context, kind: str, name: str, limits: Limits, *, saw: str | None = None) -> Quota:
    """Give a user or a project, or every one that has none of its own, these limits.

    `saw`: `mark_of` what whoever asks was shown. Raises Conflict if it is something else by now."""
    check_kind(kind, name)
    now = ctx.clock()
    with ctx.db.write() as session:
        subject_id = _subject(session, kind, name)
        _check_seen(session, kind, subject_id, saw)
        session.merge(QuotaRow(kind=kind, subject_id=subject_id, limits=encode(limits), updated_at=now))
        audit.record(session, now, "quota.set", subject_id, kind=kind, name=name, **encode(limits))
    ctx.hub.notify("planning")  # tasks may have waited for it
    return get(ctx, kind, name)


def mark_of(quota: Quota) -> str:
    return seen.mark(quota.limits, quota.own)


def _check_seen(session: Session, kind: str, subject_id: str, saw: str | None, hint: str = seen.SEND_AGAIN) -> None:
    if session.get_bind().dialect.name != "sqlite":  # one after the other, or both would find what they saw
        session.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCKS, 0)))
    found = set_for(session, [subject_id], [subject_id])
    before = found.get((kind, subject_id), found.get((f"every-{kind}", ""), Limits()))
    words = ", ".join(f"{one.removesuffix('_bytes')} {shown(one, n)}" for one, n in before.given().items())
    seen.check(saw, "these limits were", words or "no limits", before, (kind, subject_id) in found, hint=hint)


def clear(ctx: Context, kind: str, name: str, *, saw: str | None = None) -> Quota:
    """Let the default hold again; of a default, let nothing be limited. May be repeated. `saw` as in `set_limits`."""
    check_kind(kind, name)
    with ctx.db.write() as session:
        subject_id = _subject(session, kind, name)
        _check_seen(session, kind, subject_id, saw, "they are as they were set last: press it again to drop those")
        row = session.get(QuotaRow, (kind, subject_id))
        if row is not None:
            session.delete(row)
            audit.record(session, ctx.clock(), "quota.cleared", subject_id, kind=kind, name=name)
    ctx.hub.notify("planning")
    return get(ctx, kind, name)


def _subject(session: Session, kind: str, name: str) -> str:
    """The id of whom a quota is about; empty for every-…"""
    if kind.startswith("every-"):
        return ""
    if kind == "user":
        found = session.scalars(sa.select(UserRow.id).where(UserRow.name == name)).one_or_none()
        if found is None:
            raise NotFound(f"there is no user {name[:60]!r}", field="name")
        return found
    project = session.scalars(
        sa.select(ProjectRow).where(ProjectRow.name == name, ProjectRow.removed_at.is_(None))
    ).one_or_none()
    if project is None:
        raise NotFound(f"there is no project {name[:60]!r}", field="name")
    if project.personal_of is not None:
        owner = session.get_one(UserRow, project.personal_of)
        raise InvalidInput(
            f"project {name} is {owner.name}'s own, which has no limits of its own",
            hint=f"set those of user {owner.name}",
            field="name",
        )
    return project.id
