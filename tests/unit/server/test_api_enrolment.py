"""Routes of enrolment: what anybody may fetch, the exchange of a code, and how revoking reaches who waits."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile

import httpx
import pytest
import sqlalchemy as sa

from diamond.core.enrolment import AGENT_PATH, CA_PATH, new_token, token_hash
from diamond.server.auth import MAX_FAILURES
from diamond.server.store.models import TokenRow
from tests.unit.server.conftest import World

INSTANCE = "agt_00000000a"


def body(code: str, token: str) -> dict[str, str]:
    return {"code": code, "token_sha256": token_hash(token), "instance": INSTANCE}


def test_a_code_instead_of_a_token(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = await client.post("/api/v1/endpoints", json={"name": "cluster", "token": False})
        assert made.status_code == 201
        assert made.json()["token"] == ""
        enrolment = made.json()["enrolment"]
        assert (enrolment["endpoint"], enrolment["pin"], enrolment["url"]) == ("cluster", "", "")
        token = new_token()
        async with world.client("") as anybody:
            answer = await anybody.post("/api/v1/enrolment", json=body(enrolment["code"], token))
            assert (answer.status_code, answer.json()["endpoint_name"]) == (200, "cluster")
        async with world.client(token) as agent:
            me = (await agent.get("/api/v1/agent/me")).json()
            assert (me["endpoint_name"], me["agent_sha256"]) == ("cluster", enrolment["agent_sha256"])
            assert (await agent.get("/api/v1/endpoints")).status_code == 403

    world.run(test)


def test_guessing_is_slowed_down(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = (await client.post("/api/v1/endpoints", json={"name": "cluster", "token": False})).json()
        async with world.client("") as anybody:
            for _ in range(MAX_FAILURES):
                wrong = await anybody.post("/api/v1/enrolment", json=body("0000-0000-0000", new_token()))
                assert wrong.status_code == 401
            limited = await anybody.post("/api/v1/enrolment", json=body(made["enrolment"]["code"], new_token()))
            assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limited")
            assert limited.headers["Retry-After"]
            assert (await anybody.post("/api/v1/enrolment", content=b"x" * 20_000)).status_code == 413

    world.run(test)


def test_the_one_file_agent_is_for_everybody(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with world.client("") as anybody:
            answer = await anybody.get(AGENT_PATH)
            assert answer.status_code == 200
            digest = hashlib.sha256(answer.content).hexdigest()
            assert answer.headers["ETag"] == f'"{digest}"'
            again = await anybody.get(AGENT_PATH, headers={"If-None-Match": f'"{digest}"'})
            assert (again.status_code, again.content) == (304, b"")
            assert "__main__.py" in zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
            assert (await anybody.get(CA_PATH)).status_code == 404  # plain HTTP: nothing to trust

    world.run(test)


@pytest.mark.parametrize("end", ["revoke", "remove"])
def test_a_waiting_agent_is_cut_off_at_once(world: World, end: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with world.client(world.agent_token) as agent:
            first = (await agent.get("/api/v1/agent/desired")).json()
            query = {"epoch": first["epoch"], "since": first["revision"], "wait_s": 30}
            waiting = asyncio.create_task(agent.get("/api/v1/agent/desired", params=query))
            await asyncio.sleep(0.1)
            if end == "revoke":
                assert (await client.post("/api/v1/endpoints/here/revoke")).json() == {"revoked": 1}
            else:
                assert (await client.delete("/api/v1/endpoints/here")).json() == {"given_up": 0}
            answer = await asyncio.wait_for(waiting, 5)
            assert answer.status_code == 401
            said = {"revoke": "was revoked", "remove": "was removed"}
            assert said[end] in answer.json()["error"]["message"]
            assert (await agent.get("/api/v1/agent/me")).status_code == 401

    world.run(test)


def test_rotation_waits_for_the_agent(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        token = new_token()
        async with world.client(world.agent_token) as old, world.client(token) as new:
            first = (await old.get("/api/v1/agent/desired")).json()
            query = {"epoch": first["epoch"], "since": first["revision"], "wait_s": 30, "rotates": True}
            waiting = asyncio.create_task(old.get("/api/v1/agent/desired", params=query))
            rotating = asyncio.create_task(client.post("/api/v1/endpoints/here/rotate", params={"wait_s": 10}))
            assert (await asyncio.wait_for(waiting, 5)).json()["rotate"] is True
            # An agent that does not know how is not told, or it would ask again and again.
            unable = await old.get("/api/v1/agent/desired", params={**query, "wait_s": 0, "rotates": False})
            assert unable.json()["rotate"] is False
            assert (await old.put("/api/v1/agent/token", json={"sha256": token_hash(token)})).status_code == 204
            assert not rotating.done()
            assert (await new.post("/api/v1/agent/token/confirm")).status_code == 204
            answer = (await asyncio.wait_for(rotating, 5)).json()
            assert (answer["rotated"], answer["online"], answer["enrolment"]) == (True, True, None)
            assert (await old.get("/api/v1/agent/me")).status_code == 401
            assert (await new.get("/api/v1/agent/me")).status_code == 200

    world.run(test)


def test_an_agent_is_told_to_renew_a_token_that_runs_out(world: World) -> None:
    def expire_in(seconds: float) -> None:
        expire = sa.update(TokenRow).where(TokenRow.hash == token_hash(world.agent_token))
        with world.ctx.db.write() as session:
            session.execute(expire.values(expires_at=time.time() + seconds))

    async def test(_client: httpx.AsyncClient) -> None:
        async with world.client(world.agent_token) as agent:
            first = (await agent.get("/api/v1/agent/desired", params={"rotates": True})).json()
            assert first["rotate"] is False
            expire_in(14 * 86_400.0)
            query = {"epoch": first["epoch"], "since": first["revision"], "rotates": True}
            assert (await agent.get("/api/v1/agent/desired", params=query)).json()["rotate"] is True
            expire_in(-1.0)
            world.app.state.runtime.authenticator.forget()
            answer = await agent.get("/api/v1/agent/me")
            assert (answer.status_code, "has expired" in answer.text) == (401, True)

    world.run(test)


def test_an_offline_agent_gets_a_new_line_instead(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with world.client(world.agent_token) as agent:
            assert (await agent.post("/api/v1/agent/goodbye")).status_code == 204
            answer = (await client.post("/api/v1/endpoints/here/rotate")).json()
            assert (answer["rotated"], answer["online"]) == (False, False)
            assert (await agent.get("/api/v1/agent/me")).json()["rotate"] is True
            used = await client.post("/api/v1/enrolment", json=body(answer["enrolment"]["code"], new_token()))
            assert used.status_code == 200
            assert (await agent.get("/api/v1/agent/me")).status_code == 401

    world.run(test)
