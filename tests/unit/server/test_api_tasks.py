"""Tasks, outputs, metrics and endpoints over HTTP, on real services."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest

from diamond.core.codec import encode
from diamond.core.states import JobState
from diamond.core.tasks import Output
from diamond.core.wire import Report, StreamChunk
from diamond.server.services import agents
from testing.uploads import upload

from .conftest import World, launch


def test_who_may_ask_what(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        async with world.client(token="") as nobody, world.client(world.agent_token) as agent:
            for path in ("/api/v1/tasks", "/api/v1/info", "/api/v1/agent/desired", "/api/v1/events/stream"):
                assert (await nobody.get(path)).status_code == 401
            assert (await nobody.get(f"/api/v1/tasks?token={world.user_token}")).status_code == 401
            for path in ("/api/v1/health", "/metrics", "/", "/openapi.json"):
                assert (await nobody.get(path)).status_code == 200
            assert (await agent.get("/api/v1/tasks")).status_code == 403
            assert (await agent.post("/api/v1/bundles", json={"files": []})).status_code == 403
            assert (await client.get("/api/v1/agent/desired")).status_code == 403
            assert (await agent.get("/api/v1/agent/desired")).status_code == 200
        for header in ("Bearer", "Basic abc", "Bearer " + "x" * 600, "Bearer dmdu_wrong", "Bearer é"):
            answer = await client.get("/api/v1/tasks", headers=[("Authorization", header.encode())])
            assert answer.status_code == 401, header

    world.run(ask)


def test_nobody_unknown_makes_the_server_parse_a_body(world: World) -> None:
    async def ask(_client: httpx.AsyncClient) -> None:
        async with world.client(token="") as nobody:
            assert (await nobody.post("/api/v1/tasks", content=b"[" * 10_000)).status_code == 401

    world.run(ask)


def test_create_look_list_cancel(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client, name="first", priority=3)
        assert task["state"] == "QUEUED" and task["endpoint"] == "here" and len(task["jobs"]) == 1
        again = (await client.get(f"/api/v1/tasks/{task['id']}")).json()
        assert task["why"][0] == "no endpoint but here can run it"
        assert again == task | {"why": []}, "which only the answer that made it says"
        second = await launch(client, name="second")
        page = (await client.get("/api/v1/tasks?limit=1")).json()
        assert [row["id"] for row in page["tasks"]] == [second["id"]] and page["total"] == 2
        assert not {"spec", "jobs", "outputs"} & page["tasks"][0].keys()
        rest = (await client.get(f"/api/v1/tasks?limit=1&cursor={page['next_cursor']}")).json()
        assert [row["id"] for row in rest["tasks"]] == [task["id"]] and rest["next_cursor"] is None
        named = (await client.get("/api/v1/tasks?name=first&state=queued,RUNNING")).json()
        assert [row["name"] for row in named["tasks"]] == ["first"]
        for _ in range(2):
            cancelled = await client.post(f"/api/v1/tasks/{task['id']}/cancel")
            assert cancelled.status_code == 200 and cancelled.json()["state"] == "CANCELLED"
        assert (await client.get("/api/v1/tasks/tsk_doesnotexist")).status_code == 404
        assert (await client.get("/api/v1/tasks/..%2f..%2fetc")).status_code == 404

    world.run(ask)


def test_an_idempotency_key_makes_one_task(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"spec": {"run": "true"}}
        first = await client.post("/api/v1/tasks", json=body, headers={"Idempotency-Key": "k1"})
        again = await client.post("/api/v1/tasks", json=body, headers={"Idempotency-Key": "k1"})
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json()["id"] == again.json()["id"] == first.headers["location"].rsplit("/", 1)[-1]
        other = await client.post("/api/v1/tasks", json={"spec": {"run": "no"}}, headers={"Idempotency-Key": "k1"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")

    world.run(ask)


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({}, "spec", "required"),
        ({"run": "x"}, "", "unknown field 'run'"),
        ({"spec": 3}, "", "mapping"),
        ({"spec": {}}, "run", "required"),
        ({"spec": {"run": "x", "num_nodes": "2"}}, "num_nodes", "whole number"),
        ({"spec": {"run": "x", "workdir": "/home/me"}}, "workdir", "client's machine"),
    ],
)
def test_specs_that_cannot_be(world: World, body: Any, field: str, says: str) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        for path in ("/api/v1/tasks", "/api/v1/tasks/plan"):
            if path.endswith("plan") and field == "workdir":
                continue
            answer = await client.post(path, json=body)
            assert answer.status_code == 422
            error = answer.json()["error"]
            assert error["field"] == field and says in error["message"]
        assert (await client.get("/api/v1/tasks")).json()["total"] == 0

    world.run(ask)


def test_a_body_over_the_limit_and_a_hostile_one(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        too_large = await client.post("/api/v1/tasks", json={"spec": {"run": "x" * 70_000}})
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "too_large")

        async def chunks() -> Any:
            for _ in range(100):
                yield b" " * 1000

        streamed = await client.post("/api/v1/tasks", content=chunks())
        assert (streamed.status_code, streamed.json()["error"]["code"]) == (413, "too_large")
        deep = await client.post("/api/v1/tasks", content=b'{"spec":' + b"[" * 30_000)
        assert deep.status_code == 422

    world.run(ask)


def test_plan_shows_what_would_run(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        plan = (await client.post("/api/v1/tasks/plan", json={"spec": {"run": "echo hi"}})).json()
        assert plan["endpoint"] == "here" and plan["files"]["run.sh"] == "echo hi" and plan["script"]
        assert (await client.get("/api/v1/tasks")).json()["total"] == 0

    world.run(ask)


def test_metrics_and_curves(world: World) -> None:
    lines = b"".join(
        json.dumps({"step": step, "t": 100.0 + step, "loss": 1 / (step + 1)}).encode() + b"\n" for step in range(100)
    )
    lines += b'{"step": 100, "loss": NaN}\n'

    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        job_id = task["jobs"][0]["id"]
        chunk = StreamChunk.of(job_id, "metrics", 0, lines)
        agents.report(world.ctx, world.endpoint_id, Report(epoch=world.ctx.epoch, streams=(chunk,)))
        base = f"/api/v1/tasks/{task['id']}/metrics"
        found = (await client.get(base)).json()
        assert found["attempt"] == 1 and found["series"][0]["key"] == "loss"
        assert found["series"][0]["last_value"] is None  # NaN
        curve = (await client.get(f"{base}/curve?key=loss&max_points=10")).json()
        assert len(curve["points"]) == 10 and curve["non_finite"] == 1 and not curve["exact"]
        some = (await client.get(f"{base}/curve?key=loss&x_min=5&x_max=6")).json()
        assert [point[0] for point in some["points"]] == [5, 6]
        assert (await client.get(f"{base}/curve?key=nope")).status_code == 404
        assert (await client.get(f"{base}/curve")).json()["error"]["field"] == "key"
        assert (await client.get(f"{base}/curve?key=loss&x=sideways")).status_code == 422
        assert (await client.get(f"{base}/curve?key=loss&x_min=nan")).status_code == 422
        assert (await client.get(f"{base}?attempt=7")).status_code == 404

    world.run(ask)


def test_outputs_are_downloads_with_ranges(world: World) -> None:
    content = b"<script>alert(1)</script>" * 10
    digest = "sha256:" + hashlib.sha256(content).hexdigest()

    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client, outputs=["*.html"])
        assert upload(world.ctx, world.endpoint_id, content) == digest
        output = Output(path='out/ü".html', size_bytes=len(content), sha256=digest.removeprefix("sha256:"), stored=True)
        lost = Output(path="lost.bin", size_bytes=1, sha256="0" * 64, stored=True)
        world.report(task["jobs"][0]["id"], state=JobState.SUCCEEDED, outputs=(output, lost))
        listed = (await client.get(f"/api/v1/tasks/{task['id']}/outputs")).json()
        assert listed["outputs"][0] == encode(output)
        url = f"/api/v1/tasks/{task['id']}/outputs/content"
        whole = await client.get(url, params={"path": output.path})
        assert whole.content == content and whole.headers["content-type"] == "application/octet-stream"
        assert whole.headers["content-disposition"].startswith("attachment")
        assert whole.headers["x-content-type-options"] == "nosniff"
        assert whole.headers["cache-control"] == "no-store"
        part = await client.get(url, params={"path": output.path}, headers={"Range": "bytes=5-9"})
        assert (part.status_code, part.content) == (206, content[5:10])
        assert part.headers["content-range"] == f"bytes 5-9/{len(content)}"
        last = await client.get(url, params={"path": output.path}, headers={"Range": "bytes=-4"})
        assert last.content == content[-4:]
        beyond = await client.get(url, params={"path": output.path}, headers={"Range": "bytes=9999-"})
        assert beyond.status_code == 416 and beyond.json()["error"]["code"] == "invalid_input"
        odd = await client.get(url, params={"path": output.path}, headers={"Range": "lines=1-2"})
        assert (odd.status_code, odd.content) == (200, content)
        for path in ("lost.bin", "../../etc/passwd", "nothing"):
            assert (await client.get(url, params={"path": path})).status_code == 404

    world.run(ask)


def test_endpoints_and_queue(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        made = await client.post("/api/v1/endpoints", json={"name": "cluster"})
        assert made.status_code == 201 and made.json()["token"].startswith("dmda_")
        assert (await client.post("/api/v1/endpoints", json={"name": "cluster"})).status_code == 409
        assert (await client.post("/api/v1/endpoints", json={"name": "No Good"})).status_code == 422
        assert (await client.post("/api/v1/endpoints", json={"nam": "x"})).json()["error"]["hint"].startswith("did you")
        names = [item["name"] for item in (await client.get("/api/v1/endpoints")).json()["endpoints"]]
        assert names == ["cluster", "here"]
        assert (await client.get("/api/v1/endpoints/here")).json()["online"] is True
        assert (await client.get("/api/v1/endpoints/nowhere")).status_code == 404
        task = await launch(client)
        queue = (await client.get("/api/v1/queue?endpoint=here")).json()["queue"]
        assert [entry["task_id"] for entry in queue] == [task["id"]]

    world.run(ask)


def test_prometheus_text_has_templates_and_no_ids(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        await client.get(f"/api/v1/tasks/{task['id']}")
        await client.get("/api/v1/whatever/is/not/there")
        text = (await client.get("/metrics")).text
        assert 'diamond_http_requests_total{method="GET",route="/api/v1/tasks/{task_id}",status="200"} 1.0' in text
        assert 'diamond_tasks{state="QUEUED"} 1.0' in text
        assert 'diamond_endpoints{state="online"} 1.0' in text
        assert "diamond_process_resident_memory_bytes" in text
        assert "tsk_" not in text and "whatever" not in text

    world.run(ask)


WITHOUT_BODY = (
    "/endpoints/{endpoint}/approve",
    "/endpoints/{endpoint}/decline",
    "/cancel",
    "/goodbye",
    "/{name}/enrolment",
    "/rotate",
    "/revoke",
    "/token/confirm",
    "/images/prune",
    "/leave",
    "/endpoints/{endpoint}",
    "/{rule_id}/test",
    "/refuse",
    "/approve",
    "/decline",
    "/{name}/enable",
    "/{name}/disable",
    "/rerun",
)


def test_running_again_and_removing(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        first = (await client.post("/api/v1/tasks", json={"spec": {"run": "true", "name": "twice"}})).json()["id"]
        headers = {"Idempotency-Key": "once"}
        made = [await client.post(f"/api/v1/tasks/{first}/rerun", headers=headers) for _ in range(2)]
        again = made[0].json()["id"]
        assert [answer.status_code for answer in made] == [201, 201] and made[1].json()["id"] == again != first
        assert made[0].headers["location"] == f"/api/v1/tasks/{again}" and made[0].json()["name"] == "twice"
        live = await client.delete(f"/api/v1/tasks/{first}")
        assert live.status_code == 409 and "only what has ended" in live.json()["error"]["message"]
        await client.post(f"/api/v1/tasks/{first}/cancel")
        assert (await client.delete(f"/api/v1/tasks/{first}")).status_code == 204
        for _ in range(2):
            assert (await client.delete(f"/api/v1/tasks/{first}")).status_code == 404
        assert (await client.get(f"/api/v1/tasks/{again}")).status_code == 200

    world.run(ask)


def test_every_route_is_documented(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        answer = await client.get("/openapi.json")
        document = answer.json()
        references = set()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                where = f"{method} {path}"
                assert operation["summary"] and operation["description"] and operation["tags"], where
                assert any(int(status) < 400 for status in operation["responses"]), where
                if operation.get("security") != []:
                    assert {"401", "403"} <= operation["responses"].keys(), where
                if method in ("post", "put") and not path.endswith(WITHOUT_BODY):
                    assert operation["requestBody"]["content"], where
        references |= {part.split('"')[0] for part in answer.text.split('"#/components/schemas/')[1:]}
        assert references <= document["components"]["schemas"].keys()
        assert "run" in document["components"]["schemas"]["TaskSpec"]["required"]
        assert "HTTPValidationError" not in answer.text

    world.run(ask)


def test_the_door_plate_shows_nothing_of_anybody(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        await launch(client, name="confidential")
        async with world.client(token="") as nobody:
            page = await nobody.get("/")
        assert "<h1>" in page.text and "confidential" not in page.text and "<script" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]

    world.run(ask)
