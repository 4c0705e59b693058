"""What every answer tells browsers, and the names this server answers to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from diamond.core.errors import InstallationProblem
from diamond.server.hosts import host_name, is_loopback_name
from diamond.server.settings import load_settings
from diamond.server.web import pages
from diamond.server.web.navigation import PLACES

from .browsing import Browser
from .conftest import World
from .test_web_sign_in import PASSWORD, Town, make_town


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    yield from make_town(tmp_path)


def test_every_answer_has_them(town: Town) -> None:
    async def test(browser: Browser) -> None:
        paths = ["/", "/sign-in", "/dashboard", "/api/v1/me", "/api/v1/health", "/nothing", "/openapi.json", "/metrics"]
        for path in [*paths, pages._asset("diamond.css")]:
            answer = await browser.get(path)
            headers = answer.headers
            policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'", path
            assert policy["frame-ancestors"] == "'none'", path
            assert policy["form-action"] == "'self'" and policy["base-uri"] == "'none'", path
            assert "unsafe" not in headers["content-security-policy"], path
            assert headers["x-content-type-options"] == "nosniff", path
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert "strict-transport-security" not in headers, path
            kept = path.startswith("/static/")
            if not kept:  # these say nothing of styles and scripts
                assert headers["x-frame-options"] == "DENY", path
                assert headers["referrer-policy"] == headers["cross-origin-opener-policy"] == "same-origin", path
                assert "camera=()" in headers["permissions-policy"], path
            assert headers["cache-control"] == ("public, max-age=31536000, immutable" if kept else "no-store"), path
            for name in ("content-security-policy", "cache-control", "x-content-type-options"):
                assert len(headers.get_list(name)) == 1, (path, name)

    town.run(test)


def test_https_is_insisted_upon_once_spoken(town: Town) -> None:
    async def test(browser: Browser) -> None:
        assert (await browser.get("/sign-in")).headers["strict-transport-security"] == "max-age=31536000"

    town.run(test, "https://localhost")


def test_https_of_a_proxy_in_front_counts(tmp_path: Path) -> None:
    for town in make_town(tmp_path, public_url="https://diamond.example.org"):

        async def test(browser: Browser) -> None:
            page = await browser.get("/sign-in")
            assert "strict-transport-security" in page.headers
            assert page.headers["set-cookie"].startswith("__Host-diamond_form=")
            assert "secure" in page.headers["set-cookie"].lower()

        town.run(test)


def test_pages_load_nothing_but_our_own_files(town: Town) -> None:
    """What the policy forbids would be a broken page: no inline script or style, nothing from elsewhere."""
    import re

    async def test(browser: Browser) -> None:
        await browser.sign_in("alice", PASSWORD)
        places = [place.path for place in PLACES]
        for path in ("/", "/sign-in", "/setup", "/invitation", "/reset", "/endpoints/new", "/device", *places):
            answer = await (Browser(town.app) if path == "/" else browser).get(path)
            if answer.status_code == 303:
                continue
            assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:", answer.text), path
            for target in re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="([^"]+)"', answer.text):
                assert target.startswith("/static/"), (path, target)
                assert (await browser.get(target)).status_code == 200
            assert '<html lang="en">' in answer.text and "<title>" in answer.text and 'id="main"' in answer.text

    town.run(test)


def test_static_files(town: Town) -> None:
    async def test(browser: Browser) -> None:
        found = await browser.get(pages._asset("code.js"))
        assert found.status_code == 200 and found.headers["content-type"].startswith("text/javascript")
        for path in ("/static/diamond.css", "/static/../pages.py", "/static/%2e%2e%2fpages.py", "/static/x.css"):
            assert (await browser.get(path)).status_code == 404, path

    town.run(test)


def test_templates_trust_no_value() -> None:
    for path in (Path(pages.__file__).parent / "templates").iterdir():
        text = path.read_text()
        assert "|safe" not in text.replace(" ", "") and "autoescape" not in text and "Markup" not in text, path
    assert pages._TEMPLATES.autoescape is True


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "192.0.2.1",
     "[2001:db8::1]:8000", "169.254.169.254", "127.0.0.1@evil.example", "localhost/", "local host", "<b>", "server"],
)  # fmt: skip
def test_with_one_user_other_names_are_refused(world: World, host: str) -> None:
    """A page whose name was made to point to 127.0.0.1 gets nothing, whatever it asks for."""

    async def test(client: object) -> None:
        browser = Browser(world.app)
        for path in ("/", "/sign-in", "/dashboard", "/api/v1/health", "/api/v1/tasks"):
            answer = await browser.get(path, headers={"Host": host, "Authorization": f"Bearer {world.user_token}"})
            assert answer.status_code in (403, 422), (path, host)
            assert "set-cookie" not in answer.headers and answer.json()["error"]["hint"]
            assert answer.headers["x-frame-options"] == "DENY"

    world.run(test)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.1.2.3", "[::1]:8000", "[::1]"])
def test_names_of_this_machine_are_answered(world: World, host: str) -> None:
    async def test(client: object) -> None:
        assert (await Browser(world.app).get("/api/v1/health", headers={"Host": host})).status_code == 200

    world.run(test)


def test_the_name_the_operator_gave_is_answered(tmp_path: Path) -> None:
    for town in make_town(tmp_path, people=(), multi_user=False, public_url="http://desk.example.org:8443"):

        async def test(browser: Browser) -> None:
            for host, status in (("desk.example.org", 200), ("desk.example.org:1", 200), ("example.org", 403)):
                assert (await browser.get("/api/v1/health", headers={"Host": host})).status_code == status
            refused = await browser.get("/sign-in", headers={"Host": "desk.example.org"})
            assert refused.status_code == 403 and "another name than localhost" in refused.text

        town.run(test)


PUBLIC = "https://diamond.example.org:8443"


def test_with_accounts_only_names_the_operator_gave_are_answered(tmp_path: Path) -> None:
    answered = ["diamond.example.org", "Diamond.Example.ORG.:8443", "diamond.example.org:1", "localhost:7421",
                "127.0.0.1", "[::1]:7421", "10.0.0.7:7421", "[2001:db8::7]", "[2001:DB8:0::0007]:80"]  # fmt: skip
    refused = ["evil.example", "diamond.example.org.evil.example", "example.org", "10.0.0.8", "[2001:db8::8]",
               "xdiamond.example.org", "0.0.0.0", "diamond.example.org..evil"]  # fmt: skip
    for town in make_town(tmp_path, public_url=PUBLIC, allowed_hosts="10.0.0.7, [2001:db8::7]"):

        async def test(browser: Browser) -> None:
            for host in answered:
                assert (await browser.get("/api/v1/sign-in-methods", headers={"Host": host})).status_code == 200, host
            for host in refused:
                for path in ("/sign-in", "/invitation", "/api/v1/sign-in-methods", "/api/v1/me", "/agent.pyz"):
                    answer = await browser.get(path, headers={"Host": host})
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"], error["transient"]) == (421, "unavailable", True)
                    assert host.rpartition(":")[0].strip("[]") or host in error["message"]
                    assert "DIAMOND_ALLOWED_HOSTS" in error["hint"] and PUBLIC in error["hint"]
                    assert "set-cookie" not in answer.headers
                # A load balancer asks by address, and Prometheus by a name of its own.
                for path in ("/api/v1/health", "/metrics"):
                    assert (await browser.get(path, headers={"Host": host})).status_code == 200, host
            page = await browser.get("/sign-in", headers={"Host": "evil.example", "Accept": "text/html"})
            assert page.status_code == 421 and "DIAMOND_ALLOWED_HOSTS" in page.text and "<title>" in page.text

        town.run(test)


def test_links_begin_with_the_public_address_whatever_name_was_asked(tmp_path: Path) -> None:
    for town in make_town(tmp_path, public_url=PUBLIC, allowed_hosts="10.0.0.7"):

        async def test(browser: Browser) -> None:
            wanted = {"name": "laptop", "token_sha256": "0" * 64, "scopes": ["read"]}
            for host in ("10.0.0.7:9999", "localhost", "diamond.example.org"):
                begun = await browser.http.post("/api/v1/logins", json=wanted, headers={"Host": host})
                assert begun.json()["verification_url"].startswith(f"{PUBLIC}/"), host

        town.run(test)


@pytest.mark.parametrize(
    ("client", "asked", "status"),
    [
        ("127.0.0.1", "diamond.example.org", 200),
        ("127.0.0.1", "evil.example", 421),
        ("127.0.0.1", "diamond.example.org, evil.example", 421),
        ("192.0.2.9", "evil.example", 200),  # no proxy of ours: nobody reads that header
    ],
)
def test_what_a_trusted_proxy_was_asked_for_counts(tmp_path: Path, client: str, asked: str, status: int) -> None:
    for town in make_town(tmp_path, public_url=PUBLIC, trusted_proxies="127.0.0.1"):

        async def test(_: Browser, app: FastAPI = town.app) -> None:
            browser = Browser(app, client=client)
            headers = {"Host": "127.0.0.1:7421", "X-Forwarded-Host": asked}
            assert (await browser.get("/api/v1/sign-in-methods", headers=headers)).status_code == status

        town.run(test)


def test_loopback_names_are_refused_where_nothing_listens_on_them(tmp_path: Path) -> None:
    for town in make_town(tmp_path, public_url=PUBLIC, host="192.0.2.1", allow_remote=True):

        async def test(browser: Browser) -> None:
            for host, status in (("localhost", 421), ("127.0.0.1:7421", 421), ("192.0.2.1:7421", 200)):
                assert (await browser.get("/api/v1/sign-in-methods", headers={"Host": host})).status_code == status

        town.run(test)


@pytest.mark.parametrize("given", ["https://a.example", "a.example:80", "a b", "a/b", "*"])
def test_a_host_that_is_none_is_named_at_the_start(tmp_path: Path, given: str) -> None:
    with pytest.raises(InstallationProblem, match=r"allowed_hosts.*leave out scheme") as caught:
        load_settings(home=tmp_path, allowed_hosts=f"good.example, {given}")
    assert "DIAMOND_ALLOWED_HOSTS" in caught.value.hint


def test_without_an_address_of_the_operator_any_proper_name_is_answered(town: Town) -> None:
    async def test(browser: Browser) -> None:
        for host, status in (("diamond.example.org", 200), ("[::1]:80", 200), ("a b", 422), ('"><b>', 422)):
            assert (await browser.get("/api/v1/health", headers={"Host": host})).status_code == status

    town.run(test)


def test_names() -> None:
    assert host_name("Example.ORG:80") == "example.org" and host_name("[::1]:80") == "::1" and host_name("") == ""
    assert is_loopback_name("127.8.9.1") and is_loopback_name("::1") and not is_loopback_name("0.0.0.0")
    assert not is_loopback_name("") and not is_loopback_name("localhost.")
