"""What a starting agent makes of its journal and of what the scheduler still has. Decides, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from diamond.agent.journal import Remembered
from diamond.agent.schedulers.base import Observed
from diamond.agent.table import Phase, Tracked, verdict
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, may_have_started
from diamond.core.wire import JobReport


@dataclass(frozen=True, kw_only=True)
class Recovered:
    jobs: list[Tracked] = field(default_factory=list)
    lost: list[Tracked] = field(default_factory=list)  # among `jobs`: given up just now, not yet journaled
    delivered: dict[str, JobReport] = field(default_factory=dict)


def recover(
    remembered: Mapping[str, Remembered], observed: Mapping[str, Observed], run_dir_of: Callable[[str], Path]
) -> Recovered:
    """Where every job of the journal stands.

    The scheduler is believed before the journal: a job it knows was submitted, whatever the journal says. A job
    noted as submitted that it does not know is lost, not submitted again: it may have run. One noted as being
    submitted is submitted (again): submissions are idempotent by name, and a run directory starts only once.
    """
    found = Recovered()
    for job_id, noted in remembered.items():
        if noted.phase == "delivered":
            if noted.result is not None:
                found.delivered[job_id] = noted.result
            continue
        if noted.order is None:
            continue
        # The order's own offsets are from before; only the server knows what it holds by now.
        job = Tracked(replace(noted.order, received={}), run_dir_of(job_id))
        if noted.phase == "finished" and noted.result is not None:
            job.phase, job.result = Phase.OVER, noted.result
        elif job_id in observed:
            job.phase = Phase.SUBMITTED
        elif noted.phase == "submitted":
            job.phase = Phase.OVER
            job.result = verdict(job, Reason.LOST, "the scheduler does not know the job any more")
            found.lost.append(job)
        elif noted.phase == "submitting" and os.path.lexists(RunDir(job.run_dir).script):
            job.phase = Phase.READY
        elif noted.phase == "submitting" and may_have_started(RunDir(job.run_dir)):
            job.phase = Phase.OVER
            job.result = verdict(job, Reason.LOST, "its run directory cannot be read; it may have run")
            found.lost.append(job)
        found.jobs.append(job)
    return found
