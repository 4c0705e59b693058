"""Quotas and fair shares, on every database: refused with the number, waiting with a reason, counted exactly once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.errors import Forbidden, InvalidInput, NotFound, QuotaExceeded
from diamond.core.ids import new_id
from diamond.core.quotas import Limits
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from diamond.core.tasks import Output, Task
from diamond.server.services import agents, bundles, endpoints, image_builds, planning, quotas, shares, tasks, usage
from diamond.server.services.context import Context
from diamond.server.store.models import EventRow, JobRow, TaskRow
from testing.context import Clock
from testing.image_agent import ImageAgent
from testing.quotas import HOUR, World, at_once, gpu_tasks
from testing.uploads import upload


@pytest.fixture
def world(ctx: Context, clock: Clock, user_id: str) -> World:
    return World(ctx, clock, user_id)


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_one_task_too_many_is_refused_with_the_numbers(world: World) -> None:
    world.limit(tasks=2)
    first = world.launch("alice")
    assert world.launch("bob").warnings == ("project pde: with this task 2 of 2 unfinished tasks",)
    error = world.refused(world.launch)
    assert error.message == ("project pde may have 2 unfinished tasks at once and has 2; this would be one more")
    assert (error.code, error.status) == ("quota_exceeded", 403)
    assert tasks.list_tasks(world.ctx, world.users["alice"])[2] == 1
    assert world.launch("alice", project=None, resources={}).project != "pde"  # the project's limit is not alice's
    world.end(first)
    world.launch("alice")


def test_a_user_is_limited_in_all_projects_together(world: World) -> None:
    world.limit("user", "alice", tasks=2)
    world.launch("alice")
    world.launch("alice", project=None)
    error = world.refused(world.launch)
    assert error.message.startswith("user alice may have 2 unfinished tasks at once and has 2")
    world.launch("bob")


def test_what_alone_is_more_than_the_limit_is_refused_naming_the_field(world: World) -> None:
    world.limit(nodes=8, gpus=8)
    world.launch(num_nodes=6)
    error = world.refused(lambda: world.launch(**gpu_tasks(3)))
    assert error.message == "project pde may hold 8 GPUs at once and holds 0; this task asks for 12"
    assert error.field == "resources.accelerators"
    world.limit(nodes=3)
    error = world.refused(lambda: world.launch(num_nodes=4))
    assert error.message == "project pde may hold 3 nodes at once and holds 6; this task asks for 4"
    assert error.field == "num_nodes"


def test_a_batch_counts_its_own_tasks_and_is_refused_whole(world: World) -> None:
    world.limit(tasks=3)
    specs: list[Any] = [{"run": "true", "project": "pde"} for _ in range(4)]
    error = world.refused(lambda: tasks.create_many(world.ctx, world.users["alice"], specs))
    assert error.field == "specs[3]"
    assert tasks.list_tasks(world.ctx, world.users["alice"])[2] == 0
    assert len(tasks.create_many(world.ctx, world.users["alice"], specs[:3])[0]) == 3


def test_defaults_hold_for_those_without_limits_of_their_own(world: World) -> None:
    world.limit("every-user", "all", tasks=1)
    world.limit("user", "bob", tasks=2)
    world.launch("alice")
    world.refused(world.launch)
    world.launch("bob")
    world.launch("bob")
    world.refused(lambda: world.launch("bob"))
    assert quotas.get(world.ctx, "user", "alice").own is False
    assert quotas.get(world.ctx, "user", "bob").own is True
    quotas.clear(world.ctx, "user", "bob")
    assert quotas.get(world.ctx, "user", "bob").limits == Limits(tasks=1)
    assert [(one.kind, one.name) for one in quotas.list_set(world.ctx)] == [("every-user", "all")]


def test_a_personal_project_is_limited_by_its_user_alone(world: World) -> None:
    world.limit("every-project", "all", tasks=1)
    for _ in range(3):
        world.launch("alice", project=None)
    world.launch("alice")
    world.refused(world.launch)
    with pytest.raises(InvalidInput, match="set those of user alice"):
        world.limit("project", "alice", tasks=1)
    with pytest.raises(NotFound):
        world.limit("project", "nothing", tasks=1)
    with pytest.raises(NotFound):
        world.limit("user", "nobody", tasks=1)


# ---- waiting ---------------------------------------------------------------------------------------------------------


def test_a_task_that_only_has_to_wait_goes_on_by_itself(world: World) -> None:
    world.limit(nodes=8)
    first = world.launch("alice", num_nodes=6)
    second = world.launch("bob", num_nodes=4)
    waits = "project pde may hold 8 nodes at once and holds 6; this task asks for 4"
    assert second.state is TaskState.PENDING
    assert second.pending_reason == f"{waits} and goes on by itself when others end"
    assert second.warnings == (f"{waits} and waits until others end",)
    third = world.launch("bob", num_nodes=2)
    assert third.state is TaskState.QUEUED
    planning.run_due(world.ctx)
    assert world.task(second).state is TaskState.PENDING
    hub: Any = world.ctx.hub
    hub.topics.clear()
    world.run(first)
    world.end(first)
    assert "planning" in hub.topics
    planning.run_due(world.ctx)
    assert world.task(second).state is TaskState.QUEUED
    assert world.used().nodes == 6


def test_stopping_a_task_nobody_was_told_of_wakes_who_waits_for_its_nodes(world: World) -> None:
    world.limit(gpus=4)
    first = world.launch(**gpu_tasks())
    second = world.launch(**gpu_tasks())
    assert "may hold 4 GPUs at once and holds 4" in second.pending_reason
    hub: Any = world.ctx.hub
    hub.topics.clear()
    tasks.cancel(world.ctx, world.users["alice"], first.id)
    assert "planning" in hub.topics
    planning.run_due(world.ctx)
    assert world.task(second).state is TaskState.QUEUED


def test_a_raised_limit_wakes_who_waits(world: World) -> None:
    world.limit(nodes=2)
    world.launch(num_nodes=2)
    waiting = world.launch(num_nodes=2)
    hub: Any = world.ctx.hub
    hub.topics.clear()
    world.limit(nodes=4)
    assert "planning" in hub.topics
    planning.run_due(world.ctx)
    assert world.task(waiting).state is TaskState.QUEUED


def test_tasks_of_one_batch_wait_for_each_other(world: World) -> None:
    world.limit(nodes=3)
    made, _ = tasks.create_many(
        world.ctx, world.users["alice"], [{"run": "true", "project": "pde", "num_nodes": 2} for _ in range(3)]
    )
    assert [task.state for task in made] == [TaskState.QUEUED, TaskState.PENDING, TaskState.PENDING]
    assert world.used().nodes == 2


def test_a_dry_run_refuses_and_warns_alike(world: World) -> None:
    world.limit(tasks=2, nodes=4)
    world.launch(num_nodes=3)
    alice = world.users["alice"]
    plan = tasks.plan(world.ctx, alice, {"run": "true", "project": "pde", "num_nodes": 2})
    assert plan["warnings"] == [
        "project pde: with this task 2 of 2 unfinished tasks",
        "project pde may hold 4 nodes at once and holds 3; this task asks for 2 and waits until others end",
    ]
    world.launch()
    world.refused(lambda: tasks.plan(world.ctx, alice, {"run": "true", "project": "pde"}))


# ---- at once -------------------------------------------------------------------------------------------------------


def test_launches_at_once_never_pass_a_limit_together(world: World) -> None:
    world.limit(tasks=1)
    for _ in range(5):
        users = ["alice", "bob", world.owner] * 2
        answers = at_once([lambda user=user: world.launch(user) for user in users])
        made = [answer for answer in answers if isinstance(answer, Task)]
        assert [type(answer) for answer in answers if not isinstance(answer, Task)] == [QuotaExceeded] * 5
        assert len(made) == 1
        world.end(made[0])


def test_launches_and_planning_at_once_never_hold_too_much(world: World) -> None:
    world.limit(nodes=4)
    world.limit("every-user", "all", nodes=3)
    first = world.launch("alice", num_nodes=3)
    waiting = [world.launch("bob", num_nodes=2) for _ in range(3)]
    assert [task.state for task in waiting] == [TaskState.PENDING] * 3
    world.end(first)
    launches = [lambda user=user: world.launch(user, num_nodes=2) for user in ("alice", "bob", world.owner)]
    answers = at_once([lambda: planning.run_due(world.ctx), *launches, lambda: planning.run_due(world.ctx)])
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    assert world.used().nodes == 4
    assert max(world.used("user", name).nodes for name in ("alice", "bob")) <= 3


# ---- storage ---------------------------------------------------------------------------------------------------------


def kept(world: World, path: str, size: int) -> Output:
    """An output that was brought to the server."""
    data = path.encode() * size
    sha256 = upload(world.ctx, world.endpoint, data[:size]).removeprefix("sha256:")
    return Output(path=path, size_bytes=size, sha256=sha256, stored=True)


def test_outputs_count_as_they_are_here_whatever_an_agent_says(world: World) -> None:
    task = world.launch(outputs=["*"], retry={"max_retries": 1})
    real = kept(world, "a", 50)
    late = hashlib.sha256(b"late").hexdigest()
    claimed = (
        replace(real, size_bytes=2**49),
        replace(real, path="the same again", size_bytes=2**48),
        Output(path="nowhere", size_bytes=2**48, sha256="0" * 64, stored=True),
        Output(path="later", size_bytes=2**47, sha256=late, stored=True),
    )
    world.run(task)
    world.end(task, Reason.NODE_FAIL, outputs=claimed)
    assert (world.used().storage_bytes, world.used("user", "alice").storage_bytes) == (50, 50)
    usage.charge_ended(world.ctx)
    upload(world.ctx, world.endpoint, b"late")  # what did not count is not given back either
    world.clock.advance(60)
    planning.run_due(world.ctx)
    world.run(task)
    world.end(task, outputs=(real,))
    usage.charge_ended(world.ctx)
    assert (world.used().storage_bytes, world.used("user", "alice").storage_bytes) == (50, 50)


def test_uploads_that_were_only_begun_take_room(world: World) -> None:
    ctx, alice, bob = world.ctx, world.users["alice"], world.users["bob"]
    world.limit("every-user", "all", storage_bytes=1000)
    first, second = ("sha256:" + hashlib.sha256(name).hexdigest() for name in (b"x" * 901, b"y" * 901))
    quotas.check_upload(ctx, alice, 901, [first])
    ctx.blobs.put_chunk(first, 901, 0, [b"x" * 900], alice)
    quotas.check_upload(ctx, alice, 901, [first])  # to go on with it
    error = world.refused(lambda: quotas.check_upload(ctx, alice, 901, [second]))
    assert error.message == (
        "user alice may store 1000 B and stores 0 B; this upload has 901 B, those begun and not finished 900 B"
    )
    quotas.check_upload(ctx, bob, 901, [second])
    manifest = {"files": [{"path": "data", "digest": first, "size_bytes": 901}]}
    assert bundles.register(ctx, manifest, alice)["missing"] == [{"digest": first, "received": 900}]
    assert ctx.blobs.put_chunk(first, 901, 900, [b"x"], alice).complete
    quotas.check_upload(ctx, alice, 901, [second])  # complete: counted when it is noted, not as begun
    ctx.blobs.put_chunk(second, 901, 0, [b"y" * 900], alice)
    assert ctx.blobs.unfinished_bytes(alice) == 900
    assert ctx.blobs.sweep_partials(-1) == 1
    assert ctx.blobs.unfinished_bytes(alice) == 0


def test_agents_upload_only_while_they_have_jobs(world: World) -> None:
    with pytest.raises(Forbidden, match="no live job"):
        agents.check_upload(world.ctx, world.endpoint)
    task = world.launch(outputs=["*"])
    with pytest.raises(Forbidden, match="no live job"):
        agents.check_upload(world.ctx, world.endpoint)  # it was not told of it yet
    world.run(task)
    agents.check_upload(world.ctx, world.endpoint)
    world.end(task)
    with pytest.raises(Forbidden, match="no live job"):
        agents.check_upload(world.ctx, world.endpoint)


def test_outputs_and_uploads_count_as_storage(world: World) -> None:
    world.limit("user", "alice", storage_bytes=1000)
    task = world.launch(outputs=["*.pt"])
    outputs = (
        kept(world, "model.pt", 700),
        Output(path="large.pt", size_bytes=10**9, sha256="", stored=False),
    )
    world.run(task)
    world.end(task, outputs=outputs)
    assert (world.used("user", "alice").storage_bytes, world.used().storage_bytes) == (700, 700)
    usage.charge_ended(world.ctx)
    assert world.used("user", "alice").storage_bytes == 700
    manifest = {"files": [{"path": "data", "digest": "sha256:" + "b" * 64, "size_bytes": 301}]}
    error = world.refused(lambda: bundles.register(world.ctx, manifest, world.users["alice"]))
    assert error.message == "user alice may store 1000 B and stores 700 B; this upload has 301 B"
    assert bundles.register(world.ctx, manifest, world.users["bob"])["missing"]
    usage.note_stored(world.ctx, world.users["alice"], 300)
    error = world.refused(lambda: world.launch(outputs=["*.pt"]))
    assert error.field == "outputs"
    world.launch()  # leaves nothing


def test_a_retried_tasks_outputs_replace_those_before(world: World) -> None:
    task = world.launch(outputs=["*"], retry={"max_retries": 1})
    world.run(task)
    world.end(task, Reason.NODE_FAIL, outputs=(kept(world, "a", 50),))
    world.clock.advance(60)
    planning.run_due(world.ctx)
    world.run(task)
    world.end(task, outputs=(kept(world, "a", 20),))
    assert world.used().storage_bytes == 20
    planning.run_due(world.ctx)
    assert world.used().storage_bytes == 20


def test_images_count_and_are_not_built_beyond_the_limit(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    recipe = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"]}
    image_builds.build(ctx, user_id, recipe)
    agent.finish()
    (mine,) = quotas.list_quotas(ctx, user_id)
    assert mine.used.storage_bytes > 0
    quotas.set_limits(ctx, "user", mine.name, Limits(storage_bytes=mine.used.storage_bytes))
    built, is_new = image_builds.build(ctx, user_id, recipe)  # what is there may be used
    assert built.cached and not is_new
    task, _ = tasks.create(ctx, user_id, {"run": "true", "image": recipe})
    assert task.state is TaskState.QUEUED
    other = {**recipe, "pip": ["scipy"]}
    for ask in (
        lambda: tasks.create(ctx, user_id, {"run": "true", "image": other}),
        lambda: image_builds.build(ctx, user_id, other),
    ):
        with pytest.raises(QuotaExceeded, match=r"may store .* and stores ") as caught:
            ask()
        assert "diamond image rm" in caught.value.hint
    assert tasks.list_tasks(ctx, user_id)[2] == 1


# ---- shares ----------------------------------------------------------------------------------------------------------


def pending(world: World, session: Any, user: str, number: int, **fields: Any) -> str:
    row = TaskRow(
        id=new_id("tsk"), owner_id=world.users[user], name=f"{user}-{number}", state=TaskState.PENDING.value,
        spec={"run": "true", "num_nodes": 1}, desired="run", created_at=world.clock() + number, attempt=0, failures=0,
        detail="", pending_reason="", outputs=[], project_id=world.project, kind="command", priority=0, **fields,
    )  # fmt: skip
    session.add(row)
    return row.id


def placed(world: World) -> list[str]:
    with world.ctx.db.read() as session:
        jobs = sa.select(TaskRow.name).join(JobRow, JobRow.task_id == TaskRow.id)
        return [name.partition("-")[0] for name in session.scalars(jobs.order_by(JobRow.id))]


def test_two_users_with_many_tasks_are_placed_in_turns(world: World) -> None:
    with world.ctx.db.write() as session:
        for number in range(100):
            pending(world, session, "alice", number)
        for number in range(100):
            pending(world, session, "bob", 100 + number)
    planning.run_due(world.ctx)
    assert placed(world) == ["alice", "bob"] * 100


def test_who_has_used_less_of_late_goes_first(world: World) -> None:
    task = world.launch("alice", **gpu_tasks(1, 4))
    world.run(task)
    world.clock.advance(HOUR)
    world.end(task)
    usage.charge_ended(world.ctx)
    users = list(world.users.values())
    with world.ctx.db.read() as session:
        had = shares.standings(session, users, world.clock())
        later = shares.standings(session, users, world.clock() + 7 * 86_400)
    assert had[world.users["alice"]] == pytest.approx(5 * HOUR, rel=0.05)
    assert later[world.users["alice"]] == pytest.approx(2.5 * HOUR, rel=0.05)
    with world.ctx.db.write() as session:
        session.execute(sa.delete(JobRow))
        for number in range(4):
            pending(world, session, "alice", number)
        for number in range(4):
            pending(world, session, "bob", 10 + number)
    planning.run_due(world.ctx)
    assert placed(world) == ["bob"] * 4 + ["alice"] * 4


def test_a_launch_that_leaves_little_is_an_event_once_a_day(world: World) -> None:
    def told() -> list[str]:
        with world.ctx.db.read() as session:
            query = sa.select(EventRow).where(EventRow.kind == "quota.near", EventRow.owner_id == world.users["alice"])
            return [str(event.data["message"]) for event in session.scalars(query)]

    world.limit("user", "alice", tasks=4)
    for _ in range(3):
        world.launch("alice")
    assert told() == []
    world.launch("alice")
    assert len(told()) == 1
    assert "unfinished tasks" in told()[0]
    world.limit("user", "alice", tasks=5)
    world.launch("alice")
    assert len(told()) == 1


def test_the_queue_shows_what_waits_for_a_quota(world: World) -> None:
    world.limit(nodes=4)
    world.launch(num_nodes=4)
    waits = world.launch(num_nodes=2, name="waits")
    last = endpoints.queue(world.ctx, world.users["alice"])[-1]
    assert (last.task_id, last.state, last.job_id, last.endpoint) == (waits.id, "PENDING", "", "")
    assert "may hold 4 nodes" in last.pending_reason
    assert all(entry.task_id != waits.id for entry in endpoints.queue(world.ctx, world.users["bob"]))
