"""The dashboard and the front door, in a real browser over a real service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diamond.core.tasks import TaskSpec
from testing import people
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
HOSTILE = '<img src=x onerror="alert(1)"> \u05e9\u05dc\u05d5\u05dd'


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Accounts: alice administers, bob was invited; nobody has an endpoint."""
    with Service(tmp_path_factory.mktemp("team") / "home", multi_user="1") as running:
        yield running


@pytest.fixture
def come(chromium: Any, team: Service) -> Iterator[Visit]:
    visitors: list[Visitor] = []

    def visitor(**how: Any) -> Visitor:
        visitors.append(Visitor(chromium, team.url, **how))
        return visitors[-1]

    yield visitor
    for one in visitors:
        one.leave()


def launch(service: Service, run: str, name: str) -> str:
    with service.client() as client:
        return client.tasks.create(TaskSpec.parse({"name": name, "run": run})).id


def ended(service: Service, task_id: str) -> None:
    with service.client() as client:
        eventually(lambda: client.tasks.get(task_id).state.is_final, within_s=60, what="the task ends")


def reads(visitor: Visitor, name: str, number: str) -> None:
    """The figure of that name becomes this number."""
    visitor.page.get_by_role("link", name=f"{name} {number}", exact=True).wait_for()


def test_the_front_door_leads_in(visit: Visit) -> None:
    visitor = visit(width=400)
    visitor.page.goto("/")
    assert "any model" in visitor.page.get_by_role("heading", level=1).inner_text()
    visitor.check_accessible()
    visitor.check_width()
    visitor.page.get_by_role("link", name="Open the dashboard").click()
    visitor.page.wait_for_url("**/dashboard")
    visitor.page.goto("/")
    visitor.page.wait_for_url("**/dashboard")


def test_a_newcomer_is_led_and_sees_work_happen(visit: Visit, service: Service) -> None:
    """An empty dashboard fills itself, without being reloaded."""
    visitor = visit()
    page = visitor.page
    page.goto("/dashboard")
    guide = page.get_by_role("region", name="Getting started")
    assert "1 of 3 done" in guide.inner_text(), "this machine is connected already"
    assert guide.get_by_role("link", name="Compose a task").get_attribute("href") == "/compose"
    assert page.get_by_text("Nothing: no failures").is_visible()
    reads(visitor, "Succeeded", "0")
    page.evaluate("window.sameDocument = true")

    ended(service, launch(service, "echo hello", "first"))
    recent = page.get_by_role("region", name="Recent activity")
    recent.get_by_text("succeeded").wait_for()
    assert recent.get_by_role("link", name="first").count() == 1, "only what is newest of it"
    reads(visitor, "Succeeded", "1")
    guide.get_by_text("2 of 3 done").wait_for()

    failed = launch(service, "exit 3", HOSTILE)
    ended(service, failed)
    attention = page.get_by_role("region", name="Needs attention")
    link = attention.get_by_role("link", name=HOSTILE[:10])
    link.wait_for()
    assert link.inner_text() == HOSTILE, "shown, not executed"
    assert link.get_attribute("href") == f"/tasks/{failed}"
    assert "exit code 3" in attention.inner_text()
    reads(visitor, "Failed", "1")

    running = launch(service, "sleep 60", "long")
    reads(visitor, "Running", "1")
    page.get_by_role("region", name="Endpoints").get_by_text("1 running, 0 queued").wait_for(timeout=45_000)
    assert page.evaluate("window.sameDocument"), "all that happened in the page that was opened"
    visitor.check_accessible()
    with service.client() as client:
        client.tasks.cancel(running)
    ended(service, running)

    ended(service, launch(service, "true", HOSTILE))
    attention.get_by_text("Nothing: no failures").wait_for()


def test_figures_lead_to_the_tasks_they_count(visit: Visit) -> None:
    visitor = visit(scripts=False)
    visitor.page.goto("/dashboard")
    hrefs = [
        visitor.page.get_by_role("link", name=name).first.get_attribute("href")
        for name in ("Running", "Waiting", "Succeeded", "Failed")
    ]
    assert hrefs == [
        f"/tasks?state={states}" for states in ("RUNNING,FINISHING", "PENDING,QUEUED", "SUCCEEDED", "FAILED")
    ]
    assert visitor.page.get_by_role("link", name="New task").get_attribute("href") == "/compose"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280, 1600])
def test_everybody_can_read_it(visit: Visit, dark: bool, width: int) -> None:
    visitor = visit(dark=dark, width=width)
    visitor.page.goto("/dashboard")
    visitor.check_accessible()
    visitor.check_width()


def test_an_endpoint_that_is_gone_needs_attention(visit: Visit, service: Service) -> None:
    visitor = visit()
    visitor.page.goto("/dashboard")
    attention = visitor.page.get_by_role("region", name="Needs attention")
    assert service.agent is not None
    service.agent.terminate()
    service.agent.wait(timeout=20)
    try:
        attention.get_by_text("is offline").wait_for()
        assert attention.get_by_role("link", name="local").get_attribute("href") == "/endpoints/local"
    finally:
        service.start_agent()
        service.wait_online()
    attention.get_by_text("is offline").wait_for(state="detached")


def test_with_accounts_the_door_offers_the_ways_in(come: Visit, team: Service) -> None:
    visitor = come()
    visitor.page.goto("/")
    assert visitor.page.get_by_role("link", name="Use your invitation").is_visible()
    visitor.check_accessible()
    visitor.page.get_by_role("link", name="Sign in with a password").click()
    visitor.fill(User_name="alice", Password=people.PASSWORD)
    visitor.press("Sign in")
    visitor.page.wait_for_url("**/dashboard")
    assert visitor.page.get_by_role("link", name="Add an endpoint").first.is_visible()
    assert "0 of 4 done" in visitor.page.get_by_role("region", name="Getting started").inner_text()
    assert visitor.page.get_by_role("link", name="Invite people").get_attribute("href") == "/users"
    visitor.check_accessible()
    config = _config(team)
    people.invite(config, "bob")
    visitor.page.reload()
    assert "1 of 4 done" in visitor.page.get_by_role("region", name="Getting started").inner_text()
    bob = come(dark=True)
    bob.sign_in("bob")
    assert "0 of 3 done" in bob.page.get_by_role("region", name="Getting started").inner_text(), "who invites nobody"
    assert bob.page.get_by_text("Nowhere to run yet").is_visible()
    bob.check_accessible()


def _config(team: Service) -> Any:
    from diamond.core.home import ClientConfig

    found = ClientConfig.load(team.home)
    assert found is not None
    return found
