"""Building images and naming them, on every database; an agent answers over the real protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import encode
from diamond.core.errors import Conflict, Forbidden, IdempotencyMismatch, InvalidInput, NotFound
from diamond.core.images import FACTS_FILE, BuildFailure, ReplicaState
from diamond.core.reasons import Reason
from diamond.core.shells import NewShell
from diamond.core.states import Desired, JobState, TaskState
from diamond.server.services import (
    bundles,
    endpoints,
    events,
    image_builds,
    image_copies,
    image_progress,
    image_settling,
    images,
    planning,
    shells,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.store.models import ReplicaRow, UserRow
from testing.image_agent import ImageAgent
from testing.uploads import upload

RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"], "test": "import-numpy"}
FAILURE = BuildFailure(
    stage="pip",
    message="there is no package no-such-thing",
    line="pip: no-such-thing",
    hint="check its spelling",
    excerpt="ERROR: no matching distribution",
    code="pip_not_found",
)


def owner_name(ctx: Context, user_id: str) -> str:
    with ctx.db.read() as session:
        return session.get_one(UserRow, user_id).name


def build(ctx: Context, user_id: str, **recipe: Any) -> Any:
    made, is_new = image_builds.build(ctx, user_id, {**RECIPE, **recipe})
    assert is_new
    return made


def test_a_build_is_a_task_and_its_result_an_image(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    made = build(ctx, user_id)
    assert (made.how, made.cached, made.replica.state, made.replica.endpoint) == (
        "built", False, ReplicaState.BUILDING, "alpha",
    )  # fmt: skip
    order = agent.order()
    assert order.task_id == made.task_id
    assert order.work is not None and order.work.recipe is not None
    assert (order.work.action, order.work.builder, order.work.where) == ("build", "apptainer", "login")
    assert (order.work.image_id, order.work.recipe.digest) == (made.image.id, made.image.recipe_digest)
    assert order.time_limit_s == 7200 and not order.chained
    task = tasks.get(ctx, user_id, made.task_id)
    assert (task.kind, task.image, task.state) == ("build", "env", TaskState.QUEUED)
    assert tasks.list_tasks(ctx, user_id)[2] == 0, "builds are not among the tasks, unless asked for"
    assert tasks.list_tasks(ctx, user_id, kind="build")[2] == 1
    log = b"diamond: stage 1/3 base: base image\ndiamond: stage base done in 2.0 s\nnoise\ndiamond: stage 2/3 pip: x\n"
    agent.tell(order.job_id, JobState.RUNNING, log=log)
    so_far = image_progress.progress(ctx, user_id, "env")
    assert [(stage.name, stage.state) for stage in so_far.stages] == [("base", "done"), ("pip", "running")]
    assert (so_far.number, so_far.total) == (2, 3)
    agent.finish(order)
    image = images.get(ctx, user_id, "env")
    (replica,) = image.replicas
    assert (replica.state, replica.endpoint, replica.origin) == (ReplicaState.READY, "alpha", "built")
    assert replica.facts is not None and replica.facts.path == f"/images/store/{image.id}/image.sif"
    assert image.recipe is not None and image.recipe.pip == ("numpy",)
    kinds = [e.kind for e in events.since(ctx, user_id, 0) if e.kind.startswith("image.")]
    assert kinds == ["image.building", "image.ready"]


def test_the_same_recipe_is_built_once(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    first = build(ctx, user_id)
    again, is_new = image_builds.build(ctx, user_id, RECIPE)
    assert (is_new, again.how, again.task_id) == (False, "waiting", first.task_id)
    agent.finish()
    cached, is_new = image_builds.build(ctx, user_id, {**RECIPE, "time_limit": "1h"})
    assert (is_new, cached.cached, cached.how, cached.image.id) == (False, True, "cached", first.image.id)
    assert agent.orders() == []
    changed = build(ctx, user_id, pip=["numpy", "scipy"])
    assert changed.image.id != first.image.id
    assert images.get(ctx, user_id, "env").id == changed.image.id, "the newest being built is meant by its name"
    agent.fail(failure=FAILURE)
    assert images.get(ctx, user_id, "env").id == first.image.id, "a failed one is not meant while another is ready"
    assert images.list_images(ctx, user_id)[2] == 1
    assert images.list_images(ctx, user_id, everything=True)[2] == 2
    fresh, is_new = image_builds.build(ctx, user_id, RECIPE, fresh=True)
    assert is_new and fresh.image.id != first.image.id
    work = agent.order().work
    assert work is not None and work.fresh


def test_a_digest_names_one_of_several(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    first = build(ctx, user_id)
    agent.finish()
    second = build(ctx, user_id, pip=["scipy"])
    agent.finish()
    digest = images.get(ctx, user_id, first.image.id).replicas[0].facts.digest  # type: ignore[union-attr]
    assert images.get(ctx, user_id, f"env@{digest}").id == first.image.id
    assert images.get(ctx, user_id, f"env@{second.image.recipe_digest}").id == second.image.id
    assert images.get(ctx, user_id, "env").id == second.image.id
    with pytest.raises(NotFound, match="there is no image"):
        images.get(ctx, user_id, "env@sha256:" + "0" * 64)
    for ref in ("../env", "env name", "a/b/c", "env@latest", ""):
        with pytest.raises(InvalidInput):
            images.get(ctx, user_id, ref)
    with pytest.raises(NotFound) as caught:
        images.get(ctx, user_id, "evn")
    assert "did you mean env?" in caught.value.hint


def test_a_failed_build_says_why_and_may_be_repeated(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    made = build(ctx, user_id)
    agent.fail(failure=FAILURE, detail="exit code 1")
    (replica,) = images.get(ctx, user_id, "env").replicas
    assert (replica.state, replica.failure) == (ReplicaState.FAILED, FAILURE)
    again = build(ctx, user_id)
    assert (again.image.id, again.task_id != made.task_id) == (made.image.id, True)
    agent.fail(reason=Reason.DISK_FULL, detail="no space left in /images")
    (replica,) = images.get(ctx, user_id, "env").replicas
    assert replica.failure is not None
    assert (replica.failure.message, replica.failure.code) == ("no space left in /images", "DISK_FULL")
    assert "free space" in replica.failure.hint
    third = build(ctx, user_id)
    order = agent.order()
    tasks.cancel(ctx, user_id, third.task_id)
    assert agent.order().desired == Desired.CANCEL
    agent.tell(order.job_id, JobState.CANCELLED, reason=Reason.CANCELLED)
    planning.run_due(ctx)
    failure = images.get(ctx, user_id, "env").replicas[0].failure
    assert failure is not None and failure.code == "cancelled"


def test_a_lost_build_is_tried_once_more(ctx: Context, user_id: str, agent: ImageAgent, clock: Any) -> None:
    made = build(ctx, user_id)
    agent.fail(reason=Reason.NODE_FAIL)
    assert images.get(ctx, user_id, "env").state is ReplicaState.BUILDING
    clock.advance(60)
    agent.hello()
    planning.run_due(ctx)
    order = agent.order()
    assert (order.task_id, order.attempt) == (made.task_id, 2)
    agent.finish(order)
    assert images.get(ctx, user_id, "env").state is ReplicaState.READY


@pytest.mark.parametrize(
    "lie",
    [
        {"digest": "sha256:short"},
        {"digest": ""},
        {"builder": "sh"},
        {"path": ""},
        {"path": "/a\nb"},
        {"path": "/" + "x" * 5000},
        {"size_bytes": -1},
        {"image_id": "img_00000000000000000"},
        {"architecture": "x\x00y"},
        {"os": "x" * 1000},
    ],
)
def test_what_an_endpoint_says_of_its_result_is_checked(
    ctx: Context, user_id: str, agent: ImageAgent, lie: dict[str, Any]
) -> None:
    build(ctx, user_id)
    agent.finish(**lie)
    (replica,) = images.get(ctx, user_id, "env").replicas
    assert (replica.state, replica.facts) == (ReplicaState.FAILED, None)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"image_id": 3}', b"[" * 100_000, b"\xff"])
def test_a_result_that_is_no_result(ctx: Context, user_id: str, agent: ImageAgent, raw: bytes) -> None:
    build(ctx, user_id)
    order = agent.order()
    agent.end(order, agent.store({FACTS_FILE: raw}))
    (replica,) = images.get(ctx, user_id, "env").replicas
    assert replica.state is ReplicaState.FAILED
    assert replica.failure is not None and "did not say what it made" in replica.failure.message


def test_settling_is_repeatable_and_survives_a_crash_before_it(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    build(ctx, user_id)
    order = agent.order()
    facts = json.dumps(encode(agent.image_facts(order))).encode()
    # The server dies between the report and the conclusion: the report is in the database, nothing was concluded.
    agent.tell(order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, outputs=agent.store({FACTS_FILE: facts}))
    assert images.get(ctx, user_id, "env").state is ReplicaState.BUILDING
    for _ in range(3):
        image_settling.settle(ctx)
    assert images.get(ctx, user_id, "env").state is ReplicaState.READY
    kinds = [e.kind for e in events.since(ctx, user_id, 0)]
    assert kinds.count("image.ready") == 1


def test_unless_one_is_named_others_build_nothing_of_mine(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    """Whoever builds an image decides what is in it. Being let into a project, which nobody is asked, is no consent."""
    lab("alpha")
    for call in (image_builds.plan, image_builds.build):
        with pytest.raises(InvalidInput, match="name it with --infra"):
            call(ctx, other_id, RECIPE)
    assert image_builds.plan(ctx, other_id, RECIPE, project="lab").endpoint == "alpha"
    named = image_builds.build(ctx, other_id, RECIPE, endpoint="alpha")[0]
    assert named.replica is not None and named.replica.endpoint == "alpha"
    ImageAgent(ctx, other_id, "own")
    assert image_builds.plan(ctx, other_id, RECIPE).endpoint == "own"


def test_two_users_of_one_name_do_not_meet(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    made: dict[str, str] = {}
    with pytest.raises(InvalidInput, match="no endpoint yet"):
        image_builds.build(ctx, other_id, RECIPE)
    lab("alpha")

    def ask(user: str) -> None:
        made[user] = image_builds.build(ctx, user, RECIPE, endpoint="alpha")[0].image.id

    threads = [threading.Thread(target=ask, args=(user,)) for user in (user_id, other_id)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made.values())) == 2
    for order in agent.orders():
        agent.finish(order)
    assert images.get(ctx, user_id, "env").id == made[user_id]
    assert images.get(ctx, other_id, "env").id == made[other_id]
    mine = images.get(ctx, user_id, "env")
    for call in (images.get, image_copies.remove, image_builds.run_test):
        with pytest.raises(NotFound):
            call(ctx, other_id, mine.id)
    with pytest.raises(NotFound):
        images.share(ctx, other_id, mine.id, "public")
    with pytest.raises(NotFound):
        tasks.get(ctx, other_id, mine.replicas[0].task_id)
    with pytest.raises(NotFound):
        images.get(ctx, other_id, f"{owner_name(ctx, user_id)}/env")


def test_a_shared_image_can_be_used_and_not_changed(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    build(ctx, user_id)
    agent.finish()
    ref = f"{owner_name(ctx, user_id)}/env"
    with pytest.raises(InvalidInput, match="nobody would see it"):
        images.share(ctx, user_id, "env", "project")
    images.share(ctx, user_id, "env", "project", project="lab")
    hidden = images.get(ctx, other_id, ref)
    assert [(r.endpoint, r.state) for r in hidden.replicas] == [("(elsewhere)", "READY")], "that it is, not where"
    lab("alpha")
    seen = images.get(ctx, other_id, ref)
    assert (seen.is_mine, seen.visibility, seen.project) == (False, "project", "lab")
    assert seen.replicas[0].endpoint == "alpha"
    assert [image.id for image in images.list_images(ctx, other_id)[0]] == [seen.id]
    with pytest.raises(NotFound) as caught:
        images.get(ctx, other_id, "env")
    assert f"did you mean {ref}" in caught.value.hint
    with pytest.raises(Forbidden):
        images.share(ctx, other_id, ref, "private")
    with pytest.raises(Forbidden):
        image_copies.remove(ctx, other_id, ref)
    build_task = seen.replicas[0].task_id
    assert tasks.get(ctx, other_id, build_task).kind == "build", "its log can be read"
    with pytest.raises(Forbidden, match="you can look at it"):
        tasks.cancel(ctx, other_id, build_task)
    with pytest.raises(Forbidden, match="only its owner opens shells"):
        shells.find_place(ctx, other_id, build_task, NewShell(argv=("sh",)))
    task, _ = tasks.create(ctx, other_id, {"run": "x", "project": "lab", "resources": {"image_id": ref}})
    assert (task.state, task.image) == (TaskState.QUEUED, ref)
    with pytest.raises(Conflict, match=task.id):
        image_copies.remove(ctx, user_id, "env")
    mine, _ = tasks.create(ctx, user_id, {"run": "x", "resources": {"image_id": "env"}})
    assert images.get(ctx, other_id, ref).used_by == (task.id,), "the tasks of others are not told"
    assert set(images.get(ctx, user_id, "env").used_by) == {task.id, mine.id}
    images.share(ctx, user_id, "env", "private")
    with pytest.raises(NotFound):
        images.get(ctx, other_id, ref)


def test_a_key_makes_one_build(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    first, made = image_builds.build(ctx, user_id, RECIPE, idempotency_key="k")
    second, made_again = image_builds.build(ctx, user_id, RECIPE, idempotency_key="k")
    assert (made, made_again, first.task_id) == (True, False, second.task_id)
    with pytest.raises(IdempotencyMismatch):
        image_builds.build(ctx, user_id, {**RECIPE, "pip": ["scipy"]}, idempotency_key="k")
    with pytest.raises(IdempotencyMismatch):
        tasks.create(ctx, user_id, {"run": "true"}, "k")


def test_many_requests_at_once_make_one_build(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    answers: list[tuple[str, bool]] = []

    def ask() -> None:
        made, is_new = image_builds.build(ctx, user_id, RECIPE)
        answers.append((made.task_id, is_new))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({task_id for task_id, _ in answers}) == 1
    assert [is_new for _, is_new in answers].count(True) == 1


def test_where_it_is_built_and_with_what(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ImageAgent(ctx, user_id, "plain", builders=("venv",), builds="batch")
    ImageAgent(ctx, user_id, "shut", builds="off")
    plan = image_builds.plan(ctx, user_id, RECIPE)
    assert (plan.endpoint, plan.builder, plan.where, plan.cached) == ("alpha", "apptainer", "login", False)
    assert "Bootstrap: docker" in plan.definition
    assert [stage.name for stage in plan.stages] == ["base", "pip", "pack", "test"]
    assert "allows no builds" in plan.others["shut"] and "no builder" in plan.others["plain"]
    host = image_builds.plan(ctx, user_id, {"base": "host", "pip": ["numpy"]}, endpoint="plain")
    assert (host.builder, host.where, host.recipe.base) == ("venv", "batch", "host")
    assert "venv" in host.definition
    for recipe, asked, field in (
        ({"base": "host", "system": ["git"]}, {}, "recipe"),
        (RECIPE, {"endpoint": "plain"}, "base"),
        (RECIPE, {"endpoint": "mars"}, "endpoint"),
        ({"base": "host"}, {"endpoint": "plain", "where": "login"}, "where"),
        ({"base": "image:nothing"}, {}, "base"),
        ({"base": "suggested:nothing"}, {}, "base"),
        ({**RECIPE, "builder": "charliecloud"}, {}, "recipe"),
        ({**RECIPE, "pip": ["--index-url x"]}, {}, "pip"),
        ({**RECIPE, "files": {"/opt/a": "/home/me/a"}}, {}, "files./opt/a"),
    ):
        with pytest.raises(InvalidInput) as caught:
            image_builds.build(ctx, user_id, recipe, **asked)
        assert caught.value.field == field, (recipe, asked, str(caught.value))
    assert images.list_images(ctx, user_id, everything=True)[2] == 0


def test_a_suggested_base_is_resolved_for_the_endpoints_gpus(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    made = build(ctx, user_id, base="suggested:pytorch")
    assert made.image.recipe is not None and made.image.recipe.base.startswith("docker://")
    assert made.image.recipe_digest == made.image.recipe.digest
    agent.finish()
    again, _ = image_builds.build(ctx, user_id, {**RECIPE, "base": "suggested:pytorch"})
    assert again.cached


def test_files_of_a_recipe_are_mounted_for_the_build(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    data = b"hello"
    blob = upload(ctx, user_id, data)
    item = BundleFile(path="a", size_bytes=5, digest=blob)
    ref = bundles.register(ctx, encode(Manifest(files=(item,), is_file=True)), user_id)["ref"]
    with pytest.raises(InvalidInput, match="is not here") as caught:
        build(ctx, user_id, files={"/opt/x": "bundle:sha256:" + "0" * 64})
    assert caught.value.field == "files./opt/x"
    build(ctx, user_id, files={"/opt/x": ref})
    order = agent.order()
    assert order.work is not None
    (mounted,) = order.work.files.values()
    assert order.work.files == {"/opt/x": mounted}
    assert order.spec.file_mounts == {mounted: ref}


def test_an_image_of_diamond_as_base_is_waited_for(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    base = build(ctx, user_id, name="base-env")
    derived = build(ctx, user_id, name="derived", base="image:base-env", pip=["scipy"])
    assert [order.task_id for order in agent.orders()] == [base.task_id]
    waiting = tasks.get(ctx, user_id, derived.task_id)
    assert waiting.state is TaskState.PENDING and "base-env is being built at alpha" in waiting.pending_reason
    assert derived.task_id in images.get(ctx, user_id, "base-env").used_by
    agent.finish()
    order = agent.order()
    assert order.task_id == derived.task_id and order.work is not None
    assert order.work.base_path == f"/images/store/{base.image.id}/image.sif"
    assert order.work.base_digest.startswith("sha256:")
    agent.finish(order)
    assert images.get(ctx, user_id, "derived").state is ReplicaState.READY
    failing = build(ctx, user_id, name="broken")
    on_top = build(ctx, user_id, name="on-top", base="image:broken")
    agent.fail(failure=FAILURE)
    over = tasks.get(ctx, user_id, on_top.task_id)
    assert (over.state, over.reason) == (TaskState.FAILED, Reason.IMAGE_FAILED)
    assert "no package no-such-thing" in over.detail and failing.task_id in over.detail


def test_removing_an_endpoint_takes_its_images_along(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    build(ctx, user_id)
    agent.finish()
    building = build(ctx, user_id, name="half")
    agent.orders()
    waiting = build(ctx, user_id, name="on-half", base="image:half")
    endpoints.remove(ctx, user_id, "alpha", force=True)
    for _ in range(3):
        ctx.clock.advance(60)  # type: ignore[attr-defined]
        planning.run_due(ctx)
    assert images.get(ctx, user_id, "env").state is ReplicaState.GONE
    assert images.get(ctx, user_id, "half").state is ReplicaState.FAILED
    assert {tasks.get(ctx, user_id, one.task_id).state for one in (building, waiting)} == {TaskState.FAILED}
    with ctx.db.read() as session:
        live = session.scalars(sa.select(ReplicaRow.id).where(ReplicaRow.state.in_(images.LIVE))).all()
    assert live == []


def test_removal_names_its_users_and_tidies_up(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    made = build(ctx, user_id)
    agent.finish()
    task, _ = tasks.create(ctx, user_id, {"run": "x", "resources": {"image_id": "env"}})
    assert images.get(ctx, user_id, "env").used_by == (task.id,)
    with pytest.raises(Conflict, match=task.id):
        image_copies.remove(ctx, user_id, "env")
    tasks.cancel(ctx, user_id, task.id)
    removed, cleaning = image_copies.remove(ctx, user_id, "env")
    assert removed == ["alpha"]
    order = agent.order()
    assert order.work is not None and [order.task_id] == cleaning
    assert (order.work.action, order.work.image_id) == ("remove", made.image.id)
    agent.finish(order)
    with pytest.raises(NotFound):
        images.get(ctx, user_id, made.image.id)
    assert tasks.get(ctx, user_id, task.id).image == "env", "the record of its tasks stays"
    again = build(ctx, user_id)
    assert again.image.id != made.image.id
    image_copies.remove(ctx, user_id, "env")  # while it is being built: that is stopped
    assert tasks.get(ctx, user_id, again.task_id).state is TaskState.CANCELLED


def test_disk_use_and_pruning(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    build(ctx, user_id)
    agent.finish()
    found = image_copies.at_endpoint(ctx, user_id, "alpha")
    assert [(one.name, one.size_bytes) for one in found.images] == [("env", 1000)]
    assert found.root == "/images"
    task = image_copies.prune(ctx, user_id, "alpha")
    order = agent.order()
    assert (order.task_id, task.kind) == (task.id, "transfer") and order.work is not None
    assert (order.work.action, order.work.keep) == ("prune", ("0" * 32,))
    agent.finish(order)
    assert tasks.get(ctx, user_id, task.id).state is TaskState.SUCCEEDED
    with pytest.raises(NotFound, match="there is no endpoint"):
        image_copies.prune(ctx, user_id, "mars")
