"""What was done to pools to break them; on every database. The agent is the test, see test_pools.py."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.core.errors import InvalidInput
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.planner.pools.pace import ROUND_S
from diamond.server.services import pools
from diamond.server.services.context import Context
from diamond.server.store.models import UserRow
from diamond.server.store.pool_models import PoolRow
from tests.contract.store.test_pools import Site


@pytest.fixture
def site(ctx: Context, user_id: str, clock: Any) -> Site:
    return Site(ctx, user_id, clock)


def test_slots_that_would_lie_unevenly_hold_nobody_up(site: Site) -> None:
    """Fixed sizes of 3 and 2 leave 1 and 2 free: a third task of 3 waits, and one of 1 does not wait for it."""
    site.pool(nodes="2")
    site.hold(2)
    for size in (3, 2):
        task_id = site.launch(resources={"accelerators": f"A100:{size}"})
        site.round()
        order = site.order(task_id)
        assert order is not None
        site.run(order.job_id)
    large = site.launch(resources={"accelerators": "A100:3"})
    small = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    assert site.order(large) is None
    assert site.order(small) is not None
    with pytest.raises(InvalidInput, match="evenly"):
        site.launch(resources={"accelerators": "A100:6"})


def test_pilots_that_fail_at_once_are_asked_for_ever_later(site: Site) -> None:
    site.pool(nodes="1")
    asked = 0
    for _ in range(40):
        site.round()
        for order in site.pilots():
            asked += 1
            site.run(order.job_id)
            site.end(order.job_id, Reason.EXIT_NONZERO)
    assert 2 <= asked <= 8, asked


def test_pilots_that_should_be_over_are_not_replaced_without_end(site: Site) -> None:
    site.pool(nodes="1", walltime="10m")
    site.hold()
    for _ in range(10):
        site.clock.advance(700)
        site.round()
        for order in site.pilots():
            site.tell(order.job_id, JobState.RUNNING, started_at=site.clock() - 650, hosts=("n1",))
    assert len(site.pilots()) <= 2


def test_a_pool_ends_with_its_owners_account(site: Site) -> None:
    site.pool()
    site.hold()
    with site.ctx.db.write() as session:
        session.get_one(UserRow, site.user_id).disabled_at = site.clock()
    site.round()
    with site.ctx.db.read() as session:
        assert pools.find(session, site.user_id, "p").closed_at is not None


def test_one_pools_trouble_is_not_the_others(site: Site) -> None:
    site.pool(name="broken", nodes="1")
    site.pool(name="p", nodes="1")
    site.round()
    with site.ctx.db.write() as session:
        row = pools.find(session, site.user_id, "broken")
        session.get_one(PoolRow, row.id).plan = {"at": "never", "placed": 7}
    for order in site.pilots():
        site.run(order.job_id)
    site.clock.advance(ROUND_S)
    site.round()
    task_id = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    assert site.order(task_id) is not None


def test_an_ending_node_is_used_until_the_last_minute(site: Site) -> None:
    """The next pilot may be waiting for this very node."""
    site.pool(nodes="1", walltime="1h")
    (pilot,) = site.hold()
    site.clock.advance(0.9 * 3600)
    early = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    assert len(site.pilots()) == 2, "the next one is asked for"
    order = site.order(early)
    assert order is not None and order.place is not None
    assert order.place.nodes[0].pilot == pilot.job_id
    site.clock.advance(0.1 * 3600 - 50)
    late = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    assert site.order(late) is None


@pytest.mark.parametrize(
    ("said", "kept"), [(3, 3), (255, 255), (256, None), (2**40, None), (-(2**63), None), (-1, None)]
)
def test_an_exit_status_that_cannot_be_is_not_kept(site: Site, said: int, kept: int | None) -> None:
    """PostgreSQL would refuse it, and with it all else that the report says."""
    site.pool(nodes="1")
    site.hold()
    task_id = site.launch(resources={"accelerators": "A100:1"})
    site.round()
    order = site.order(task_id)
    assert order is not None
    site.run(order.job_id)
    site.tell(order.job_id, JobState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=said, signal=said)
    ended = site.task(task_id)
    assert (ended.state, ended.exit_code, ended.jobs[0].exit_code) == (TaskState.FAILED, kept, kept)
