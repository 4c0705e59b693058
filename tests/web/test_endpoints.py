"""Pages of endpoints in a real browser: one is added and connected with the line that the page shows, looked at, cut
off and removed; and what a large cluster's facts, a shared endpoint and a person without JavaScript see."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.codec import encode
from diamond.core.endpoints import EndpointFacts, EndpointUsage, FileSystem, Gpu, NodeGroup, NodeUse, Partition
from diamond.core.home import ClientConfig, Home
from diamond.core.tasks import TaskSpec
from testing import people
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
PROGRAMS = ("bash", "sh", "curl", "sha256sum", "cat", "date", "sleep", "mv", "rm", "mkdir", "env", "true", "hostname")
TB = 2**40
# Browsers note on the console what a test asks for on purpose.
REFUSED = ["status of 404", "status of 409", "status of 422"]
CLUSTER = EndpointFacts(
    scheduler="slurm",
    scheduler_version="24.05.3",
    hostname="login1.<b>example</b>",
    os_user="alice",
    agent_version="0.1.0",
    python="3.11.7",
    nodes=12,
    cpus_per_node=64,
    mem_bytes_per_node=512 * 2**30,
    gpus_per_node=(Gpu(model="H100", count=4),),
    runtimes=("apptainer 1.3.4",),
    run_root="/scratch/alice/diamond/jobs",
    max_walltime_s=172_800,
    policy={"max_nodes": "8", "accounts": "phys101"},
    policy_files=("/etc/diamond/policy.toml", "/home/alice/.diamond/agents/<b>x</b>/policy.toml"),
    policy_changed_at=1_700_000_000.0,
    others_problem="allow_others = true is not in force, and tasks of others are refused",
    partitions=(
        Partition(
            name="gpu",
            is_default=True,
            max_walltime_s=172_800,
            default_walltime_s=3600,
            max_nodes=8,
            groups=(
                NodeGroup(
                    count=8,
                    cpus=64,
                    mem_bytes=512 * 2**30,
                    gpus=(Gpu(model="H100", count=4),),
                    features=("nvlink", "ib"),
                    unusable=1,
                    nodes="g[1-8]",
                ),
            ),
        ),
        Partition(
            name="cpu",
            is_up=False,
            allow_accounts=("phys101",),
            groups=(NodeGroup(count=4, cpus=128, mem_bytes=256 * 2**30, nodes="c[1-4]"),),
        ),
    ),
    accounts=("phys101", "phys102"),
    default_account="phys101",
    qos=("normal", "long"),
    filesystems=(
        FileSystem(path="/home/alice", role="home", kind="nfs4", total_bytes=TB, free_bytes=TB // 2),
        FileSystem(
            path="/scratch/alice", role="scratch", kind="lustre", total_bytes=2 * TB, free_bytes=20 * 2**30,
            quota_bytes=10 * TB, quota_used_bytes=4 * TB,
        ),
    ),
    site_name="Example centre",
    architecture="x86_64",
    builders=("apptainer",),
    builds="batch",
    image_root="/scratch/alice/diamond/images",
    allows_others=True,
)  # fmt: skip


class LoginNode:
    """A machine with few programs and a home of its own: nothing to start agents by but the agent itself."""

    def __init__(self, folder: Path) -> None:
        self.home, self.path = folder / "home", folder / "bin"
        self.home.mkdir(parents=True)
        self.path.mkdir()
        for name in PROGRAMS:
            if found := shutil.which(name):
                (self.path / name).symlink_to(found)
        (self.path / "python3").symlink_to(Path(sys.executable).resolve())

    def run(self, *argv: str) -> None:
        env = {"HOME": str(self.home), "PATH": str(self.path), "LANG": "C.UTF-8"}
        done = subprocess.run(argv, env=env, cwd=self.home, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def stop(self) -> None:
        for file in self.home.glob(".diamond/agents/*/diamond-agent.pyz"):
            self.run("python3", str(file), "stop")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoginNode]:
    made = LoginNode(tmp_path / "login node")
    yield made
    made.stop()


def register(config: ClientConfig, name: str) -> str:
    """An endpoint for an agent that is this test; its token."""
    headers = {"Authorization": f"Bearer {config.token}"}
    body = {"name": name, "token": True}
    made = httpx.post(f"{config.url}/api/v1/endpoints", json=body, headers=headers, timeout=30)
    assert made.status_code == 201, made.text
    return str(made.json()["token"])


def speak(url: str, token: str, facts: EndpointFacts, usage: EndpointUsage) -> None:
    """Say what agents say: what there is, and what is in use. It is online for a minute."""
    headers = {"Authorization": f"Bearer {token}"}
    said = httpx.post(f"{url}/api/v1/agent/hello", json={"facts": encode(facts)}, headers=headers, timeout=30)
    assert said.status_code == 200, said.text
    report = {"epoch": said.json()["epoch"], "usage": encode(usage)}
    done = httpx.post(f"{url}/api/v1/agent/reports", json=report, headers=headers, timeout=30)
    assert done.status_code == 200, done.text


def config_of(service: Service) -> ClientConfig:
    found = ClientConfig.load(service.home)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def cluster_token(service: Service) -> str:
    return register(config_of(service), "frontier")


@pytest.fixture
def cluster(service: Service, cluster_token: str) -> str:
    busy = EndpointUsage(
        at=1_800_000_000.0, cpus_used=192, gpus_used={"H100": 12}, jobs_running=3, jobs_queued=7,
        nodes=(
            NodeUse(gpus=("H100",), partitions=("gpu",), nodes=8, free=3, down=1, gpus_total=32, gpus_free=16),
            NodeUse(partitions=("cpu",), nodes=4, free=4),
            NodeUse(gpus=("H200",), partitions=("not offered",), nodes=2, free=2, gpus_total=16, gpus_free=16),
        ),
        nodes_at=1_799_999_940.0,
    )  # fmt: skip
    speak(service.url, cluster_token, CLUSTER, busy)
    return "frontier"


# ---- the journey -----------------------------------------------------------------------------------------------------


def test_an_endpoint_is_added_connected_cut_off_and_removed(visit: Visit, service: Service, node: LoginNode) -> None:
    visitor = visit()
    visitor.allowed += REFUSED
    page = visitor.page
    page.goto("/endpoints")
    page.get_by_role("link", name="Add an endpoint").click()
    visitor.check_accessible()

    visitor.fill(Name="Two words")
    visitor.press("Get the line")
    name = page.get_by_label("Name", exact=True)
    assert name.get_attribute("aria-invalid") == "true" and name.input_value() == "Two words", "nothing typed is lost"
    assert "lower-case letters" in page.locator("#name-error").inner_text()
    visitor.fill(Name="local")
    visitor.press("Get the line")
    assert "there is an endpoint 'local' already" in page.locator("#name-error").inner_text().lower()
    visitor.fill(Name="new")
    visitor.press("Get the line")
    assert "choose another name" in page.locator("#name-error").inner_text().lower()

    visitor.fill(Name="theta")
    visitor.press("Get the line")
    page.wait_for_url("**/endpoints/theta/line")
    first = page.get_by_role("region", name="The line to paste", exact=True).inner_text()
    assert first.startswith("curl ") and "--code" in first
    assert page.get_by_role("note").filter(has_text="means the machine it is used on").is_visible()
    visitor.check_accessible()
    page.reload()  # sends the form again
    line = page.get_by_role("region", name="The line to paste", exact=True).inner_text()
    assert line != first, "a fresh code, and the one before is void"

    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.press("Copy")
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == line
    assert page.get_by_text("Waiting for it").is_visible()

    node.run("bash", "-c", line)
    page.get_by_text("Connected").wait_for(timeout=90_000)
    page.get_by_role("link", name="See what it has").click()
    page.wait_for_url("**/endpoints/theta")
    assert page.get_by_text("Online").is_visible()
    about = page.get_by_role("region", name="What it is").inner_text()
    assert "Local" in about and "Python" in about and str(node.home) in about
    visitor.check_accessible()

    page.get_by_text("Give it a new token").click()
    visitor.press("Rotate the token")
    page.wait_for_url("**?done=rotating")
    assert page.get_by_role("status").filter(has_text="new token").is_visible()
    page.get_by_text("Cut it off").click()
    visitor.press("Revoke every token")
    page.wait_for_url("**?done=revoked")
    assert page.get_by_text("Cut off", exact=True).is_visible()
    page.get_by_text("Remove the endpoint").click()
    visitor.press("Remove theta")
    page.wait_for_url("**/endpoints?done=removed")
    assert page.get_by_role("link", name="theta").count() == 0
    assert visitor.page.goto("/endpoints/theta").status == 404


def test_live_jobs_are_given_up_only_when_that_was_ticked(visit: Visit, service: Service) -> None:
    visitor = visit(scripts=False)
    visitor.allowed += REFUSED
    with service.client() as client:
        spec = {"name": "long", "run": "sleep 300", "resources": {"infra": "local"}}
        task = client.tasks.create(TaskSpec.parse(spec)).id
        eventually(lambda: client.tasks.get(task).state == "RUNNING", within_s=30)
    page = visitor.page
    page.goto("/endpoints/local")
    row = page.get_by_role("table", name="Queue").get_by_role("row").filter(has_text="long")
    assert "Running" in row.inner_text()
    assert row.get_by_role("link", name="long").get_attribute("href") == f"/tasks/{task}"
    page.get_by_text("Remove the endpoint").click()
    visitor.press("Remove local")
    assert "has 1 live job" in page.get_by_role("alert").inner_text()
    page.get_by_text("Remove the endpoint").click()
    assert page.get_by_label("Also give up 1 live job").is_visible()
    with service.client() as client:
        client.tasks.cancel(task)
        eventually(lambda: client.tasks.get(task).state.is_final, within_s=30)


def test_without_scripts_the_line_can_be_had_and_selected(visit: Visit, service: Service) -> None:
    visitor = visit(scripts=False, width=400)
    visitor.allowed += REFUSED
    visitor.page.goto("/endpoints/new")
    visitor.fill(Name="My Cluster")
    visitor.press("Get the line")
    assert "'My Cluster' is not an endpoint name" in visitor.page.locator("#name-error").inner_text()
    visitor.fill(Name="iota")
    visitor.press("Get the line")
    assert visitor.page.get_by_role("region", name="The line to paste", exact=True).is_visible()
    assert visitor.page.get_by_role("button", name="Copy").count() == 0, "it would do nothing"
    visitor.check_width()
    visitor.page.goto("/endpoints")
    visitor.page.get_by_role("link", name="Connect iota").click()
    visitor.press("Make a line")
    assert visitor.page.get_by_role("region", name="The line to paste", exact=True).is_visible()
    visitor.page.goto("/endpoints/iota")
    assert visitor.page.get_by_text("Its agent has not told yet").is_visible()
    visitor.page.get_by_text("Give it a new token").click()
    visitor.press("Rotate the token")
    assert "has no agent token to rotate" in visitor.page.get_by_role("alert").inner_text()


# ---- a cluster -------------------------------------------------------------------------------------------------------


def test_a_cluster_at_a_glance(visit: Visit, cluster: str) -> None:
    visitor = visit()
    visitor.page.goto("/endpoints")
    card = visitor.page.get_by_role("region", name=cluster)
    text = card.inner_text()
    for part in ("Online", "Example centre", "Slurm 24.05.3", "H100", "16 free of 32, 4 down", "3 running, 7 waiting"):
        assert part in text, text
    free = card.get_by_role("definition").filter(has_text="nodes free").inner_text()
    assert free.splitlines() == [
        "H100: 3 of 8 nodes free, 1 down; 16 of 32 GPUs free",
        "Without GPUs: 4 of 4 nodes free",
    ]
    assert card.get_by_label("H100 in use at frontier").get_attribute("value") == "12"
    card.get_by_role("link", name=cluster).click()
    visitor.page.wait_for_url(f"**/endpoints/{cluster}")


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False), (1280, True), (1600, False)])
def test_all_that_is_known_of_a_cluster(visit: Visit, cluster: str, width: int, dark: bool) -> None:
    visitor = visit(width=width, dark=dark)
    page = visitor.page
    page.goto(f"/endpoints/{cluster}")
    about = page.get_by_role("region", name="What it is").inner_text()
    for part in (
        "alice@login1.<b>example</b>", "0.1.0, Python 3.11.7", "12 nodes, 1 down; 1024 cores", "phys101 (default)",
        "normal, long", "apptainer 1.3.4", "built with apptainer as batch jobs", "2d 00h",
    ):  # fmt: skip
        assert part in about, about
    rows = page.get_by_role("table", name="Partitions").get_by_role("row")
    gpu, cpu = rows.nth(1).inner_text(), rows.nth(2).inner_text()
    for part in ("default", "up", "7 of 8", "32 × H100", "64", "512 GiB", "2d 00h", "1h 00m", "at most 8", "nvlink"):
        assert part in gpu, gpu
    assert "down" in cpu and "accounts phys101" in cpu and "no limit" in cpu
    rules = page.get_by_role("region", name="Its own rules").inner_text()
    for part in ("/etc/diamond/policy.toml and /home", "<b>x</b>", "In force since", "tasks of others are refused."):
        assert part in rules, rules
    disks = page.get_by_role("table", name="File systems")
    assert "4.0 TiB of 10.0 TiB (40 %)" in disks.inner_text()
    assert disks.get_by_label("/scratch/alice is 99 % full").count() == 1
    assert "20 GiB left in /scratch/alice" in page.get_by_role("region", name="Now").inner_text()
    now = page.get_by_role("region", name="Now").inner_text()
    assert "H100: 3 of 8 nodes free, 1 down; 16 of 32 GPUs free" in now and "Nodes counted" in now
    assert "max_nodes" in page.get_by_role("region", name="Its own rules").inner_text()
    visitor.check_accessible()
    visitor.check_width()


def test_every_page_is_readable_in_both_lights(visit: Visit, cluster: str) -> None:
    for how in ({"width": 400}, {"dark": True}):
        visitor = visit(**how)
        for path in ("/endpoints", "/endpoints/new", f"/endpoints/{cluster}/line"):
            visitor.page.goto(path)
            visitor.check_accessible()
            visitor.check_width()


# ---- with others -----------------------------------------------------------------------------------------------------


def test_sharing_with_a_project(chromium: Any, tmp_path: Path) -> None:
    with Service(tmp_path / "home", multi_user="1") as team:
        alice = config_of(team)
        speak(team.url, register(alice, "frontier"), CLUSTER, EndpointUsage())
        token = people.invite(alice, "bob")
        people.save(Home(tmp_path / "bob"), team.url, token)
        with team.client() as client:
            client.projects.create("lab")
            client.projects.set_member("lab", "bob", "member")
        owner, member = Visitor(chromium, team.url), Visitor(chromium, team.url)
        member.sign_in("bob")
        member.page.goto("/endpoints")
        assert member.page.get_by_text("No endpoints yet").is_visible()
        member.check_accessible()
        owner.sign_in("alice")
        owner.page.goto("/endpoints/frontier")
        owner.page.get_by_label("Project").select_option("lab")
        owner.press("Share")
        owner.page.wait_for_url("**?done=shared")
        member.page.goto("/endpoints")
        assert "alice" in member.page.get_by_role("region", name="frontier").inner_text()
        member.page.get_by_role("link", name="frontier").click()
        member.page.wait_for_url("**/endpoints/frontier")
        assert member.page.get_by_text("Remove the endpoint").count() == 0, "it can be used, not changed"
        owner.press("Stop sharing with lab")
        owner.page.wait_for_url("**?done=unshared")
        owner.check_accessible()
        assert member.page.goto("/endpoints/frontier").status == 404
        member.allowed += REFUSED
        owner.leave()
        member.leave()
