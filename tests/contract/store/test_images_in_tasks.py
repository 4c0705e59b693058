"""Tasks that run in images: which one, where it is had from, what a task waits for, and what happens when it fails."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.core.errors import InvalidInput
from diamond.core.images import BuildFailure, ReplicaState
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import Task
from diamond.server.services import agents, endpoints, events, image_builds, image_copies, images, planning, tasks
from diamond.server.services.context import Context
from testing.image_agent import LOCK, ImageAgent

RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"]}
FAILURE = BuildFailure(stage="pip", message="there is no package numpi", line="pip: numpi", hint="did you mean numpy?")


def launch(ctx: Context, user_id: str, image_id: str | None = "env", infra: str | None = None, **fields: Any) -> Task:
    resources = {"image_id": image_id, "infra": infra}
    return tasks.create(ctx, user_id, {"run": "python train.py", "resources": resources, **fields})[0]


def ready(ctx: Context, user_id: str, agent: ImageAgent, **fields: Any) -> str:
    made, _ = image_builds.build(ctx, user_id, {**RECIPE, **fields}, endpoint=agent.name)
    agent.finish(next(order for order in agent.orders() if order.task_id == made.task_id))
    return str(made.image.id)


def test_a_task_runs_in_the_image_that_is_ready(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    image_id = ready(ctx, user_id, agent)
    task = launch(ctx, user_id)
    assert (task.state, task.image, task.image_id, task.endpoint) == (TaskState.QUEUED, "env", image_id, "alpha")
    order = agent.order()
    facts = images.get(ctx, user_id, "env").replicas[0].facts
    assert order.image is not None and facts is not None and order.work is None
    assert (order.image.kind, order.image.path, order.image.digest) == ("apptainer", facts.path, facts.digest)
    assert order.image.size_bytes == 1000
    assert tasks.get(ctx, user_id, task.id).jobs[0].image == order.image
    assert images.get(ctx, user_id, "env").replicas[0].used_at == ctx.clock()
    listed = tasks.list_tasks(ctx, user_id)[0][0]
    assert (listed.image, listed.kind) == ("env", "command")


def test_unknown_images_are_refused_at_once(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ready(ctx, user_id, agent)
    for ref in ("evn", "other/env", "env@sha256:" + "0" * 64, "a b", "docker://", "/a/../b"):
        with pytest.raises(InvalidInput) as caught:
            launch(ctx, user_id, ref)
        assert caught.value.field.startswith("resources.image_id"), ref
    with pytest.raises(InvalidInput, match="names an image and describes one") as caught:
        launch(ctx, user_id, "env", image=RECIPE)
    assert caught.value.field == "image"
    with pytest.raises(InvalidInput) as caught:
        launch(ctx, user_id, None, image={"base": "image:nothing"})
    assert caught.value.field == "image.base"
    with pytest.raises(InvalidInput) as caught:
        launch(ctx, user_id, None, image={**RECIPE, "files": {"/opt/a": "/home/me"}})
    assert caught.value.field == "image.files./opt/a"
    assert tasks.list_tasks(ctx, user_id)[2] == 0


def test_a_recipe_in_the_task_is_built_first(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task = launch(ctx, user_id, None, image=RECIPE)
    assert task.state is TaskState.PENDING
    order = agent.order()
    assert order.work is not None and order.task_id in task.pending_reason
    assert "its image env is being built at alpha" in task.pending_reason
    log = b"diamond: stage 1/3 base: base image\ndiamond: stage base done in 2.0 s\ndiamond: stage 2/3 pip: x\n"
    agent.tell(order.job_id, JobState.RUNNING, log=log)
    assert tasks.get(ctx, user_id, task.id).pending_reason.endswith(", stage 2 of 3")
    second = launch(ctx, user_id, None, image=RECIPE)
    assert agent.order().task_id == order.task_id, "two tasks, one build"
    agent.finish(order)
    assert [tasks.get(ctx, user_id, one.id).state for one in (task, second)] == [TaskState.QUEUED] * 2
    assert {o.image.path for o in agent.orders() if o.image} == {f"/images/store/{task.image_id}/image.sif"}
    kinds = [e.kind for e in events.since(ctx, user_id, 0, task_id=task.id)]
    assert kinds == ["task.created", "task.image", "task.state"]


def test_an_image_of_a_registry_becomes_one_of_ours(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task = launch(ctx, user_id, "docker://ghcr.io/lab/tool:1.2")
    work = agent.order().work
    assert work is not None and work.recipe is not None
    assert (work.recipe.base, work.name) == ("docker://ghcr.io/lab/tool:1.2", "tool-1.2")
    agent.finish()
    assert tasks.get(ctx, user_id, task.id).state is TaskState.QUEUED
    again = launch(ctx, user_id, "docker://ghcr.io/lab/tool:1.2")
    assert (again.state, again.image_id) == (TaskState.QUEUED, task.image_id)


def test_a_path_on_the_endpoint_is_used_as_it_is(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task = launch(ctx, user_id, "/sw/images/torch.sif")
    use = agent.order().image
    assert use is not None and (use.kind, use.path, use.digest) == ("apptainer", "/sw/images/torch.sif", "")
    assert (task.state, task.image) == (TaskState.QUEUED, "/sw/images/torch.sif")
    agent.fail(reason=Reason.IMAGE_MISSING, detail="/sw/images/torch.sif is not there")
    over = tasks.get(ctx, user_id, task.id)
    assert (over.state, over.reason) == (TaskState.FAILED, Reason.IMAGE_MISSING)
    ImageAgent(ctx, user_id, "plain", builders=("venv",))
    with pytest.raises(InvalidInput, match="no container runtime") as caught:
        launch(ctx, user_id, "/sw/images/torch.sif", infra="plain")
    assert caught.value.field == "resources.image_id"


def test_a_failed_build_ends_the_tasks_that_wait(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task = launch(ctx, user_id, None, image=RECIPE)
    build_id = agent.fail(failure=FAILURE).task_id
    over = tasks.get(ctx, user_id, task.id)
    assert (over.state, over.reason) == (TaskState.FAILED, Reason.IMAGE_FAILED)
    for part in ("image env", "at alpha", FAILURE.message, FAILURE.line, FAILURE.hint, build_id):
        assert part in over.detail
    again = launch(ctx, user_id, None, image=RECIPE)
    assert again.state is TaskState.PENDING, "a new task tries again"
    tasks.cancel(ctx, user_id, agent.order().task_id)
    agent.tell(agent.order().job_id, JobState.CANCELLED, reason=Reason.CANCELLED)
    planning.run_due(ctx)
    assert "stopped on request" in tasks.get(ctx, user_id, again.id).detail


def test_cancelling_a_task_that_waits_leaves_the_build(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task = launch(ctx, user_id, None, image=RECIPE)
    assert tasks.cancel(ctx, user_id, task.id).state is TaskState.CANCELLED
    agent.finish()
    assert images.get(ctx, user_id, "env").state is ReplicaState.READY
    assert tasks.get(ctx, user_id, task.id).state is TaskState.CANCELLED
    assert agent.orders() == []


def test_an_endpoint_that_has_it_is_preferred(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ImageAgent(ctx, user_id, "aaa")  # first by name, and just as good otherwise
    ready(ctx, user_id, agent)
    assert launch(ctx, user_id).endpoint == "alpha"
    plan = tasks.plan(ctx, user_id, {"run": "x", "resources": {"image_id": "env"}})
    assert plan["endpoint"] == "alpha"
    assert any("env is ready there" in why for why in plan["why"])
    assert plan["image"]["how"] == "ready" and plan["image"]["use"]["path"].endswith("image.sif")
    assert "image.sif" in plan["files"]["inside.sh"] and "enter.sh" in plan["files"]


def test_the_dry_run_writes_nothing(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    plan = tasks.plan(ctx, user_id, {"run": "x", "image": {**RECIPE, "files": {"/opt/a": "/home/me/a"}}})
    assert (plan["image"]["how"], plan["image"]["name"]) == ("built", "env")
    assert "built there from its recipe" in plan["image"]["why"]
    assert "inside.sh" in plan["files"]
    assert images.list_images(ctx, user_id, everything=True)[2] == 0


def test_a_missing_image_is_copied_from_where_it_is(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    image_id = ready(ctx, user_id, agent)
    task = launch(ctx, user_id, infra="beta")
    assert "is being copied to beta" in task.pending_reason
    export = agent.order()
    assert export.work is not None and export.work.action == "export"
    assert beta.orders() == [], "nothing to take in yet"
    maker = next(r for r in images.get(ctx, user_id, "env").replicas if r.endpoint == "beta").task_id
    assert export.task_id in tasks.get(ctx, user_id, maker).pending_reason
    agent.finish()
    order = beta.order()
    assert order.work is not None and order.work.action == "import"
    assert order.task_id == maker and list(order.spec.file_mounts) == ["image.payload"]
    assert order.work.facts is not None and order.work.lock == LOCK
    beta.finish()
    assert tasks.get(ctx, user_id, task.id).state is TaskState.QUEUED
    (running,) = beta.orders()
    assert running.image is not None and running.image.image_id == image_id
    states = {r.endpoint: (r.state, r.origin) for r in images.get(ctx, user_id, "env").replicas}
    assert states == {"alpha": (ReplicaState.READY, "built"), "beta": (ReplicaState.READY, "copied")}


def test_a_copy_that_fails_is_followed_by_a_rebuild(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    ready(ctx, user_id, agent)
    task = launch(ctx, user_id, infra="beta")
    agent.fail(reason=Reason.DISK_FULL, detail="no space")
    order = beta.order()
    assert order.work is not None
    assert (order.work.action, order.work.pins) == ("build", LOCK)
    assert "is being rebuilt at beta" in tasks.get(ctx, user_id, task.id).pending_reason
    beta.finish()
    assert tasks.get(ctx, user_id, task.id).state is TaskState.QUEUED


def test_the_same_machine_takes_it_over_and_else_copies(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    near = ImageAgent(ctx, user_id, "near", site="centre")
    agent.facts = near.facts
    agent.hello()
    ready(ctx, user_id, agent)
    launch(ctx, user_id, infra="near")
    order = near.order()
    assert order.work is not None
    assert (order.work.action, order.work.source_path) == ("link", f"/images/store/{order.work.image_id}/image.sif")
    near.fail(failure=BuildFailure(stage="", message="it cannot be read"))
    assert [o.work.action for o in agent.orders() if o.work] == ["export"]


@pytest.mark.parametrize(
    ("facts", "how"),
    [
        ({"architecture": "aarch64"}, "rebuilt"),
        ({"builders": ("charliecloud",)}, "rebuilt"),
        ({"builders": ("venv",)}, ""),
        ({"builds": "off"}, "copied"),
        ({"builds": "off", "architecture": "aarch64"}, ""),
    ],
)
def test_how_an_image_gets_there(
    ctx: Context, user_id: str, agent: ImageAgent, facts: dict[str, Any], how: str
) -> None:
    beta = ImageAgent(ctx, user_id, "beta", **facts)
    ready(ctx, user_id, agent)
    if not how:
        with pytest.raises(InvalidInput, match="endpoint beta cannot"):
            image_copies.copy(ctx, user_id, "env", "beta")
        with pytest.raises(InvalidInput) as caught:
            launch(ctx, user_id, infra="beta")
        assert caught.value.field == "resources.image_id"
        return
    made, is_new = image_copies.copy(ctx, user_id, "env", "beta")
    assert (made.how, is_new, made.replica.origin) == (how, True, how)
    assert made.why
    again, is_new = image_copies.copy(ctx, user_id, "env", "beta")
    assert (again.how, is_new) == ("waiting", False)
    if how == "copied":
        agent.finish()
    beta.finish()
    last, _ = image_copies.copy(ctx, user_id, "env", "beta")
    assert (last.how, last.cached) == ("cached", True)


def test_an_image_that_vanished_is_brought_again_once(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ready(ctx, user_id, agent)
    ctx.clock.advance(10)  # type: ignore[attr-defined]
    task = launch(ctx, user_id)
    agent.fail(reason=Reason.IMAGE_MISSING, detail="image.sif is not there")
    waiting = tasks.get(ctx, user_id, task.id)
    assert waiting.state is TaskState.PENDING and "is being built at alpha" in waiting.pending_reason
    ctx.clock.advance(10)  # type: ignore[attr-defined]
    agent.finish()
    ctx.clock.advance(10)  # type: ignore[attr-defined]
    assert tasks.get(ctx, user_id, task.id).attempt == 2
    agent.fail(reason=Reason.IMAGE_MISSING, detail="again")
    over = tasks.get(ctx, user_id, task.id)
    assert (over.state, over.reason) == (TaskState.FAILED, Reason.IMAGE_MISSING)
    assert images.get(ctx, user_id, "env").state is ReplicaState.GONE


def test_removing_what_a_task_waits_for_ends_it(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task = launch(ctx, user_id, None, image=RECIPE)
    image_copies.remove(ctx, user_id, "env", force=True)
    planning.run_due(ctx)
    over = tasks.get(ctx, user_id, task.id)
    assert (over.state, over.reason) == (TaskState.FAILED, Reason.IMAGE_FAILED)
    assert "was removed" in over.detail


def test_when_the_endpoint_goes_the_task_waits_or_ends(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    free = launch(ctx, user_id, None, image=RECIPE)
    agent.orders()
    endpoints.remove(ctx, user_id, "alpha", force=True)
    for _ in range(3):
        ctx.clock.advance(60)  # type: ignore[attr-defined]
        planning.run_due(ctx)
    over = tasks.get(ctx, user_id, free.id)
    assert over.state is TaskState.FAILED and "endpoint" in over.detail


def test_a_job_nobody_was_told_of_moves_only_to_where_its_image_is(
    ctx: Context, user_id: str, agent: ImageAgent, clock: Any
) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    ready(ctx, user_id, agent)
    task = launch(ctx, user_id)
    assert task.endpoint == "alpha"
    agents.goodbye(ctx, agent.id, "agt_alpha")
    planning.run_due(ctx)
    assert tasks.get(ctx, user_id, task.id).endpoint == "alpha", "the other endpoint does not have it"
    image_builds.build(ctx, user_id, RECIPE, endpoint="beta")
    beta.finish()
    assert tasks.get(ctx, user_id, task.id).endpoint == "beta"
    order = beta.order()
    assert order.image is not None and order.image.digest == images.get(ctx, user_id, "env").replicas[1].facts.digest  # type: ignore[union-attr]


def test_a_batch_of_tasks_shares_one_build(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    specs = [{"run": f"echo {number}", "image": RECIPE} for number in range(3)]
    made, _ = tasks.create_many(ctx, user_id, specs, "sweep")
    assert [task.state for task in made] == [TaskState.PENDING] * 3
    assert len({task.image_id for task in made}) == 1
    agent.finish()
    assert len(agent.orders()) == 3


def test_a_test_is_a_task_in_the_image(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ready(ctx, user_id, agent, test="python -c 'import numpy'")
    task = image_builds.run_test(ctx, user_id, "env")
    assert task.spec is not None and task.spec.run == "python -c 'import numpy'"
    assert agent.order().image is not None
    assert image_builds.run_test(ctx, user_id, "env", command="true").spec.run == "true"  # type: ignore[union-attr]
    ready(ctx, user_id, agent, name="untested")
    with pytest.raises(InvalidInput, match="no validation command"):
        image_builds.run_test(ctx, user_id, "untested")
