"""The dry run of a task: what `tasks.create` would do, without doing it. Writes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from diamond.core import sites
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import InvalidInput, NotFound
from diamond.core.images import ImageUse
from diamond.core.inside import enter_script, inside_script, shown
from diamond.core.pool_scripts import SlotShare
from diamond.core.pools import PoolNode, PoolPlace, PoolSpec
from diamond.core.resources import Resources
from diamond.core.scripts import ScriptPlan, job_envs, job_script
from diamond.core.tasks import TaskSpec
from diamond.core.views import View
from diamond.planner.placement import Placement
from diamond.planner.pools.pace import even_sizes
from diamond.server.services import (
    image_placing,
    images,
    places,
    planning,
    pool_placing,
    pool_state,
    pools,
    projects,
    quotas,
    secrets,
    snapshots,
)
from diamond.server.services.context import Context
from diamond.server.services.image_placing import Need
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow
from diamond.server.store.pool_models import PoolRow


@dataclass(frozen=True, kw_only=True)
class _Begins:
    """Where a task would go, and as what it would begin there.

    Attributes:
        jobs: how many, one after the other, it is expected to take.
        waits: what would keep it waiting at first.
        slot: in a pool, what one of its slots is.
    """

    chosen: EndpointRow | None
    spec: TaskSpec
    need: Need | None
    why: list[str]
    others: dict[str, str] = field(default_factory=dict)
    limit_s: int | None
    chained: bool
    partition: str = ""
    jobs: int = 1
    waits: str = ""
    slot: SlotShare | None = None


def explain(ctx: Context, session: Session, user_id: str, spec: TaskSpec) -> dict[str, Any]:
    """Where it would go and why, in which image and how that gets there, and exactly what would run."""
    try:
        project = projects.look_up(session, user_id, spec.project)
    except NotFound as error:
        raise InvalidInput(error.message, hint=error.hint, field="project") from error
    warnings = quotas.admit(ctx, session, user_id, project.id if project else None, spec)
    secrets.check(session, user_id, project.id if project else None, spec)
    pool_id = pools.for_task(session, user_id, project.id if project else None, spec)
    if pool_id is not None:
        begins = _in_pool(ctx, session, user_id, project, session.get_one(PoolRow, pool_id), spec)
    else:
        begins = _at_an_endpoint(ctx, session, user_id, project, spec)
    return {
        "warnings": [*warnings, *filter(None, [places.readers(session, user_id, begins.chosen, spec)])],
        "spec": encode(spec),
        "endpoint": begins.chosen.name if begins.chosen else None,
        "why": begins.why,
        "others": begins.others,
        "time_limit_s": begins.limit_s,
        "partition": begins.partition,
        "jobs": begins.jobs,
        "waits": begins.waits,
        **_program(begins, user_id),
    }


def _program(begins: _Begins, user_id: str) -> dict[str, Any]:
    """What would run, and in which image."""
    spec = begins.spec
    facts = snapshots.facts_of(begins.chosen) if begins.chosen else None
    run_root = facts.run_root if facts and facts.run_root else "RUN_DIRECTORY"
    image = _image(begins.need, begins.chosen)
    use = decode(ImageUse, image["use"]) if image is not None and image["use"] is not None else None
    is_other = begins.chosen is not None and begins.chosen.owner_id != user_id
    is_guest = is_other and use is not None and use.kind != "venv"
    script = job_script(
        ScriptPlan(
            job_id="JOB_ID",
            run_dir=f"{run_root}/JOB_ID",
            ranks_per_node=spec.ranks_per_node,
            has_setup=bool(spec.setup),
            scheduler=facts.scheduler if facts else "local",
            num_nodes=spec.num_nodes,
            min_nodes=spec.min_nodes or 0,
            chained=begins.chained,
            modules=spec.slurm.modules,
            image=image is not None,
            is_guest=is_guest,
            secrets=bool(spec.secrets),
            time_limit_s=begins.limit_s,
            slot=begins.slot,
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
    if use is not None and facts is not None:
        files |= _ways_in(use, facts, f"{run_root}/JOB_ID", has_secrets=bool(spec.secrets), is_guest=is_guest)
    return {"image": image, "script": script, "files": files, "envs": envs}


def _at_an_endpoint(
    ctx: Context, session: Session, user_id: str, project: ProjectRow | None, spec: TaskSpec
) -> _Begins:
    asked = places.Asked(user_id=user_id, project_id=project.id if project else None, spec=spec)
    rows = places.rows_for(session, asked)
    need = _need(ctx, session, user_id, spec, rows, project)
    decided = places.decide(ctx, session, asked, rows, need)
    placement = decided.placement
    if decided.endpoint is None:
        places.refuse(session, asked, decided)
    limit_s, chained = planning.one_job(spec.max_duration, placement.choice)
    waits = planning.waiting_text(spec, placement)
    if decided.endpoint is not None:
        waits = _first_waits(ctx, session, asked, need, decided.endpoint, placement)
    return _Begins(
        chosen=decided.endpoint,
        spec=spec,
        need=need,
        why=[*placement.why] or [waits],
        others=decided.others,
        limit_s=limit_s,
        chained=chained,
        partition=placement.choice.partition,
        waits=waits,
        jobs=math.ceil(spec.max_duration / limit_s) if chained and spec.max_duration and limit_s else 1,
    )


def _first_waits(
    ctx: Context, session: Session, asked: places.Asked, need: Need | None, endpoint: EndpointRow, placement: Placement
) -> str:
    """What keeps it from having a job at once, and what it is refused for, in the order in which a launch asks."""
    if need is not None and endpoint.id not in need.uses:
        planning.check_room(session, asked, need, endpoint)
        return need.note(endpoint)
    lasts_s = asked.spec.max_duration if asked.spec.max_duration is not None else placement.choice.walltime_s
    return quotas.why_waits(ctx, session, asked.user_id, asked.project_id, asked.spec, new_for_s=lasts_s or 0)


def _in_pool(
    ctx: Context, session: Session, user_id: str, project: ProjectRow | None, row: PoolRow, spec: TaskSpec
) -> _Begins:
    """As it would begin in the pool, as small as can be: no job of its own waits in the cluster's queue."""
    endpoint = session.get_one(EndpointRow, row.endpoint_id)
    need = _need(ctx, session, user_id, spec, [endpoint], project)
    if need is not None and (obstacle := need.obstacles.get(endpoint.id)):
        raise InvalidInput(f"endpoint {endpoint.name} cannot run this: {obstacle.text}", field=obstacle.field)
    pool = pools.spec_of(row)
    low, high = pools.sizes(pool, spec)
    smallest = even_sizes(low, high, pool.slots_per_node)[0]
    nodes = -(-smallest // pool.slots_per_node)
    where = PoolPlace(
        pool_id=row.id,
        nodes=(PoolNode(pilot="PILOT", slots=smallest // nodes),) * nodes,
        cpus=Resources(cpus=pool.cpus).cpus_min,
        mem_bytes=Resources(memory=pool.memory).mem_bytes_min,
        has_gpus=pool.has_gpus,
    )
    state = pool_state.read(session, row)
    held = sum(pilot.is_held for pilot in state.pilots)
    return _Begins(
        chosen=endpoint,
        spec=pool_placing.spec_there(spec, where),
        need=need,
        why=_words_of_pool(row.name, pool, spec, smallest, held, sum(state.used().values())),
        limit_s=spec.max_duration,
        chained=True,
        slot=where.share,
    )


def _words_of_pool(name: str, pool: PoolSpec, spec: TaskSpec, smallest: int, held: int, used: int) -> list[str]:
    low, high = pools.sizes(pool, spec)
    most = pool.slots_per_node * pool.most_nodes
    if pools.is_free(spec):
        size = (
            f"Diamond picks its size: one slot at first, then up to the pool's {most} once diamond.train in it, or a "
            "task like it before, was measured"
        )
    elif low < high:
        size = f"Diamond picks from {low} to {high} slots, and may change that while it runs, if diamond.train is in it"
    else:
        size = f"it has {_slots(low)} from its beginning to its end, as it asks for"
    there = held * pool.slots_per_node
    now = f"{max(0, there - used)} of {_slots(there)} {'is' if there == 1 else 'are'} free" if held else "none is held"
    nodes = f"{pool.nodes} node{'s' if pool.most_nodes != 1 else ''}"
    return [
        f"in pool {name}: {size}",
        f"the pool may hold {nodes} of {_slots(pool.slots_per_node)} each; now {now}",
        "its job is started inside of the pool's own jobs: nothing more waits in the cluster's queue. The script here "
        f"is the one for {_slots(smallest)}",
    ]


def _slots(number: int) -> str:
    return f"{number} slot{'s' if number != 1 else ''}"


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


def _ways_in(use: ImageUse, facts: EndpointFacts, run_dir: str, *, has_secrets: bool, is_guest: bool) -> dict[str, str]:
    """The scripts that enter the image, with what containers are shown there by default; the endpoint's policy file may
    add to it, or take away. Which folders are the agent's own, and hidden, its agent alone knows."""
    view = View(is_guest=is_guest)
    site = sites.find(facts.site) if facts.site else None
    containers = site.containers if site else None
    paths = [*(containers.binds if containers else ()), *shown(facts.filesystems)]
    modules = containers.modules if containers else ()
    return {
        "inside.sh": inside_script(
            use, run_dir=run_dir, binds=() if is_guest else tuple(dict.fromkeys(paths)), modules=modules, view=view
        ),
        "enter.sh": enter_script(use, run_dir=run_dir, secrets=has_secrets, view=view),
    }
