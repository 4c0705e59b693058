"""What becomes of an order that was not known before: it is taken up, answered at once, or found to be done. Decides,
changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from diamond.agent.journal import Record
from diamond.agent.pool_orders import malformed
from diamond.agent.schedulers.base import Observed
from diamond.agent.table import Phase, Tracked, verdict
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, may_have_started
from diamond.core.states import JobState
from diamond.core.wire import JobOrder, JobReport

_PHASES = {Phase.OVER: "finished", Phase.SUBMITTED: "submitted", Phase.READY: "submitting"}


class Pilots:
    """The pilots that this agent took up, by job id. What a server says of a pilot counts once, when it is ordered, and
    what the scheduler says of it counts more."""

    def __init__(self, tracked: Callable[[str], Tracked | None], seen: Mapping[str, Observed]) -> None:
        self._tracked = tracked
        self._seen = seen

    def of(self, order: JobOrder) -> list[JobOrder] | None:
        """The orders of the pilots in which a job is to run; None when one of them is no pilot here."""
        orders = []
        for node in order.place.nodes if order.place is not None else ():
            pilot = self._tracked(node.pilot)
            if pilot is None or pilot.order.pilot is None:
                return None
            seen = self._seen.get(node.pilot)
            orders.append(replace(pilot.order, partition=(seen.partition if seen else "") or pilot.order.partition))
        return orders


def take_up(
    order: JobOrder,
    path: Path,
    *,
    is_known: bool,
    pilots: Pilots,
    refusal: Callable[[JobOrder, Sequence[JobOrder]], str],
) -> Tracked:
    """A job, as far along as it is.

    Args:
        path: of its run directory.
        is_known: whether the scheduler has it.
        pilots: those that a job in a pool may name.
        refusal: which rule of the endpoint an order breaks, inside of these pilots; empty: none.
    """
    job = Tracked(order.with_all_offsets(), path)
    run_dir = RunDir(path)
    if is_known:  # the journal was lost, the job was not
        job.phase = Phase.SUBMITTED
    elif os.path.lexists(run_dir.started):
        job.phase = Phase.READY  # it ran here once; the scheduler finds out what became of it
    elif may_have_started(run_dir):
        job.result = verdict(job, Reason.LOST, "its run directory cannot be read; it may have run")
    elif job.is_cancelled:
        job.result = verdict(job, Reason.CANCELLED, "cancelled before it started")
    elif (inside := pilots.of(order)) is None and not malformed(order):
        job.result = verdict(job, Reason.NODE_FAIL, "the pilot that held its node is not known here, or has ended")
    elif broken := refusal(order, inside or ()):
        job.result = verdict(job, Reason.REJECTED, broken)
    else:
        job.report = JobReport(job_id=job.job_id, state=JobState.STAGING, run_dir=str(path))
    if job.result is not None:
        job.phase = Phase.OVER
    return job


def record_of(job: Tracked) -> Record:
    """What the journal keeps of a job just taken up."""
    phase = _PHASES.get(job.phase, "accepted")
    return Record(job_id=job.job_id, phase=phase, order=job.order, result=job.result)


def gave_up(job: Tracked) -> JobReport:
    """The result of a job that was asked to let others go first before it was handed over. Its directory is there, with
    what it was to go on from."""
    reason = Reason.CONTINUED if job.order.chained else Reason.PREEMPTED
    return verdict(job, reason, "it gave up its place before it began")
