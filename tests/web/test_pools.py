"""Pools in a real browser: one is made, gets a node and a task, is changed and closed; an agent that is this test says
what a cluster would say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts
from diamond.core.home import ClientConfig
from diamond.core.states import JobState
from diamond.core.wire import DesiredState, JobOrder, JobReport, Report
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
FACTS = EndpointFacts(
    scheduler="slurm", hostname="login1", nodes=4, cpus_per_node=8, mem_bytes_per_node=2**34, holds_pools=True
)


class Cluster:
    """Speaks for the endpoint `frontier`; jobs run there when the test says so."""

    def __init__(self, service: Service) -> None:
        config = ClientConfig.load(service.home)
        assert config is not None
        body = {"name": "frontier", "token": True}
        mine = {"Authorization": f"Bearer {config.token}"}
        made = httpx.post(f"{service.url}/api/v1/endpoints", json=body, headers=mine, timeout=30)
        headers = {"Authorization": f"Bearer {made.json()['token']}"}
        self.http = httpx.Client(base_url=f"{service.url}/api/v1/agent", headers=headers, timeout=30)
        self._epoch = self._ask("POST", "/hello", json={"facts": encode(FACTS)}).json()["epoch"]

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        answer = self.http.request(method, path, **more)
        assert answer.status_code == 200, answer.text
        return answer

    def order(self, wanted: Callable[[JobOrder], bool]) -> JobOrder:
        """The next that is wanted, once it is there."""
        found: list[JobOrder] = []

        def there() -> bool:
            answer = self._ask("GET", "/desired", params={"epoch": self._epoch})
            found[:] = [order for order in decode(DesiredState, answer.json()).orders if wanted(order)]
            return bool(found)

        eventually(there, within_s=30, what="the server wants a job")
        return found[0]

    def runs(self, order: JobOrder, host: str) -> None:
        began = time.time()
        report = JobReport(job_id=order.job_id, state=JobState.RUNNING, hosts=(host,), started_at=began)
        self._ask("POST", "/reports", json=encode(Report(epoch=self._epoch, jobs=(report,))))


@pytest.fixture(scope="module")
def cluster(service: Service) -> Iterator[Cluster]:
    made = Cluster(service)
    yield made
    made.http.close()


def test_from_an_empty_page_to_a_pool_with_a_task_in_it(visit: Visit, cluster: Cluster) -> None:
    visitor = visit()
    visitor.allowed = ["status of 422"]  # what is wrong in the form, on purpose
    page = visitor.page
    page.goto("/pools")
    page.get_by_text("No pools yet.").wait_for()
    page.get_by_role("link", name="New pool").first.click()
    page.get_by_label("Endpoint").select_option("frontier")
    visitor.fill(Name="shared", Nodes_at_least="1", Nodes_at_most="2", Slots_of_a_node="many")
    visitor.press("Make the pool")
    page.get_by_text("Must be a whole number from 1 to 1024").wait_for()
    assert page.get_by_label("Name", exact=True).input_value() == "shared"
    visitor.fill(Slots_of_a_node="4")
    visitor.press("Make the pool")
    page.get_by_text("The pool is made.").wait_for()
    address = page.url.partition("?")[0]

    pilot = cluster.order(lambda order: order.pilot is not None)
    cluster.runs(pilot, "gpu01.frontier")
    now = page.get_by_role("table", name="Nodes of the pool, and whose their slots are")
    now.get_by_role("row", name="gpu01").get_by_text("4 slots free").wait_for()

    page.get_by_role("link", name="New task here").first.click()
    assert page.get_by_label("Pool", exact=True).input_value() == "shared"
    visitor.fill(Task_name="sweep", Command="sleep 300", Size_in_the_pool="2")
    visitor.press("Launch")
    page.wait_for_url("**/tasks/tsk_*")
    page.get_by_role("link", name="shared").wait_for()
    cluster.runs(cluster.order(lambda order: order.place is not None), "gpu01.frontier")
    page.get_by_text("2 slots, of 2", exact=True).wait_for()
    page.reload()  # the script is written with the job, which there was none of when the page came
    page.get_by_text("Job script").click()
    page.get_by_text("What is started inside the pool's own jobs.").wait_for()
    script = page.get_by_role("region", name="Job script").inner_text()
    assert "--ranks 2" in script and "unset DIAMOND_ENDS_AT" in script, "as it is written for two slots of a pilot"

    page.goto(address)
    now.get_by_role("row", name="gpu01").get_by_text("1, sweep: 2 slots; 2 slots free").wait_for()
    assert page.get_by_role("region", name="Decisions, the newest first").get_by_text("gets 2 slots").is_visible()
    visitor.check_looks()
    page.emulate_media(color_scheme="dark")
    visitor.check_accessible()

    page.get_by_role("link", name="Change").click()
    visitor.fill(Nodes_at_most="3")
    visitor.press("Save")
    page.get_by_text("The pool is changed.").wait_for()
    page.get_by_role("link", name="Close").click()
    page.get_by_text("asked to save their state and stop").wait_for()
    visitor.press("Close the pool")
    page.get_by_text("The pool is closed.").wait_for()
    assert page.get_by_role("link", name="New task here").count() == 0


def test_without_scripts(visit: Visit, cluster: Cluster) -> None:
    visitor = visit(scripts=False, width=400)
    page = visitor.page
    page.goto("/pools/new?endpoint=frontier")
    visitor.check_width()
    visitor.fill(Name="plain", Nodes_at_least="0")
    visitor.press("Make the pool")
    page.get_by_text("It holds no node while there is nothing to do.").wait_for()
    visitor.check_width()
    page.get_by_role("link", name="1 day").click()
    page.get_by_text("No task had slots in that time.").wait_for()
