"""What images withstand: odd results, other bytes than promised, lost pins, bases in a circle, other people."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.codec import encode
from diamond.core.errors import Conflict, InvalidInput, NotFound
from diamond.core.images import FACTS_FILE, ImageFacts, ReplicaState
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.server.services import (
    endpoint_shares,
    image_builds,
    image_copies,
    image_drafts,
    image_settling,
    images,
    planning,
    quotas,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow, TaskRow, UserRow
from testing.image_agent import LOCK, ImageAgent
from testing.uploads import upload

RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"]}


def ready(ctx: Context, user_id: str, agent: ImageAgent, *, fresh: bool = False, **fields: Any) -> tuple[str, str]:
    """The image's id, and the digest of what the endpoint made."""
    made, _ = image_builds.build(ctx, user_id, {**RECIPE, **fields}, endpoint=agent.name, fresh=fresh)
    order = next(order for order in agent.orders() if order.task_id == made.task_id)
    agent.finish(order)
    return made.image.id, agent.image_facts(order).digest


def at(ctx: Context, user_id: str, ref: str, endpoint: str) -> Any:
    return next(one for one in images.get(ctx, user_id, ref).replicas if one.endpoint == endpoint)


def launch(ctx: Context, user_id: str, image_id: str, infra: str | None = None, project: str | None = None) -> Any:
    spec = {"run": "x", "project": project, "resources": {"image_id": image_id, "infra": infra}}
    return tasks.create(ctx, user_id, spec)[0]


def test_one_odd_result_does_not_hold_up_the_others(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    odd, _ = image_builds.build(ctx, user_id, {**RECIPE, "name": "odd"})
    image_builds.build(ctx, user_id, {**RECIPE, "name": "endless"})
    image_builds.build(ctx, user_id, RECIPE)
    for order in agent.orders():
        said = encode(agent.image_facts(order))
        if order.spec.name == "build endless":
            said |= {"built_at": float("inf")}
        outputs = agent.store({FACTS_FILE: json.dumps(said).encode()})
        if order.task_id == odd.task_id:
            agent.tell(order.job_id, JobState.FAILED, reason=Reason.EXIT_NONZERO)
        else:
            agent.tell(order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0, outputs=outputs)
    with ctx.db.write() as session:  # of a later version, which knows more reasons
        session.execute(sa.update(TaskRow).where(TaskRow.id == odd.task_id).values(reason="UNHEARD_OF"))
    image_settling.settle(ctx)
    states = {name: images.get(ctx, user_id, name).state for name in ("odd", "endless", "env")}
    failed, well = ReplicaState.FAILED, ReplicaState.READY
    assert states == {"odd": failed, "endless": failed, "env": well}
    assert "cannot be kept" in at(ctx, user_id, "odd", "alpha").failure.message


def test_what_somebody_else_had_made_at_their_endpoint_goes_nowhere_else(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    """Whoever may use an image decides what is in the one that is made at their endpoint."""
    lab("alpha")
    image_id, _ = ready(ctx, user_id, agent)
    images.share(ctx, user_id, image_id, "project", project="lab")
    image_copies.remove(ctx, user_id, image_id, endpoint="alpha")
    agent.finish()
    trap = ImageAgent(ctx, other_id, "trap")
    made, _ = image_copies.copy(ctx, other_id, image_id, "trap")
    assert made.how == "built"
    trap.finish(digest="sha256:" + "e" * 64)
    assert at(ctx, other_id, image_id, "trap").state is ReplicaState.READY, "its owner may use it there"
    made, _ = image_copies.copy(ctx, user_id, image_id, "alpha")
    assert made.how == "built", "and others make their own"
    image_copies.remove(ctx, user_id, image_id, endpoint="alpha", force=True)
    agent.plan()
    for order in agent.orders():
        if order.work is not None and order.work.action == "remove":
            agent.finish(order)
    endpoint_shares.share(ctx, other_id, "lab", "trap")
    endpoint_shares.approve(ctx, user_id, "lab", "trap")
    made, _ = image_copies.copy(ctx, user_id, image_id, "alpha")
    assert made.how == "copied", "unless the image's project approved of the endpoint"


def test_a_copy_with_other_bytes_is_no_copy_and_is_rebuilt(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    ready(ctx, user_id, agent)
    made, _ = image_copies.copy(ctx, user_id, "env", "beta")
    agent.finish()
    beta.finish(digest="sha256:" + "0" * 64)
    order = beta.order()
    assert order.work is not None and (order.work.action, order.work.pins) == ("build", LOCK)
    assert at(ctx, user_id, "env", "beta").origin == "rebuilt"
    assert tasks.get(ctx, user_id, made.task_id).state is TaskState.SUCCEEDED
    beta.finish(builder="venv")
    assert "was asked for" in at(ctx, user_id, "env", "beta").failure.message


def test_a_copied_venv_may_differ(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    _, digest = ready(ctx, user_id, agent, base="host")
    image_copies.copy(ctx, user_id, "env", "beta")
    agent.finish()
    beta.finish(digest="sha256:" + "0" * 64)
    assert at(ctx, user_id, "env", "beta").state is ReplicaState.READY
    assert launch(ctx, user_id, f"env@{digest}", "beta").state is TaskState.QUEUED, "it is a copy of that one"


def test_a_digest_stays_what_was_asked_for(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    first_id, first = ready(ctx, user_id, agent)
    same_id, other = ready(ctx, user_id, beta)
    assert first_id == same_id and first != other
    for digest in (other, other[:19]):
        assert launch(ctx, user_id, f"env@{digest}").endpoint == "beta"
        with pytest.raises(InvalidInput, match="another one") as caught:
            launch(ctx, user_id, f"env@{digest}", "alpha")
        assert caught.value.field == "resources.image_id"
    assert {order.image.digest for order in beta.orders() if order.image} == {other}
    plan = tasks.plan(ctx, user_id, {"run": "x", "resources": {"image_id": f"env@{other}"}})
    assert plan["endpoint"] == "beta" and plan["image"]["use"]["digest"] == other
    arm = ImageAgent(ctx, user_id, "arm", architecture="aarch64")
    with pytest.raises(InvalidInput, match="cannot be copied there"):
        image_copies.copy(ctx, user_id, f"env@{first}", arm.name)
    ready(ctx, user_id, agent, fresh=True)
    image_builds.build(ctx, user_id, {"name": "on-top", "base": f"image:env@{first}", "build": "true"})
    order = next(order for order in agent.orders() if order.work)
    assert order.work is not None and order.work.base_digest == first


def test_a_registrys_digest_is_no_digest_of_ours(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task = launch(ctx, user_id, "docker://python@sha256:" + "0" * 64)
    agent.finish()
    assert tasks.get(ctx, user_id, task.id).state is TaskState.QUEUED


def test_the_beginning_of_a_digest_must_be_one_of_them(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    for number in range(2):
        image_builds.build(ctx, user_id, {**RECIPE, "pip": [f"numpy=={number}"]})
        agent.finish(digest=f"sha256:{'ab' * 6}{number}{'0' * 51}")
    with pytest.raises(InvalidInput, match="2 digests begin with"):
        images.get(ctx, user_id, "env@sha256:" + "ab" * 6)
    assert images.get(ctx, user_id, f"env@sha256:{'ab' * 6}1").recipe.pip == ("numpy==1",)  # type: ignore[union-attr]
    with pytest.raises(InvalidInput):
        images.get(ctx, user_id, "env@sha256:abab")


def exported(ctx: Context, user_id: str, **recipe: Any) -> dict[str, Any]:
    data = b"the payload"
    digest = upload(ctx, user_id, data)
    facts = ImageFacts(
        image_id="img_0000000000000000ab", recipe_digest="", builder="apptainer", architecture="x86_64", digest=digest
    )
    return {"recipe": {**RECIPE, **recipe}, "facts": encode(facts), "payload": digest}


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ({"name": "loop", "base": "image:loop"}, "base"),
        ({"base": "suggested:nothing"}, "base"),
        ({"files": {"/opt/a": "/home/me/a"}}, "files./opt/a"),
        ({"files": {"/opt/a": "bundle:sha256:" + "0" * 64}}, "files./opt/a"),
    ],
)
def test_the_recipe_of_an_import_is_checked(
    ctx: Context, user_id: str, agent: ImageAgent, recipe: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        image_copies.import_image(ctx, user_id, **exported(ctx, user_id, **recipe))
    assert caught.value.field == field


def test_bases_that_lead_in_a_circle_are_not_followed(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    told = exported(ctx, user_id)
    image_copies.import_image(ctx, user_id, **exported(ctx, user_id, name="loop", base=f"image:loop@{told['payload']}"))
    agent.finish()
    beta = ImageAgent(ctx, user_id, "beta", architecture="aarch64")
    with pytest.raises(InvalidInput, match="not to be found"):
        image_copies.copy(ctx, user_id, "loop", "beta")
    with pytest.raises(InvalidInput, match="not to be found"):
        launch(ctx, user_id, "loop", "beta")
    assert launch(ctx, user_id, "loop").endpoint == "alpha"
    assert beta.orders() == []


@pytest.mark.parametrize("fields", [{"seconds": float("nan")}, {"os": "a\x00"}, {"num_packages": -1}])
def test_the_facts_of_an_import_are_checked(
    ctx: Context, user_id: str, agent: ImageAgent, fields: dict[str, Any]
) -> None:
    told = exported(ctx, user_id)
    with pytest.raises(InvalidInput) as caught:
        image_copies.import_image(ctx, user_id, **{**told, "facts": {**told["facts"], **fields}})
    assert caught.value.field.startswith("facts")


def test_a_payload_somebody_waits_for_is_not_swept(ctx: Context, user_id: str, agent: ImageAgent, clock: Any) -> None:
    ready(ctx, user_id, agent)
    task = image_copies.export(ctx, user_id, "env")
    agent.finish()
    clock.advance(image_copies.KEEP_PAYLOAD_S + 1)
    agent.hello()
    payload = "sha256:" + next(o.sha256 for o in tasks.get(ctx, user_id, task.id).outputs if o.path == "image.payload")
    told = exported(ctx, user_id, name="again", pip=["scipy"]) | {"payload": payload}
    image_copies.import_image(ctx, user_id, **told)
    assert image_copies.sweep_payloads(ctx) == 0 and ctx.blobs.has(payload)
    agent.finish()
    assert image_copies.sweep_payloads(ctx) == 1


def test_a_base_is_in_use_while_something_is_built_on_it(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ready(ctx, user_id, agent)
    made, _ = image_builds.build(ctx, user_id, {"name": "on-top", "base": "image:env", "build": "true"})
    agent.tell(agent.order().job_id, JobState.RUNNING)
    assert images.get(ctx, user_id, "env").used_by == (made.task_id,)
    with pytest.raises(Conflict, match=made.task_id):
        image_copies.remove(ctx, user_id, "env")
    agent.finish()
    image_copies.remove(ctx, user_id, "env")


def test_a_private_base_stays_private(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    base_id, _ = ready(ctx, user_id, agent, name="secret", envs={"TOKEN": "x"})
    ready(ctx, user_id, agent, name="open", base="image:secret")
    images.share(ctx, user_id, "open", "public")
    beta = ImageAgent(ctx, user_id, "beta", architecture="aarch64")
    with ctx.db.read() as session:
        ref = f"{session.get_one(UserRow, user_id).name}/open"
    lab("beta")
    task = launch(ctx, other_id, ref, "beta", "lab")
    order = beta.order()
    assert order.user == "other", "the endpoint judges it by who asked"
    assert order.work is not None and order.work.image_id == base_id
    with pytest.raises(NotFound):
        tasks.get(ctx, other_id, order.task_id)
    assert tasks.get(ctx, user_id, order.task_id).kind == "build"
    beta.finish()
    beta.finish()
    assert tasks.get(ctx, other_id, task.id).state is TaskState.QUEUED


def test_what_another_stops_is_begun_again(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    beta = ImageAgent(ctx, user_id, "beta", architecture="aarch64")
    lab("beta")
    image_id, _ = ready(ctx, user_id, agent)
    images.share(ctx, user_id, "env", "public")
    theirs, _ = image_copies.copy(ctx, other_id, image_id, "beta")
    mine = launch(ctx, user_id, "env", "beta")
    assert theirs.task_id in mine.pending_reason
    order = beta.order()
    tasks.cancel(ctx, other_id, theirs.task_id)
    beta.tell(order.job_id, JobState.CANCELLED, reason=Reason.CANCELLED)
    beta.plan()
    again = beta.order()
    assert again.task_id != theirs.task_id and tasks.get(ctx, user_id, mine.id).state is TaskState.PENDING
    beta.finish()
    assert tasks.get(ctx, user_id, mine.id).state is TaskState.QUEUED


def test_a_removal_waits_for_the_maker_and_the_next_for_it(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    image_builds.build(ctx, user_id, RECIPE)
    order = agent.order()
    agent.tell(order.job_id, JobState.RUNNING)
    _, (cleaning,) = image_copies.remove(ctx, user_id, "env", endpoint="alpha")
    assert agent.order().desired == Desired.CANCEL, "nothing is removed under it"
    assert order.task_id in tasks.get(ctx, user_id, cleaning).pending_reason
    next_one, _ = image_builds.build(ctx, user_id, RECIPE)
    assert cleaning in tasks.get(ctx, user_id, next_one.task_id).pending_reason
    agent.tell(order.job_id, JobState.CANCELLED, reason=Reason.CANCELLED)
    planning.run_due(ctx)
    assert agent.order().task_id == cleaning
    agent.finish()
    assert agent.order().task_id == next_one.task_id


def test_names_no_database_can_hold(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    draft = image_drafts.create(ctx, user_id)
    for call in (
        lambda: images.get(ctx, user_id, "a\x00/env"),
        lambda: images.list_images(ctx, user_id, name="a\x00"),
        lambda: images.list_images(ctx, user_id, endpoint="a\x00"),
        lambda: image_drafts.get(ctx, user_id, "dra_\x00"),
        lambda: image_drafts.save(ctx, user_id, draft.id, "envs", {"envs": {"A": float("nan")}}, version=1),
        lambda: tasks.list_tasks(ctx, user_id, name="a\x00"),
        lambda: image_copies.at_endpoint(ctx, user_id, "a\x00"),
    ):
        with pytest.raises((InvalidInput, NotFound)):
            call()
    image_drafts.remove(ctx, user_id, "dra_\x00")
    assert image_drafts.get(ctx, user_id, draft.id).version == 1


def test_why_nobody_can_build_on_a_base(ctx: Context, user_id: str) -> None:
    ImageAgent(ctx, user_id, "plain", builders=("venv",), builder_problems={"podman": "no subordinate ids"})
    with pytest.raises(InvalidInput, match="podman: no subordinate ids") as caught:
        image_builds.build(ctx, user_id, RECIPE)
    assert caught.value.field == "base" and "base: host" in caught.value.hint


def test_an_endpoint_is_not_believed_about_sizes(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    """They count for quotas. One digest is one size, and of what came through the server the server knows it."""
    payload = b"a payload that the server has counted"
    digest = upload(ctx, user_id, payload)
    facts = ImageFacts(
        image_id="img_0000000000000000ab", recipe_digest="", builder="apptainer", architecture="x86_64", digest=digest,
        size_bytes=1,
    )  # fmt: skip
    image_copies.import_image(ctx, user_id, recipe=RECIPE, facts=encode(facts), payload=digest)
    agent.finish(size_bytes=1)
    assert sizes(ctx, "env") == {("alpha", "READY", len(payload))}
    assert quotas.get(ctx, "user", user_name(ctx, user_id)).used.storage_bytes == len(payload)

    same = "sha256:" + "d" * 64
    image_builds.build(ctx, user_id, {**RECIPE, "name": "other", "pip": ["scipy"]})
    agent.finish(digest=same, size_bytes=7)
    beta = ImageAgent(ctx, user_id, "beta", builders=("apptainer",))
    image_builds.build(ctx, user_id, {**RECIPE, "name": "other", "pip": ["scipy"]}, endpoint="beta")
    beta.finish(beta.order(), digest=same, size_bytes=5000)
    assert sizes(ctx, "other") == {("alpha", "READY", 5000), ("beta", "READY", 5000)}


@pytest.mark.parametrize("size_bytes", [-1, 2**44 + 1, 2**62])
def test_impossible_sizes_are_no_image(ctx: Context, user_id: str, agent: ImageAgent, size_bytes: int) -> None:
    image_builds.build(ctx, user_id, RECIPE)
    agent.finish(size_bytes=size_bytes)
    assert sizes(ctx, "env") == {("alpha", "FAILED", 0)}


def test_nobody_learns_the_size_of_anothers_file(ctx: Context, user_id: str, other_id: str, agent: ImageAgent) -> None:
    theirs = upload(ctx, other_id, b"of another's")
    image_builds.build(ctx, user_id, RECIPE)
    agent.finish(digest=theirs, size_bytes=3)
    assert sizes(ctx, "env") == {("alpha", "READY", 3)}


def sizes(ctx: Context, name: str) -> set[tuple[str, str, int]]:
    """What is counted for each result of an image."""
    query = (
        sa.select(EndpointRow.name, ReplicaRow.state, ReplicaRow.size_bytes)
        .join(ReplicaRow, ReplicaRow.endpoint_id == EndpointRow.id)
        .join(ImageRow, ImageRow.id == ReplicaRow.image_id)
        .where(ImageRow.name == name)
    )
    with ctx.db.read() as session:
        return {tuple(row) for row in session.execute(query)}


def user_name(ctx: Context, user_id: str) -> str:
    with ctx.db.read() as session:
        return session.get_one(UserRow, user_id).name
