"""Routes of accounts: who may ask what, and what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.accounts import Scope
from diamond.server.app import create_app
from diamond.server.auth import COOKIE, CSRF_HEADER
from diamond.server.hub import Hub
from diamond.server.main import make_context, open_database
from diamond.server.services import accounts, bootstrap, sessions, throttling, tokens
from diamond.server.services.context import Context
from diamond.server.settings import load_settings
from testing import schema
from testing.people import PASSWORD, cheap_passwords
from tests.unit.server.conftest import World

OTHER_PASSWORD = "a quite different long one"


@dataclasses.dataclass
class Accounts:
    """A server with accounts, an administrator (alice) and somebody else (bob)."""

    world: World
    bob_token: str

    @property
    def ctx(self) -> Context:
        return self.world.ctx


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accounts]:
    for name in ("DIAMOND_URL", "DIAMOND_TOKEN", "DIAMOND_HOME"):
        monkeypatch.delenv(name, raising=False)
    settings = load_settings(
        home=tmp_path / "home", sqlite_synchronous="OFF", multi_user=True, public_url="http://server"
    )
    settings.home_dir.make()
    settings.home_dir.server.mkdir()
    database = open_database(settings)
    schema.give(database)
    hub = Hub()
    ctx = make_context(settings, database, hub)
    with cheap_passwords():
        alice = accounts.setup(ctx, bootstrap.prepare_multi_user(ctx), name="alice", password=PASSWORD)
        bob = accounts.create(ctx, name="bob", password=PASSWORD)
        world = World(
            app=create_app(ctx, hub, settings), ctx=ctx, hub=hub, settings=settings,
            user_token=accounts.first_token(ctx, alice, "tests"), user_id=alice.id, agent_token="", endpoint_id="",
        )  # fmt: skip
        yield Accounts(world=world, bob_token=accounts.first_token(ctx, bob, "tests"))
    database.close()


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_who_one_is(many: Accounts) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        me = (await client.get("/api/v1/me")).json()
        assert (me["name"], me["is_admin"], me["has_password"]) == ("alice", True, True)
        changed = await client.patch("/api/v1/me", json={"full_name": "Alice A.", "email": "a@example.org"})
        assert (changed.json()["full_name"], changed.json()["email"]) == ("Alice A.", "a@example.org")
        wrong = await client.patch("/api/v1/me", json={"email": "none"})
        assert (code_of(wrong), wrong.json()["error"]["field"]) == ((422, "invalid_input"), "email")
        assert code_of(await client.patch("/api/v1/me", json={"is_admin": True})) == (422, "invalid_input")
        assert "argon2" not in (await client.get("/api/v1/users")).text

    many.world.run(test)


def test_scopes_and_administrators(many: Accounts) -> None:
    """A token that only launches changes no account, and an ordinary user manages nobody's."""
    ctx = many.ctx
    alice = many.world.user_id
    launch = tokens.create(ctx, alice, "launch", (Scope.LAUNCH,), None, held=frozenset(Scope)).value

    async def test(client: httpx.AsyncClient) -> None:
        changes: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", "/api/v1/users", {}),
            ("GET", "/api/v1/users/bob", {}),
            ("POST", "/api/v1/users/bob/disable", {}),
            ("POST", "/api/v1/users/bob/enable", {}),
            ("POST", "/api/v1/users/bob/admin", {"is_admin": True}),
            ("POST", "/api/v1/users/bob/reset", {}),
            ("POST", "/api/v1/invitations", {}),
        ]
        for token in (launch, many.bob_token):
            async with many.world.client(token) as other:
                assert (await other.get("/api/v1/me")).status_code == 200
                assert (await other.get("/api/v1/people")).status_code == 200
                for method, path, body in changes:
                    answer = await other.request(method, path, json=body)
                    assert code_of(answer) == (403, "forbidden"), (path, answer.text)
        async with many.world.client(launch) as other:
            assert code_of(await other.patch("/api/v1/me", json={"full_name": "x"})) == (403, "forbidden")
            assert code_of(await other.delete("/api/v1/me/sessions/ses_00000000a")) == (403, "forbidden")
        async with many.world.client("") as nobody:
            for path in ("/api/v1/me", "/api/v1/users", "/api/v1/people", "/api/v1/invitations", "/api/v1/me/sessions"):
                assert code_of(await nobody.get(path)) == (401, "unauthenticated")

    many.world.run(test)


def test_sessions_and_the_password(many: Accounts) -> None:
    ctx = many.ctx
    where = {"address": "192.0.2.1", "browser": "b"}
    here, there = (accounts.sign_in(ctx, "bob", PASSWORD, **where) for _ in range(2))
    csrf = {CSRF_HEADER: sessions.csrf_of(here)}

    async def test(_client: httpx.AsyncClient) -> None:
        async with many.world.client("") as browser:
            browser.cookies.set(COOKIE, here)
            listed = (await browser.get("/api/v1/me/sessions")).json()["sessions"]
            assert [each["current"] for each in listed] == [False, True]
            body = {"old_password": PASSWORD, "new_password": OTHER_PASSWORD}
            assert code_of(await browser.post("/api/v1/me/password", json=body)) == (403, "forbidden")  # no CSRF
            wrong = await browser.post("/api/v1/me/password", json={**body, "old_password": "x"}, headers=csrf)
            assert (code_of(wrong), wrong.json()["error"]["field"]) == ((403, "forbidden"), "old_password")
            assert (await browser.post("/api/v1/me/password", json=body, headers=csrf)).status_code == 204
            listed = (await browser.get("/api/v1/me/sessions")).json()["sessions"]
            assert [each["current"] for each in listed] == [True]
            browser.cookies.set(COOKIE, there)
            assert code_of(await browser.get("/api/v1/me")) == (401, "unauthenticated")
            browser.cookies.set(COOKIE, here)
            mine = f"/api/v1/me/sessions/{listed[0]['id']}"
            assert code_of(await browser.delete("/api/v1/me/sessions/ses_00000000a", headers=csrf)) == (
                404,
                "not_found",
            )
            assert (await browser.delete(mine, headers=csrf)).status_code == 204
            assert code_of(await browser.get("/api/v1/me")) == (401, "unauthenticated")

    many.world.run(test)


def test_from_an_invitation_to_a_closed_account(many: Accounts) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = (await client.post("/api/v1/invitations", json={"email": "carol@example.org"})).json()
        assert made["url"] == f"http://server/invitation#{made['code']}"
        listed = (await client.get("/api/v1/invitations")).json()["invitations"]
        assert [(each["id"], each["code"], each["invited_by"]) for each in listed] == [(made["id"], "", "alice")]
        async with many.world.client("") as carol:
            body = {"code": made["code"], "name": "carol", "password": PASSWORD, "token_name": "laptop"}
            bad = await carol.post("/api/v1/invitations/accept", json={**body, "token_name": "x\n"})
            assert code_of(bad) == (422, "invalid_input")
            taken = await carol.post("/api/v1/invitations/accept", json={**body, "name": "bob"})
            assert code_of(taken) == (409, "conflict")
            done = await carol.post("/api/v1/invitations/accept", json=body)
            assert (done.status_code, done.json()["user"]["email"]) == (201, "carol@example.org")
            assert code_of(await carol.post("/api/v1/invitations/accept", json=body)) == (401, "unauthenticated")
        async with many.world.client(done.json()["token"]) as carol:
            assert (await carol.get("/api/v1/me")).json()["name"] == "carol"
            assert (await client.post("/api/v1/users/carol/admin", json={"is_admin": True})).json()["is_admin"]
            assert (await carol.get("/api/v1/users")).status_code == 200
            assert (await client.post("/api/v1/users/carol/disable")).json()["stopped"] == 0
            assert code_of(await carol.get("/api/v1/me")) == (401, "unauthenticated")  # at once, whatever is cached
            assert (await client.post("/api/v1/users/carol/enable")).json()["disabled_at"] is None
        last = await client.post("/api/v1/users/alice/admin", json={"is_admin": False})
        assert last.status_code == 200  # carol is one
        assert code_of(await client.get("/api/v1/users")) == (403, "forbidden")

    many.world.run(test)


def test_a_reset_code(many: Accounts) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = (await client.post("/api/v1/users/bob/reset", json={"revoke_tokens": True})).json()
        assert made["url"] == f"http://server/reset#{made['code']}"
        async with many.world.client("") as anybody:
            body = {"code": made["code"], "password": OTHER_PASSWORD}
            assert (await anybody.post("/api/v1/reset", json=body)).json()["name"] == "bob"
            assert code_of(await anybody.post("/api/v1/reset", json=body)) == (401, "unauthenticated")
        async with many.world.client(many.bob_token) as bob:
            assert code_of(await bob.get("/api/v1/me")) == (401, "unauthenticated")
        assert code_of(await client.post("/api/v1/users/nobody/reset", json={})) == (404, "not_found")

    many.world.run(test)


def test_codes_cannot_be_guessed(many: Accounts) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = (await client.post("/api/v1/invitations", json={})).json()
        async with many.world.client("") as anybody:
            account = {"name": "carol", "password": PASSWORD}
            for number in range(throttling.CODES_FROM_ADDRESS.times):
                path = ("setup", "invitations/accept")[number % 2]
                wrong = await anybody.post(f"/api/v1/{path}", json={"code": "0000-0000-0000", **account})
                assert code_of(wrong) == (401, "unauthenticated")
            for path in ("setup", "invitations/accept"):
                limited = await anybody.post(f"/api/v1/{path}", json={"code": made["code"], **account})
                assert code_of(limited) == (429, "rate_limited")
                assert limited.headers["Retry-After"]
                assert (await anybody.post(f"/api/v1/{path}", content=b"x" * 20_000)).status_code == 413

    many.world.run(test)


def test_how_one_signs_in(many: Accounts) -> None:
    async def asked(client: httpx.AsyncClient) -> Any:
        return (await client.get("/api/v1/sign-in-methods", headers={"Authorization": ""})).json()

    expected = {"multi_user": True, "password": True, "providers": [], "setup_needed": False}
    assert many.world.run(asked) == expected


def test_one_user_alone(world: World) -> None:
    """The same routes are there, and say what this mode cannot do."""

    async def test(client: httpx.AsyncClient) -> None:
        methods = (await client.get("/api/v1/sign-in-methods")).json()
        assert methods == {"multi_user": False, "password": False, "providers": [], "setup_needed": False}
        me = (await client.get("/api/v1/me")).json()
        assert (me["is_admin"], me["has_password"]) == (True, False)
        refused = await client.post("/api/v1/invitations", json={})
        assert code_of(refused) == (409, "conflict")
        assert "--multi-user" in refused.json()["error"]["hint"]
        body = {"code": "0000-0000-0000", "name": "mallory", "password": PASSWORD}
        assert code_of(await client.post("/api/v1/setup", json=body)) == (401, "unauthenticated")

    world.run(test)
