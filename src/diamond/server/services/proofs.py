"""What an endpoint has shown it can do, beside what its agent says of it.

Before something has succeeded at an endpoint, other people's tasks go there only if they name it; and where more is
asked than ever ran there at once, places that have run as much come first. Agents report for themselves, so all of
this keeps invented facts from drawing tasks away by accident or by boasting alone. It is no proof against an owner who
changes the agent's program: that a project wants an endpoint is said by its owners (`approvals`).
"""

from __future__ import annotations

from diamond.core.codec import decode
from diamond.core.pools import PoolPlace
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.core.tasks import TaskSpec
from diamond.server.store.models import EndpointRow, JobRow, TaskRow


def note(row: EndpointRow, task: TaskRow, job: JobRow) -> None:
    """Take in a job that just ended there."""
    if task.kind != "command" or not _is_plausible(job):
        return
    cpus, gpus = size_of(decode(TaskSpec, task.spec))
    if job.place:  # a pool decides how large it is
        place = decode(PoolPlace, job.place)
        cpus, gpus = place.cpus * place.slots, place.slots if place.has_gpus else 0
    row.proven_at = row.proven_at or job.ended_at
    row.proven_cpus, row.proven_gpus = max(row.proven_cpus, cpus), max(row.proven_gpus, gpus)


def forget(row: EndpointRow) -> None:
    """It is in other hands, or another agent speaks for it: what ran there before says nothing."""
    row.proven_at, row.proven_cpus, row.proven_gpus = None, 0, 0


def has_run(row: EndpointRow, spec: TaskSpec) -> bool:
    """Whether as much as this task asks for has run there at once."""
    cpus, gpus = size_of(spec)
    return row.proven_cpus >= cpus and row.proven_gpus >= gpus


def size_of(spec: TaskSpec) -> tuple[int, int]:
    """Cores and GPUs that it has on all its nodes together."""
    return spec.num_nodes * spec.resources.cpus_min, spec.num_nodes * spec.resources.gpus


def _is_plausible(job: JobRow) -> bool:
    """A job that succeeded as programs do: it was handed out, began, ended after that with status 0, on as many hosts
    as it asked for."""
    return (
        job.state == JobState.SUCCEEDED.value
        and job.reason == Reason.COMPLETED.value
        and job.exit_code == 0
        and job.delivered_at is not None
        and job.started_at is not None
        and job.ended_at is not None
        and job.started_at <= job.ended_at
        and len(set(job.hosts)) >= max(1, job.num_nodes)
    )
