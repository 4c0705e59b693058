"""Routes of tokens and logins: which scope each kind of route needs, and how a dead token is noticed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from diamond.core.accounts import Scope, all_of, parse_scopes
from diamond.core.enrolment import token_hash
from diamond.core.logins import new_user_token
from diamond.server.services import tokens
from tests.unit.server.conftest import World

FULL = frozenset(Scope)
ENDPOINT = "/api/v1/endpoints/here"
# One route of every kind: method, path, body, the scope it needs, and what it answers with that scope.
ROUTES: list[tuple[str, str, dict[str, Any] | None, Scope, int]] = [
    ("GET", "/api/v1/tasks", None, Scope.READ, 200),
    ("GET", "/api/v1/tokens", None, Scope.READ, 200),
    ("GET", "/api/v1/logins/0000-0000", None, Scope.READ, 404),
    ("POST", "/api/v1/tasks", {"spec": {"run": "true"}}, Scope.LAUNCH, 201),
    ("POST", "/api/v1/projects", {"name": "own"}, Scope.LAUNCH, 201),
    (
        "POST",
        "/api/v1/notices/rules",
        {"channel": "webhook", "target": "https://example.org/", "events": ["all"]},
        Scope.LAUNCH,
        201,
    ),
    ("PUT", "/api/v1/secrets/OWN", {"value": "a value"}, Scope.LAUNCH, 201),
    ("PATCH", "/api/v1/projects/own", {"title": "Lab"}, Scope.ADMIN, 404),
    ("POST", "/api/v1/invitations", {}, Scope.ADMIN, 409),
    ("POST", "/api/v1/endpoints", {"name": "newer"}, Scope.AGENT, 201),
    ("POST", f"{ENDPOINT}/enrolment", None, Scope.AGENT, 200),
    ("POST", f"{ENDPOINT}/rotate?wait_s=0", None, Scope.AGENT, 200),
    ("POST", f"{ENDPOINT}/revoke", None, Scope.AGENT, 200),
    ("DELETE", ENDPOINT, None, Scope.ADMIN, 200),
    ("POST", "/api/v1/tokens", {"name": "x", "scopes": ["read"]}, Scope.ADMIN, 201),
    ("DELETE", "/api/v1/tokens/tok_000000001", None, Scope.ADMIN, 404),
    ("POST", "/api/v1/logins/0000-0000/approve", None, Scope.ADMIN, 404),
    ("POST", "/api/v1/logins/0000-0000/refuse", None, Scope.ADMIN, 404),
]
HOLDS = {
    Scope.READ: {Scope.READ},
    Scope.LAUNCH: {Scope.READ, Scope.LAUNCH},
    Scope.AGENT: {Scope.AGENT},
    Scope.ADMIN: set(Scope),
}


def token_for(world: World, *scopes: Scope) -> tokens.Token:
    return tokens.create(world.ctx, world.user_id, "test", scopes, None, held=FULL)


@pytest.mark.parametrize(("method", "path", "body", "needed", "status"), ROUTES, ids=lambda v: str(v)[:40])
def test_each_kind_of_route_needs_its_scope(
    world: World, method: str, path: str, body: dict[str, Any] | None, needed: Scope, status: int
) -> None:
    async def test(_: httpx.AsyncClient) -> None:
        for scope in sorted(Scope, key=lambda one: needed in HOLDS[one]):  # those that may change something last
            async with world.client(token_for(world, scope).value) as client:
                answer = await client.request(method, path, json=body)
            if needed in HOLDS[scope]:
                assert answer.status_code == status, (scope, answer.text)
                return
            assert answer.status_code == 403, (scope, answer.text)
            assert f"`{needed}`" in answer.json()["error"]["message"]
            assert answer.json()["error"]["field"] == "scopes"
            # What to type gives what was missing, and takes nothing away.
            advised = parse_scopes(answer.json()["error"]["hint"].partition("diamond login --scopes ")[2])
            assert {needed, scope} <= all_of(advised) and (Scope.ADMIN in advised) == (needed is Scope.ADMIN)

    world.run(test)


def test_an_agent_has_no_tokens_and_approves_nothing(world: World) -> None:
    async def test(_: httpx.AsyncClient) -> None:
        async with world.client(world.agent_token) as agent:
            for method, path, body, *_ in ROUTES:
                answer = await agent.request(method, path, json=body)
                assert answer.status_code == 403, (path, answer.text)
            for which in ("current", "tok_000000001"):
                assert (await agent.delete(f"/api/v1/tokens/{which}")).status_code == 403
            assert (await agent.get("/api/v1/agent/me")).status_code == 200

    world.run(test)


def test_a_token_is_shown_once_and_listed_without_its_value(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"name": "nightly", "scopes": ["launch", "read", "read"], "expires_in_s": 60}
        made = await client.post("/api/v1/tokens", json=body)
        assert made.status_code == 201
        token = made.json()
        assert token["scopes"] == ["read", "launch"]
        assert token["expires_at"] - token["created_at"] == 60
        async with world.client(token["value"]) as holder:
            listed = (await holder.get("/api/v1/tokens")).json()["tokens"]
        assert token["value"] not in str(listed)
        (own,) = [one for one in listed if one["current"]]
        assert (own["id"], own["name"], own["used_at"] is not None) == (token["id"], "nightly", True)

    world.run(test)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"scopes": ["root"]}, "scopes[0]"),
        ({"scopes": []}, "scopes"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_errors_name_the_field(world: World, change: dict[str, Any], field: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/api/v1/tokens", json={"name": "x", "scopes": ["read"], **change})
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)

    world.run(test)


@pytest.mark.parametrize("scope", list(Scope))
def test_any_token_may_give_itself_up(world: World, scope: Scope) -> None:
    made, other = token_for(world, scope), token_for(world, Scope.READ)

    async def test(client: httpx.AsyncClient) -> None:
        async with world.client(made.value) as holder:
            if scope is not Scope.ADMIN:
                assert (await holder.delete(f"/api/v1/tokens/{other.id}")).status_code == 403
            answer = await holder.delete("/api/v1/tokens/current")
            assert (answer.status_code, answer.json()["id"]) == (200, made.id)
            assert (await holder.delete("/api/v1/tokens/current")).status_code == 401
        assert (await client.delete(f"/api/v1/tokens/{made.id}")).status_code == 200

    world.run(test)


def test_a_waiting_request_ends_with_its_token(world: World) -> None:
    made = token_for(world, Scope.READ)

    async def test(client: httpx.AsyncClient) -> None:
        async with world.client(made.value) as follower:
            end = (await follower.get("/api/v1/events")).json()["cursor"]
            waiting = asyncio.create_task(follower.get("/api/v1/events", params={"since": end, "wait_s": 30}))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            assert (await client.delete(f"/api/v1/tokens/{made.id}")).status_code == 200
            assert (await asyncio.wait_for(waiting, 5)).status_code == 401

    world.run(test)


def test_a_login_over_http(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        token = new_user_token()
        wanted = {"name": "diamond login on laptop", "token_sha256": token_hash(token), "scopes": ["read"]}
        async with world.client("") as terminal, world.client(token) as later:
            begun = await terminal.post("/api/v1/logins", json=wanted)
            assert begun.status_code == 201
            started = begun.json()
            assert (started["expires_in_s"], started["interval_s"]) == (900, 2)
            assert started["verification_url"] == f"{str(terminal.base_url).rstrip(chr(47))}/device"
            question = {"device_code": started["device_code"]}
            assert (await terminal.post("/api/v1/logins/poll", json=question)).json()["state"] == "pending"
            fast = await terminal.post("/api/v1/logins/poll", json=question)
            assert (fast.status_code, bool(fast.headers["Retry-After"])) == (429, True)
            path = f"/api/v1/logins/{started['user_code']}"
            assert (await terminal.post(f"{path}/approve")).status_code == 401
            assert (await later.get("/api/v1/tasks")).status_code == 401
            seen = (await client.get(path)).json()
            assert (seen["name"], seen["state"], seen["token_lifetime_s"]) == (wanted["name"], "pending", 90 * 86_400)
            for _ in range(2):
                assert (await client.post(f"{path}/approve")).json()["state"] == "approved"
            assert (await client.post(f"{path}/refuse")).status_code == 409
            assert (await later.get("/api/v1/tasks")).status_code == 200
            assert (await later.post("/api/v1/tasks", json={"spec": {"run": "true"}})).status_code == 403
            missing = await terminal.post("/api/v1/logins/poll", json={"device_code": "nobody's"})
            assert missing.status_code == 404
            assert (await terminal.post("/api/v1/logins", content=b"x" * 20_000)).status_code == 413

    world.run(test)
