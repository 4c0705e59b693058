"""The pages by which people come in, with forms sent as a browser sends them. Cross-site tricks: test_web_csrf."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from diamond.core.accounts import Scope
from diamond.core.logins import LoginState, NewLogin
from diamond.server.app import create_app
from diamond.server.hub import Hub
from diamond.server.main import make_context, open_database
from diamond.server.services import accounts, bootstrap, codes, logins, sessions, tokens
from diamond.server.services.context import Context
from diamond.server.settings import load_settings
from diamond.server.web.pages import HOME_PAGE, browser_name, safe_next
from testing import schema
from testing.people import cheap_passwords

from .browsing import Browser, forms_in

PASSWORD = "correct horse battery"


@dataclass
class Town:
    """A server with accounts: alice administers, bob has one."""

    app: FastAPI
    ctx: Context

    def run(self, test: Callable[[Browser], Awaitable[Any]], base_url: str = "http://localhost") -> Any:
        async def whole() -> Any:
            async with self.app.router.lifespan_context(self.app):
                return await test(Browser(self.app, base_url))

        return asyncio.run(whole())

    def make_code(self, kind: str, **more: Any) -> str:
        with self.ctx.db.write() as session:
            return codes.make(session, kind, now=self.ctx.clock(), lifetime_s=600, **more)


def make_town(folder: Path, *, people: tuple[str, ...] = ("alice", "bob"), **settings: Any) -> Iterator[Town]:
    chosen = load_settings(home=folder / "home", sqlite_synchronous="OFF", **{"multi_user": True, **settings})
    chosen.home_dir.make()
    chosen.home_dir.server.mkdir()
    database = open_database(chosen)
    schema.give(database)
    hub = Hub()
    ctx = make_context(chosen, database, hub)
    if not chosen.multi_user:
        bootstrap.prepare(ctx, embedded=None)
    with cheap_passwords():
        for name in people:
            accounts.create(ctx, name=name, password=PASSWORD, is_admin=name == "alice")
        yield Town(app=create_app(ctx, hub, chosen), ctx=ctx)
    database.close()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    yield from make_town(tmp_path)


@pytest.fixture
def empty_town(tmp_path: Path) -> Iterator[Town]:
    yield from make_town(tmp_path, people=())


def test_in_and_out(town: Town) -> None:
    async def test(browser: Browser) -> None:
        sent_away = await browser.get("/dashboard")
        assert (sent_away.status_code, sent_away.headers["location"]) == (303, "/sign-in?next=/dashboard")
        assert "Sign in with a password" in (await browser.get("/")).text
        answer = await browser.sign_in("bob", PASSWORD)
        assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard")
        page = await browser.get("/dashboard")
        assert page.status_code == 200 and "bob" in page.text
        assert (await browser.get("/")).headers["location"] == "/dashboard"
        assert (await browser.get("/api/v1/me")).json()["name"] == "bob"
        cookie = browser.session
        out = await browser.submit("/dashboard", "/sign-out")
        assert (out.status_code, out.headers["location"]) == (303, "/sign-in?done=signed-out")
        assert not browser.session
        assert "You are signed out." in (await browser.get(out.headers["location"])).text
        browser.http.cookies.set("diamond_session", cookie)
        assert (await browser.get("/api/v1/me")).status_code == 401, (
            "the session must be over, not only the cookie gone"
        )

    town.run(test)


def test_a_browser_that_signed_in_is_not_kept_out_by_guesses_beside_it(town: Town) -> None:
    async def test(browser: Browser) -> None:
        own = await browser.sign_in("bob", PASSWORD)
        cookie = next(line for line in own.headers.get_list("set-cookie") if line.startswith("diamond_browser="))
        assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower() and "Max-Age=31536000" in cookie
        await browser.submit("/dashboard", "/sign-out")
        stranger = Browser(town.app)  # from the same address
        for name in [*["bob"] * 12, *(f"user{number}" for number in range(30))]:
            last = await stranger.sign_in(name, "a guess")
        assert last.status_code == 429 and "diamond_browser" not in "".join(last.headers.get_list("set-cookie"))
        assert (await Browser(town.app).sign_in("bob", PASSWORD)).status_code == 429, "a browser nobody knows"
        assert (await browser.sign_in("bob", PASSWORD)).status_code == 303
        for planted in ("short", "x" * 43):
            other = Browser(town.app)
            other.http.cookies.set("diamond_browser", planted)
            assert (await other.sign_in("bob", PASSWORD)).status_code == 429

    town.run(test)


def test_a_wrong_password_says_so_and_keeps_the_name(town: Town) -> None:
    async def test(browser: Browser) -> None:
        for name in ("bob", "nobody"):
            answer = await browser.sign_in(name, "not the password")
            assert answer.status_code == 401 and not browser.session
            assert "The name or the password is wrong." in answer.text and 'role="alert"' in answer.text
            form = forms_in(answer.text)["/sign-in"]
            assert form.fields["name"] == name and form.fields["password"] == ""
        for _ in range(20):
            answer = await browser.sign_in("bob", "not the password")
        assert answer.status_code == 429 and "wrong passwords for this account" in answer.text

    town.run(test)


def test_what_was_typed_cannot_become_markup(town: Town) -> None:
    async def test(browser: Browser) -> None:
        answer = await browser.sign_in('"><script>alert(1)</script>', "not the password")
        assert answer.status_code == 401 and "<script>alert" not in answer.text
        assert forms_in(answer.text)["/sign-in"].fields["name"] == '"><script>alert(1)</script>'

    town.run(test)


ELSEWHERE = (
    "//evil.example", "/\\evil.example", "\\\\evil.example", "https:evil.example", "https://evil.example/",
    "/\n/evil.example", "/\t/evil.example", "\n//evil.example", "javascript:alert(1)", "/ok\r\nSet-Cookie: a=b",
    "evil.example", "", " //evil.example", "/sign-out", "/" + "a" * 600, "/\u2044evil.example",
)  # fmt: skip


def test_after_signing_in_one_stays_here(town: Town) -> None:
    async def test(browser: Browser) -> None:
        for asked in ELSEWHERE:
            assert safe_next(asked) == HOME_PAGE, asked
            page = await browser.http.get("/sign-in", params={"next": asked})
            assert forms_in(page.text)["/sign-in"].fields["next"] == HOME_PAGE, asked
            answer = await browser.sign_in("bob", PASSWORD, next=asked)
            assert (answer.status_code, answer.headers["location"]) == (303, HOME_PAGE), asked
            assert answer.headers["set-cookie"].startswith("diamond_session="), asked
        # What led away from a page leads back to it, and nowhere else.
        assert (await Browser(town.app).get("/account?a=b%2F%2Fevil")).headers["location"] == (
            "/sign-in?next=/account%3Fa%3Db%252F%252Fevil"
        )

    town.run(test)


def test_own_paths_are_kept() -> None:
    for path in ("/", "/device", "/device#ABCD-EFGH", "/tasks/tsk_1?since=3&x=%20y", "/account"):
        assert safe_next(path) == path


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_cookie_flags(town: Town, scheme: str) -> None:
    async def test(browser: Browser) -> None:
        page = await browser.get("/sign-in")
        answer = await browser.sign_in("bob", PASSWORD)
        prefix = "__Host-" if scheme == "https" else ""
        for name, line in (("form", page.headers["set-cookie"]), ("session", answer.headers["set-cookie"])):
            parts = {part.strip().lower() for part in line.split(";")[1:]}
            assert line.startswith(f"{prefix}diamond_{name}=")
            assert {"httponly", "path=/", "samesite=lax"} <= parts
            assert ("secure" in parts) == (scheme == "https") and not any(part.startswith("domain") for part in parts)
        assert (await browser.get("/dashboard")).status_code == 200

    town.run(test, f"{scheme}://localhost")


def test_a_planted_session_never_becomes_a_signed_in_one(town: Town) -> None:
    async def test(browser: Browser) -> None:
        browser.http.cookies.set("diamond_session", "planted-by-somebody-else")
        await browser.sign_in("bob", PASSWORD)
        first = browser.http.cookies.get("diamond_session", domain="localhost.local")
        assert first and first != "planted-by-somebody-else"
        other = Browser(town.app)
        other.http.cookies.set("diamond_session", "planted-by-somebody-else")
        assert (await other.get("/api/v1/me")).status_code == 401

    town.run(test)


def test_signing_in_anew_ends_the_session_before(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        old = browser.session
        await browser.sign_in("alice", PASSWORD)
        assert browser.session != old
        assert (await browser.get("/api/v1/me")).json()["name"] == "alice"
        other = Browser(town.app)
        other.http.cookies.set("diamond_session", old)
        assert (await other.get("/api/v1/me")).status_code == 401

    town.run(test)


def test_the_first_administrator(empty_town: Town) -> None:
    code = empty_town.make_code(codes.SETUP, short=True)

    async def test(browser: Browser) -> None:
        assert "/setup" in (await browser.get("/sign-in")).text
        front = (await browser.get("/")).text
        assert 'href="/setup"' in front and "diamond login" not in front
        filled = {"name": "alice", "full_name": "Alice", "password": PASSWORD, "again": PASSWORD}
        wrong = await browser.submit("/setup", "/setup", code="AAAA-AAAA-AAAA", **filled)
        assert wrong.status_code == 401 and 'id="code-error"' in wrong.text and 'aria-invalid="true"' in wrong.text
        unequal = await browser.submit("/setup", "/setup", code=code, **(filled | {"again": "another"}))
        assert unequal.status_code == 422 and 'id="again-error"' in unequal.text
        assert PASSWORD not in unequal.text and forms_in(unequal.text)["/setup"].fields["name"] == "alice"
        short = await browser.submit(
            "/setup", "/setup", code=code, **(filled | {"password": "short", "again": "short"})
        )
        assert short.status_code == 422 and 'id="password-error"' in short.text
        done = await browser.submit("/setup", "/setup", code=code, **filled)
        assert (done.status_code, done.headers["location"]) == (303, HOME_PAGE)
        account = (await browser.get("/settings")).text
        assert "administrator of this installation" in account and "diamond user invite" in account
        front = (await Browser(empty_town.app).get("/")).text
        assert "/setup" not in front and "diamond login" in front
        assert (await browser.get("/setup")).headers["location"] == "/sign-in"

    empty_town.run(test)


def test_an_invitation(town: Town) -> None:
    alice = sessions_user(town, "alice")
    code = town.make_code(codes.INVITATION, created_by=alice)

    async def test(browser: Browser) -> None:
        filled = {"code": code, "password": PASSWORD, "again": PASSWORD}
        taken = await browser.submit("/invitation", "/invitation", name="bob", **filled)
        assert taken.status_code == 409 and 'id="name-error"' in taken.text
        done = await browser.submit("/invitation", "/invitation", name="carol", **filled)
        assert done.status_code == 303
        assert (await browser.get("/api/v1/me")).json()["name"] == "carol"
        again = await browser.submit("/invitation", "/invitation", name="dave", **filled)
        assert again.status_code == 401 and 'id="code-error"' in again.text

    town.run(test)


def test_a_new_password_by_code(town: Town) -> None:
    bob = sessions_user(town, "bob")
    code = town.make_code(codes.RESET, user_id=bob)

    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        fresh = "another long password"
        done = await Browser(town.app).submit("/reset", "/reset", code=code, password=fresh, again=fresh)
        assert (done.status_code, done.headers["location"]) == (303, "/sign-in?done=reset")
        assert (await browser.get("/api/v1/me")).status_code == 401, "the old sessions are over"
        assert (await browser.sign_in("bob", PASSWORD)).status_code == 401
        assert (await browser.sign_in("bob", fresh)).status_code == 303

    town.run(test)


def test_settings(town: Town) -> None:
    bob = sessions_user(town, "bob")
    token = tokens.create(town.ctx, bob, "<b>laptop</b>", (Scope.READ,), 3600, held=frozenset(Scope))

    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        other = Browser(
            town.app, **{"User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"}
        )
        await other.sign_in("bob", PASSWORD)
        old = await browser.get("/account?done=password")
        assert (old.status_code, old.headers["location"]) == (303, "/settings?done=password")
        assert "&lt;b&gt;laptop&lt;/b&gt;" in (await browser.get("/settings/tokens")).text
        page = (await browser.get("/settings")).text
        assert "diamond login http://" in page and 'href="/device"' in page  # what to do next
        assert "diamond user invite" not in page
        page = (await browser.get("/settings/sessions")).text
        assert "Firefox on Linux" in page
        ends = [action for action in forms_in(page) if action.endswith("/end")]
        assert len(ends) == 2
        revoked = await browser.submit("/settings/tokens", f"/settings/tokens/{token.id}/revoke")
        assert revoked.headers["location"] == "/settings/tokens?done=token"
        assert "The token is revoked." in (await browser.get("/settings/tokens?done=token")).text
        assert not tokens.list_tokens(town.ctx, bob)
        mine = next(each.id for each in sessions.list_sessions(town.ctx, bob) if "Firefox" not in each.browser)
        theirs = next(each.id for each in sessions.list_sessions(town.ctx, bob) if "Firefox" in each.browser)
        await browser.submit("/settings/sessions", f"/settings/sessions/{theirs}/end")
        assert (await other.get("/api/v1/me")).status_code == 401
        wrong = await browser.submit(
            "/settings",
            "/settings/password",
            old_password="wrong",
            new_password="a fresh long one",
            again="a fresh long one",
        )
        assert wrong.status_code == 403 and 'id="old_password-error"' in wrong.text
        fresh = "another long password"
        changed = await browser.submit(
            "/settings", "/settings/password", old_password=PASSWORD, new_password=fresh, again=fresh
        )
        assert changed.headers["location"] == "/settings?done=password"
        ended = await browser.submit("/settings/sessions", f"/settings/sessions/{mine}/end")
        assert ended.headers["location"] == "/sign-in?done=signed-out" and not browser.session
        assert (await browser.sign_in("bob", fresh)).status_code == 303

    town.run(test)


def test_nobody_ends_what_is_anothers(town: Town) -> None:
    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        alice = Browser(town.app)
        await alice.sign_in("alice", PASSWORD)
        theirs = sessions.list_sessions(town.ctx, sessions_user(town, "alice"))[0].id
        csrf = forms_in((await browser.get("/settings")).text)["/sign-out"].fields["csrf"]
        answer = await browser.http.post(f"/settings/sessions/{theirs}/end", data={"csrf": csrf})
        assert answer.status_code == 404 and "text/html" in answer.headers["content-type"]
        assert (await alice.get("/settings")).status_code == 200

    town.run(test)


@pytest.mark.parametrize("verdict", ["approve", "refuse"])
def test_a_terminal_is_approved_or_refused(town: Town, verdict: str) -> None:
    token = "dmdu_" + "t" * 43
    wanted = NewLogin(name="laptop of <bob>", token_sha256=tokens.hash_token(token), scopes=(Scope.READ,))
    begun = logins.begin(town.ctx, wanted, lifetime_s=3600, address="192.0.2.7", url="http://localhost")

    async def test(browser: Browser) -> None:
        sent_away = await browser.get("/device")
        assert sent_away.headers["location"] == "/sign-in?next=/device"
        answer = await browser.sign_in("bob", PASSWORD, next="/device")
        assert answer.headers["location"] == "/device"
        wrong = await browser.submit("/device", "/device", code="AAAA-AAAA")
        assert wrong.status_code == 404 and 'id="code-error"' in wrong.text
        shown = await browser.submit("/device", "/device", code=begun.user_code.lower())
        assert shown.status_code == 200
        for text in ("laptop of &lt;bob&gt;", "192.0.2.7", "<b>read</b>: look at everything you see"):
            assert text in shown.text
        form = forms_in(shown.text)[f"/device/{verdict}"]
        done = await browser.http.post(form.action, data=form.fields)
        assert done.status_code == 200
        expected = LoginState.APPROVED if verdict == "approve" else LoginState.REFUSED
        assert logins.poll(town.ctx, begun.device_code).state is expected
        held = await Browser(town.app, Authorization=f"Bearer {token}").get("/api/v1/me")
        assert held.status_code == (200 if verdict == "approve" else 401)

    town.run(test)


def test_browsers_are_called_by_their_names() -> None:
    assert browser_name("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140 Safari/537.36 Edg/140") == (
        "Edge on Windows"
    )
    assert browser_name("") == "unknown" and browser_name("curl/8") == "curl/8"


def sessions_user(town: Town, name: str) -> str:
    import sqlalchemy as sa

    from diamond.server.store.models import UserRow

    with town.ctx.db.read() as session:
        return session.scalars(sa.select(UserRow.id).where(UserRow.name == name)).one()
