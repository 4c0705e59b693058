"""In a browser: two administrators at one form, F5 on what a form answered, and errors as pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from testing import people
from testing.browser import Visitor
from testing.service import Service

Come = Callable[..., Visitor]
# Browsers note it on their console when a form is answered with what is wrong.
REFUSED = "the server responded with a status of 4"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with accounts: alice administers, bob works there."""
    with Service(tmp_path_factory.mktemp("twice") / "home", multi_user="1") as running:
        admin = people.ClientConfig.load(running.home)
        assert admin is not None
        people.invite(admin, "bob")
        yield running


def come_in(visit: Come, **how: bool) -> Visitor:
    visitor = visit(**how)
    visitor.allowed.append(REFUSED)
    visitor.sign_in("alice")
    return visitor


@pytest.mark.parametrize("scripts", [True, False])
def test_the_later_of_two_sees_both(visit: Come, scripts: bool) -> None:
    one, other = come_in(visit, scripts=scripts), come_in(visit, scripts=scripts)
    tasks, nodes = ("5", "7") if scripts else ("6", "8")
    for visitor in (one, other):
        visitor.page.goto("/users/bob")
        visitor.page.get_by_text("Set limits", exact=True).click()
    label = one.page.locator("input[name=tasks]")
    label.fill(tasks)
    one.press("Set these limits")
    one.page.get_by_text("The limits are set").wait_for()
    other.page.locator("input[name=nodes]").fill(nodes)
    other.press("Set these limits")
    other.page.get_by_role("alert").get_by_text(f"changed meanwhile; now: tasks {tasks}").wait_for()
    assert other.page.locator("input[name=nodes]").input_value() == nodes
    assert other.page.locator("input[name=nodes]").is_visible(), "the fold is open"
    if scripts:
        other.check_accessible()
    # F5 tells it again and takes nothing; who then sends it has seen what is there.
    other.page.reload()
    other.page.get_by_role("alert").get_by_text("changed meanwhile").wait_for()
    other.page.locator("input[name=tasks]").fill(tasks)
    other.press("Set these limits")
    other.page.get_by_text("The limits are set").wait_for()
    other.page.get_by_text("Set limits", exact=True).click()
    assert other.page.locator("input[name=tasks]").input_value() == tasks
    assert other.page.locator("input[name=nodes]").input_value() == nodes


@pytest.mark.parametrize("scripts", [True, False])
def test_reloading_makes_no_second_token(visit: Come, scripts: bool) -> None:
    alice = come_in(visit, scripts=scripts)
    name = f"ci {scripts}"
    alice.page.goto("/settings/tokens")
    alice.page.get_by_label("Name", exact=True).fill(name)
    alice.press("Make the token")
    alice.page.get_by_role("heading", name=f"The token {name} is made").wait_for()
    alice.page.reload()
    alice.page.get_by_role("alert").get_by_text("This was done already").wait_for()
    assert "dmdu_" not in alice.page.content()
    assert alice.page.get_by_role("button", name=f"Revoke token {name}").count() == 1
    if scripts:
        alice.check_accessible()
    alice.page.get_by_label("Name", exact=True).fill(name)
    alice.press("Make the token")  # a new page's form: somebody wants two of the same name
    alice.page.get_by_role("heading", name=f"The token {name} is made").wait_for()


@pytest.mark.parametrize("dark", [True, False])
def test_too_much_gets_a_page_and_the_way_back(visit: Come, dark: bool) -> None:
    alice = come_in(visit, dark=dark)
    alice.page.goto("/settings/secrets")
    alice.page.locator("input[name=name]").first.fill("BIG")
    value = alice.page.locator("textarea[name=value]")
    value.evaluate("field => { field.removeAttribute('maxlength'); field.value = 'x'.repeat(10000000); }")
    value.evaluate("field => field.form.requestSubmit()")
    alice.page.get_by_role("heading", name="That did not work").wait_for()
    assert alice.page.get_by_role("alert").get_by_text("larger than").is_visible()
    alice.check_accessible()
    alice.check_width()
    alice.page.get_by_role("link", name="Go back").click()
    alice.page.wait_for_url("**/settings/secrets")


def test_a_secret_of_difficult_letters_is_kept(visit: Come) -> None:
    alice = come_in(visit)
    alice.page.goto("/settings/secrets")
    alice.page.locator("input[name=name]").first.fill("KEYFILE")
    alice.page.locator("textarea[name=value]").evaluate("field => { field.value = '+/=\\n'.repeat(10000); }")
    alice.page.locator("textarea[name=value]").evaluate("field => field.form.requestSubmit()")
    alice.page.get_by_text("The secret is kept").wait_for()
