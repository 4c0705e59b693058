"""A project in the browser: its owner sees its quota and invites into it, an administrator limits it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.sdk.client import Client
from testing import people
from testing.browser import Visitor
from testing.service import Service

Come = Callable[..., Visitor]
REFUSED = "the server responded with a status of 4"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """alice administers and is in no project; bob owns `lab`, carol is a member of it. Owners may invite."""
    folder = tmp_path_factory.mktemp("projects")
    rules = folder / "identity.toml"
    rules.write_text("[accounts]\nowners_invite = true\n")
    with Service(folder / "home", multi_user="1", identity_file=str(rules)) as running:
        admin = people.ClientConfig.load(running.home)
        assert admin is not None
        token = people.invite(admin, "bob")
        carols = people.invite(admin, "carol")
        with Client(url=running.url, token=carols) as carol:
            for name in ("carols", "carols-2", "carols-3"):
                carol.endpoints.create(name)
        with Client(url=running.url, token=token) as bob:
            bob.projects.create("lab", title="<b>What</b> we do")
            bob.projects.set_member("lab", "carol", "member")
        yield running


def comes(visitor: Visitor, name: str, path: str) -> Visitor:
    visitor.allowed.append(REFUSED)
    visitor.page.goto(f"/sign-in?next={path}")
    visitor.fill(User_name=name, Password=people.PASSWORD)
    visitor.press("Sign in")
    visitor.page.wait_for_url(f"**{path}")
    return visitor


@pytest.mark.parametrize("scripts", [True, False])
def test_an_owner_invites_into_the_project(visit: Come, scripts: bool) -> None:
    bob, name = comes(visit(scripts=scripts), "bob", "/settings/projects/lab"), "dave" if scripts else "erin"
    invited = bob.page.get_by_role("region", name="Invitations")
    invited.get_by_label("Name to suggest").fill("No Name")
    invited.get_by_label("E-mail").fill(f"{name}@example.org")
    invited.get_by_label("Role in the project").select_option("viewer")
    bob.press("Make the invitation")
    assert invited.get_by_label("Name to suggest").get_attribute("aria-invalid") == "true"
    assert invited.get_by_label("E-mail").input_value() == f"{name}@example.org", "nothing typed is lost"
    assert invited.get_by_label("Role in the project").input_value() == "viewer"
    invited.get_by_label("Name to suggest").fill(name)
    bob.press("Make the invitation")
    bob.page.get_by_role("heading", name=f"{name} is invited").wait_for()
    link = bob.page.get_by_label("Link", exact=True).input_value()
    if scripts:
        bob.check_accessible()
    bob.page.goto("/settings/projects/lab")
    assert link.partition("#")[2] not in bob.page.content(), "it is shown once"
    assert f"{name}@example.org" in invited.inner_text()
    if not scripts:
        bob.press(f"Withdraw invitation of {name}")
        bob.page.get_by_text("The invitation is withdrawn").wait_for()
        assert f"{name}@example.org" not in invited.inner_text()
        return
    new = visit()
    new.page.goto(link)
    new.fill(User_name=name, Password=people.PASSWORD)
    new.page.get_by_label("Password, again").fill(people.PASSWORD)
    new.press("Make the account")
    new.page.wait_for_url("**/dashboard")
    new.page.goto("/settings/projects/lab")
    assert "You are a viewer" in new.page.get_by_role("main").inner_text()
    assert new.page.get_by_role("region", name="Invitations").count() == 0, "those are for owners"


@pytest.mark.parametrize("scripts", [True, False])
def test_a_member_offers_an_endpoint_and_an_owner_decides(visit: Come, scripts: bool) -> None:
    name = "carols" if scripts else "carols-2"
    carol = comes(visit(scripts=scripts), "carol", "/settings/projects/lab")
    shares = carol.page.get_by_role("region", name="Endpoints it shares")
    assert "An owner of the project has to approve first." in shares.inner_text()
    for decision in ("Withdraw", "Decline", "Approve"):
        shares.get_by_label("Share an endpoint of yours").select_option(name)
        carol.press("Share it")
        carol.page.get_by_text("The owners of the project are asked.").wait_for()
        assert "Waiting for an owner of the project" in shares.inner_text()
        assert carol.page.get_by_role("button", name="Approve").count() == 0
        carol.page.goto(f"/endpoints/{name}")
        assert "An owner of the project has to approve first" in carol.page.get_by_role("main").inner_text()
        carol.page.goto("/settings/projects/lab")
        if decision == "Withdraw":
            shares.get_by_role("button", name=f"Withdraw {name}").click()
            carol.page.get_by_text("Tasks of this project go there no more.").wait_for()
            continue
        bob = comes(visit(scripts=scripts), "bob", "/settings/projects/lab")
        asked = bob.page.get_by_role("region", name="Endpoints it shares")
        assert "can read what is sent there, secrets of members and of the project included" in asked.inner_text()
        if scripts:
            bob.check_looks()
        asked.get_by_role("button", name=f"{decision} {name} of carol").click()
        bob.page.get_by_text("Declined." if decision == "Decline" else "Approved:").wait_for()
        carol.page.goto("/settings/projects/lab")
    assert "carol's, approved by bob; nothing has run there yet" in asked.inner_text()
    bob.page.goto("/dashboard")
    assert f"{name} of carol is shared with project lab" in bob.page.get_by_role("main").inner_text()


@pytest.mark.parametrize("scripts", [True, False])
def test_an_administrator_limits_a_project_and_its_owner_sees_it(visit: Come, scripts: bool) -> None:
    alice = comes(visit(scripts=scripts), "alice", "/limits")
    alice.page.get_by_label("Search projects").fill("WHAT</b>")
    alice.press("Search")
    assert "<b>What</b> we do" in alice.page.get_by_role("region", name="Projects").first.inner_text()
    alice.page.get_by_role("link", name="lab", exact=True).click()
    alice.page.get_by_label("GPUs", exact=True).fill("many")
    alice.page.get_by_label("Storage", exact=True).fill("2 TiB")
    alice.press("Set these limits")
    assert alice.page.get_by_label("GPUs", exact=True).get_attribute("aria-invalid") == "true"
    assert alice.page.get_by_label("Storage", exact=True).input_value() == "2 TiB"
    alice.page.get_by_label("GPUs", exact=True).fill("8")
    alice.press("Set these limits")
    alice.page.get_by_text("The limits are set.").wait_for()
    stands = alice.page.get_by_role("region", name="How it stands")
    assert "Limits set for it in particular." in stands.inner_text() and "of 2 TiB" in stands.inner_text()
    bob = comes(visit(), "bob", "/settings/projects/lab")
    quota = bob.page.get_by_role("region", name="Quota of the project").inner_text()
    assert "of 8" in quota and "of 2 TiB" in quota and "An administrator sets limits" in quota
    assert bob.page.get_by_role("link", name="Set limits").count() == 0
    assert bob.page.goto("/limits/projects/lab").status == 403
    alice.page.goto("/limits")
    assert "its own" in alice.page.get_by_role("region", name="Projects").first.inner_text()
    alice.page.get_by_role("link", name="project lab").click()
    alice.press("Use the limits of every project")
    alice.page.get_by_text("Nothing is limited.").wait_for()
    assert alice.page.goto("/limits/projects/nothing").status == 404


def test_where_owners_may_not_invite_they_are_told(chromium: Any, tmp_path: Path) -> None:
    with Service(tmp_path / "home", multi_user="1") as strict:
        admin = people.ClientConfig.load(strict.home)
        assert admin is not None
        with Client(url=strict.url, token=people.invite(admin, "bob")) as client:
            client.projects.create("lab")
        bob = comes(Visitor(chromium, strict.url), "bob", "/settings/projects/lab")
        assert "Administrators alone invite people" in bob.page.get_by_role("region", name="Invitations").inner_text()
        assert bob.page.get_by_role("button", name="Make the invitation").count() == 0
        bob.leave()


@pytest.mark.parametrize("dark", [False, True])
def test_accessible_at_every_width(visit: Come, dark: bool) -> None:
    alice, bob = comes(visit(dark=dark), "alice", "/limits"), comes(visit(dark=dark), "bob", "/settings/projects/lab")
    for visitor, paths in (
        (alice, ("/limits", "/limits?q=zz", "/limits/projects/lab")),
        (bob, ("/settings/projects/lab",)),
    ):
        for path in paths:
            visitor.page.goto(path)
            visitor.check_looks()
