"""Small doors: what strangers learn of an installation, and what people see who come by the wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from diamond.server.identity_file import IdentityConfig
from diamond.server.identity_providers import IdentityProviders

from .browsing import Browser, forms_in
from .conftest import World
from .test_web_sign_in import PASSWORD, Town, make_town

PAGE = {"Accept": "text/html,application/xhtml+xml;q=0.9"}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    yield from make_town(tmp_path / "town")


def test_what_an_installation_is_made_of_is_for_its_administrators(town: Town, world: World) -> None:
    async def ask(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        told = (await browser.get("/api/v1/info")).json()
        assert (told["data_dir"], told["database"], told["counts"]) == (None, None, None)
        assert told["version"] and told["epoch"] == town.ctx.epoch
        await browser.sign_in("alice", PASSWORD)
        told = (await browser.get("/api/v1/info")).json()
        assert (told["data_dir"], told["database"]) == (str(town.ctx.home.server), "sqlite")
        assert told["counts"] is not None

    town.run(ask)

    async def alone(client: httpx.AsyncClient) -> None:
        assert (await client.get("/api/v1/info")).json()["data_dir"] == str(world.ctx.home.server)

    world.run(alone)


def test_people_who_mistype_an_address_get_a_page_and_programs_an_error(town: Town) -> None:
    async def ask(browser: Browser) -> None:
        page = await browser.get("/acount/<b>", headers=PAGE)
        assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "nothing at this address" in page.text and "<b>" not in page.text
        assert "default-src" in page.headers["content-security-policy"]
        for path, headers in (("/api/v1/nothing", PAGE), ("/nothing", {}), ("/nothing", {"Accept": "*/*"})):
            answer = await browser.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        posted = await browser.http.post("/nothing", headers=PAGE)  # a form sent to an address that is gone
        assert (posted.status_code, posted.headers["content-type"]) == (404, "text/html; charset=utf-8")
        sent = await browser.http.post("/nothing")
        assert (sent.status_code, sent.json()["error"]["code"]) == (404, "not_found")

    town.run(ask)


def test_where_passwords_are_for_nobody_else_the_last_administrator_is_asked_for_one(town: Town) -> None:
    """With `local = false` it is how somebody gets in on the day the provider is down."""
    object.__setattr__(town.ctx, "identity", IdentityProviders(IdentityConfig(local_accounts=False)))

    async def ask(browser: Browser) -> None:
        page = await browser.get("/sign-in")
        assert "password" in forms_in(page.text)["/sign-in"].fields
        refused = await browser.sign_in("bob", PASSWORD)
        assert refused.status_code == 401 and not browser.session
        invited = await browser.get("/invitation")
        assert all("password" not in form.fields for form in forms_in(invited.text).values())
        assert (await browser.sign_in("alice", PASSWORD)).status_code == 303
        assert browser.session

    town.run(ask)
