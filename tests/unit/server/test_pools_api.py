"""Routes of pools: who may ask, what is accepted, and what comes back."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import pytest

from diamond.core.accounts import Scope
from diamond.core.audit import AuditEntry
from diamond.core.codec import decode
from diamond.core.endpoints import EndpointFacts, Gpu
from diamond.core.wire import Hello
from diamond.server.services import agents, endpoints, tokens
from diamond.server.store.models import UserRow
from diamond.server.store.pool_models import PoolRow
from diamond.server.web.audit_words import sentence_of
from tests.unit.server.conftest import World

GPUS = {"name": "gpus", "endpoint": "hpc", "nodes": "2..8", "accelerators": "A100:4", "walltime": "4h"}
PEOPLE = ("owner", "member", "viewer", "stranger")


# What is wrong with it, and the field that is named; a number beyond 64 bits is refused before fields are looked at.
REFUSED: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({"name": "two\nlines"}, 422, "name"),
    ({"name": "\u202eright to left"}, 422, "name"),
    ({"name": "a\x00b"}, 422, "name"),
    ({"name": "x" * 200}, 413, "name"),
    ({"name": "x" * 81}, 422, "name"),
    ({"name": "x" * 10_000_000}, 413, ""),
    ({"name": ""}, 422, "name"),
    ({"name": "a/b"}, 422, "name"),
    ({"name": "gpus/record"}, 422, "name"),
    ({"name": "../../etc/passwd"}, 422, "name"),
    ({"name": ".."}, 422, "name"),
    ({"name": "?x=1#y"}, 422, "name"),
    ({"name": "100%"}, 422, "name"),
    ({"name": "two words"}, 422, "name"),
    ({"name": "-rf"}, 422, "name"),
    ({"name": "Größe"}, 422, "name"),
    ({"name": "new"}, 422, "name"),
    ({"name": "pol_0000000000000000"}, 422, "name"),
    ({"name": 7}, 422, "name"),
    ({"endpoint": "nowhere"}, 422, "endpoint"),
    ({"endpoint": "here"}, 422, "endpoint"),
    ({"nodes": "8..2"}, 422, "nodes"),
    ({"nodes": "0..0"}, 422, "nodes"),
    ({"nodes": 1001}, 422, "nodes"),
    ({"nodes": "1..10000"}, 422, "nodes"),
    ({"nodes": 10**9}, 422, "nodes"),
    ({"nodes": 10**400}, 422, ""),
    ({"nodes": -1}, 422, "nodes"),
    ({"nodes": True}, 422, "nodes"),
    ({"nodes": [2, 8]}, 422, "nodes"),
    ({"walltime": "0"}, 422, "walltime"),
    ({"walltime": "59s"}, 422, "walltime"),
    ({"walltime": 2**62}, 422, "walltime"),
    ({"walltime": 10**400}, 422, ""),
    ({"walltime": "soon"}, 422, "walltime"),
    ({"idle": -1}, 422, "idle"),
    ({"accelerators": "A100:1..4"}, 422, "accelerators"),
    ({"accelerators": "A100:0"}, 422, "accelerators"),
    ({"accelerators": "; rm -rf /"}, 422, "accelerators"),
    ({"accelerators": "A100:8"}, 422, "accelerators"),
    ({"accelerators": "H100:4"}, 422, "accelerators"),
    ({"cpus": "17"}, 422, "cpus"),
    ({"memory": "10000"}, 422, "memory"),
    ({"accelerators": None}, 422, "slots"),
    ({"slots": 4}, 422, "slots"),
    ({"accelerators": None, "slots": 10**6}, 422, "slots"),
    ({"cpus": "many"}, 422, "cpus"),
    ({"memory": "-1"}, 422, "memory"),
    ({"project": "nobody's"}, 422, "project"),
    ({"slurm": {"partition": "two words"}}, 422, "slurm.partition"),
    ({"slurm": {"colour": "red"}}, 422, "slurm.colour"),
    ({"color": "red"}, 422, "color"),
)


@pytest.fixture
def held(world: World) -> dict[str, str]:
    """A cluster that holds pools, and tokens: of people, and of the first user with a lesser scope."""
    endpoint, _ = endpoints.create(world.ctx, world.user_id, "hpc")
    facts = EndpointFacts(
        scheduler="slurm", nodes=8, cpus_per_node=64, mem_bytes_per_node=2**38, holds_pools=True, allows_others=True,
        gpus_per_node=(Gpu(model="A100", count=4),),
    )  # fmt: skip
    agents.hello(world.ctx, endpoint.id, Hello(facts=facts))
    found = {}
    with world.ctx.db.write() as session:
        for name in PEOPLE:
            session.add(UserRow(id=f"usr_{name:0>12}", name=name, created_at=1.0))
            session.flush()
            found[name] = tokens.issue(session, now=1.0, user_id=f"usr_{name:0>12}")
        found["read"] = tokens.issue(session, now=1.0, user_id=world.user_id, scopes=(Scope.READ,))
    return found


async def ask(client: httpx.AsyncClient, method: str, path: str, status: int = 200, body: Any = None) -> Any:
    answer = await client.request(method, f"/api/v1/pools{path}", json=body)
    assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
    return answer.json()


def test_made_listed_changed_and_closed(world: World, held: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.post("/api/v1/pools", json=GPUS)
        assert answer.status_code == 201, answer.text
        made = answer.json()
        assert answer.headers["location"] == f"/api/v1/pools/{made['id']}"
        assert (made["name"], made["endpoint"], made["spec"]["walltime"]) == ("gpus", "hpc", 4 * 3600)
        (listed,) = (await ask(client, "GET", ""))["pools"]
        assert listed["id"] == made["id"] and not {"pilots", "tasks", "decisions"} & set(listed)
        for ref in ("gpus", made["id"]):
            assert (await ask(client, "GET", f"/{ref}"))["tasks"] == []
        changed = await ask(client, "PATCH", "/gpus", body={"nodes": 4, "idle": "1h"})
        assert (changed["spec"]["nodes"], changed["spec"]["idle"], changed["spec"]["walltime"]) == ("4", 3600, 14400)
        closed = await ask(client, "DELETE", "/gpus")
        assert closed["closed_at"] is not None
        assert (await ask(client, "DELETE", "/gpus"))["closed_at"] == closed["closed_at"], "closed twice is closed once"
        assert (await ask(client, "GET", ""))["pools"] == []
        assert [one["id"] for one in (await ask(client, "GET", "?closed=true"))["pools"]] == [made["id"]]
        assert (await ask(client, "POST", "", 201, GPUS))["id"] != made["id"], "its name is free again"

    world.run(test)


def test_what_cannot_be_is_refused_by_its_field(world: World, held: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for change, status, field in REFUSED:
            error = (await ask(client, "POST", "", status, {**GPUS, **change}))["error"]
            assert error["message"] and error["field"] == field, (change, error)
        assert (await ask(client, "GET", "?closed=true"))["pools"] == []

    world.run(test)


def test_odd_names_of_older_pools_are_names(world: World, held: dict[str, str]) -> None:
    """Over the path of a request, as the SDK writes it; a new pool could not have them."""

    async def one(client: httpx.AsyncClient, name: str) -> None:
        path = "/" + quote(name, safe="").replace(".", "%2E")
        made = await ask(client, "POST", "", 201, GPUS)
        with world.ctx.db.write() as session:
            row = session.get_one(PoolRow, made["id"])
            row.name, row.spec = name, {**row.spec, "name": name, "nodes": "10000"}
        assert (await ask(client, "GET", path))["name"] == name
        assert (await ask(client, "PATCH", path, body={"idle": "1h"}))["spec"]["name"] == name
        error = (await ask(client, "PATCH", path, 422, body={"nodes": 1001}))["error"]
        assert error["field"] == "nodes" and "1000" in error["message"]
        assert (await ask(client, "PATCH", path, body={"nodes": 1}))["spec"]["nodes"] == "1"
        assert (await ask(client, "DELETE", path))["closed_at"] is not None

    async def test(client: httpx.AsyncClient) -> None:
        for name in ('it\'s "mine"', "../../etc/passwd", "..", "a/b", "Größe 池 🎱", "100%", "?x=1#y"):
            await one(client, name)

    world.run(test)


def test_changes_are_checked_like_new_ones(world: World, held: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await ask(client, "POST", "", 201, GPUS)
        before = (await ask(client, "GET", "/gpus"))["spec"]
        for body, field in (
            ({"nodes": "8..2"}, "nodes"),
            ({"nodes": None}, "nodes"),
            ({"walltime": 1}, "walltime"),
            ({"idle": "0"}, "idle"),
            ({"name": "other"}, "name"),
            ({"accelerators": "H100:8"}, "accelerators"),
            ({"a\nb": 1}, "a\nb"),
        ):
            assert (await ask(client, "PATCH", "/gpus", 422, body))["error"]["field"] == field
        await ask(client, "PATCH", "/gpus", 422, ["nodes"])
        await ask(client, "PATCH", "/none", 404, {"nodes": 1})
        await ask(client, "DELETE", "/none", 404)
        for odd in ("/a%00b", "/%0A", "/pol_000000000000", "/" + "x" * 500, "/"):
            assert (await ask(client, "GET", odd, 404))["error"]["code"] == "not_found"
        await ask(client, "GET", "?closed=perhaps", 422)
        assert (await ask(client, "GET", "/gpus"))["spec"] == before

    world.run(test)


def test_who_may_do_what(world: World, held: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/projects", json={"name": "lab"})
        for name in PEOPLE[:3]:
            answer = await client.put(f"/api/v1/projects/lab/members/{name}", json={"role": name})
            assert answer.status_code == 200, answer.text
        assert (await client.put("/api/v1/projects/lab/endpoints/hpc")).status_code == 200
        shared = {**GPUS, "name": "shared", "project": "lab"}
        await ask(client, "POST", "", 201, GPUS)
        await ask(client, "POST", "", 201, shared)
        people = {name: world.client(held[name]) for name in held}
        for name in PEOPLE:
            await ask(people[name], "GET", "/gpus", 404)
            await ask(people[name], "DELETE", "/gpus", 404)
        await ask(people["stranger"], "GET", "/shared", 404)
        await ask(people["stranger"], "PATCH", "/shared", 404, {"nodes": 1})
        await ask(people["stranger"], "POST", "", 404, shared)
        await ask(people["viewer"], "POST", "", 403, shared)
        for name in ("viewer", "member"):
            seen = await ask(people[name], "GET", "/shared")
            assert (seen["is_mine"], seen["project"]) == (False, "lab")
            assert [one["name"] for one in (await ask(people[name], "GET", ""))["pools"]] == ["shared"]
            await ask(people[name], "PATCH", "/shared", 403, {"nodes": 1})
            await ask(people[name], "DELETE", "/shared", 403)
        mine = await ask(people["member"], "POST", "", 201, shared)
        assert (await ask(people["member"], "GET", "/shared"))["id"] == mine["id"], "one's own of a name comes first"
        await ask(people["owner"], "PATCH", "/shared", 200, {"nodes": 1})
        await ask(people["read"], "GET", "/shared")
        assert "launch" in (await ask(people["read"], "DELETE", "/shared", 403))["error"]["message"]
        await ask(people["read"], "POST", "", 403, {**GPUS, "name": "new"})
        await ask(world.client(""), "GET", "", 401)
        await ask(world.client(world.agent_token), "GET", "", 403)
        for one in people.values():
            await one.aclose()

    world.run(test)


def test_what_was_done_is_in_the_audit_log_in_words(world: World, held: dict[str, str]) -> None:

    async def test(client: httpx.AsyncClient) -> None:
        await ask(client, "POST", "", 201, GPUS)
        await ask(client, "PATCH", "/gpus", body={"nodes": "1..3"})
        await ask(client, "DELETE", "/gpus")
        rows = (await client.get("/api/v1/audit")).json()["entries"]
        said = {row["action"]: sentence_of(decode(AuditEntry, row)) for row in rows}
        assert said["pool.created"] == "made pool gpus at endpoint hpc"
        assert said["pool.changed"] == "changed pool gpus"
        assert said["pool.closed"] == "closed pool gpus"

    world.run(test)
