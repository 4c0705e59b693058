"""The list of images that people look through: searched, filtered, sorted, in numbered pages.

Beside `images.list_images`, which programs read by cursor. Nothing here changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.images import Image, Lock, ReplicaState
from diamond.core.projects import Visibility
from diamond.server.services import access, image_progress, images
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow, UserRow

SORTS = ("newest", "oldest", "name", "size")
STATES = tuple(state.value for state in ReplicaState)
_MAX_TEXT = 100


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What is left empty filters nothing. `text` is looked for in names and owners' names."""

    text: str = ""
    state: str = ""
    endpoint: str = ""
    visibility: str = ""
    whose: str = ""  # "mine", "others"
    sort: str = "newest"
    everything: bool = False  # also older ones of a name


@dataclass(frozen=True, kw_only=True)
class Listing:
    images: list[Image]
    total: int
    page: int
    pages: int
    used: dict[str, int]  # image id: live tasks that run in it


def search(ctx: Context, user_id: str, wanted: Filters, *, page: int = 1, size: int = 50) -> Listing:
    """A page of the images this user may see. A page beyond the last is the last."""
    with ctx.db.read() as session:
        where = _conditions(session, user_id, wanted)
        total = session.execute(sa.select(sa.func.count()).select_from(ImageRow).where(*where)).scalar_one()
        pages = max(1, -(-total // size))
        page = min(max(page, 1), pages)
        query = sa.select(ImageRow).where(*where).order_by(*_order(wanted.sort)).limit(size).offset((page - 1) * size)
        found = images.to_images(session, session.scalars(query).all(), user_id)
        return Listing(images=found, total=total, page=page, pages=pages, used=_used(session, found))


def _conditions(session: Session, user_id: str, wanted: Filters) -> list[Any]:
    where: list[Any] = images.visible_to(user_id)
    if text := "".join(char for char in wanted.text[:_MAX_TEXT] if char.isprintable()).strip():
        owners = sa.select(UserRow.id).where(UserRow.name.icontains(text, autoescape=True))
        where.append(sa.or_(ImageRow.name.icontains(text, autoescape=True), ImageRow.owner_id.in_(owners)))
    if wanted.visibility in {each.value for each in Visibility}:
        where.append(ImageRow.visibility == wanted.visibility)
    if wanted.whose in ("mine", "others"):
        where.append((ImageRow.owner_id == user_id) if wanted.whose == "mine" else (ImageRow.owner_id != user_id))
    results = sa.select(ReplicaRow.image_id)
    if wanted.endpoint:
        named = sa.select(EndpointRow.id).where(
            EndpointRow.name == wanted.endpoint, EndpointRow.removed_at.is_(None), access.sees_endpoint(user_id)
        )
        results = results.where(ReplicaRow.endpoint_id.in_(named))
    live = ImageRow.id.in_(sa.select(ReplicaRow.image_id).where(ReplicaRow.state.in_(images.LIVE)))
    if wanted.state in STATES:
        where.append(ImageRow.id.in_(results.where(ReplicaRow.state == wanted.state)))
        if wanted.state not in images.LIVE:  # an image is what the best of its results is
            where.append(sa.not_(live))
    elif wanted.endpoint:
        where.append(ImageRow.id.in_(results.where(ReplicaRow.state.in_(images.LIVE))))
    if not wanted.everything:
        rank = sa.case((live, 1), else_=0)
        newest = sa.func.row_number().over(
            partition_by=(ImageRow.owner_id, ImageRow.name), order_by=(rank.desc(), ImageRow.id.desc())
        )
        numbered = sa.select(ImageRow.id, newest.label("number")).where(*where).subquery()
        where.append(ImageRow.id.in_(sa.select(numbered.c.id).where(numbered.c.number == 1)))
    return where


def _order(sort: str) -> tuple[Any, ...]:
    if sort == "name":
        return (sa.func.lower(ImageRow.name), ImageRow.id.desc())
    if sort == "size":
        largest = (
            sa.select(sa.func.max(ReplicaRow.size_bytes))
            .where(ReplicaRow.image_id == ImageRow.id, ReplicaRow.state.in_(images.LIVE))
            .correlate(ImageRow)
            .scalar_subquery()
        )
        return (sa.func.coalesce(largest, -1).desc(), ImageRow.id.desc())
    return (ImageRow.id.asc(),) if sort == "oldest" else (ImageRow.id.desc(),)


def _used(session: Session, found: list[Image]) -> dict[str, int]:
    """How many live tasks run in each; of others' images nobody is told."""
    mine = [image.id for image in found if image.is_mine]
    counts = (
        sa.select(TaskRow.image_id, sa.func.count())
        .where(TaskRow.image_id.in_(mine), TaskRow.kind == "command", TaskRow.state.not_in(images.FINAL_TASKS))
        .group_by(TaskRow.image_id)
    )
    return {str(image_id): int(number) for image_id, number in session.execute(counts)}


def may_change(ctx: Context, user_id: str, image_id: str) -> bool:
    """Whether this user may share and remove it, rather than use it only."""
    with ctx.db.read() as session:
        managed = sa.select(ImageRow.id).where(ImageRow.id == image_id, access.manages(ImageRow, user_id))
        return session.scalars(managed).one_or_none() is not None


def packages(ctx: Context, user_id: str, ref: str, endpoint: str | None = None) -> tuple[Lock | None, str]:
    """Exact versions of what is in the image, as its newest ready result (there) has them, and where that is.

    Raises:
        NotFound: it is ready nowhere (there).
    """
    with ctx.db.read() as session:
        image = images.find(session, user_id, ref)
        replica, where = image_progress.newest(session, user_id, image, endpoint, ref=ref, state=ReplicaState.READY)
        seen = session.scalars(
            sa.select(EndpointRow.id).where(EndpointRow.id == where.id, access.sees_endpoint(user_id))
        )
        return images.lock_of(ctx, session, replica), where.name if seen.one_or_none() else images.ELSEWHERE
