"""A job of a task inside a pool: made where a round found room for it."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy.orm import Session

from diamond.core.codec import encode
from diamond.core.fields import GLOBAL_BATCH
from diamond.core.pools import PoolPlace
from diamond.core.reasons import Reason
from diamond.core.resources import Resources
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Choice
from diamond.server.services import image_placing, lifecycle, planning
from diamond.server.services.chains import time_left
from diamond.server.services.context import Context
from diamond.server.services.planning import Placed
from diamond.server.services.pool_state import State
from diamond.server.store.models import EndpointRow, JobRow, TaskRow


def place(
    ctx: Context,
    session: Session,
    task: TaskRow,
    spec: TaskSpec,
    state: State,
    where: PoolPlace,
    before: JobRow | None,
) -> Placed:
    """Give the task a job there, unless its image is still to be brought or its time is over."""
    endpoint = session.get_one(EndpointRow, state.pool.endpoint_id)
    topics = [f"task:{task.id}", "events"]
    limit_s = time_left(session, task, spec)
    if limit_s is not None and limit_s <= 0:
        detail = "earlier attempts used up max_duration"
        lifecycle.end_task(session, task, ctx.clock(), reason=Reason.TIME_LIMIT, detail=detail)
        return Placed(topics=topics)
    use = None
    if task.image_id or spec.resources.image_id or spec.image is not None:
        if failed := image_placing.disappointed(session, task):
            return planning.end_without_image(ctx, session, task, failed)
        need = image_placing.look(ctx, session, task, spec, [endpoint])
        if need is not None:
            use = need.uses.get(endpoint.id)
            if use is None:
                return planning.bring_image(ctx, session, task, need, endpoint)
    job = planning.add_job(ctx, session, task, endpoint, Choice(), limit_s, before, use, holds=None)
    job.chained = True  # it goes on elsewhere, with more or fewer slots, or when its pilot ends
    job.place = encode(where)
    return Placed(topics=[*topics, f"endpoint:{endpoint.id}"], endpoint=endpoint, job=job)


def spec_there(spec: TaskSpec, where: PoolPlace) -> TaskSpec:
    """The task as the agent is to run it there: a rank for every slot, on as many nodes as these lie on, with the batch
    that was chosen for it, unless its user has said one."""
    slots = where.nodes[0].slots
    needs = spec.resources
    there = Resources(
        infra=needs.infra,
        accelerators=f"{needs.gpu_type or 'gpu'}:{slots}" if where.has_gpus else None,
        cpus=str(where.cpus * slots),
        memory=needs.memory,
        image_id=needs.image_id,
    )
    ranks = spec.ranks_per_node if spec.ranks_per_node == 0 else slots
    envs = spec.envs
    if where.global_batch is not None:
        envs = {GLOBAL_BATCH: str(where.global_batch), **envs}
    return replace(
        spec, resources=there, num_nodes=len(where.nodes), ranks_per_node=ranks, min_nodes=None, pool=None, envs=envs
    )
