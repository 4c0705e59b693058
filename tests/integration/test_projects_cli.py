"""`diamond project` and `diamond task share` of two people, typed at a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.home import ClientConfig, Home
from testing import people
from testing.service import Service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("projects") / "server", multi_user="1") as running:
        yield running


class Person:
    def __init__(self, env: dict[str, str]) -> None:
        self._env = env

    def run(self, *argv: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "diamond.cli", *argv],
            env={**self._env, **env}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return done

    def json(self, *argv: str, status: int = 0, **env: str) -> Any:
        return json.loads(self.run(*argv, "--json", status=status, **env).stdout)


@pytest.fixture(scope="module")
def alice(server: Service) -> Person:
    return Person(server.env)


@pytest.fixture(scope="module")
def bob(server: Service, tmp_path_factory: pytest.TempPathFactory) -> Person:
    admin = ClientConfig.load(server.home)
    assert admin is not None
    home = Home(tmp_path_factory.mktemp("bob") / "home")
    people.save(home, server.url, people.invite(admin, "bob"))
    return Person({**server.env, "DIAMOND_HOME": str(home.path)})


def test_a_project_from_the_command_line(alice: Person, bob: Person, tmp_path: Path) -> None:
    made = alice.run("project", "create", "lab", "--title", "Our lab")
    assert "diamond project add lab USER" in made.stderr
    assert alice.json("project", "ls")["projects"][1]["name"] == "lab"
    assert "you are in no project 'lab'" in bob.run("project", "show", "lab", status=1).stderr
    assert "bob is a viewer" in alice.run("project", "add", "lab", "bob", "--role", "viewer").stderr
    shown = bob.run("project", "show", "lab").stdout
    assert "Our lab" in shown and "you are a viewer" in shown and "alice  owner" in shown
    assert "none of owner, member, viewer" in alice.run("project", "add", "lab", "bob", "--role", "x", status=2).stderr

    task = tmp_path / "task.yaml"
    task.write_text("run: 'true'\nproject: lab\n")
    refused = bob.run("launch", str(task), "-d", status=1).stderr
    assert "you are a viewer of project lab, and this needs a member" in refused
    alice.run("project", "role", "lab", "bob", "member")
    launched = bob.json("launch", str(task), "-d")
    assert (launched["project"], launched["visibility"], launched["owner"]) == ("lab", "project", "bob")
    task.write_text("run: 'true'\n")
    assert bob.json("launch", str(task), "-d")["project"] == "bob"
    assert bob.json("launch", str(task), "-d", DIAMOND_PROJECT="lab")["project"] == "lab"
    assert bob.json("launch", str(task), "-d", "--project", "lab")["project"] == "lab"
    assert "no project 'nope'" in bob.run("launch", str(task), "-d", "--project", "nope", status=1).stderr

    rows = alice.json("ps", "--project", "lab")["tasks"]
    assert len(rows) == 3 and {row["owner"] for row in rows} == {"bob"}
    assert "OWNER" in alice.run("ps", "--project", "lab").stdout
    one = launched["id"]
    assert "bob" in alice.run("show", one).stdout
    bob.run("task", "share", one, "--private")
    assert "there is no task" in alice.run("show", one, status=1).stderr
    assert "everybody with an account here" in bob.run("task", "share", one, "--public").stderr
    bob.run("task", "share", one, status=2)

    everybody = alice.json("ps", "--everybody")["tasks"]
    assert len(everybody) == 4 and not any(row["name"] for row in everybody)
    assert "for administrators" in bob.run("ps", "--everybody", status=1).stderr
    for row in everybody:
        alice.run("stop", "--as-admin", row["id"])
    assert bob.json("ps")["tasks"] == []

    alice.run("endpoint", "create", "site", "--json")
    said = alice.run("project", "share-endpoint", "lab", "site").stderr
    assert "allow_others = true" in said and "containers_only = true" in said
    assert [one["name"] for one in bob.json("endpoint", "ls")["endpoints"]] == ["site"]
    alice.run("project", "share-endpoint", "lab", "site", "--stop")
    assert bob.json("endpoint", "ls")["endpoints"] == []

    bob.run("endpoint", "create", "bobs", "--json")
    for decision in ("withdrawn", "declined", "approved"):
        said = bob.run("project", "share-endpoint", "lab", "bobs").stderr
        assert "go to endpoint bobs once one of its owners (alice) approves" in said
        assert "waits for  an owner of project lab" in bob.run("endpoint", "show", "bobs").stdout
        assert "wait for an owner of the project\n  bobs  bob's" in bob.run("project", "show", "lab").stdout
        assert "this needs an owner" in bob.run("project", "approve", "lab", "bobs", "-y", status=1).stderr
        if decision == "withdrawn":
            bob.run("project", "share-endpoint", "lab", "bobs", "--stop")
        elif decision == "declined":
            assert "diamond project approve lab ENDPOINT" in alice.run("project", "show", "lab").stdout
            assert "Its owner is told" in alice.run("project", "decline", "lab", "bobs").stderr
            assert "nobody asked for that" in alice.run("project", "decline", "lab", "bobs", status=1).stderr
        else:
            alice.run("project", "approve", "lab", "bobs", status=1)  # it asks first, and nobody answers
            assert alice.json("project", "approve", "lab", "bobs", "-y")["endpoints"] == ["bobs"]
    shown = alice.run("project", "show", "lab").stdout
    assert "bobs  bob's, approved by alice; nothing has run there yet: name it with --infra" in shown
    task.write_text("run: 'true'\nproject: lab\nresources: {infra: bobs}\n")
    assert "bobs" in alice.json("launch", str(task), "--dry-run")["why"][0]
    alice.run("endpoint", "rm", "bobs", "-y", status=1)

    assert "task" in bob.run("project", "give", "task", one, "alice", "-y").stderr
    assert bob.json("show", one)["owner"] == "alice"
    assert "only owner" in alice.run("project", "leave", "lab", "-y", status=1).stderr
    bob.run("project", "leave", "lab", "-y")
    assert alice.json("project", "rm", "lab", "-y")["moved"] == 3
    assert [each["name"] for each in alice.json("project", "ls")["projects"]] == ["alice"]
    assert alice.json("project", "hand-over", "bob", "alice", "-y")["tasks"] == 3


def test_names_and_lists_follow_the_chosen_project(alice: Person, bob: Person, tmp_path: Path) -> None:
    for argv in (["create", "pair"], ["add", "pair", "bob"]):
        alice.run("project", *argv)
    task = tmp_path / "task.yaml"
    task.write_text("run: 'true'\n")
    theirs = bob.json("launch", str(task), "-d", "--name", "train", "--project", "pair")["id"]
    own = alice.json("launch", str(task), "-d", "--name", "mine")["id"]
    shared = alice.json("launch", str(task), "-d", "--name", "ours", "--project", "pair")["id"]
    here = {"DIAMOND_PROJECT": "pair"}

    ids = lambda *argv, **env: {row["id"] for row in alice.json("ps", *argv, **env)["tasks"]}  # noqa: E731
    assert ids() == ids("--mine") == ids("--mine", **here) | {own} == {own, shared}
    assert ids(**here) == ids("--project", "pair") == {theirs, shared}
    assert ids("--project", "pair", "--mine") == {shared}
    assert ids("--owner", "bob", **here) == {theirs}
    assert "leave one of them out" in alice.run("ps", "--mine", "--owner", "bob", status=2).stderr
    assert "OWNER" in alice.run("ps", **here).stdout
    assert "no project 'nope'" in alice.run("ps", status=1, DIAMOND_PROJECT="nope").stderr

    lost = alice.run("show", "train", status=1).stderr
    assert "there is no task 'train' of yours" in lost and "set DIAMOND_PROJECT" in lost
    assert alice.json("show", "train", **here)["id"] == theirs
    assert alice.json("show", "mine", **here)["id"] == own
    assert "nor one that you see in project pair" in alice.run("show", "none", status=1, **here).stderr
    for command in (["exec", "train", "--", "true"], ["ssh", "train"]):
        refused = alice.run(*command, status=1, **here).stderr
        assert f"task {theirs} is bob's" in refused and "only its owner opens shells in it" in refused
    refused = bob.run("stop", "ours", status=1, **here).stderr
    assert f"task {shared} is alice's: you can look at it, not stop it" in refused

    # An owner of the project may; and whose task it was is told by whom.
    assert f"train ({theirs}) of bob" in alice.run("stop", "train", **here).stdout
    told = bob.run("show", theirs).stdout
    assert "Stopped on request." in told and "stopped by alice, an owner of its project" in told
    # Of the same name, one's own comes first.
    second = alice.json("launch", str(task), "-d", "--name", "train", "--project", "pair")["id"]
    bob.run("launch", str(task), "-d", "--name", "train", "--project", "pair")
    assert alice.json("show", "train", **here)["id"] == second
    for who in (alice, bob):
        who.run("stop", "--all", "-y")


def test_an_installation_with_accounts_does_not_advise_up(bob: Person) -> None:
    for argv in (["endpoint", "ls"], ["gpus"], ["check"]):
        done = bob.run(*argv)
        said = done.stdout + done.stderr
        assert "endpoint create NAME registers a cluster" in said and "diamond up" not in said


def test_identities_and_secrets_of_the_command_line(bob: Person, tmp_path: Path) -> None:
    assert bob.json("user", "identities")["identities"] == []
    assert "/settings" in bob.run("user", "identities").stderr
    assert "you have no identity" in bob.run("user", "unlink", "idn_nothing", "-y", status=1).stderr
    task = tmp_path / "task.yaml"
    task.write_text("run: 'true'\nsecrets: [FIRST]\n")
    refused = bob.run("launch", str(task), "-d", "--secret", "second", status=1).stderr
    assert "there is no secret 'FIRST'" in refused
    for name in ("FIRST", "second", "third"):
        (tmp_path / "value").write_text(f"value of {name}")
        bob.run("secret", "set", name, "--file", str(tmp_path / "value"))
    made = bob.json("launch", str(task), "-d", "--secret", "second", "--secret", "OTHER=third")
    assert {variable: use["secret"] for variable, use in made["spec"]["secrets"].items()} == {
        "FIRST": "FIRST", "second": "second", "OTHER": "third"
    }  # fmt: skip
    assert "--secret" in bob.run("launch", str(task), "-d", "--secret", "OTHER=no/name", status=2).stderr
    bob.run("stop", made["id"])
