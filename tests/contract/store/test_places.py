"""Where tasks go, on both databases: a launch does what a dry run says, and what an endpoint claims draws nobody's
tasks there before something has run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from diamond.core.endpoints import Gpu
from diamond.core.errors import DiamondError, InvalidInput
from diamond.core.ids import new_id
from diamond.core.quotas import Limits
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.server.services import endpoint_shares, endpoints, image_builds, planning, projects, quotas, secrets, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import UserRow
from testing.context import Clock
from testing.image_agent import ImageAgent
from testing.proven import prove

UNPROVEN = "nothing has run there yet; name it with --infra"
BARE = {"run": "x", "project": "lab"}


@dataclass(frozen=True)
class Lab:
    """A project of alice's, in which bob and mallory are members."""

    alice: str
    bob: str
    mallory: str


@pytest.fixture
def lab(ctx: Context) -> Lab:
    ids = {name: new_id("usr") for name in ("alice", "bob", "mallory")}
    with ctx.db.write() as session:
        session.add_all(UserRow(id=ids[name], name=name, created_at=ctx.clock()) for name in ids)
    projects.create(ctx, ids["alice"], "lab")
    for name in ("bob", "mallory"):
        projects.set_member(ctx, ids["alice"], "lab", name, "member")
    return Lab(**ids)


def shared(ctx: Context, lab: Lab, name: str, *, owner: str = "", **facts: Any) -> ImageAgent:
    """An endpoint of mallory's (or `owner`) of which the project has approved."""
    agent = ImageAgent(ctx, owner or lab.mallory, name, **facts)
    endpoint_shares.share(ctx, owner or lab.mallory, "lab", name)
    endpoint_shares.approve(ctx, lab.alice, "lab", name)
    return agent


def succeed(agent: ImageAgent, user_id: str, *, cpus: int = 1, **report: Any) -> None:
    """Have a task of the user's run there, who names it."""
    spec = {**BARE, "resources": {"infra": agent.name, "cpus": cpus}}
    task, _ = tasks.create(agent.ctx, user_id, spec)
    order = next(order for order in agent.orders() if order.task_id == task.id)
    at = agent.ctx.clock()
    said = {"reason": Reason.COMPLETED, "exit_code": 0, "hosts": ("n1",), "started_at": at - 5.0, "ended_at": at}
    agent.tell(order.job_id, JobState.SUCCEEDED, **{**said, **report})


# ---- what has run there ----------------------------------------------------------------------------------------------


def test_others_go_where_nothing_has_run_only_by_its_name(ctx: Context, lab: Lab) -> None:
    boast = shared(ctx, lab, "boast", is_new=True, cpus_per_node=512)
    for call in (tasks.plan, tasks.create):
        with pytest.raises(InvalidInput) as caught:
            call(ctx, lab.bob, BARE)
        assert (caught.value.field, UNPROVEN in caught.value.message) == ("resources.infra", True)
    assert tasks.create(ctx, lab.mallory, BARE)[0].endpoint == "boast", "its owner's tasks go there"
    steady = shared(ctx, lab, "steady", cpus_per_node=2)
    plan = tasks.plan(ctx, lab.bob, BARE)
    assert (plan["endpoint"], plan["others"]) == ("steady", {"boast": UNPROVEN})
    assert tasks.create(ctx, lab.bob, BARE)[0].endpoint == "steady"
    named, _ = tasks.create(ctx, lab.bob, {**BARE, "resources": {"infra": "boast"}})
    assert named.endpoint == "boast"
    succeed(boast, lab.bob)
    assert endpoints.get(ctx, lab.bob, "boast").proven_at == ctx.clock()
    steady.facts = steady.facts.__class__(**{**steady.facts.__dict__, "allows_others": False})
    steady.hello()
    assert tasks.create(ctx, lab.bob, BARE)[0].endpoint == "boast", "now that something has"


@pytest.mark.parametrize(
    "report",
    [
        {"exit_code": 1}, {"exit_code": None}, {"hosts": ()}, {"started_at": None}, {"reason": Reason.EXIT_NONZERO},
        {"started_at": 1e9, "ended_at": 1.0},
    ],
    ids=lambda report: "-".join(report),
)  # fmt: skip
def test_a_report_that_no_run_leaves_proves_nothing(ctx: Context, lab: Lab, report: dict[str, Any]) -> None:
    boast = shared(ctx, lab, "boast", is_new=True)
    succeed(boast, lab.mallory, **report)
    assert endpoints.get(ctx, lab.mallory, "boast").proven_at is None
    with pytest.raises(InvalidInput, match="nothing has run there yet"):
        tasks.create(ctx, lab.bob, BARE)


def test_what_failed_or_looked_after_images_proves_nothing(ctx: Context, lab: Lab) -> None:
    boast = shared(ctx, lab, "boast", is_new=True)
    image_builds.build(ctx, lab.mallory, {"base": "docker://x:1", "name": "env"}, endpoint="boast")
    boast.finish()
    task, _ = tasks.create(ctx, lab.mallory, {**BARE, "resources": {"infra": "boast"}})
    order = next(order for order in boast.orders() if order.task_id == task.id)
    boast.tell(order.job_id, JobState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=1, hosts=("n1",))
    assert endpoints.get(ctx, lab.mallory, "boast").proven_at is None


def test_more_than_ever_ran_there_is_believed_last(ctx: Context, lab: Lab) -> None:
    """By its name alone, `boast` would come first; it has shown one core."""
    shared(ctx, lab, "steady", cpus_per_node=16)
    boast = shared(ctx, lab, "boast", is_new=True, cpus_per_node=512, gpus_per_node=(Gpu(model="H100", count=64),))
    succeed(boast, lab.mallory)
    assert tasks.create(ctx, lab.bob, {**BARE, "resources": {"cpus": 1}})[0].endpoint == "boast"
    for call in (tasks.plan(ctx, lab.bob, {**BARE, "resources": {"cpus": 8}})["endpoint"],
                 tasks.create(ctx, lab.bob, {**BARE, "resources": {"cpus": 8}})[0].endpoint):  # fmt: skip
        assert call == "steady"
    succeed(boast, lab.mallory, cpus=8)
    assert tasks.create(ctx, lab.bob, {**BARE, "resources": {"cpus": 8}})[0].endpoint == "boast"
    assert tasks.create(ctx, lab.bob, {**BARE, "resources": {"accelerators": "H100:1"}})[0].endpoint == "boast", (
        "where else nobody has any"
    )


# ---- a launch says and does what a dry run says ----------------------------------------------------------------------


def test_who_can_read_the_secrets_is_said_before_and_after(ctx: Context, lab: Lab) -> None:
    shared(ctx, lab, "site", takes_secrets=True)
    secrets.put(ctx, lab.bob, "mine", "value")
    wanted = {**BARE, "secrets": ["mine"]}
    text = (
        "endpoint site belongs to mallory: the task runs under their account there, so mallory will be able to read "
        "its secrets (mine)"
    )
    for spec in (wanted, {**wanted, "resources": {"infra": "site"}}):
        assert tasks.plan(ctx, lab.bob, spec)["warnings"] == [text]
        assert tasks.create(ctx, lab.bob, spec)[0].warnings == (text,)
    ImageAgent(ctx, lab.bob, "own", takes_secrets=True)
    own = {**wanted, "resources": {"infra": "own"}}
    assert tasks.plan(ctx, lab.bob, own)["warnings"] == [] and tasks.create(ctx, lab.bob, own)[0].warnings == ()


def outcome_of_plan(ctx: Context, user_id: str, spec: dict[str, Any]) -> Any:
    try:
        plan = tasks.plan(ctx, user_id, spec)
    except DiamondError as error:
        return type(error).__name__, error.message, error.hint, error.field
    why = () if plan["endpoint"] is None else tuple(plan["why"])
    return plan["endpoint"], why, tuple(plan["warnings"]), plan["waits"]


def outcome_of_launch(ctx: Context, user_id: str, spec: dict[str, Any]) -> Any:
    try:
        task, _ = tasks.create(ctx, user_id, spec)
    except DiamondError as error:
        return type(error).__name__, error.message, error.hint, error.field
    try:
        waits = task.pending_reason if task.endpoint is None else ""
        # A task that waits for a quota has no endpoint yet; why it will go where it will is known all the same.
        return task.endpoint, task.why, task.warnings, waits
    finally:
        tasks.cancel(ctx, user_id, task.id)


def _world(ctx: Context, lab: Lab, clock: Clock) -> None:
    """Endpoints in every state that matters."""
    gpus = (Gpu(model="H100", count=4),)
    large = shared(ctx, lab, "large", takes_secrets=True, cpus_per_node=64, gpus_per_node=gpus)
    prove(ctx, large.id, cpus=2, gpus=0)
    online = [large, shared(ctx, lab, "proven", takes_secrets=True, cpus_per_node=4)]
    online.append(ImageAgent(ctx, lab.bob, "own", cpus_per_node=2))
    shared(ctx, lab, "fresh", is_new=True, takes_secrets=True, cpus_per_node=512, gpus_per_node=gpus)
    shared(ctx, lab, "closed", allows_others=False, cpus_per_node=512)
    waits = ImageAgent(ctx, lab.mallory, "asked", takes_secrets=True, cpus_per_node=512)
    endpoint_shares.share(ctx, lab.mallory, "lab", waits.name)
    ImageAgent(ctx, lab.mallory, "unshared")
    endpoints.create(ctx, lab.bob, "silent")  # its agent has never spoken
    clock.advance(600)
    for agent in online:
        agent.hello()


def _specs(count: int) -> list[dict[str, Any]]:
    dice = random.Random(19)
    names = (
        None,
        None,
        None,
        None,
        None,
        None,
        "own",
        "proven",
        "large",
        "fresh",
        "closed",
        "asked",
        "unshared",
        "own",
        "silent",
        "nowhere",
    )
    found = []
    for _ in range(count):
        resources = {
            "infra": dice.choice(names),
            "cpus": dice.choice((None, None, 1, 1, 2, 3, 8, 600)),
            "accelerators": dice.choice((None, None, None, None, "H100:1", "H100:8")),
        }
        spec: dict[str, Any] = {"run": "x", "resources": resources}
        if dice.random() < 0.7:
            spec["project"] = dice.choice(("lab", "lab", "lab", "none-such"))
        if dice.random() < 0.3:
            spec["secrets"] = [dice.choice(("mine", "mine", "lost"))]
        if dice.random() < 0.3:
            spec["num_nodes"] = dice.choice((1, 2))
        if dice.random() < 0.2:
            spec["max_duration"] = "10h"
        if dice.random() < 0.2:
            spec["resources"]["image_id"] = dice.choice(("docker://debian:13", "/images/x.sif", "unknown"))
        found.append(spec)
    return found


@pytest.mark.parametrize("limits", [Limits(), Limits(gpus=0), Limits(storage_bytes=0), Limits(gpu_hours=1)],
                         ids=["no limits", "GPUs", "storage", "hours"])  # fmt: skip
def test_a_launch_does_what_a_dry_run_says(ctx: Context, lab: Lab, clock: Clock, limits: Limits) -> None:
    _world(ctx, lab, clock)
    secrets.put(ctx, lab.bob, "mine", "value")
    if limits != Limits():
        quotas.set_limits(ctx, "user", "bob", limits)
    with ctx.db.write() as session:
        projects.resolve(session, lab.bob, None)  # a launch would make it
    seen = set()
    for spec in _specs(100 if limits == Limits() else 30):
        said, did = outcome_of_plan(ctx, lab.bob, spec), outcome_of_launch(ctx, lab.bob, spec)
        if said[0] != did[0] and did[0] is None and did[3]:  # it waits first
            assert (said[1], said[2]) == (did[1], did[2]) and said[3], (spec, said, did)
        else:
            assert said == did, spec
        seen.add(said[0])
        planning.run_due(ctx)
    if limits == Limits():
        assert {"proven", "large", "fresh", "own", "InvalidInput"} <= seen, "the situations differ"
