"""What a job makes the server keep: how much that may be, how it is counted, and what goes when a quota is used up.

`BOUNDS` lists everything an agent can have the server keep, with what bounds it; a test walks it.

Bytes of logs and curves count for the task's owner and project like its outputs do. A job is weighed whenever it has
sent much, and at its end; what is off is put right once a day (`recount`). When a quota is used up its jobs go on, but
hardly anything of their logs is kept, and less of their curves, until there is room again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import StorageFull
from diamond.server.services import quotas, usage
from diamond.server.services.context import Context
from diamond.server.store.models import HoldingRow, JobRow, TaskRow
from diamond.server.store.points import MAX_KEYS
from diamond.server.store.series import SeriesInfo
from diamond.server.store.streams import MIB

BOUNDS = {
    # Streams.
    "log": "log_cap_bytes: the first segment and the newest ones stay",
    "train": "three segments: the newest stay",
    "metrics": "curves_cap_bytes, with util: lines go once their points are safe, points are thinned, keys are counted",
    "util": "curves_cap_bytes, with metrics",
    # What is said of a job: cut to a length when it is written to the job's row.
    "job_id": "one of the endpoint's own jobs",
    "state": "only advances; an event for each change",
    "reason": "one of a list",
    "detail": "4000 characters",
    "exit_code": "a number up to 255",
    "signal": "a number up to 255",
    "scheduler_id": "200 characters",
    "hosts": "10,000 of 255 characters",
    "run_dir": "4096 characters",
    "pending_reason": "500 characters",
    "partition": "200 characters",
    "expected_start_at": "a number",
    "queued_at": "a number",
    "started_at": "a number",
    "ended_at": "a number",
    "outputs": "MAX_OUTPUTS entries, paths of MAX_LISTED_BYTES in all; files: output_cap_bytes for each live job",
    # Calls.
    "/agent/hello": "facts replace those before, and are cut to core.bounds; an event for a new beginning",
    "/agent/desired": "nothing but when it was",
    "/agent/jobs/{job_id}/secrets": "an entry of the audit log; calls are limited to agent_calls_per_s",
    "/agent/goodbye": "an event where it was there before",
    "/agent/reports": "streams and what is said of jobs; the endpoint's use replaces the one before",
}
MAX_OUTPUTS = 10_000
MAX_LISTED_BYTES = 2 * MIB  # of their paths
WEIGH_EVERY_BYTES = 8 * MIB
SQUEEZED_BYTES = 8 * MIB  # of curves, for a job whose owner has no room left
_BATCH = 500


def is_due(begin: int, size: int) -> bool:
    """Whether a job is to be weighed, of which a stream got bytes from `begin` on and now spans `size`."""
    return begin // WEIGH_EVERY_BYTES != size // WEIGH_EVERY_BYTES


def held_bytes(ctx: Context, job_id: str) -> int:
    return ctx.streams.held_bytes(job_id) + ctx.series.held_bytes(job_id)


def curve_notes(ctx: Context, job_id: str, found: Sequence[SeriesInfo]) -> list[str]:
    """What of a job's curves is not shown, in sentences; nothing, where everything is."""
    notes = []
    unusable = ctx.series.unusable(job_id).values()
    if thinned := [info.key for info in found if info.thinned]:
        names = ", ".join(thinned[:5]) + (f" and {len(thinned) - 5} more" if len(thinned) > 5 else "")
        why = "a storage quota is used up" if any(one.squeezed for one in unusable) else "it logged very much"
        notes.append(
            f"Of {names}, some older samples are no longer kept, since {why}. First, last, smallest and largest are."
        )
    if crowded := sum(one.crowded_out for one in unusable):
        notes.append(f"{crowded} values are not shown: a job has at most {MAX_KEYS} metrics.")
    if odd := sum(one.dropped - one.crowded_out for one in unusable):
        notes.append(f"{odd} {'line or value' if odd == 1 else 'lines or values'} could not be read as metrics.")
    return notes


def weigh(ctx: Context, job_id: str) -> None:
    """Count what the job's streams take by now; where its owner or project has no room for it, let most of it go."""
    with ctx.db.write() as session:
        found = _count(ctx, session, job_id)
        is_over = found is not None and bool(quotas.over_storage(session, *found))
    if is_over:
        _squeeze(ctx, job_id)
        with ctx.db.write() as session:
            _count(ctx, session, job_id)


def recount(ctx: Context) -> int:
    """Weigh every job there is; how many counts were off. May be interrupted and repeated."""
    mended, after = 0, ""
    while True:
        query = sa.select(JobRow.id, JobRow.stream_bytes).where(JobRow.id > after).order_by(JobRow.id).limit(_BATCH)
        with ctx.db.read() as session:
            jobs = session.execute(query).all()
        wrong = [job_id for job_id, counted in jobs if held_bytes(ctx, job_id) != counted]
        for job_id in wrong:
            with ctx.db.write() as session:
                _count(ctx, session, job_id)
        mended += len(wrong)
        if len(jobs) < _BATCH:
            return mended
        after = jobs[-1][0]


def brought_bytes(session: Session, endpoint_id: str, since: float) -> int:
    """Files that an endpoint's agent has brought since then, and that no job that ended has taken as its results."""
    brought = sa.select(sa.func.coalesce(sa.func.sum(HoldingRow.size_bytes), 0)).where(
        HoldingRow.holder == endpoint_id, HoldingRow.created_at >= since
    )
    taken = sa.select(sa.func.coalesce(sa.func.sum(JobRow.stored_bytes), 0)).where(
        JobRow.endpoint_id == endpoint_id, JobRow.ended_at >= since
    )
    return max(0, int(session.execute(brought).scalar_one()) - int(session.execute(taken).scalar_one()))


def _count(ctx: Context, session: Session, job_id: str) -> tuple[str, str | None] | None:
    """Note what there is; the task's owner and project, or None where the job is gone."""
    job = session.scalars(sa.select(JobRow).where(JobRow.id == job_id).with_for_update()).one_or_none()
    if job is None:
        return None
    task = session.get_one(TaskRow, job.task_id)
    held = held_bytes(ctx, job_id)
    if job.charged_at is not None:  # its bytes stand in the table of use by now
        usage.count_stored(session, {(task.owner_id, task.project_id or ""): held - job.stream_bytes}, ctx.clock())
    job.stream_bytes = held
    session.flush()
    return task.owner_id, task.project_id


def _squeeze(ctx: Context, job_id: str) -> None:
    with suppress(StorageFull):  # where nothing can be written, thinning cannot make room
        ctx.streams.squeeze(job_id)
        ctx.series.squeeze(job_id, SQUEEZED_BYTES)
