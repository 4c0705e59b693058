"""Images on their way: from one endpoint to another, to a file and back, and out of the world.

Copies go through the server's blobs (resumable, verified). A payload is kept there for a while, so that a second copy
needs no second export.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import digest_of_ref, is_bundle_ref, is_digest
from diamond.core.codec import decode, encode
from diamond.core.errors import Conflict, DiamondError, InvalidInput, NotFound
from diamond.core.image_views import Build, EndpointImages, ImageAt
from diamond.core.images import PAYLOAD_FILE, ImageFacts, ImageWork, Lock, ReplicaState
from diamond.core.recipes import BUILDERS, Recipe, parse_image_name
from diamond.core.states import FINAL_TASK_STATES, TaskState
from diamond.core.tasks import Output, Task
from diamond.server.services import (
    bundles,
    holdings,
    image_placing,
    image_progress,
    image_settling,
    image_work,
    images,
    planning,
    projects,
    snapshots,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.services.image_builds import Key, answer, checked_recipe
from diamond.server.services.image_placing import Need
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow, UserRow

KEEP_PAYLOAD_S = 86_400.0
_FINAL_TASKS = [state.value for state in FINAL_TASK_STATES]


def copy(
    ctx: Context, user_id: str, ref: str, endpoint: str, *, idempotency_key: str | None = None
) -> tuple[Build, bool]:
    """Bring an image to an endpoint, whichever way is best; True when something was begun for it now.

    Raises:
        InvalidInput: there is no way to have it there; says why.
    """
    key = Key.of(idempotency_key, {"copy": ref, "endpoint": endpoint})
    with ctx.db.write() as session:
        rows = snapshots.for_images(session, user_id, lock=True)
        if key is not None and (earlier := key.made(session, user_id)) is not None:
            return answer(session, user_id, *earlier), False
        image = images.find(session, user_id, ref, undefer(ImageRow.recipe))
        here = _endpoint(rows, endpoint)
        pinned = images.pinned_digest(image, ref)
        need = image_placing.need_image(ctx, session, image, [here], pinned=pinned)
        result, topics = _get_there(ctx, session, user_id, need, here)
        if key is not None and result.task_id:
            key.remember(ctx, session, user_id, result.task_id)
    ctx.hub.notify(*topics, f"image:{image.id}", "events")
    return result, bool(topics)


def _get_there(ctx: Context, session: Session, user_id: str, need: Need, here: EndpointRow) -> tuple[Build, list[str]]:
    assert need.image is not None
    if snapshots.facts_of(here) is None:
        raise InvalidInput(f"the agent of {here.name} has not connected yet", hint="start it", field="endpoint")
    if obstacle := snapshots.barred(session, user_id, [here]).get(here.id) or need.obstacles.get(here.id):
        raise InvalidInput(f"endpoint {here.name} cannot have it: {obstacle.text}", field="endpoint")
    way = need.ways[here.id]
    replica, made = image_placing.begin(ctx, session, user_id, need, here)
    for task in made:
        if task.id == replica.task_id:
            task.work = {**(task.work or {}), "falls_back": True}
    topics = planning.place_made(ctx, session, made)
    how = {"ready": "cached"}.get(way.how, way.how)
    why = () if made else (way.why,)  # what was begun says itself why
    return answer(session, user_id, need.image, replica, how=how, why=why), topics


def _endpoint(rows: list[EndpointRow], name: str, missing: type[DiamondError] = InvalidInput) -> EndpointRow:
    for row in rows:
        if row.name == name:
            return row
    known = ", ".join(row.name for row in rows) or "none yet"
    raise missing(f"there is no endpoint {name[:60]!r}", hint=f"endpoints: {known}", field="endpoint")


def export(ctx: Context, user_id: str, ref: str, *, endpoint: str | None = None) -> Task:
    """Have an image's payload brought to the server: the task that does, or did. Safe to repeat.

    Raises:
        NotFound: it is ready nowhere (there).
    """
    with ctx.db.write() as session:
        snapshots.endpoints(session, lock=True)
        image = images.find(session, user_id, ref, undefer(ImageRow.recipe))
        replica, where = image_progress.newest(session, user_id, image, endpoint, ref=ref, state=ReplicaState.READY)
        task, is_new = image_work.export_task(ctx, session, user_id, image, replica, where)
        topics = planning.place_made(ctx, session, [task] if is_new else [])
        task_id = task.id
    ctx.hub.notify(*topics)
    return tasks.get(ctx, user_id, task_id)


def payload(ctx: Context, user_id: str, ref: str, *, endpoint: str | None = None) -> tuple[str, Output]:
    """The image's name and the payload an export brought here.

    Raises:
        NotFound: none did; says what to do.
    """
    with ctx.db.read() as session:
        image = images.find(session, user_id, ref)
        replica, where = image_progress.newest(session, user_id, image, endpoint, ref=ref, state=ReplicaState.READY)
        rows = session.scalars(
            sa.select(TaskRow)
            .where(TaskRow.image_id == image.id, TaskRow.kind == "transfer", TaskRow.endpoint_id == where.id)
            .where(TaskRow.state == TaskState.SUCCEEDED.value)
            .order_by(TaskRow.id.desc())
            .options(undefer(TaskRow.work), undefer(TaskRow.outputs))
        ).all()
        for task in rows:
            order = image_work.order_of(task)
            if order is None or order.action != "export" or order.digest != replica.digest:
                continue
            if (found := image_work.payload_of(ctx, task)) is not None:
                return image.name, found
    raise NotFound(
        f"the payload of image {image.name} is not at the server",
        hint="have it brought first: POST /api/v1/images/{image}/export, and wait for that task",
    )


def import_image(
    ctx: Context,
    user_id: str,
    *,
    recipe: object,
    facts: object,
    payload: str,
    lock: object = None,
    name: str | None = None,
    endpoint: str | None = None,
    idempotency_key: str | None = None,
) -> tuple[Build, bool]:
    """Take in an image that was exported here or elsewhere; its payload must have been uploaded.

    Where it does not fit the endpoint, it is rebuilt with the exact versions that it has.

    Raises:
        InvalidInput: naming the field.
    """
    wanted = checked_recipe(ctx, user_id, recipe)
    if name is not None or wanted.name is None:
        try:
            wanted = replace(wanted, name=parse_image_name(name or image_placing.default_name(wanted)))
        except ValueError as error:
            raise InvalidInput(str(error), field="name") from error
    made_elsewhere = _foreign_facts(facts, wanted)
    pins = decode(Lock, lock, path="lock") if lock is not None else None
    if pins is not None:
        pins = replace(
            pins, python=image_settling.clean_text(pins.python, 100), os=image_settling.clean_text(pins.os, 100)
        )
    item = _uploaded(ctx, user_id, payload)
    asked = {"import": payload, "recipe": encode(wanted), "facts": encode(made_elsewhere), "endpoint": endpoint}
    key = Key.of(idempotency_key, asked)
    with ctx.db.write() as session:
        rows = snapshots.for_images(session, user_id, lock=True)
        if key is not None and (earlier := key.made(session, user_id)) is not None:
            return answer(session, user_id, *earlier), False
        here = _place_for(ctx, user_id, rows, made_elsewhere, endpoint)
        wanted = _with_base(session, user_id, wanted, here, fits=_takes(here, made_elsewhere))
        made_elsewhere = replace(made_elsewhere, recipe_digest=wanted.digest)
        image = image_placing.known_image(session, user_id, wanted, endpoint_id=here.id)
        if image is None:
            image = image_placing.new_image(ctx, user_id, wanted, projects.resolve(session, user_id, None))
            session.add(image)
            session.flush()
        need = image_placing.need_image(ctx, session, image, [here])
        if (way := need.ways.get(here.id)) is not None and way.how in ("ready", "waiting"):
            return _get_there(ctx, session, user_id, need, here)[0], False
        if _takes(here, made_elsewhere):
            replica, task = image_work.import_task(ctx, session, user_id, image, here, item, made_elsewhere, pins)
            made, how = [task], "imported"
        else:
            if way is None:
                obstacle = need.obstacles.get(here.id)
                raise InvalidInput(
                    f"the image is of {made_elsewhere.builder} for {made_elsewhere.architecture}, and endpoint "
                    f"{here.name} can neither run nor rebuild it: "
                    + (obstacle.text if obstacle else "its agent has not said yet what it can build"),
                    field="endpoint",
                )
            replica, made = image_placing.begin(ctx, session, user_id, need, here, pins=pins)
            how = "rebuilt"
            replica.origin = how
            replica.detail = f"rebuilt with the exact versions of the file: it is for {made_elsewhere.architecture}"
        topics = planning.place_made(ctx, session, made)
        if key is not None and replica.task_id:
            key.remember(ctx, session, user_id, replica.task_id)
        result = answer(session, user_id, image, replica, how=how)
    ctx.hub.notify(*topics, f"image:{image.id}", "events")
    return result, True


def _with_base(session: Session, user_id: str, recipe: Recipe, here: EndpointRow, *, fits: bool) -> Recipe:
    """The recipe with its base pinned. What was built on an image of another installation can be taken in as it is; it
    cannot be built here."""
    try:
        return image_placing.resolve_base(session, user_id, recipe, snapshots.gpu_models([here]))[0]
    except InvalidInput:
        if fits and "@" in recipe.base_image:
            return recipe
        raise


def _foreign_facts(raw: object, recipe: Recipe) -> ImageFacts:
    """What another installation says of its image: enough to take it in, and nothing that could do harm."""
    facts = decode(ImageFacts, raw, path="facts")
    if facts.builder not in BUILDERS:
        raise InvalidInput(f"{facts.builder[:40]!r} is not one of {', '.join(BUILDERS)}", field="facts.builder")
    if not is_digest(facts.digest):
        raise InvalidInput("is not sha256:<64 hex digits>", field="facts.digest")
    if not 0 <= facts.size_bytes <= image_settling.MAX_IMAGE_BYTES:
        raise InvalidInput(f"must be from 0 to {image_settling.MAX_IMAGE_BYTES}", field="facts.size_bytes")
    if not (facts.architecture.isprintable() and 0 < len(facts.architecture) <= 40):
        raise InvalidInput("must say for which machines it is (as uname -m does)", field="facts.architecture")
    made = image_settling.clean_facts(replace(facts, path="", recipe_digest=recipe.digest))
    if made is None:
        raise InvalidInput("does not describe an image", hint="give the image.json of an export", field="facts")
    return made


def _uploaded(ctx: Context, user_id: str, payload: str) -> Output:
    """The payload, given as a blob's digest or as a bundle of one file."""
    digest = payload
    if is_bundle_ref(payload):
        bundles.require(ctx, user_id, digest_of_ref(payload), "payload")
        manifest = bundles.manifest(ctx, digest_of_ref(payload))
        if not manifest.is_file:
            raise InvalidInput("must be one file, not a folder", field="payload")
        digest = manifest.files[0].digest
    if not is_digest(digest):
        raise InvalidInput("must be sha256:<64 hex digits>, or the reference of a bundle", field="payload")
    if ctx.blobs.claim([digest]) or (digest == payload and not holdings.user_may_read(ctx, user_id, digest)):
        raise InvalidInput(
            f"blob {digest} is not here", hint="upload it first: PUT /api/v1/blobs/{digest}", field="payload"
        )
    size = ctx.blobs.path(digest).stat().st_size
    return Output(path=PAYLOAD_FILE, size_bytes=size, sha256=digest.removeprefix("sha256:"), stored=True)


def _takes(row: EndpointRow, made: ImageFacts) -> bool:
    facts = snapshots.facts_of(row)
    return facts is not None and made.builder in facts.builders and made.architecture == facts.architecture


def _place_for(
    ctx: Context, user_id: str, rows: list[EndpointRow], made: ImageFacts, endpoint: str | None
) -> EndpointRow:
    """Nobody's but one's own, unless one is named: the file is in the hands of whoever owns it there."""
    if endpoint is not None:
        return _endpoint(rows, endpoint)
    known = [row for row in rows if snapshots.facts_of(row) is not None and row.owner_id == user_id]
    if rows and not known:
        names = ", ".join(row.name for row in rows)
        raise InvalidInput("you have no connected endpoint of your own", hint=f"name one: {names}", field="endpoint")
    if not known:
        raise InvalidInput(
            "no endpoint is connected yet", hint="`diamond endpoint create NAME` registers one", field="endpoint"
        )
    return min(
        known,
        key=lambda row: (not _takes(row, made), not snapshots.is_online(row.last_seen_at, ctx.clock()), row.name),
    )


# ---- what lies at an endpoint, and getting rid of it -------------------------------------------------------------


def at_endpoint(ctx: Context, user_id: str, name: str) -> EndpointImages:
    """What images take up there: those the user may see, by size."""
    with ctx.db.read() as session:
        row = _endpoint(snapshots.seen_by(session, user_id), name, NotFound)
        facts = snapshots.facts_of(row)
        found = session.execute(
            sa.select(ReplicaRow, ImageRow, UserRow.name)
            .join(ImageRow, ImageRow.id == ReplicaRow.image_id)
            .join(UserRow, UserRow.id == ImageRow.owner_id)
            .where(ReplicaRow.endpoint_id == row.id, ReplicaRow.state.in_(images.LIVE), *images.visible_to(user_id))
            .order_by(ReplicaRow.size_bytes.desc(), ReplicaRow.id)
        ).all()
        return EndpointImages(
            endpoint=name,
            root=facts.image_root if facts else "",
            image_bytes=facts.image_bytes if facts else 0,
            layer_bytes=facts.layer_bytes if facts else 0,
            builders=facts.builders if facts else (),
            builds=facts.builds if facts else "",
            images=tuple(
                ImageAt(
                    image_id=image.id,
                    name=image.name,
                    owner=owner,
                    state=ReplicaState(replica.state),
                    size_bytes=replica.size_bytes,
                    digest=replica.digest,
                    path=decode(ImageFacts, replica.facts).path if replica.facts else "",
                    ready_at=replica.ready_at,
                    used_at=replica.used_at,
                )
                for replica, image, owner in found
            ),
        )


def remove(
    ctx: Context, user_id: str, ref: str, *, endpoint: str | None = None, force: bool = False
) -> tuple[list[str], list[str]]:
    """Remove an image everywhere, or only its result at one endpoint; the endpoints, and the tasks that tidy up there.

    Raises:
        Conflict: live tasks run in it (names them), and `force` is off.
    """
    now = ctx.clock()
    topics: set[str] = {"events", "planning"}
    with ctx.db.write() as session:
        rows = snapshots.for_images(session, user_id, lock=True)
        image = images.find_mine(session, user_id, ref, undefer(ImageRow.recipe))
        only = _endpoint(rows, endpoint).id if endpoint is not None else None
        _refuse_used(session, image, only, force=force)
        names, made = [], []
        live = sa.select(ReplicaRow).where(ReplicaRow.image_id == image.id, ReplicaRow.state.in_(images.LIVE))
        for replica in session.scalars(live.order_by(ReplicaRow.id)).all():
            if only not in (None, replica.endpoint_id):
                continue
            where = session.get_one(EndpointRow, replica.endpoint_id)
            after = ""
            if replica.state == ReplicaState.BUILDING and replica.task_id:
                after = replica.task_id  # what it still writes goes as well
                maker = session.get_one(TaskRow, replica.task_id, options=[undefer(TaskRow.spec)])
                topics |= set(tasks.cancel_row(ctx, session, maker))
            replica.state, replica.settled_at, replica.detail = ReplicaState.GONE.value, now, "removed on request"
            names.append(where.name)
            if where.removed_at is None:
                order = _removal(image, replica)
                made.append(image_work.add_task(ctx, session, user_id, image, where, order, after=after))
        if only is not None and not names:
            raise NotFound(
                f"image {image.name} is not at endpoint {endpoint!r}", hint="`diamond image show` says where"
            )
        topics |= set(planning.place_made(ctx, session, made))
        if only is None:
            image.removed_at = now
        images.record(session, image, "image.removed", now, {"endpoints": names})
        done = [task.id for task in made]
        topics.add(f"image:{image.id}")
    ctx.hub.notify(*topics)
    return names, done


def _removal(image: ImageRow, replica: ReplicaRow) -> ImageWork:
    facts = decode(ImageFacts, replica.facts) if replica.facts else None
    return ImageWork(
        action="remove",
        image_id=image.id,
        name=image.name,
        builder=facts.builder if facts else "",
        source_path=facts.path if facts else "",
        digest=replica.digest,
        size_bytes=replica.size_bytes,
    )


def _refuse_used(session: Session, image: ImageRow, endpoint_id: str | None, *, force: bool) -> None:
    used = images.used_by(session, image.id)
    if endpoint_id is not None:
        there = sa.select(TaskRow.id).where(TaskRow.id.in_(used), TaskRow.endpoint_id == endpoint_id)
        used = tuple(session.scalars(there.order_by(TaskRow.id)))
    if used and not force:
        shown = ", ".join(used[:5]) + (f" and {len(used) - 5} more" if len(used) > 5 else "")
        raise Conflict(
            f"image {image.name} is used by {len(used)} live task{'s' if len(used) > 1 else ''}: {shown}",
            hint="stop them or wait for them; with force it is removed all the same, and they may fail",
        )


def prune(ctx: Context, user_id: str, name: str) -> Task:
    """Remove kept steps of builds at an endpoint that none of its images was made of."""
    with ctx.db.write() as session:
        row = _endpoint(snapshots.endpoints(session, lock=True, owner_id=user_id), name, NotFound)
        order = ImageWork(action="prune", image_id="", name=name, keep=_needed(session, row))
        task = image_work.add_task(ctx, session, user_id, None, row, order)
        topics = planning.place_made(ctx, session, [task])
        task_id = task.id
    ctx.hub.notify(*topics)
    return tasks.get(ctx, user_id, task_id)


def _needed(session: Session, row: EndpointRow) -> tuple[str, ...]:
    """Layers that images there were made of: their next version will want them."""
    query = sa.select(ReplicaRow.facts).join(ImageRow, ImageRow.id == ReplicaRow.image_id)
    there = [ReplicaRow.endpoint_id == row.id, ReplicaRow.state == ReplicaState.READY.value]
    found = session.scalars(query.where(*there, ImageRow.removed_at.is_(None))).all()
    keys = {stage.key for raw in found if raw for stage in decode(ImageFacts, raw).stages}
    return tuple(sorted(keys - {""}))


def sweep_payloads(ctx: Context) -> int:
    """Let go of payloads that nobody fetches any more; how many. They can be exported again."""
    before = ctx.clock() - KEEP_PAYLOAD_S
    with ctx.db.read() as session:
        rows = session.scalars(
            sa.select(TaskRow)
            .where(TaskRow.kind == "transfer", TaskRow.state.in_(_FINAL_TASKS), TaskRow.ended_at < before)
            .options(undefer(TaskRow.work), undefer(TaskRow.outputs))
        ).all()
        live = sa.select(TaskRow).where(TaskRow.kind == "transfer", TaskRow.state.not_in(_FINAL_TASKS))
        waiting = {
            str((task.work or {}).get("after") or "") for task in session.scalars(live.options(undefer(TaskRow.work)))
        }
    old: set[str] = set()
    for task in rows:
        order = image_work.order_of(task)
        if order is None or order.action != "export" or task.id in waiting:
            continue
        if (found := image_work.payload_of(ctx, task)) is not None:
            old.add(f"sha256:{found.sha256}")
    if not old:
        return 0
    old -= _still_wanted(ctx, before)
    for digest in old:
        ctx.blobs.delete(digest)
    return len(old)


def _still_wanted(ctx: Context, before: float) -> set[str]:
    """Blobs that live tasks are given, or that younger exports brought: the same bytes are kept only once."""
    with ctx.db.read() as session:
        specs = session.scalars(sa.select(TaskRow.spec).where(TaskRow.state.not_in(_FINAL_TASKS))).all()
        ended = sa.or_(TaskRow.ended_at.is_(None), TaskRow.ended_at >= before)
        young = sa.select(TaskRow.outputs).where(TaskRow.kind == "transfer", ended)
        wanted = {f"sha256:{item.get('sha256')}" for outputs in session.scalars(young) for item in outputs}
    refs = {ref for spec in specs for ref in (spec.get("workdir"), *(spec.get("file_mounts") or {}).values())}
    for ref in refs:
        if isinstance(ref, str) and is_bundle_ref(ref):
            with contextlib.suppress(DiamondError):
                wanted |= {item.digest for item in bundles.manifest(ctx, digest_of_ref(ref)).files}
    return wanted
