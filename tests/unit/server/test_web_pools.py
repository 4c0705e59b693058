"""Pages of pools, with forms sent as a browser sends them: what they show, to whom, and what they refuse."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.endpoints import EndpointFacts, Gpu
from diamond.core.pools import PoolSpec
from diamond.core.wire import Hello
from diamond.server.services import (
    agents,
    endpoint_shares,
    endpoints,
    lifecycle,
    pool_history,
    pools,
    projects,
    tasks,
    users,
)
from diamond.server.services.context import Context
from diamond.server.store.models import TaskRow
from diamond.server.web import task_words
from diamond.server.web.composing import merged, shown
from diamond.server.web.pools import read_form
from testing import pool_rows
from testing.context import Clock

from .browsing import Browser, forms_in
from .test_web_sign_in import PASSWORD, Town, make_town

SAME = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
FACTS = EndpointFacts(
    scheduler="slurm", nodes=8, cpus_per_node=64, mem_bytes_per_node=2**38, gpus_per_node=(Gpu(model="A100", count=4),),
    holds_pools=True, allows_others=True,
)  # fmt: skip
NEW = {
    "endpoint": "here", "name": "p", "least": "1", "most": "2", "gpus": "", "gpu_type": "", "slots": "4", "cpus": "1",
    "memory": "", "walltime": "4h", "idle": "10m", "partition": "", "account": "", "qos": "",
}  # fmt: skip


@dataclass
class Place:
    """alice and bob in the project lab, at alice's endpoint; carol is in nothing. No rounds are run: nothing moves."""

    town: Town
    alice: str
    bob: str
    endpoint_id: str

    @property
    def ctx(self) -> Context:
        return self.town.ctx

    def as_(self, name: str, test: Callable[[Browser], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            browser = Browser(self.town.app)
            await browser.sign_in(name, PASSWORD)
            return await test(browser)

        return asyncio.run(whole())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    for town in make_town(tmp_path, people=("alice", "bob", "carol")):
        ctx = town.ctx
        alice, bob = (users.get(ctx, name).id for name in ("alice", "bob"))
        endpoint, _ = endpoints.create(ctx, alice, "here")
        agents.hello(ctx, endpoint.id, Hello(facts=FACTS))
        projects.create(ctx, alice, "lab")
        projects.set_member(ctx, alice, "lab", "bob", "member")
        endpoint_shares.share(ctx, alice, "lab", "here")
        yield Place(town, alice, bob, endpoint.id)


async def send(browser: Browser, page: str, action: str, fields: dict[str, str]) -> httpx.Response:
    form = forms_in((await browser.get(page)).text)[action]
    return await browser.http.post(action, data=form.fields | fields, headers=SAME)


def test_a_pool_is_made_changed_and_closed(place: Place) -> None:
    async def test(browser: Browser) -> None:
        empty = (await browser.get("/pools")).text
        assert "No pools yet" in empty and 'href="/pools/new"' in empty
        form = forms_in((await browser.get("/pools/new?endpoint=here")).text)["/pools/new"]
        assert form.fields | {"csrf": ""} == {
            "csrf": "", "name": "here-pool", "least": "1", "most": "4", "gpu_type": "A100", "gpus": "4", "slots": "",
            "cpus": "1", "memory": "", "walltime": "4h", "idle": "10m", "partition": "", "account": "", "qos": "",
        }  # fmt: skip
        made = await send(browser, "/pools/new", "/pools/new", {**NEW, "partition": "gpu", "project": "lab"})
        assert made.status_code == 303
        page = made.headers["location"]
        (pool,) = pools.list_pools(place.ctx, place.alice)
        assert page == f"/pools/{pool.id}?done=made" and pool.spec.slurm.partition == "gpu"
        assert pool.project == "lab" and pool.spec.nodes == "1..2" and pool.spec.slots == 4
        text = (await browser.get(page)).text
        assert "first nodes are being asked for" in text and "4 slots a node; 1 core each" in text
        where = f"/pools/{pool.id}/change"
        changed = await send(browser, where, where, {"most": "3", "idle": "15m"})
        assert changed.headers["location"] == f"/pools/{pool.id}?done=changed"
        spec = pools.get(place.ctx, place.alice, "p").spec
        assert (spec.nodes, spec.idle, spec.walltime) == ("1..3", 900, 14_400)
        wrong = await send(browser, where, where, {"walltime": "soon"})
        assert wrong.status_code == 422 and 'id="walltime-error"' in wrong.text and 'value="soon"' in wrong.text
        where = f"/pools/{pool.id}/close"
        assert "cannot be opened again" in (await browser.get(where)).text
        closed = await send(browser, where, where, {})
        assert closed.headers["location"] == f"/pools/{pool.id}?done=closed"
        assert "closed already" in (await browser.get(where)).text
        assert "No pools yet" in (await browser.get("/pools")).text
        assert pool.id in (await browser.get("/pools?closed=1")).text

    place.as_("alice", test)


WRONG = [
    ({"name": ""}, "name"),
    ({"name": "a\u202eb"}, "name"),
    ({"name": "n" * 200}, "name"),
    ({"endpoint": "nowhere"}, "endpoint"),
    ({"endpoint": ""}, "endpoint"),
    ({"least": "8", "most": "2"}, "most"),
    ({"least": "0", "most": "0"}, "most"),
    ({"least": "", "most": "1000000000"}, "most"),
    ({"most": "<b>"}, "most"),
    ({"slots": ""}, "slots"),
    ({"slots": "four"}, "slots"),
    ({"slots": "4", "gpus": "4"}, "slots"),
    ({"slots": "", "gpus": "many"}, "gpus"),
    ({"slots": "", "gpus": "1..4"}, "gpus"),
    ({"cpus": "-1"}, "cpus"),
    ({"memory": "32 bananas"}, "memory"),
    ({"walltime": "0"}, "walltime"),
    ({"idle": "a while"}, "idle"),
    ({"partition": "two words"}, "partition"),
    ({"project": "nothing"}, "project"),
]


def test_what_is_wrong_stands_beside_its_field(place: Place) -> None:
    async def test(browser: Browser) -> None:
        for given, field in WRONG:
            answer = await send(browser, "/pools/new", "/pools/new", {**NEW, **given})
            assert answer.status_code in (404, 413, 422), (given, answer.text)
            assert re.findall(r'class="error" id="(\w+)-error"', answer.text) == [field], given
            kept = forms_in(answer.text)["/pools/new"].fields
            assert all(kept.get(name, text) == text for name, text in given.items()), "what was typed stays"
        assert pools.list_pools(place.ctx, place.alice) == []

    place.as_("alice", test)


def test_one_number_of_nodes_is_both() -> None:
    assert read_form({"least": "", "most": "4"})["nodes"] == "4" and read_form({"least": "2"})["nodes"] == "2"
    assert read_form({}) == {} and read_form({"gpus": "0", "gpu_type": "A100"}) == {}
    assert read_form({"gpus": "2"}) == {"accelerators": "gpu:2"}


def busy(place: Place) -> str:
    made = pool_rows.busy_pool(place.ctx, place.alice, place.endpoint_id, place.bob)
    lab = next(one for one in projects.list_projects(place.ctx, place.alice) if one.name == "lab")
    with place.ctx.db.write() as session:
        row = pools.find(session, place.alice, made)
        row.project_id = lab.id
    return made


def test_the_page_of_a_busy_pool(place: Place) -> None:
    pool_id = busy(place)

    async def test(browser: Browser) -> None:
        page = (await browser.get(f"/pools/{pool_id}")).text
        for words in (
            "1 more node is asked for: the partition is full; others are before it.",
            "2, burgers-fno: 4 slots; 0 slots free",
            "3, lung-segmentation: 2 slots, moving; 5, solver &lt;b&gt;64&lt;/b&gt;: 2 slots; 0 slots free",
            "6, task 6 of another user: 3 slots; 1 slot free",
            "6,200 of 14,000 steps (44%)",
            "1.62×",
            "Shrinks from 3 to 2 GPUs; the others do more elsewhere.",
            "Stays as it is: it asks for one number.",
            "2 → 4 slots",
            "sooner than alone",
            "1.23×",
        ):
            assert words in page, words
        assert "secret name" not in page and "<b>64" not in page and " style=" not in page
        assert page.count("<svg") > 5 and page.count("</svg>") == page.count("<svg")
        listed = (await browser.get("/pools")).text
        assert "11 of 12 slots" in listed and "4 running, 1 waiting" in listed
        hour = (await browser.get(f"/pools/{pool_id}?span=1h")).text
        assert "<td>2 → 4 slots</td>" in page and "<td>2 → 4 slots</td>" not in hour, "what was before is cut off"
        assert (await browser.get(f"/pools/{pool_id}?span=%00<b>")).status_code == 200

    place.as_("alice", test)


def test_others_see_the_pool_and_only_their_own_tasks(place: Place) -> None:
    pool_id = busy(place)
    with place.ctx.db.read() as session:
        private = [row.id for row in session.query(TaskRow) if row.owner_id == place.alice]

    async def member(browser: Browser) -> None:
        page = (await browser.get(f"/pools/{pool_id}")).text
        assert "secret name" in page and "burgers-fno" not in page
        assert not [one for one in private if one in page]
        assert f"/pools/{pool_id}/change" not in page, "nothing is offered that would be refused"
        where = f"/pools/{pool_id}/close"
        assert (await send(browser, where, where, {})).status_code == 403

    async def stranger(browser: Browser) -> None:
        assert pool_id not in (await browser.get("/pools")).text
        for path in (f"/pools/{pool_id}", "/pools/a100-pool", f"/pools/{pool_id}/close", f"/live?topic=pool:{pool_id}"):
            assert (await browser.get(path)).status_code == 404, path

    place.as_("bob", member)
    place.as_("carol", stranger)


def test_history_is_what_jobs_had(place: Place) -> None:
    pool_id = busy(place)
    found = pool_history.read(place.ctx, place.alice, pool_id, 6 * 3600.0)
    assert found.now - found.since == pytest.approx(300 * 60, abs=60), "no longer than there was a pool"
    assert [who.name for who in found.tasks.values()][:2] == ["baseline-unet", "burgers-fno"]
    assert sum(stay.slots for stay in found.stays if stay.is_live) == 11 and len(found.holds) == 4
    assert found.actual.keys() == {1} and 0.5 < found.actual[1] < 1.5
    short = pool_history.read(place.ctx, place.alice, pool_id, 600.0)
    assert 1 not in short.tasks and min(short.tasks) == 2, "a task keeps its number"
    assert short.actual == {}
    pool = pools.get(place.ctx, place.bob, pool_id)
    theirs = pool_history.read(place.ctx, place.bob, pool_id, 6 * 3600.0)
    assert [theirs.number_of(task) for task in pool.tasks] == [2, 3, 5, 6, 7, 4, 1]


def test_the_actual_fairness_of_a_task_alone_is_one(place: Place) -> None:
    """One task on all slots of one node all its time, measured at that size: as long as it would take alone."""
    ctx = replace(place.ctx, clock=Clock())
    spec = PoolSpec.parse({"name": "q", "endpoint": "here", "slots": 4})
    made = pool_rows.Builder(ctx, place.alice, place.endpoint_id, spec, made=100)
    made.begin()
    node = made.pilot("n1", 90)
    task = made.task("alone", "SUCCEEDED", 60, ended=10)
    steps = 50 * 60 * 2  # 128 samples a second in batches of 64
    made.measure(made.stay(task, {node: 4}, 60, end=10), steps, world=4)
    assert pool_history.read(ctx, place.alice, made.id, 1e5).actual == {1: pytest.approx(1.0)}


def test_the_page_of_a_task_says_what_it_has(place: Place) -> None:
    pool_id = busy(place)
    named = {task.name: task.task_id for task in pools.get(place.ctx, place.alice, pool_id).tasks}
    with place.ctx.db.write() as session:
        row = session.get_one(TaskRow, named["lung-segmentation"])
        lifecycle.record(session, row, "task.resizing", place.ctx.clock(), {"from": 2, "to": 1})

    async def test(browser: Browser) -> None:
        page = (await browser.get(f"/tasks/{named['lung-segmentation']}")).text
        assert f'href="/pools/{pool_id}"' in page and "2 slots, of 1..4" in page and "<strong>Moving:" in page
        assert "It goes on with 1 slots instead of 2." in page and f"pool:{pool_id}" in page
        waits = (await browser.get(f"/tasks/{named['waits-its-turn']}")).text
        assert "no slots yet, of 4..8" in waits and "It needs 4 slots at once" in waits
        ended = (await browser.get(f"/tasks/{named['baseline-unet']}")).text
        assert f'href="/pools/{pool_id}"' in ended and "<dt>Slots</dt>" not in ended

    place.as_("alice", test)
    assert task_words._step("task.resizing", {"from": 2, "to": 0})[1] == "It waits until there is room again."


def test_a_task_is_launched_into_a_pool(place: Place) -> None:
    pools.create(place.ctx, place.alice, {"name": "mine", "endpoint": "here", "slots": 4, "nodes": "1..2"})
    pools.create(place.ctx, place.bob, {"name": "mine", "endpoint": "here", "slots": 4, "project": "lab"})

    async def test(browser: Browser) -> None:
        page = (await browser.get("/compose?pool=mine")).text
        assert '<option value="mine" selected>mine (here, 0 of 0 slots free)</option>' in page
        assert "of 0 slots free, bob&#39;s)" in page and 'value="pol_' in page, "the same name, another's: by id"
        asked = {
            "pool": "mine",
            "run": "true",
            "size": "1..16",
            "type": "command",
            "do": "plan",
            "base": "",
            "yaml": "",
        }
        plan = (await send(browser, "/compose", "/compose", asked)).text
        assert "As soon as the pool has room for it." in plan and "Diamond picks from 1 to 8 slots" in plan
        for wrong, error in (
            ({"size": "9..16"}, "size"), ({"size": "none"}, "size"), ({"size": "1..4", "gpus": "1"}, "size"),
            ({"pool": "gone"}, "pool"), ({"pool": ""}, "size"), ({"num_nodes": "2"}, "num_nodes"),
        ):  # fmt: skip
            answer = (await send(browser, "/compose", "/compose", asked | wrong)).text
            assert re.search(rf'id="{error}-error">', answer), (wrong, answer[:3000])
        sent = await send(browser, "/compose", "/compose", asked | {"do": "launch", "size": ""})
        assert sent.status_code == 303, sent.text
        made = tasks.get(place.ctx, place.alice, sent.headers["location"].removeprefix("/tasks/"))
        assert made.spec is not None and made.spec.pool == "mine" and made.spec.resources.slots is None

    place.as_("alice", test)


def test_form_and_text_of_a_task_in_a_pool() -> None:
    raw = {"run": "x", "pool": "p", "resources": {"slots": 4}}
    assert (shown(raw)["pool"], shown(raw)["size"]) == ("p", "4")
    assert merged(raw, shown(raw)) == raw, "what nobody touched stays as it is written"
    assert merged(raw, shown(raw) | {"pool": "", "size": ""}) == {"run": "x"}
    assert merged({}, {"pool": "q", "size": "1..8"}) == {"pool": "q", "resources": {"slots": "1..8"}}
