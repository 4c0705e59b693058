"""What somebody sees first: how their tasks stand, what just happened, what needs them, and what a newcomer has done.

Everything is counted and cut off by the database, so that ten thousand tasks cost no more than ten. Only reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint
from diamond.core.events import Event
from diamond.core.images import BuildFailure, ReplicaState
from diamond.core.projects import Role
from diamond.core.quotas import WARN_FRACTION, Quota, shown
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.states import TaskState
from diamond.server.services import access, codes
from diamond.server.services.context import Context
from diamond.server.store.identity_models import CodeRow, EndpointShareRow, ProjectRow
from diamond.server.store.models import EndpointRow, EventRow, ImageRow, JobRow, ReplicaRow, TaskRow, UserRow

LATELY_S = 2 * 86_400.0  # failures older than this are known by now
STUCK_AFTER_S = 600.0  # in our own queue, where most tasks stay for seconds
QUEUED_LONG_S = 86_400.0  # in a cluster's queue, where a night is nothing special
DISK_LEFT = 0.05  # of a file system, or of a quota there
DISK_AMPLE_BYTES = 200 * 2**30  # however small a part of a large file system that is
_EACH = 5  # of a kind: who has more problems than that looks at the list of them
_LOOKED_AT = 50  # newest of a kind, of which some are mended by now
_COMMAND = TaskRow.kind == "command"  # builds of images are told of as images


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many of the user's own tasks there are."""

    waiting: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0


@dataclass(frozen=True, kw_only=True)
class Concern:
    """Something that needs a person.

    Attributes:
        about: "task", "endpoint", "image", "project" or "quota"; `key` says which: an id, or the name of an endpoint or
            of a project.
        title: what is wrong, without the name.
        detail: why, and what to do, as far as that is known.
    """

    about: str
    key: str
    name: str
    title: str
    detail: str = ""
    at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Happening:
    """An event with the names that its words need."""

    event: Event
    task: str = ""
    endpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a newcomer is. `invited` is None for those who invite nobody."""

    connected: bool
    ran: bool
    built: bool
    invited: bool | None = None

    @property
    def is_done(self) -> bool:
        return self.connected and self.ran and self.built and self.invited is not False


# ---- how tasks stand -------------------------------------------------------------------------------------------------


def counts(ctx: Context, user_id: str) -> Counts:
    query = sa.select(TaskRow.state, sa.func.count()).where(TaskRow.owner_id == user_id, _COMMAND)
    with ctx.db.read() as session:
        found = {str(state): int(number) for state, number in session.execute(query.group_by(TaskRow.state))}
    by_state = {state: found.get(state.value, 0) for state in TaskState}
    return Counts(
        waiting=by_state[TaskState.PENDING] + by_state[TaskState.QUEUED],
        running=by_state[TaskState.RUNNING] + by_state[TaskState.FINISHING],
        succeeded=by_state[TaskState.SUCCEEDED],
        failed=by_state[TaskState.FAILED],
        cancelled=by_state[TaskState.CANCELLED],
    )


# ---- what happened ---------------------------------------------------------------------------------------------------

_TOLD = (
    "task.created", "task.cancel_requested", "task.moved", "task.shared",
    "image.building", "image.ready", "image.failed", "image.removed", "image.shared",
    "endpoint.created", "endpoint.enrolled", "endpoint.online", "endpoint.offline", "endpoint.rotated",
    "endpoint.policy_changed", "endpoint.revoked", "endpoint.removed", "endpoint.share_asked",
    "endpoint.share_approved", "endpoint.share_declined", "quota.near", "shell.opened",
)  # fmt: skip
_TOLD_STATES = (TaskState.RUNNING, TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED)


def recent(ctx: Context, user_id: str, limit: int = 12) -> list[Happening]:
    """What happened last to each of the user's things, newest first; steps that say nothing new are left out."""
    state = EventRow.data["state"].as_string()
    again = sa.and_(state == TaskState.PENDING.value, EventRow.data["reason"].as_string().is_not(None))
    moved = sa.and_(EventRow.kind == "task.state", sa.or_(state.in_([one.value for one in _TOLD_STATES]), again))
    # An image's own events tell what the task that makes it does.
    of_images = sa.and_(EventRow.kind.startswith("task."), TaskRow.kind != "command")
    query = (
        sa.select(EventRow, TaskRow.name, EndpointRow.name)
        .outerjoin(TaskRow, TaskRow.id == EventRow.task_id)
        .outerjoin(EndpointRow, EndpointRow.id == EventRow.endpoint_id)
        .where(EventRow.owner_id == user_id, sa.or_(EventRow.kind.in_(_TOLD), moved))
        .where(sa.or_(TaskRow.id.is_(None), sa.not_(of_images)))
        .order_by(EventRow.seq.desc())
        .limit(limit * _STEPS)
    )
    found: dict[tuple[str, str], Happening] = {}
    with ctx.db.read() as session:
        for row, task, endpoint in session.execute(query):
            about = row.kind.partition(".")[0]
            things = {"image": row.data.get("image_id"), "endpoint": row.endpoint_id, "task": row.task_id}
            key = (about, str(things.get(about) or ""))
            if key not in found and len(found) < limit:
                found[key] = Happening(event=_to_event(row), task=task or "", endpoint=endpoint or "")
    return list(found.values())


_STEPS = 5  # of a thing, from its beginning to its end


def _to_event(row: EventRow) -> Event:
    return Event(
        seq=row.seq, at=row.at, kind=row.kind, task_id=row.task_id, job_id=row.job_id, endpoint_id=row.endpoint_id,
        data=row.data,
    )  # fmt: skip


# ---- what needs attention --------------------------------------------------------------------------------------------


def concerns(ctx: Context, user_id: str, endpoints: list[Endpoint], quotas: list[Quota]) -> list[Concern]:
    """What the user should look at, the most urgent kinds first.

    Args:
        endpoints: those they see, and `quotas`: theirs, which the caller has already asked for.
    """
    now = ctx.clock()
    with ctx.db.read() as session:
        found = [*_failed(session, user_id, now), *_stuck(session, user_id, now)]
        images = _failed_images(session, user_id, now)
        found += _asked_for(session, user_id)
    return [*found, *_of_endpoints(endpoints), *images, *_of_quotas(quotas)]


def _failed(session: Session, user_id: str, now: float) -> list[Concern]:
    """Tasks that failed lately, but those that were mended: a later one of the same name succeeded."""
    mine = TaskRow.owner_id == user_id
    query = (
        sa.select(TaskRow)
        .where(mine, TaskRow.state == TaskState.FAILED.value, _COMMAND, TaskRow.ended_at > now - LATELY_S)
        .order_by(TaskRow.ended_at.desc())  # and nothing else, so that the index has them in this order
        .limit(_LOOKED_AT)
    )
    rows = sorted(session.scalars(query), key=lambda row: (-(row.ended_at or 0), row.id))
    # Two small questions: as one, databases that know little of the table yet compare every task with every other.
    names = {row.name for row in rows}
    good = sa.select(TaskRow.name, sa.func.max(TaskRow.id)).where(mine, TaskRow.name.in_(names))
    later: dict[str, str] = {}
    if rows:
        good = good.where(TaskRow.state == TaskState.SUCCEEDED.value).group_by(TaskRow.name)
        later = {str(name): str(newest) for name, newest in session.execute(good)}
    return [
        Concern(about="task", key=row.id, name=row.name, title="failed", detail=_why(row), at=row.ended_at)
        for row in rows
        if later.get(row.name, "") < row.id
    ][:_EACH]


def _asked_for(session: Session, user_id: str) -> list[Concern]:
    """Endpoints that members want to share with projects of which the user is an owner."""
    query = (
        sa.select(EndpointRow.name, UserRow.name, ProjectRow.name, EndpointShareRow.created_at)
        .join(EndpointShareRow, EndpointShareRow.endpoint_id == EndpointRow.id)
        .join(UserRow, UserRow.id == EndpointRow.owner_id)
        .join(ProjectRow, ProjectRow.id == EndpointShareRow.project_id)
        .where(EndpointShareRow.project_id.in_(access.projects_of(user_id, Role.OWNER)))
        .where(sa.not_(access.approved()), EndpointRow.removed_at.is_(None))
        .order_by(EndpointShareRow.created_at, EndpointRow.id)
        .limit(_EACH)
    )
    return [
        Concern(
            about="project", key=project, name=name, title=f"waits to be shared with project {project}", at=at,
            detail=f"It is {owner}'s, who could read what is sent there. Approve or decline it",
        )
        for name, owner, project, at in session.execute(query)
    ]  # fmt: skip


def _why(row: TaskRow) -> str:
    """What happened, then what to do; of a program's own failure the log knows more than any sentence."""
    if row.reason == Reason.EXIT_NONZERO and row.detail:
        return f"{row.detail}; the last lines of the log say why"
    sentence = MEANINGS[Reason(row.reason)].sentence if row.reason in set(Reason) else ""
    return " ".join(part for part in (sentence, row.detail and row.detail[0].upper() + row.detail[1:]) if part)


def _stuck(session: Session, user_id: str, now: float) -> list[Concern]:
    """Tasks that wait longer than they usually do: here, for a place or a quota; or for long in a cluster's queue."""
    here = sa.and_(
        TaskRow.state == TaskState.PENDING.value,
        TaskRow.created_at < now - STUCK_AFTER_S,
        sa.or_(TaskRow.next_attempt_at.is_(None), TaskRow.next_attempt_at <= now),
    )
    there = sa.and_(TaskRow.state == TaskState.QUEUED.value, TaskRow.created_at < now - QUEUED_LONG_S)
    newest = sa.and_(JobRow.task_id == TaskRow.id, JobRow.attempt == TaskRow.attempt)
    query = (
        sa.select(TaskRow, JobRow.pending_reason)
        .outerjoin(JobRow, newest)
        .where(TaskRow.owner_id == user_id, TaskRow.state.in_(_WAITING), _COMMAND, sa.or_(here, there))
        # Not by id: for that order SQLite would go through all of the user's tasks instead of the few that wait.
        .order_by(TaskRow.created_at, TaskRow.id)
        .limit(_EACH)
    )
    return [
        Concern(
            about="task",
            key=row.id,
            name=row.name,
            title="has been waiting",
            detail=said or row.pending_reason or "nobody says why",
            at=row.created_at,
        )
        for row, said in session.execute(query)
    ]


_WAITING = [TaskState.PENDING.value, TaskState.QUEUED.value]


def _failed_images(session: Session, user_id: str, now: float) -> list[Concern]:
    """Images that could not be made lately, and were not tried there again since, under their name."""
    mine = ImageRow.owner_id == user_id
    query = (
        sa.select(ReplicaRow, ImageRow, EndpointRow.name)
        .join(ImageRow, ImageRow.id == ReplicaRow.image_id)
        .join(EndpointRow, EndpointRow.id == ReplicaRow.endpoint_id)
        .where(ReplicaRow.state == ReplicaState.FAILED.value, ReplicaRow.settled_at > now - LATELY_S)
        .where(mine, ImageRow.removed_at.is_(None), EndpointRow.removed_at.is_(None))
        .order_by(ReplicaRow.settled_at.desc(), ReplicaRow.id)
        .limit(_LOOKED_AT)
    )
    rows = session.execute(query).all()
    tried = (
        sa.select(ImageRow.name, ReplicaRow.endpoint_id, sa.func.max(ReplicaRow.id))
        .join(ReplicaRow, ReplicaRow.image_id == ImageRow.id)
        .where(mine, ImageRow.name.in_({image.name for _, image, _ in rows}))
        .group_by(ImageRow.name, ReplicaRow.endpoint_id)
    )
    newest = {(name, place): str(last) for name, place, last in session.execute(tried)} if rows else {}
    return [
        Concern(
            about="image",
            key=image.id,
            name=image.name,
            title=f"could not be made at {endpoint}",
            detail=_failure(replica),
            at=replica.settled_at,
        )
        for replica, image, endpoint in rows
        if newest[image.name, replica.endpoint_id] == replica.id
    ][:_EACH]


def _failure(replica: ReplicaRow) -> str:
    if not replica.failure:
        return replica.detail
    said = decode(BuildFailure, replica.failure)
    return "; ".join(part.rstrip(".") for part in (said.message, said.hint) if part)


def _of_endpoints(endpoints: list[Endpoint]) -> Iterator[Concern]:
    for each in endpoints:
        if not each.online and each.last_seen_at is not None:
            ended = each.access == "revoked"
            yield Concern(
                about="endpoint",
                key=each.name,
                name=each.name,
                title="was cut off" if ended else "is offline",
                detail="No agent may speak for it; jobs that run there go on unwatched."
                if ended
                else "Jobs that run there go on; what is new waits until its agent is back.",
                at=each.last_seen_at,
            )
        elif each.online:
            for detail in full_disks(each):
                yield Concern(about="endpoint", key=each.name, name=each.name, title="is short of space", detail=detail)


def full_disks(endpoint: Endpoint) -> Iterator[str]:
    """What an endpoint's agent warns of, and file systems and quotas there with little left."""
    usage, facts = endpoint.usage, endpoint.facts
    yield from usage.warnings if usage else ()
    places = facts.filesystems if facts else ()
    if usage and _is_full(usage.disk_free_bytes, usage.disk_total_bytes):
        root = f" ({facts.run_root})" if facts and facts.run_root else ""
        yield f"{shown('storage_bytes', usage.disk_free_bytes)} left where jobs run{root}"
    for place in places:
        if _is_full(place.free_bytes, place.total_bytes) and place.role != "runs":
            yield f"{shown('storage_bytes', place.free_bytes)} left in {place.path}"
        if place.quota_bytes > 0 and place.quota_used_bytes > (1 - DISK_LEFT) * place.quota_bytes:
            left = max(0, place.quota_bytes - place.quota_used_bytes)
            yield f"{shown('storage_bytes', left)} left of the quota in {place.path}"


def _is_full(free_bytes: int, total_bytes: int) -> bool:
    return total_bytes > 0 and free_bytes < min(DISK_LEFT * total_bytes, DISK_AMPLE_BYTES)


def _of_quotas(quotas: list[Quota]) -> Iterator[Concern]:
    for quota in quotas:
        for name, limit in quota.limits.given().items():
            used = getattr(quota.used, name)
            # What is held passes by itself once jobs end; what is used up stays so.
            if name in ("gpu_hours", "storage_bytes") and limit > 0 and used >= WARN_FRACTION * limit:
                yield Concern(
                    about="quota",
                    key=f"{quota.kind} {quota.name}",
                    name=f"{quota.kind} {quota.name}",
                    title="is near a limit",
                    detail=f"{shown(name, used)} of {shown(name, limit)} {_UNITS[name]} are used",
                )


_UNITS = {"gpu_hours": "GPU-hours of this month", "storage_bytes": "storage"}


# ---- what a newcomer has done ----------------------------------------------------------------------------------------


def progress(ctx: Context, user_id: str, endpoints: list[Endpoint], *, invites: bool) -> Progress:
    """What of the first steps is done. `invites`: whether they are an administrator where others can be invited."""
    ran = sa.select(TaskRow.id).where(TaskRow.owner_id == user_id, TaskRow.state == TaskState.SUCCEEDED.value, _COMMAND)
    built = (
        sa.select(ReplicaRow.id)
        .join(ImageRow, ImageRow.id == ReplicaRow.image_id)
        .where(ImageRow.owner_id == user_id, ReplicaRow.ready_at.is_not(None))
    )
    with ctx.db.read() as session:
        return Progress(
            connected=any(each.last_seen_at is not None for each in endpoints),
            ran=session.scalars(ran.limit(1)).first() is not None,
            built=session.scalars(built.limit(1)).first() is not None,
            invited=_has_invited(session, user_id) if invites else None,
        )


def _has_invited(session: Session, user_id: str) -> bool:
    others = sa.select(UserRow.id).where(UserRow.id != user_id).limit(1)
    asked = sa.select(CodeRow.id).where(CodeRow.kind == codes.INVITATION, CodeRow.created_by == user_id).limit(1)
    return session.scalars(others).first() is not None or session.scalars(asked).first() is not None
