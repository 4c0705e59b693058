"""Images as users see them: naming one, looking at them, sharing.

Who sees one, and who may change it, is in `access`: another's private image does not exist for anybody else. How an
image comes to an endpoint is in `image_ways`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import is_digest
from diamond.core.codec import decode
from diamond.core.errors import DiamondError, Forbidden, InvalidInput, NotFound, TooLarge
from diamond.core.ids import is_id
from diamond.core.images import LOCK_FILE, BuildFailure, Image, ImageFacts, Lock, Replica, ReplicaState
from diamond.core.projects import Visibility, parse_visibility
from diamond.core.recipes import Recipe
from diamond.core.states import FINAL_TASK_STATES
from diamond.core.tasks import Output
from diamond.server.services import access, projects
from diamond.server.services.context import Context
from diamond.server.store.db import record_event
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow, UserRow

MAX_PAGE = 1000
ELSEWHERE = "(elsewhere)"  # an endpoint of somebody else's, which has no name for others
LIVE = (ReplicaState.BUILDING.value, ReplicaState.READY.value)
FINAL_TASKS = [state.value for state in FINAL_TASK_STATES]
_MAX_RESULT_BYTES = 64 * 1024 * 1024
_REF = re.compile(
    r"(?:(?P<owner>[^/@\s.][^/@\s]{0,63})/)?(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:@(?P<digest>sha256:[0-9a-f]{12,64}))?"
)


def visible_to(user_id: str) -> list[sa.ColumnElement[bool]]:
    return [ImageRow.removed_at.is_(None), access.sees(ImageRow, user_id)]


def find(session: Session, user_id: str, ref: str, *options: Any, field: str = "") -> ImageRow:
    """The image a reference means: an id, ``NAME``, ``owner/NAME``, either with ``@sha256:…``.

    A name stands for the newest image of that name that is ready or being built anywhere; else for the newest. Of a
    digest the first 12 digits will do, as lists show them, where only one begins so.

    Raises:
        NotFound: naming near ones; also for what others keep to themselves.
        InvalidInput: it cannot be a reference.
    """
    if is_id(ref, "img"):
        query = sa.select(ImageRow).where(ImageRow.id == ref, *visible_to(user_id)).options(*options)
        if (row := session.scalars(query).one_or_none()) is not None:
            return row
        raise _unknown(session, user_id, ref, field)
    form = _REF.fullmatch(ref)
    if form is None or not ref.isprintable():  # PostgreSQL would stumble over a NUL
        raise InvalidInput(
            f"{ref[:100]!r} is not the name of an image",
            hint="write NAME, NAME@sha256:…, owner/NAME, docker://… or the path of an image on the endpoint",
            field=field,
        )
    where = [*visible_to(user_id), ImageRow.name == form["name"]]
    if form["owner"] is None:
        where.append(ImageRow.owner_id == user_id)
    else:
        where.append(ImageRow.owner_id.in_(sa.select(UserRow.id).where(UserRow.name == form["owner"])))
    if form["digest"] is not None:
        where.append(_has_digest(session, where, form["digest"], field))
    live = sa.exists().where(ReplicaRow.image_id == ImageRow.id, ReplicaRow.state.in_(LIVE))
    order = (sa.case((live, 0), else_=1), ImageRow.id.desc())
    query = sa.select(ImageRow).where(*where).order_by(*order).limit(1).options(*options)
    if (row := session.scalars(query).one_or_none()) is not None:
        return row
    raise _unknown(session, user_id, ref, field)


def _has_digest(session: Session, among: list[Any], digest: str, field: str) -> sa.ColumnElement[bool]:
    """The condition that an image, or a result of it, has this digest or is the only one whose digest begins so."""
    begins = f"{digest}%"  # hex digits: nothing to escape
    copies = sa.select(ReplicaRow.image_id).where(ReplicaRow.digest.like(begins), ReplicaRow.state.in_(LIVE))
    if len(digest) < len("sha256:") + 64:
        results = sa.select(ReplicaRow.digest).join(ImageRow, ImageRow.id == ReplicaRow.image_id).where(*among)
        found = set(session.scalars(results.where(ReplicaRow.digest.like(begins), ReplicaRow.state.in_(LIVE))))
        recipes = sa.select(ImageRow.recipe_digest).where(*among, ImageRow.recipe_digest.like(begins))
        if len(found := found | set(session.scalars(recipes))) > 1:
            raise InvalidInput(
                f"{len(found)} digests begin with {digest}", hint=f"write more of it: {', '.join(sorted(found)[:3])}",
                field=field,
            )  # fmt: skip
    return sa.or_(ImageRow.recipe_digest.like(begins), ImageRow.id.in_(copies))


def pinned_digest(image: ImageRow, ref: str) -> str:
    """The digest (or its beginning) that a result of the image must have for who names it so; empty: any will do."""
    form = _REF.fullmatch(ref)  # docker://…@sha256:… is a registry's digest, not one of ours
    digest = (form["digest"] if form else None) or ""
    return "" if image.recipe_digest.startswith(digest) else digest


def find_mine(session: Session, user_id: str, ref: str, *options: Any) -> ImageRow:
    """The same, for a change.

    Raises:
        Forbidden: it is another's, shared for use.
    """
    row = find(session, user_id, ref, *options)
    managed = sa.select(ImageRow.id).where(ImageRow.id == row.id, access.manages(ImageRow, user_id))
    if session.scalars(managed).one_or_none() is None:
        owner = session.get_one(UserRow, row.owner_id).name
        raise Forbidden(
            f"image {owner}/{row.name} is {owner}'s: it can be used, not changed",
            hint="build an image of your own from its recipe to change it",
        )
    return row


def _unknown(session: Session, user_id: str, ref: str, field: str) -> NotFound:
    rows = session.execute(
        sa.select(ImageRow.name, ImageRow.owner_id, UserRow.name)
        .join(UserRow, UserRow.id == ImageRow.owner_id)
        .where(*visible_to(user_id))
        .order_by(ImageRow.id.desc())
        .limit(1000)
    ).all()
    names = list(dict.fromkeys(name if owner_id == user_id else f"{owner}/{name}" for name, owner_id, owner in rows))
    plain = ref.partition("@")[0].rpartition("/")[2]
    near = [name for name in names if name.rpartition("/")[2] == plain and name != ref]
    near += [name for name in difflib.get_close_matches(ref.partition("@")[0], names, n=3) if name not in near]
    hint = f"did you mean {' or '.join(near[:3])}? " if near else ""
    known = f"images: {', '.join(names[:10])}" if names else "there is none yet; `diamond image build` makes one"
    return NotFound(f"there is no image {ref[:100]!r}", hint=hint + known, field=field)


def get(ctx: Context, user_id: str, ref: str) -> Image:
    """One image with recipe, replicas and the tasks that run in it."""
    with ctx.db.read() as session:
        row = find(session, user_id, ref, undefer(ImageRow.recipe))
        return detail_of(session, row, user_id)


def detail_of(session: Session, row: ImageRow, user_id: str) -> Image:
    """The detail view; the row must have its recipe."""
    users = used_by(session, row.id)
    if row.owner_id != user_id:  # what others run in it is the owner's business
        seen = sa.select(TaskRow.id).where(TaskRow.id.in_(users), access.sees(TaskRow, user_id))
        users = tuple(session.scalars(seen.order_by(TaskRow.id)))
    (image,) = to_images(session, [row], user_id, recipe=decode(Recipe, row.recipe), used_by=users)
    return image


def remaining(ctx: Context, user_id: str, ref: str) -> str:
    """The id of the image that a name still means after one of that name was removed; empty when none is left."""
    with ctx.db.read() as session:
        try:
            return find(session, user_id, ref.partition("@")[0]).id
        except DiamondError:
            return ""


def list_images(
    ctx: Context,
    user_id: str,
    *,
    name: str | None = None,
    endpoint: str | None = None,
    everything: bool = False,
    limit: int = 50,
    cursor: str | None = None,
) -> tuple[list[Image], str | None, int]:
    """A page of the images a user may see, newest first; the next cursor; how many there are.

    `everything`: also older ones of a name, and those whose every result is gone or failed.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise TooLarge(f"must be from 1 to {MAX_PAGE}", field="limit")
    if cursor is not None and not is_id(cursor, "img"):
        raise InvalidInput("is not a cursor this server gave out", hint="start again without it", field="cursor")
    where: list[Any] = visible_to(user_id)
    for field, text in (("name", name), ("endpoint", endpoint)):
        if text is not None and not text.isprintable():
            raise InvalidInput("contains control characters", field=field)
    if name is not None:
        where.append(ImageRow.name == name)
    with ctx.db.read() as session:
        here = sa.select(ReplicaRow.image_id).where(ReplicaRow.state.in_(LIVE))
        if endpoint is not None:
            named = [EndpointRow.name == endpoint, EndpointRow.removed_at.is_(None), access.sees_endpoint(user_id)]
            place = session.scalars(sa.select(EndpointRow.id).where(*named)).one_or_none()
            if place is None:
                raise NotFound(f"there is no endpoint {endpoint[:60]!r}", hint="`diamond endpoint ls` lists them")
            where.append(ImageRow.id.in_(here.where(ReplicaRow.endpoint_id == place)))
        if not everything:
            live = ImageRow.id.in_(sa.select(ReplicaRow.image_id).where(ReplicaRow.state.in_(LIVE)))
            rank = sa.case((live, 1), else_=0)
            newest = sa.func.row_number().over(
                partition_by=(ImageRow.owner_id, ImageRow.name), order_by=(rank.desc(), ImageRow.id.desc())
            )
            numbered = sa.select(ImageRow.id, newest.label("number")).where(*where).subquery()
            where.append(ImageRow.id.in_(sa.select(numbered.c.id).where(numbered.c.number == 1)))
        total = session.execute(sa.select(sa.func.count()).select_from(ImageRow).where(*where)).scalar_one()
        page = sa.select(ImageRow).where(*where).order_by(ImageRow.id.desc()).limit(limit + 1)
        if cursor is not None:
            page = page.where(ImageRow.id < cursor)
        rows = session.scalars(page).all()
        found = to_images(session, rows[:limit], user_id)
    return found, (found[-1].id if len(rows) > limit else None), total


def share(ctx: Context, user_id: str, ref: str, visibility: str | None = None, *, project: str | None = None) -> Image:
    """Say who may use it, and which project it is in; what is None stays. Only its owner can move it.

    Raises:
        InvalidInput: of a project of one's own there is nobody to share it with.
    """
    wanted = parse_visibility(visibility) if visibility is not None else None
    with ctx.db.write() as session:
        row = find_mine(session, user_id, ref, undefer(ImageRow.recipe))
        before = (row.visibility, row.project_id)
        if project is not None:
            if row.owner_id != user_id:
                raise Forbidden(f"image {row.name} is another's: only its owner can move it", field="project")
            row.project_id = projects.resolve(session, user_id, project).id
        if wanted is not None:
            row.visibility = wanted.value
        check_shareable(session, row, is_asked=wanted is not None)
        if before != (row.visibility, row.project_id):
            name = projects.names_by_id(session, [row.project_id]).get(row.project_id or "", "")
            record(session, row, "image.shared", ctx.clock(), {"visibility": row.visibility, "project": name})
        image = detail_of(session, row, user_id)
    ctx.hub.notify("events", f"image:{image.id}")
    return image


def check_shareable(session: Session, row: ImageRow | TaskRow, *, is_asked: bool) -> None:
    """In somebody's own project there are no others: to share something with one, say with which."""
    home = session.get(ProjectRow, row.project_id) if row.project_id else None
    if row.visibility == Visibility.PROJECT.value and (home is None or home.personal_of is not None):
        if is_asked:
            names = projects.names_of(session, row.owner_id)
            raise InvalidInput(
                "it is in a project of one person alone: nobody would see it",
                hint=f"say with which project (--project); its owner's: {', '.join(names[:10])}; or make it public",
                field="visibility",
            )
        row.visibility = Visibility.PRIVATE.value


def record(
    session: Session,
    image: ImageRow,
    kind: str,
    now: float,
    data: dict[str, Any] | None = None,
    *,
    task_id: str | None = None,
    endpoint_id: str | None = None,
) -> None:
    named = {"image_id": image.id, "name": image.name, **(data or {})}
    record_event(
        session, at=now, kind=kind, owner_id=image.owner_id, task_id=task_id, endpoint_id=endpoint_id, data=named
    )


def used_by(session: Session, image_id: str) -> tuple[str, ...]:
    """Live tasks that run in it, and live builds on top of it."""
    live = TaskRow.state.not_in(FINAL_TASKS)
    query = sa.select(TaskRow).where(live, TaskRow.image_id == image_id, TaskRow.kind == "command")
    found = {task.id for task in session.scalars(query)}
    builds = sa.select(TaskRow).where(live, TaskRow.kind == "build").options(undefer(TaskRow.work))
    found |= {task.id for task in session.scalars(builds) if (task.work or {}).get("base_id") == image_id}
    return tuple(sorted(found))


def replicas_of(session: Session, image_id: str) -> list[tuple[ReplicaRow, EndpointRow]]:
    """Of each endpoint the live one, or else the newest; by name of endpoint."""
    rows = session.execute(
        sa.select(ReplicaRow, EndpointRow)
        .join(EndpointRow, EndpointRow.id == ReplicaRow.endpoint_id)
        .where(ReplicaRow.image_id == image_id)
        .order_by(EndpointRow.name, ReplicaRow.state.in_(LIVE).desc(), ReplicaRow.id.desc())
    ).all()
    best: dict[str, tuple[ReplicaRow, EndpointRow]] = {}
    for replica, endpoint in rows:
        best.setdefault(endpoint.id, (replica, endpoint))
    return list(best.values())


def to_images(session: Session, rows: Iterable[ImageRow], user_id: str, **detail: Any) -> list[Image]:
    rows = list(rows)
    wanted = sa.select(UserRow.id, UserRow.name).where(UserRow.id.in_({row.owner_id for row in rows}))
    owners = {owner_id: name for owner_id, name in session.execute(wanted)}  # noqa: C416
    names = projects.names_by_id(session, (row.project_id for row in rows))
    seen = set(session.scalars(sa.select(EndpointRow.id).where(access.sees_endpoint(user_id))))
    return [
        Image(
            id=row.id,
            name=row.name,
            owner=owners.get(row.owner_id, ""),
            visibility=Visibility(row.visibility),
            project=names.get(row.project_id or "", ""),
            recipe_digest=row.recipe_digest,
            created_at=row.created_at,
            replicas=tuple(
                to_replica(replica, endpoint.name) if endpoint.id in seen else _elsewhere(replica)
                for replica, endpoint in replicas_of(session, row.id)
            ),
            labels=dict(row.labels),
            is_mine=row.owner_id == user_id,
            **detail,
        )
        for row in rows
    ]


def to_replica(row: ReplicaRow, endpoint: str) -> Replica:
    return Replica(
        endpoint=endpoint,
        state=ReplicaState(row.state),
        origin=row.origin,
        task_id=row.task_id or "",
        detail=row.detail,
        facts=decode(ImageFacts, row.facts) if row.facts else None,
        failure=decode(BuildFailure, row.failure) if row.failure else None,
        created_at=row.created_at,
        ready_at=row.ready_at,
        used_at=row.used_at,
    )


def _elsewhere(row: ReplicaRow) -> Replica:
    """A result at an endpoint the user does not see: that there is one, and what it is, but not where."""
    view = to_replica(row, ELSEWHERE)
    return replace(view, facts=replace(view.facts, path="") if view.facts else None, detail="", failure=None)


def shown_name(session: Session, image: ImageRow, user_id: str) -> str:
    """As this user would name it."""
    if image.owner_id == user_id:
        return image.name
    return f"{session.get_one(UserRow, image.owner_id).name}/{image.name}"


def outputs_of(session: Session, task_id: str | None) -> Sequence[Output]:
    task = session.get(TaskRow, task_id, options=[undefer(TaskRow.outputs)]) if task_id else None
    return [decode(Output, item) for item in task.outputs] if task is not None else []


def read_result(ctx: Context, session: Session, task_id: str | None, name: str) -> Any:
    """A JSON file a task of images left among its outputs; None when there is none, or it is not what it should be."""
    for item in outputs_of(session, task_id):
        digest = f"sha256:{item.sha256}"
        if item.path == name and item.stored and is_digest(digest) and item.size_bytes <= _MAX_RESULT_BYTES:
            try:
                with ctx.blobs.open(digest) as file:
                    return json.loads(file.read(_MAX_RESULT_BYTES + 1))
            except (OSError, ValueError, RecursionError):
                return None
    return None


def lock_of(ctx: Context, session: Session, replica: ReplicaRow) -> Lock | None:
    """Exact versions of what is in it, where that is known."""
    raw = read_result(ctx, session, replica.task_id, LOCK_FILE)
    try:
        return decode(Lock, raw) if isinstance(raw, dict) else None
    except DiamondError:
        return None
