"""Export, import and drafts of images, on every database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diamond.core.codec import encode
from diamond.core.errors import Conflict, InvalidInput, NotFound
from diamond.core.images import ImageFacts, ReplicaState
from diamond.core.states import TaskState
from diamond.server.services import image_builds, image_copies, image_drafts, images, tasks
from diamond.server.services.context import Context
from testing.image_agent import LOCK, ImageAgent
from testing.uploads import upload

RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"]}


def test_an_export_brings_the_payload_once(ctx: Context, user_id: str, agent: ImageAgent, clock: Any) -> None:
    with pytest.raises(NotFound):
        image_copies.export(ctx, user_id, "env")
    image_builds.build(ctx, user_id, RECIPE)
    with pytest.raises(NotFound, match="is ready nowhere"):
        image_copies.export(ctx, user_id, "env")
    agent.finish()
    with pytest.raises(NotFound, match="not at the server"):
        image_copies.payload(ctx, user_id, "env")
    task = image_copies.export(ctx, user_id, "env")
    assert task.kind == "transfer"
    assert image_copies.export(ctx, user_id, "env", endpoint="alpha").id == task.id
    order = agent.order()
    assert order.work is not None and order.work.source_path == f"/images/store/{order.work.image_id}/image.sif"
    agent.finish()
    name, found = image_copies.payload(ctx, user_id, "env")
    assert name == "env" and ctx.blobs.has(f"sha256:{found.sha256}")
    assert image_copies.export(ctx, user_id, "env").id == task.id
    assert image_copies.sweep_payloads(ctx) == 0
    clock.advance(image_copies.KEEP_PAYLOAD_S + 1)
    assert image_copies.sweep_payloads(ctx) == 1
    with pytest.raises(NotFound):
        image_copies.payload(ctx, user_id, "env")
    agent.hello()
    assert image_copies.export(ctx, user_id, "env").id != task.id


def exported(ctx: Context, user_id: str, **fields: Any) -> dict[str, Any]:
    """What an export of another installation brings."""
    data = b"the payload"
    digest = upload(ctx, user_id, data)
    facts = ImageFacts(
        image_id="img_0000000000000000ab", recipe_digest="", builder="apptainer", architecture="x86_64",
        digest=digest, size_bytes=len(data), path="/elsewhere/image.sif",
    )  # fmt: skip
    return {"recipe": RECIPE, "facts": encode(facts), "lock": encode(LOCK), "payload": digest} | fields


def test_an_import_is_taken_in_where_it_fits(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ImageAgent(ctx, user_id, "aaa", builders=("venv",))
    made, is_new = image_copies.import_image(ctx, user_id, **exported(ctx, user_id), idempotency_key="k")
    assert (made.how, made.replica.endpoint, is_new) == ("imported", "alpha", True)
    again, is_new = image_copies.import_image(ctx, user_id, **exported(ctx, user_id), idempotency_key="k")
    assert (again.task_id, is_new) == (made.task_id, False)
    order = agent.order()
    assert order.work is not None and order.work.facts is not None
    assert (order.work.action, order.work.image_id) == ("import", made.image.id)
    assert (order.work.facts.image_id, order.work.facts.path, order.work.lock) == (made.image.id, "", LOCK)
    assert list(order.spec.file_mounts) == ["image.payload"]
    agent.finish()
    assert images.get(ctx, user_id, "env").state is ReplicaState.READY
    third, is_new = image_copies.import_image(ctx, user_id, **exported(ctx, user_id))
    assert (third.cached, is_new) == (True, False)


def test_an_import_goes_to_nobody_elses_endpoint_by_itself(
    ctx: Context, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    lab("alpha")
    with pytest.raises(InvalidInput, match="no connected endpoint of your own") as caught:
        image_copies.import_image(ctx, other_id, **exported(ctx, other_id))
    assert (caught.value.hint, caught.value.field) == ("name one: alpha", "endpoint")
    made, _ = image_copies.import_image(ctx, other_id, **exported(ctx, other_id), endpoint="alpha")
    assert made.replica.endpoint == "alpha"


def test_an_import_that_does_not_fit_is_rebuilt_from_its_lock(ctx: Context, user_id: str) -> None:
    arm = ImageAgent(ctx, user_id, "arm", architecture="aarch64")
    made, _ = image_copies.import_image(ctx, user_id, **exported(ctx, user_id, name="renamed"))
    assert (made.how, made.image.name) == ("rebuilt", "renamed")
    order = arm.order()
    assert order.work is not None and (order.work.action, order.work.pins) == ("build", LOCK)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"payload": "sha256:" + "0" * 64}, "payload"),
        ({"payload": "../../etc/passwd"}, "payload"),
        ({"name": "../x"}, "name"),
        ({"facts": {"image_id": "x"}}, "facts.recipe_digest"),
        ({"recipe": {"base": "host", "sytem": []}}, "sytem"),
        ({"lock": []}, "lock"),
        ({"endpoint": "mars"}, "endpoint"),
    ],
)
def test_imports_that_make_no_sense(
    ctx: Context, user_id: str, agent: ImageAgent, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        image_copies.import_image(ctx, user_id, **exported(ctx, user_id, **fields))
    assert caught.value.field == field
    assert images.list_images(ctx, user_id, everything=True)[2] == 0


def test_a_draft_from_its_first_step_to_a_build(ctx: Context, user_id: str, other_id: str, agent: ImageAgent) -> None:
    draft = image_drafts.create(ctx, user_id)
    assert [step.name for step in draft.steps] == [
        "endpoint", "base", "dependencies", "envs", "commands", "review",
    ]  # fmt: skip
    assert not draft.steps[1].done
    with pytest.raises(InvalidInput, match="is required"):
        image_drafts.submit(ctx, user_id, draft.id, version=1)

    def save(step: str, **contents: Any) -> Any:
        version = image_drafts.get(ctx, user_id, draft.id).version
        return image_drafts.save(ctx, user_id, draft.id, step, contents, version=version)

    wrong = save("dependencies", pip=["--index-url x"], system=["no such; name"])
    assert {error.field for error in wrong.steps[2].errors} == {"pip", "system"}
    assert wrong.steps[2].contents["pip"] == ["--index-url x"], "what was written is kept"
    save("dependencies", pip=["numpy"])
    assert [e.field for e in save("endpoint", endpoint="mars").steps[0].errors] == ["endpoint"]
    assert [e.field for e in save("endpoint", endpoint="alpha", builder="podman").steps[0].errors] == ["builder"]
    save("endpoint", endpoint="alpha")
    assert [e.field for e in save("base", name="../x", base="").steps[1].errors] == ["name"]
    save("base", name="env", base="python:3.13-slim")
    save("envs", envs={"A": "quoted ' \n text"})
    save("commands", test="python -c 'import numpy'")
    whole = image_drafts.get(ctx, user_id, draft.id)
    assert whole.plan is not None and whole.steps[5].done
    assert (whole.plan.endpoint, whole.plan.cached, whole.plan.expected_s) == ("alpha", False, None)
    assert "Bootstrap: docker" in whole.plan.definition
    assert whole.plan.recipe.envs == {"A": "quoted ' \n text"}
    with pytest.raises(Conflict, match="changed meanwhile"):
        image_drafts.save(ctx, user_id, draft.id, "envs", {}, version=whole.version - 1)
    with pytest.raises(Conflict):
        image_drafts.submit(ctx, user_id, draft.id, version=1)
    with pytest.raises(NotFound):
        image_drafts.get(ctx, other_id, draft.id)
    with pytest.raises(NotFound):
        image_drafts.save(ctx, user_id, draft.id, "nothing", {}, version=whole.version)
    with pytest.raises(InvalidInput, match="has no field"):
        image_drafts.save(ctx, user_id, draft.id, "envs", {"pip": []}, version=whole.version)
    made, is_new = image_drafts.submit(ctx, user_id, draft.id, version=whole.version)
    assert is_new and tasks.get(ctx, user_id, made.task_id).state is TaskState.QUEUED
    agent.finish()
    after = image_drafts.get(ctx, user_id, draft.id)
    assert after.image_id == made.image.id and after.plan is not None
    assert (after.plan.cached, after.plan.expected_s) == (True, 0.0)
    assert [one.id for one in image_drafts.list_drafts(ctx, user_id)] == [draft.id]
    from_recipe = image_drafts.create(ctx, user_id, RECIPE)
    assert from_recipe.steps[1].contents == {"name": "env", "base": "docker://python:3.13-slim"}
    other = image_builds.plan(ctx, user_id, {**RECIPE, "pip": ["scipy"]})
    assert other.expected_s == 12.0, "as long as the last one took"
    image_drafts.remove(ctx, user_id, draft.id)
    image_drafts.remove(ctx, user_id, draft.id)
    with pytest.raises(NotFound):
        image_drafts.get(ctx, user_id, draft.id)
