"""A real Slurm site that its owner shares with a project: its policy file decides, and who asked is on record.

alice owns the endpoint, whose agent runs as the site's user1; bob is in her project, and has no account at the site.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import InvalidInput, NotFound
from diamond.core.home import ClientConfig, Home
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing import people
from testing.cluster import BINDS, Cluster
from testing.images import BASE_INSIDE, image_binds
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


ON_HOST = "allow_others = true\nallow_others_on_host = true\n"


def _others_problem(client: Client) -> str:
    facts = client.endpoints.get("cluster").facts
    return facts.others_problem if facts is not None else ""


def _warns(client: Client) -> bool:
    usage = client.endpoints.get("cluster").usage
    return usage is not None and any("allow_others = true is not in force" in text for text in usage.warnings)


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

        # Alone it is not in force: bob's tasks would run among the files of the account.
        cluster.site.write(f"{cluster.home_inside}/policy.toml", "allow_others = true\n", user="user1")
        eventually(lambda: _others_problem(alice), within_s=60, what="the agent has said why it refuses others")
        with pytest.raises(InvalidInput, match="neither containers_only = true nor allow_others_on_host = true"):
            bob.tasks.create(spec)
        eventually(lambda: _warns(alice), within_s=60, what="and warns of it")

        set_policy(cluster, ON_HOST, alice, True)
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
        set_policy(cluster, ON_HOST, alice, True)
        cluster.stop_agent()
        task = bob.tasks.create({"run": "echo no", "project": "lab", "resources": {"infra": "cluster"}})
        cluster.site.write(f"{cluster.home_inside}/policy.toml", "", user="user1")
        cluster.start_agent()
        done = bob.tasks.wait(task.id, timeout_s=90)
        assert done.state is TaskState.FAILED
        assert "allow_others = false, the task is of user bob and this endpoint is alice's" in done.detail
        assert ledger(cluster) == []


# What a guest's program tries from within an image, end to end. $1 is the agent's home.
ATTACK = """\
for file in "$1/token" "$1/policy.toml" /home/user1/.bashrc ../../../token; do cat "$file"; done
for at in /proc/[0-9]*; do cat "$at/root$1/token"; done
mkdir -p "$1"; printf 'allow_others = true\\nallow_others_on_host = true\\n' > "$1/policy.toml"
ls /home/user1/.diamond/agents/*/jobs; echo 'touch /home/user1/hosted' >> "$DIAMOND_RUN_DIR/inside.sh"
echo looked
"""
SIF = "/home/user1/image.sif"


def test_a_guest_in_an_image_gets_at_nothing_and_works(guests: Cluster, tmp_path: Path) -> None:
    site, agent = guests.site, guests.home_inside
    admin = ClientConfig.load(guests.service.home)
    assert admin is not None
    config = people.save(Home(tmp_path / "bob"), guests.service.url, people.invite(admin, "bob"))
    with guests.service.client() as alice, Client(url=config.url, token=config.token) as bob:
        alice.projects.create("lab")
        alice.projects.set_member("lab", "bob", "member")
        alice.projects.share_endpoint("lab", "cluster")
        policy = "allow_others = true\ncontainers_only = true\nallow_shells_of_others = true\n"
        set_policy(guests, policy, alice, True)
        resources = {"infra": "cluster", "image_id": SIF, "cpus": 1}
        with_image = {"project": "lab", "resources": resources}
        # It is in the home of the account: no image that others may name.
        done = bob.tasks.wait(bob.tasks.create({**with_image, "run": "true"}).id, timeout_s=90)
        assert "names /home/user1/image.sif as its image, which would show it files of this account" in done.detail
        site.run(["cp", SIF, "/scratch/image.sif"], user="user1")
        resources["image_id"] = "/scratch/image.sif"
        # Two nodes, two ranks each; all of it by bob's own words.
        task = bob.tasks.create(
            {**with_image, "num_nodes": 2, "ranks_per_node": 2, "outputs": ["made-*"],
             "setup": f"cat > look.sh <<'END'\n{ATTACK}END\nsh look.sh {agent}",
             "run": f"sh look.sh {agent}; echo $RANK > made-$RANK; echo home $HOME"}
        )  # fmt: skip
        done = bob.tasks.wait(task.id, timeout_s=150)
        log = b"".join(bob.tasks.logs(task.id)).decode()
        token = site.path(f"{agent}/token").read_text().strip()
        assert done.state is TaskState.SUCCEEDED, f"{done.detail}\n{log}"
        assert log.count("looked") == 5, log
        assert token not in log and "job_" not in log.replace(done.jobs[-1].id, ""), log
        assert sorted(output.path for output in done.outputs) == [f"made-{rank}" for rank in range(4)]
        assert log.count(f"home {done.jobs[-1].run_dir}/home") == 4
        assert site.path(f"{agent}/policy.toml").read_text() == policy
        assert not site.path("/home/user1/hosted").exists()
        # Nor by a shell, which is in the container as well.
        _tries_a_shell(bob, {**with_image, "run": "sleep 100"}, agent, token)
        # The owner's own task still has the home.
        own = alice.tasks.create(
            {"run": f"ls ~/image.sif; cat {agent}/token || echo none", "resources": {**resources, "image_id": SIF}}
        )
        mine = alice.tasks.wait(own.id, timeout_s=90)
        log = b"".join(alice.tasks.logs(own.id)).decode()
        assert mine.state is TaskState.SUCCEEDED and "/home/user1/image.sif\n" in log and log.endswith("none\n"), log
        assert token not in log


def _tries_a_shell(client: Client, spec: dict[str, Any], agent: str, token: str) -> None:
    task = client.tasks.create(spec)
    eventually(lambda: client.tasks.get(task.id).state is TaskState.RUNNING, within_s=60, what="it runs")
    try:
        text = f'cat {agent}/token {agent}/policy.toml; ls /home/user1; echo "home $HOME"'
        done = client.tasks.exec(task.id, ["sh", "-c", text])
        assert token.encode() not in done.stdout and b"image.sif" not in done.stdout, done
        assert done.stdout.endswith(f"home {client.tasks.get(task.id).jobs[-1].run_dir}/home\n".encode()), done
    finally:
        client.tasks.cancel(task.id)
        client.tasks.wait(task.id, timeout_s=60)


def test_a_centres_rules_come_first(cluster: Cluster) -> None:
    site, file = cluster.site, "/etc/diamond/policy.toml"
    folder = site.path("/etc/diamond")
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)

    def rules(client: Client) -> dict[str, str]:
        facts = client.endpoints.get("cluster").facts
        return facts.policy if facts is not None else {}

    try:
        with cluster.service.client() as alice:
            site.write(f"{cluster.home_inside}/policy.toml", "max_nodes = 4\nmax_cpus = 2\n", user="user1")
            eventually(lambda: rules(alice).get("max_nodes") == "4", within_s=60, what="her own rules hold")
            site.path(file).write_text("max_nodes = 1\n")
            site.path(file).chmod(0o644)
            eventually(lambda: rules(alice).get("max_nodes") == "1", within_s=60, what="the centre's come first")
            facts = alice.endpoints.get("cluster").facts
            assert facts is not None and rules(alice)["max_cpus"] == "2"
            assert facts.policy_files == (file, f"{cluster.home_inside}/policy.toml")
            assert facts.policy_changed_at > 0
            shown = cluster.service.diamond("endpoint", "show", "cluster").stdout
            assert file in shown and "in force since" in shown
            changes = [event.data for event in alice.events() if event.kind == "endpoint.policy_changed"]
            assert [change["rules"] for change in changes][-1] == "max_nodes = 1"
            two = {"run": "true", "num_nodes": 2, "resources": {"infra": "cluster"}}
            done = alice.tasks.wait(alice.tasks.create(two).id, timeout_s=60)
            assert "max_nodes = 1, the task asks for 2" in done.detail
            # She can neither write it nor get around it.
            taken = site.run(["sh", "-c", f"echo 'max_nodes = 9' > {file}"], user="user1", check=False)
            assert taken.returncode != 0
            site.path(file).chmod(0o666)
            one = {"run": "true", "resources": {"infra": "cluster"}}

            def refused() -> bool:
                ended = alice.tasks.wait(alice.tasks.create(one).id, timeout_s=60)
                return "the file must be root's, and writable by nobody else" in ended.detail

            eventually(refused, within_s=60, every_s=2, what="what anybody could have written is not believed")
    finally:
        site.path(file).unlink(missing_ok=True)


@pytest.fixture
def guests(tmp_path: Path) -> Iterator[Cluster]:
    require("trixie")
    with Site("guests", binds={**BINDS, **image_binds()}) as site:
        site.write("/home/user1/image.def", f"Bootstrap: localimage\nFrom: {BASE_INSIDE}\n", user="user1")
        site.run(["apptainer", "--quiet", "build", SIF, "image.def"], timeout=300)
        with Cluster(site, tmp_path / "server") as running:
            yield running
