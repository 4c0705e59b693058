"""Jobs that look after images: building, copying, taking over, removing. Makes them; `planning` places them.

Such a job belongs to a task of kind "build" or "transfer", whose `work` column holds

    {"order": an ImageWork, "replica_id": what it makes, "after": a task it waits for, "base_id": an image it builds on,
     "falls_back": whether another way is taken when this one fails, "tried": ways that failed before,
     "asked_by": for whom it is done, where that is not its owner}

and, of a command, {"replica_id": what it waits for or runs in, "tried": ways to get its image that failed}.
Runs inside the caller's write transaction, which has locked the endpoints.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import BundleFile, Manifest, digest_of_ref, is_digest
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError
from diamond.core.ids import new_id
from diamond.core.images import PAYLOAD_FILE, ImageFacts, ImageUse, ImageWork, Lock, ReplicaState
from diamond.core.reasons import Reason
from diamond.core.recipes import Recipe
from diamond.core.resources import Resources
from diamond.core.states import Desired, TaskState
from diamond.core.tasks import Output, RetryPolicy, TaskSpec
from diamond.server.services import bundles, images, lifecycle, projects
from diamond.server.services.context import Context
from diamond.server.services.image_ways import Way, where_for
from diamond.server.services.snapshots import facts_of, usable_for_images
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow

_BATCH_CPUS = 4  # packing an image uses as many as there are
# What such a job may leave (see images.BUILD_OUTPUTS), as patterns: not all of it is there every time.
_OUTPUTS = {
    "build": ("*.*",),
    "import": ("*.json",),
    "link": ("*.json",),
    "export": (PAYLOAD_FILE, "*.json"),
}
_TRANSFER_LIMIT_S = 6 * 3600
# What is nobody's mistake is tried once more.
_RETRY = RetryPolicy(
    max_retries=1, on=(Reason.NODE_FAIL, Reason.LOST, Reason.PREEMPTED, Reason.LAUNCH_FAILED, Reason.STAGING_FAILED)
)


def bring(
    ctx: Context,
    session: Session,
    user_id: str,
    image: ImageRow,
    recipe: Recipe,
    endpoint: EndpointRow,
    way: Way,
    *,
    where: str = "auto",
    fresh: bool = False,
    base: ImageRow | None = None,
    pins: Lock | None = None,
    asked_by: str = "",
) -> tuple[ReplicaRow, list[TaskRow]]:
    """Begin to get an image to an endpoint by `way`; what will be the result, and tasks that are to be placed.

    `asked_by`: whom the endpoint's own rules are to judge it by, where that is not the user.
    """
    if way.how == "copied":
        assert way.source is not None and way.source_endpoint is not None
        return _copy(ctx, session, user_id, image, endpoint, way.source, way.source_endpoint, asked_by)
    if way.how == "linked":
        assert way.source is not None
        order = _taking(ctx, session, "link", image, way.source)
        order = replace(order, source_path=order.facts.path if order.facts else "")
        replica = _new_replica(ctx, session, image, endpoint, "linked", way.why)
        task = add_task(ctx, session, user_id, image, endpoint, order, replica=replica, asked_by=asked_by)
        return replica, [task]
    facts = facts_of(endpoint)
    assert facts is not None, "the way was chosen by them"
    if way.how == "rebuilt" and way.source is not None:
        pins = images.lock_of(ctx, session, way.source)
    mounts = {f"files/{number}": ref for number, ref in enumerate(recipe.files.values())}
    order = ImageWork(
        action="build",
        image_id=image.id,
        name=image.name,
        recipe=recipe,
        builder=way.builder,
        where=where_for(recipe.where if where == "auto" else where, facts),
        pins=pins,
        files=dict(zip(recipe.files, mounts, strict=True)),
        fresh=fresh,
    )
    replica = _new_replica(ctx, session, image, endpoint, way.how, way.why)
    task = add_task(
        ctx, session, user_id, image, endpoint, order,
        replica=replica, mounts=mounts, base_id=base.id if base else "", asked_by=asked_by,
    )  # fmt: skip
    return replica, [task]


def _copy(
    ctx: Context,
    session: Session,
    user_id: str,
    image: ImageRow,
    endpoint: EndpointRow,
    source: ReplicaRow,
    source_endpoint: EndpointRow,
    asked_by: str,
) -> tuple[ReplicaRow, list[TaskRow]]:
    detail = f"copied from {source_endpoint.name} through the server"
    replica = _new_replica(ctx, session, image, endpoint, "copied", detail)
    export, is_new = export_task(ctx, session, user_id, image, source, source_endpoint)
    order = _taking(ctx, session, "import", image, source)
    task = add_task(ctx, session, user_id, image, endpoint, order, replica=replica, after=export.id, asked_by=asked_by)
    return replica, [export, task] if is_new else [task]


def export_task(
    ctx: Context, session: Session, user_id: str, image: ImageRow, source: ReplicaRow, endpoint: EndpointRow
) -> tuple[TaskRow, bool]:
    """The task that brings the image's payload to the server: one under way, one whose payload is still here, or a new
    one (then True).

    Whoever may use an image may have it, but not run anything where it lies: there it is its owner who hands it out.
    """
    if not usable_for_images(session, user_id, [endpoint]):
        user_id = image.owner_id
    rows = session.scalars(
        sa.select(TaskRow)
        .where(TaskRow.image_id == image.id, TaskRow.kind == "transfer", TaskRow.endpoint_id == endpoint.id)
        .order_by(TaskRow.id.desc())
        .options(undefer(TaskRow.work), undefer(TaskRow.outputs))
    ).all()
    for task in rows:
        order = order_of(task)
        if order is None or order.action != "export" or order.digest != source.digest:
            continue
        state = TaskState(task.state)
        # What another asked for, that person may stop.
        if not state.is_final and task.desired == Desired.RUN and task.owner_id == user_id:
            return task, False
        if state is TaskState.SUCCEEDED and payload_of(ctx, task) is not None:
            return task, False
    order = _taking(ctx, session, "export", image, source)
    made = add_task(
        ctx, session, user_id, image, endpoint, replace(order, source_path=order.facts.path if order.facts else "")
    )
    return made, True


def import_task(
    ctx: Context,
    session: Session,
    user_id: str,
    image: ImageRow,
    endpoint: EndpointRow,
    payload: Output,
    facts: ImageFacts,
    lock: Lock | None,
) -> tuple[ReplicaRow, TaskRow]:
    """Take in a payload that is at the server."""
    replica = _new_replica(ctx, session, image, endpoint, "imported", "imported from a file")
    order = ImageWork(
        action="import",
        image_id=image.id,
        name=image.name,
        recipe=decode(Recipe, image.recipe),
        builder=facts.builder,
        digest=facts.digest,
        size_bytes=facts.size_bytes,
        facts=replace(facts, image_id=image.id, path=""),
        lock=lock,
    )
    mounts = {PAYLOAD_FILE: _payload_ref(ctx, payload)}
    task = add_task(ctx, session, user_id, image, endpoint, order, replica=replica, mounts=mounts)
    return replica, task


def _taking(ctx: Context, session: Session, action: str, image: ImageRow, source: ReplicaRow) -> ImageWork:
    """An order about a result that is ready somewhere, with all that was said of it there."""
    facts = decode(ImageFacts, source.facts or {})
    return ImageWork(
        action=action,
        image_id=image.id,
        name=image.name,
        recipe=decode(Recipe, image.recipe),
        builder=facts.builder,
        digest=source.digest,
        size_bytes=source.size_bytes,
        facts=facts,
        lock=images.lock_of(ctx, session, source),
    )


def asker_of(task: TaskRow) -> str:
    """Id of the user for whom a task is done."""
    return str((task.work or {}).get("asked_by") or task.owner_id)


def add_task(
    ctx: Context,
    session: Session,
    user_id: str,
    image: ImageRow | None,
    endpoint: EndpointRow,
    order: ImageWork,
    *,
    replica: ReplicaRow | None = None,
    mounts: dict[str, str] | None = None,
    after: str = "",
    base_id: str = "",
    asked_by: str = "",
) -> TaskRow:
    """A task for this order, bound to the endpoint and not placed yet."""
    now = ctx.clock()
    facts = facts_of(endpoint)
    if order.action != "build":
        order = replace(order, where="batch" if facts is not None and facts.builds == "batch" else "login")
    cpus = min(_BATCH_CPUS, facts.cpus_per_node) if facts is not None and order.where == "batch" else 1
    limit_s = order.recipe.time_limit if order.action == "build" and order.recipe else _TRANSFER_LIMIT_S
    spec = TaskSpec(
        name=f"{order.action} {order.name}".strip(),
        run=f"# Diamond itself: {order.action} of images",
        resources=Resources(infra=endpoint.name, cpus=str(cpus)),
        file_mounts=mounts or {},
        outputs=_OUTPUTS.get(order.action, ()),
        retry=_RETRY,
        max_duration=limit_s,
    )
    task = TaskRow(
        id=new_id("tsk"),
        owner_id=user_id,
        name=spec.name,
        spec=encode(spec),
        state=TaskState.PENDING.value,
        desired=Desired.RUN.value,
        kind="build" if order.action == "build" else "transfer",
        work={
            "order": encode(order),
            "replica_id": replica.id if replica else "",
            "after": after,
            "base_id": base_id,
            **({"asked_by": asked_by} if asked_by not in ("", user_id) else {}),
        },
        image_id=image.id if image else None,
        endpoint_id=endpoint.id,
        priority=0,
        created_at=now,
        attempt=0,
        failures=0,
        detail="",
        pending_reason="",
        outputs=[],
        project_id=_project_id(session, user_id, image),
        visibility="private",  # whoever sees the image sees it
    )
    session.add(task)
    if replica is not None:
        replica.task_id = task.id
    session.flush()
    lifecycle.record(session, task, "task.created", now, {"name": task.name, "kind": task.kind, "work": order.action})
    if image is not None and replica is not None:
        data = {"endpoint": endpoint.name, "how": replica.origin}
        images.record(session, image, "image.building", now, data, task_id=task.id, endpoint_id=endpoint.id)
    return task


def _project_id(session: Session, user_id: str, image: ImageRow | None) -> str:
    if image is not None and image.owner_id == user_id and image.project_id:
        return image.project_id
    return projects.resolve(session, user_id, None).id


def _new_replica(
    ctx: Context, session: Session, image: ImageRow, endpoint: EndpointRow, origin: str, detail: str
) -> ReplicaRow:
    replica = ReplicaRow(
        id=new_id("rep"),
        image_id=image.id,
        endpoint_id=endpoint.id,
        state=ReplicaState.BUILDING.value,
        origin=origin,
        digest="",
        size_bytes=0,
        detail=detail,
        created_at=ctx.clock(),
    )
    session.add(replica)
    session.flush()
    return replica


def order_of(task: TaskRow) -> ImageWork | None:
    raw: Any = (task.work or {}).get("order")
    return decode(ImageWork, raw) if raw else None


def payload_of(ctx: Context, task: TaskRow) -> Output | None:
    """The payload an export left at the server, if its bytes are still here."""
    for raw in task.outputs:
        item = decode(Output, raw)
        digest = f"sha256:{item.sha256}"
        if item.path == PAYLOAD_FILE and item.stored and is_digest(digest) and ctx.blobs.has(digest):
            return item
    return None


def _payload_ref(ctx: Context, payload: Output) -> str:
    """The payload as a bundle of one file, which is how an agent gets files."""
    item = BundleFile(path=PAYLOAD_FILE, size_bytes=payload.size_bytes, digest=f"sha256:{payload.sha256}")
    manifest = Manifest(files=(item,), is_file=True)
    raw = manifest.canonical()
    ctx.blobs.put_bytes("sha256:" + hashlib.sha256(raw).hexdigest(), raw)
    return manifest.ref


def mounted_payload(ctx: Context, task: TaskRow) -> str:
    """The digest of the payload an import was given; empty when it has none."""
    ref = decode(TaskSpec, task.spec).file_mounts.get(PAYLOAD_FILE, "")
    try:
        return bundles.manifest(ctx, digest_of_ref(ref)).files[0].digest if ref else ""
    except DiamondError:
        return ""


def give_payload(ctx: Context, task: TaskRow, payload: Output) -> None:
    """Let an import find what its export left."""
    spec = decode(TaskSpec, task.spec)
    task.spec = encode(replace(spec, file_mounts={**spec.file_mounts, PAYLOAD_FILE: _payload_ref(ctx, payload)}))


def give_base(task: TaskRow, use: ImageUse) -> None:
    """Tell a build where the image it builds on lies."""
    order = order_of(task)
    assert order is not None
    task.work = {
        **(task.work or {}),
        "order": encode(replace(order, base_path=use.path, base_digest=use.digest, builder=use.kind)),
    }
