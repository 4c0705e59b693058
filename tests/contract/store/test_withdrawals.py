"""Jobs nobody was told of do not outlive the right to be where they are; those an agent knows of go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diamond.core.endpoints import NodeGroup, Partition
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import Task
from diamond.server.services import endpoint_shares, image_builds, image_copies, ownership, planning, projects, tasks
from diamond.server.services.context import Context
from diamond.server.services.ownership import Giver
from testing.image_agent import ImageAgent

RECIPE = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"]}


@pytest.fixture
def launch(ctx: Context, agent: ImageAgent, other_id: str, lab: Callable[..., None]) -> Callable[..., Task]:
    """Launches as the second user, in the project that the first one's endpoint is shared with."""
    lab("alpha")

    def create(**spec: object) -> Task:
        return tasks.create(ctx, other_id, {"run": "x", "project": "lab", **spec})[0]

    return create


def _remove(ctx: Context, user_id: str, other_id: str) -> None:
    projects.remove_member(ctx, user_id, "lab", "other")


def _leave(ctx: Context, user_id: str, other_id: str) -> None:
    projects.remove_member(ctx, other_id, "lab", "other")


def _look_on(ctx: Context, user_id: str, other_id: str) -> None:
    projects.set_member(ctx, user_id, "lab", "other", "viewer")


def _unshare(ctx: Context, user_id: str, other_id: str) -> None:
    endpoint_shares.unshare(ctx, user_id, "lab", "alpha")


def _owner_goes(ctx: Context, user_id: str, other_id: str) -> None:
    """With the endpoint, which was shared by them."""
    ownership.transfer_project(ctx, Giver(user_id=user_id), "lab", "other")
    projects.remove_member(ctx, user_id, "lab", _name(ctx, user_id))


def _name(ctx: Context, user_id: str) -> str:
    return next(one.user for one in projects.get(ctx, user_id, "lab").members if one.user != "other")


@pytest.mark.parametrize("planned_first", [True, False], ids=["the planner looks first", "the agent asks first"])
@pytest.mark.parametrize("end", [_remove, _leave, _look_on, _unshare, _owner_goes])
def test_undelivered_jobs_are_taken_back(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, launch: Callable[..., Task],
    end: Callable[[Context, str, str], None], planned_first: bool,
) -> None:  # fmt: skip
    told = launch()
    (order,) = agent.orders()
    untold = launch()
    assert untold.state is TaskState.QUEUED
    end(ctx, user_id, other_id)
    if planned_first:
        planning.run_due(ctx)
    assert [one.task_id for one in agent.orders()] == [told.id], "what its agent was told goes on"
    waits = tasks.get(ctx, other_id, untold.id)
    assert (waits.state, waits.endpoint) == (TaskState.PENDING, None)
    assert waits.pending_reason.startswith("endpoint alpha is no longer shared with its project")
    assert (waits.jobs[0].state, waits.jobs[0].reason) == (JobState.CANCELLED, Reason.CANCELLED)
    planning.run_due(ctx)
    assert "endpoint alpha is no longer shared" in tasks.get(ctx, other_id, untold.id).pending_reason, (
        "it still says why"
    )
    agent.tell(order.job_id, JobState.SUCCEEDED)
    assert tasks.get(ctx, other_id, told.id).state is TaskState.SUCCEEDED


def test_what_was_taken_back_goes_on_where_it_may(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, launch: Callable[..., Task]
) -> None:
    task = launch()
    mine = tasks.create(ctx, user_id, {"run": "x", "project": "lab"})[0]
    endpoint_shares.unshare(ctx, user_id, "lab", "alpha")
    planning.run_due(ctx)
    assert [one.task_id for one in agent.orders()] == [mine.id], "its owner runs there whatever is shared"
    beta = ImageAgent(ctx, other_id, "beta")
    planning.run_due(ctx)
    order = beta.order()
    assert (order.task_id, order.attempt, order.continues) == (task.id, 2, "")
    beta.tell(order.job_id, JobState.SUCCEEDED)
    done = tasks.get(ctx, other_id, task.id)
    assert (done.state, done.endpoint) == (TaskState.SUCCEEDED, "beta")


def test_a_chain_ends_with_the_link_its_agent_knows(
    ctx: Context, user_id: str, other_id: str, launch: Callable[..., Task]
) -> None:
    partition = Partition(name="gpu", max_walltime_s=3600, groups=(NodeGroup(count=4, cpus=8),))
    site = ImageAgent(ctx, user_id, "site", queues_ahead=True, partitions=(partition,))
    endpoint_shares.share(ctx, user_id, "lab", "site")
    task = launch(max_duration="10h", resources={"infra": "site"})
    first = site.order()
    site.tell(first.job_id, JobState.RUNNING, started_at=ctx.clock())
    endpoint_shares.unshare(ctx, user_id, "lab", "site")
    planning.run_due(ctx)
    assert [one.job_id for one in site.orders()] == [first.job_id]
    runs = tasks.get(ctx, other_id, task.id)
    assert (runs.state, [job.id for job in runs.jobs]) == (TaskState.RUNNING, [first.job_id])
    site.tell(first.job_id, JobState.FAILED, reason=Reason.TIME_LIMIT, ended_at=ctx.clock())
    planning.run_due(ctx)
    assert tasks.get(ctx, other_id, task.id).reason is Reason.LOST


def test_a_link_whose_files_are_out_of_reach_is_lost(
    ctx: Context, user_id: str, other_id: str, launch: Callable[..., Task]
) -> None:
    partition = Partition(name="gpu", max_walltime_s=3600, groups=(NodeGroup(count=4, cpus=8),))
    site = ImageAgent(ctx, user_id, "site", partitions=(partition,))
    endpoint_shares.share(ctx, user_id, "lab", "site")
    task = launch(max_duration="10h", resources={"infra": "site"})
    first = site.order()
    site.tell(first.job_id, JobState.RUNNING, started_at=ctx.clock())
    site.tell(first.job_id, JobState.FAILED, reason=Reason.TIME_LIMIT, ended_at=ctx.clock())
    planning.run_due(ctx)
    assert tasks.get(ctx, other_id, task.id).attempt == 2
    endpoint_shares.unshare(ctx, user_id, "lab", "site")
    assert site.orders() == []
    ended = tasks.get(ctx, other_id, task.id)
    assert (ended.state, ended.reason) == (TaskState.FAILED, Reason.LOST)
    assert "its files are at an endpoint where it may not go on" in ended.detail


@pytest.mark.usefixtures("launch")
def test_builds_are_taken_back_and_removals_are_not(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent
) -> None:
    image_builds.build(ctx, other_id, RECIPE, endpoint="alpha")
    projects.remove_member(ctx, user_id, "lab", "other")
    assert agent.orders() == []
    agent.plan()
    (build,) = tasks.list_tasks(ctx, other_id, kind="build")[0]
    assert (build.state, build.reason) == (TaskState.FAILED, Reason.LOST)
    assert tasks.get(ctx, other_id, build.id).detail == "endpoint alpha is no longer shared"
    projects.set_member(ctx, user_id, "lab", "other", "member")
    image_builds.build(ctx, other_id, RECIPE, endpoint="alpha")
    agent.finish()
    image_copies.remove(ctx, other_id, "env")
    projects.remove_member(ctx, user_id, "lab", "other")
    planning.run_due(ctx)
    work = agent.order().work
    assert work is not None and work.action == "remove", "what is theirs there must still go"
