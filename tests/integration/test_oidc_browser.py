"""Signing in with a provider in a real browser, with scripts and without: its own rules on forms and cookies hold.

A browser lets no form lead to another site under our content policy, and sends cookies back from another site as it
sees fit; that all of it still works is what only a browser can show.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from testing.service import Service
from testing.sign_in import Tenant, as_admin, lying_provider, provider_toml, running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, to drive a browser")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs a browser: chromium or google-chrome on PATH")


@dataclass
class World:
    service: Service
    main: Tenant
    closed: Tenant
    chromium: Any


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with lying_provider() as url:
        # By another name than ours, so that the browser takes it for the other site that it is.
        url = url.replace("127.0.0.1", "localhost")
        main, closed = Tenant(f"{url}/main"), Tenant(f"{url}/closed")
        text = provider_toml("main", main.issuer) + provider_toml("closed", closed.issuer, allow="")
        with (
            running(tmp_path_factory.mktemp("browser") / "home", text) as service,
            sync_api.sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            yield World(service, main, closed, browser)
            browser.close()


@pytest.fixture(params=[True, False], ids=["scripts", "no scripts"])
def page(world: World, request: pytest.FixtureRequest) -> Iterator[Any]:
    context = world.chromium.new_context(base_url=world.service.url, java_script_enabled=request.param)
    context.set_default_timeout(20_000)
    found = context.new_page()
    complaints: list[str] = []
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    yield found
    context.close()
    assert not [text for text in complaints if "403" not in text]


def test_signing_in_linking_and_being_refused(world: World, page: Any, request: pytest.FixtureRequest) -> None:
    who = request.node.callspec.id.replace(" ", "-")
    world.main.control(reset=True, sub=who, claims={"name": f"Zoe {who}"})
    world.closed.control(reset=True, sub=who, claims={"email": f"{who}@closed.example"})
    page.goto("/sign-in?next=/device")
    page.get_by_role("link", name="Continue with Main").click()
    page.wait_for_url("**/device")
    page.goto("/settings")
    assert page.get_by_role("heading", level=2).first.inner_text() == f"Zoe {who}"
    page.get_by_role("button", name="Link Closed").click()
    page.wait_for_url("**/settings?done=linked")
    assert f"{who}@closed.example" in page.content()

    world.main.control(faults=["other nonce"])
    page.goto("/sign-in/main")
    assert "is not valid: nonce" in page.get_by_role("alert").inner_text()
    page.get_by_role("link", name="Try again").click()
    page.wait_for_url("**/dashboard")  # the session there was goes on


def test_an_invitation_with_a_provider(world: World, page: Any, request: pytest.FixtureRequest) -> None:
    name = "guest-" + request.node.callspec.id.replace(" ", "-")
    code = as_admin(world.service, "POST", "/invitations", name=name)["code"]
    world.closed.control(reset=True, sub=name)
    page.goto("/invitation")
    page.get_by_label("Invitation code").fill(code)
    page.get_by_role("button", name="Continue with Closed").click()
    page.wait_for_url("**/dashboard")
    assert page.get_by_role("link", name=f"Settings of {name}").is_visible()
    assert {cookie["name"] for cookie in page.context.cookies()} & {"diamond_provider"} == set()
