"""The route of a pool's record, asked for as the SDK does."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from diamond.core.codec import decode
from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import NotFound
from diamond.core.pool_records import KIND, PoolRecord
from diamond.core.wire import Hello
from diamond.sdk.client import Client
from diamond.server.services import agents, endpoints
from tests.unit.server.conftest import World


@pytest.mark.parametrize("name", ["gpus", "record", "a.b-c_1"])
def test_a_record_is_had_by_name(world: World, name: str) -> None:
    endpoint, _ = endpoints.create(world.ctx, world.user_id, "hpc")
    facts = EndpointFacts(scheduler="slurm", nodes=8, cpus_per_node=64, mem_bytes_per_node=2**38, holds_pools=True)
    agents.hello(world.ctx, endpoint.id, Hello(facts=facts))

    async def test(server: httpx.AsyncClient) -> Any:
        spec = {"name": name, "endpoint": "hpc", "slots": 3, "nodes": "0..2"}
        assert (await server.post("/api/v1/pools", json=spec)).status_code == 201
        loop = asyncio.get_running_loop()

        def passed_on(request: httpx.Request) -> httpx.Response:
            asked = server.request(request.method, str(request.url.copy_with(scheme="http", host="localhost")))
            answer = asyncio.run_coroutine_threadsafe(asked, loop).result(20)
            return httpx.Response(answer.status_code, content=answer.content)

        client = Client("http://d.test", world.user_token, transport=httpx.MockTransport(passed_on), retries=0)
        with pytest.raises(NotFound):
            await asyncio.to_thread(client.pools.record, "nowhere")
        answer = (
            await server.get(f"/api/v1/pools/{(await asyncio.to_thread(client.pools.get, name)).id}/record")
        ).json()
        return await asyncio.to_thread(client.pools.record, name), answer

    by_name, by_id = world.run(test)
    assert (by_name.kind, by_name.slot_kind, by_name.slots_per_node, by_name.most_nodes) == (KIND, "cpu", 3, 2)
    assert by_name.tasks == () == decode(PoolRecord, by_id).tasks
