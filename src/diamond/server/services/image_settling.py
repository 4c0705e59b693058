"""What became of an image that was being made, once its task has ended.

The task's own end is the record; this only draws the conclusion, so it may be repeated, and a server that died
before it did draws it at its next start. What an endpoint says of its result is checked before it is believed.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import is_digest
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError
from diamond.core.faults import fault_point
from diamond.core.images import FACTS_FILE, FAILURE_FILE, BuildFailure, ImageFacts, ReplicaState, StageRecord
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.recipes import BUILDERS
from diamond.core.states import FINAL_TASK_STATES, TaskState
from diamond.server.services import holdings, image_placing, image_work, images, snapshots
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow

log = logging.getLogger("diamond.server.images")
_FINAL = [state.value for state in FINAL_TASK_STATES]
MAX_IMAGE_BYTES = 2**44  # 16 TiB: what claims to be larger is no image
_MAX_TEXT = 4000
_MAX_STAGES = 50
_KEY = re.compile(r"[0-9a-f]{8,64}")
_WORD = re.compile(r"[A-Za-z0-9._+~ -]{0,100}")
_UNREADABLE = BuildFailure(
    stage="", message="what the endpoint said of its result cannot be kept", hint="is its agent up to date?"
)

_OVER = (
    sa.select(ReplicaRow.id)
    .join(TaskRow, TaskRow.id == ReplicaRow.task_id)
    .where(ReplicaRow.state == ReplicaState.BUILDING.value, TaskRow.state.in_(_FINAL))
    .order_by(ReplicaRow.id)
    .limit(500)
)


def settle(ctx: Context) -> None:
    """Say of every image whose making has ended whether it is ready, or why not."""
    with ctx.db.read() as session:  # nearly always there is nothing to do, and writers queue
        waiting = session.scalars(_OVER).all()
    if not waiting:
        return
    topics: set[str] = set()
    with ctx.db.write() as session:
        snapshots.endpoints(session, lock=True)
        rows = session.execute(
            sa.select(ReplicaRow, TaskRow, ImageRow, EndpointRow)
            .join(TaskRow, TaskRow.id == ReplicaRow.task_id)
            .join(ImageRow, ImageRow.id == ReplicaRow.image_id)
            .join(EndpointRow, EndpointRow.id == ReplicaRow.endpoint_id)
            .where(ReplicaRow.id.in_(waiting), ReplicaRow.state == ReplicaState.BUILDING.value)
            .where(TaskRow.state.in_(_FINAL))
            .options(undefer(TaskRow.work), undefer(TaskRow.spec), undefer(ImageRow.recipe))
        ).all()
        for replica, task, image, endpoint in rows:
            try:
                with session.begin_nested():  # one odd result must not keep the others waiting
                    kind, about = _conclude(ctx, session, replica, task, image, endpoint)
            except exc.OperationalError:  # that is the database's trouble, not the result's
                raise
            except Exception:
                log.exception("the result of task %s cannot be kept", task.id)
                replica.settled_at = ctx.clock()
                replica.state, replica.failure = ReplicaState.FAILED.value, encode(_UNREADABLE)
                kind, about = "image.failed", {"endpoint": endpoint.name, "message": _UNREADABLE.message}
            images.record(session, image, kind, ctx.clock(), about, task_id=task.id, endpoint_id=endpoint.id)
            if kind == "image.failed":
                _fall_back(ctx, session, replica, task, image, endpoint)
            topics |= {f"image:{image.id}", f"task:{task.id}", "events"}
        fault_point("server.settling")
    ctx.hub.notify(*topics)


def _conclude(
    ctx: Context, session: Session, replica: ReplicaRow, task: TaskRow, image: ImageRow, endpoint: EndpointRow
) -> tuple[str, dict[str, Any]]:
    """Write what became of it; the event to be recorded."""
    now = ctx.clock()
    replica.settled_at = now
    about: dict[str, Any] = {"endpoint": endpoint.name, "how": replica.origin}
    found, said = None, None
    if task.state == TaskState.SUCCEEDED:
        found = _checked_facts(images.read_result(ctx, session, task.id, FACTS_FILE), image)
        if found is not None and (problem := _other_than_ordered(ctx, task, found)):
            found, said = None, BuildFailure(stage="", message=problem, hint="try again", code="digest")
    if found is not None and endpoint.removed_at is None:
        replica.state, replica.ready_at = ReplicaState.READY.value, now
        found = _with_size(ctx, session, task, image, found)
        replica.facts, replica.digest, replica.size_bytes = encode(found), found.digest, found.size_bytes
        kind = "image.ready"
        about |= {"digest": found.digest, "size_bytes": found.size_bytes, "seconds": found.seconds}
    else:
        failure = said or _failure(ctx, session, task)
        replica.state, replica.failure = ReplicaState.FAILED.value, encode(failure)
        kind = "image.failed"
        about |= {"stage": failure.stage, "message": failure.message, "hint": failure.hint}
    return kind, about


def _with_size(ctx: Context, session: Session, task: TaskRow, image: ImageRow, made: ImageFacts) -> ImageFacts:
    """The facts with a size that others agree on: it counts for the owner's quota, and an endpoint may say anything.

    Bytes that came through the server were counted here, and are looked at where the order gave them or the endpoint
    sent them: of others' nobody learns the size. Otherwise one digest is one size wherever it lies, and the largest
    that was said of it counts for all results of the image.
    """
    same = sa.and_(ReplicaRow.image_id == image.id, ReplicaRow.digest == made.digest)
    is_known = made.digest == image_work.mounted_payload(ctx, task) or bool(
        holdings.held_in(session, task.endpoint_id or "", [made.digest])
    )
    size_bytes = ctx.blobs.size(made.digest) if is_known else 0
    if not size_bytes:
        said = session.execute(sa.select(sa.func.max(ReplicaRow.size_bytes)).where(same)).scalar_one()
        size_bytes = max(made.size_bytes, said or 0)
    if size_bytes != made.size_bytes:
        log.warning(
            "an endpoint says that image %s (%s) has %d bytes; it has %d",
            image.id, made.digest, made.size_bytes, size_bytes,
        )  # fmt: skip
    session.execute(sa.update(ReplicaRow).where(same).values(size_bytes=size_bytes))
    return replace(made, size_bytes=size_bytes)


def _other_than_ordered(ctx: Context, task: TaskRow, made: ImageFacts) -> str:
    """In what an endpoint's result differs from what its order asked for; empty when it is that."""
    order = image_work.order_of(task)
    if order is None:
        return ""
    if order.builder and made.builder != order.builder:
        return f"the endpoint made an image of {made.builder}; {order.builder} was asked for"
    if order.action not in ("import", "link") or not order.digest or made.digest == order.digest:
        return ""
    # A virtual environment is pointed to this endpoint's Python, which changes it. A payload whose own digest was asked
    # for was checked when it was staged.
    if made.builder == "venv" or order.digest == image_work.mounted_payload(ctx, task):
        return ""
    return f"what arrived is not the image that was sent: its digest is {made.digest}, not {order.digest}"


def _fall_back(
    ctx: Context, session: Session, replica: ReplicaRow, task: TaskRow, image: ImageRow, endpoint: EndpointRow
) -> None:
    """Who asked for an image to be brought somewhere gets it by the next way, as a task that waits for one does."""
    work = task.work or {}
    if not work.get("falls_back") or task.reason == Reason.CANCELLED or endpoint.removed_at is not None:
        return
    if image.removed_at is not None or replica.origin not in ("linked", "copied"):
        return
    tried = sorted({*work.get("tried", []), replica.origin})
    session.flush()
    need = image_placing.need_image(ctx, session, image, [endpoint], tried=tried)
    if endpoint.id not in need.ways:
        return
    try:
        asked_by = image_work.asker_of(task)
        _, made = image_placing.begin(ctx, session, task.owner_id, need, endpoint, asked_by=asked_by)
    except DiamondError as error:  # its policy changed just now
        log.warning("image %s cannot be brought to %s another way: %s", image.id, endpoint.name, error)
        return
    for one in made:  # the planner places them
        if (one.work or {}).get("replica_id"):
            one.work = {**(one.work or {}), "falls_back": True, **({"tried": tried} if one.kind == "transfer" else {})}


def _checked_facts(raw: Any, image: ImageRow) -> ImageFacts | None:
    """What the endpoint said of its result, if it can be used."""
    try:
        facts = decode(ImageFacts, raw)
    except DiamondError:
        return None
    if facts.image_id != image.id or not 0 < len(facts.path) <= 4096 or not facts.path.isprintable():
        return None
    made = clean_facts(facts)
    return replace(made, recipe_digest=image.recipe_digest) if made is not None else None


def clean_facts(facts: ImageFacts) -> ImageFacts | None:
    """What somebody said of an image, as it may be kept; None when it makes no sense."""
    texts = (facts.builder_version, facts.architecture, facts.python, facts.os)
    sound = (
        facts.builder in BUILDERS
        and is_digest(facts.digest)
        and 0 <= facts.size_bytes <= MAX_IMAGE_BYTES
        and 0 <= facts.num_packages < 2**31
        and all(0 <= number < 1e12 for number in (facts.built_at, facts.seconds))
        and all(_WORD.fullmatch(text) for text in texts)
    )
    if not sound:
        return None
    stages = tuple(
        StageRecord(
            name=clean_text(stage.name, 40),
            title=clean_text(stage.title, 100),
            seconds=stage.seconds if 0 <= stage.seconds < 1e9 else 0.0,
            state=clean_text(stage.state, 20),
            key=stage.key if _KEY.fullmatch(stage.key) else "",
        )
        for stage in facts.stages[:_MAX_STAGES]
    )
    return replace(facts, stages=stages)


def _failure(ctx: Context, session: Session, task: TaskRow) -> BuildFailure:
    raw = images.read_result(ctx, session, task.id, FAILURE_FILE)
    reason = Reason(task.reason or Reason.LOST)
    if isinstance(raw, dict) and reason is not Reason.CANCELLED:
        try:
            said = decode(BuildFailure, raw)
            return BuildFailure(
                stage=clean_text(said.stage, 40),
                message=clean_text(said.message, 1000),
                line=clean_text(said.line, 1000),
                excerpt=clean_text(said.excerpt, 20_000),
                hint=clean_text(said.hint, 1000),
                code=clean_text(said.code, 60),
            )
        except DiamondError:
            pass
    if task.state == TaskState.SUCCEEDED:
        return BuildFailure(
            stage="", message="the job ended well but did not say what it made", hint="is its agent up to date?"
        )
    if reason is Reason.CANCELLED:
        return BuildFailure(stage="", message="it was stopped on request", code="cancelled")
    detail = clean_text(task.detail, _MAX_TEXT)
    sentence = MEANINGS[reason].sentence
    return BuildFailure(stage="", message=detail or sentence, hint=sentence if detail else "", code=reason.value)


def clean_text(raw: str, limit: int) -> str:
    """As the database can hold it: PostgreSQL refuses NUL, and lone surrogates are not text."""
    return raw[:limit].replace("\x00", "").encode(errors="replace").decode()
