"""Logs in a real browser: a million lines, a line of a megabyte, colours, search, attempts, and without scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.home import Home
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from diamond.server.store.streams import StreamStore
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
LEFT = "box => box.scrollHeight - box.scrollTop - box.clientHeight"


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with service.client() as made:
        yield made


def finished(client: Client, run: str, name: str, **fields: Any) -> str:
    task_id = client.tasks.create({"name": name, "run": run, **fields}).id
    eventually(lambda: client.tasks.get(task_id).state.is_final, within_s=90, what=f"{name} ended")
    return task_id


def logs_of(service: Service) -> Path:
    return Home(service.home.path).server / "streams"


def give_log(service: Service, client: Client, task_id: str, data: bytes) -> None:
    """What a job would have written over hours."""
    store, job_id = StreamStore(logs_of(service)), client.tasks.get(task_id).jobs[-1].id
    size = store.size(job_id, "log")
    for start in range(0, len(data), 1 << 20):
        size = store.append(job_id, "log", size, data[start : start + (1 << 20)])


def test_a_million_lines_stay_usable(visit: Visit, service: Service, client: Client) -> None:
    task_id = finished(client, "true", "million")
    text = b"".join(
        b"this is what the program wrote in line %d of its log\n" % number for number in range(1, 1_000_001)
    )
    give_log(service, client, task_id, text)
    visitor = visit()
    page = visitor.page
    began = time.monotonic()
    page.goto(f"/tasks/{task_id}")
    lines = page.get_by_role("region", name="Lines of the log")
    lines.get_by_text("line 1000000 of", exact=False).wait_for()
    assert time.monotonic() - began < 10
    page.get_by_text("1,000,000 lines", exact=False).wait_for()
    page.get_by_label("Line", exact=True).fill("500000")
    page.keyboard.press("Enter")
    lines.get_by_text("line 500000 of", exact=False).wait_for()
    # Reading on from there, and back.
    for _ in range(10):
        lines.evaluate("each => { each.scrollTop = each.scrollHeight }")
        page.wait_for_timeout(150)
    shown = [int(number) for number in lines.evaluate("each => [...each.children].map((row) => row.dataset.n)")]
    assert shown == list(range(shown[0], shown[0] + len(shown))) and len(shown) <= 1000 and shown[-1] > 500_600
    for _ in range(12):
        lines.evaluate("each => { each.scrollTop = 0 }")
        page.wait_for_timeout(150)
    shown = [int(number) for number in lines.evaluate("each => [...each.children].map((row) => row.dataset.n)")]
    assert shown == list(range(shown[0], shown[0] + len(shown))) and len(shown) <= 1000 and shown[0] < 500_000
    page.get_by_role("searchbox", name="Search the log").fill("LINE 77777")
    page.keyboard.press("Enter")
    page.get_by_text("of 11 lines").wait_for()
    page.get_by_role("button", name="Next match").click()
    first = page.locator(".line.here").get_attribute("data-n")
    assert first is not None and first.startswith("77777")
    assert page.locator(".line.here mark").inner_text() == "line 77777"
    page.get_by_role("button", name="Previous match").click()
    here = page.locator(".line.here")
    eventually(lambda: here.get_attribute("data-n") not in (None, first), within_s=20, what="the one before")
    page.get_by_role("searchbox", name="Search the log").fill("not in there")
    page.keyboard.press("Enter")
    page.get_by_text("Not found").wait_for()
    visitor.check_accessible()


def test_a_line_of_a_megabyte_and_a_progress_bar(visit: Visit, client: Client) -> None:
    task_id = finished(
        client,
        "echo begin; head -c 1000000 /dev/zero | tr '\\0' x; echo; "
        "for i in $(seq 0 100); do printf 'epoch %d%%\\r' $i; done; "
        "printf '\\n\\u202eabc <script>alert(1)</script>\\n'",
        "long line",
    )
    visitor = visit()
    page = visitor.page
    page.goto(f"/tasks/{task_id}")
    lines = page.get_by_role("region", name="Lines of the log")
    lines.get_by_text("epoch 100%", exact=True).wait_for()
    assert page.get_by_text("epoch 99%").count() == 0
    lines.get_by_text("<script>alert(1)</script>", exact=False).wait_for()
    assert lines.evaluate("each => each.textContent.length") < 5000
    with page.expect_download() as download:
        page.get_by_role("link", name="… this line has 1,000,000 bytes").click()
    assert download.value.path().read_bytes() == b"x" * 1_000_000
    page.get_by_role("button", name="Wrap lines").click()
    visitor.check_width()
    visitor.check_accessible()


def test_following_goes_on_until_the_reader_looks_up(visit: Visit, client: Client) -> None:
    task_id = client.tasks.create(
        {"name": "follow", "run": "for i in $(seq 4000); do echo line-$i; sleep 0.02; done"}
    ).id
    visitor = visit()
    page = visitor.page
    page.goto(f"/tasks/{task_id}")
    follow = page.get_by_role("button", name="Follow")
    page.locator(".line[data-n='150']").wait_for()
    lines = page.get_by_role("region", name="Lines of the log")
    eventually(lambda: lines.evaluate("box => box.scrollTop") > 500, within_s=20, what="it follows")
    assert follow.get_attribute("aria-pressed") == "true"
    lines.hover()
    page.mouse.wheel(0, -900)
    eventually(lambda: follow.get_attribute("aria-pressed") == "false", within_s=20, what="it no longer follows")
    page.wait_for_timeout(500)
    top = lines.evaluate("box => box.scrollTop")
    page.wait_for_timeout(2500)
    assert lines.evaluate("box => box.scrollTop") == top
    follow.click()
    eventually(lambda: lines.evaluate(LEFT) < 60, within_s=20, what="the end is in sight")
    seen = page.evaluate("[...document.querySelectorAll('#log-lines .line')].map((each) => each.textContent)")
    numbers = [int(line.removeprefix("line-")) for line in seen]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    client.tasks.cancel(task_id)
    eventually(lambda: client.tasks.get(task_id).state is TaskState.CANCELLED, within_s=60, what="it is stopped")


def test_attempts_have_logs_of_their_own(visit: Visit, client: Client) -> None:
    task_id = finished(
        client, 'echo "this is attempt $DIAMOND_ATTEMPT"; exit 1', "tried", retry={"max_retries": 1, "backoff": 1}
    )
    for scripts in (True, False):
        visitor = visit(scripts=scripts)
        page = visitor.page
        page.goto(f"/tasks/{task_id}")
        page.get_by_text("this is attempt 2").wait_for()
        page.get_by_role("region", name="Log", exact=True).get_by_label("Attempt").select_option("1")
        if not scripts:
            page.get_by_role("button", name="Show").click()
        page.get_by_text("this is attempt 1").wait_for()
        jobs = page.get_by_role("region", name="Jobs")
        assert jobs.get_by_role("row").count() == 3


def test_without_scripts_the_end_of_the_log_is_there(visit: Visit, client: Client) -> None:
    task_id = finished(client, "for i in $(seq 300); do printf '\\033[31mline-%d\\033[0m\\n' $i; done", "plain")
    visitor = visit(scripts=False)
    page = visitor.page
    page.goto(f"/tasks/{task_id}")
    text = page.get_by_role("region", name="The end of the log").inner_text().splitlines()
    assert text[0] == "line-101" and text[-1] == "line-300" and len(text) == 200
    page.get_by_text("The last 200 of 300 lines.", exact=False).wait_for()
    with page.expect_download() as download:
        page.locator("#log-download").click()
    assert download.value.path().read_text().count("\n") == 300
