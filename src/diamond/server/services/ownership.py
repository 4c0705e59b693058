"""Whose something is, and in which project: moving things, handing them on, and what an administrator may stop.

An object changes hands by its owner's will, to a member of its project; or by an administrator's, to anybody. What is
live stays with whoever launched it: it runs in their name, with their secrets, at their cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.core.ids import is_id
from diamond.core.projects import Role, Transferred, parse_visibility
from diamond.core.states import FINAL_TASK_STATES, TaskState
from diamond.core.tasks import Task
from diamond.server.services import (
    access,
    approvals,
    audit,
    enrolment,
    images,
    lifecycle,
    projects,
    proofs,
    task_views,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.store.identity_models import EndpointShareRow, MemberRow, ProjectRow
from diamond.server.store.models import EndpointRow, ImageRow, TaskRow, TemplateRow, UserRow

_FINAL = [state.value for state in FINAL_TASK_STATES]
_MAX_LIVE = 1000
_MAX_IMAGE_NAME = 64


# ---- tasks -------------------------------------------------------------------------------------------------------


def change_task(
    ctx: Context, user_id: str, task_id: str, *, visibility: str | None = None, project: str | None = None
) -> Task:
    """Say who sees a task, and which project it is in; what is None stays.

    Raises:
        Forbidden: it is another's.
        Conflict: it is live, and would move to another project.
    """
    wanted = parse_visibility(visibility) if visibility is not None else None
    now = ctx.clock()
    with ctx.db.write() as session:
        row = _own_task(session, user_id, task_id)
        before = (row.visibility, row.project_id)
        if project is not None:
            home = projects.resolve(session, user_id, project)
            if home.id != row.project_id and not TaskState(row.state).is_final:
                raise Conflict(
                    f"task {task_id} is {row.state}: it counts as its project's until it ends",
                    hint="stop it or wait for it",
                    field="project",
                )
            row.project_id = home.id
        if wanted is not None:
            row.visibility = wanted.value
        images.check_shareable(session, row, is_asked=wanted is not None)
        if before != (row.visibility, row.project_id):
            name = projects.names_by_id(session, [row.project_id]).get(row.project_id or "", "")
            lifecycle.record(session, row, "task.shared", now, {"visibility": row.visibility, "project": name})
            audit.record(session, now, "task.shared", row.id, visibility=row.visibility, project=name)
    ctx.hub.notify(f"task:{task_id}", "events")
    return tasks.get(ctx, user_id, task_id)


def _own_task(session: Session, user_id: str, task_id: str) -> TaskRow:
    seen = tasks.find(session, user_id, task_id)
    if seen.owner_id != user_id:
        owner = session.get_one(UserRow, seen.owner_id).name
        raise Forbidden(f"task {task_id} is {owner}'s: you can look at it, not change it", hint=f"ask {owner}")
    if seen.kind != "command":
        raise InvalidInput(f"task {task_id} looks after an image, and is seen as that is", hint="share the image")
    session.expire(seen)
    return tasks.find(session, user_id, task_id, for_update=True)


def live_tasks(ctx: Context) -> list[Task]:
    """Everybody's tasks that have not ended, newest first, for an administrator: what they are called stays theirs."""
    with ctx.db.read() as session:
        query = sa.select(TaskRow).where(TaskRow.state.not_in(_FINAL)).order_by(TaskRow.id.desc()).limit(_MAX_LIVE)
        rows = session.scalars(query).all()
        known, names = task_views.whereabouts(ctx, session, rows), task_views.names_of(session, rows)
        return [_without_words(task_views.to_task(row, known, names)) for row in rows]


def _without_words(task: Task) -> Task:
    """What an administrator needs to know of another's task to stop it; not what its owner wrote."""
    return Task(
        id=task.id, name="", state=task.state, desired=task.desired, endpoint=task.endpoint, attempt=task.attempt,
        priority=task.priority, created_at=task.created_at, started_at=task.started_at, kind=task.kind,
        owner=task.owner, project=task.project, visibility=task.visibility,
    )  # fmt: skip


def stop_any(ctx: Context, task_id: str) -> Task:
    """Stop a task, whosever it is: for an administrator."""
    with ctx.db.write() as session:
        seen = session.get(TaskRow, task_id) if is_id(task_id, "tsk") else None
        if seen is None:
            raise NotFound(f"there is no task {task_id[:60]!r}", hint="`diamond ps --everybody` lists what is live")
        tasks.lock_endpoint(session, seen)
        row = session.scalars(sa.select(TaskRow).where(TaskRow.id == task_id).with_for_update()).one()
        topics = tasks.cancel_row(ctx, session, row, by=lifecycle.as_administrator(row))
        known, names = task_views.whereabouts(ctx, session, [row]), task_views.names_of(session, [row])
        task = _without_words(task_views.to_task(row, known, names))
    ctx.hub.notify(*topics)
    return task


# ---- handing on --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Giver:
    """Who gives something away: its owner, or an administrator, who may give anybody's to anybody."""

    user_id: str
    is_admin: bool = False


def transfer_task(ctx: Context, giver: Giver, task_id: str, to: str) -> str:
    """The name of who has it now.

    Raises:
        Conflict: it is live.
    """
    with ctx.db.write() as session:
        if giver.is_admin:
            query = sa.select(TaskRow).where(TaskRow.id == task_id).with_for_update()
            row = session.scalars(query).one_or_none() if is_id(task_id, "tsk") else None
            if row is None:
                raise NotFound(f"there is no task {task_id[:60]!r}")
        else:
            row = _own_task(session, giver.user_id, task_id)
        if not TaskState(row.state).is_final:
            raise Conflict(
                f"task {task_id} is {row.state}: it runs in its owner's name", hint="stop it or wait for it, then go on"
            )
        taker = _taker(session, giver, row.project_id, to)
        _give(session, ctx.clock(), "task.transferred", row, taker)
    ctx.hub.notify(f"task:{task_id}", "events")
    return taker.name


def transfer_image(ctx: Context, giver: Giver, ref: str, to: str) -> Transferred:
    """Who has it now, and under what name: what somebody is given must never stand for an image they made."""
    with ctx.db.write() as session:
        if giver.is_admin and is_id(ref, "img"):
            found = session.get(ImageRow, ref)
            if found is None or found.removed_at is not None:
                raise NotFound(f"there is no image {ref[:60]!r}")
            row = found
        else:
            row = images.find(session, giver.user_id, ref)
        if row.owner_id != giver.user_id and not giver.is_admin:
            owner = session.get_one(UserRow, row.owner_id).name
            raise Forbidden(f"image {owner}/{row.name} is {owner}'s: only they can give it away", hint=f"ask {owner}")
        taker = _taker(session, giver, row.project_id, to)
        before = session.get_one(UserRow, row.owner_id)
        was = row.name
        if before.id != taker.id and (not giver.is_admin or was in _image_names(session, taker)):
            row.name = _given_name(was, before.name, _image_names(session, taker))
        _give(session, ctx.clock(), "image.transferred", row, taker, **({"was": was} if was != row.name else {}))
        given = Transferred(owner=taker.name, name=row.name)
        image_id = row.id
    ctx.hub.notify(f"image:{image_id}", "events")
    return given


def _image_names(session: Session, user: UserRow) -> set[str]:
    query = sa.select(ImageRow.name).where(ImageRow.owner_id == user.id, ImageRow.removed_at.is_(None))
    return set(session.scalars(query.distinct()))


def _given_name(name: str, giver: str, taken: set[str]) -> str:
    """What an image is called by whom it was given to: NAME-from-GIVER, numbered where they have that."""
    number = 1
    while True:
        tail = f"-from-{giver}" + (f"-{number}" if number > 1 else "")
        if (wanted := name[: _MAX_IMAGE_NAME - len(tail)] + tail) not in taken:
            return wanted
        number += 1


def _rename_all(session: Session, giver: UserRow, taker: UserRow) -> None:
    """Before all images change hands: those of a name that their new owner uses too get another, alike."""
    taken = _image_names(session, taker)
    mine = _image_names(session, giver)
    for name in sorted(mine & taken):
        wanted = _given_name(name, giver.name, taken | mine)
        mine.add(wanted)
        session.execute(
            sa.update(ImageRow).where(ImageRow.owner_id == giver.id, ImageRow.name == name).values(name=wanted),
            execution_options={"synchronize_session": False},
        )


def transfer_endpoint(ctx: Context, giver: Giver, name: str, to: str) -> str:
    """Give an endpoint to somebody, who then says what it shares. Its agent refuses the new owner until it is enrolled
    anew: whose cluster account it uses, only the one who runs it can say. So it must have nothing in hand."""
    now = ctx.clock()
    with ctx.db.write() as session:
        if giver.is_admin:
            named = [EndpointRow.name == (name if name.isprintable() else ""), EndpointRow.removed_at.is_(None)]
            found = session.scalars(sa.select(EndpointRow).where(*named).with_for_update()).one_or_none()
            if found is None:
                raise NotFound(f"there is no endpoint {name[:60]!r}")
            row = found
        else:
            row = enrolment.locked(session, giver.user_id, name)
        taker = projects.find_user(session, to, "to")
        if not giver.is_admin and not _work_together(session, giver.user_id, taker.id):
            raise _stranger(taker.name, "any project of yours")
        _give_endpoint(session, row, taker, now)
        endpoint_id = row.id
    ctx.hub.notify("credentials", "planning", "events", f"endpoint:{endpoint_id}")
    return taker.name


def transfer_project(ctx: Context, giver: Giver, name: str, to: str) -> str:
    """Make a member its owner, and its present owner (who gives it) a member."""
    now = ctx.clock()
    with ctx.db.write() as session:
        if giver.is_admin:
            named = [ProjectRow.name == (name if name.isprintable() else ""), ProjectRow.removed_at.is_(None)]
            found = session.scalars(sa.select(ProjectRow).where(*named).with_for_update()).one_or_none()
            if found is None:
                raise NotFound(f"there is no project {name[:60]!r}", field="project")
            row = found
        else:
            row = projects.resolve(session, giver.user_id, name, Role.OWNER)
        if row.personal_of is not None:
            raise InvalidInput(f"project {name} belongs to one person alone", hint="make one to share", field="project")
        taker = _taker(session, giver, row.id, to)
        _set_role(session, row, taker.id, Role.OWNER, now)
        if not giver.is_admin and taker.id != giver.user_id:
            _set_role(session, row, giver.user_id, Role.MEMBER, now)
            approvals.after_demotion(session, giver.user_id, row, now)
        audit.record(session, now, "project.transferred", row.id, name=name, to=taker.name)
    ctx.hub.notify("planning", "events")
    return taker.name


def hand_over(ctx: Context, from_name: str, to_name: str) -> dict[str, int]:
    """Give all that somebody has to somebody else, by an administrator: they leave. How many of each.

    What is in the one's own project goes to the other's; projects of which they are the only owner get the other as
    one. Live tasks must have ended: an account is closed first, which stops them.

    Raises:
        Conflict: something of theirs is live.
    """
    with ctx.db.write() as session:
        row = session.scalars(sa.select(UserRow).where(UserRow.name == _plain(from_name))).one_or_none()
        if row is None:
            raise NotFound(f"there is no user {from_name[:60]!r}", hint="`diamond user ls` lists them", field="name")
        taker = projects.find_user(session, to_name, "to")
        if taker.id == row.id:
            raise InvalidInput("is the same user", field="to")
        given = _hand_all(session, row, taker, ctx.clock())
    ctx.hub.notify("credentials", "planning", "events")
    return given


def _hand_all(session: Session, giver: UserRow, taker: UserRow, now: float) -> dict[str, int]:
    live = sa.select(sa.func.count()).select_from(TaskRow)
    count = session.execute(live.where(TaskRow.owner_id == giver.id, TaskRow.state.not_in(_FINAL))).scalar_one()
    if count:
        raise Conflict(
            f"{giver.name} has {count} live task{'s' if count > 1 else ''}",
            hint="wait for them, or stop them: `diamond ps --everybody` lists them",
        )
    given = {"tasks": 0, "images": 0, "templates": 0, "endpoints": 0, "projects": 0}
    endpoints = session.scalars(
        sa.select(EndpointRow)
        .where(EndpointRow.owner_id == giver.id, EndpointRow.removed_at.is_(None))
        .order_by(EndpointRow.id)
        .with_for_update()
    ).all()
    members = sa.select(MemberRow, ProjectRow).join(ProjectRow, ProjectRow.id == MemberRow.project_id)
    shared = [MemberRow.user_id == giver.id, ProjectRow.personal_of.is_(None), ProjectRow.removed_at.is_(None)]
    memberships = session.execute(members.where(*shared)).all()
    for member, project in memberships:
        if member.role == Role.OWNER:
            _set_role(session, project, taker.id, Role.OWNER, now)
            given["projects"] += 1
    for endpoint in endpoints:  # after those: it stays shared where its new owner is a member
        _give_endpoint(session, endpoint, taker, now)
    given["endpoints"] = len(endpoints)
    _rename_all(session, giver, taker)
    mine, theirs = projects.personal(session, giver, now), projects.personal(session, taker, now)
    for kind, model in (("tasks", TaskRow), ("images", ImageRow), ("templates", TemplateRow)):
        home = sa.case((model.project_id == mine.id, theirs.id), else_=model.project_id)
        done = session.execute(
            sa.update(model)
            .where(model.owner_id == giver.id)
            .values(owner_id=taker.id, project_id=home)
            .returning(model.id),
            execution_options={"synchronize_session": False},
        )
        given[kind] = len(done.all())
    session.flush()
    for member, project in memberships:
        projects.drop_member(session, project, member)
    audit.record(session, now, "user.handed_over", giver.id, user=giver.name, to=taker.name, **given)
    return given


def _taker(session: Session, giver: Giver, project_id: str | None, to: str) -> UserRow:
    taker = projects.find_user(session, to, "to")
    if not giver.is_admin and access.role_in(session, taker.id, project_id) not in (Role.OWNER, Role.MEMBER):
        name = projects.names_by_id(session, [project_id]).get(project_id or "", "")
        raise _stranger(taker.name, f"its project {name}")
    return taker


def _stranger(name: str, where: str) -> InvalidInput:
    hint = "things go from hand to hand among people who work together: let them in first (diamond project add)"
    return InvalidInput(f"{name} is not a member of {where}", hint=hint, field="to")


def _work_together(session: Session, one: str, other: str) -> bool:
    both = access.projects_of(one, Role.MEMBER).where(ProjectRow.id.in_(access.projects_of(other, Role.MEMBER)))
    return session.scalars(both.limit(1)).one_or_none() is not None


def _give(session: Session, now: float, action: str, row: TaskRow | ImageRow, taker: UserRow, **more: str) -> None:
    """It stays in its project, unless that was its owner's alone."""
    before = session.get_one(UserRow, row.owner_id).name
    home = session.get(ProjectRow, row.project_id) if row.project_id else None
    row.owner_id = taker.id
    if home is None or home.personal_of is not None:
        row.project_id = projects.personal(session, taker, now).id
    audit.record(session, now, action, row.id, name=row.name, owner=before, to=taker.name, **more)


def _give_endpoint(session: Session, row: EndpointRow, taker: UserRow, now: float) -> None:
    if row.owner_id == taker.id:
        return
    enrolment.refuse_busy(session, row)
    before = session.get_one(UserRow, row.owner_id).name
    enrolment.withdraw(session, row, now)  # whoever runs its agent says anew for whom
    row.owner_id = taker.id
    proofs.forget(row)
    _drop_shares(session, row, taker)
    audit.record(session, now, "endpoint.transferred", row.id, name=row.name, owner=before, to=taker.name)
    approvals.ask_anew(session, row, now, has_new_owner=True)


def _drop_shares(session: Session, row: EndpointRow, taker: UserRow) -> None:
    """It stays offered to those projects that its new owner is a member of."""
    theirs = access.projects_of(taker.id, Role.MEMBER)
    session.execute(
        sa.delete(EndpointShareRow).where(
            EndpointShareRow.endpoint_id == row.id, EndpointShareRow.project_id.not_in(theirs)
        ),
        execution_options={"synchronize_session": False},
    )


def _set_role(session: Session, row: ProjectRow, user_id: str, role: Role, now: float) -> None:
    known: Any = session.get(MemberRow, (row.id, user_id))
    if known is None:
        session.add(MemberRow(project_id=row.id, user_id=user_id, role=role.value, created_at=now))
    else:
        known.role = role.value
    session.flush()


def _plain(name: str) -> str:
    return name if name.isprintable() else ""
