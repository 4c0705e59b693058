"""`diamond pool` and `launch --pool` against a real service.

The cluster here has no agent: its pools wait for their nodes, and say so. Commands run in this process, since there are
many of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from diamond.cli import main
from diamond.core.errors import InvalidInput, NotFound
from diamond.core.pools import PoolSpec
from testing.service import Service
from testing.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("pools") / "home") as running:
        with running.client() as client:
            client.endpoints.create("hpc")
        yield running


@dataclass
class Done:
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command with its options; `code` is what it must end with."""
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)

    def call(*words: str, code: int = 0) -> Done:
        with pytest.raises(SystemExit) as caught:
            main.main(list(words))
        said = Done(*capsys.readouterr())
        assert (caught.value.code or 0) == code, said
        return said

    return call


def as_json(run: Run, *words: str, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code).stdout)


def test_made_shown_changed_and_closed(run: Run) -> None:
    words = ("--nodes", "2..8", "--gpus", "A100:4", "--walltime", "2h", "-p", "gpu", "--account", "pde")
    done = run("pool", "create", "hpc", *words)
    assert done.stdout.startswith("made pool hpc-pool (pol_")
    assert "launch task.yaml --pool hpc-pool" in done.stderr
    (listed,) = as_json(run, "pool", "ls")["pools"]
    assert (listed["name"], listed["spec"]["nodes"], listed["spec"]["walltime"]) == ("hpc-pool", "2..8", 7200)
    assert listed["spec"]["slurm"]["partition"] == "gpu"
    table = run("pool", "list").stdout.splitlines()
    assert table[0].split()[:3] == ["NAME", "ENDPOINT", "OWNER"] and "0 (2..8)" in table[1]
    eventually(lambda: "2 more nodes are asked for" in run("pool", "show", "hpc-pool").stdout)
    page = run("pool", "show", listed["id"]).stdout
    assert "0 held of 2..8, 2 wanted" in page and "hpc, partition gpu, account pde" in page
    assert len(as_json(run, "pool", "show", "hpc-pool")["pilots"]) == 2
    assert "nodes 0..3, walltime 2h, idle 30m" in run(
        "pool", "set", "hpc-pool", "--nodes", "0..3", "--idle", "30m"
    ).stdout  # fmt: skip
    assert run("pool", "close", "hpc-pool").stdout == "closed hpc-pool\n"
    assert "pool create ENDPOINT" in run("pool", "ls").stderr
    assert "closed" in run("pool", "ls", "-a").stdout
    assert as_json(run, "pool", "close", "hpc-pool")["closed_at"] is not None


def test_mistakes_name_the_option_and_say_what_to_do(run: Run) -> None:
    nowhere = run("pool", "create", "nowhere", "--gpus", "4", code=1).stderr
    assert "ENDPOINT: there is no endpoint 'nowhere'" in nowhere and "hint: endpoints: " in nowhere
    assert "--nodes: nothing to change was given" in run("pool", "set", "x", code=2).stderr
    assert "`diamond pool ls` lists them" in run("pool", "show", "..", code=1).stderr
    assert as_json(run, "pool", "close", "", code=1)["error"]["code"] == "not_found"
    assert as_json(run, "pool", "ls")["pools"] == []


def test_a_task_is_launched_into_a_pool_by_an_option(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("run: echo\nresources: {slots: 1..4}\n")
    assert "the task names none" in run("launch", "-d", str(file), code=1).stderr
    assert "there is no pool 'cores'" in run("launch", "-d", str(file), "--pool", "cores", code=1).stderr
    assert "--pool: must not be empty" in run("launch", "-d", str(file), "--pool", "", code=2).stderr
    as_json(run, "pool", "create", "hpc", "--name", "cores", "--slots", "4", "--cpus", "2", "--memory", "8")
    task = as_json(run, "launch", "-d", str(file), "--pool", "cores")
    assert task["spec"]["pool"] == "cores"
    eventually(lambda: "no node yet" in as_json(run, "show", task["id"])["pending_reason"])
    (found,) = as_json(run, "pool", "show", "cores")["tasks"]
    assert (found["task_id"], found["slots"], found["least"], found["most"]) == (task["id"], 0, 1, 4)
    page = run("pool", "show", "cores").stdout
    assert "0 of 1..4" in page and "the pool holds no node yet" in page
    assert "What is not done waits" in run("pool", "close", "cores").stderr
    assert "is closed" in run("launch", "-d", str(file), "--pool", "cores", code=1).stderr
    run("stop", task["id"])


def test_from_python(service: Service) -> None:
    with service.client() as client:
        spec = PoolSpec(name="a-b", endpoint="hpc", slots=2, nodes="0..1")
        made = client.pools.create(spec)
        assert client.pools.get("a-b").id == made.id
        assert client.pools.change("a-b", nodes=1, walltime="1h").spec.walltime == 3600
        assert client.pools.change("a-b", {"idle": "1h"}).spec.idle == 3600
        for wrong, field in (
            ({"node": 2}, "node"),
            ({"nodes": 2}, "nodes"),
            ({"slots": 4}, "slots"),
            (["nodes"], "changes"),
        ):
            with pytest.raises(InvalidInput) as caught:
                client.pools.change("a-b", wrong, nodes=1)  # type: ignore[arg-type]
            assert caught.value.field == field
        assert [pool.name for pool in client.pools.list()] == ["a-b"]
        assert client.pools.close(made.id).closed_at is not None
        assert "a-b" in {pool.name for pool in client.pools.list(closed=True)}
        for odd in ("..", "../a/b", "a-b/record"):
            with pytest.raises(InvalidInput, match="not the name of a pool") as caught:
                client.pools.create(replace(spec, name=odd))
            assert caught.value.field == "name"
        for unknown in (".", "..", "../a/b"):
            with pytest.raises(NotFound):
                client.pools.get(unknown)
