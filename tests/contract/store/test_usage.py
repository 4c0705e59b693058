"""GPU-hours: counted exactly, once, and quickly."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.quotas import Limits, Use
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.server.services import planning, quotas, tasks, usage
from diamond.server.services.context import Context
from diamond.server.store.identity_models import UsageRow
from diamond.server.store.models import JobRow, TaskRow
from testing.context import Clock
from testing.quotas import DECEMBER, HOUR, World, at_once, gpu_tasks


@pytest.fixture
def world(ctx: Context, clock: Clock, user_id: str) -> World:
    return World(ctx, clock, user_id)


# ---- GPU-hours -------------------------------------------------------------------------------------------------------


def test_gpu_hours_are_refused_before_they_are_used(world: World) -> None:
    world.limit(gpu_hours=10)
    task = world.launch(**gpu_tasks(1, 4, max_duration="2h"))
    error = world.refused(lambda: world.launch(**gpu_tasks(1, 4, max_duration="3h")))
    assert error.message == ("project pde may use 10 GPU-hours a month and has used 0; this task may use 12")
    assert error.field == "max_duration"
    # Without max_duration, what the partition allows one job counts: an hour.
    error = world.refused(lambda: world.launch(**gpu_tasks(3, 4)))
    assert "this task may use 12" in error.message
    world.launch()  # needs no GPU
    world.run(task)
    world.clock.advance(1.5 * HOUR)
    assert world.used().gpu_hours == pytest.approx(6.0)
    error = world.refused(lambda: world.launch(**gpu_tasks(2, 4, max_duration="1h")))
    assert error.message.endswith("has used 6; this task may use 8")
    world.clock.advance(1.5 * HOUR)  # it goes on, though the limit is passed
    error = world.refused(lambda: world.launch(**gpu_tasks()))
    assert error.message == "project pde may use 10 GPU-hours a month and has used 12"
    assert "they renew on 1 December (UTC)" in error.hint


def test_a_chain_waits_for_hours_and_goes_on_when_the_month_renews(world: World) -> None:
    world.limit(gpu_hours=100)
    task = world.launch(**gpu_tasks(1, 4, max_duration="5h"))
    world.limit(gpu_hours=3)
    world.run(task)  # not out of hours yet: the next link is asked for
    assert len(world.task(task).jobs) == 2
    tasks.cancel(world.ctx, world.users["alice"], task.id)
    task = world.launch(**gpu_tasks(1, 1, max_duration="3h"))
    world.limit(gpu_hours=0)
    world.run(task)
    assert len(world.task(task).jobs) == 1  # nothing is queued ahead
    world.clock.advance(HOUR)
    world.end(task, Reason.CONTINUED)
    planning.run_due(world.ctx)
    stands = world.task(task)
    assert stands.state is TaskState.PENDING
    assert "GPU-hours of this month; it goes on by itself on 1 December (UTC)" in stands.pending_reason
    world.limit(gpu_hours=3)
    world.clock.now = DECEMBER
    planning.run_due(world.ctx)
    assert world.task(task).state is TaskState.QUEUED


def test_a_retry_waits_for_hours(world: World) -> None:
    world.limit(gpu_hours=4)
    task = world.launch(**gpu_tasks(1, 4, retry={"max_retries": 2}))
    world.run(task)
    world.clock.advance(HOUR)
    world.end(task, Reason.NODE_FAIL)
    world.clock.advance(60)
    planning.run_due(world.ctx)
    assert "has used 4 of 4 GPU-hours" in world.task(task).pending_reason
    world.limit(gpu_hours=5)
    planning.run_due(world.ctx)
    assert world.task(task).state is TaskState.QUEUED


def test_a_job_across_the_end_of_a_month_counts_in_each_for_its_part(world: World) -> None:
    world.clock.now = DECEMBER - HOUR
    task = world.launch(**gpu_tasks(1, 4))
    world.run(task)
    world.clock.now = DECEMBER + HOUR / 2
    for _ in range(2):  # while it runs, and when it is over
        assert world.used().gpu_hours == pytest.approx(2.0)
        if _ == 0:
            world.end(task)
            planning.run_due(world.ctx)
    world.clock.now = DECEMBER - 1
    assert world.used().gpu_hours == pytest.approx(4.0)


def test_use_is_exact_at_every_moment_and_counted_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    for number in range(7):
        task = world.launch("alice" if number % 2 else "bob", **gpu_tasks(1, 1 + number % 4))
        world.run(task)
        ended.append(task)
    world.clock.advance(HOUR)
    for task in ended:
        world.end(task)
    expected = sum(1 + number % 4 for number in range(7))
    assert world.used().gpu_hours == pytest.approx(expected)

    class Crash(Exception):
        pass

    def crash(point: str) -> None:
        raise Crash(point)

    with monkeypatch.context() as patch:
        patch.setattr(usage, "fault_point", crash)
        with pytest.raises(Crash):
            usage.charge_ended(world.ctx)
    assert world.used().gpu_hours == pytest.approx(expected)
    counts = at_once([lambda: usage.charge_ended(world.ctx)] * 4)
    assert sum(counts) == 7
    assert world.used().gpu_hours == pytest.approx(expected)
    assert usage.charge_ended(world.ctx) == 0
    with world.ctx.db.read() as session:
        rows = session.execute(sa.select(UsageRow.user_id, UsageRow.gpu_seconds, UsageRow.node_seconds)).all()
    alice, bob = world.users["alice"], world.users["bob"]
    assert {row[0]: (round(row[1]), round(row[2])) for row in rows} == {
        alice: (8 * 3600, 3 * 3600),
        bob: (8 * 3600, 4 * 3600),
    }
    both = world.used("user", "alice").gpu_hours + world.used("user", "bob").gpu_hours
    assert both == pytest.approx(expected)


def test_an_endpoints_clock_cannot_charge_more_than_passed(world: World) -> None:
    task = world.launch(**gpu_tasks(1, 4))
    world.tell(task, JobState.RUNNING, started_at=world.clock() - 1000 * HOUR)
    world.clock.advance(HOUR)
    world.tell(task, JobState.SUCCEEDED, reason=Reason.COMPLETED, ended_at=world.clock() + 1000 * HOUR)
    assert world.used().gpu_hours == pytest.approx(4.0)
    usage.charge_ended(world.ctx)
    assert world.used().gpu_hours == pytest.approx(4.0)


# ---- seen ------------------------------------------------------------------------------------------------------------


def test_people_see_how_they_and_their_projects_stand(world: World) -> None:
    world.limit(nodes=8, gpu_hours=100)
    task = world.launch("alice", **gpu_tasks(2, 2))
    world.run(task)
    world.clock.advance(HOUR)
    mine, pde = quotas.list_quotas(world.ctx, world.users["bob"])
    assert (mine.kind, mine.name, mine.used, mine.limits) == ("user", "bob", Use(), Limits())
    assert (pde.kind, pde.name, pde.limits, pde.own) == ("project", "pde", Limits(nodes=8, gpu_hours=100.0), True)
    assert pde.used == Use(tasks=1, nodes=2, gpus=4, gpu_hours=pytest.approx(4.0))  # type: ignore[arg-type]
    assert pde.left == {"nodes": 6, "gpu_hours": pytest.approx(96.0)}
    assert pde.renews_at == DECEMBER
    assert [one.name for one in quotas.list_quotas(world.ctx, world.users["carol"])] == ["carol"]


def test_use_is_added_up_quickly_among_a_hundred_thousand_finished_jobs(world: World) -> None:
    done = world.launch("alice", **gpu_tasks())
    world.run(done)
    world.end(done)
    usage.charge_ended(world.ctx)
    with world.ctx.db.write() as session:
        _multiply(session, TaskRow.__table__, done.id, {"id": "'tsk_x' || i"})
        one = world.task(done).jobs[0].id
        _multiply(session, JobRow.__table__, one, {"id": "'job_x' || i", "task_id": "'tsk_x' || i"})
        if not world.ctx.db.is_sqlite:
            session.execute(sa.text("ANALYZE"))  # as the server does by itself
    for _ in range(20):
        world.launch("alice", **gpu_tasks())
    for whose in (usage.of_user(world.users["alice"]), usage.of_project(world.project)):
        with world.ctx.db.read() as session:
            best = 1.0
            for _ in range(100):  # what else the machine does is not ours to measure
                began = time.perf_counter()
                found = usage.use(session, whose, world.clock())
                best = min(best, time.perf_counter() - began)
                if best < 0.02:
                    break
        assert (found.tasks, found.nodes, found.gpus) == (20, 20, 80)
        assert best < 0.02


def _multiply(session: Any, table: Any, row_id: str, changed: dict[str, str]) -> None:
    """A hundred thousand more of one row."""
    columns = [f'"{column.name}"' for column in table.columns]
    values = [changed.get(column.name, f'"{column.name}"') for column in table.columns]
    session.execute(
        sa.text(
            f"INSERT INTO {table.name} ({', '.join(columns)}) "
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) "
            f"SELECT {', '.join(values)} FROM {table.name}, n WHERE id = :row_id"
        ),
        {"row_id": row_id},
    )
