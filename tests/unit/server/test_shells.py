"""Shells at the server: nothing is lost or doubled, nothing grows without end, and silence ends them."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import Conflict, NotFound, ProtocolError
from diamond.core.shells import MAX_CHUNK_BYTES, NewShell, ShellEnd
from diamond.core.states import JobState
from diamond.core.wire import Hello
from diamond.server.services import accounts, agents
from diamond.server.services.shells import PIPE_BYTES, Pipe, Place, ShellLimits, ShellTable
from diamond.server.store.models import EndpointRow
from testing.context import Clock

from .conftest import World, launch

PLACE = Place(task_id="tsk_1", job_id="job_1", owner_id="usr_1", owner="me", endpoint_id="end_1", endpoint="here")
ASKED = NewShell(argv=("bash",))


def test_a_pipe_loses_and_doubles_nothing_whatever_is_repeated() -> None:
    rng = random.Random(2)
    data = rng.randbytes(300_000)
    pipe, got, told = Pipe(capacity=10_000), bytearray(), 0
    while len(got) < len(data):
        at = max(0, told - rng.randrange(5_000)) if rng.random() < 0.5 else told  # again, as after a lost answer
        told = pipe.write(at, data[at : at + rng.randrange(20_000)])
        assert pipe.end - pipe.start <= 10_000
        piece = pipe.read(len(got), rng.randrange(1, 8_000))
        if rng.random() < 0.7:  # else the answer was lost, and is asked for again
            got += piece
    assert bytes(got) == data
    assert pipe.write(len(data) + 5, b"after a gap") == len(data)
    for offset in (0, len(data) + 1):
        with pytest.raises(ProtocolError):
            pipe.read(offset, 1)


def table(clock: Clock, **limits: Any) -> ShellTable:
    woken: list[str] = []
    made = ShellTable(ShellLimits(**limits), woken.append, clock=clock)
    made.woken = woken  # type: ignore[attr-defined]
    return made


def test_not_too_many() -> None:
    shells = table(Clock(), per_task=1, per_user=2, per_endpoint=3)
    first = shells.add(PLACE, ASKED)
    assert shells.woken == ["endpoint:end_1"]  # type: ignore[attr-defined]
    with pytest.raises(Conflict, match="this task has 1"):
        shells.add(PLACE, ASKED)
    shells.add(replace(PLACE, task_id="tsk_2"), ASKED)
    with pytest.raises(Conflict, match="you have 2"):
        shells.add(replace(PLACE, task_id="tsk_3"), ASKED)
    shells.add(replace(PLACE, task_id="tsk_3", owner_id="usr_2"), ASKED)
    with pytest.raises(Conflict, match="endpoint here has 3"):
        shells.add(replace(PLACE, task_id="tsk_4", owner_id="usr_3"), ASKED)
    shells.drop(first)
    shells.add(PLACE, ASKED)


def test_one_agent_process_takes_a_shell_up() -> None:
    shells = table(Clock())
    shell = shells.add(PLACE, ASKED)
    assert [order.shell_id for order in shells.orders("end_1", ())] == [shell.id]
    assert shells.orders("end_1", {shell.id}) == () == shells.orders("end_2", ())
    assert shells.of_agent("end_1", shell.id, "run_1") is shell
    assert shells.orders("end_1", ()) == ()
    with pytest.raises(Conflict):
        shells.of_agent("end_1", shell.id, "run_2")
    with pytest.raises(NotFound):
        shells.of_agent("end_2", shell.id, "run_1")
    assert shells.orphans("end_1", "run_1") == []
    assert shells.orphans("end_1", "run_2") == [shell]
    shells.finish(shell, ShellEnd(exit_code=0))
    with pytest.raises(NotFound):
        shells.of_agent("end_1", shell.id, "run_1")
    assert not shells.finish(shell, ShellEnd(exit_code=1)) and shell.end == ShellEnd(exit_code=0)


def test_silence_ends_a_shell() -> None:
    clock = Clock()
    shells = table(clock, patience_s=60.0, idle_s=3600.0)
    shell = shells.add(PLACE, ASKED)

    def after(seconds: float, *heard: str) -> list[str]:
        clock.advance(seconds)
        if "client" in heard:
            shells.of_user("usr_1", shell.id)
        if "agent" in heard:
            shells.of_agent("end_1", shell.id, "run_1")
        return [end.message for _, end in shells.sweep()]

    assert after(59) == []
    assert after(2, "client") == ["the agent of endpoint here did not take the shell up for 1m 00s"]
    assert after(0, "agent") == []
    assert after(61, "client") == ["the agent of endpoint here has been silent for 1m 00s"]
    assert after(1, "agent") == []
    assert after(60, "agent") == ["its client has been silent for 1m 00s"]
    assert after(3600, "client", "agent") == ["nothing was typed or shown for 1h 00m"]
    shells.used(shell)
    assert after(0) == []
    # Over: kept for its client, not for ever.
    shells.finish(shell, ShellEnd(exit_code=0))
    assert after(30) == [] and shells.of_user("usr_1", shell.id) is shell
    after(61)
    with pytest.raises(NotFound):
        shells.of_user("usr_1", shell.id)


def test_over_http(world: World) -> None:
    agent = {"Authorization": f"Bearer {world.agent_token}"}

    async def test(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        path = f"/api/v1/tasks/{task['id']}/shells"
        early = await client.post(path, json={"argv": ["bash"]})
        assert early.status_code == 409 and "QUEUED" in early.text
        job_id = task["jobs"][0]["id"]
        world.report(job_id, state=JobState.RUNNING, hosts=("c1",))
        for wrong in ({}, {"argv": []}, {"argv": "bash"}, {"argv": ["sh"], "shell": True}, {"argv": ["sh"], "node": 1}):
            assert (await client.post(path, json=wrong)).status_code == 422, wrong
        waiting = asyncio.create_task(
            client.get("/api/v1/agent/desired?wait_s=5&since=99&runner=run_00000001", headers=agent, params=None)
        )
        made = (await client.post(path, json={"argv": ["bash", "-i"], "tty": True})).json()
        shell = f"/shells/{made['id']}"
        assert made["state"] == "waiting"
        # Old agents do not ask for shells and are not told of any; one that has it is not told again.
        for query, number in (("", 0), ("&runner=run_00000001", 1), (f"&runner=run_00000001&shells={made['id']}", 0)):
            state = (await client.get(f"/api/v1/agent/desired?wait_s=0&since=99{query}", headers=agent)).json()
            assert len(state["shells"]) == number, query
        await waiting
        read = f"/api/v1/agent{shell}/input?runner=run_00000001"
        assert (await client.get(f"{read}&wait_s=0", headers=agent)).content == b""
        assert (await client.get(f"/api/v1{shell}")).json()["state"] == "running"
        # A key typed wakes who waits for it.
        key = asyncio.create_task(client.get(f"{read}&wait_s=10", headers=agent))
        await asyncio.sleep(0.05)
        assert (await client.post(f"/api/v1{shell}/input?offset=0", content=b"key")).json() == {"received": 3}
        assert (await key).content == b"key"
        # Backpressure: no more is taken than there is room for.
        write = f"/api/v1/agent{shell}/output?runner=run_00000001"
        taken = 0
        for _ in range(4):
            chunk = b"x" * MAX_CHUNK_BYTES
            answer = await client.post(f"{write}&offset={taken}&wait_s=0.1", content=chunk, headers=agent)
            taken = answer.json()["received"]
        assert taken == PIPE_BYTES
        too_much = await client.post(f"{write}&offset={taken}", content=b"x" * (MAX_CHUNK_BYTES + 1), headers=agent)
        assert too_much.status_code == 413
        ended = await client.post(f"/api/v1/agent{shell}/end?runner=run_00000001", json={"exit_code": 3}, headers=agent)
        assert ended.status_code == 204
        got = 0
        while True:
            answer = await client.get(f"/api/v1{shell}/output?offset={got}&wait_s=1")
            got += len(answer.content)
            if answer.headers["Diamond-Eof"] == "1":
                break
        assert got == PIPE_BYTES
        assert (await client.get(f"/api/v1{shell}")).json()["end"]["exit_code"] == 3
        assert (await client.get(f"/api/v1{shell}/output?offset=5&wait_s=0")).status_code == 400
        assert (await client.get(read, headers=agent)).status_code == 404
        for _ in range(2):
            assert (await client.delete(f"/api/v1{shell}")).status_code == 204
        facts = EndpointFacts(scheduler="local", allows_shells=False)
        agents.hello(world.ctx, world.endpoint_id, Hello(facts=facts))
        refused = await client.post(path, json={"argv": ["bash"]})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "policy_refused"

    world.run(test)


def test_guests_of_an_endpoint_get_shells_only_where_its_owner_lets_them(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        world.report(task["jobs"][0]["id"], state=JobState.RUNNING, hosts=("c1",))
        with world.ctx.db.write() as session:
            other = accounts.insert(session, time.time(), name="other", is_admin=False).id
            session.get_one(EndpointRow, world.endpoint_id).owner_id = other
        path = f"/api/v1/tasks/{task['id']}/shells"
        facts = EndpointFacts(scheduler="local")
        agents.hello(world.ctx, world.endpoint_id, Hello(facts=facts))
        refused = await client.post(path, json={"argv": ["bash"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "policy_refused")
        assert "allow_shells_of_others" in refused.json()["error"]["hint"]
        open_facts = replace(facts, allows_shells_of_others=True)
        agents.hello(world.ctx, world.endpoint_id, Hello(facts=open_facts))
        assert (await client.post(path, json={"argv": ["bash"]})).status_code == 201

    world.run(test)


def test_a_revoked_agent_gets_no_key_that_is_typed_afterwards(world: World) -> None:
    agent = {"Authorization": f"Bearer {world.agent_token}"}

    async def test(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        world.report(task["jobs"][0]["id"], state=JobState.RUNNING, hosts=("c1",))
        made = (await client.post(f"/api/v1/tasks/{task['id']}/shells", json={"argv": ["bash"]})).json()
        read = f"/api/v1/agent/shells/{made['id']}/input?runner=run_00000001&wait_s=10"
        waiting = asyncio.create_task(client.get(read, headers=agent))
        await asyncio.sleep(0.1)
        assert (await client.post("/api/v1/endpoints/here/revoke")).json() == {"revoked": 1}
        await client.post(f"/api/v1/shells/{made['id']}/input?offset=0&wait_s=0", content=b"secret")
        answer = await waiting
        assert answer.status_code == 401 and b"secret" not in answer.content

    world.run(test)
