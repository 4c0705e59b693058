"""A real Slurm site that its owner shares with a project: its policy file decides, and who asked is on record.

alice owns the endpoint, whose agent runs as the site's user1; bob is in her project, and has no account at the site.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from diamond.core.errors import InvalidInput, NotFound
from diamond.core.home import ClientConfig, Home
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing import people
from testing.cluster import BINDS, Cluster
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.waiting import eventually


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    require("trixie")
    with Site("alpha", binds=BINDS) as running:
        yield running


@pytest.fixture
def cluster(site: Site, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(site, tmp_path / "server", home=f"/home/user1/.diamond/agents/{tmp_path.name}") as running:
        yield running


@pytest.fixture
def bob(cluster: Cluster, tmp_path: Path) -> Iterator[Client]:
    admin = ClientConfig.load(cluster.service.home)
    assert admin is not None
    config = people.save(Home(tmp_path / "bob"), cluster.service.url, people.invite(admin, "bob"))
    with Client(url=config.url, token=config.token) as client:
        yield client


def set_policy(cluster: Cluster, text: str, client: Client, allows: bool) -> None:
    cluster.site.write(f"{cluster.home_inside}/policy.toml", text, user="user1")

    def is_known() -> bool:
        facts = client.endpoints.get("cluster").facts
        return facts is not None and facts.allows_others is allows

    eventually(is_known, within_s=60, what="the agent has said what it allows now")


def ledger(cluster: Cluster) -> list[dict[str, str]]:
    path = f"{cluster.home_inside}/asked.jsonl"
    found = cluster.site.run(["cat", path], user="user1", check=False).stdout
    return [json.loads(line) for line in found.splitlines()]


def test_others_run_only_with_the_policy_and_are_on_record(cluster: Cluster, bob: Client) -> None:
    site = cluster.site
    with cluster.service.client() as alice:
        alice.projects.create("lab")
        alice.projects.set_member("lab", "bob", "member")
        spec = {"run": "sleep 5; echo done by $DIAMOND_TASK_ID", "project": "lab", "resources": {"infra": "cluster"}}
        with pytest.raises(NotFound):
            bob.endpoints.get("cluster")
        with pytest.raises(InvalidInput, match="there is no endpoint 'cluster'"):
            bob.tasks.create(spec)

        alice.projects.share_endpoint("lab", "cluster")
        assert bob.endpoints.get("cluster").owner == "alice"
        with pytest.raises(InvalidInput, match="its policy file lets only alice run tasks there"):
            bob.tasks.create(spec)
        own = alice.tasks.create({"run": "echo mine", "resources": {"infra": "cluster"}})
        assert alice.tasks.wait(own.id, timeout_s=90).state is TaskState.SUCCEEDED
        assert ledger(cluster) == [], "its owner's own jobs are not others'"
        assert alice.endpoints.get("cluster").proven_at is not None, "what Slurm tells of a run is believed"

        set_policy(cluster, "allow_others = true\n", alice, True)
        task = bob.tasks.create({**spec, "slurm": {"extra": ["--comment=nobody asked for this"]}})
        eventually(lambda: bob.tasks.get(task.id).jobs[-1].scheduler_id, within_s=60, what="it is in Slurm's queue")
        number = bob.tasks.get(task.id).jobs[-1].scheduler_id
        assert number is not None
        said = site.run(["scontrol", "show", "job", number], user="user1").stdout
        assert "Comment=diamond: asked by bob" in said
        assert alice.tasks.get(task.id).owner == "bob", "what runs in her project alice sees"
        done = bob.tasks.wait(task.id, timeout_s=90)
        assert done.state is TaskState.SUCCEEDED, done.detail
        assert f"done by {task.id}".encode() in b"".join(bob.tasks.logs(task.id))
        job = done.jobs[-1]
        order = json.loads(site.run(["cat", f"{job.run_dir}/order.json"], user="user1").stdout)
        assert order["user"] == "bob"
        lines = ledger(cluster)
        assert [(line["user"], line["job"], line["task"]) for line in lines] == [("bob", job.id, task.id)] * 2
        assert [line["scheduler_id"] for line in lines] == ["", number]
        mode = site.run(["stat", "-c", "%a", f"{cluster.home_inside}/asked.jsonl"], user="user1").stdout.strip()
        assert mode == "600"


def test_the_agent_decides_whatever_the_server_believes(cluster: Cluster, bob: Client) -> None:
    """The policy changes while the server still thinks others are welcome: the order comes, and is refused there."""
    with cluster.service.client() as alice:
        alice.projects.create("lab")
        alice.projects.set_member("lab", "bob", "member")
        alice.projects.share_endpoint("lab", "cluster")
        set_policy(cluster, "allow_others = true\n", alice, True)
        cluster.stop_agent()
        task = bob.tasks.create({"run": "echo no", "project": "lab", "resources": {"infra": "cluster"}})
        cluster.site.write(f"{cluster.home_inside}/policy.toml", "", user="user1")
        cluster.start_agent()
        done = bob.tasks.wait(task.id, timeout_s=90)
        assert done.state is TaskState.FAILED
        assert "allow_others = false, the task is of user bob and this endpoint is alice's" in done.detail
        assert ledger(cluster) == []
