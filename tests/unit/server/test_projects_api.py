"""Routes of projects, sharing and handing on: who may ask, with which scope, and what comes back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from diamond.core.accounts import Scope
from diamond.server.services import projects, tokens
from diamond.server.store.models import UserRow
from tests.unit.server.conftest import World, launch

USERS = ("bob", "carol")


@pytest.fixture
def held(world: World) -> dict[str, str]:
    """Tokens of two more users, and one of the first's for each lesser scope."""
    found = {}
    with world.ctx.db.write() as session:
        for name in USERS:
            session.add(UserRow(id=f"usr_0000000{name}", name=name, created_at=1.0))
            session.flush()
            found[name] = tokens.issue(session, now=1.0, user_id=f"usr_0000000{name}")
        for scope in (Scope.READ, Scope.LAUNCH):
            found[scope] = tokens.issue(session, now=1.0, user_id=world.user_id, scopes=(scope,))
    return found


async def ask(client: httpx.AsyncClient, method: str, path: str, status: int = 200, body: Any = None) -> Any:
    answer = await client.request(method, f"/api/v1{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_project_over_the_api(world: World, held: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = await ask(client, "POST", "/projects", 201, {"name": "lab", "title": "Lab"})
        assert (made["name"], made["role"], made["personal"]) == ("lab", "owner", False)
        await ask(client, "POST", "/projects", 409, {"name": "lab"})
        await ask(client, "POST", "/projects", 422, {"name": "lab", "colour": "red"})
        async with world.client(held["bob"]) as bob, world.client(held["carol"]) as carol:
            await ask(bob, "GET", "/projects/lab", 404)
            await ask(client, "PUT", "/projects/lab/members/bob", body={"role": "viewer"})
            error = await ask(client, "PUT", "/projects/lab/members/bob", 422, {"role": "king"})
            assert error["error"]["field"] == "role"
            assert [one["name"] for one in (await ask(bob, "GET", "/projects"))["projects"]] == ["lab"]
            await ask(bob, "PATCH", "/projects/lab", 403, {"title": "Mine"})
            assert (await ask(client, "PATCH", "/projects/lab", body={"title": "Ours"}))["title"] == "Ours"
            await ask(client, "PUT", "/projects/lab/endpoints/here")
            found = await ask(bob, "GET", "/endpoints/here")
            assert (found["is_mine"], found["shared_with"], found["access"]) == (False, ["lab"], "")
            await ask(carol, "GET", "/endpoints/here", 404)
            await ask(client, "DELETE", "/projects/lab/endpoints/here")
            await ask(bob, "GET", "/endpoints/here", 404)
            task = await launch(client, project="lab")
            assert (task["project"], task["visibility"]) == ("lab", "project")
            assert (await ask(bob, "GET", f"/tasks/{task['id']}"))["owner"] == task["owner"]
            await ask(bob, "POST", f"/tasks/{task['id']}/cancel", 403)
            await ask(bob, "PATCH", f"/tasks/{task['id']}", 403, {"visibility": "public"})
            await ask(carol, "PATCH", f"/tasks/{task['id']}", 404, {"visibility": "public"})
            shared = await ask(client, "PATCH", f"/tasks/{task['id']}", body={"visibility": "private"})
            assert shared["visibility"] == "private"
            await ask(bob, "GET", f"/tasks/{task['id']}", 404)
            page = await ask(client, "GET", "/tasks?project=lab")
            assert [row["id"] for row in page["tasks"]] == [task["id"]]
            await ask(carol, "GET", "/tasks?project=lab", 404)
            await ask(client, "DELETE", "/projects/lab", 409)
            await ask(client, "POST", f"/tasks/{task['id']}/cancel")
            await ask(bob, "POST", "/projects/lab/leave")
            await ask(bob, "GET", "/projects/lab", 404)
            await ask(client, "POST", "/projects/lab/leave", 409)
            assert await ask(client, "DELETE", "/projects/lab") == {"moved": 1}

    world.run(test)


def test_what_a_token_must_be_for(world: World, held: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await ask(client, "POST", "/projects", 201, {"name": "lab"})
        task = await launch(client)
        for scope, may_launch in ((Scope.READ, False), (Scope.LAUNCH, True)):
            async with world.client(held[scope]) as weak:
                await ask(weak, "GET", "/projects/lab")
                await ask(weak, "POST", "/projects", 201 if may_launch else 403, {"name": "other"})
                await ask(weak, "PUT", "/projects/lab/members/bob", 403, {"role": "member"})
                await ask(weak, "PUT", "/projects/lab/endpoints/here", 403)
                await ask(weak, "POST", f"/tasks/{task['id']}/transfer", 403, {"to": "bob"})
                await ask(weak, "GET", "/admin/tasks", 403)
                change = {"visibility": "public"}
                await ask(weak, "PATCH", f"/tasks/{task['id']}", 200 if may_launch else 403, change)

    world.run(test)


def test_changing_hands_and_what_administrators_may(world: World, held: dict[str, str]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await ask(client, "POST", "/projects", 201, {"name": "lab"})
        await ask(client, "PUT", "/projects/lab/members/bob", body={"role": "member"})
        async with world.client(held["bob"]) as bob, world.client(held["carol"]) as carol:
            task = await launch(bob, project="lab", name="of bob")
            await ask(bob, "POST", f"/tasks/{task['id']}/transfer", 409, {"to": "carol"})
            await ask(carol, "GET", "/admin/tasks", 403)
            await ask(carol, "GET", "/admin/projects", 403)
            await ask(carol, "POST", "/projects", 201, {"name": "theirs"})
            every = (await ask(client, "GET", "/admin/projects"))["projects"]
            assert [(one["name"], one["role"]) for one in every] == [("lab", "owner"), ("theirs", None)]
            await ask(client, "GET", "/projects/theirs", 404)
            await ask(carol, "POST", f"/admin/tasks/{task['id']}/cancel", 403)
            (row,) = (await ask(client, "GET", "/admin/tasks"))["tasks"]
            assert (row["id"], row["owner"], row["name"]) == (task["id"], "bob", "")
            await ask(client, "POST", "/users/bob/hand-over", 409, {"to": "carol"})
            assert (await ask(client, "POST", f"/admin/tasks/{task['id']}/cancel"))["state"] == "CANCELLED"
            await ask(bob, "POST", f"/tasks/{task['id']}/transfer", 422, {"to": "carol"})
            await ask(bob, "POST", f"/tasks/{task['id']}/transfer", 404, {"to": "nobody"})
            await ask(carol, "POST", f"/tasks/{task['id']}/transfer", 404, {"to": "carol"})
            assert await ask(client, "POST", f"/tasks/{task['id']}/transfer", body={"to": "carol"}) == {
                "owner": "carol",
                "name": "",
            }
            await ask(carol, "POST", "/users/bob/hand-over", 403, {"to": "carol"})
            given = await ask(client, "POST", "/users/carol/hand-over", body={"to": "bob"})
            assert given == {"tasks": 1, "images": 0, "templates": 0, "endpoints": 0, "projects": 1}
            assert (await ask(client, "POST", "/projects/lab/transfer", body={"to": "bob"}))["owner"] == "bob"
            assert (await ask(client, "POST", "/endpoints/here/transfer", body={"to": "bob"}))["owner"] == "bob"
            assert (await ask(bob, "GET", "/endpoints/here"))["is_mine"]

    world.run(test)


def test_names_are_taken_as_they_are_written(world: World, held: dict[str, str]) -> None:
    projects.create(world.ctx, world.user_id, "lab")

    async def test(client: httpx.AsyncClient) -> None:
        for name in ("a%00b", "%2e%2e", "x" * 300, "lab%20"):
            await ask(client, "GET", f"/projects/{name}", 404)
            await ask(client, "PUT", f"/projects/lab/members/{name}", 404, {"role": "member"})
            await ask(client, "DELETE", f"/projects/lab/members/{name}", 404)
            await ask(client, "PUT", f"/projects/lab/endpoints/{name}", 404)
            await ask(client, "DELETE", f"/projects/lab/endpoints/{name}", 404)

    world.run(test)
