"""Images while tasks are placed: which endpoints have what a task runs in, what it waits for, and when that failed.

`planning` asks; nothing here places a job. Runs inside the caller's transaction, and writes only with `begin`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core import bases
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.images import BuildFailure, ImageFacts, ImageUse, ReplicaState
from diamond.core.projects import Visibility
from diamond.core.reasons import Reason
from diamond.core.recipes import Recipe
from diamond.core.states import FINAL_TASK_STATES, TaskState
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Obstacle
from diamond.server.services import access, image_work, images
from diamond.server.services.context import Context
from diamond.server.services.image_ways import RANKS, Results, Way, use_of, use_of_path, way_to
from diamond.server.services.projects import default_visibility
from diamond.server.services.snapshots import endpoints, facts_of, gpu_models, knows_builders, usable
from diamond.server.store.identity_models import EndpointShareRow, ProjectRow
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow

_DOING = {"built": "built at", "rebuilt": "rebuilt at", "copied": "copied to", "linked": "taken over at"}


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The image cannot be had; a sentence with what to do."""

    text: str


@dataclass(kw_only=True)
class Need:
    """What a task needs of images, and how each endpoint would get it. `path` is a file of the endpoint instead."""

    image: ImageRow | None = None
    recipe: Recipe | None = None
    base: ImageRow | None = None
    path: str = ""
    asked_in: str = "resources.image_id"  # the field of the spec that asks for it
    ways: dict[str, Way] = field(default_factory=dict)  # by endpoint id
    uses: dict[str, ImageUse] = field(default_factory=dict)
    obstacles: dict[str, Obstacle] = field(default_factory=dict)

    def rank(self, row: EndpointRow) -> int:
        way = self.ways.get(row.id)
        return RANKS.get(way.how, 0) if way else 0

    def is_decided(self, row: EndpointRow) -> bool:
        """Whether it is known that the endpoint has it, how it would get it, or why it cannot."""
        return row.id in self.uses or row.id in self.ways or row.id in self.obstacles

    def note(self, row: EndpointRow) -> str:
        way = self.ways.get(row.id)
        return way.why if way else ""


# ---- what a spec means -------------------------------------------------------------------------------------------


def resolve(
    ctx: Context, session: Session, user_id: str, spec: TaskSpec, project: ProjectRow | None
) -> tuple[ImageRow | None, str]:
    """The image a new task runs in (perhaps one that is not in the database yet), or a path on the endpoint.

    `project`: of the task, in which a new image will be; None: its user's own, where there is none yet.

    Raises:
        InvalidInput: naming the field and what there is instead.
    """
    ref = (spec.resources.image_id or "").strip()
    if spec.image is not None:
        return _for_recipe(ctx, session, user_id, spec, spec.image, "image", project), ""
    if not ref:
        return None, ""
    where = "resources.image_id"
    if ref.startswith("/"):
        if any(ord(c) < 32 or ord(c) == 127 for c in ref) or ".." in ref.split("/") or len(ref) > 4096:
            raise InvalidInput(f"{ref[:80]!r} is not a path of an image", hint="give its full path", field=where)
        return None, ref
    try:
        if ref.startswith("docker://"):
            return _for_recipe(ctx, session, user_id, spec, Recipe.parse({"base": ref}), where, project), ""
        return images.find(session, user_id, ref, undefer(ImageRow.recipe), field=where), ""
    except NotFound as error:
        raise InvalidInput(error.message, hint=error.hint, field=where) from error
    except InvalidInput as error:
        raise InvalidInput(error.message, hint=error.hint, field=where) from error


def _for_recipe(
    ctx: Context,
    session: Session,
    user_id: str,
    spec: TaskSpec,
    recipe: Recipe,
    where: str,
    project: ProjectRow | None,
) -> ImageRow:
    rows = usable(session, user_id, project.id if project else None, endpoints(session))
    rows = [row for row in rows if spec.resources.infra in (None, row.name)]
    models = [spec.resources.gpu_type] if spec.resources.gpu_type else gpu_models(rows)
    try:
        recipe, _ = resolve_base(session, user_id, recipe, models)
    except DiamondError as error:
        raise InvalidInput(error.message, hint=error.hint, field=f"{where}.{error.field}".rstrip(".")) from error
    return known_image(session, user_id, recipe) or new_image(ctx, user_id, recipe, project)


def resolve_base(session: Session, user_id: str, recipe: Recipe, models: list[str]) -> tuple[Recipe, ImageRow | None]:
    """The recipe with its base pinned: a suggestion by its address, an image of Diamond by its recipe's hash."""
    if recipe.base.startswith("suggested:"):
        return replace(recipe, base=bases.resolve(recipe.base, models)), None
    if not recipe.base_image:
        return recipe, None
    try:
        base = images.find(session, user_id, recipe.base_image, undefer(ImageRow.recipe), field="base")
    except NotFound as error:
        raise InvalidInput(error.message, hint=error.hint, field="base") from error
    if images.pinned_digest(base, recipe.base_image):  # one result of it is meant, not whatever its recipe gives
        return recipe, base
    named = recipe.base_image.partition("@")[0]
    return replace(recipe, base=f"image:{named}@{base.recipe_digest}"), base


def known_image(session: Session, user_id: str, recipe: Recipe, *, endpoint_id: str = "") -> ImageRow | None:
    """The user's newest image of just this recipe (and name, if it has one); live ones first, here first of all."""
    where = [
        ImageRow.owner_id == user_id,
        ImageRow.recipe_digest == recipe.digest,
        ImageRow.removed_at.is_(None),
    ]
    if recipe.name:
        where.append(ImageRow.name == recipe.name)
    live = sa.exists().where(ReplicaRow.image_id == ImageRow.id, ReplicaRow.state.in_(images.LIVE))
    order = [sa.case((live.where(ReplicaRow.endpoint_id == endpoint_id), 0), else_=1)] if endpoint_id else []
    query = sa.select(ImageRow).where(*where).order_by(*order, sa.case((live, 0), else_=1), ImageRow.id.desc())
    return session.scalars(query.limit(1).options(undefer(ImageRow.recipe))).one_or_none()


def new_image(
    ctx: Context, user_id: str, recipe: Recipe, project: ProjectRow | None, *, visibility: Visibility | None = None
) -> ImageRow:
    """A row that is not in the database yet; seen by whom its project says, unless `visibility` says otherwise."""
    name = recipe.name or default_name(recipe)
    if visibility is None:
        visibility = default_visibility(project) if project else Visibility.PRIVATE
    return ImageRow(
        id=new_id("img"),
        owner_id=user_id,
        name=name,
        recipe=encode(replace(recipe, name=name)),
        recipe_digest=recipe.digest,
        visibility=visibility.value,
        labels=dict(recipe.labels),
        project_id=project.id if project else None,
        created_at=ctx.clock(),
    )


def default_name(recipe: Recipe) -> str:
    """Something recognisable: the base's own name where the base is all there is, else the recipe's hash."""
    plain = Recipe(base=recipe.base, test=recipe.test, builder=recipe.builder)
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.base.rsplit("/", 1)[-1].partition("@")[0]).strip("-._")
    if recipe.digest == plain.digest and word and recipe.base.startswith("docker://"):
        return word[:64].strip("-._")
    return f"env-{recipe.digest.removeprefix('sha256:')[:12]}"


# ---- where it is, and how it would get elsewhere -----------------------------------------------------------------


def look(ctx: Context, session: Session, task: TaskRow, spec: TaskSpec, rows: list[EndpointRow]) -> Need | None:
    """What the task needs at each endpoint; None when it runs on the endpoints' own system."""
    path = (spec.resources.image_id or "").strip()
    if task.image_id is None and path.startswith("/"):
        return need_path(path, rows)
    if task.image_id is None:
        return None
    image = session.get(ImageRow, task.image_id, options=[undefer(ImageRow.recipe)])
    if image is None:
        return None
    asked_in = "image" if spec.image is not None else "resources.image_id"
    pinned = images.pinned_digest(image, path)
    tried = (task.work or {}).get("tried", [])
    return need_image(ctx, session, image, rows, asked_in=asked_in, tried=tried, pinned=pinned)


def need_path(path: str, rows: list[EndpointRow]) -> Need:
    need = Need(path=path)
    for row in rows:
        if (facts := facts_of(row)) is None:
            continue
        use = use_of_path(path, facts)
        if isinstance(use, str):
            need.obstacles[row.id] = Obstacle(field=need.asked_in, text=use)
        else:
            need.uses[row.id] = use
    return need


def need_image(
    ctx: Context,
    session: Session,
    image: ImageRow,
    rows: list[EndpointRow],
    *,
    asked_in: str = "resources.image_id",
    tried: Collection[str] = (),
    pinned: str = "",
) -> Need:
    """How each endpoint would get the image. `pinned`: the digest that the result must have."""
    recipe = decode(Recipe, image.recipe)
    base = base_of(session, image, recipe)
    need = Need(image=image, recipe=recipe, base=base, asked_in=asked_in)
    results = images.replicas_of(session, image.id)
    lost_base = recipe.base_image if base is None else ""
    others: set[str] = set()
    if pinned:
        live = [(replica, at) for replica, at in results if replica.state in images.LIVE]
        results = [(replica, at) for replica, at in live if has_digest(session, replica, pinned)]
        others = {at.id for _, at in live} - {at.id for _, at in results}
    doubtful = set() if pinned else _doubtful(session, image, results)
    for row in rows:
        if facts_of(row) is None:
            continue
        if row.id in others:
            text = f"its image {image.name} is another one than {pinned[:19]}"
            need.obstacles[row.id] = Obstacle(field=asked_in, text=text)
            continue
        kind = base_builder(session, base, row)
        way = way_to(
            image, recipe, row, results, ctx.clock(),
            tried=tried, base_builder=kind, pinned=pinned, lost_base=lost_base, doubtful=doubtful,
        )  # fmt: skip
        if way.how == "ready":
            assert way.source is not None
            need.uses[row.id] = use_of(image, way.source)
        if way.how:
            need.ways[row.id] = way
        elif knows_builders(facts_of(row)):
            need.obstacles[row.id] = Obstacle(field=asked_in, text=way.why)
    return need


def _doubtful(session: Session, image: ImageRow, results: Results) -> set[str]:
    """Ids of results that say nothing of the image anywhere else: whoever may use an image may have it made at an
    endpoint of theirs, and so decides what is in that one.

    The others are at endpoints of the image's owner, were brought where they are by that owner, or are at endpoints
    that the image's project approved of.
    """
    foreign = [(replica, at) for replica, at in results if at.owner_id != image.owner_id]
    if not foreign:
        return set()
    approved = sa.select(EndpointShareRow.endpoint_id).where(
        EndpointShareRow.project_id == (image.project_id or ""), access.approved()
    )
    shared = set(session.scalars(approved))
    found = set()
    for replica, at in foreign:
        maker = session.get(TaskRow, replica.task_id or "", options=[undefer(TaskRow.work)])
        by_owner = maker is not None and image_work.asker_of(maker) == image.owner_id
        if at.id not in shared and not by_owner:
            found.add(replica.id)
    return found


def has_digest(session: Session, replica: ReplicaRow, digest: str) -> bool:
    """Whether it is (or will be) the result with this digest. A copied virtual environment has one of its own, since it
    is pointed to another Python: what it was copied from counts."""
    if replica.digest.startswith(digest):
        return True
    task = session.get(TaskRow, replica.task_id or "", options=[undefer(TaskRow.work)])
    order = image_work.order_of(task) if task is not None else None
    return order is not None and order.action in ("import", "link") and order.digest.startswith(digest)


def base_of(session: Session, image: ImageRow, recipe: Recipe) -> ImageRow | None:
    """The Diamond image it builds on, as its owner named it; None also where the bases lead back to an image they began
    with, as forged ones may."""
    first: ImageRow | None = None
    seen = {image.id}
    while recipe.base_image:
        try:
            found = images.find(session, image.owner_id, recipe.base_image, undefer(ImageRow.recipe))
        except DiamondError:
            return first
        if found.id in seen:
            return None
        seen.add(found.id)
        first = first or found
        image, recipe = found, decode(Recipe, found.recipe)
    return first


def base_pin(recipe: Recipe, base: ImageRow) -> str:
    """The digest its base must have; empty: any result of that image will do."""
    return images.pinned_digest(base, recipe.base_image)


def base_builder(session: Session, base: ImageRow | None, row: EndpointRow) -> str:
    """What kind of image the base is at that endpoint; where it is not there, what kind it is elsewhere."""
    if base is None:
        return ""
    kinds = {
        endpoint.id: decode(ImageFacts, replica.facts).builder
        for replica, endpoint in images.replicas_of(session, base.id)
        if replica.state == ReplicaState.READY and replica.facts
    }
    facts = facts_of(row)
    fitting = [kind for kind in kinds.values() if facts is not None and kind in facts.builders]
    return kinds.get(row.id) or (fitting[0] if fitting else "")


# ---- waiting for it ----------------------------------------------------------------------------------------------


def disappointed(session: Session, task: TaskRow, key: str = "replica_id") -> Failed | None:
    """Whether what the task waited for has failed, in a way that nothing else can be tried.

    A copy or a take-over that failed is not the end: the next way is taken. A build that failed is.
    """
    waited = str((task.work or {}).get(key) or "")
    if not waited and task.image_id is None:
        return None
    replica = session.get(ReplicaRow, waited) if waited else None
    image = session.get(ImageRow, replica.image_id if replica else task.image_id or "")
    if image is not None and image.removed_at is not None:
        return Failed(text=f"image {image.name} was removed")
    if replica is None or replica.state != ReplicaState.FAILED:
        return None
    assert image is not None
    if _stopped_by_another(session, replica, task.owner_id if key == "replica_id" else image.owner_id):
        task.work = {**(task.work or {}), key: ""}
        return None
    if replica.origin in ("linked", "copied"):
        work = dict(task.work or {})
        task.work = {**work, "tried": sorted({*work.get("tried", []), replica.origin}), key: ""}
        return None
    where = session.get(EndpointRow, replica.endpoint_id)
    return Failed(text=failure_text(image, replica, where.name if where else "its endpoint"))


def _stopped_by_another(session: Session, replica: ReplicaRow, user_id: str) -> bool:
    """Whether it failed because somebody else stopped a task of theirs: no reason for this user to do without."""
    maker = session.get(TaskRow, replica.task_id or "")
    return maker is not None and maker.reason == Reason.CANCELLED and maker.owner_id != user_id


def failure_text(image: ImageRow, replica: ReplicaRow, endpoint: str) -> str:
    failure = decode(BuildFailure, replica.failure or {"stage": "", "message": replica.detail})
    said = failure.message or "no reason was given"
    line = f" ({failure.line})" if failure.line and failure.line not in said else ""
    text = f"image {image.name} could not be made at {endpoint}: {said}{line}"
    if failure.hint:
        text += f"; {failure.hint}"
    return f"{text}; see the log of task {replica.task_id}" if replica.task_id else text


def waiting_text(session: Session, image: ImageRow, replica: ReplicaRow) -> str:
    """What is happening, for the task that waits."""
    where = session.get(EndpointRow, replica.endpoint_id)
    doing = _DOING.get(replica.origin, "brought to")
    return f"its image {image.name} is being {doing} {where.name if where else '?'} (task {replica.task_id})"


def wait_for(task: TaskRow, replica: ReplicaRow, key: str = "replica_id") -> bool:
    """Note what the task waits for; True when that is news."""
    if (task.work or {}).get(key) == replica.id:
        return False
    task.work = {**(task.work or {}), key: replica.id}
    return True


def note_use(session: Session, image_id: str, endpoint_id: str, now: float) -> None:
    """Remember when an image was last used, for whoever wonders what can be removed."""
    where = [ReplicaRow.image_id == image_id, ReplicaRow.endpoint_id == endpoint_id]
    ready = ReplicaRow.state == ReplicaState.READY.value
    session.execute(
        sa.update(ReplicaRow).where(*where, ready).values(used_at=now),
        execution_options={"synchronize_session": False},
    )


def begin(
    ctx: Context, session: Session, user_id: str, need: Need, endpoint: EndpointRow, **options: Any
) -> tuple[ReplicaRow, list[TaskRow]]:
    """The result the endpoint will have: being made already, or begun now with tasks that are to be placed."""
    assert need.image is not None and need.recipe is not None
    way = need.ways[endpoint.id]
    if way.how in ("waiting", "ready"):
        assert way.source is not None
        return way.source, []
    if way.how in ("built", "rebuilt") and need.recipe.base_image and need.base is None:
        raise InvalidInput(
            f"image {need.recipe.base_image}, on which {need.image.name} builds, is not to be found", field="base"
        )
    return image_work.bring(ctx, session, user_id, need.image, need.recipe, endpoint, way, base=need.base, **options)


def removal_state(session: Session, task: TaskRow) -> str:
    """What is made anew waits for the removal of what was there before, which would take it along."""
    order = image_work.order_of(task)
    if order is None or order.action not in ("build", "import", "link"):
        return ""
    earlier = [TaskRow.image_id == task.image_id, TaskRow.endpoint_id == task.endpoint_id, TaskRow.id < task.id]
    live = TaskRow.state.not_in([state.value for state in FINAL_TASK_STATES])
    query = sa.select(TaskRow).where(*earlier, live, TaskRow.kind == "transfer").options(undefer(TaskRow.work))
    for other in session.scalars(query):
        before = image_work.order_of(other)
        if before is not None and before.action == "remove":
            return f"waiting for the removal of the one before (task {other.id})"
    return ""


def export_state(ctx: Context, session: Session, task: TaskRow) -> str | Failed:
    """Whether the task that this one waits for is done: empty when it is, and an import was handed the payload."""
    after = str((task.work or {}).get("after") or "")
    export = session.get(TaskRow, after, options=[undefer(TaskRow.outputs)]) if after else None
    if export is None:
        return "" if not after else Failed(text="the task that should have brought the image to the server is gone")
    state = TaskState(export.state)
    order = image_work.order_of(task)
    if order is not None and order.action == "remove":
        return "" if state.is_final else f"waiting for its making to stop (task {export.id})"
    if not state.is_final:
        return f"waiting for the image's file to reach the server (task {export.id})"
    payload = image_work.payload_of(ctx, export)
    if state is TaskState.SUCCEEDED and payload is not None:
        image_work.give_payload(ctx, task, payload)
        return ""
    if state is TaskState.SUCCEEDED:
        return Failed(
            text="the image's file did not reach the server: it is larger than the endpoint's policy file lets out "
            f"(max_image_bytes), or was removed since (task {export.id})"
        )
    return Failed(text=f"bringing the image's file to the server failed: {export.detail or export.reason} "
                  f"(task {export.id})")  # fmt: skip
