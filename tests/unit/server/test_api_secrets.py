"""Routes of secrets: who may call them, what they answer, and that no answer ever holds a value."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from diamond.core.accounts import Scope
from diamond.core.endpoints import EndpointFacts
from diamond.core.states import JobState
from diamond.core.wire import Hello
from diamond.server.services import agents, projects, tokens
from tests.unit.server.conftest import World, launch

FACTS = EndpointFacts(scheduler="local", cpus_per_node=8, mem_bytes_per_node=2**34, takes_secrets=True)
VALUE = "planted-51d2-value"
ROUTE = "/api/v1/secrets"


@pytest.fixture(autouse=True)
def _takes_secrets(world: World) -> None:
    agents.hello(world.ctx, world.endpoint_id, Hello(facts=FACTS))


def test_a_value_goes_in_and_does_not_come_out(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = await client.put(f"{ROUTE}/HF_TOKEN", json={"value": VALUE})
        assert made.status_code == 201 and made.headers["Cache-Control"] == "no-store"
        again = await client.put(f"{ROUTE}/HF_TOKEN", json={"value": VALUE + "2"})
        assert again.status_code == 200 and set(again.json()) == set(made.json())
        listed = await client.get(ROUTE)
        assert [one["name"] for one in listed.json()["secrets"]] == ["HF_TOKEN"]
        task = await launch(client, secrets={"TOKEN": "HF_TOKEN"})
        assert task["spec"]["secrets"] == {"TOKEN": {"secret": "HF_TOKEN", "file": False}}
        answers = [made, again, listed, await client.get(f"/api/v1/tasks/{task['id']}")]
        answers += [await client.get(path) for path in ("/api/v1/events", "/api/v1/tasks", f"{ROUTE}/HF_TOKEN")]
        for answer in answers:
            assert VALUE not in answer.text and base64.b64encode(VALUE.encode()).decode()[:-4] not in answer.text
        assert (await client.delete(f"{ROUTE}/HF_TOKEN")).status_code == 204
        assert (await client.delete(f"{ROUTE}/HF_TOKEN")).status_code == 404

    world.run(test)


@pytest.mark.parametrize(
    ("name", "body", "status", "field"),
    [
        ("9bad", {"value": VALUE}, 422, "name"),
        ("X", {"value": 12345678}, 422, "value"),
        ("X", {"value": ["planted-51d2-value"]}, 422, "value"),
        ("X", {"value": ""}, 422, "value"),
        ("X", {"value": "a\0b"}, 422, "value"),
        ("X", {}, 422, "value"),
        ("X", {"value": VALUE, "proyect": 1}, 422, ""),
        ("X", {"value": VALUE, "project": 1}, 422, "project"),
        ("X", {"value": VALUE, "project": "nope"}, 404, "project"),
        ("X", {"value": VALUE, "project": "a\0b"}, 404, "project"),
    ],
)
def test_what_is_refused_is_not_repeated(
    world: World, name: str, body: dict[str, Any], status: int, field: str
) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answer = await client.put(
            f"{ROUTE}/{name}", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["field"]) == (status, field), answer.text
        assert VALUE not in answer.text and "12345678" not in answer.text

    world.run(test)


def test_scopes(world: World) -> None:
    def token(*scopes: Scope) -> str:
        with world.ctx.db.write() as session:
            return tokens.issue(session, now=world.ctx.clock(), user_id=world.user_id, scopes=scopes)

    projects.create(world.ctx, world.user_id, "lab")

    async def test(client: httpx.AsyncClient) -> None:
        for scopes, statuses in {
            (Scope.READ,): (200, 403, 403),
            (Scope.LAUNCH,): (200, 201, 204),
            (Scope.AGENT,): (403, 403, 403),
            (Scope.ADMIN,): (200, 201, 204),
        }.items():
            async with world.client(token(*scopes)) as one:
                listed = await one.get(ROUTE)
                put = await one.put(f"{ROUTE}/X", json={"value": VALUE})
                removed = await one.delete(f"{ROUTE}/X")
                assert (listed.status_code, put.status_code, removed.status_code) == statuses, scopes
                # Those of a project are other people's as well.
                put = await one.put(f"{ROUTE}/X", json={"value": VALUE, "project": "lab"})
                removed = await one.delete(f"{ROUTE}/X?project=lab")
                of_admin = (201, 204) if scopes == (Scope.ADMIN,) else (403, 403)
                assert (put.status_code, removed.status_code) == of_admin, scopes
        async with world.client("") as nobody:
            assert (await nobody.get(ROUTE)).status_code == 401
        async with world.client(world.agent_token) as agent:
            assert (await agent.get(ROUTE)).status_code == 403
            assert (await agent.put(f"{ROUTE}/X", json={"value": VALUE})).status_code == 403

    world.run(test)


def test_an_agent_fetches_those_of_its_own_live_jobs(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await client.put(f"{ROUTE}/hf", json={"value": VALUE})
        job_id = (await launch(client, secrets={"TOKEN": "hf"}))["jobs"][0]["id"]
        path = f"/api/v1/agent/jobs/{job_id}/secrets"
        assert (await client.get(path)).status_code == 403, "its user has it already, and is no agent"
        made = await client.post("/api/v1/endpoints", json={"name": "elsewhere"})
        async with world.client(made.json()["token"]) as other:
            assert (await other.get(path)).status_code == 404
        async with world.client(world.agent_token) as agent:
            got = await agent.get(path)
            assert got.status_code == 200 and got.headers["Cache-Control"] == "no-store"
            assert got.json()["secrets"][0]["value"] == VALUE
            assert (await agent.get("/api/v1/agent/jobs/job_00000000/secrets")).status_code == 404
            await client.delete(f"{ROUTE}/hf")
            gone = await agent.get(path)
            assert (gone.status_code, gone.json()["error"]["field"]) == (422, "secrets.TOKEN")
            world.report(job_id, state=JobState.FAILED)
            assert (await agent.get(path)).status_code == 404

    world.run(test)
