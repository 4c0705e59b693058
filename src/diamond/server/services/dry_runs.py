"""The dry run of a task: what `tasks.create` would do, without doing it. Writes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sqlalchemy.orm import Session

from diamond.core import sites
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import InvalidInput, NotFound
from diamond.core.images import ImageUse
from diamond.core.inside import enter_script, inside_script, shown
from diamond.core.scripts import ScriptPlan, job_envs, job_script
from diamond.core.tasks import TaskSpec
from diamond.planner.placement import place
from diamond.server.services import image_placing, images, planning, pools, projects, quotas, secrets, snapshots
from diamond.server.services.context import Context
from diamond.server.services.image_placing import Need
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow
from diamond.server.store.pool_models import PoolRow


def explain(ctx: Context, session: Session, user_id: str, spec: TaskSpec) -> dict[str, Any]:
    """Where it would go and why, in which image and how that gets there, and exactly what would run."""
    try:
        project = projects.look_up(session, user_id, spec.project)
    except NotFound as error:
        raise InvalidInput(error.message, hint=error.hint, field="project") from error
    warnings = quotas.admit(ctx, session, user_id, project.id if project else None, spec)
    secrets.check(session, user_id, project.id if project else None, spec)
    asked = spec
    spec, in_pool = _in_pool(session, user_id, project, spec)
    rows = snapshots.usable(session, user_id, project.id if project else None, snapshots.endpoints(session))
    need = _need(ctx, session, user_id, spec, rows, project)
    placement = place(spec, planning.candidates(ctx, rows, need, snapshots.barred(session, user_id, rows)))
    if placement.endpoint is None:
        planning.refuse(spec, placement, snapshots.where_else(session, user_id, spec.resources.infra))
    chosen = next((row for row in rows if row.name == placement.endpoint), None)
    facts = snapshots.facts_of(chosen) if chosen else None
    limit_s, chained = planning.one_job(spec.max_duration, placement.choice)
    run_root = facts.run_root if facts and facts.run_root else "RUN_DIRECTORY"
    image = _image(need, chosen)
    script = job_script(
        ScriptPlan(
            job_id="JOB_ID",
            run_dir=f"{run_root}/JOB_ID",
            ranks_per_node=spec.ranks_per_node,
            has_setup=bool(spec.setup),
            scheduler=facts.scheduler if facts else "local",
            num_nodes=spec.num_nodes,
            min_nodes=spec.min_nodes or 0,
            chained=chained,
            modules=spec.slurm.modules,
            image=image is not None,
            secrets=bool(spec.secrets),
            time_limit_s=limit_s,
        )
    )
    files = {"run.sh": spec.run} | ({"setup.sh": spec.setup} if spec.setup else {})
    envs = job_envs(
        task_id="TASK_ID",
        task_name=spec.name or "",
        job_id="JOB_ID",
        attempt=1,
        num_nodes=spec.num_nodes,
        user_envs=spec.envs,
    )
    if image is not None and facts is not None and image["use"] is not None:
        files |= _ways_in(decode(ImageUse, image["use"]), facts, f"{run_root}/JOB_ID", bool(spec.secrets))
    return {
        "image": image,
        "warnings": [*warnings, *filter(None, [secrets.warning(session, user_id, chosen, spec)])],
        "spec": encode(asked),
        "endpoint": placement.endpoint,
        "why": [*in_pool, *placement.why] or [planning.waiting_text(spec, placement)],
        "others": {name: obstacle.text for name, obstacle in placement.obstacles.items()},
        "script": script,
        "files": files,
        "envs": envs,
        "time_limit_s": limit_s,
        "partition": placement.choice.partition,
        "jobs": math.ceil(spec.max_duration / limit_s) if chained and spec.max_duration and limit_s else 1,
    }


def _in_pool(session: Session, user_id: str, project: ProjectRow | None, spec: TaskSpec) -> tuple[TaskSpec, list[str]]:
    """The task as it would begin in the pool it names, as small as can be, and words about that."""
    pool_id = pools.for_task(session, user_id, project.id if project else None, spec)
    if pool_id is None:
        return spec, []
    pool = pools.spec_of(session.get_one(PoolRow, pool_id))
    kind, low = spec.resources.gpu_type or "gpu", pools.least(spec)
    slots = min(low, pool.slots_per_node)
    needs = replace(
        spec.resources,
        infra=pool.endpoint,
        slots=None,
        accelerators=f"{kind}:{slots}" if pool.has_gpus else None,
        cpus=None,  # they come with the slots
        memory=None,
    )
    there = replace(spec, resources=needs, num_nodes=-(-low // pool.slots_per_node))
    return there, [f"in pool {pool.name}, which decides how many slots it has; it needs at least {low}"]


def _need(
    ctx: Context,
    session: Session,
    user_id: str,
    spec: TaskSpec,
    rows: list[EndpointRow],
    project: ProjectRow | None,
) -> Need | None:
    image, path = image_placing.resolve(ctx, session, user_id, spec, project)
    if path:
        return image_placing.need_path(path, rows)
    if image is None:
        return None
    asked_in = "image" if spec.image is not None else "resources.image_id"
    pinned = images.pinned_digest(image, (spec.resources.image_id or "").strip())
    return image_placing.need_image(ctx, session, image, rows, asked_in=asked_in, pinned=pinned)


def _image(need: Need | None, chosen: EndpointRow | None) -> dict[str, Any] | None:
    """What the task would run in, and how that gets there. Until it is built, its path there is only a guess."""
    if need is None:
        return None
    way = need.ways.get(chosen.id) if chosen else None
    use = need.uses.get(chosen.id) if chosen else None
    if use is None and need.image is not None and way is not None and way.builder and chosen is not None:
        facts = snapshots.facts_of(chosen)
        suffix = {"apptainer": "image.sif", "podman": "image.ref", "docker": "image.ref"}.get(way.builder, "image")
        root = facts.image_root if facts and facts.image_root else "/IMAGES"
        path = f"{root}/store/{need.image.id}/{suffix}"
        if suffix == "image.ref":
            path = f"localhost/diamond/{need.image.id}"
        use = ImageUse(kind=way.builder, path=path, image_id=need.image.id, name=need.image.name)
    return {
        "name": need.image.name if need.image else need.path,
        "image_id": need.image.id if need.image else "",
        "how": way.how if way else "ready" if use else "",
        "why": way.why if way else "it is a file on the endpoint" if use else "",
        "use": encode(use) if use else None,
    }


def _ways_in(use: ImageUse, facts: EndpointFacts, run_dir: str, has_secrets: bool) -> dict[str, str]:
    """The scripts that enter the image, with what containers are shown there by default; the endpoint's policy file may
    add to it, or take away."""
    site = sites.find(facts.site) if facts.site else None
    containers = site.containers if site else None
    paths = [*(containers.binds if containers else ()), *shown(facts.filesystems)]
    modules = containers.modules if containers else ()
    return {
        "inside.sh": inside_script(use, run_dir=run_dir, binds=tuple(dict.fromkeys(paths)), modules=modules),
        "enter.sh": enter_script(use, run_dir=run_dir, secrets=has_secrets),
    }
