"""What the page of one task needs beside the task: what may be done with it, and exactly what its newest job runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.pools import PoolPlace
from diamond.core.scripts import ScriptPlan, job_envs, job_script
from diamond.core.tasks import Task
from diamond.server.services import access, pool_placing, snapshots, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, JobRow, TaskRow


@dataclass(frozen=True, kw_only=True)
class Program:
    """What runs. `envs` has no secret's value: `secrets` says which variable comes from which.

    `script` is what the agent writes, but for where Python lies there, which only the endpoint knows. Of a task that a
    pool has no room for yet there is none.
    """

    script: str = ""
    files: dict[str, str] = field(default_factory=dict)
    envs: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)


def may_stop(ctx: Context, user_id: str, task: Task) -> bool:
    """Whether `tasks.cancel` would be allowed, and would do something."""
    if task.state.is_final:
        return False
    with ctx.db.read() as session:
        found = sa.select(TaskRow.id).where(TaskRow.id == task.id, access.manages(TaskRow, user_id))
        return session.scalars(found).one_or_none() is not None


def program(ctx: Context, user_id: str, task: Task) -> Program:
    """Of the newest job; before there is one, of the first there will be. For a task with its spec and jobs."""
    spec = task.spec
    if spec is None or task.kind != "command":
        return Program()
    job = task.jobs[-1] if task.jobs else None
    job_id, run_dir = (job.id, job.run_dir) if job else ("JOB_ID", "")
    run_dir = run_dir or f"RUN_DIRECTORY/{job_id}"
    row, scheduler = None, "local"
    if job is not None:
        with ctx.db.read() as session:
            tasks.find(session, user_id, task.id)
            row, scheduler = _of_job(session, job.id)
    where = decode(PoolPlace, row.place) if row is not None and row.place else None
    if where is not None:
        spec = pool_placing.spec_there(spec, where)
    before = next((each.run_dir for each in task.jobs if job is not None and each.id == job.continues), "")
    is_written = job is not None or spec.pool is None
    plan = ScriptPlan(
        job_id=job_id,
        run_dir=run_dir,
        ranks_per_node=spec.ranks_per_node,
        has_setup=bool(spec.setup),
        scheduler=scheduler,
        num_nodes=spec.num_nodes,
        min_nodes=spec.min_nodes or 0,
        chained=row is not None and row.chained,
        previous=before,
        modules=spec.slurm.modules if scheduler == "slurm" else (),
        image=bool(task.image),
        secrets=bool(spec.secrets),
        time_limit_s=row.time_limit_s if row is not None else None,
        slot=where.share if where is not None else None,
    )
    return Program(
        script=job_script(plan) if is_written else "",
        files={"run.sh": spec.run} | ({"setup.sh": spec.setup} if spec.setup else {}),
        envs=job_envs(
            task_id=task.id,
            task_name=task.name,
            job_id=job_id,
            attempt=job.attempt if job else 1,
            num_nodes=spec.num_nodes,
            user_envs=spec.envs,
        ),
        secrets={variable: use.secret for variable, use in spec.secrets.items()},
    )


def _of_job(session: Session, job_id: str) -> tuple[JobRow, str]:
    """Its row, and the scheduler of its endpoint."""
    job = session.get_one(JobRow, job_id)
    endpoint = session.get(EndpointRow, job.endpoint_id)
    facts = snapshots.facts_of(endpoint) if endpoint else None
    return job, facts.scheduler if facts else "local"
