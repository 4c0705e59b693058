"""People in a real browser: the first administrator, an invitation, a terminal, and out again. Found by role and label.

Fails on any error the browser reports: a script or style the content policy forbids shows up there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from testing import people
from testing.service import Service

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
PASSWORD = "correct horse battery"

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, to drive a browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs a browser: chromium or google-chrome on PATH")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("pages") / "home", multi_user="1")
    running.start_server(wait=False)
    running.wait_healthy()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Person:
    """Somebody with a browser of their own."""

    def __init__(self, chromium: Any, server: Service, *, scripts: bool = True) -> None:
        self.context = chromium.new_context(base_url=server.url, java_script_enabled=scripts)
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.asked: list[str] = []  # every address that left the browser
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)

    def fill(self, **fields: str) -> None:
        for label, text in fields.items():
            self.page.get_by_label(label.replace("_", " "), exact=True).fill(text)

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name).first.click()

    def new_account(self, name: str) -> None:
        self.fill(User_name=name, Full_name=name.title(), Password=PASSWORD)
        self.page.get_by_label("Password, again").fill(PASSWORD)
        self.press("Make the account")
        self.page.wait_for_url("**/dashboard")

    def sign_in(self, name: str) -> None:
        self.page.goto("/sign-in")
        self.fill(User_name=name, Password=PASSWORD)
        self.press("Sign in")
        self.page.wait_for_url("**/dashboard")

    def csrf(self) -> str:
        return str(self.page.locator("form[action='/sign-out'] input[name=csrf]").get_attribute("value"))


@pytest.fixture(scope="module")
def alice(chromium: Any, server: Service) -> Person:
    """The first administrator, by the code the server printed, which arrives behind the # of a link."""
    person = Person(chromium, server)
    code = people.printed_code(server.home.path / "server.log")
    person.page.goto(f"/setup#code={code}")
    assert person.page.get_by_label("Setup code").input_value() == code
    assert "#" not in person.page.url, "out of the address bar"
    person.new_account("alice")
    assert person.page.get_by_role("heading", name="Dashboard").is_visible()
    assert person.page.get_by_role("link", name="Users").is_visible(), "an administrator"
    assert not [url for url in person.asked if code in url.partition("#")[0]]
    assert not person.complaints
    return person


def test_an_invitation_and_no_secret_in_any_address(alice: Person, chromium: Any, server: Service) -> None:
    made = alice.page.request.post("/api/v1/invitations", data={}, headers={"Diamond-CSRF": alice.csrf()})
    assert made.status == 201, made.text()
    code = made.json()["code"]
    bob = Person(chromium, server)
    bob.page.goto(f"/invitation#{code}")
    assert bob.page.get_by_label("Invitation code").input_value() == code
    bob.new_account("bob")
    assert not [url for url in bob.asked if code in url.partition("#")[0] or PASSWORD in url]
    assert code not in (server.home.path / "server.log").read_text()
    assert not bob.complaints


def test_everything_works_without_scripts(alice: Person, chromium: Any, server: Service) -> None:
    made = alice.page.request.post("/api/v1/invitations", data={}, headers={"Diamond-CSRF": alice.csrf()})
    carol = Person(chromium, server, scripts=False)
    carol.page.goto("/invitation")
    carol.fill(Invitation_code=made.json()["code"])
    carol.new_account("carol")
    carol.press("Sign out")
    carol.page.get_by_text("You are signed out.").wait_for()
    carol.sign_in("carol")
    carol.page.goto("/settings")
    fresh = "another long password"
    carol.fill(Present_password=PASSWORD, New_password=fresh)
    carol.page.get_by_label("New password, again").fill(fresh)
    carol.press("Change it")
    carol.page.get_by_text("Your password is changed.").wait_for()


def test_errors_stand_beside_their_field_and_are_said(alice: Person, chromium: Any, server: Service) -> None:
    person = Person(chromium, server)
    person.page.goto("/reset")
    person.fill(Code="ABCD-EFGH-JKMN", New_password=PASSWORD)
    person.page.get_by_label("New password, again").fill("something else")
    person.press("Set the password")
    again = person.page.get_by_label("New password, again")
    assert again.get_attribute("aria-invalid") == "true"
    described = str(again.get_attribute("aria-describedby")).split()
    assert any("differ" in person.page.locator(f"#{each}").inner_text() for each in described)
    assert again.evaluate("field => field === document.activeElement"), "one can type at once"
    person.page.goto("/sign-in")
    person.fill(User_name="alice", Password="not this one")
    person.press("Sign in")
    assert "wrong" in person.page.get_by_role("alert").inner_text()


def test_the_keyboard_is_enough(alice: Person, chromium: Any, server: Service) -> None:
    person = Person(chromium, server)
    person.page.goto("/sign-in")
    person.page.keyboard.type("alice")
    person.page.keyboard.press("Tab")
    person.page.keyboard.type(PASSWORD)
    person.page.keyboard.press("Enter")
    person.page.wait_for_url("**/dashboard")
    assert not person.complaints


def test_a_terminal_is_let_in(alice: Person, chromium: Any, server: Service) -> None:
    """The code goes along behind the #, through signing in."""
    wanted = {"name": "diamond login on login1", "token_sha256": "1" * 64, "scopes": ["read"]}
    begun = httpx.post(f"{server.url}/api/v1/logins", json=wanted, timeout=30).json()
    person = Person(chromium, server)
    person.page.goto(f"/device#{begun['user_code']}")
    person.fill(User_name="alice", Password=PASSWORD)
    person.press("Sign in")
    person.page.wait_for_url("**/device*")
    code = person.page.get_by_label("Code")
    sync_api.expect(code).to_have_value(begun["user_code"])
    person.press("Continue")
    person.page.get_by_text("diamond login on login1").wait_for()
    person.press("Approve")
    person.page.get_by_text("It now acts for you.").wait_for()
    polled = httpx.post(f"{server.url}/api/v1/logins/poll", json={"device_code": begun["device_code"]}, timeout=30)
    assert polled.json()["state"] == "approved"
    assert not [url for url in person.asked if begun["user_code"] in url.partition("#")[0]]
    assert not person.complaints


def test_signing_out_ends_the_pages_live_stream(alice: Person, chromium: Any, server: Service) -> None:
    person = Person(chromium, server)
    person.sign_in("alice")
    watching = """async () => {
        const answer = await fetch("/api/v1/events/stream");
        window.streamOver = answer.text().then(() => true, () => true);
        window.isOver = false;
        window.streamOver.then(() => { window.isOver = true; });
        return answer.status;
    }"""
    assert person.page.evaluate(watching) == 200
    other = person.context.new_page()
    other.goto("/dashboard")
    other.get_by_role("button", name="Sign out").click()
    other.get_by_text("You are signed out.").wait_for()
    # Told, not found out: credentials are looked at again only after half a minute.
    person.page.wait_for_function("window.isOver", timeout=15_000)


def test_another_sites_page_can_do_nothing(alice: Person, chromium: Any, server: Service) -> None:
    """A page from elsewhere: its form is refused, its frame stays empty, its script reads nothing."""
    victim = Person(chromium, server)
    victim.sign_in("alice")
    csrf = victim.csrf()
    evil = f"http://localhost:{server.port}"  # another origin than 127.0.0.1, served by us for want of another server
    page = victim.context.new_page()
    page.goto(f"{evil}/sign-in")
    form = f"""() => {{
        const form = document.createElement("form");
        form.method = "post";
        form.action = "{server.url}/sign-out";
        const field = document.createElement("input");
        field.name = "csrf"; field.value = "{csrf}";
        form.append(field); document.body.append(form);
    }}"""
    page.route("**/sign-in", lambda route: route.fulfill(status=200, content_type="text/html", body="<p>evil</p>"))
    page.goto(f"{evil}/sign-in")
    page.evaluate(form)
    with page.expect_navigation() as moved:
        page.evaluate("document.forms[0].submit()")
    assert moved.value.status in (401, 403)
    page.goto(f"{evil}/sign-in")
    read = page.evaluate(f"fetch('{server.url}/api/v1/me', {{credentials: 'include'}}).then(() => 'read', () => 'not')")
    assert read == "not"
    page.evaluate(
        f"""() => new Promise((done) => {{
            const frame = document.createElement("iframe");
            frame.onload = () => done();
            frame.src = "{server.url}/dashboard";
            document.body.append(frame);
        }})"""
    )
    assert "alice" not in page.frames[-1].evaluate("document.body ? document.body.innerText : ''")
    victim.page.goto("/dashboard")
    assert victim.page.get_by_role("button", name="Sign out").is_visible(), "still signed in"
