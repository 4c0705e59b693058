"""The table of tasks, running one again, and removing what has ended: on every database."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.server.services import audit, events, ownership, removals, reruns, secrets, task_lists, tasks, usage
from diamond.server.services.context import Context
from diamond.server.services.task_lists import Page, Wanted
from diamond.server.store.identity_models import UsageRow
from diamond.server.store.models import EventRow, IdempotencyRow, JobRow, TaskRow
from testing.context import Clock
from testing.image_agent import ImageAgent


def launch(ctx: Context, user_id: str, name: str, **spec: Any) -> str:
    return tasks.create(ctx, user_id, {"name": name, "run": "true", **spec})[0].id


def finish(agent: ImageAgent, task_id: str, reason: Reason = Reason.COMPLETED) -> str:
    order = next(order for order in agent.orders() if order.task_id == task_id)
    agent.tell(order.job_id, JobState.RUNNING, started_at=agent.ctx.clock(), log=b"hello\n")
    state = JobState.SUCCEEDED if reason is Reason.COMPLETED else JobState.FAILED
    agent.tell(order.job_id, state, reason=reason, ended_at=agent.ctx.clock())
    return order.job_id


def names(page: Page) -> list[str]:
    return [row.task.name for row in page.rows]


def everything(ctx: Context, user_id: str, wanted: Wanted, limit: int) -> list[list[str]]:
    """All pages forwards; and backwards they must be the same."""
    pages = [task_lists.page(ctx, user_id, wanted, limit=limit)]
    while (cursor := pages[-1].next_cursor) is not None:
        pages.append(task_lists.page(ctx, user_id, wanted, limit=limit, cursor=cursor))
    back = [pages[-1]]
    while (cursor := back[-1].previous_cursor) is not None:
        back.append(task_lists.page(ctx, user_id, wanted, limit=limit, cursor=cursor))
    assert [names(page) for page in reversed(back)] == [names(page) for page in pages]
    return [names(page) for page in pages]


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("sort", task_lists.SORTS)
def test_every_order_has_every_task_once_on_pages_in_both_directions(
    ctx: Context, user_id: str, agent: ImageAgent, sort: str, ascending: bool
) -> None:
    for number in range(7):
        launch(ctx, user_id, f"{'abA'[number % 3]}-{number}", resources={"infra": "alpha"} if number % 2 else {})
    wanted = Wanted(sort=sort, ascending=ascending)
    found = [name for page in everything(ctx, user_id, wanted, 3) for name in page]
    assert len(found) == 7 and len(set(found)) == 7
    (whole,) = everything(ctx, user_id, wanted, 50)
    assert found == whole
    if sort == "name":
        assert [name.lower() for name in found] == sorted((name.lower() for name in found), reverse=not ascending)
    if sort == "created":
        assert [int(name[-1]) for name in found] == (list(range(7)) if ascending else list(range(6, -1, -1)))


def test_durations_are_sorted_and_a_page_later_means_the_same_moment(
    ctx: Context, user_id: str, agent: ImageAgent, clock: Clock
) -> None:
    for name, lasts_s in (("short", 1), ("long", 50), ("middle", 10)):
        task_id = launch(ctx, user_id, name, resources={"infra": "alpha"})
        order = next(order for order in agent.orders() if order.task_id == task_id)
        agent.tell(order.job_id, JobState.RUNNING, started_at=clock())
        clock.advance(lasts_s)
        agent.tell(order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, ended_at=clock())
    assert everything(ctx, user_id, Wanted(sort="duration"), 1) == [["long"], ["middle"], ["short"]]


def test_filters_and_counts(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    done = launch(ctx, user_id, "train <b>bold</b>", resources={"infra": "alpha"})
    bad = launch(ctx, user_id, "100% Train_me", resources={"infra": "alpha"})
    waits = launch(ctx, user_id, "waits", resources={"infra": "alpha", "cpus": 1})
    job_id = finish(agent, done)
    finish(agent, bad, Reason.EXIT_NONZERO)

    def found(**wanted: Any) -> set[str]:
        return {row.task.id for row in task_lists.page(ctx, user_id, Wanted(**wanted)).rows}

    assert found(search="TRAIN") == {done, bad}
    assert found(search="100%") == {bad} and found(search="%") == {bad}
    assert found(search="train_") == {bad}  # no wildcard
    assert found(search="<b>") == {done}
    assert found(search=waits[:20]) >= {waits} and found(search=waits) == {waits}
    assert found(search="nothing\x00") == set()
    assert found(endpoint="alpha") == {done, bad, waits} and found(endpoint="none") == set()
    assert found(states=(TaskState.FAILED,)) == {bad}
    assert found(states=(TaskState.FAILED, TaskState.SUCCEEDED)) == {bad, done}
    page = task_lists.page(ctx, user_id, Wanted(states=(TaskState.FAILED,)))
    assert page.total == 1 and page.counts[TaskState.SUCCEEDED] == 1 and sum(page.counts.values()) == 3
    assert "alpha" in task_lists.choices(ctx, user_id)[0]
    assert job_id


def test_gpus_and_the_log_path(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    task_id = launch(ctx, user_id, "placed", resources={"infra": "alpha"})
    order = next(order for order in agent.orders() if order.task_id == task_id)
    agent.tell(order.job_id, JobState.RUNNING, run_dir="/scratch/jobs/1")
    (row,) = task_lists.page(ctx, user_id, Wanted()).rows
    assert (row.num_gpus, row.log_path) == (0, "/scratch/jobs/1/log")


@pytest.mark.parametrize("cursor", ["x", "W10", "eyJhIjoxfQ", "é", "A" * 5000])
def test_a_wrong_cursor_is_said_to_be_one(ctx: Context, user_id: str, cursor: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        task_lists.page(ctx, user_id, Wanted(), cursor=cursor)
    assert caught.value.field == "cursor"


def test_a_cursor_of_another_order_is_refused(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    for name in "ab":
        launch(ctx, user_id, name)
    cursor = task_lists.page(ctx, user_id, Wanted(sort="name"), limit=1).next_cursor
    assert cursor is not None
    with pytest.raises(InvalidInput):
        task_lists.page(ctx, user_id, Wanted(sort="duration"), cursor=cursor)
    with pytest.raises(InvalidInput):
        task_lists.page(ctx, user_id, Wanted(sort="colour"))


def test_others_tasks_are_there_for_those_who_may_see_them(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Any
) -> None:
    lab("alpha")
    shared = launch(ctx, user_id, "shared", project="lab")
    hidden = launch(ctx, user_id, "hidden", project="lab")
    ownership.change_task(ctx, user_id, hidden, visibility="private")
    assert task_lists.page(ctx, other_id, Wanted()).rows == []
    for wanted in (Wanted(everybody=True), Wanted(project="lab")):
        assert [row.task.id for row in task_lists.page(ctx, other_id, wanted).rows] == [shared]
    assert task_lists.page(ctx, other_id, Wanted(everybody=True, search=hidden)).rows == []
    with pytest.raises(NotFound):
        task_lists.page(ctx, other_id, Wanted(project="other-lab"))


def test_ten_thousand_tasks_are_paged_quickly(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    first = launch(ctx, user_id, "template", resources={"infra": "alpha"})
    with ctx.db.write() as session:
        row = session.get_one(TaskRow, first, options=[sa.orm.undefer(TaskRow.spec), sa.orm.undefer(TaskRow.outputs)])
        values = {column.name: getattr(row, column.name) for column in TaskRow.__table__.columns}
        session.execute(
            sa.insert(TaskRow),
            [
                {**values, "id": f"tsk_0000{number:06d}", "name": f"task {number}", "state": "SUCCEEDED", "attempt": 0}
                for number in range(10_000)
            ],
        )
    for wanted in (Wanted(), Wanted(sort="name"), Wanted(sort="duration", search="99"), Wanted(sort="endpoint")):
        page = task_lists.page(ctx, user_id, wanted)
        began = time.monotonic()
        page = task_lists.page(ctx, user_id, wanted, cursor=page.next_cursor or "")
        assert len(page.rows) == task_lists.PAGE
        assert time.monotonic() - began < 1.0  # far above what it takes, which the benchmark measures


# ---- running again -----------------------------------------------------------------------------------------------


def test_a_rerun_is_the_same_task_anew(ctx: Context, user_id: str) -> None:
    ImageAgent(ctx, user_id, "alpha", takes_secrets=True)
    secrets.put(ctx, user_id, "KEY", "a value", None)
    spec = {
        "envs": {"A": "1"}, "secrets": {"KEY": "KEY"}, "outputs": ["*.txt"], "max_duration": "2h",
        "retry": {"max_retries": 2}, "resources": {"infra": "alpha", "cpus": "1+"}, "setup": "true", "priority": 3,
    }  # fmt: skip
    first = launch(ctx, user_id, "again", **spec)
    made = reruns.rerun(ctx, user_id, first, "key-1")
    assert made.id != first
    before, after = tasks.get(ctx, user_id, first), tasks.get(ctx, user_id, made.id)
    assert after.spec == before.spec and after.name == "again"
    assert reruns.rerun(ctx, user_id, first, "key-1").id == made.id
    renamed = reruns.rerun(ctx, user_id, first, "key-2", name="another")
    assert before.spec is not None
    assert tasks.get(ctx, user_id, renamed.id).spec == replace(before.spec, name="another")
    with pytest.raises(InvalidInput) as refused:
        reruns.rerun(ctx, user_id, first, name="no\nname")
    assert refused.value.field == "name"


def test_others_run_again_what_they_see_as_their_own(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Any
) -> None:
    lab("alpha")
    shared = launch(ctx, user_id, "shared", project="lab")
    made = reruns.rerun(ctx, other_id, shared)
    assert tasks.get(ctx, other_id, made.id).owner == "other"
    ownership.change_task(ctx, user_id, shared, visibility="private")
    with pytest.raises(NotFound):
        reruns.rerun(ctx, other_id, shared)


# ---- removing ----------------------------------------------------------------------------------------------------


def test_a_removed_task_leaves_nothing_but_its_use(ctx: Context, user_id: str, agent: ImageAgent, clock: Clock) -> None:
    task_id = tasks.create(ctx, user_id, {"name": "gone", "run": "true", "resources": {"infra": "alpha"}}, "a-key")[
        0
    ].id
    order = next(order for order in agent.orders() if order.task_id == task_id)
    agent.tell(order.job_id, JobState.RUNNING, started_at=clock(), log=b"hello\n")
    clock.advance(100)
    agent.tell(order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, ended_at=clock())
    assert ctx.streams.size(order.job_id, "log") == 6
    removals.remove(ctx, user_id, task_id)
    with pytest.raises(NotFound):
        tasks.get(ctx, user_id, task_id)
    with pytest.raises(NotFound):
        removals.remove(ctx, user_id, task_id)
    assert ctx.streams.size(order.job_id, "log") == 0
    with ctx.db.read() as session:
        for model in (JobRow, IdempotencyRow):
            assert session.scalars(sa.select(model).where(model.task_id == task_id)).all() == []
        kinds = session.scalars(sa.select(EventRow.kind).where(EventRow.task_id == task_id)).all()
        assert kinds == ["task.removed"]
        assert session.scalars(sa.select(sa.func.sum(UsageRow.node_seconds))).one() == pytest.approx(100)
    assert usage.charge_ended(ctx) == 0
    assert events.since(ctx, user_id, 0)[-1].data == {"name": "gone", "jobs": [order.job_id]}
    assert [entry.object for entry in audit.entries(ctx, action="task.removed")[0]] == [task_id]
    # The agent may still speak of it.
    agent.tell(order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, log=b"late\n")
    assert ctx.streams.size(order.job_id, "log") == 0


def test_only_its_owner_removes_a_task_and_only_once_it_ended(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Any
) -> None:
    lab("alpha")
    task_id = launch(ctx, user_id, "live", project="lab")
    with pytest.raises(Conflict):
        removals.remove(ctx, user_id, task_id)
    tasks.cancel(ctx, user_id, task_id)
    with pytest.raises(Forbidden):
        removals.remove(ctx, other_id, task_id)
    ownership.change_task(ctx, user_id, task_id, visibility="private")
    with pytest.raises(NotFound):
        removals.remove(ctx, other_id, task_id)
    removals.remove(ctx, user_id, task_id)
