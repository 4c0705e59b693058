"""Who may have which uploaded bytes: a digest is a name, not a key.

Blobs are kept once, whoever sent them. A user, or an endpoint's agent, has a blob when they sent all of its bytes, or
when something they may see holds it: users their tasks, images and templates, agents the jobs they are to run. For
everybody else it is not here: they are asked to send it, as if nobody had. A bundle has to be registered
(`bundles.register`), which needs all of its files: who writes a list of others' files has the list alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from diamond.core.bundles import digest_of_ref, is_bundle_ref
from diamond.core.errors import DiamondError
from diamond.core.states import FINAL_JOB_STATES
from diamond.server.services import access, gallery, manifests
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.store.models import HoldingRow, ImageRow, JobRow, TaskRow, TemplateRow

_BATCH = 2000
_MOST_SEEN = 500  # tasks that are looked through, newest first, for one that holds a file
_FINAL = [state.value for state in FINAL_JOB_STATES]


def holder_of(party: Identity) -> str:
    """Whose bytes they are that a party sends."""
    found = party.user_id or party.endpoint_id
    assert found is not None
    return found


def give(ctx: Context, holder: str, refs: Iterable[str] | Mapping[str, int]) -> set[str]:
    """Note that a holder has sent these; which are new to it. Safe to repeat.

    What is new to a user counts for them (`usage.note_stored`), until it is collected (`collection`).
    """
    with ctx.db.write() as session:
        return give_in(session, holder, refs, ctx.clock())


def give_in(session: Session, holder: str, refs: Iterable[str] | Mapping[str, int], now: float) -> set[str]:
    """As `give`. Where `refs` is a mapping, it says how large each of them is."""
    sizes = refs if isinstance(refs, Mapping) else {}
    values = [
        {"holder": holder, "ref": ref, "created_at": now, "size_bytes": sizes.get(ref, 0)} for ref in sorted(set(refs))
    ]
    insert: Any = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    given: set[str] = set()
    for first in range(0, len(values), _BATCH):
        rows = insert(HoldingRow).values(values[first : first + _BATCH]).on_conflict_do_nothing()
        given |= set(session.scalars(rows.returning(HoldingRow.ref)))
    return given


def held(ctx: Context, holder: str, refs: Iterable[str]) -> set[str]:
    """Those of `refs` that this holder has sent."""
    with ctx.db.read() as session:
        return held_in(session, holder, refs)


def held_in(session: Session, holder: str, refs: Iterable[str]) -> set[str]:
    wanted = sorted(set(refs))
    found: set[str] = set()
    for first in range(0, len(wanted), _BATCH):
        some = HoldingRow.ref.in_(wanted[first : first + _BATCH])
        found |= set(session.scalars(sa.select(HoldingRow.ref).where(HoldingRow.holder == holder, some)))
    return found


def may_read(ctx: Context, party: Identity, digest: str) -> bool:
    """Whether a party may have this blob, or this bundle's manifest."""
    if party.endpoint_id is None:
        return user_may_read(ctx, holder_of(party), digest)
    return bool(held(ctx, party.endpoint_id, [digest])) or _is_ordered(ctx, party.endpoint_id, digest)


def user_may_read(ctx: Context, user_id: str, digest: str) -> bool:
    mine = gallery.has(digest) or held(ctx, user_id, [digest, f"bundle:{digest}"])
    return bool(mine) or _is_seen(ctx, user_id, digest)


def may_use(session: Session, user_id: str, digest: str) -> bool:
    """Whether a user may have the files of this bundle put in place for a task or an image of theirs."""
    ref = f"bundle:{digest}"
    if held_in(session, user_id, [ref]) or gallery.has(digest):
        return True
    # The text is looked for first, which is quick, and then the place it has in the description.
    models: tuple[tuple[access.Shared, sa.orm.InstrumentedAttribute[dict[str, Any]]], ...]
    models = ((TaskRow, TaskRow.spec), (ImageRow, ImageRow.recipe), (TemplateRow, TemplateRow.spec))
    for model, column in models:
        named = sa.cast(column, sa.Text).contains(digest.removeprefix("sha256:"))
        query = sa.select(column).where(access.sees(model, user_id), named).order_by(model.id.desc())
        if any(ref in refs_of(document) for document in session.scalars(query.limit(_MOST_SEEN))):
            return True
    return False


def refs_of(document: dict[str, Any]) -> set[str]:
    """Bundles that a task's spec, or an image's recipe, names."""
    folders = [document.get("file_mounts"), document.get("files"), (document.get("image") or {}).get("files")]
    refs = [document.get("workdir"), *(ref for folder in folders for ref in (folder or {}).values())]
    return {ref for ref in refs if isinstance(ref, str) and is_bundle_ref(ref)}


def _is_ordered(ctx: Context, endpoint_id: str, digest: str) -> bool:
    """Whether a job that this endpoint is to run needs it."""
    live = (JobRow.endpoint_id == endpoint_id, JobRow.state.not_in(_FINAL))
    query = sa.select(TaskRow.spec).join(JobRow, JobRow.task_id == TaskRow.id).where(*live).order_by(JobRow.id.desc())
    with ctx.db.read() as session:
        return _is_named(ctx, session.scalars(query), digest)


def _is_seen(ctx: Context, user_id: str, digest: str) -> bool:
    """Whether a task or an image that this user may see holds it."""
    with ctx.db.read() as session:
        recipes = sa.select(ImageRow.recipe).where(access.sees(ImageRow, user_id), _has_files())
        templates = sa.select(TemplateRow.spec).where(access.sees(TemplateRow, user_id)).order_by(TemplateRow.id.desc())
        return (
            _is_named(ctx, _seen_tasks(session, user_id, digest), digest)
            or _is_named(ctx, session.scalars(recipes), digest)
            or _is_named(ctx, session.scalars(templates.limit(_MOST_SEEN)), digest)
            or _is_result(session, user_id, digest)
        )


def _seen_tasks(session: Session, user_id: str, digest: str) -> Iterable[dict[str, Any]]:
    """Their own, and those of people who have it: nobody else's can hold it."""
    holders = sa.select(HoldingRow.holder).where(HoldingRow.ref.in_([digest, f"bundle:{digest}"]))
    whose = sa.or_(TaskRow.owner_id == user_id, TaskRow.owner_id.in_(holders))
    query = sa.select(TaskRow.spec).where(access.sees(TaskRow, user_id), whose).order_by(TaskRow.id.desc())
    return session.scalars(query.limit(_MOST_SEEN))


def _is_result(session: Session, user_id: str, digest: str) -> bool:
    """Whether it is an output of a task that they may see, or of one that looked after an image they may use."""
    name = digest.removeprefix("sha256:")
    images = sa.select(ImageRow.id).where(access.sees(ImageRow, user_id), ImageRow.removed_at.is_(None))
    mine = sa.or_(access.sees(TaskRow, user_id), TaskRow.image_id.in_(images) & (TaskRow.kind != "command"))
    sent = TaskRow.endpoint_id.in_(sa.select(HoldingRow.holder).where(HoldingRow.ref == digest))
    query = sa.select(TaskRow.outputs).where(mine, sent, sa.cast(TaskRow.outputs, sa.Text).contains(name))
    return any(
        entry.get("sha256") == name and entry.get("stored")
        for outputs in session.scalars(query.order_by(TaskRow.id.desc()).limit(_MOST_SEEN))
        for entry in outputs
    )


def _has_files() -> sa.ColumnElement[bool]:
    return sa.cast(ImageRow.recipe, sa.Text).contains("bundle:")


def _is_named(ctx: Context, documents: Iterable[dict[str, Any]], digest: str) -> bool:
    for document in documents:
        for ref in refs_of(document):
            manifest = digest_of_ref(ref)
            if manifest == digest or digest in _files_of(ctx.blobs.path(manifest), manifest):
                return True
    return False


def _files_of(path: Path, digest: str) -> frozenset[str]:
    try:
        return _digests_in(path, digest)
    except (OSError, DiamondError):
        return frozenset()


@lru_cache(maxsize=64)  # not of the function above: what is not here now may be sent later
def _digests_in(path: Path, digest: str) -> frozenset[str]:
    return frozenset(item.digest for item in manifests.load(path, digest).files if not item.link_to)
