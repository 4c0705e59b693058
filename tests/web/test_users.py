"""Users: an administrator invites, helps, limits, closes and hands over; nobody else gets there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testing import people
from testing.browser import Visitor
from testing.service import Service

Come = Callable[..., Visitor]
# Browsers note it on their console when a form is answered with what is wrong.
REFUSED = "the server responded with a status of 4"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with accounts: alice administers, bob and carol work there."""
    with Service(tmp_path_factory.mktemp("users") / "home", multi_user="1") as running:
        admin = people.ClientConfig.load(running.home)
        assert admin is not None
        for name in ("bob", "carol"):
            people.invite(admin, name)
        yield running


@pytest.fixture
def alice(visit: Come) -> Visitor:
    visitor = visit()
    visitor.page.goto("/sign-in?next=/users")
    visitor.fill(User_name="alice", Password=people.PASSWORD)
    visitor.press("Sign in")
    visitor.page.wait_for_url("**/users")
    return visitor


def test_an_invitation_is_shown_once_and_works(alice: Visitor, visit: Come) -> None:
    alice.allowed.append(REFUSED)
    alice.page.get_by_label("User name").fill("No Name")
    alice.page.get_by_label("E-mail").fill("dave@example.org")
    alice.press("Make the invitation")
    assert alice.page.get_by_label("User name").get_attribute("aria-invalid") == "true"
    assert alice.page.get_by_label("E-mail").input_value() == "dave@example.org", "nothing typed is lost"
    alice.page.get_by_label("User name").fill("dave")
    alice.press("Make the invitation")
    alice.page.get_by_role("heading", name="dave is invited").wait_for()
    link = alice.page.get_by_label("Link", exact=True).input_value()
    assert "#" in link
    alice.check_accessible()
    alice.page.goto("/users")
    assert link.partition("#")[2] not in alice.page.content()
    dave = visit()
    dave.page.goto(link)
    dave.fill(User_name="dave", Full_name="<i>Dave</i>", Password=people.PASSWORD)
    dave.page.get_by_label("Password, again").fill(people.PASSWORD)
    dave.press("Make the account")
    dave.page.wait_for_url("**/dashboard")
    alice.page.get_by_label("Search").fill("DAVE")
    alice.press("Search")
    rows = alice.page.get_by_role("row").filter(has_text="dave")
    assert rows.count() == 1 and rows.get_by_text("<i>Dave</i>").is_visible()


def test_an_invitation_is_withdrawn(alice: Visitor) -> None:
    alice.page.get_by_label("User name").fill("erin")
    alice.press("Make the invitation")
    alice.page.get_by_role("heading", name="erin is invited").wait_for()
    alice.press("Withdraw invitation of erin")
    alice.page.get_by_text("The invitation is withdrawn").wait_for()
    assert alice.page.get_by_role("button", name="Withdraw invitation of erin").count() == 0


def test_without_scripts_somebody_leaves(alice: Visitor, visit: Come, service: Service) -> None:
    """Limits, a new password, the end of an account, and everything to somebody else."""
    visitor = visit(scripts=False)
    visitor.allowed.append(REFUSED)
    visitor.page.goto("/sign-in?next=/users")
    visitor.fill(User_name="alice", Password=people.PASSWORD)
    visitor.press("Sign in")
    visitor.page.get_by_role("link", name="bob").click()
    visitor.page.get_by_text("Set limits").click()
    visitor.page.get_by_label("GPUs", exact=True).fill("four")
    visitor.page.get_by_label("Storage", exact=True).fill("1.5 TiB")
    visitor.press("Set these limits")
    assert visitor.page.get_by_label("GPUs", exact=True).get_attribute("aria-invalid") == "true"
    assert visitor.page.get_by_label("Storage", exact=True).input_value() == "1.5 TiB"
    visitor.page.get_by_label("GPUs", exact=True).fill("4")
    visitor.press("Set these limits")
    visitor.page.get_by_text("The limits are set.").wait_for()
    assert "of 1.5 TiB" in visitor.page.get_by_role("region", name="Quota").inner_text()
    visitor.page.get_by_text("Set limits").click()
    assert visitor.page.get_by_label("Storage", exact=True).input_value() == "1536 GiB"
    visitor.press("Use the limits of everybody")
    visitor.page.get_by_text("Nothing is limited.").wait_for()

    visitor.page.get_by_text("Give them a new password").click()
    visitor.press("Make the link")
    link = visitor.page.get_by_label("Link", exact=True).input_value()
    assert "/reset#" in link

    visitor.page.get_by_text("Hand over what they have").click()
    visitor.page.get_by_label("To", exact=True).fill("nobody")
    visitor.press("Hand everything over")
    assert visitor.page.get_by_label("To", exact=True).get_attribute("aria-invalid") == "true"
    visitor.page.get_by_text("Close the account").first.click()
    visitor.press("Close the account of bob")
    visitor.page.get_by_text("The account is closed").wait_for()
    visitor.page.get_by_text("Hand over what they have").click()
    visitor.page.get_by_label("To", exact=True).fill("carol")
    visitor.press("Hand everything over")
    visitor.page.get_by_text("carol now has what was bob's").wait_for()
    visitor.press("Open the account again")
    visitor.page.get_by_text("The account is open again.").wait_for()


def test_limits_of_everybody(alice: Visitor) -> None:
    alice.allowed.append(REFUSED)
    alice.page.get_by_role("link", name="Limits of everybody").click()
    users = alice.page.get_by_role("region", name="Every user")
    users.get_by_label("GPU-hours").fill("lots")
    users.get_by_label("Nodes").fill("8")
    users.get_by_role("button", name="Set these limits").click()
    assert users.get_by_label("GPU-hours").get_attribute("aria-invalid") == "true"
    assert users.get_by_label("Nodes").input_value() == "8"
    users.get_by_label("GPU-hours").fill("2.5")
    users.get_by_role("button", name="Set these limits").click()
    alice.page.get_by_text("The limits are set, for all").wait_for()
    for width in (400, 1280):
        alice.page.set_viewport_size({"width": width, "height": 900})
        alice.check_accessible()
        alice.check_width()
    alice.page.goto("/users/carol")
    assert "of 2.5" in alice.page.get_by_role("region", name="Quota").inner_text()
    alice.page.goto("/limits")
    for field in ("GPU-hours", "Nodes"):
        users.get_by_label(field).fill("")
    users.get_by_role("button", name="Set these limits").click()
    alice.page.get_by_text("The limits are set, for all").wait_for()


def test_the_last_administrator_stays(alice: Visitor) -> None:
    alice.allowed.append(REFUSED)
    alice.page.goto("/users/alice")
    alice.page.get_by_text("Make them an ordinary user").click()
    alice.press("Make alice an ordinary user")
    assert "last administrator" in alice.page.get_by_role("alert").inner_text()
    alice.page.goto("/users/carol")
    alice.page.get_by_text("Make them an administrator").click()
    alice.press("Make carol an administrator")
    alice.page.get_by_text("They now administer this installation.").wait_for()
    alice.page.get_by_text("Make them an ordinary user").click()
    alice.press("Make carol an ordinary user")
    alice.page.get_by_text("They are an ordinary user now.").wait_for()


def test_nobody_else_gets_there(visit: Come) -> None:
    carol = visit()
    carol.allowed.append(REFUSED)
    carol.sign_in("carol")
    assert carol.page.get_by_role("link", name="Users", exact=True).count() == 0
    for path in ("/users", "/users/alice", "/audit", "/audit/verify"):
        answer = carol.page.goto(path)
        assert answer is not None and answer.status == 403, path
        assert "administrators" in carol.page.get_by_role("alert").inner_text()


@pytest.mark.parametrize("dark", [False, True])
def test_accessible_at_every_width(alice: Visitor, visit: Come, dark: bool) -> None:
    visitor = visit(dark=dark)
    visitor.context.add_cookies(alice.context.cookies())
    for path in ("/users", "/users?q=nobody-of-that-name", "/users/alice"):
        visitor.page.goto(path)
        visitor.check_looks()


def test_many_people_come_in_pages(tmp_path: Path, chromium: Any) -> None:
    with Service(tmp_path / "home", multi_user="1") as crowded:
        admin = people.ClientConfig.load(crowded.home)
        assert admin is not None
        _fill(crowded, 130)
        visitor = Visitor(chromium, crowded.url)
        visitor.page.goto("/sign-in?next=/users")
        visitor.fill(User_name="alice", Password=people.PASSWORD)
        visitor.press("Sign in")
        visitor.page.get_by_text("131 accounts, page 1 of 3").wait_for()
        visitor.page.get_by_role("link", name="Next").click()
        visitor.page.get_by_text("page 2 of 3").wait_for()
        visitor.page.get_by_label("Search").fill("user-007")
        visitor.press("Search")
        visitor.page.get_by_text("1 account", exact=True).wait_for()
        visitor.leave()


def _fill(service: Service, number: int) -> None:
    """Accounts of people who only ever sign in elsewhere, straight into the database of the running server."""
    import sqlalchemy as sa

    from diamond.core.ids import new_id

    engine = sa.create_engine(f"sqlite:///{service.home.server / 'diamond.db'}")
    with engine.begin() as connection:
        columns = [row[1] for row in connection.exec_driver_sql("PRAGMA table_info(users)")]
        row = connection.exec_driver_sql("SELECT * FROM users LIMIT 1").mappings().one()
        for index in range(number):
            fresh = {**row, "id": new_id("usr"), "name": f"user-{index:03}", "is_admin": 0}
            marks = ", ".join(f":{name}" for name in columns)
            connection.execute(sa.text(f"INSERT INTO users ({', '.join(columns)}) VALUES ({marks})"), fresh)
    engine.dispose()
