"""What people are told of pools and of tasks in them; on every database. The agent is the test, see test_pools.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import undefer

from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState
from diamond.planner.pools.pace import ENDING_S, HANDOVER_S
from diamond.server.services import ownership, pool_demands, pool_history, pool_rounds, pool_state, pools, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import JobRow
from diamond.server.store.pool_models import PoolRow
from diamond.server.web import pool_drawing
from tests.contract.store.test_pools import HOUR, Site


@pytest.fixture
def site(ctx: Context, user_id: str, clock: Any) -> Site:
    return Site(ctx, user_id, clock)


# ---- before a task is launched ---------------------------------------------------------------------------------------


def dry_run(site: Site, **fields: Any) -> dict[str, Any]:
    return tasks.plan(site.ctx, site.user_id, {"run": "python train.py", "pool": "p"} | fields)


@pytest.mark.parametrize(
    ("fields", "said", "shown"),
    [
        ({"resources": {"accelerators": "A100:1..8"}}, "Diamond picks from 1 to 8 slots", "for 1 slot"),
        ({"resources": {"accelerators": "A100:6..64"}}, "Diamond picks from 6 to 8 slots", "for 8 slots"),
        ({"resources": {"accelerators": "A100:2"}}, "it has 2 slots from its beginning to its end", "for 2 slots"),
        ({"resources": {"accelerators": "A100:4"}, "num_nodes": 2}, "it has 8 slots from", "for 8 slots"),
        ({}, "one slot at first, then up to the pool's 8", "for 1 slot"),
    ],
)
def test_a_dry_run_tells_of_the_pool(site: Site, fields: dict[str, Any], said: str, shown: str) -> None:
    site.pool(walltime="2h")
    plan = dry_run(site, **fields)
    assert plan["endpoint"] == site.name and not plan["others"]
    assert plan["why"][0].startswith("in pool p: ") and said in plan["why"][0]
    assert plan["why"][1] == "the pool may hold 1..2 nodes of 4 slots each; now none is held"
    assert plan["why"][2].endswith(shown)
    site.hold()
    assert dry_run(site, **fields)["why"][1].endswith("now 4 of 4 slots are free")


def test_the_script_of_a_dry_run_is_one_for_pilots(site: Site) -> None:
    """The task has no job in Slurm's queue: neither a partition, nor its walltime, nor Slurm's directives."""
    site.pool()
    plan = dry_run(site, resources={"accelerators": "A100:8..8"}, max_duration=24 * HOUR)
    assert (plan["partition"], plan["time_limit_s"], plan["jobs"]) == ("", 24 * HOUR, 1)
    assert '--jobid="$DIAMOND_PILOT"' in plan["script"] and "#SBATCH" not in plan["script"]
    assert plan["envs"]["DIAMOND_NUM_NODES"] == "2"
    own = tasks.plan(site.ctx, site.user_id, {"run": "x", "num_nodes": 2, "max_duration": 24 * HOUR})
    assert (own["partition"], own["jobs"]) == ("gpu", 3) and "DIAMOND_PILOT" not in own["script"]


# ---- while it waits --------------------------------------------------------------------------------------------------


def test_a_pool_says_that_its_pilots_fail_and_when_it_asks_again(site: Site) -> None:
    site.pool(nodes="1")
    site.round()
    (pilot,) = site.pilots()
    site.run(pilot.job_id)
    site.tell(
        pilot.job_id, JobState.FAILED, reason=Reason.LAUNCH_FAILED, detail="no such account", ended_at=site.clock()
    )
    pool_rounds.run(site.ctx)
    site.clock.advance(4)
    note = pools.get(site.ctx, site.user_id, "p").note
    assert note == (
        "1 more node is wanted: the last job of the pool was over at once (LAUNCH_FAILED: no such account), so Diamond "
        "has waited for 4s and asks again in 6s"
    )
    assert pools.list_pools(site.ctx, site.user_id)[0].note == note
    site.clock.advance(6)
    pool_rounds.run(site.ctx)
    assert pools.get(site.ctx, site.user_id, "p").note.startswith("1 more node is asked for")
    (pilot,) = site.pilots()
    site.run(pilot.job_id)
    assert pools.get(site.ctx, site.user_id, "p").note == ""


def test_nobody_is_waited_for_without_end_after_an_update(site: Site) -> None:
    """A server that did not note when it asked a task to stop left this behind."""
    site.pool(nodes="1")
    site.hold()
    task_id = site.launch(resources={"accelerators": "A100:1..4"})
    site.round()
    order = site.order(task_id)
    assert order is not None
    site.run(order.job_id)
    with site.ctx.db.write() as session:
        session.get_one(JobRow, order.job_id).desired = Desired.YIELD.value
        row = pools.find(session, site.user_id, "p")
        row.plan = {name: value for name, value in row.plan.items() if name != "asked"}

    def is_waited_for() -> bool:
        with site.ctx.db.read() as session:
            row = pools.find(session, site.user_id, "p")
            return pool_rounds._in_transit(pool_state.read(session, row), site.clock())

    assert is_waited_for()
    site.clock.advance(pool_rounds.PATIENCE_S + 1)
    assert not is_waited_for()


# ---- whose tasks they are --------------------------------------------------------------------------------------------


def test_hidden_tasks_are_told_apart_by_their_numbers(
    site: Site, user_id: str, other_id: str, lab: Callable[..., None]
) -> None:
    """Also where they were launched in the same moment; and each keeps its number when others end."""
    lab(site.name)
    site.pool(nodes="1", project="lab")
    site.hold()
    mine = {"resources": {"accelerators": "A100:1"}, "project": "lab"}
    first, second, third = (site.launch(**mine, name=name) for name in ("secret-1", "secret-2", "shown"))
    ownership.change_task(site.ctx, user_id, third, visibility="project")
    for task_id in (first, second):
        ownership.change_task(site.ctx, user_id, task_id, visibility="private")
    site.round()
    told = pools.get(site.ctx, other_id, "p")
    hidden = ["task 1 of another user", "task 2 of another user"]
    assert [(one.number, one.name, one.task_id) for one in told.tasks] == [
        (1, hidden[0], ""), (2, hidden[1], ""), (3, "shown", third)
    ]  # fmt: skip
    assert {one.number: one.task_name for one in told.decisions} == {1: hidden[0], 2: hidden[1], 3: "shown"}
    seen = pool_history.read(site.ctx, other_id, "p", 600.0)
    assert [seen.number_of(one) for one in told.tasks] == [1, 2, 3]
    assert "secret" not in str(told) + str(seen)
    tasks.cancel(site.ctx, user_id, first)
    assert {one.number for one in pools.get(site.ctx, other_id, "p").tasks} == {1, 2, 3}


# ---- clocks that are ahead -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_older", [False, True])
def test_a_clock_that_is_ahead_makes_no_absurd_durations(site: Site, is_older: bool) -> None:
    """Of nodes, ten minutes. `is_older`: as rows are that were written before such clocks were noticed."""
    ahead = site.clock() + 600
    site.pool(nodes="1", walltime="1h")
    site.round()
    (pilot,) = site.pilots()
    site.tell(pilot.job_id, JobState.RUNNING, started_at=ahead, hosts=("n1",))
    task_id = site.launch(resources={"accelerators": "A100:1..2"})
    site.round()
    order = site.order(task_id)
    assert order is not None
    began_at = site.clock()
    site.tell(order.job_id, JobState.RUNNING, started_at=ahead, hosts=("n1",))
    if is_older:
        with site.ctx.db.write() as session:
            for job_id in (pilot.job_id, order.job_id):
                session.get_one(JobRow, job_id).started_at = ahead
    site.clock.advance(20)
    now = site.clock()
    found = pools.get(site.ctx, site.user_id, "p")
    (held,) = found.pilots
    assert held.started_at is not None and held.started_at <= now
    assert is_older or held.ends_at == held.started_at + HOUR < now + HOUR
    seen = pool_history.read(site.ctx, site.user_id, "p", 6 * HOUR)
    assert all(one.started_at is not None and seen.since <= one.started_at <= now for one in (*seen.stays, *seen.holds))
    rects = [rect for band in pool_drawing.bands(seen) for rect in band.rects]
    assert rects and all(0 <= rect.x <= 100 and rect.width >= 0 and " -" not in rect.title for rect in rects)
    with site.ctx.db.read() as session:
        state = pool_state.read(session, session.get_one(PoolRow, found.id, options=[undefer(PoolRow.profiles)]))
    (demand,) = pool_demands.demands(state, pool_demands.known_of(site.ctx, state), now)
    expected = (0.0, 0.0) if is_older else (now - began_at, order.place.slots * (now - began_at) if order.place else 0)
    assert (demand.running_s, demand.attained_s) == pytest.approx(expected)


def test_what_a_move_costs_is_not_the_lead_of_a_clock(site: Site) -> None:
    """What a training says of when it began is by the clock of its node."""
    site.pool(nodes="1")
    site.hold()
    task_id = site.launch(resources={"accelerators": "A100:1..2"})
    site.round()
    order = site.order(task_id)
    assert order is not None
    site.run(order.job_id)
    site.clock.advance(20)
    site.measure(order.job_id, 10, slots=1, step_s=0.5, ahead_s=600.0)
    with site.ctx.db.read() as session:
        row = pools.find(session, site.user_id, "p")
        known = pool_demands.known_of(site.ctx, pool_state.read(session, row))[task_id]
    started_s = known.restart_s - ENDING_S - HANDOVER_S if known.restart_s is not None else None
    assert started_s == pytest.approx(15.0), "its first ten steps took five of the twenty seconds"


def test_that_a_task_makes_room_is_told_as_a_decision_with_its_reason(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    first = site.launch(resources={"accelerators": "A100:1..4"}, name="first")
    site.round()
    order = site.order(first)
    assert order is not None and order.place is not None
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=order.place.slots, step_s=1.2 / order.place.slots)
    site.clock.advance(30)
    urgent = site.launch(resources={"accelerators": "A100:4"}, name="urgent", priority=10)
    site.round()
    asked = site.order(first)
    assert asked is not None and asked.desired is Desired.YIELD and site.order(urgent) is None
    newest = pools.get(site.ctx, site.user_id, "p").decisions[0]
    assert (newest.task_name, newest.slots, newest.before) == ("first", 0, order.place.slots)
    assert "tasks of higher priority come first" in newest.reason
    site.end(order.job_id, Reason.CONTINUED)
    site.round()
    newest = pools.get(site.ctx, site.user_id, "p").decisions[0]
    assert (newest.task_name, newest.slots, newest.before) == ("urgent", 4, 0)


def test_a_task_that_a_closed_pool_leaves_over_says_so_and_not_that_it_is_due(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    task = site.launch(resources={"accelerators": "A100:1..4"})
    site.round()
    order = site.order(task)
    assert order is not None and order.place is not None
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=order.place.slots, step_s=1.2)
    pools.close(site.ctx, site.user_id, "p")
    site.round()
    site.end(order.job_id, Reason.CONTINUED)
    site.round()
    left = site.task(task)
    assert left.next_attempt_at is None and left.pending_reason is not None and "is closed" in left.pending_reason


def test_a_task_that_leaves_its_size_open_is_told_with_what_it_may_have(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    site.launch()
    site.round()
    (task,) = pools.get(site.ctx, site.user_id, "p").tasks
    assert (task.slots, task.least, task.most, task.resizable, task.step) == (1, 1, 4, False, None)
