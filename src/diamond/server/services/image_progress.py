"""How far the making of an image is, from its task and the log of its job."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import NotFound
from diamond.core.image_views import BuildProgress
from diamond.core.images import STAGE_LINE, ReplicaState, StageRecord, parse_stages
from diamond.server.services import images, snapshots
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, ImageRow, JobRow, ReplicaRow, TaskRow

_MAX_LOG_BYTES = 32 * 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
_MARK = b"diamond: stage "


def stage_text(ctx: Context, session: Session, task: TaskRow) -> str:
    """ ", 3 of 5 stages" of the image a task waits for; empty when nothing is known."""
    work = task.work or {}
    replica = session.get(ReplicaRow, work.get("base_replica_id") or work.get("replica_id") or "")
    if replica is None or replica.state != ReplicaState.BUILDING or not replica.task_id:
        return ""
    _, number, total = _stages(ctx, session, replica.task_id)
    return f", stage {number} of {total}" if total else ""


def progress(ctx: Context, user_id: str, ref: str, endpoint: str | None = None) -> BuildProgress:
    """How the image's making at an endpoint stands; without one, of the newest.

    Raises:
        NotFound: there is no such image, or it was never made there.
    """
    with ctx.db.read() as session:
        image = images.find(session, user_id, ref)
        replica, where = newest(session, user_id, image, endpoint, ref=ref)
        seen = snapshots.is_seen(session, user_id, where)
        task = session.get(TaskRow, replica.task_id) if replica.task_id else None
        stages, number, total = _stages(ctx, session, replica.task_id) if replica.task_id else ((), 0, 0)
        view = images.to_replica(replica, where.name if seen else images.ELSEWHERE)
        if view.facts is not None and view.facts.stages:
            stages = view.facts.stages
        return BuildProgress(
            image_id=image.id,
            endpoint=view.endpoint,
            state=view.state,
            task_id=view.task_id,
            task_state=task.state if task else "",
            stages=stages,
            number=number,
            total=total,
            detail=(task.pending_reason if task and not view.facts else "") or view.detail,
            failure=view.failure,
        )


def newest(
    session: Session,
    user_id: str,
    image: ImageRow,
    endpoint: str | None,
    *,
    ref: str,
    state: ReplicaState | None = None,
) -> tuple[ReplicaRow, EndpointRow]:
    """The newest result of an image (at an endpoint, in a state), with the digest that `ref` names, if it does.

    Endpoints that the user does not see have no name for them.

    Raises:
        NotFound: saying where it is instead.
    """
    query = (
        sa.select(ReplicaRow, EndpointRow)
        .join(EndpointRow, EndpointRow.id == ReplicaRow.endpoint_id)
        .where(ReplicaRow.image_id == image.id)
        .order_by(ReplicaRow.id.desc())
    )
    if state is not None:
        query = query.where(ReplicaRow.state == state.value, EndpointRow.removed_at.is_(None))
    pinned = images.pinned_digest(image, ref)
    if pinned:
        query = query.where(ReplicaRow.digest.like(f"{pinned}%"))
    rows = session.execute(query).all()
    if endpoint is not None:
        rows = [row for row in rows if snapshots.is_seen(session, user_id, row[1])]
    for replica, where in rows:
        if endpoint in (None, where.name):
            return replica, where
    word = f" {state.value.lower()}" if state else ""
    places = ", ".join(sorted({where.name for _, where in rows})) or "nowhere"
    if endpoint is None:
        raise NotFound(f"image {image.name} is{word} nowhere", hint="`diamond image build` or `copy` brings it")
    raise NotFound(f"image {image.name} is not{word} at endpoint {endpoint[:60]!r}", hint=f"it is{word} at: {places}")


def _stages(ctx: Context, session: Session, task_id: str) -> tuple[tuple[StageRecord, ...], int, int]:
    """The stages in the log of the task's newest job, the number of the last that began, and how many there are."""
    job = session.scalars(
        sa.select(JobRow.id).where(JobRow.task_id == task_id).order_by(JobRow.attempt.desc()).limit(1)
    ).one_or_none()
    if job is None:
        return (), 0, 0
    text = _stage_lines(ctx, job)
    begun = [(int(match[1]), int(match[2])) for match in STAGE_LINE.finditer(text)]
    number, total = begun[-1] if begun else (0, 0)
    return parse_stages(text), number, total


def _stage_lines(ctx: Context, job_id: str) -> str:
    """Of a log only the lines that say where it is: a build may write many megabytes of others."""
    kept: list[bytes] = []
    offset, rest = 0, b""
    while offset < _MAX_LOG_BYTES:
        piece = ctx.streams.read(job_id, "log", offset, _PIECE_BYTES)
        if not piece.data or piece.next_offset <= offset:
            break
        offset = piece.next_offset
        *lines, rest = (rest + piece.data).split(b"\n")
        kept += [line for line in lines if line.startswith(_MARK)]
    return b"\n".join(kept).decode(errors="replace") + "\n"
