"""Images on real clusters, end to end: built as an ordinary account, used on two nodes, shared, copied, interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import DiamondError, Forbidden, InvalidInput, NotFound
from diamond.core.images import ImageFacts, ReplicaState
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing.cluster import BINDS
from testing.images import BASE_INSIDE, build_envs, image_binds
from testing.installation import Installation, Person
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.proxy import Proxy
from testing.waiting import eventually

ODD = "two\nlines 'quoted' \"twice\" $HOME `x` ünï\t%post\n end "
RECIPE: dict[str, Any] = {
    "name": "everything",
    "base": BASE_INSIDE,
    "system": ["hello"],
    "pip": ["six", "idna"],
    "envs": {"ODD": ODD, "WHO": "recipe"},
    "build": "cat > /opt/made <<'%post'\nby $ORIGIN\n%post\n",
    "test": "hello; python3 -c 'import six, idna'",
}
SHOWS = """\
hello > /dev/null && python3 - <<'END'
import idna, os, six
print(os.environ["RANK"], os.environ["SLURMD_NODENAME"], os.environ["WHO"], repr(open("/opt/made").read()))
assert os.environ["ODD"] == open("odd").read()
END
"""


@pytest.fixture(scope="module")
def sites() -> Iterator[tuple[Site, Site]]:
    require("trixie")
    binds = {**BINDS, **image_binds()}
    with (
        Site("alpha", binds=binds) as alpha,
        Site("beta", binds=binds) as beta,
    ):
        yield alpha, beta


@pytest.fixture(scope="module")
def diamond(sites: tuple[Site, Site], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("images")) as running:
        yield running


@pytest.fixture(scope="module")
def one(diamond: Installation, sites: tuple[Site, Site]) -> Iterator[Person]:
    """user1, with an agent at each site."""
    person = diamond.person("user1")
    with Proxy(sites[0].server_address) as near, Proxy(sites[1].server_address) as far:
        diamond.enrol(person, sites[0], "alpha", env=build_envs(near))
        diamond.enrol(person, sites[1], "beta", env=build_envs(far))
        yield person


@pytest.fixture(scope="module")
def two(diamond: Installation, sites: tuple[Site, Site], one: Person) -> Person:
    """user2, with an agent of their own at the first site, and no way to package indexes."""
    person = diamond.person("user2")
    diamond.enrol(person, sites[0], "alpha2")
    return person


@pytest.fixture(scope="module")
def client(one: Person) -> Iterator[Client]:
    with one.client() as made:
        yield made


@pytest.fixture(scope="module")
def built(one: Person, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The recipe, built from the command line."""
    file = tmp_path_factory.mktemp("recipe") / "it's a recipe.json"
    file.write_text(json.dumps(RECIPE))
    done = one.diamond("image", "build", str(file), "--infra", "alpha", "--json", timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def facts_at(client: Client, name: str, endpoint: str) -> ImageFacts:
    (replica,) = [each for each in client.images.get(name).replicas if each.endpoint == endpoint]
    assert replica.state is ReplicaState.READY, replica
    assert replica.facts is not None
    return replica.facts


def log_of(client: Client, task_id: str) -> str:
    return b"".join(client.tasks.logs(task_id)).decode()


def pip_versions(client: Client, name: str, endpoint: str) -> dict[str, str]:
    lock = json.loads(client.images.file(name, "lock.json", endpoint=endpoint))
    return {p["name"].lower(): p["version"] for p in lock["packages"] if p["kind"] == "pip"}


def test_apt_pip_commands_and_variables_are_all_in_it(client: Client, built: dict[str, Any], tmp_path: Path) -> None:
    made = facts_at(client, "everything", "alpha")
    assert (made.builder, made.architecture, made.os) == ("apptainer", "x86_64", "debian 13")
    assert [stage.name for stage in made.stages] == ["base", "system", "pip", "commands", "pack", "test"]
    lock = json.loads(client.images.file("everything", "lock.json", endpoint="alpha"))
    assert {"hello", "six", "idna"} <= {package["name"] for package in lock["packages"]}
    assert json.loads(client.images.file("everything", "sbom.cdx.json", endpoint="alpha"))["bomFormat"] == "CycloneDX"
    (tmp_path / "odd").write_bytes(ODD.encode())
    task = client.tasks.create(
        {
            "run": SHOWS,
            "workdir": str(tmp_path),
            "num_nodes": 2,
            "envs": {"WHO": "task"},
            "resources": {"image_id": "everything", "infra": "alpha"},
        }
    )
    done = client.tasks.wait(task.id, timeout_s=120)
    log = log_of(client, task.id)
    assert done.state is TaskState.SUCCEEDED, f"{done.detail}\n{log}"
    lines = sorted(line.split(" ", 1)[1] for line in log.splitlines() if line.startswith("["))
    assert [(line.split()[0], line.split()[2:]) for line in lines] == [
        (rank, ["task", "'by", "$ORIGIN\\n'"]) for rank in ("0", "1")
    ], log
    assert len({line.split()[1] for line in lines}) == 2


def test_the_same_recipe_is_there_already_and_a_changed_last_step_redoes_no_other(
    one: Person, client: Client, built: dict[str, Any]
) -> None:
    again = client.images.build(RECIPE, endpoint="alpha")
    assert again.cached and again.image.id == client.images.get("everything").id
    other = client.images.build({**RECIPE, "name": "changed", "build": "echo other > /opt/made"}, endpoint="alpha")
    client.images.wait(other.image.id, timeout_s=300)
    states = {stage.name: stage.state for stage in facts_at(client, "changed", "alpha").stages}
    assert (states["system"], states["pip"], states["commands"]) == ("kept", "kept", "done")


def test_other_builders_install_the_same_versions(client: Client, built: dict[str, Any]) -> None:
    wanted = pip_versions(client, "everything", "alpha")
    pinned = [f"{name}=={wanted[name]}" for name in ("six", "idna")]
    for builder, changes in (
        ("charliecloud", {}),
        ("venv", {"base": "host", "system": [], "build": None, "test": "python -c 'import six, idna'"}),
    ):
        recipe = {**RECIPE, **changes, "name": f"by-{builder}", "builder": builder, "pip": pinned}
        made = client.images.build(recipe, endpoint="alpha")
        client.images.wait(made.image.id, timeout_s=400)
        found = pip_versions(client, f"by-{builder}", "alpha")
        assert {name: found[name] for name in ("six", "idna")} == {name: wanted[name] for name in ("six", "idna")}
        task = client.tasks.create(
            {"run": "python3 -c 'import idna, six; print(six.__version__)'; echo $WHO",
             "resources": {"image_id": f"by-{builder}", "infra": "alpha"}}
        )  # fmt: skip
        done = client.tasks.wait(task.id, timeout_s=120)
        log = log_of(client, task.id)
        assert (done.state, log) == (TaskState.SUCCEEDED, f"{wanted['six']}\nrecipe\n"), f"{done.detail}\n{log}"


def test_a_copy_at_the_second_site_survives_a_cut_and_is_the_same(
    sites: tuple[Site, Site], client: Client, built: dict[str, Any]
) -> None:
    beta = sites[1]
    there = facts_at(client, "everything", "alpha")
    beta.network.delay(40)  # so that its bytes are on their way for a while
    try:
        build = client.images.copy("everything", "beta")

        def has_some() -> bool:
            part = beta.run(["sh", "-c", "ls -l .diamond/agents/beta/cache/partial"], check=False).stdout
            return any(line.split()[4] != "0" for line in part.splitlines() if line.startswith("-"))

        eventually(has_some, within_s=120, what="some of it has arrived")
        beta.network.cut()
        eventually(lambda: True, within_s=1)
    finally:
        beta.network.mend()
    client.images.wait(build.image.id, endpoint="beta", timeout_s=240)
    here = facts_at(client, "everything", "beta")
    assert (here.digest, here.size_bytes) == (there.digest, there.size_bytes)
    assert here.path != there.path or sites[0].name != sites[1].name
    said = beta.run(["sha256sum", here.path]).stdout.split()[0]
    assert f"sha256:{said}" == here.digest
    (replica,) = [each for each in client.images.get("everything").replicas if each.endpoint == "beta"]
    assert replica.origin == "copied"
    task = client.tasks.create({"run": "hello", "resources": {"image_id": "everything", "infra": "beta"}})
    assert client.tasks.wait(task.id, timeout_s=120).state is TaskState.SUCCEEDED


def test_what_is_private_shared_and_not_theirs_to_change(
    one: Person, two: Person, client: Client, built: dict[str, Any]
) -> None:
    task = {"run": "hello; cat /opt/made", "resources": {"image_id": "user1/everything", "infra": "alpha2"}}
    image_id = client.images.get("everything").id
    with two.client() as other:
        for ref in ("user1/everything", image_id):
            with pytest.raises(NotFound):
                other.images.get(ref)
            with pytest.raises(NotFound):
                other.images.remove(ref)
        with pytest.raises(InvalidInput, match="no image"):
            other.tasks.create(task)
        assert not [image for image in other.images.list(everything=True) if image.id == image_id]
        assert one.diamond("image", "share", "everything", "--public").returncode == 0
        made = other.tasks.create(task)
        done = other.tasks.wait(made.id, timeout_s=240)
        assert done.state is TaskState.SUCCEEDED, done.detail
        assert "by $ORIGIN" in log_of(other, made.id)
        (replica,) = [each for each in other.images.get("user1/everything").replicas if each.endpoint == "alpha2"]
        assert replica.origin in ("linked", "copied")
        for change in (
            lambda: other.images.remove("user1/everything"),
            lambda: other.images.share("user1/everything", "public"),
        ):
            with pytest.raises((Forbidden, NotFound)):
                change()
    client.images.share("everything", "private")
    with two.client() as other, pytest.raises(DiamondError):
        other.tasks.create(task)


def test_two_people_build_one_name_at_once(one: Person, two: Person, client: Client) -> None:
    recipes = {who: {"name": "same", "base": BASE_INSIDE, "build": f"echo {who} > /opt/who"} for who in ("one", "two")}
    with two.client() as other:
        mine = client.images.build(recipes["one"], endpoint="alpha")
        theirs = other.images.build(recipes["two"], endpoint="alpha2")
        assert mine.image.id != theirs.image.id
        for who, person, endpoint in (("one", client, "alpha"), ("two", other, "alpha2")):
            person.images.wait("same", timeout_s=300)
            task = person.tasks.create({"run": "cat /opt/who", "resources": {"image_id": "same", "infra": endpoint}})
            done = person.tasks.wait(task.id, timeout_s=120)
            assert (done.state, log_of(person, task.id)) == (TaskState.SUCCEEDED, f"{who}\n"), done.detail


def test_a_node_lost_under_a_build_offers_nothing_and_a_retry_works(
    sites: tuple[Site, Site], client: Client, one: Person
) -> None:
    alpha = sites[0]
    recipe = {"name": "unlucky", "base": BASE_INSIDE, "where": "batch", "build": "test -e /opt/x || sleep 3; echo on"}
    slow = {**recipe, "build": "echo begun; sleep 60"}
    build = client.images.build(slow, endpoint="alpha")
    eventually(lambda: "begun" in b"".join(client.images.logs(build.image.id)).decode(), within_s=90, what="it builds")
    (job,) = client.tasks.get(client.images.task_id(build.image.id)).jobs
    assert job.scheduler_id and job.hosts, "it runs under Slurm"
    alpha.kill_node(job.hosts[0])
    try:
        eventually(
            lambda: (
                client.images.get(build.image.id).replicas[0].state is not ReplicaState.BUILDING
                or len(client.tasks.get(client.images.task_id(build.image.id)).jobs) > 1
            ),
            within_s=90,
            what="somebody notices",
        )
        client.tasks.cancel(client.images.task_id(build.image.id))
    finally:
        alpha.start_node(job.hosts[0])
    eventually(
        lambda: client.images.get(build.image.id).replicas[0].state is ReplicaState.FAILED,
        within_s=60,
        what="it failed",
    )
    store = alpha.run(["ls", ".diamond/agents/alpha/images/store"]).stdout.split()
    assert build.image.id not in store
    again = client.images.build(recipe, endpoint="alpha")
    client.images.wait(again.image.id, timeout_s=300)
    assert facts_at(client, again.image.id, "alpha").digest
    left = alpha.run(["ls", ".diamond/agents/alpha/images/tmp"]).stdout.split()
    assert not [name for name in left if name.startswith("job_")], "the dead build's folder is gone"
