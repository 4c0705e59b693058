"""One person's whole journey by mouse on a real cluster: sign in, bring the cluster in, build an image in six steps,
compose a task, run it on two nodes, watch its log and curve move, stop it, run it again, and compare the two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing import people
from testing.browser import Visitor, running_chromium
from testing.images import BASE_INSIDE, image_binds
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.service import Service
from testing.waiting import eventually

COMMAND = """\
for step in $(seq 1 600); do
  echo "rank $RANK of $WORLD_SIZE at step $step in $(cat /opt/made)"
  if [ "$RANK" = 0 ]; then echo "{\\"step\\": $step, \\"loss\\": 0.5}" >> "$DIAMOND_METRICS_FILE"; fi
  sleep 1
done
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    require("trixie")
    with Site("journey", binds=image_binds()) as running:
        yield running


@pytest.fixture(scope="module")
def service(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Reached from the cluster and from the browser under one address."""
    made = Service(tmp_path_factory.mktemp("journey") / "server", host="0.0.0.0", allow_remote="1", multi_user="1")
    made.url = f"http://{site.server_address}:{made.port}"
    made._settings["DIAMOND_PUBLIC_URL"] = made.url
    made.start_server()
    yield made
    made.stop()


@pytest.fixture
def visitor(service: Service) -> Iterator[Visitor]:
    with running_chromium() as chromium:
        somebody = Visitor(chromium, service.url)
        somebody.allowed = ["Cross-Origin-Opener-Policy header has been ignored"]  # plain HTTP, not on loopback
        yield somebody
        somebody.leave()


def enrol(page: Any, visitor: Visitor, site: Site) -> None:
    page.get_by_role("link", name="Endpoints", exact=True).first.click()
    page.get_by_role("link", name=re.compile("Add an endpoint|New endpoint|Add endpoint")).first.click()
    visitor.fill(Name="cluster")
    visitor.press("Get the line to paste")
    has_curl = site.run(["sh", "-c", "command -v curl"], check=False).returncode == 0
    if not has_curl:
        page.get_by_text("There is no curl").click()
    name = "The line to paste" if has_curl else "The line to paste, without curl"
    line = page.get_by_role("region", name=name, exact=True).inner_text()
    visitor.check_accessible()
    site.run(["bash", "-lc", f"cd && {line}"], timeout=120)
    page.get_by_text("Connected").wait_for(timeout=60_000)  # the open page notices
    page.get_by_role("link", name="See what it has").click()
    page.get_by_text("slurm", exact=False).first.wait_for()
    visitor.check_accessible()


def build(page: Any, visitor: Visitor) -> None:
    page.get_by_role("link", name="Image Builder").first.click()
    visitor.press("New image")
    page.get_by_role("radio", name="cluster").check()
    visitor.press("Next")
    visitor.fill(Image_name="made-here")
    page.get_by_role("radio", name="Another one").check()
    page.get_by_label("Address or path of the base").fill(BASE_INSIDE)
    visitor.press("Next")
    visitor.press("Next")
    visitor.fill(Environment_variables="MOTTO=slow and steady")
    visitor.press("Next")
    visitor.fill(Build_commands="echo an-image > /opt/made", Validation_command="grep an-image /opt/made")
    visitor.press("Next")
    page.get_by_text("Bootstrap: localimage").wait_for()  # the definition file
    visitor.check_accessible()
    visitor.press("Build the image")
    page.get_by_role("link", name="Look at the image").wait_for(timeout=240_000)
    visitor.check_accessible()


def compose(page: Any, visitor: Visitor) -> str:
    page.get_by_role("link", name="Job Composer").first.click()
    page.get_by_label("Task type").select_option("distributed")
    page.get_by_label("Endpoint", exact=True).select_option("cluster")
    made = page.get_by_label("Container").locator("option", has_text="made-here").first
    made.wait_for(state="attached")
    # By its value: what it is called changes as soon as the page has heard of the endpoint.
    page.get_by_label("Container").select_option(value=made.get_attribute("value"))
    visitor.fill(Task_name="two nodes", Number_of_nodes="2", Walltime="20m", Command=COMMAND)
    page.get_by_label("YAML").wait_for()
    visitor.press("Dry run")
    page.get_by_role("region", name="Dry run").wait_for()
    visitor.check_accessible()
    visitor.press("Launch")
    page.wait_for_url(re.compile(r"/tasks/tsk_\w+$"))
    return str(page.url.rsplit("/", 1)[1])


def watch(page: Any) -> None:
    """Both ranks speak, and both the log and the curve grow while nobody touches the page."""
    log = page.get_by_role("region", name="Lines of the log")
    log.get_by_text(re.compile(r"rank 0 of 2 at step \d+ in an-image")).first.wait_for(timeout=120_000)
    log.get_by_text(re.compile(r"rank 1 of 2")).first.wait_for(timeout=30_000)

    def newest() -> int:
        return max((int(found) for found in re.findall(r"step (\d+)", log.inner_text())), default=0)

    before = newest()
    eventually(lambda: newest() > before + 2, within_s=30, what="the log moves")
    chart = page.get_by_role("img", name=re.compile("loss")).first
    chart.wait_for(timeout=30_000)
    shown = chart.get_attribute("aria-label") or ""
    eventually(lambda: (chart.get_attribute("aria-label") or "") != shown, within_s=30, what="the curve moves")


def stop(page: Any, visitor: Visitor) -> None:
    page.get_by_role("link", name="Stop", exact=True).click()
    page.get_by_role("button", name=re.compile("^Stop")).first.click()
    page.locator(".stands").get_by_text("Cancelled").first.wait_for(timeout=90_000)
    visitor.check_accessible()


def test_the_whole_journey(site: Site, service: Service, visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.page
    visitor.sign_in("alice", people.PASSWORD)
    visitor.check_accessible()
    enrol(page, visitor, site)
    build(page, visitor)
    first = compose(page, visitor)
    watch(page)
    stop(page, visitor)
    visitor.press("Run again")
    page.wait_for_url(lambda url: "/tasks/tsk_" in url and first not in url)
    second = page.url.rsplit("/", 1)[1].partition("?")[0]
    watch(page)
    page.goto(f"/compare?task={first}&task={second}")
    page.get_by_role("list", name="Runs compared").wait_for()
    visitor.check_accessible()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Export as CSV").click()
    saved.value.save_as(tmp_path / "compare.csv")
    assert "two nodes" in (tmp_path / "compare.csv").read_text()
    page.goto(f"/tasks/{second}")
    stop(page, visitor)
    with service.client() as client:
        _stopped(client, first, second)


def _stopped(client: Client, *tasks: str) -> None:
    for task_id in tasks:
        task = client.tasks.get(task_id)
        assert (task.state, len(task.jobs[-1].hosts)) == (TaskState.CANCELLED, 2), task
