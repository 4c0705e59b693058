"""What tasks of a pool tell of others like them, while they run; on SQLite alone: no query is new. The agent is the
test, see test_pools.py."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.server.services.context import Context
from tests.contract.store.test_pools import Site

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def site(ctx: Context, user_id: str, clock: Any) -> Site:
    return Site(ctx, user_id, clock)


def test_a_task_that_runs_speaks_for_those_like_it(site: Site) -> None:
    """Same command, other numbers: the second knows from the first, which is not over, what more slots bring."""
    site.pool(nodes="2")
    site.hold(2)
    first = site.launch(run="python train.py --lr 0.1", name="first")
    other = site.launch(run="python other.py", name="other")
    site.round()
    order = site.order(first)
    assert order is not None and order.place is not None and order.place.slots == 1
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=1, step_s=1.2)
    second = site.launch(run="python train.py --lr 0.2", name="second")
    unlike = site.launch(run="python unlike.py", name="unlike")
    site.round()
    placed = {
        name: order.place.slots for name in (second, unlike, other) if (order := site.order(name)) and order.place
    }
    assert placed[second] > 1 and placed[unlike] == placed[other] == 1, placed


@pytest.mark.parametrize("command", ["python train.py --batch 64", "bash other.sh"], ids=["command", "name"])
def test_who_is_like_it_forbids_nothing(site: Site, command: str) -> None:
    """One like it has a batch of one sample, so it could not have two slots itself."""
    site.pool(nodes="1")
    site.hold()
    first = site.launch(run="python train.py --batch 1", name="train", resources={"accelerators": "A100:1"})
    site.round()
    order = site.order(first)
    assert order is not None
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=1, step_s=1.2, batch=1)
    second = site.launch(run=command, name="train", resources={"accelerators": "A100:2"})
    site.round()
    assert site.order(second) is not None, site.task(second).pending_reason


def test_a_name_alone_does_not_make_a_training_of_a_script(site: Site) -> None:
    site.pool(nodes="1")
    site.hold()
    first = site.launch(run="python train.py", name="same", resources={"accelerators": "A100:1"})
    site.round()
    order = site.order(first)
    assert order is not None
    site.run(order.job_id)
    site.measure(order.job_id, 100, slots=1, step_s=1.2)
    script = site.launch(run="bash preprocess.sh", name="same")
    site.round()
    order = site.order(script)
    assert order is not None and order.place is not None and order.place.slots == 1
