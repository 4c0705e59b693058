"""What nobody needs any more: blobs that nothing refers to, and what was left of removed tasks' logs and curves.

A blob is needed when a task, an image, a draft or a template names it, or a bundle it is in, anywhere in its texts: to
look for digests and not for the fields that hold them errs on the side of keeping. It goes when it has not been needed
for some days; whoever is about to refer to one claims it (`BlobStore.claim`) before that is written down, and a claim
ends every doubt. Bytes count for the users who have them here until they are gone, and not after.

Only what this database knows is collected: blobs that somebody is known to have sent, jobs whose removal it recorded.
A server that was started with another database finds nothing to remove.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import sqlalchemy as sa

from diamond.core.errors import DiamondError
from diamond.server.services import gallery, manifests, usage
from diamond.server.services.context import Context
from diamond.server.store.blobs import CLAIM_EVERY_S
from diamond.server.store.models import (
    EventRow,
    HoldingRow,
    ImageDraftRow,
    ImageRow,
    JobRow,
    TaskRow,
    TemplateRow,
    UserRow,
)

REMOVED = "task.removed"  # the event that tells which jobs are gone
REFERRING = (
    TaskRow.spec,
    TaskRow.outputs,
    TaskRow.work,
    ImageRow.recipe,
    ImageDraftRow.steps,
    TemplateRow.spec,
)
_LEAST_S = 2 * CLAIM_EVERY_S  # younger claims may not be written down
_BATCH = 500
_NAMED = re.compile(r"(bundle:sha256:)?([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class Collected:
    blobs: int
    num_bytes: int
    jobs: int  # whose logs and curves had been left


def collect(ctx: Context, older_than_s: float) -> Collected:
    """Remove what has not been needed for so long. May be repeated, interrupted, and run beside everything else."""
    jobs = _sweep_jobs(ctx)
    age_s = max(older_than_s, _LEAST_S)
    since = time.time() - age_s  # claims are kept by the file system, whose clock that is
    # Taken before the texts are read: what gets referred to after that was claimed, and is seen when it is set aside.
    unneeded = set(_sent_before(ctx, ctx.clock() - age_s, since))
    for digest in _needed(ctx) if unneeded else ():
        unneeded.discard(digest)
    blobs = num_bytes = 0
    for some in _batches(unneeded - _on_the_way(ctx, unneeded)):
        aside = {digest: size for digest in some if (size := ctx.blobs.set_aside(digest, since)) is not None}
        _let_go(ctx, aside)
        for digest in aside:
            ctx.blobs.discard(digest)
        blobs, num_bytes = blobs + len(aside), num_bytes + sum(aside.values())
    return Collected(blobs=blobs, num_bytes=num_bytes, jobs=jobs)


def digests_in(ctx: Context, text: str) -> set[str]:
    """Every digest that a text names, and those of the files in bundles that it names."""
    return set(_expanded(ctx, [text], set()))


def stored_outputs(row: TaskRow) -> set[str]:
    return {f"sha256:{entry['sha256']}" for entry in row.outputs if entry.get("stored")}


def _sent_before(ctx: Context, sent: float, claimed: float) -> Iterator[str]:
    """Blobs that somebody sent and that nobody sent, or claimed, lately. Ours, which everybody may use, stay."""
    query = sa.select(HoldingRow.ref).group_by(HoldingRow.ref).having(sa.func.max(HoldingRow.created_at) < sent)
    with ctx.db.read() as session:
        refs = session.scalars(query.execution_options(yield_per=_BATCH)).all()
    for ref in refs:
        digest = ref.removeprefix("bundle:")
        claimed_at = ctx.blobs.claimed_at(digest)
        # One that is not here may have been set aside by a process that was killed.
        if (claimed_at is None or claimed_at < claimed) and not gallery.has(digest):
            yield digest


def _needed(ctx: Context) -> Iterator[str]:
    expanded: set[str] = set()
    for column in REFERRING:
        with ctx.db.read() as session:
            texts = session.scalars(sa.select(sa.cast(column, sa.Text)).execution_options(yield_per=_BATCH))
            yield from _expanded(ctx, (text for text in texts if text), expanded)


def _expanded(ctx: Context, texts: Iterable[str], done: set[str]) -> Iterator[str]:
    """`done`: bundles that were looked into."""
    for bundle, name in chain.from_iterable(_NAMED.findall(text) for text in texts):
        digest = f"sha256:{name}"
        yield digest
        if bundle and digest not in done:
            done.add(digest)
            # Not every text that looks like a reference is one. A disk that cannot be read must not look like that.
            with suppress(FileNotFoundError, DiamondError):
                yield from (item.digest for item in manifests.load(ctx.blobs.path(digest), digest).files if item.digest)


def _on_the_way(ctx: Context, digests: set[str]) -> set[str]:
    """Those that a job which is still under way may have brought: its endpoint will say so with its last report."""
    live = sa.select(JobRow.endpoint_id, sa.func.min(JobRow.created_at)).where(JobRow.state.not_in(usage.FINAL))
    found: set[str] = set()
    with ctx.db.read() as session:
        ages = {
            endpoint_id: ctx.clock() - created_at
            for endpoint_id, created_at in session.execute(live.group_by(JobRow.endpoint_id))
        }
        for some in _batches(digests) if ages else ():
            sent = sa.select(HoldingRow.ref, HoldingRow.holder).where(
                HoldingRow.ref.in_(some), HoldingRow.holder.in_(ages)
            )
            for digest, holder in session.execute(sent):
                claimed_at = ctx.blobs.claimed_at(digest)
                if claimed_at is not None and time.time() - claimed_at - CLAIM_EVERY_S <= ages[holder]:
                    found.add(digest)
    return found


def _let_go(ctx: Context, sizes: dict[str, int]) -> None:
    """Nobody has these any more, and they count for nobody."""
    with ctx.db.write() as session:
        # Without those that somebody sent again since they were set aside.
        gone = [digest for digest in sizes if not ctx.blobs.has(digest)]
        refs = [*gone, *(f"bundle:{digest}" for digest in gone)]
        held = sa.select(UserRow.id, HoldingRow.ref).join(HoldingRow, HoldingRow.holder == UserRow.id)
        counted: dict[tuple[str, str], int] = {}
        for user_id, ref in session.execute(held.where(HoldingRow.ref.in_(gone))):
            counted[user_id, ""] = counted.get((user_id, ""), 0) - sizes[ref]
        session.execute(sa.delete(HoldingRow).where(HoldingRow.ref.in_(refs)))
        usage.count_stored(session, counted, ctx.clock())


def _batches(digests: set[str]) -> Iterator[list[str]]:
    ordered = sorted(digests)
    return (ordered[first : first + _BATCH] for first in range(0, len(ordered), _BATCH))


def _sweep_jobs(ctx: Context) -> int:
    """Logs and curves whose removal was cut off, or that an agent wrote to at that very moment."""
    with ctx.db.read() as session:
        removed: list[dict[str, Any]] = list(session.scalars(sa.select(EventRow.data).where(EventRow.kind == REMOVED)))
    swept = 0
    for job_id in chain.from_iterable(data.get("jobs", ()) for data in removed):
        if ctx.streams.delete(job_id) | ctx.series.delete(job_id):
            swept += 1
    return swept
