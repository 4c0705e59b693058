"""Images over HTTP: routes, names with slashes, who may what, and the answers' shapes."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from diamond.core.codec import decode
from diamond.core.ids import new_id
from diamond.core.image_views import Build, BuildProgress, EndpointImages, ImageDraft, ImagePlan
from diamond.core.images import Image, ReplicaState
from diamond.core.states import JobState
from diamond.core.tasks import Task
from diamond.server.services import tokens
from diamond.server.store.models import UserRow
from testing.image_agent import ImageAgent

from .conftest import World

RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"], "test": "true"}


@pytest.fixture
def agent(world: World) -> ImageAgent:
    return ImageAgent(world.ctx, world.user_id, "alpha")


@pytest.fixture
def other_token(world: World) -> str:
    with world.ctx.db.write() as session:
        row = UserRow(id=new_id("usr"), name="other", created_at=1.0)
        session.add(row)
        session.flush()
        return tokens.issue(session, now=1.0, user_id=row.id)


async def built(client: httpx.AsyncClient, agent: ImageAgent, **recipe: Any) -> Build:
    answer = await client.post("/api/v1/images", json={"recipe": {**RECIPE, **recipe}, "endpoint": "alpha"})
    assert answer.status_code == 201, answer.text
    made = decode(Build, answer.json())
    agent.finish(next(order for order in agent.orders() if order.task_id == made.task_id))
    return made


def test_build_look_list_and_remove(world: World, agent: ImageAgent) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"recipe": RECIPE, "endpoint": "alpha"}
        plan = decode(ImagePlan, (await client.post("/api/v1/images/plan", json=body)).json())
        assert (plan.endpoint, plan.builder, plan.cached) == ("alpha", "apptainer", False)
        key = {"Idempotency-Key": "k"}
        first = await client.post("/api/v1/images", json=body, headers=key)
        second = await client.post("/api/v1/images", json=body, headers=key)
        assert (first.status_code, second.status_code) == (201, 200)
        made = decode(Build, first.json())
        assert decode(Build, second.json()).task_id == made.task_id
        assert first.headers["Location"] == f"/api/v1/images/{made.image.id}"
        log = b"diamond: stage 1/2 base: base image\n"
        agent.tell(agent.order().job_id, JobState.RUNNING, log=log)
        assert (await client.get(f"/api/v1/tasks/{made.task_id}/logs")).content == log
        progress = decode(BuildProgress, (await client.get("/api/v1/images/env/progress")).json())
        assert (progress.number, progress.total, progress.task_id) == (1, 2, made.task_id)
        agent.finish()
        cached = await client.post("/api/v1/images", json=body)
        assert cached.status_code == 200 and cached.json()["cached"]
        image = decode(Image, (await client.get("/api/v1/images/env")).json())
        assert image.state is ReplicaState.READY and image.recipe is not None
        digest = image.replicas[0].facts.digest  # type: ignore[union-attr]
        assert (await client.get(f"/api/v1/images/env@{digest}")).json()["id"] == image.id
        page = (await client.get("/api/v1/images?endpoint=alpha&all=true")).json()
        assert [row["id"] for row in page["images"]] == [image.id] and page["total"] == 1
        assert not {"recipe", "used_by"} & page["images"][0].keys()
        lock = await client.get("/api/v1/images/env/files/lock.json")
        assert lock.json()["python"] == "3.13.5"
        assert (await client.get("/api/v1/images/env/files/..%2f..%2fetc%2fpasswd")).status_code == 422
        assert (await client.get("/api/v1/images/env/files/passwd")).status_code == 404
        assert (await client.get("/api/v1/endpoints/mars/images")).status_code == 404
        there = decode(EndpointImages, (await client.get("/api/v1/endpoints/alpha/images")).json())
        assert [one.name for one in there.images] == ["env"]
        test = await client.post("/api/v1/images/env/test", json={})
        task = decode(Task, test.json())
        assert test.status_code == 201 and task.image == "env"
        refused = await client.delete("/api/v1/images/env")
        assert refused.status_code == 409 and task.id in refused.text
        gone = await client.delete("/api/v1/images/env?force=true")
        assert gone.status_code == 200 and gone.json()["removed"] == ["alpha"]
        assert gone.json()["remains"] == ""
        older = await built(client, agent)
        await built(client, agent, pip=["scipy"])
        assert (await client.delete("/api/v1/images/env")).json()["remains"] == older.image.id
        await client.delete("/api/v1/images/env")
        assert (await client.get("/api/v1/images/env")).status_code == 404
        pruned = await client.post("/api/v1/endpoints/alpha/images/prune")
        assert pruned.status_code == 201 and pruned.json()["kind"] == "transfer"
        kinds = (await client.get("/api/v1/tasks?kind=transfer")).json()
        assert {row["name"] for row in kinds["tasks"]} == {"prune alpha", "remove env"}
        assert (await client.get("/api/v1/tasks?kind=nothing")).status_code == 422

    world.run(ask)


def test_sharing_by_name(world: World, agent: ImageAgent, other_token: str) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        made = await built(client, agent)
        owner = made.image.owner
        async with world.client(other_token) as other:
            for path in (f"/api/v1/images/{owner}/env", f"/api/v1/images/{made.image.id}", "/api/v1/images/env"):
                assert (await other.get(path)).status_code == 404
            assert (await other.get("/api/v1/images")).json()["total"] == 0
            answer = await client.post("/api/v1/images/env/share", json={"visibility": "public"})
            assert answer.json()["visibility"] == "public"
            for path in (f"/api/v1/images/{owner}%2Fenv", f"/api/v1/images/{owner}/env"):
                seen = await other.get(path)
                assert (seen.status_code, seen.json()["is_mine"]) == (200, False)
            assert (await other.get("/api/v1/images/find", params={"ref": f"{owner}/env"})).status_code == 200
            assert (await other.get(f"/api/v1/images/{owner}/env/progress")).json()["state"] == "READY"
            share = await other.post(f"/api/v1/images/{owner}/env/share", json={"visibility": "private"})
            assert (share.status_code, (await other.delete(f"/api/v1/images/{owner}/env")).status_code) == (403, 403)
            spec = {"run": "x", "resources": {"image_id": f"{owner}/env"}}
            task = await other.post("/api/v1/tasks", json={"spec": spec})
            assert task.status_code == 201 and task.json()["image"] == f"{owner}/env"
        assert (await client.post("/api/v1/images/env/share", json={"visibility": "all"})).status_code == 422

    world.run(ask)


def test_copy_export_import(world: World, agent: ImageAgent) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        made = await built(client, agent)
        export = await client.post("/api/v1/images/env/export", json={})
        agent.finish()
        assert export.status_code == 200
        payload = await client.get("/api/v1/images/env/payload")
        assert payload.content == f"payload of {made.image.id}".encode()
        part = await client.get("/api/v1/images/env/payload", headers={"Range": "bytes=8-"})
        assert (part.status_code, part.content) == (206, payload.content[8:])
        digest = "sha256:" + hashlib.sha256(payload.content).hexdigest()
        assert payload.headers["ETag"] == f'"{digest}"'
        beta = ImageAgent(world.ctx, world.user_id, "beta")
        copied = await client.post("/api/v1/images/env/copy", json={"endpoint": "beta"})
        assert (copied.status_code, copied.json()["how"]) == (201, "copied")
        beta.finish()  # the payload was here already
        again = await client.post("/api/v1/images/env/copy", json={"endpoint": "beta"})
        assert (again.status_code, again.json()["cached"]) == (200, True)
        image = (await client.get("/api/v1/images/env")).json()
        facts = image["replicas"][0]["facts"]
        manifest = {"files": [{"path": "x", "digest": digest, "size_bytes": len(payload.content)}], "is_file": True}
        ref = (await client.post("/api/v1/bundles", json=manifest)).json()["ref"]
        body = {"recipe": RECIPE, "facts": facts, "payload": ref, "name": "taken", "lock": None}
        taken = await client.post("/api/v1/images/import", json=body)
        assert (taken.status_code, taken.json()["how"]) == (201, "imported"), taken.text
        wrong = await client.post("/api/v1/images/import", json={**body, "payload": "nothing"})
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "payload")

    world.run(ask)


def test_drafts(world: World, agent: ImageAgent) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        made = await client.post("/api/v1/image-drafts", json={})
        assert made.status_code == 201
        draft = decode(ImageDraft, made.json())
        path = f"/api/v1/image-drafts/{draft.id}"
        saved = await client.put(f"{path}/base", json={"version": 1, "contents": {"base": "python:3.13-slim"}})
        assert decode(ImageDraft, saved.json()).version == 2
        late = await client.put(f"{path}/base", json={"version": 1, "contents": {}})
        assert late.status_code == 409
        await client.put(f"{path}/endpoint", json={"version": 2, "contents": {"endpoint": "alpha"}})
        whole = decode(ImageDraft, (await client.get(path)).json())
        assert whole.plan is not None and whole.plan.definition
        sent = await client.post(f"{path}/submit", json={"version": 3})
        assert sent.status_code == 201 and sent.json()["image"]["name"] == "python-3.13-slim"
        assert len((await client.get("/api/v1/image-drafts")).json()["drafts"]) == 1
        assert (await client.delete(path)).status_code == 204
        assert (await client.get(path)).status_code == 404

    world.run(ask)


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "/images", {}, "recipe"),
        ("POST", "/images", {"recipe": RECIPE, "endpont": "x"}, "endpont"),
        ("POST", "/images", {"recipe": [1]}, ""),
        ("POST", "/images", {"recipe": {**RECIPE, "pip": ["-e ."]}}, "pip"),
        ("POST", "/images", {"recipe": {**RECIPE, "name": "../x"}}, "name"),
        ("POST", "/images", {"recipe": RECIPE, "fresh": "yes"}, "fresh"),
        ("POST", "/images", {"recipe": RECIPE, "where": "moon"}, "where"),
        ("POST", "/images", {"recipe": RECIPE, "visibility": "all"}, "visibility"),
        ("POST", "/images/plan", {"recipe": RECIPE, "endpoint": 3}, "endpoint"),
        ("POST", "/image-drafts", {"nothing": 1}, "nothing"),
    ],
)
def test_what_cannot_be_accepted(
    world: World, agent: ImageAgent, method: str, path: str, body: Any, field: str
) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        answer = await client.request(method, f"/api/v1{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), answer.text

    world.run(ask)


def test_bases_and_the_document(world: World, agent: ImageAgent) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        bases = (await client.get("/api/v1/images/bases")).json()["bases"]
        assert all(base["reference"].startswith("docker://") for base in bases) and bases
        assert (await client.get("/api/v1/images/bases?endpoint=alpha")).status_code == 200
        assert (await client.get("/api/v1/images/bases?endpoint=mars")).status_code == 404
        document = (await client.get("/openapi.json")).json()
        assert {"Build", "Image", "ImagePlan", "Recipe", "ImageDraft"} <= document["components"]["schemas"].keys()
        async with world.client(token="") as nobody:
            assert (await nobody.get("/api/v1/images")).status_code == 401

    world.run(ask)
