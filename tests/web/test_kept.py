"""Nothing that somebody typed is lost, and nothing of it is for the next one: expired sessions, Back, what was removed
meanwhile, and many windows at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect

from diamond.core.home import ClientConfig
from testing import people
from testing.browser import Visitor
from testing.service import Service

Visit = Callable[..., Visitor]
REFUSED = ["status of 401", "status of 403", "status of 404", "status of 422"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """alice, who administers it, and bob."""
    with Service(tmp_path_factory.mktemp("kept") / "home", multi_user="1") as running:
        admin = ClientConfig.load(running.home)
        assert admin is not None
        people.invite(admin, "bob")
        yield running


def come_in(visitor: Visitor, name: str) -> None:
    """From the page to sign in, wherever that leads."""
    visitor.fill(User_name=name, Password=people.PASSWORD)
    visitor.press("Sign in")


def value(page: Any, label: str) -> Any:
    return page.get_by_label(label, exact=True)


def test_the_next_one_in_the_tab_sees_nothing_of_it(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/compose")
    visitor.fill(Task_name="private plan", Command="echo private")
    page.get_by_text("Form and YAML are in step.").wait_for()
    page.goto("/dashboard")
    assert page.evaluate("JSON.stringify(sessionStorage)").count("private plan") > 0
    visitor.press("Sign out")
    page.wait_for_url("**/sign-in?done=signed-out")
    assert "private" not in page.evaluate("JSON.stringify(sessionStorage)"), "signing out forgets it"
    visitor.sign_in("bob")
    page.goto("/compose")
    expect(value(page, "Task name")).to_have_value("")
    assert "private plan" not in page.content()
    assert "echo private" not in page.content()


def test_an_expired_session_leaves_nothing_to_somebody_else(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/compose")
    visitor.fill(Task_name="private plan", Command="echo private")
    page.get_by_text("Form and YAML are in step.").wait_for()
    visitor.context.clear_cookies()
    visitor.sign_in("bob")
    assert "private" not in page.evaluate("JSON.stringify(sessionStorage)")
    page.goto("/compose")
    expect(value(page, "Task name")).to_have_value("")
    for _ in range(4):
        page.go_back()
        assert "private plan" not in page.content()
        named = value(page, "Task name")
        assert not named.count() or named.input_value() == ""


FORMS = [
    ("/settings", {"Full name": "Alice of the hills"}, "Save"),
    ("/settings/projects", {"Name": "a-new-one", "Title": "What we do together"}, "Make the project"),
    ("/settings/notifications", {"Where to": "https://hooks.example.org/abc"}, "Tell me"),
    ("/settings/tokens", {"Name": "for the nightly run"}, "Make the token"),
    ("/endpoints/new", {"Name": "the-cluster"}, "Get the line"),
    ("/users", {"E-mail": "carol@example.org"}, "Make the invitation"),
]


@pytest.mark.parametrize(("path", "fields", "button"), FORMS, ids=[form[0] for form in FORMS])
def test_a_session_that_ends_costs_nothing(visit: Visit, path: str, fields: dict[str, str], button: str) -> None:
    visitor = visit()
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    page.goto(path)
    for label, text in fields.items():
        value(page, label).fill(text)
    visitor.context.clear_cookies()
    page.get_by_role("button", name=button, exact=button == "Save").click()
    page.get_by_role("heading", name="What you had typed").wait_for()
    for text in fields.values():
        page.get_by_text(text, exact=True).wait_for()
    page.get_by_role("link", name="Sign in and go back").click()
    come_in(visitor, "alice")
    page.wait_for_url(f"**{path}")
    page.get_by_text("What you had typed here is back.").wait_for()
    for label, text in fields.items():
        expect(value(page, label)).to_have_value(text)
    visitor.check_accessible()
    visitor.press("Drop it")
    for label, text in fields.items():
        expect(value(page, label)).not_to_have_value(text)
    page.reload()
    assert page.get_by_text("What you had typed here is back.").count() == 0


def test_what_was_saved_is_not_kept_any_longer(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/settings")
    visitor.fill(Full_name="Alice")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_url("**/settings?done=*")
    assert "Alice" not in page.evaluate("JSON.stringify(sessionStorage)")
    page.goto("/settings/tokens")
    visitor.fill(Name="made at once")
    visitor.press("Make the token")
    page.get_by_text("Copy it now").wait_for()
    assert "made at once" not in page.evaluate("JSON.stringify(sessionStorage)")
    page.goto("/settings/projects")
    visitor.fill(Name="Not A Name", Title="kept with its error")
    visitor.press("Make the project")
    page.locator(".error").first.wait_for()
    page.goto("/dashboard")
    page.goto("/settings/projects")
    expect(value(page, "Title")).to_have_value("kept with its error")


def test_what_is_dropped_leaves_nothing_behind(visit: Visit) -> None:
    """Also of what nobody sees: sent with the mark of an older page, the form would be refused."""
    visitor = visit()
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/settings")
    visitor.fill(Full_name="Begun")
    page.get_by_label("Full name").press("Tab")  # which keeps it
    elsewhere = visitor.new_tab()
    elsewhere.goto("/settings")
    elsewhere.get_by_label("Full name").fill("Changed meanwhile")
    elsewhere.get_by_role("button", name="Save", exact=True).click()
    elsewhere.wait_for_url("**/settings?done=*")
    page.goto("/settings")
    page.get_by_text("What you had typed here is back.").wait_for()
    visitor.press("Drop it")
    expect(value(page, "Full name")).to_have_value("Changed meanwhile")
    visitor.fill(Full_name="Alice")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_url("**/settings?done=*")


def test_secrets_are_never_kept_nor_shown_again(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/settings/secrets")
    visitor.fill(Name="HF_TOKEN", Value="hf-very-secret")
    page.wait_for_function("JSON.stringify(sessionStorage).includes('HF_TOKEN')")
    assert "hf-very-secret" not in page.evaluate("JSON.stringify(sessionStorage)")
    visitor.context.clear_cookies()
    visitor.press("Keep it")
    page.get_by_role("link", name="Sign in and go back").wait_for()
    assert "hf-very-secret" not in page.content()
    visitor.sign_in("alice")
    page.goto("/settings")
    visitor.fill(Present_password="old-password-1", New_password="new-password-1")
    value(page, "New password, again").fill("new-password-1")
    visitor.context.clear_cookies()
    visitor.press("Change it")
    page.get_by_role("link", name="Sign in and go back").wait_for()
    assert "password-1" not in page.content() + page.evaluate("JSON.stringify(sessionStorage)")


@pytest.mark.parametrize("path", ["/compose", "/settings/projects"])
def test_without_scripts_the_refusal_shows_what_was_typed(visit: Visit, path: str) -> None:
    visitor = visit(scripts=False)
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    page.goto(path)
    text = "<b>echo</b> one\necho two" if path == "/compose" else "A <b>title</b> of ours"
    value(page, "Command" if path == "/compose" else "Title").fill(text)
    value(page, "Task name" if path == "/compose" else "Name").fill("some-name")
    csrf = page.locator("main form input[name=csrf]").first.input_value()
    visitor.context.clear_cookies()
    visitor.press("Launch" if path == "/compose" else "Make the project")
    shown = page.get_by_role("region", name="Run, as" if path == "/compose" else "Title, as")
    assert shown.inner_text() == text
    assert csrf not in page.content()
    visitor.check_width()
    page.get_by_role("link", name="Sign in and go back").click()
    come_in(visitor, "alice")
    page.wait_for_url(f"**{path}")


def test_another_site_puts_no_words_on_that_page(visit: Visit, service: Service) -> None:
    visitor = visit()
    sent = visitor.context.request.post(
        "/settings/projects", form={"title": "words of theirs"}, headers={"Origin": "https://elsewhere.example.org"}
    )
    assert sent.status == 401
    assert "words of theirs" not in sent.text()


def test_a_dry_run_stays_on_the_page(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/compose")
    visitor.fill(Task_name="tried", Command="echo tried", Number_of_nodes="lots")
    visitor.press("Dry run")
    page.get_by_text("The dry run found something to correct.").wait_for()
    expect(value(page, "Number of nodes")).to_be_focused()
    visitor.fill(Number_of_nodes="1")
    page.get_by_label("Files to upload").set_input_files(
        {"name": "data.txt", "mimeType": "text/plain", "buffer": b"forty-two"}
    )
    visitor.press("Dry run")
    plan = page.get_by_role("region", name="Dry run")
    expect(plan).to_be_focused()
    assert page.locator("[role=status]", has_text="The dry run is done").count() == 1
    assert page.get_by_role("cell", name="data.txt", exact=True).count() == 1
    assert "workdir: bundle:sha256:" in value(page, "YAML").input_value()
    expect(value(page, "Number of nodes")).not_to_have_attribute("aria-invalid", "true")
    visitor.check_accessible()
    visitor.press("Dry run")
    expect(page.get_by_role("region", name="Dry run")).to_have_count(1)
    page.get_by_role("link", name="Task Manager").click()
    page.wait_for_url("**/tasks")
    page.go_back()
    expect(value(page, "Task name")).to_have_value("tried")
    expect(value(page, "Command")).to_have_value("echo tried")


def test_back_to_a_dry_run_without_scripts(visit: Visit) -> None:
    visitor = visit(scripts=False)
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/compose")
    visitor.fill(Task_name="tried", Command="echo tried")
    visitor.press("Dry run")
    page.get_by_role("region", name="Dry run").wait_for()
    page.get_by_role("link", name="Task Manager").click()
    page.wait_for_url("**/tasks")
    page.go_back()
    page.get_by_role("region", name="Dry run").wait_for()
    expect(value(page, "Command")).to_have_value("echo tried")
    visitor.press("Sign out")
    page.wait_for_url("**/sign-in?done=signed-out")
    with pytest.raises(PlaywrightError, match="ERR_CACHE_MISS"):  # not for whoever comes next
        page.go_back(wait_until="commit")


@pytest.mark.parametrize("scripts", [True, False])
def test_a_template_that_is_gone_is_saved_as_a_new_one(visit: Visit, service: Service, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    with service.client() as client:
        made = client.templates.save(f"passing {scripts}", {"run": "echo first"})
        page.goto(f"/templates/{made.id}")
        client.templates.remove(made.id)
        visitor.fill(Description="of mine", YAML="run: [")
        visitor.press("Save changes")
        page.get_by_role("heading", name="The template is gone").wait_for()
        assert value(page, "YAML").input_value().strip() == "run: ["
        if scripts:
            visitor.check_accessible()
        visitor.press("Save as a new template")
        page.locator("#yaml-error:not([hidden])").wait_for()
        visitor.fill(YAML="run: echo mine")
        visitor.press("Save as a new template")
        page.get_by_text("The template is saved.").wait_for()
        found = next(each for each in client.templates.list() if each.name == f"passing {scripts}")
        assert (found.description, found.id == made.id) == ("of mine", False)
        assert client.templates.get(found.id).spec == {"run": "echo mine"}
        client.templates.remove(found.id)


@pytest.mark.parametrize("scripts", [True, False])
def test_a_draft_that_is_gone_is_saved_as_a_new_one(visit: Visit, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/image-builder")
    visitor.press("New image")
    page.wait_for_url("**/endpoint")
    gone = page.url.rsplit("/", 2)[1]
    page.goto(f"/image-builder/{gone}/dependencies")
    other = visitor.new_tab()
    other.goto("/image-builder")
    other.locator(f"form[action$='{gone}/delete']").locator("xpath=ancestor::details").locator("summary").click()
    other.locator(f"form[action$='{gone}/delete'] button").click()
    other.get_by_text("The draft is removed.").wait_for()
    visitor.fill(Python_packages="numpy==2.3.4\nscipy")
    visitor.press("Save")
    page.get_by_text("This draft was removed meanwhile").wait_for()
    assert value(page, "Python packages").input_value() == "numpy==2.3.4\nscipy"
    if scripts:
        visitor.check_accessible()
    visitor.press("Save as a new draft")
    page.wait_for_url("**/dependencies?done=saved")
    assert gone not in page.url
    assert value(page, "Python packages").input_value() == "numpy==2.3.4\nscipy"


def test_the_builder_keeps_what_is_typed(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed += REFUSED
    page = visitor.page
    visitor.sign_in("alice")
    page.goto("/image-builder")
    visitor.press("New image")
    page.wait_for_url("**/endpoint")
    page.goto(re.sub("endpoint$", "dependencies", page.url))
    visitor.fill(Python_packages="numpy")
    page.reload()
    expect(value(page, "Python packages")).to_have_value("numpy")
    page.get_by_role("link", name="Image Builder").first.click()
    page.wait_for_url("**/image-builder")
    page.go_back()
    expect(value(page, "Python packages")).to_have_value("numpy")
    visitor.context.clear_cookies()
    visitor.press("Save")
    page.get_by_role("link", name="Sign in and go back").click()
    come_in(visitor, "alice")
    expect(value(page, "Python packages")).to_have_value("numpy")
    visitor.press("Save")
    page.get_by_text("Saved. The draft stays here").wait_for()
    assert "numpy" not in page.evaluate("JSON.stringify(sessionStorage)")


def test_many_windows_do_not_block_each_other(visit: Visit) -> None:
    """A browser has six connections to a server; windows that are live leave some of them to the others."""
    visitor = visit()
    visitor.sign_in("alice")
    windows = [visitor.page, *(visitor.new_tab() for _ in range(8))]
    for window in windows:
        window.goto("/tasks")
    windows[-1].goto("/compose")
    windows[-1].get_by_role("heading", name="Job Composer").wait_for()
    held = "navigator.locks.query().then((all) => all.held.map((each) => each.name).sort())"
    names = [f"diamond-stream-{number}" for number in (1, 2, 3)]
    assert windows[0].evaluate(held) == names
    # Whoever got none looks by itself: a task launched now shows up in every window.
    windows[-1].get_by_label("Task name", exact=True).fill("seen everywhere")
    windows[-1].get_by_label("Command", exact=True).fill("true")
    windows[-1].get_by_text("Form and YAML are in step.").wait_for()
    windows[-1].get_by_role("button", name="Launch").click()
    windows[-1].wait_for_url(re.compile(r"/tasks/tsk_\w+$"))
    for window in windows[:-1]:
        window.get_by_role("link", name="seen everywhere").first.wait_for()
    for window in windows[1:]:
        window.close()
    windows[0].reload()
    windows[0].wait_for_function(f"() => {held}.then((all) => all.length === 1)")
