"""Whatever goes wrong, a browser gets a page with words and a way back; programs get JSON."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from diamond.core.errors import RateLimited, Unavailable
from diamond.server.limits import BodyLimit
from diamond.server.web.error_pages import ErrorPages

from .browsing import Browser, forms_in
from .test_web_sign_in import PASSWORD, Town, make_town

PAGE = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MINE = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin", "Referer": "http://localhost/settings/tokens"}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    yield from make_town(tmp_path)


def words_of(answer: Any) -> str:
    assert answer.headers["content-type"].startswith("text/html"), answer.text
    assert "That did not work" in answer.text and "{" not in answer.text.partition("<main")[2].partition("</main")[0]
    assert "Content-Security-Policy" in answer.headers and answer.headers["X-Request-Id"]
    return html.unescape(answer.text)


def test_too_much_in_a_form(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        data = {"csrf": "x", "name": "x" * 10_000_000}
        answer = await browser.http.post("/settings/tokens", data=data, headers=PAGE | MINE)
        words = words_of(answer)
        assert answer.status_code == 413 and "larger than" in words and "go back" in words.lower()
        assert 'href="/settings/tokens"' in words and "bundle" not in words
        program = await browser.http.post("/settings/tokens", data=data, headers=MINE)
        assert program.status_code == 413 and program.json()["error"]["code"] == "too_large"
        api = await browser.http.post("/api/v1/tasks", content=b"x" * 20_000_000, headers=PAGE)
        assert api.status_code == 413 and "bundle" in api.json()["error"]["hint"]

    town.run(test)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (RuntimeError("broken inside"), 500, "the server met an error it did not expect"),
        (OSError(28, "No space left on device"), 507, "disk is full"),
        (OSError(24, "Too many open files"), 503, "too many files open"),
        (RateLimited("too many", hint="wait a minute"), 429, "wait a minute"),
        (Unavailable("not now", hint="try again in a moment"), 503, "try again in a moment"),
    ],
)
def test_what_goes_wrong_inside(
    town: Town, error: Exception, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)

        def fail(*_args: Any, **_more: Any) -> None:
            raise error

        monkeypatch.setattr("diamond.server.services.tokens.list_tokens", fail)
        answer = await browser.get("/settings/tokens", headers=PAGE)
        words = words_of(answer)
        assert answer.status_code == status and says in words.lower()
        assert "broken inside" not in words, "what it was is in the log alone"
        assert 'href="/settings/tokens"' in words, "the way back"
        if status == 500:
            assert answer.headers["X-Request-Id"] in words
        api = await browser.http.get("/api/v1/tokens", headers=PAGE)
        assert api.status_code == status and api.json()["error"]["message"]

    town.run(test)


def test_a_form_that_does_not_come(town: Town) -> None:
    """As the server has it: pages outside, the limits inside."""

    async def taken(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await Response("done")(scope, receive, send)

    app = ErrorPages(BodyLimit(taken, max_json_bytes=1000, max_report_bytes=1000, body_timeout_s=0.05))

    async def ask(path: str) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"accept", b"text/html"), (b"host", b"localhost")]
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "scheme": "http", "server": ("localhost", 80), "app": town.app,
        }  # fmt: skip
        await app(scope, receive, send)
        return sent

    first, body = asyncio.run(ask("/settings/profile"))
    assert first["status"] == 408 and b"did not arrive in time" in body["body"] and b"<h1>" in body["body"]
    assert (b"connection", b"close") in first["headers"]
    first, body = asyncio.run(ask("/api/v1/tasks"))
    assert first["status"] == 408 and body["body"].startswith(b"{")


def test_words_for_people_whose_session_is_over(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        data = forms_in((await browser.get("/settings/tokens")).text)["/settings/tokens"].fields
        stale = data | {"csrf": "0" * 64}
        answer = await browser.http.post("/settings/tokens", data=stale, headers=PAGE | MINE)
        words = words_of(answer)
        assert answer.status_code == 403 and "reload the page" in words
        assert "Diamond-CSRF" not in words and 'href="/settings/tokens"' in words and ">Go back<" in words
        api = await browser.http.post("/api/v1/tokens", json={})
        assert api.status_code == 403 and "Diamond-CSRF" in api.json()["error"]["hint"]

        for cookies in ({}, {"diamond_session": "nothing"}):
            browser.http.cookies.clear()
            for name, value in cookies.items():
                browser.http.cookies.set(name, value)
            answer = await browser.http.post("/settings/tokens", data=data, headers=PAGE | MINE)
            words = words_of(answer)
            assert answer.status_code == 401 and "You are no longer signed in" in words
            assert "Authorization" not in words and "/sign-in?next=/settings/tokens" in words
        browser.http.cookies.clear()
        assert "Authorization" in (await browser.http.post("/api/v1/tokens", json={})).json()["error"]["hint"]

    town.run(test)


def test_too_much_text_in_a_field_of_the_composer(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        data = forms_in((await browser.get("/compose")).text)["/compose"].fields
        files = {"files": ("", b"")}
        sent = {"csrf": data["csrf"], "run": "x" * 3_000_000}
        headers = PAGE | MINE | {"Referer": "http://localhost/compose"}
        answer = await browser.http.post("/compose", data=sent, files=files, headers=headers)
        assert answer.status_code == 413, answer.text[:2000]
        assert "2 MiB" in html.unescape(answer.text) and "go back and shorten it" in answer.text.lower()

    town.run(test)


def test_unknown_addresses(town: Town) -> None:
    async def test(browser: Browser) -> None:
        for ask in (browser.http.get, browser.http.post):
            answer = await ask("/no-such-place", headers=PAGE)
            assert answer.status_code == 404 and "nothing at this address" in answer.text
            assert (await ask("/no-such-place")).json()["error"]["code"] == "not_found"
            assert (await ask("/api/v1/no-such-place", headers=PAGE)).json()["error"]["code"] == "not_found"
        answer = await browser.http.post("/dashboard", headers=PAGE)
        assert answer.status_code == 405 and "GET" in answer.headers["Allow"] and "takes no such form" in answer.text

    town.run(test)


def test_only_what_may_pass_is_to_be_tried_again(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        refused = await browser.get("/users", headers=PAGE | {"Referer": "http://localhost/settings"})
        assert refused.status_code == 403 and "Go back" in refused.text and "Try again" not in refused.text
        assert 'href="/settings">Go back' in refused.text

        def fail(*_args: Any, **_more: Any) -> None:
            raise Unavailable("not now", hint="try again in a moment")

        monkeypatch.setattr("diamond.server.services.tokens.list_tokens", fail)
        assert ">Try again</a>" in (await browser.get("/settings/tokens", headers=PAGE)).text

    town.run(test)
