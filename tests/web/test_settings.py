"""Settings: every tab by its form, with and without scripts, errors beside their field, secrets never shown again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.browser import Visitor
from testing.people import PASSWORD
from testing.service import Service

# Browsers note it on their console when a form is answered with what is wrong.
REFUSED = "the server responded with a status of 4"
Come = Callable[..., Visitor]
TABS = {
    "Profile": "/settings",
    "Tokens": "/settings/tokens",
    "Sessions": "/settings/sessions",
    "Projects": "/settings/projects",
    "Secrets": "/settings/secrets",
    "Notifications": "/settings/notifications",
    "Quotas": "/settings/quotas",
    "Appearance": "/settings/appearance",
}


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with accounts, of which alice is the first."""
    with Service(tmp_path_factory.mktemp("town") / "home", multi_user="1") as running:
        yield running


def test_every_tab_has_an_address(visit: Come) -> None:
    visitor = visit()
    visitor.page.goto("/settings")
    tabs = visitor.page.get_by_role("navigation", name="Settings")
    for name, path in TABS.items():
        tabs.get_by_role("link", name=name, exact=True).click()
        visitor.page.wait_for_url(f"**{path}")
        assert tabs.get_by_role("link", name=name, exact=True).get_attribute("aria-current") == "page"
        assert visitor.page.get_by_role("heading", level=1).inner_text() == "Settings"
    visitor.page.goto("/account?done=linked")
    assert visitor.page.url.endswith("/settings?done=linked"), "old links go on working"
    visitor.page.get_by_text("You can now sign in with that identity.").wait_for()


@pytest.mark.parametrize("dark", [False, True])
def test_every_tab_is_accessible_and_fits(visit: Come, dark: bool) -> None:
    visitor = visit(dark=dark)
    for path in TABS.values():
        visitor.page.goto(path)
        visitor.check_looks()


@pytest.mark.parametrize("scripts", [True, False])
def test_the_profile(visit: Come, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed.append(REFUSED)
    visitor.page.goto("/settings")
    name = "<b>Ada</b> \u202eevil & Co"
    visitor.page.get_by_label("Full name").fill("Ada")
    visitor.page.get_by_label("E-mail").fill("ada@example.org")
    visitor.press("Save")
    visitor.page.get_by_text("Saved.").wait_for()
    assert visitor.page.get_by_label("E-mail").input_value() == "ada@example.org"
    visitor.page.get_by_label("Full name").fill(name)
    visitor.press("Save")
    field = visitor.page.get_by_label("Full name")
    assert field.get_attribute("aria-invalid") == "true", "what cannot be seen is not part of a name"
    assert field.input_value() == name and visitor.page.get_by_label("E-mail").input_value() == "ada@example.org"
    field.fill("<b>Ada</b>")
    visitor.press("Save")
    visitor.page.get_by_role("heading", name="<b>Ada</b>").wait_for()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_token_is_shown_once_and_revoked(visit: Come, service: Service, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed.append(REFUSED)
    visitor.page.goto("/settings/tokens")
    visitor.page.get_by_label("Name").fill("night run")
    for box in ("read", "launch"):
        visitor.page.get_by_role("checkbox", name=re.compile(f"^{box}:")).uncheck()
    visitor.press("Make the token")
    assert "choose at least one" in visitor.page.get_by_role("group", name="What it may do").inner_text().lower()
    assert visitor.page.get_by_label("Name").input_value() == "night run", "nothing typed is lost"
    visitor.page.get_by_role("checkbox", name=re.compile("^read:")).check()
    visitor.page.get_by_label("Works for").select_option("30 days")
    visitor.press("Make the token")
    visitor.page.get_by_role("heading", name="The token night run is made").wait_for()
    value = visitor.page.get_by_label("Token", exact=True).input_value()
    who = visitor.page.request.get(f"{service.url}/api/v1/tasks", headers={"Authorization": f"Bearer {value}"})
    assert who.status == 200
    if scripts:
        visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
        visitor.press("Copy")
        visitor.page.get_by_role("button", name="Copied").wait_for()
        assert visitor.page.evaluate("navigator.clipboard.readText()") == value
    visitor.page.goto("/settings/tokens")
    assert value not in visitor.page.content()
    visitor.press("Revoke token night run")
    visitor.page.get_by_text("The token is revoked.").wait_for()
    gone = visitor.page.request.get(f"{service.url}/api/v1/tasks", headers={"Authorization": f"Bearer {value}"})
    assert gone.status == 401


def test_other_browsers_are_signed_out(visit: Come) -> None:
    here, there, third = visit(), visit(), visit()
    for visitor in (here, there, third):
        visitor.page.goto("/settings/sessions")
    here.page.reload()
    here.press("End session of Chrome on Linux")
    here.page.get_by_text("That browser is signed out.").wait_for()
    here.press("End all others")
    here.page.get_by_text("Every other browser is signed out.").wait_for()
    assert here.page.get_by_role("listitem").filter(has_text="this one").count() == 1
    assert here.page.get_by_role("button", name=re.compile("^End session")).count() == 0


@pytest.mark.parametrize("scripts", [True, False])
def test_a_secret_is_kept_and_never_shown(visit: Come, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed.append(REFUSED)
    visitor.page.goto("/settings/secrets")
    visitor.page.get_by_label("Name").fill("9 lives")
    visitor.page.get_by_label("Value").fill("hunter2-value")
    visitor.press("Keep it")
    assert visitor.page.get_by_label("Name").get_attribute("aria-invalid") == "true"
    assert visitor.page.get_by_label("Name").input_value() == "9 lives"
    assert "hunter2-value" not in visitor.page.content(), "a secret is not sent back, even with an error"
    visitor.page.get_by_label("Name").fill("HF_TOKEN")
    visitor.page.get_by_label("Value").fill("hunter2-value")
    visitor.press("Keep it")
    visitor.page.get_by_text("The secret is kept.").wait_for()
    assert "hunter2-value" not in visitor.page.content()
    visitor.page.get_by_role("cell", name="HF_TOKEN").wait_for()
    visitor.page.locator("summary").filter(has_text="Remove HF_TOKEN").click()
    visitor.press("Forget it HF_TOKEN")
    visitor.page.get_by_text("The secret is forgotten.").wait_for()


@pytest.mark.parametrize("scripts", [True, False])
def test_rules_of_notifications(visit: Come, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed.append(REFUSED)
    visitor.page.goto("/settings/notifications")
    assert visitor.page.get_by_label("How").input_value() == "webhook", "this server sends no e-mail"
    visitor.page.get_by_label("Where to").fill("http://192.0.2.1/")
    visitor.press("Tell me")
    assert visitor.page.get_by_label("Where to").get_attribute("aria-invalid") == "true"
    visitor.page.get_by_label("Where to").fill("https://hooks.invalid/diamond")
    visitor.press("Tell me")
    visitor.page.get_by_role("heading", name="From now on you are told").wait_for()
    assert visitor.page.get_by_label("Key of the webhook").input_value().startswith("dmdw_")
    visitor.press("Test rule for https://hooks.invalid/diamond")
    visitor.page.get_by_text("The test message could not be delivered.").wait_for()
    visitor.page.get_by_role("checkbox", name="a task of mine fails").uncheck()
    visitor.press("Save")
    assert "choose at least one" in visitor.page.get_by_role("group", name="Tell me when").inner_text().lower()
    visitor.page.get_by_role("checkbox", name="a task of mine succeeds").check()
    visitor.press("Save")
    visitor.page.get_by_text("The rule is changed.").wait_for()
    assert visitor.page.get_by_text("task.succeeded; last delivered never").is_visible()
    visitor.press("Pause rule")
    visitor.page.get_by_text("paused on request").wait_for()
    visitor.press("Resume rule")
    visitor.page.get_by_role("link", name="Change rule").click()
    visitor.page.get_by_text("Remove the rule").click()
    visitor.press("Remove it")
    visitor.page.get_by_text("The rule is removed.").wait_for()


def test_quotas_and_light_and_dark(visit: Come) -> None:
    visitor = visit()
    visitor.page.goto("/settings/quotas")
    visitor.page.get_by_text("Nothing is limited.").wait_for()
    visitor.page.goto("/settings/appearance")
    visitor.page.get_by_role("radio", name=re.compile("^Dark")).check()
    visitor.press("Use it")
    visitor.page.get_by_text("That is how pages look").wait_for()
    dark = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    cookie = next(each for each in visitor.context.cookies() if each["name"] == "diamond_theme")
    assert (cookie["value"], cookie["sameSite"]) == ("dark", "Lax")
    assert cookie["expires"] > visitor.page.evaluate("Date.now() / 1000") + 300 * 86_400
    visitor.page.get_by_role("radio", name=re.compile("^As the system")).check()
    visitor.press("Use it")
    visitor.page.wait_for_function(
        "dark => document.body && getComputedStyle(document.body).backgroundColor !== dark", arg=dark
    )


def test_people_in_a_project(chromium: Any, town: Service) -> None:
    from testing import people

    admin = people.ClientConfig.load(town.home)
    assert admin is not None
    people.invite(admin, "bob")
    alice, bob = Visitor(chromium, town.url), Visitor(chromium, town.url, scripts=False)
    for visitor, name in ((alice, "alice"), (bob, "bob")):
        visitor.allowed.append(REFUSED)
        visitor.page.goto("/sign-in?next=/settings/projects")
        visitor.fill(User_name=name, Password=PASSWORD)
        visitor.press("Sign in")
        visitor.page.wait_for_url("**/settings/projects")
    alice.page.get_by_label("Name").fill("Not A Name")
    alice.page.get_by_label("Title").fill("What we do")
    alice.press("Make the project")
    assert alice.page.get_by_label("Name").get_attribute("aria-invalid") == "true"
    assert alice.page.get_by_label("Title").input_value() == "What we do"
    alice.page.get_by_label("Name").fill("lab")
    alice.press("Make the project")
    alice.page.wait_for_url("**/settings/projects/lab?done=created")
    alice.page.get_by_label("User name").fill("nobody")
    alice.press("Let them in")
    assert alice.page.get_by_label("User name").get_attribute("aria-invalid") == "true"
    alice.page.get_by_label("User name").fill("bob")
    alice.page.get_by_label("Role", exact=True).select_option("viewer")
    alice.press("Let them in")
    alice.page.get_by_label("Role of bob").select_option("member")
    alice.press("Set role of bob")
    alice.page.get_by_text("Saved: who is in the project").wait_for()
    for width in (1280, 400):
        alice.page.set_viewport_size({"width": width, "height": 900})
        alice.check_accessible()
        alice.check_width()
    alice.page.get_by_text("Leave the project", exact=True).click()
    alice.press("Leave lab")
    alice.page.get_by_role("alert").get_by_text("only owner").wait_for()
    bob.page.reload()
    bob.page.get_by_role("link", name="lab").click()
    assert bob.page.get_by_role("button", name="Let them in").count() == 0, "that is for owners"
    bob.page.get_by_text("Leave the project", exact=True).click()
    bob.press("Leave lab")
    bob.page.get_by_text("You left the project.").wait_for()
    bob.page.goto("/settings/projects/lab")
    assert "no project" in bob.page.get_by_role("alert").inner_text()
    alice.page.get_by_text("Remove the project", exact=True).click()
    alice.press("Remove lab")
    alice.page.get_by_text("The project is removed.").wait_for()
    alice.leave()
    bob.leave()


def test_a_password_is_changed(chromium: Any, town: Service) -> None:
    visitor = Visitor(chromium, town.url)
    visitor.allowed.append(REFUSED)
    visitor.page.goto("/sign-in?next=/settings")
    visitor.fill(User_name="alice", Password=PASSWORD)
    visitor.press("Sign in")
    visitor.page.get_by_label("Present password").fill("wrong one, surely")
    visitor.page.get_by_label("New password", exact=True).fill("another long password")
    visitor.page.get_by_label("New password, again").fill("another long password")
    visitor.press("Change it")
    assert visitor.page.get_by_label("Present password").get_attribute("aria-invalid") == "true"
    visitor.page.get_by_label("Present password").fill(PASSWORD)
    visitor.page.get_by_label("New password", exact=True).fill("another long password")
    visitor.page.get_by_label("New password, again").fill("another long password")
    visitor.press("Change it")
    visitor.page.get_by_text("Your password is changed.").wait_for()
    visitor.leave()
