"""The Task Manager and the page of a task, in a real browser over a real server and agent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
EVIL = '<img src=x onerror=alert(1)> שלום "&amp;" ' + "w" * 60


def launch(client: Client, run: str, name: str, **fields: Any) -> str:
    return client.tasks.create({"name": name, "run": run, **fields}).id


def wait_for(client: Client, task_id: str, *states: TaskState) -> None:
    eventually(lambda: client.tasks.get(task_id).state in states, within_s=60, what=f"{task_id} is {states}")


@pytest.fixture(scope="module")
def client(service: Service) -> Any:
    with service.client() as made:
        yield made


def test_an_empty_table_says_what_to_do(visit: Visit) -> None:
    visitor = visit()
    visitor.page.goto("/tasks")
    assert visitor.page.get_by_role("link", name="Compose your first task").get_attribute("href") == "/compose"
    visitor.check_accessible()
    visitor.check_width()


def test_the_journey_of_a_task(visit: Visit, client: Client) -> None:
    """Launched elsewhere, it appears by itself; it is watched, stopped, run again, and deleted."""
    visitor = visit()
    page = visitor.page
    page.goto("/tasks")
    task_id = launch(client, 'for i in $(seq 1000); do echo "line $i"; sleep 0.1; done', "count")
    row = page.get_by_role("row", name=re.compile("count"))
    row.get_by_text("Running").wait_for()
    row.get_by_role("link", name="count", exact=True).click()
    page.wait_for_url(f"**/tasks/{task_id}")
    lines = page.get_by_role("region", name="Lines of the log")
    lines.get_by_text("line 12", exact=True).wait_for()
    assert page.get_by_role("button", name="Follow").get_attribute("aria-pressed") == "true"
    page.get_by_role("link", name="Stop").click()
    page.get_by_role("heading", name="Stop the task?").wait_for()
    page.get_by_role("button", name="Stop the task").click()
    page.wait_for_url(f"**/tasks/{task_id}?done=stop&n=1")
    page.get_by_role("region", name="How it stands").get_by_text("Cancelled").wait_for()
    page.get_by_text("Stopped on request.").first.wait_for()
    page.get_by_role("button", name="Run again").click()
    page.wait_for_url(re.compile(r"/tasks/tsk_\w+\?done=rerun"))
    again = re.search(r"tsk_\w+", page.url)
    assert again is not None and again[0] != task_id
    assert client.tasks.get(again[0]).spec == client.tasks.get(task_id).spec
    client.tasks.cancel(again[0])
    wait_for(client, again[0], TaskState.CANCELLED)
    page.get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Delete the task").click()
    page.wait_for_url("**/tasks?done=delete&n=1")
    page.get_by_text("1 task was deleted.").wait_for()
    assert [task.id for task in client.tasks.list()] == [task_id]


def test_several_at_once_without_scripts(visit: Visit, client: Client) -> None:
    ids = [launch(client, "sleep 100", f"bulk {number}") for number in range(3)]
    visitor = visit(scripts=False)
    page = visitor.page
    page.goto("/tasks?q=bulk")
    for number in (0, 2):
        page.get_by_role("checkbox", name=f"Choose bulk {number}").check()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("heading", name="Stop 2 tasks?").wait_for()
    page.get_by_role("button", name="Stop 2 tasks").click()
    page.get_by_text("2 tasks were asked to stop.").wait_for()
    assert "q=bulk" in page.url
    for task_id in (ids[0], ids[2]):
        wait_for(client, task_id, TaskState.CANCELLED)
    page.goto("/tasks?q=bulk")
    for number in range(3):
        page.get_by_role("checkbox", name=f"Choose bulk {number}").check()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("region", name="Left alone").get_by_text("bulk 1").wait_for()
    page.get_by_role("button", name="Delete 2 tasks").click()
    page.get_by_text("2 tasks were deleted.").wait_for()
    assert [task.id for task in client.tasks.list() if task.name.startswith("bulk")] == [ids[1]]
    page.get_by_role("button", name="Run again", exact=True).click()
    page.get_by_text("No task was ticked.").wait_for()
    client.tasks.cancel(ids[1])
    wait_for(client, ids[1], TaskState.CANCELLED)


def test_ticks_are_counted_and_survive_news(visit: Visit, client: Client) -> None:
    visitor = visit()
    page = visitor.page
    launch(client, "true", "ticked one")
    launch(client, "true", "ticked two")
    page.goto("/tasks?q=ticked")
    stop = page.get_by_role("button", name="Delete")
    assert stop.is_disabled()
    page.get_by_role("checkbox", name="Choose all on this page").check()
    page.get_by_text("2 ticked:").wait_for()
    assert stop.is_enabled()
    launch(client, "true", "ticked three")
    page.get_by_role("link", name="ticked three", exact=True).wait_for()
    assert page.get_by_role("checkbox", name=re.compile("ticked one")).is_checked()


def test_filters_sorting_and_columns(visit: Visit, client: Client) -> None:
    for name in ("zeta", "alpha"):
        task_id = launch(client, "exit 3" if name == "zeta" else "true", f"sort {name}")
        wait_for(client, task_id, TaskState.FAILED, TaskState.SUCCEEDED)
    visitor = visit(width=1600)
    page = visitor.page
    page.goto("/tasks")
    page.get_by_label("Name").fill("sort")
    page.get_by_role("button", name="Find").click()
    page.wait_for_url("**/tasks?q=sort*")
    names = page.locator("tbody td.name")
    assert names.all_inner_texts() == ["sort alpha", "sort zeta"]
    page.get_by_role("columnheader").get_by_role("link", name="Task Name").click()
    page.wait_for_url("**sort=name*")
    assert names.all_inner_texts() == ["sort alpha", "sort zeta"]
    page.get_by_role("columnheader", name="Task Name").get_by_role("link").click()
    page.wait_for_url(lambda url: "order" not in url)
    assert names.all_inner_texts() == ["sort zeta", "sort alpha"]
    assert page.get_by_role("columnheader", name="Task Name").get_attribute("aria-sort") == "descending"
    page.get_by_role("navigation", name="Tasks by state").get_by_role("link", name="Failed").click()
    page.wait_for_url("**state=FAILED*")
    assert names.all_inner_texts() == ["sort zeta"]
    page.get_by_text("exit code 3", exact=False).first.wait_for()
    page.get_by_role("columnheader", name="Log Path").wait_for()
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("checkbox", name="Log Path").uncheck()
    page.get_by_role("checkbox", name="Id", exact=True).check()
    page.get_by_role("button", name="Show these").click()
    page.get_by_role("columnheader", name="Id", exact=True).wait_for()
    assert page.get_by_role("columnheader", name="Log Path").count() == 0
    assert names.all_inner_texts() == ["sort zeta"]  # where the reader was
    page.goto("/tasks?at=nonsense")
    page.get_by_role("alert").get_by_text("not a cursor").wait_for()


def test_pages_of_many_tasks(visit: Visit, client: Client) -> None:
    client.tasks.create_many(
        [{"name": f"many {number:03d}", "run": "true", "resources": {"cpus": 1}} for number in range(90)]
    )
    visitor = visit(scripts=False)
    page = visitor.page
    page.goto("/tasks?q=many&sort=name&order=asc")
    names = page.locator("tbody td.name")
    seen = names.all_inner_texts()
    assert len(seen) == 40 and seen[0] == "many 000"
    page.get_by_role("link", name="Next page").click()
    page.get_by_role("link", name="many 040", exact=True).wait_for()
    page.get_by_role("link", name="Next page").click()
    page.get_by_role("link", name="many 089", exact=True).wait_for()
    assert names.all_inner_texts() == [f"many {number:03d}" for number in range(80, 90)]
    assert page.get_by_role("link", name="Next page").count() == 0
    page.get_by_role("link", name="Previous page").click()
    page.get_by_role("link", name="many 040", exact=True).wait_for()
    assert names.all_inner_texts() == [f"many {number:03d}" for number in range(40, 80)]
    page.get_by_role("link", name="First page").click()
    page.get_by_role("link", name="many 000", exact=True).wait_for()
    assert names.all_inner_texts() == seen


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_hostile_names_are_shown_and_everybody_can_use_the_pages(
    visit: Visit, client: Client, dark: bool, width: int
) -> None:
    name = f"{EVIL} {dark} {width}"
    script = (
        "printf '\\033[1;31mred\\033[0m \\033[42mgreen\\033[0m \\033[38;5;208morange\\033[0m <b>x</b>\\n'; echo 1 >out"
    )
    task_id = launch(client, script, name, outputs=["out"], envs={"A": f"\u202e{EVIL}"})
    wait_for(client, task_id, TaskState.SUCCEEDED)
    visitor = visit(dark=dark, width=width)
    page = visitor.page
    page.goto("/tasks")
    page.get_by_role("link", name=name, exact=True).wait_for()
    visitor.check_accessible()
    visitor.check_width()
    page.goto(f"/tasks/{task_id}")
    page.get_by_role("heading", name=name).wait_for()
    lines = page.get_by_role("region", name="Lines of the log")
    lines.get_by_text("<b>x</b>").wait_for()
    assert lines.locator("span.s1.f1").inner_text() == "red"
    assert lines.locator("span.b2").inner_text() == "green"
    orange = lines.get_by_text("orange", exact=True).evaluate("each => each.style.color")
    assert orange == "rgb(255, 135, 0)" if dark else orange != ""  # darker on white, to be read
    with page.expect_download() as download:
        page.get_by_role("link", name="Download out").click()
    assert download.value.path().read_text() == "1\n"
    with page.expect_download() as download:
        page.locator("#log-download").click()
    assert download.value.path().read_text().startswith("\x1b[1;31mred")
    page.get_by_text("Job script").click()
    page.get_by_text("Environment", exact=True).click()
    visitor.check_accessible()
    visitor.check_width()
    page.goto(f"/tasks/{task_id}/delete")
    visitor.check_accessible()
    visitor.check_width()


def test_the_table_fits_a_usual_screen(visit: Visit, client: Client) -> None:
    wait_for(client, launch(client, "exit 1", "training of the large network"), TaskState.FAILED)
    sideways = "(() => { const one = document.querySelector('.scroll'); return one.scrollWidth - one.clientWidth })()"
    for width, is_shown in ((1280, False), (1600, True)):
        visitor = visit(width=width)
        visitor.page.goto("/tasks")
        visitor.page.get_by_role("link", name="training of the large network", exact=True).wait_for()
        assert visitor.page.evaluate(sideways) <= 0
        assert visitor.page.get_by_role("columnheader", name="Log Path").is_visible() == is_shown
    visitor = visit()
    visitor.page.goto("/tasks")
    visitor.page.get_by_text("Columns", exact=True).click()
    visitor.press("Show these")
    assert visitor.page.get_by_role("columnheader", name="Log Path").is_visible(), "who asks for it gets it"


def test_a_task_that_is_not_there_is_a_page_that_says_so(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed.append("404")
    assert visitor.page.goto("/tasks/tsk_00000000").status == 404
    visitor.page.get_by_text("There is no task").wait_for()
