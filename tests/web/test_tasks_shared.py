"""Tasks among several people: what is shared is seen, what is not does not exist, and only the owner decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diamond.core.home import ClientConfig
from diamond.sdk.client import Client
from testing import people
from testing.browser import Visitor
from testing.service import Service

Come = Callable[..., Visitor]


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """alice owns the project lab, in which bob is a viewer; her endpoint has no agent yet, so that all tasks wait."""
    with Service(tmp_path_factory.mktemp("town") / "home", multi_user="1") as running:
        config = ClientConfig.load(running.home)
        assert config is not None
        with running.client() as alice:
            alice.projects.create("lab")
            people.invite(config, "bob", project="lab", role="viewer")
            alice.endpoints.create("cluster")
        yield running


@pytest.fixture
def alice_client(town: Service) -> Iterator[Client]:
    with town.client() as client:
        yield client


@pytest.fixture
def come(chromium: Any, town: Service) -> Iterator[Come]:
    visitors: list[Visitor] = []

    def arrive(name: str, **how: Any) -> Visitor:
        visitors.append(Visitor(chromium, town.url, **how))
        visitors[-1].sign_in(name)
        return visitors[-1]

    yield arrive
    for visitor in visitors:
        visitor.leave()


@pytest.mark.parametrize("scripts", [True, False])
def test_sharing_a_task(come: Come, alice_client: Client, scripts: bool) -> None:
    name = f"shared {scripts}"
    task_id = alice_client.tasks.create({"name": name, "run": "true", "project": "lab"}).id
    alice, bob = come("alice", scripts=scripts), come("bob", scripts=scripts)
    bob.allowed.append("status of 40")
    page = alice.page
    page.goto(f"/tasks/{task_id}")
    page.get_by_label("Who sees it").select_option(label="Only you")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Who sees it is changed.").wait_for()
    assert bob.page.goto(f"/tasks/{task_id}").status == 404
    bob.page.goto("/tasks?whose=all")
    assert bob.page.get_by_role("link", name=name, exact=True).count() == 0
    page.get_by_label("Who sees it").select_option(label="Everybody in its project")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Who sees it is changed.").wait_for()

    # Not among his own, but among those he may see; he looks at it, and can do no more.
    bob.page.goto("/tasks")
    assert bob.page.get_by_role("link", name=name, exact=True).count() == 0
    bob.page.get_by_role("combobox", name="Project").select_option("lab")
    if not scripts:
        bob.page.get_by_role("button", name="Find").click()
    bob.page.get_by_role("link", name=name, exact=True).wait_for()
    assert bob.page.get_by_role("row", name=name).get_by_text("alice").count() == 1
    bob.page.get_by_role("link", name=name, exact=True).click()
    bob.page.get_by_role("heading", name=name).wait_for()
    for button in ("Stop", "Delete"):
        assert bob.page.get_by_role("link", name=button, exact=True).count() == 0
    assert bob.page.get_by_role("heading", name="Share", exact=True).count() == 0
    bob.page.goto(f"/tasks/{task_id}/stop")
    bob.page.get_by_role("button", name="Stop the task").click()
    bob.page.get_by_role("alert").get_by_text("you can look at it, not stop it").wait_for()
    bob.page.goto(f"/tasks/{task_id}")
    bob.page.get_by_role("button", name="Run again").click()
    bob.page.get_by_role("alert").wait_for()
    bob.page.get_by_role("heading", name=name).wait_for()
    if scripts:  # what looks for faults is a script
        alice.check_accessible()
        bob.check_accessible()
        bob.check_width()


def test_what_cannot_be_moved_is_said_beside_the_field(come: Come, alice_client: Client) -> None:
    task_id = alice_client.tasks.create({"name": "live", "run": "true", "project": "lab"}).id
    alice = come("alice")
    alice.allowed.append("status of 40")
    alice.page.goto(f"/tasks/{task_id}")
    alice.page.get_by_label("Project").select_option("alice")
    alice.page.get_by_role("button", name="Save").click()
    alice.page.get_by_text("it counts as its project's until it ends", exact=False).wait_for()
    assert alice_client.tasks.get(task_id).project == "lab"
