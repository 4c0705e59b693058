"""Projects: making them, who is in them, what they share, and their end.

Everybody has a project of their own, under their name, made when it is first needed. What each role may do is in
`core.projects` and `access`; a project somebody is not in does not exist for them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, aliased

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.projects import EndpointShare, Member, Project, Role, Visibility, parse_project, parse_role
from diamond.core.states import FINAL_TASK_STATES
from diamond.server.services import access, approvals, audit
from diamond.server.services.allowances import refusal
from diamond.server.services.context import Context
from diamond.server.store.identity_models import EndpointShareRow, MemberRow, ProjectRow, SecretRow
from diamond.server.store.models import EndpointRow, ImageRow, TaskRow, TemplateRow, UserRow
from diamond.server.store.pool_models import PoolRow

MAX_TITLE = 200
_FINAL = [state.value for state in FINAL_TASK_STATES]
_OWN = "it is your own: make one to share with others with `diamond project create NAME`"
_MEMBERS = sa.select(ProjectRow, MemberRow.role).join(MemberRow, MemberRow.project_id == ProjectRow.id)
_NAMED = _MEMBERS.where(
    ProjectRow.name == sa.bindparam("name"), ProjectRow.removed_at.is_(None), MemberRow.user_id == sa.bindparam("user")
)


# ---- which one is meant ------------------------------------------------------------------------------------------


def personal(session: Session, user: UserRow, now: float) -> ProjectRow:
    """The project of somebody who works alone; made now if they have none yet."""
    query = sa.select(ProjectRow).where(ProjectRow.personal_of == user.id)
    if (row := session.scalars(query).one_or_none()) is not None:
        return row
    try:
        with session.begin_nested():
            row = ProjectRow(id=new_id("prj"), name=_free_name(session, user.name), title="", created_at=now)
            row.personal_of = user.id
            session.add(row)
            session.flush()
            session.add(MemberRow(project_id=row.id, user_id=user.id, role=Role.OWNER.value, created_at=now))
            session.flush()
    except exc.IntegrityError:  # another request of theirs made it meanwhile
        return session.scalars(query).one()
    return row


def _free_name(session: Session, name: str) -> str:
    """Somebody may have called a project so before this user came."""
    free, number = name, 1
    while session.scalars(sa.select(ProjectRow.id).where(ProjectRow.name == free)).one_or_none() is not None:
        number += 1
        free = f"{name}-{number}"
    return free


def resolve(
    session: Session, user_id: str, name: str | None, role: Role = Role.MEMBER, *, field: str = "project"
) -> ProjectRow:
    """The project a user means by its name; None: their own, which is made if need be (a write transaction).

    Raises:
        NotFound: there is none, or they are not in it.
        Forbidden: they are in it with less than `role`.
    """
    if (row := look_up(session, user_id, name, role, field=field)) is not None:
        return row
    user = session.get_one(UserRow, user_id)
    return personal(session, user, user.created_at)


def look_up(
    session: Session, user_id: str, name: str | None, role: Role = Role.MEMBER, *, field: str = "project"
) -> ProjectRow | None:
    """The same, for looking: None stands for a project of their own that is not there yet."""
    if name is None:
        query = sa.select(ProjectRow).where(ProjectRow.personal_of == user_id, ProjectRow.removed_at.is_(None))
        return session.scalars(query).one_or_none()
    found = None
    if name.isprintable():  # PostgreSQL would stumble over a NUL
        found = session.execute(_NAMED, {"name": name, "user": user_id}).one_or_none()
    if found is None:
        raise _unknown(session, user_id, name, field)
    row: ProjectRow = found[0]
    if Role(found[1]) not in role.at_least:
        raise Forbidden(
            f"you are a {found[1]} of project {row.name}, and this needs {'an' if role is Role.OWNER else 'a'} {role}",
            hint=f"one of its owners can make you one: diamond project role {row.name} YOUR_NAME {role}",
            field=field,
        )
    return row


def _unknown(session: Session, user_id: str, name: str, field: str) -> NotFound:
    names = names_of(session, user_id)
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return NotFound(
        f"you are in no project {name[:60]!r}", hint=f"{hint}yours: {', '.join(names[:10]) or 'none yet'}", field=field
    )


def names_of(session: Session, user_id: str) -> list[str]:
    query = sa.select(ProjectRow.name).where(ProjectRow.id.in_(access.projects_of(user_id)))
    return list(session.scalars(query.order_by(ProjectRow.name)))


def names_by_id(session: Session, project_ids: Iterable[str | None]) -> dict[str, str]:
    wanted = {project_id for project_id in project_ids if project_id}
    if not wanted:
        return {}
    rows = session.execute(sa.select(ProjectRow.id, ProjectRow.name).where(ProjectRow.id.in_(wanted)))
    return {str(key): str(name) for key, name in rows}


def default_visibility(project: ProjectRow) -> Visibility:
    """Of what is made in it and says nothing else."""
    return Visibility.PRIVATE if project.personal_of else Visibility.PROJECT


def find_user(session: Session, name: str, field: str = "user") -> UserRow:
    """Somebody with an open account here, by name."""
    row = session.scalars(sa.select(UserRow).where(UserRow.name == name)).one_or_none() if name.isprintable() else None
    if row is None or row.disabled_at is not None:
        raise NotFound(f"there is no user {name[:60]!r} here", hint="check the name with them", field=field)
    return row


# ---- making, looking, changing -----------------------------------------------------------------------------------


def create(ctx: Context, user_id: str, name: str, title: str = "") -> Project:
    """A project of which the user is the first owner.

    Raises:
        Conflict: there is one of that name, or the user has made too many.
    """
    try:
        parse_project(name)
    except ValueError as error:
        raise InvalidInput(str(error), field="name") from error
    row = ProjectRow(id=new_id("prj"), name=name, title=_title(title), created_at=ctx.clock())
    taken = Conflict(f"there is a project {name!r} already", hint="choose another name", field="name")
    try:
        with ctx.db.write() as session:
            # Accounts have projects of their own under their names, and may not have made them yet.
            if session.scalars(sa.select(UserRow.id).where(UserRow.name == name)).one_or_none() is not None:
                raise taken
            _check_room(ctx, session, user_id)
            session.add(row)
            session.flush()
            now = ctx.clock()
            session.add(MemberRow(project_id=row.id, user_id=user_id, role=Role.OWNER.value, created_at=now))
            audit.record(session, now, "project.created", row.id, name=name)
    except exc.IntegrityError as error:
        raise taken from error
    return get(ctx, user_id, name)


def _check_room(ctx: Context, session: Session, user_id: str) -> None:
    owned = sa.select(sa.func.count()).select_from(ProjectRow).join(MemberRow, MemberRow.project_id == ProjectRow.id)
    owned = owned.where(MemberRow.user_id == user_id, MemberRow.role == Role.OWNER.value)
    have = session.execute(owned.where(ProjectRow.removed_at.is_(None), ProjectRow.personal_of.is_(None))).scalar_one()
    if have >= ctx.allowances.projects:
        cure = "remove some, or hand them over: diamond project ls"
        raise refusal(Conflict, f"you own {have} projects already", "projects_per_user", cure=cure, field="name")


def _title(text: str) -> str:
    text = text.strip()
    if len(text) > MAX_TITLE or not text.isprintable():
        raise InvalidInput(f"must be one line of at most {MAX_TITLE} printable characters", field="title")
    return text


def list_projects(ctx: Context, user_id: str) -> list[Project]:
    """Those the user is in, by name."""
    members = sa.select(sa.func.count()).where(MemberRow.project_id == ProjectRow.id).correlate(ProjectRow)
    query = (
        sa.select(ProjectRow, MemberRow.role, members.scalar_subquery())
        .join(MemberRow, MemberRow.project_id == ProjectRow.id)
        .where(MemberRow.user_id == user_id, ProjectRow.removed_at.is_(None))
        .order_by(ProjectRow.name)
    )
    with ctx.db.read() as session:
        return [_to_project(row, Role(role), count) for row, role, count in session.execute(query)]


def list_all(ctx: Context, user_id: str) -> list[Project]:
    """Every project that is not somebody's own, for an administrator: that there is one, not what is in it."""
    members = sa.select(sa.func.count()).where(MemberRow.project_id == ProjectRow.id).correlate(ProjectRow)
    mine = sa.and_(MemberRow.project_id == ProjectRow.id, MemberRow.user_id == user_id)
    query = (
        sa.select(ProjectRow, MemberRow.role, members.scalar_subquery())
        .outerjoin(MemberRow, mine)
        .where(ProjectRow.removed_at.is_(None), ProjectRow.personal_of.is_(None))
        .order_by(ProjectRow.name)
    )
    with ctx.db.read() as session:
        return [_to_project(row, Role(role) if role else None, count) for row, role, count in session.execute(query)]


def get(ctx: Context, user_id: str, name: str) -> Project:
    """One with its members and the endpoints shared with it."""
    with ctx.db.read() as session:
        row = look_up(session, user_id, name, Role.VIEWER)
        assert row is not None
        return detail(session, row, user_id)


def detail(session: Session, row: ProjectRow, user_id: str) -> Project:
    """One with its members and the endpoints shared with it, as this member sees it."""
    people = session.execute(
        sa.select(MemberRow, UserRow)
        .join(UserRow, UserRow.id == MemberRow.user_id)
        .where(MemberRow.project_id == row.id)
        .order_by(UserRow.name)
    ).all()
    role = next(Role(member.role) for member, _ in people if member.user_id == user_id)
    shares = _shares(session, row, user_id, role)
    return _to_project(
        row,
        role,
        len(people),
        members=tuple(
            Member(user=user.name, role=Role(member.role), since=member.created_at, full_name=user.full_name)
            for member, user in people
        ),
        endpoints=tuple(share.endpoint for share in shares if share.approved_at is not None),
        shares=shares,
    )


def _shares(session: Session, row: ProjectRow, user_id: str, role: Role) -> tuple[EndpointShare, ...]:
    """Those that are approved; of those that wait, all for owners, and for everybody else what they asked for."""
    owner, approver = aliased(UserRow), aliased(UserRow)
    query = (
        sa.select(EndpointShareRow, EndpointRow, owner.name, approver.name)
        .join(EndpointRow, EndpointRow.id == EndpointShareRow.endpoint_id)
        .join(owner, owner.id == EndpointRow.owner_id)
        .outerjoin(approver, approver.id == EndpointShareRow.approved_by)
        .where(EndpointShareRow.project_id == row.id, EndpointRow.removed_at.is_(None))
        .order_by(EndpointRow.name)
    )
    if role is not Role.OWNER:
        query = query.where(sa.or_(access.approved(), EndpointRow.owner_id == user_id))
    return tuple(
        EndpointShare(
            endpoint=place.name,
            owner=whose,
            asked_at=share.created_at,
            approved_at=share.approved_at,
            approved_by=by or "",
            proven=place.proven_at is not None,
        )
        for share, place, whose, by in session.execute(query)
    )


def _to_project(
    row: ProjectRow,
    role: Role | None,
    count: int,
    members: tuple[Member, ...] = (),
    endpoints: tuple[str, ...] = (),
    shares: tuple[EndpointShare, ...] = (),
) -> Project:
    return Project(
        id=row.id, name=row.name, title=row.title, personal=row.personal_of is not None, role=role,
        created_at=row.created_at, num_members=count, members=members, endpoints=endpoints,
        shares=shares,
    )  # fmt: skip


def change(ctx: Context, user_id: str, name: str, *, title: str) -> Project:
    with ctx.db.write() as session:
        row = locked(session, user_id, name)
        row.title = _title(title)
        audit.record(session, ctx.clock(), "project.changed", row.id, title=row.title)
        session.flush()
        return detail(session, row, user_id)


def locked(session: Session, user_id: str, name: str, role: Role = Role.OWNER, *, shared: bool = False) -> ProjectRow:
    """A project for a change in this transaction; with `shared`, one that is nobody's own."""
    row = look_up(session, user_id, name, role)
    assert row is not None
    if shared and row.personal_of is not None:
        raise InvalidInput(f"project {name} belongs to one person alone", hint=_OWN, field="project")
    session.execute(sa.select(ProjectRow.id).where(ProjectRow.id == row.id).with_for_update())
    return row


# ---- who is in it ------------------------------------------------------------------------------------------------


def set_member(ctx: Context, user_id: str, name: str, member: str, role: str) -> Project:
    """Let somebody in, or change what they may do there. Safe to repeat.

    Raises:
        Conflict: the last owner would be none any more.
    """
    wanted = parse_role(role)
    now = ctx.clock()
    with ctx.db.write() as session:
        row = locked(session, user_id, name, shared=True)
        user = find_user(session, member)
        known = session.get(MemberRow, (row.id, user.id))
        if known is None:
            session.add(MemberRow(project_id=row.id, user_id=user.id, role=wanted.value, created_at=now))
        elif known.role != wanted.value:
            if known.role == Role.OWNER:
                _keep_an_owner(session, row, user)
                known.role = wanted.value
                approvals.after_demotion(session, user.id, row, now)
            known.role = wanted.value
        audit.record(session, now, "project.member", row.id, project=row.name, user=user.name, role=wanted.value)
        session.flush()
        made = detail(session, row, user_id)
    ctx.hub.notify("planning", "events")
    return made


def remove_member(ctx: Context, user_id: str, name: str, member: str) -> None:
    """Put somebody out, or leave. What they have in the project stays theirs, and stays in it.

    Raises:
        Conflict: they are the last owner.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        is_self = session.get_one(UserRow, user_id).name == member
        row = locked(session, user_id, name, Role.VIEWER if is_self else Role.OWNER, shared=True)
        known = session.scalars(
            sa.select(MemberRow)
            .join(UserRow, UserRow.id == MemberRow.user_id)
            .where(MemberRow.project_id == row.id, UserRow.name == (member if member.isprintable() else ""))
        ).one_or_none()
        if known is None:
            hint = f"`diamond project show {name}` lists its members"
            raise NotFound(f"{member[:60]!r} is not in project {name}", hint=hint, field="user")
        if known.role == Role.OWNER:
            _keep_an_owner(session, row, session.get_one(UserRow, known.user_id))
        drop_member(session, row, known)
        audit.record(session, now, "project.member_removed", row.id, project=row.name, user=member)
    ctx.hub.notify("planning", "events")


def drop_member(session: Session, row: ProjectRow, member: MemberRow) -> None:
    """Whoever goes takes their endpoints along: they were shared with people they worked with."""
    theirs = sa.select(EndpointRow.id).where(EndpointRow.owner_id == member.user_id)
    session.execute(
        sa.delete(EndpointShareRow).where(
            EndpointShareRow.project_id == row.id, EndpointShareRow.endpoint_id.in_(theirs)
        )
    )
    session.delete(member)
    session.flush()


def _keep_an_owner(session: Session, row: ProjectRow, leaving: UserRow) -> None:
    others = sa.select(MemberRow.user_id).where(
        MemberRow.project_id == row.id, MemberRow.role == Role.OWNER.value, MemberRow.user_id != leaving.id
    )
    if not session.scalars(others).first():
        raise Conflict(
            f"{leaving.name} is the only owner of project {row.name}",
            hint=f"make somebody else an owner first (diamond project role {row.name} NAME owner), or remove the "
            f"project: diamond project rm {row.name}",
        )


# ---- its end -----------------------------------------------------------------------------------------------------


def remove(ctx: Context, user_id: str, name: str) -> int:
    """End a project; how many objects went to their owners' own projects.

    Raises:
        Conflict: tasks of it are live.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        row = locked(session, user_id, name, shared=True)
        live = sa.select(sa.func.count()).select_from(TaskRow)
        count = session.execute(live.where(TaskRow.project_id == row.id, TaskRow.state.not_in(_FINAL))).scalar_one()
        if count:
            raise Conflict(
                f"project {name} has {count} live task{'s' if count > 1 else ''}",
                hint=f"stop them or wait for them: diamond ps --project {name}",
            )
        moved = _send_home(session, row, now)
        for table in (EndpointShareRow, MemberRow):
            session.execute(sa.delete(table).where(table.project_id == row.id))
        session.execute(sa.update(PoolRow).where(PoolRow.project_id == row.id).values(closed_at=now))
        session.execute(sa.delete(SecretRow).where(SecretRow.kind == "project", SecretRow.subject_id == row.id))
        audit.record(session, now, "project.removed", row.id, name=name, objects=moved)
        row.name, row.removed_at = f"{name} ({row.id})", now  # the name is free again
    ctx.hub.notify("planning", "pools", "events")
    return moved


def _send_home(session: Session, row: ProjectRow, now: float) -> int:
    """What was seen by the project alone is seen by its owner alone afterwards."""
    moved = 0
    for model in (TaskRow, ImageRow, TemplateRow):
        for owner_id in session.scalars(sa.select(model.owner_id).where(model.project_id == row.id).distinct()).all():
            home = personal(session, session.get_one(UserRow, owner_id), now)
            theirs = sa.update(model).where(model.project_id == row.id, model.owner_id == owner_id)
            hidden = sa.case(
                (model.visibility == Visibility.PROJECT.value, Visibility.PRIVATE.value), else_=model.visibility
            )
            changed = theirs.values(project_id=home.id, visibility=hidden).returning(model.id)
            moved += len(session.execute(changed, execution_options={"synchronize_session": False}).all())
    return moved
