"""Building images: what a user asks for, checked, planned, and turned into a task at an endpoint."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, undefer

from diamond.core.bundles import digest_of_ref
from diamond.core.codec import decode, encode
from diamond.core.containerfiles import containerfile
from diamond.core.definitions import apptainer_definition
from diamond.core.errors import DiamondError, InvalidInput, NotFound, Unavailable
from diamond.core.faults import fault_point
from diamond.core.image_views import Build, ImagePlan
from diamond.core.images import ImageFacts, ReplicaState, StageRecord
from diamond.core.projects import parse_visibility
from diamond.core.recipes import STAGE_TITLES, Recipe, stages
from diamond.core.tasks import Task, TaskSpec
from diamond.core.venvfiles import venv_steps
from diamond.planner.partitions import Obstacle
from diamond.planner.placement import Placement, place
from diamond.server.services import bundles, image_placing, images, places, planning, projects, quotas, snapshots, tasks
from diamond.server.services.context import Context
from diamond.server.services.image_placing import Need
from diamond.server.services.image_ways import Way, builder_for, where_for
from diamond.server.store.models import EndpointRow, IdempotencyRow, ImageRow, ReplicaRow, TaskRow

_EARLIER = 50


def build(
    ctx: Context,
    user_id: str,
    raw_recipe: object,
    *,
    endpoint: str | None = None,
    where: str = "auto",
    fresh: bool = False,
    visibility: str | None = None,
    project: str | None = None,
    idempotency_key: str | None = None,
) -> tuple[Build, bool]:
    """Have an image of this recipe at an endpoint; True when something was begun for it now.

    The same recipe of the same user at the same endpoint is there already, or is being built already, unless `fresh`.

    Raises:
        InvalidInput: naming the field of the recipe, or `endpoint` and `where`.
        QuotaExceeded: its user or project already stores as much as they may.
        IdempotencyMismatch: the key was used for another request.
    """
    recipe = checked_recipe(ctx, user_id, raw_recipe)
    asked = {"recipe": encode(recipe), "endpoint": endpoint, "where": where, "fresh": fresh, "visibility": visibility}
    key = Key.of(idempotency_key, asked | ({"project": project} if project else {}))
    shared = parse_visibility(visibility) if visibility is not None else None
    with ctx.db.write() as session:
        rows = snapshots.for_images(session, user_id, lock=True)
        if key is not None and (earlier := key.made(session, user_id)) is not None:
            return answer(session, user_id, *earlier), False
        chosen = _choose(ctx, session, user_id, recipe, rows, endpoint, where, project)
        here = [chosen.endpoint]
        image = None
        if not fresh:
            image = image_placing.known_image(session, user_id, chosen.recipe, endpoint_id=chosen.endpoint.id)
        if image is None:
            home = projects.resolve(session, user_id, project)
            image = image_placing.new_image(ctx, user_id, chosen.recipe, home, visibility=shared)
            images.check_shareable(session, image, is_asked=True)
            session.add(image)
            session.flush()
        need = image_placing.need_image(ctx, session, image, here)
        how = _way(need, chosen)
        if how == "built":
            quotas.check_storage(session, user_id, image.project_id, 0, "an image would be more")
        replica, made = image_placing.begin(ctx, session, user_id, need, chosen.endpoint, where=where, fresh=fresh)
        topics = planning.place_made(ctx, session, made)
        if key is not None and replica.task_id:
            key.remember(ctx, session, user_id, replica.task_id)
        result = answer(session, user_id, image, replica, how=how, why=chosen.why)
        fault_point("server.creating")
    ctx.hub.notify(*topics, f"image:{image.id}", "events")
    return result, bool(made)


def _way(need: Need, chosen: _Chosen) -> str:
    """How it is had. A build that was asked for is a build, even where a copy would do."""
    way = need.ways.get(chosen.endpoint.id)
    if way is not None and way.how in ("ready", "waiting"):
        return "cached" if way.how == "ready" else "waiting"
    need.ways[chosen.endpoint.id] = Way(how="built", why="", builder=chosen.builder)
    return "built"


def checked_recipe(ctx: Context, user_id: str, raw: object, *, uploaded: bool = True) -> Recipe:
    """Validate a recipe; with `uploaded`, also that every file it names is wholly here, and the user's."""
    recipe = Recipe.parse(raw)
    if uploaded:
        recipe.check_uploaded()
        for target, ref in recipe.files.items():
            bundles.require(ctx, user_id, digest_of_ref(ref), f"files.{target}")
    return recipe


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    endpoint: EndpointRow
    recipe: Recipe  # with its base pinned
    base: ImageRow | None
    builder: str
    where: str
    why: tuple[str, ...]
    others: dict[str, str]


def _choose(
    ctx: Context,
    session: Session,
    user_id: str,
    recipe: Recipe,
    rows: list[EndpointRow],
    endpoint: str | None,
    where: str,
    project: str | None,
) -> _Chosen:
    """Where a recipe is built: as asked, else where a task that needs nothing would go, of those that can build it."""
    if where not in ("auto", "login", "batch"):
        raise InvalidInput("must be one of auto, login, batch", field="where")
    spec = TaskSpec.parse({"run": "true", "resources": {"infra": endpoint}})
    obstacles = _unwanted(session, user_id, rows, spec, project)
    builders: dict[str, str] = {}
    resolved: dict[str, tuple[Recipe, ImageRow | None]] = {}
    for row in rows:
        facts = snapshots.facts_of(row)
        if facts is None or not snapshots.knows_builders(facts) or row.id in obstacles:
            continue
        try:
            pinned, base = image_placing.resolve_base(session, user_id, recipe, snapshots.gpu_models([row]))
            kind = image_placing.base_builder(session, base, row)
            builder, problem = builder_for(pinned, facts, kind)
            if not problem and base is not None:
                pin = image_placing.base_pin(pinned, base)
                lacks = image_placing.need_image(ctx, session, base, [row], pinned=pin).obstacles.get(row.id)
                problem = f"its base cannot be had there: {lacks.text}" if lacks is not None else ""
            if not problem:
                where_for(pinned.where if where == "auto" else where, facts)
        except InvalidInput as error:
            if error.field == "base" or endpoint == row.name:
                raise
            builder, problem = "", error.message
        if problem:
            unfit = facts.builds not in ("", "off") and recipe.builder == "auto" and recipe.base != "host"
            field = "base" if unfit else "endpoint" if endpoint else "recipe"
            obstacles[row.id] = Obstacle(field=field, text=problem)
        else:
            builders[row.id], resolved[row.id] = builder, (pinned, base)
    known = _live_at(session, user_id, {pinned.digest for pinned, _ in resolved.values()})
    candidates = [
        snapshots.candidate(
            ctx,
            row,
            rank=0 if row.id in known else 1,
            obstacle=obstacles.get(row.id),
            is_undecided=row.id not in obstacles and row.id not in resolved,
        )
        for row in rows
    ]
    placement = place(spec, candidates)
    found = next((row for row in rows if row.name == placement.endpoint), None)
    if found is None:
        raise _nowhere(endpoint, placement, [one.name for one in candidates if one.online])
    facts = snapshots.facts_of(found)
    assert facts is not None
    pinned, base = resolved[found.id]
    return _Chosen(
        endpoint=found,
        recipe=pinned,
        base=base,
        builder=builders[found.id],
        where=where_for(pinned.where if where == "auto" else where, facts),
        why=(
            *(text.replace("can run it", "can build it") for text in placement.why),
            f"{builders[found.id]} builds it",
        ),
        others={name: item.text for name, item in placement.obstacles.items()},
    )


def _unwanted(
    session: Session, user_id: str, rows: list[EndpointRow], spec: TaskSpec, project: str | None
) -> dict[str, Obstacle]:
    """Whoever builds an image decides what is in it, and it runs wherever it is used. So unless one is named, it is
    built at one's own endpoints, and at those that the owners of the project it will be in approved of."""
    found = dict(places.unwanted(session, user_id, rows, spec))
    if spec.resources.infra is not None:
        return found
    home = projects.look_up(session, user_id, project)
    trusted = {row.id for row in snapshots.usable(session, user_id, home.id if home else None, rows)}
    whose = f"project {home.name}" if home is not None and home.personal_of is None else "your own project"
    for row in rows:
        if row.id not in trusted:
            text = (
                f"it is another's, and the image would be in {whose}, with which it is not shared; name it with --infra"
            )
            found.setdefault(row.id, Obstacle(field="endpoint", text=text))
    return found


def _live_at(session: Session, user_id: str, digests: set[str]) -> set[str]:
    """Endpoints that have such a recipe already, or are building it."""
    mine = [ImageRow.owner_id == user_id, ImageRow.recipe_digest.in_(digests), ImageRow.removed_at.is_(None)]
    query = sa.select(ReplicaRow.endpoint_id).join(ImageRow, ImageRow.id == ReplicaRow.image_id)
    return set(session.scalars(query.where(*mine, ReplicaRow.state.in_(images.LIVE))))


def _nowhere(endpoint: str | None, placement: Placement, online: Collection[str]) -> DiamondError:
    known = sorted([*placement.obstacles, *placement.undecided])
    if endpoint is not None and endpoint not in known:
        return InvalidInput(
            f"there is no endpoint {endpoint[:60]!r}",
            hint=f"endpoints: {', '.join(known) or 'none yet'}",
            field="endpoint",
        )
    if not known:
        return InvalidInput(
            "there is no endpoint yet", hint="`diamond endpoint create NAME` registers one", field="endpoint"
        )
    if waiting := [name for name in placement.undecided if name in online and endpoint in (None, name)]:
        return Unavailable(
            f"{', '.join(waiting)} came online just now and is still finding out what it can build",
            hint="try again in a few seconds",
        )
    problems = {n: item.text for n, item in placement.obstacles.items() if endpoint in (None, n)}
    problems |= dict.fromkeys(placement.undecided, "its agent has not connected yet, so nobody knows what it can build")
    text = "; ".join(f"{name}: {problem}" for name, problem in sorted(problems.items()))
    if problems and all(placement.obstacles[n].field == "base" for n in problems if n in placement.obstacles):
        hint = "`base: host` builds a virtual environment with the endpoint's own Python, and needs no container"
        return InvalidInput(f"no endpoint can build this: {text}", hint=hint, field="base")
    blamed = "endpoint" if endpoint or not placement.obstacles else "recipe"
    return InvalidInput(f"no endpoint can build this: {text}", field=blamed)


def plan(
    ctx: Context,
    user_id: str,
    raw_recipe: object,
    *,
    endpoint: str | None = None,
    where: str = "auto",
    project: str | None = None,
) -> ImagePlan:
    """What `build` would do. Files need not be uploaded yet; nothing is written."""
    recipe = checked_recipe(ctx, user_id, raw_recipe, uploaded=False)
    with ctx.db.read() as session:
        rows = snapshots.for_images(session, user_id)
        chosen = _choose(ctx, session, user_id, recipe, rows, endpoint, where, project)
        image = image_placing.known_image(session, user_id, chosen.recipe, endpoint_id=chosen.endpoint.id)
        ready = image is not None and any(
            at.id == chosen.endpoint.id and replica.state == ReplicaState.READY
            for replica, at in images.replicas_of(session, image.id)
        )
        names = [stage.name for stage in stages(chosen.recipe, builder=chosen.builder)]
        shown = [*names, "pack", *(["test"] if chosen.recipe.test else [])]
        return ImagePlan(
            recipe=chosen.recipe,
            recipe_digest=chosen.recipe.digest,
            endpoint=chosen.endpoint.name,
            builder=chosen.builder,
            where=chosen.where,
            why=chosen.why,
            others=chosen.others,
            definition=definition(chosen.recipe, chosen.builder, names),
            stages=tuple(StageRecord(name=name, title=STAGE_TITLES[name], state="waiting") for name in shown),
            cached=ready,
            image_id=image.id if image is not None else "",
            expected_s=0.0 if ready else _expected(session, chosen.endpoint.id),
        )


def definition(recipe: Recipe, builder: str, stage_names: list[str]) -> str:
    """The recipe in the builder's own language."""
    if builder == "apptainer":
        return apptainer_definition(recipe, stage_names)
    if builder == "venv":
        return venv_steps(recipe, stage_names)
    return containerfile(recipe, stage_names, mounts=builder != "charliecloud")


def _expected(session: Session, endpoint_id: str) -> float | None:
    """How long builds took there of late, in the middle of them; those from kept steps say nothing."""
    rows = session.scalars(
        sa.select(ReplicaRow.facts)
        .where(ReplicaRow.endpoint_id == endpoint_id, ReplicaRow.origin.in_(("built", "rebuilt")))
        .where(ReplicaRow.facts.is_not(None), ReplicaRow.ready_at.is_not(None))
        .order_by(ReplicaRow.id.desc())
        .limit(_EARLIER)
    ).all()
    took = []
    for raw in rows:
        made = decode(ImageFacts, raw or {})
        if made.seconds > 0 and any(stage.state == "done" for stage in made.stages):
            took.append(made.seconds)
    return statistics.median(took) if took else None


def run_test(ctx: Context, user_id: str, ref: str, *, endpoint: str | None = None, command: str | None = None) -> Task:
    """An ordinary task that runs the recipe's validation command, or another one, in the image."""
    with ctx.db.read() as session:
        image = images.find(session, user_id, ref, undefer(ImageRow.recipe))
        recipe = decode(Recipe, image.recipe)
    meant = ref if images.pinned_digest(image, ref) else image.id
    wanted = command if command is not None else recipe.test
    if not wanted:
        raise InvalidInput(
            f"image {image.name} has no validation command", hint="give the command to run in it", field="command"
        )
    spec = {"name": f"test {image.name}", "run": wanted, "resources": {"image_id": meant, "infra": endpoint}}
    task, _ = tasks.create(ctx, user_id, spec)
    return task


# ---- answers and keys --------------------------------------------------------------------------------------------


def answer(
    session: Session,
    user_id: str,
    image: ImageRow,
    replica: ReplicaRow,
    *,
    how: str = "",
    why: tuple[str, ...] = (),
) -> Build:
    where = session.get_one(EndpointRow, replica.endpoint_id)
    ready = replica.state == ReplicaState.READY
    return Build(
        image=images.detail_of(session, image, user_id),
        replica=images.to_replica(replica, where.name),
        task_id=replica.task_id or "",
        cached=ready and how in ("", "cached"),
        how=how or ("cached" if ready else replica.origin),
        why=tuple(text for text in (*why, replica.detail) if text),
    )


@dataclass(frozen=True, kw_only=True)
class Key:
    """An idempotency key of a request about images; what it made is known by its task."""

    key: str
    body_hash: str

    @staticmethod
    def of(key: str | None, body: Any) -> Key | None:
        if key is None:
            return None
        tasks.check_key(key)
        text = json.dumps(body, sort_keys=True)
        return Key(key=key, body_hash="image " + hashlib.sha256(text.encode()).hexdigest())

    def made(self, session: Session, user_id: str) -> tuple[ImageRow, ReplicaRow] | None:
        known = tasks.lookup_keys(session, user_id, [self.key], [self.body_hash])
        task = session.get(TaskRow, known[self.key], options=[undefer(TaskRow.work)]) if known else None
        if task is None:
            return None
        replica = session.get(ReplicaRow, str((task.work or {}).get("replica_id") or ""))
        image = session.get(ImageRow, task.image_id or "", options=[undefer(ImageRow.recipe)])
        if image is None or replica is None:
            raise NotFound("what that request made is gone", hint="use a new key", field="Idempotency-Key")
        return image, replica

    def remember(self, ctx: Context, session: Session, user_id: str, task_id: str) -> None:
        session.flush()
        row = IdempotencyRow(
            owner_id=user_id, key=self.key, body_hash=self.body_hash, task_id=task_id, created_at=ctx.clock()
        )
        session.add(row)
        session.flush()
