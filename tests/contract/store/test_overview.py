"""What somebody sees first: counted by the database, and nothing of anybody else's."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.codec import encode
from diamond.core.endpoints import ONLINE_WITHIN_S, EndpointUsage, FileSystem
from diamond.core.ids import new_id
from diamond.core.images import BuildFailure
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from diamond.server.services import agents, endpoints, enrolment, image_builds, invitations, overview, quotas, tasks
from diamond.server.services.context import Context
from diamond.server.services.overview import LATELY_S, QUEUED_LONG_S, STUCK_AFTER_S, Counts
from diamond.server.store.models import EndpointRow, JobRow, TaskRow, UserRow
from testing.context import Clock
from testing.image_agent import ImageAgent
from testing.quotas import HOUR, World, gpu_tasks


@pytest.fixture
def world(ctx: Context, clock: Clock, user_id: str) -> World:
    return World(ctx, clock, user_id)


def concerns(world: World, user: str) -> list[overview.Concern]:
    return overview.concerns(
        world.ctx, user, endpoints.list_endpoints(world.ctx, user), quotas.list_quotas(world.ctx, user)
    )


def said(world: World, user: str) -> list[tuple[str, str, str]]:
    return [(one.about, one.name, one.title) for one in concerns(world, user)]


def test_counts_are_of_ones_own_tasks_by_what_they_mean(world: World) -> None:
    alice = world.users["alice"]
    assert overview.counts(world.ctx, alice) == Counts()
    made = [world.launch(name=f"t{number}") for number in range(4)]
    world.launch("bob")
    for task in made[1:]:
        world.run(task)
    world.end(made[2])
    world.end(made[3], Reason.EXIT_NONZERO)
    assert overview.counts(world.ctx, alice) == Counts(waiting=1, running=1, succeeded=1, failed=1)
    tasks.cancel(world.ctx, alice, made[1].id)
    world.end(made[1], Reason.CANCELLED)
    assert overview.counts(world.ctx, alice) == Counts(waiting=1, succeeded=1, failed=1, cancelled=1)
    assert overview.counts(world.ctx, world.users["bob"]) == Counts(waiting=1)


def test_what_happened_last_to_each_thing(world: World) -> None:
    alice = world.users["alice"]
    first, second = world.launch(name="first"), world.launch(name="second")
    world.launch("bob", name="not hers")
    world.run(first)
    world.end(first, Reason.EXIT_NONZERO, exit_code=3)
    found = overview.recent(world.ctx, alice)
    told = [(one.task, one.endpoint, one.event.kind, one.event.data.get("state")) for one in found]
    assert told == [("first", "local", "task.state", "FAILED"), ("second", "", "task.created", None)]
    assert found[0].event.data["exit_code"] == 3
    assert [one.event.task_id for one in overview.recent(world.ctx, alice, limit=1)] == [first.id]
    # Endpoints are told of to their owner.
    assert "endpoint.online" in {one.event.kind for one in overview.recent(world.ctx, world.owner)}
    assert second.id in {one.event.task_id for one in found}


def test_failures_count_lately_and_until_the_task_is_mended(world: World) -> None:
    alice = world.users["alice"]
    task = world.launch(name="train")
    world.run(task)
    world.end(task, Reason.EXIT_NONZERO, exit_code=1, detail="the command ended with exit code 1")
    other = world.launch(name="memory")
    world.run(other)
    world.end(other, Reason.OUT_OF_MEMORY)
    assert {one[:2] for one in said(world, alice)} == {("task", "train"), ("task", "memory")}
    details = {one.name: one.detail for one in concerns(world, alice)}
    assert details["train"] == "the command ended with exit code 1; the last lines of the log say why"
    assert "raise resources.memory" in details["memory"]
    assert not said(world, world.users["bob"])
    again = world.launch(name="train")
    world.run(again)
    assert ("task", "train", "failed") in said(world, alice), "it has not succeeded yet"
    world.end(again)
    assert said(world, alice) == [("task", "memory", "failed")]
    world.clock.advance(LATELY_S)
    agents.hello(world.ctx, world.endpoint, _hello(world))
    assert not said(world, alice)


def test_what_waits_for_long_is_told_with_its_reason(world: World) -> None:
    alice = world.users["alice"]
    world.limit(kind="user", name="alice", gpus=4)
    running, stuck = world.launch(name="running", **gpu_tasks()), world.launch(name="stuck", **gpu_tasks())
    world.run(running)
    assert world.task(stuck).state is TaskState.PENDING
    assert not said(world, alice), "most tasks wait for a moment"
    world.clock.advance(STUCK_AFTER_S + 1)
    agents.hello(world.ctx, world.endpoint, _hello(world))
    (one,) = concerns(world, alice)
    assert (one.key, one.title) == (stuck.id, "has been waiting") and "may hold 4 GPUs" in one.detail, one
    world.limit(kind="user", name="alice")
    tasks.cancel(world.ctx, alice, stuck.id)
    queued = world.launch(name="queued")
    with world.ctx.db.write() as session:
        session.execute(sa.update(JobRow).where(JobRow.task_id == queued.id).values(pending_reason="waits for nodes"))
    world.clock.advance(QUEUED_LONG_S - 1)
    agents.hello(world.ctx, world.endpoint, _hello(world))
    assert not said(world, alice)
    world.clock.advance(2)
    assert [(one.key, one.detail) for one in concerns(world, alice)] == [(queued.id, "waits for nodes")]


def _hello(world: World) -> Any:
    from diamond.core.wire import Hello

    facts = endpoints.get(world.ctx, world.owner, "local").facts
    assert facts is not None
    return Hello(facts=facts)


def test_endpoints_offline_cut_off_or_full(world: World) -> None:
    assert not said(world, world.owner)
    facts = _hello(world).facts
    full = replace(
        facts,
        filesystems=(
            FileSystem(path="/home/x", total_bytes=100 * 2**30, free_bytes=2**30),
            FileSystem(path="/scratch", total_bytes=100, free_bytes=90, quota_bytes=2**40, quota_used_bytes=2**40),
        ),
    )
    used = EndpointUsage(disk_total_bytes=2**40, disk_free_bytes=2**30, warnings=("the run directory is slow",))
    with world.ctx.db.write() as session:
        row = session.get_one(EndpointRow, world.endpoint)
        row.facts, row.usage = encode(full), encode(used)
    assert [one.detail for one in concerns(world, world.owner)] == [
        "the run directory is slow",
        "1 GiB left where jobs run",
        "1 GiB left in /home/x",
        "0 B left of the quota in /scratch",
    ]
    world.clock.advance(ONLINE_WITHIN_S + 1)
    assert said(world, world.owner) == [("endpoint", "local", "is offline")], "nobody knows how full it is now"
    assert said(world, world.users["alice"]) == [("endpoint", "local", "is offline")], "it is shared with her"
    assert not said(world, world.users["carol"])
    enrolment.revoke(world.ctx, world.owner, "local")
    assert said(world, world.owner) == [("endpoint", "local", "was cut off")]
    endpoints.create_with_code(world.ctx, world.owner, "new-one")
    assert len(said(world, world.owner)) == 1, "one that is being set up needs nobody"


def test_quotas_that_are_nearly_used_up(world: World) -> None:
    alice = world.users["alice"]
    world.limit(gpu_hours=10, gpus=4)
    task = world.launch(**gpu_tasks(1, 4, max_duration="2h"))
    world.run(task)
    world.clock.advance(HOUR)
    agents.hello(world.ctx, world.endpoint, _hello(world))
    assert not said(world, alice), "4 of 10 hours; that all GPUs are held is what they are for"
    world.clock.advance(HOUR)
    agents.hello(world.ctx, world.endpoint, _hello(world))
    (one,) = concerns(world, alice)
    assert (one.about, one.name) == ("quota", "project pde")
    assert one.detail == "8 of 10 GPU-hours of this month are used"


def test_images_that_could_not_be_made(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    def found() -> list[overview.Concern]:
        return overview.concerns(ctx, user_id, [], [])

    recipe = {"name": "env", "base": "docker://debian:13", "pip": ["numpy"]}
    image_builds.build(ctx, user_id, recipe, endpoint="alpha")
    assert not found()
    agent.fail(failure=BuildFailure(stage="pip", message="there is no numpy", hint="check the name"))
    (one,) = found()
    assert (one.about, one.name, one.title) == ("image", "env", "could not be made at alpha")
    assert one.detail == "there is no numpy; check the name"
    assert overview.recent(ctx, user_id)[0].event.kind == "image.failed"
    image_builds.build(ctx, user_id, {**recipe, "pip": ["scipy"]}, endpoint="alpha")
    assert not found(), "somebody is at it"
    agent.finish()
    assert not found()
    kinds = {one.event.kind for one in overview.recent(ctx, user_id)}
    assert "image.ready" in kinds and not {kind for kind in kinds if kind.startswith("task.")}
    assert overview.counts(ctx, user_id) == Counts(), "builds are not among the tasks"


def test_the_first_steps(ctx: Context, user_id: str, agent: ImageAgent, clock: Clock) -> None:
    def done(user: str = user_id, *, invites: bool = True) -> tuple[bool, bool, bool, bool | None]:
        found = overview.progress(ctx, user, endpoints.list_endpoints(ctx, user), invites=invites)
        assert found.is_done == all(
            step is not False for step in (found.connected, found.ran, found.built, found.invited)
        )
        return found.connected, found.ran, found.built, found.invited

    assert done() == (True, False, False, False)
    task, _ = tasks.create(ctx, user_id, {"run": "true", "resources": {"infra": "alpha"}})
    agent.end(agent.order(), ())
    assert tasks.get(ctx, user_id, task.id).state is TaskState.SUCCEEDED
    assert done() == (True, True, False, False)
    image_builds.build(ctx, user_id, {"name": "env", "base": "docker://debian:13"}, endpoint="alpha")
    agent.finish(agent.orders()[-1])
    assert done() == (True, True, True, False)
    assert done(invites=False) == (True, True, True, None)
    with ctx.db.write() as session:
        session.get_one(UserRow, user_id).is_admin = True
    invitations.invite(ctx, user_id)
    assert done() == (True, True, True, True)


def test_ten_thousand_tasks_cost_little(world: World) -> None:
    """Nothing is loaded to be counted."""
    alice = world.users["alice"]
    spec = encode(world.task(world.launch()).spec)
    states = [TaskState.SUCCEEDED.value] * 8 + [TaskState.FAILED.value, TaskState.CANCELLED.value]
    with world.ctx.db.write() as session:
        rows = [
            {
                "id": new_id("tsk"), "owner_id": alice, "name": f"task {number}", "spec": spec,
                "state": states[number % 10], "desired": "run", "created_at": 1.0, "ended_at": world.clock() - number,
                "outputs": [], "detail": "",
                "pending_reason": "", "attempt": 1, "priority": 0, "failures": 0, "kind": "command",
                "visibility": "private",
            }
            for number in range(10_000)
        ]  # fmt: skip
        session.execute(sa.insert(TaskRow), rows)
    places, standing = endpoints.list_endpoints(world.ctx, alice), quotas.list_quotas(world.ctx, alice)
    best = min(_seconds(world.ctx, alice, places, standing) for _ in range(3))
    found = overview.counts(world.ctx, alice)
    assert (found.succeeded, found.failed, found.cancelled) == (8000, 1000, 1000)
    assert len(overview.concerns(world.ctx, alice, places, standing)) == 5
    assert best < 0.25, f"{best * 1000:.0f} ms"


def _seconds(ctx: Context, user: str, places: Any, standing: Any) -> float:
    began = time.perf_counter()
    overview.counts(ctx, user)
    overview.concerns(ctx, user, places, standing)
    overview.recent(ctx, user)
    overview.progress(ctx, user, places, invites=True)
    return time.perf_counter() - began
