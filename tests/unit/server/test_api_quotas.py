"""Quotas over HTTP: set and seen, refused with the number, and uploads that do not fit."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx

from diamond.server.services import agents, tokens
from diamond.server.store.models import UserRow

from .conftest import World, launch


def somebody(world: World, name: str = "bob") -> str:
    """A token of a user who is no administrator."""
    with world.ctx.db.write() as session:
        session.add(UserRow(id=f"usr_00000000{name[0]}", name=name, created_at=1.0))
        session.flush()
        return tokens.issue(session, now=world.ctx.clock(), user_id=f"usr_00000000{name[0]}")


def me(world: World) -> str:
    with world.ctx.db.read() as session:
        return session.get_one(UserRow, world.user_id).name


def test_limits_are_set_seen_and_cleared(world: World) -> None:
    name = me(world)

    async def test(client: httpx.AsyncClient) -> None:
        put = await client.put(f"/api/v1/quotas/user/{name}", json={"tasks": 1, "storage_bytes": "2 KiB"})
        assert put.status_code == 200, put.text
        assert put.json()["limits"] == {
            "tasks": 1, "nodes": None, "gpus": None, "gpu_hours": None, "storage_bytes": 2048,
        }  # fmt: skip
        await launch(client)
        (mine,) = (await client.get("/api/v1/quotas")).json()["quotas"]
        assert (mine["kind"], mine["name"], mine["own"]) == ("user", name, True)
        assert (mine["used"]["tasks"], mine["left"]) == (1, {"tasks": 0, "storage_bytes": 2048})
        refused = await client.post("/api/v1/tasks", json={"spec": {"run": "true"}})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "quota_exceeded"
        assert "may have 1 unfinished tasks at once and has 1" in refused.json()["error"]["message"]
        assert (await client.post("/api/v1/tasks/plan", json={"spec": {"run": "true"}})).status_code == 403
        (setting,) = (await client.get("/api/v1/quotas/all")).json()["quotas"]
        assert (setting["kind"], setting["name"]) == ("user", name)
        cleared = await client.delete(f"/api/v1/quotas/user/{name}")
        assert cleared.json()["limits"]["tasks"] is None
        assert (await client.post("/api/v1/tasks", json={"spec": {"run": "true"}})).status_code == 201

    world.run(test)


def test_a_launch_that_comes_close_to_a_limit_says_so(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await client.put("/api/v1/quotas/every-user/all", json={"tasks": 2})
        plan = (await client.post("/api/v1/tasks/plan", json={"spec": {"run": "true"}})).json()
        first, second = await launch(client), await launch(client)
        text = f"user {me(world)}: with this task 2 of 2 unfinished tasks"
        assert (plan["warnings"], first["warnings"], second["warnings"]) == ([], [], [text])
        assert (await client.get(f"/api/v1/tasks/{second['id']}")).json()["warnings"] == []

    world.run(test)


def test_only_administrators_set_limits_and_mistakes_name_the_field(world: World) -> None:
    token = somebody(world)

    async def test(client: httpx.AsyncClient) -> None:
        async with world.client(token) as other:
            assert [q["name"] for q in (await other.get("/api/v1/quotas")).json()["quotas"]] == ["bob"]
            calls: list[tuple[str, str, Any]] = [
                ("GET", "/all", None),
                ("GET", "/user/bob", None),
                ("PUT", "/user/bob", {"tasks": 9}),
                ("DELETE", "/user/bob", None),
            ]
            for method, path, body in calls:
                answer = await other.request(method, f"/api/v1/quotas{path}", json=body)
                assert answer.status_code == 403, (method, path, answer.text)
        wrong: list[tuple[str, Any, int, str]] = [
            ("group/x", {}, 422, "kind"),
            ("every-user/bob", {}, 422, "name"),
            ("user/nobody", {}, 404, "name"),
            ("project/nothing", {}, 404, "name"),
            ("user/a%00b", {}, 422, "name"),
            ("user/bob", {"task": 1}, 422, "task"),
            ("user/bob", {"gpus": -1}, 422, "gpus"),
            ("user/bob", {"gpu_hours": "x"}, 422, "gpu_hours"),
        ]
        for path, body, status, field in wrong:
            answer = await client.put(f"/api/v1/quotas/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["field"]) == (status, field), answer.text

    world.run(test)


def test_uploads_are_counted_once_and_refused_before_they_are_taken(world: World) -> None:
    data = b"x" * 1500
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    small = b"y" * 400

    def frame(content: bytes) -> bytes:
        return hashlib.sha256(content).hexdigest().encode() + len(content).to_bytes(8, "big") + content

    async def stored(client: httpx.AsyncClient) -> int:
        (mine,) = (await client.get("/api/v1/quotas")).json()["quotas"]
        return int(mine["used"]["storage_bytes"])

    async def put(client: httpx.AsyncClient) -> httpx.Response:
        return await client.put(f"/api/v1/blobs/{digest}", params={"total": len(data)}, content=data)

    async def test(client: httpx.AsyncClient) -> None:
        await client.put("/api/v1/quotas/every-user/all", json={"storage_bytes": 1000})
        refused = await put(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota_exceeded")
        assert "may store 1000 B and stores 0 B; this upload has 1.5 KiB" in refused.json()["error"]["message"]
        assert not world.ctx.blobs.has(digest) and not world.ctx.blobs.partial_size(digest, world.user_id)
        bundle = {"files": [{"path": "a", "digest": digest, "size_bytes": len(data)}]}
        assert (await client.post("/api/v1/bundles", json=bundle)).status_code == 403
        for _ in range(2):
            packed = await client.post("/api/v1/blobs/pack", content=frame(small) + frame(b""))
            assert packed.status_code == 200, packed.text
            assert await stored(client) == 400
        big = await client.post("/api/v1/blobs/pack", content=frame(b"z" * 601))
        assert big.status_code == 403
        # An upload that is only begun, again and again, takes room as well.
        begun = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
        tries = [
            await client.put(f"/api/v1/blobs/sha256:{one}", params={"total": 501}, content=b"z" * 500) for one in begun
        ]
        assert [one.status_code for one in tries] == [200, 403, 403]
        # What an agent brings is somebody's result: there must be a job, and no room.
        async with world.client(world.agent_token) as agent:
            assert (await put(agent)).status_code == 403
            assert (await agent.post("/api/v1/blobs/pack", content=frame(b"new"))).status_code == 403
            await launch(client)
            assert (await put(agent)).status_code == 403
            agents.desired(world.ctx, world.endpoint_id, world.ctx.epoch, 0)
            full = await put(agent)
            assert (full.status_code, full.json()["error"]["code"]) == (403, "quota_exceeded")
            await client.put("/api/v1/quotas/every-user/all", json={"storage_bytes": 2000})
            assert (await put(agent)).json() == {"received": 1500, "complete": True}
        assert await stored(client) == 400
        await client.delete("/api/v1/quotas/every-user/all")
        assert (await put(client)).json()["complete"]
        assert await stored(client) == 1900  # that it was here already, nobody learns from their own numbers
        assert (await put(client)).json()["complete"]
        assert await stored(client) == 1900

    world.run(test)
