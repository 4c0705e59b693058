"""No form is taken that a page of ours did not make for this very browser. Walks every route: none is forgotten."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from diamond.server.web import PAGES

from .browsing import Browser, forms_in
from .test_web_sign_in import PASSWORD, Town, make_town


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    yield from make_town(tmp_path)


def page_routes(method: str) -> list[str]:
    """Paths of all pages that answer this method, their parameters filled in with something."""
    paths = {route.path for router in PAGES for route in router.routes if method in route.methods}  # type: ignore[attr-defined]
    return sorted(re.sub(r"\{[^}]+\}", "thing", path) for path in paths)


def test_there_are_forms() -> None:
    assert {"/sign-in", "/sign-out", "/setup", "/invitation", "/reset", "/device", "/device/approve"} <= set(
        page_routes("POST")
    )
    others = {
        route.path
        for router in PAGES
        for route in router.routes
        if route.methods - {"GET", "HEAD", "POST"}  # type: ignore[attr-defined]
    }
    assert not others, "browsers' forms know GET and POST only"


def test_every_form_needs_its_own_token(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        alice = Browser(town.app)
        await alice.sign_in("alice", PASSWORD)
        own = browser.session
        foreign = forms_in((await alice.get("/dashboard")).text)["/sign-out"].fields["csrf"]
        foreign_open = forms_in((await alice.get("/reset")).text)["/reset"].fields["csrf"]
        mine = forms_in((await browser.get("/dashboard")).text)["/sign-out"].fields["csrf"]
        assert mine != foreign
        for path in page_routes("POST"):
            for data in ({}, {"csrf": ""}, {"csrf": "0" * 64}, {"csrf": foreign}, {"csrf": foreign_open}):
                answer = await browser.http.post(path, data={"name": "bob", "password": PASSWORD, **data})
                assert answer.status_code == 403, (path, data, answer.status_code)
                assert "text/html" in answer.headers["content-type"], path
                assert "set-cookie" not in answer.headers, path
        assert browser.session == own and (await browser.get("/dashboard")).status_code == 200

    town.run(test)


def test_another_site_cannot_send_them_even_with_the_token(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        session = forms_in((await browser.get("/dashboard")).text)["/sign-out"].fields["csrf"]
        before = forms_in((await browser.get("/reset")).text)["/reset"].fields["csrf"]
        for path in page_routes("POST"):
            for token in (session, before):
                for headers in (
                    {"Origin": "https://evil.example"},
                    {"Origin": "null"},
                    {"Origin": "http://localhost.evil.example"},
                    {"Sec-Fetch-Site": "cross-site"},
                    {"Sec-Fetch-Site": "same-site"},
                ):
                    answer = await browser.http.post(path, data={"csrf": token}, headers=headers)
                    assert answer.status_code == 403, (path, headers)
        assert (await browser.get("/dashboard")).status_code == 200, "nothing happened"

    town.run(test)


def test_forms_without_a_session_are_bound_to_the_browser(town: Town) -> None:
    async def test(browser: Browser) -> None:
        token = forms_in((await browser.get("/sign-in")).text)["/sign-in"].fields["csrf"]
        again = forms_in((await browser.get("/invitation")).text)["/invitation"].fields["csrf"]
        assert token == again, "two tabs of one browser do not disturb each other"
        sent = {"csrf": token, "name": "bob", "password": PASSWORD}
        stranger = await Browser(town.app).http.post("/sign-in", data=sent)
        assert stranger.status_code == 403 and "not made for this browser" in stranger.text
        forged = Browser(town.app)
        forged.http.cookies.set("diamond_form", "short")
        assert (await forged.http.post("/sign-in", data={**sent, "csrf": ""})).status_code == 403
        assert (await browser.http.post("/sign-in", data=sent)).status_code == 303

    town.run(test)


def test_pages_of_the_session_need_one(town: Town) -> None:
    """Without a session nothing of a user's can be done or seen, and POST is not led astray."""

    async def test(browser: Browser) -> None:
        open_forms = {"/sign-in", "/setup", "/invitation", "/reset"}
        for path in page_routes("POST"):
            if path in open_forms or path.startswith("/sign-in/"):
                continue
            answer = await browser.http.post(path, data={"csrf": "x"})
            assert answer.status_code == 401, path
            assert "Sign in" in answer.text

    town.run(test)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"csrf": "x"}', "application/json", 422),
        (b"csrf=x", "text/plain", 422),
        (b"csrf=x", "multipart/form-data; boundary=x", 422),
        (b"csrf=%ff%fe", "application/x-www-form-urlencoded", 422),
        (b"csrf=x&csrf=y", "application/x-www-form-urlencoded", 422),
        (b"name=a%00b", "application/x-www-form-urlencoded", 422),
        (b"a=1&" * 100, "application/x-www-form-urlencoded", 422),
        (b"a=" + b"x" * 70_000, "application/x-www-form-urlencoded", 413),
        (b"", "application/x-www-form-urlencoded", 403),
    ],
)
def test_what_is_no_form(town: Town, body: bytes, kind: str, status: int) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        for path in ("/sign-in", "/sign-out"):
            answer = await browser.http.post(path, content=body, headers={"Content-Type": kind})
            assert answer.status_code == status, path
            assert "text/html" in answer.headers["content-type"]

    town.run(test)


def test_api_with_a_cookie_needs_the_token_of_the_page_too(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        spec = {"spec": {"run": "true"}}
        assert (await browser.http.post("/api/v1/tasks", json=spec)).status_code == 403
        token = forms_in((await browser.get("/dashboard")).text)["/sign-out"].fields["csrf"]
        refused = await browser.http.post(
            "/api/v1/tasks", json=spec, headers={"Diamond-CSRF": token, "Origin": "https://evil.example"}
        )
        assert refused.status_code == 403
        taken = await browser.http.post("/api/v1/tasks", json=spec, headers={"Diamond-CSRF": token})
        assert taken.status_code == 201, taken.text

    town.run(test)
