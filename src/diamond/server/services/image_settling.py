"""What became of an image that was being made, once its task has ended.

The task's own end is the record; this only draws the conclusion, so it may be repeated, and a server that died
before it did draws it at its next start. What an endpoint says of its result is checked before it is believed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.bundles import is_digest
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError
from diamond.core.faults import fault_point
from diamond.core.images import FACTS_FILE, FAILURE_FILE, BuildFailure, ImageFacts, ReplicaState, StageRecord
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.recipes import BUILDERS
from diamond.core.states import FINAL_TASK_STATES, TaskState
from diamond.server.services import images, snapshots
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow

_FINAL = [state.value for state in FINAL_TASK_STATES]
_MAX_TEXT = 4000
_MAX_STAGES = 50
_KEY = re.compile(r"[0-9a-f]{8,64}")
_WORD = re.compile(r"[A-Za-z0-9._+~ -]{0,100}")


def settle(ctx: Context) -> None:
    """Say of every image whose making has ended whether it is ready, or why not."""
    over = (
        sa.select(ReplicaRow.id)
        .join(TaskRow, TaskRow.id == ReplicaRow.task_id)
        .where(ReplicaRow.state == ReplicaState.BUILDING.value, TaskRow.state.in_(_FINAL))
        .order_by(ReplicaRow.id)
        .limit(500)
    )
    with ctx.db.read() as session:  # nearly always there is nothing to do, and writers queue
        waiting = session.scalars(over).all()
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
        ).all()
        for replica, task, image, endpoint in rows:
            _conclude(ctx, session, replica, task, image, endpoint)
            topics |= {f"image:{image.id}", f"task:{task.id}", "events"}
        fault_point("server.settling")
    ctx.hub.notify(*topics)


def _conclude(
    ctx: Context, session: Session, replica: ReplicaRow, task: TaskRow, image: ImageRow, endpoint: EndpointRow
) -> None:
    now = ctx.clock()
    replica.settled_at = now
    about: dict[str, Any] = {"endpoint": endpoint.name, "how": replica.origin}
    found = None
    if task.state == TaskState.SUCCEEDED:
        found = _checked_facts(images.read_result(ctx, session, task.id, FACTS_FILE), image)
    if found is not None and endpoint.removed_at is None:
        replica.state, replica.ready_at = ReplicaState.READY.value, now
        replica.facts, replica.digest, replica.size_bytes = encode(found), found.digest, found.size_bytes
        kind = "image.ready"
        about |= {"digest": found.digest, "size_bytes": found.size_bytes, "seconds": found.seconds}
    else:
        failure = _failure(ctx, session, task)
        replica.state, replica.failure = ReplicaState.FAILED.value, encode(failure)
        kind = "image.failed"
        about |= {"stage": failure.stage, "message": failure.message, "hint": failure.hint}
    images.record(session, image, kind, now, about, task_id=task.id, endpoint_id=endpoint.id)


def _checked_facts(raw: Any, image: ImageRow) -> ImageFacts | None:
    """What the endpoint said of its result, if it can be used."""
    try:
        facts = decode(ImageFacts, raw)
    except DiamondError:
        return None
    texts = (facts.builder_version, facts.architecture, facts.python, facts.os)
    sound = (
        facts.image_id == image.id
        and facts.builder in BUILDERS
        and is_digest(facts.digest)
        and 0 < len(facts.path) <= 4096
        and facts.path.isprintable()
        and 0 <= facts.size_bytes < 2**60
        and all(_WORD.fullmatch(text) for text in texts)
    )
    if not sound:
        return None
    stages = tuple(
        StageRecord(
            name=_clean(stage.name, 40),
            title=_clean(stage.title, 100),
            seconds=stage.seconds if 0 <= stage.seconds < 1e9 else 0.0,
            state=_clean(stage.state, 20),
            key=stage.key if _KEY.fullmatch(stage.key) else "",
        )
        for stage in facts.stages[:_MAX_STAGES]
    )
    return replace(facts, stages=stages, recipe_digest=image.recipe_digest)


def _failure(ctx: Context, session: Session, task: TaskRow) -> BuildFailure:
    raw = images.read_result(ctx, session, task.id, FAILURE_FILE)
    reason = Reason(task.reason or Reason.LOST)
    if isinstance(raw, dict) and reason is not Reason.CANCELLED:
        try:
            said = decode(BuildFailure, raw)
            return BuildFailure(
                stage=_clean(said.stage, 40),
                message=_clean(said.message, 1000),
                line=_clean(said.line, 1000),
                excerpt=_clean(said.excerpt, 20_000),
                hint=_clean(said.hint, 1000),
                code=_clean(said.code, 60),
            )
        except DiamondError:
            pass
    if task.state == TaskState.SUCCEEDED:
        return BuildFailure(
            stage="", message="the job ended well but did not say what it made", hint="is its agent up to date?"
        )
    if reason is Reason.CANCELLED:
        return BuildFailure(stage="", message="it was stopped on request", code="cancelled")
    detail = _clean(task.detail, _MAX_TEXT)
    sentence = MEANINGS[reason].sentence
    return BuildFailure(stage="", message=detail or sentence, hint=sentence if detail else "", code=reason.value)


def _clean(raw: str, limit: int) -> str:
    """As the database can hold it: PostgreSQL refuses NUL, and lone surrogates are not text."""
    return raw[:limit].replace("\x00", "").encode(errors="replace").decode()
