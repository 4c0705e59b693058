"""Templates: saved, shared, changed by one person at a time, and those that come with Diamond (`gallery`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound, TooLarge
from diamond.core.ids import is_id, new_id
from diamond.core.projects import Visibility, parse_visibility
from diamond.core.templates import Template, check_description, check_template_name
from diamond.server.services import access, audit, gallery, projects, tasks
from diamond.server.services.context import Context
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import TemplateRow, UserRow
from diamond.texts import tasktext

MAX_PAGE = 200
MAX_OWN = 500


def built_in() -> list[Template]:
    """Those that come with Diamond, without their specs."""
    return [_of_gallery(each) for each in gallery.all_of_them().values()]


def list_templates(
    ctx: Context, user_id: str, *, limit: int = 50, cursor: str | None = None, search: str = ""
) -> tuple[list[Template], str | None, int]:
    """A page of those that users saved and this one sees, newest first; the next cursor; how many there are."""
    if not 1 <= limit <= MAX_PAGE:
        raise TooLarge(f"must be from 1 to {MAX_PAGE}", field="limit")
    if cursor is not None and not is_id(cursor, "tpl"):
        raise InvalidInput("is not a cursor this server gave out", hint="start again without it", field="cursor")
    where: list[Any] = [access.sees(TemplateRow, user_id)]
    if search:
        if "\x00" in search:
            raise InvalidInput("contains a NUL character", field="search")
        lower = search.lower()
        where.append(
            sa.or_(
                sa.func.lower(TemplateRow.name).contains(lower, autoescape=True),
                sa.func.lower(TemplateRow.description).contains(lower, autoescape=True),
            )
        )
    with ctx.db.read() as session:
        total = session.execute(sa.select(sa.func.count()).select_from(TemplateRow).where(*where)).scalar_one()
        page = sa.select(TemplateRow).where(*where).order_by(TemplateRow.id.desc()).limit(limit + 1)
        if cursor is not None:
            page = page.where(TemplateRow.id < cursor)
        rows = session.scalars(page).all()
        found = _views(session, user_id, rows[:limit])
    return found, (found[-1].id if len(rows) > limit else None), total


def get(ctx: Context, user_id: str, ref: str) -> Template:
    """One with its spec, by id; one's own also by name.

    Raises:
        NotFound: there is none that this user sees.
    """
    if ref in gallery.all_of_them():
        ours = gallery.all_of_them()[ref]
        gallery.put_in_place(ctx, ours)
        return _of_gallery(ours, whole=True)
    with ctx.db.read() as session:
        row = _find(session, user_id, ref)
        return _views(session, user_id, [row], whole=True)[0]


def create(
    ctx: Context,
    user_id: str,
    name: str,
    raw_spec: object,
    *,
    description: str = "",
    visibility: str | None = None,
    project: str | None = None,
) -> Template:
    """Save a task to begin with.

    Raises:
        InvalidInput: it is not a spec that could be launched, or names files that are not here.
        Conflict: one's own has that name already.
    """
    name, description = check_template_name(name), check_description(description)
    wanted = parse_visibility(visibility) if visibility else None
    spec = tasktext.fields_of(tasks.checked_spec(ctx, user_id, raw_spec))
    now = ctx.clock()
    with ctx.db.write() as session:
        where = projects.resolve(session, user_id, project)
        _check_name(session, user_id, name)
        mine = sa.select(sa.func.count()).select_from(TemplateRow).where(TemplateRow.owner_id == user_id)
        if session.execute(mine).scalar_one() >= MAX_OWN:
            raise TooLarge(f"you have {MAX_OWN} templates already", hint="remove those you do not need")
        row = TemplateRow(
            id=new_id("tpl"),
            owner_id=user_id,
            project_id=where.id,
            visibility=_shared(wanted or Visibility.PRIVATE, where).value,
            name=name,
            description=description,
            spec=spec,
            version=1,
            changed_by=user_id,
            created_at=now,
            updated_at=now,
        )
        session.add(row)
        session.flush()
        audit.record(session, now, "template.created", row.id, name=name, visibility=row.visibility)
        return _views(session, user_id, [row], whole=True)[0]


def change(
    ctx: Context,
    user_id: str,
    ref: str,
    *,
    version: int,
    name: str | None = None,
    description: str | None = None,
    raw_spec: object = None,
    visibility: str | None = None,
    project: str | None = None,
) -> Template:
    """Change what is given; what is None stays.

    Raises:
        Conflict: somebody changed it since `version`.
        Forbidden: the user sees it, and may not change it.
    """
    new_name = check_template_name(name) if name is not None else None
    new_description = check_description(description) if description is not None else None
    wanted = parse_visibility(visibility) if visibility is not None else None
    spec = tasktext.fields_of(tasks.checked_spec(ctx, user_id, raw_spec)) if raw_spec is not None else None
    now = ctx.clock()
    with ctx.db.write() as session:
        row = _locked(session, user_id, ref)
        if row.version != version:
            raise Conflict(
                f"the template was changed meanwhile: it is at version {row.version}, this change began at {version}",
                hint="look at both, and save again what should stay",
                field="version",
            )
        if new_name is not None and new_name != row.name:
            _check_name(session, row.owner_id, new_name)
            row.name = new_name
        if project is not None:
            if row.owner_id != user_id:
                raise Forbidden("only its owner can move a template to another project", field="project")
            row.project_id = projects.resolve(session, user_id, project).id
        where = session.get(ProjectRow, row.project_id)
        if wanted is not None:
            row.visibility = _shared(wanted, where).value
        row.description = new_description if new_description is not None else row.description
        row.spec = spec if spec is not None else row.spec
        row.version += 1
        row.changed_by, row.updated_at = user_id, now
        session.flush()
        audit.record(session, now, "template.changed", row.id, name=row.name, visibility=row.visibility)
        return _views(session, user_id, [row], whole=True)[0]


def remove(ctx: Context, user_id: str, ref: str) -> None:
    """Tasks that were begun with it stay as they are."""
    with ctx.db.write() as session:
        row = _locked(session, user_id, ref)
        session.delete(row)
        audit.record(session, ctx.clock(), "template.removed", row.id, name=row.name)


def _find(session: Session, user_id: str, ref: str, *, for_update: bool = False) -> TemplateRow:
    query = sa.select(TemplateRow).options(undefer(TemplateRow.spec))
    if is_id(ref, "tpl"):
        query = query.where(TemplateRow.id == ref, access.sees(TemplateRow, user_id))
    elif ref.isprintable():
        query = query.where(TemplateRow.name == ref, TemplateRow.owner_id == user_id).order_by(TemplateRow.id).limit(1)
    else:  # PostgreSQL would stumble over a NUL
        query = query.where(sa.false())
    row = session.scalars(query.with_for_update() if for_update else query).one_or_none()
    if row is None:
        raise NotFound(f"there is no template {ref[:60]!r}", hint="`diamond template ls` lists them", field="template")
    return row


def _locked(session: Session, user_id: str, ref: str) -> TemplateRow:
    if ref in gallery.all_of_them():
        raise Forbidden(f"the template {ref} comes with Diamond", hint="save it under another name to change it")
    row = _find(session, user_id, ref, for_update=True)
    allowed = sa.select(TemplateRow.id).where(TemplateRow.id == row.id, access.manages(TemplateRow, user_id))
    if session.scalars(allowed).one_or_none() is None:
        owner = session.get_one(UserRow, row.owner_id).name
        raise Forbidden(
            f"the template {row.name!r} is {owner}'s: you can use it, not change it",
            hint="save it under a name of your own",
        )
    return row


def _check_name(session: Session, owner_id: str, name: str) -> None:
    query = sa.select(TemplateRow.id).where(TemplateRow.owner_id == owner_id, TemplateRow.name == name)
    if session.scalars(query.limit(1)).one_or_none() is not None or name in gallery.all_of_them():
        raise Conflict(
            f"there is a template {name!r} already", hint="choose another name, or change that one", field="name"
        )


def _shared(wanted: Visibility, project: ProjectRow | None) -> Visibility:
    if wanted is Visibility.PROJECT and (project is None or project.personal_of):
        raise InvalidInput(
            "in a project of your own there is nobody to share it with",
            hint="name a project, or choose private or public",
            field="visibility",
        )
    return wanted


def _of_gallery(ours: gallery.BuiltIn, *, whole: bool = False) -> Template:
    return Template(
        id=ours.key,
        name=ours.name,
        description=ours.description,
        visibility=Visibility.PUBLIC,
        builtin=True,
        spec=ours.spec if whole else None,
        text=ours.text if whole else "",
    )


def _views(session: Session, user_id: str, rows: Sequence[TemplateRow], *, whole: bool = False) -> list[Template]:
    people = {row.owner_id for row in rows} | {row.changed_by for row in rows}
    names = sa.select(UserRow.id, UserRow.name).where(UserRow.id.in_(people))
    users = {str(key): str(name) for key, name in session.execute(names)}
    of_projects = projects.names_by_id(session, [row.project_id for row in rows])
    changeable = sa.select(TemplateRow.id).where(
        TemplateRow.id.in_([row.id for row in rows]), access.manages(TemplateRow, user_id)
    )
    mine = set(session.scalars(changeable))
    return [
        Template(
            id=row.id,
            name=row.name,
            description=row.description,
            version=row.version,
            owner=users.get(row.owner_id, ""),
            project=of_projects.get(row.project_id or "", ""),
            visibility=Visibility(row.visibility),
            is_mine=row.id in mine,
            created_at=row.created_at,
            updated_at=row.updated_at,
            changed_by=users.get(row.changed_by, ""),
            spec=row.spec if whole else None,
            text=tasktext.write(row.spec) if whole else "",
        )
        for row in rows
    ]
