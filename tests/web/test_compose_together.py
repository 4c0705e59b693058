"""The composer where several people work: projects, shared templates, a session that ends while somebody types, and an
endpoint with partitions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from diamond.core.codec import encode
from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, Partition
from diamond.core.home import ClientConfig
from diamond.sdk.client import Client
from testing import people
from testing.browser import Visitor
from testing.service import Service

GIB = 1024**3
GPU_NODES = NodeGroup(count=4, cpus=64, mem_bytes=256 * GIB, gpus=(Gpu(model="H100", count=4),), nodes="g[1-4]")
FACTS = EndpointFacts(
    scheduler="slurm",
    nodes=12,
    cpus_per_node=64,
    mem_bytes_per_node=256 * GIB,
    gpus_per_node=(Gpu(model="H100", count=4),),
    run_root="/scratch/runs",
    partitions=(
        Partition(name="gpu", is_default=True, max_walltime_s=86400, groups=(GPU_NODES,)),
        Partition(name="cpu", max_walltime_s=3600, groups=(NodeGroup(count=8, cpus=32, nodes="c[1-8]"),)),
        Partition(name="unseen", is_hidden=True, groups=(NodeGroup(count=1, cpus=1),)),
    ),
    accounts=("climate", "physics"),
    default_account="climate",
    qos=("normal", "high"),
    allows_others=True,
)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """alice, who has a cluster that she shares with project lab, and bob in it."""
    with Service(tmp_path_factory.mktemp("team") / "home", multi_user="1") as running:
        admin = ClientConfig.load(running.home)
        assert admin is not None
        with running.client() as client:
            client.projects.create("lab", title="The laboratory")
            made = client._transport.json("POST", "/api/v1/endpoints", body={"name": "cluster"})
            headers = {"Authorization": f"Bearer {made['token']}", "Diamond-Agent": "agt_cluster"}
            said = httpx.post(
                f"{running.url}/api/v1/agent/hello", json={"facts": encode(FACTS)}, headers=headers, timeout=30
            )
            assert said.status_code == 200, said.text
            client._transport.request("PUT", "/api/v1/projects/lab/endpoints/cluster")
        people.invite(admin, "bob", project="lab")
        yield running


@pytest.fixture
def person(chromium: Any, team: Service) -> Iterator[Any]:
    come: list[Visitor] = []

    def enter(name: str, **how: Any) -> Visitor:
        visitor = Visitor(chromium, team.url, **how)
        come.append(visitor)
        visitor.sign_in(name)
        return visitor

    yield enter
    for visitor in come:
        visitor.leave()


@pytest.mark.parametrize("scripts", [True, False])
def test_only_what_the_endpoint_has_is_offered(person: Any, scripts: bool) -> None:
    visitor = person("bob", scripts=scripts)
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Task_name="typed before")
    page.get_by_label("Endpoint").select_option("cluster")
    if not scripts:
        visitor.press("Update choices")
    partition = page.get_by_label("Partition")
    expect(partition.locator("option")).to_have_text(
        [
            "Let Diamond choose",
            "gpu (by default): 4 nodes, 16 H100, up to 1d 00h",
            "cpu: 8 nodes, up to 1h 00m",
        ]
    )
    expect(page.get_by_label("Account").locator("option")).to_have_text(
        ["The default one", "climate (by default)", "physics"]
    )
    expect(page.get_by_label("GPU type").locator("option")).to_have_text(["Any type", "H100 (up to 4 a node)"])
    assert page.get_by_text("/scratch/runs/JOB/log").is_visible()
    assert page.get_by_label("Task name", exact=True).input_value() == "typed before"
    partition.select_option("cpu")
    page.get_by_label("QoS").select_option("high")
    page.get_by_label("Project").select_option("lab")
    visitor.fill(Command="python train.py", GPUs_per_node="8")
    visitor.allowed += ["status of 422"]
    visitor.press("Dry run")
    page.get_by_text(re.compile("partition cpu", re.IGNORECASE)).first.wait_for()
    visitor.fill(GPUs_per_node="4", Number_of_nodes="2", Walltime="12h", Longest_in_all="3d")
    page.get_by_label("Partition").select_option("gpu")
    if scripts:
        expect(page.get_by_label("YAML", exact=True)).to_have_value(re.compile("gpu:4"))
        visitor.check_accessible()
    visitor.press("Dry run")
    plan = page.get_by_role("region", name="Dry run")
    plan.wait_for()
    words = plan.inner_text()
    assert "cluster, partition gpu" in words
    assert "144 node-hours and 576 GPU-hours" in words
    assert "a chain of about 6 jobs" in words
    visitor.check_width()


def test_a_session_that_ends_costs_nothing_that_was_typed(person: Any, team: Service) -> None:
    visitor = person("bob")
    visitor.allowed += ["status of 401", "status of 403"]
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Task_name="survivor", Command="echo still here")
    page.get_by_text("Form and YAML are in step.").wait_for()
    visitor.context.clear_cookies()
    visitor.press("Launch")
    page.get_by_role("link", name="sign in again").click()
    visitor.fill(User_name="bob", Password=people.PASSWORD)
    visitor.press("Sign in")
    page.wait_for_url("**/compose")
    expect(page.get_by_label("Task name", exact=True)).to_have_value("survivor")
    expect(page.get_by_label("Command", exact=True)).to_have_value("echo still here")
    visitor.context.clear_cookies()
    visitor.press("Dry run")
    page.get_by_role("link", name="sign in again").click()
    visitor.fill(User_name="bob", Password=people.PASSWORD)
    visitor.press("Sign in")
    page.wait_for_url("**/compose")
    expect(page.get_by_label("Task name", exact=True)).to_have_value("survivor")


def test_a_template_is_shared_with_a_project(person: Any, team: Service) -> None:
    alice, bob = person("alice"), person("bob")
    bob.allowed += ["status of 404", "status of 403"]
    page = alice.page
    page.goto("/compose")
    alice.fill(Command="echo ours")
    page.get_by_label("Project").select_option("lab")
    page.get_by_text("Save as a template").click()
    alice.fill(Template_name="ours")
    alice.press("Save as template")
    page.get_by_text("The template is saved.").wait_for()
    assert bob.page.goto(page.url.partition("?")[0]).status == 404
    page.get_by_label("Who may use it").select_option("project")
    alice.press("Save changes")
    page.get_by_text("Your changes are saved.").wait_for()
    bob.page.goto("/templates")
    bob.page.get_by_text("alice, project lab").wait_for()
    bob.page.get_by_role("link", name="ours", exact=True).click()
    assert bob.page.get_by_role("button", name="Save changes").count() == 0
    bob.page.get_by_role("link", name="Use it").click()
    assert bob.page.get_by_label("Command", exact=True).input_value() == "echo ours"
    config = ClientConfig.load(team.home)
    assert config is not None
    with Client(url=config.url, token=config.token) as client:
        client.templates.remove("ours")
