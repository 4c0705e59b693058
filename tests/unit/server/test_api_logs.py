"""Logs and events: by offset, by long poll, as streams."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from diamond.core.errors import Unavailable
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.server import sse
from diamond.server.api import events as events_api
from diamond.server.services import planning, tasks

from .conftest import World, launch


def frames(text: str) -> list[tuple[str, str, Any]]:
    """Event name, id and data of each frame; heartbeats left out."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            found.append((lines.get("event", "message"), lines.get("id", ""), json.loads(lines["data"])))
    return found


def test_reading_by_offset(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        job_id, url = task["jobs"][0]["id"], f"/api/v1/tasks/{task['id']}/logs"
        empty = await client.get(url)
        assert empty.content == b"" and empty.headers["diamond-eof"] == "0"
        world.report(job_id, state=JobState.RUNNING, log=b"hello\xff world\n")
        some = await client.get(url, params={"offset": 2, "limit": 4})
        assert some.content == b"llo\xff"
        assert (some.headers["diamond-offset"], some.headers["diamond-next-offset"]) == ("2", "6")
        assert (some.headers["diamond-attempt"], some.headers["diamond-task-state"]) == ("1", "RUNNING")
        assert (await client.get(url, params={"tail": 6})).content == b"world\n"
        world.report(job_id, state=JobState.SUCCEEDED, exit_code=0)
        first = await client.get(url, params={"limit": 5})
        assert first.headers["diamond-eof"] == "0"
        rest = await client.get(url, params={"offset": 5, "attempt": 1, "wait_s": 30})
        assert rest.headers["diamond-eof"] == "1" and rest.headers["diamond-task-state"] == "SUCCEEDED"
        end = await client.get(url, params={"offset": 13, "attempt": 1, "wait_s": 30})
        assert end.content == b"" and end.headers["diamond-eof"] == "1"
        assert (await client.get(url, params={"attempt": 2})).status_code == 404
        assert (await client.get(url, params={"offset": -1})).status_code == 422
        assert (await client.get("/api/v1/tasks/tsk_00000000000/logs?wait_s=5")).status_code == 404

    world.run(ask)


def test_a_long_poll_answers_as_soon_as_bytes_arrive(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        job_id = task["jobs"][0]["id"]
        delays = []
        for number in range(5):
            poll = asyncio.create_task(
                client.get(f"/api/v1/tasks/{task['id']}/logs?attempt=1&offset={number * 4}&wait_s=20")
            )
            await asyncio.sleep(0.05)
            assert not poll.done()
            await asyncio.to_thread(world.report, job_id, log=b"line", offset=number * 4)
            sent = time.perf_counter()
            answer = await poll
            delays.append(time.perf_counter() - sent)
            assert answer.content == b"line"
        assert min(delays) < 0.05, delays

    world.run(ask)


def test_many_waiting_requests_hold_no_thread(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        polls = [
            asyncio.create_task(client.get(f"/api/v1/tasks/{task['id']}/logs?attempt=1&wait_s=30")) for _ in range(200)
        ]
        await asyncio.sleep(0.3)
        began = time.perf_counter()
        assert (await client.get("/api/v1/tasks")).status_code == 200
        assert time.perf_counter() - began < 2
        await asyncio.to_thread(world.report, task["jobs"][0]["id"], log=b"x")
        assert {answer.content for answer in await asyncio.gather(*polls)} == {b"x"}

    world.run(ask)


def test_a_long_poll_ends_when_its_time_is_up_or_the_server_stops(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        url = f"/api/v1/tasks/{task['id']}/logs"
        assert (await client.get(f"{url}?wait_s=0.1")).content == b""
        poll = asyncio.create_task(client.get(f"{url}?wait_s=30"))
        stream = asyncio.create_task(client.get(f"{url}/stream"))
        await asyncio.sleep(0.1)
        world.hub.close()
        async with asyncio.timeout(2):
            assert (await poll).status_code == 200
            assert (await stream).status_code == 200

    world.run(ask)


def test_a_followed_log_splits_between_characters_and_ends(world: World) -> None:
    text = "schön 😀 fertig\n"

    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        job_id = task["jobs"][0]["id"]
        stream = asyncio.create_task(client.get(f"/api/v1/tasks/{task['id']}/logs/stream"))
        for at, byte in enumerate(text.encode()):
            await asyncio.to_thread(world.report, job_id, log=bytes([byte]), offset=at)
            await asyncio.sleep(0.005)
        await asyncio.to_thread(world.report, job_id, state=JobState.SUCCEEDED)
        async with asyncio.timeout(10):
            answer = await stream
        assert answer.headers["content-type"].startswith("text/event-stream")
        got = frames(answer.text)
        assert got[0][0] == "hello" and got[0][2] == {"epoch": world.ctx.epoch}
        assert got[1][0] == "attempt" and got[-1] == ("end", "", {"state": "SUCCEEDED"})
        logs = [(event_id, data) for name, event_id, data in got if name == "log"]
        assert "".join(data["text"] for _, data in logs) == text
        assert all(event_id == f"1:{data['next_offset']}" for event_id, data in logs)
        # Resume from the middle, as a browser would.
        again = await client.get(
            f"/api/v1/tasks/{task['id']}/logs/stream", headers={"Last-Event-ID": logs[len(logs) // 2][0]}
        )
        tail = "".join(data["text"] for name, _, data in frames(again.text) if name == "log")
        assert tail == "".join(data["text"] for _, data in logs[len(logs) // 2 + 1 :])
        for bad in ("x", "1:", ":", "1:2:3", "9" * 30):
            refused = await client.get(f"/api/v1/tasks/{task['id']}/logs/stream", headers={"Last-Event-ID": bad})
            assert refused.status_code == 422, bad

    world.run(ask)


def test_half_a_character_at_the_end_of_a_log_is_shown(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        world.report(task["jobs"][0]["id"], state=JobState.SUCCEEDED, log="é".encode()[:1])
        answer = await client.get(f"/api/v1/tasks/{task['id']}/logs/stream")
        assert [data["text"] for name, _, data in frames(answer.text) if name == "log"] == ["\ufffd"]

    world.run(ask)


def test_a_followed_log_goes_on_with_the_next_attempt(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client, retry={"max_retries": 1, "backoff": 1})
        url = f"/api/v1/tasks/{task['id']}/logs"
        stream = asyncio.create_task(client.get(f"{url}/stream"))
        only_first = asyncio.create_task(client.get(f"{url}/stream?attempt=1"))
        job_id = task["jobs"][0]["id"]
        failed: dict[str, Any] = {"state": JobState.FAILED, "reason": Reason.EXIT_NONZERO, "exit_code": 1}
        await asyncio.to_thread(world.report, job_id, log=b"one", **failed)
        end_of_first = await client.get(f"{url}?attempt=1&offset=3&wait_s=5")
        assert end_of_first.headers["diamond-eof"] == "1"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            await asyncio.to_thread(planning.run_due, world.ctx)
            now = await asyncio.to_thread(tasks.get, world.ctx, world.user_id, task["id"])
            if len(now.jobs) == 2:
                break
            await asyncio.sleep(0.05)
        await asyncio.to_thread(world.report, now.jobs[1].id, log=b"two!", state=JobState.SUCCEEDED)
        async with asyncio.timeout(10):
            got = [(name, data) for name, _, data in frames((await stream).text)]
            first = [name for name, _, _ in frames((await only_first).text)]
        assert [data["attempt"] for name, data in got if name == "attempt"] == [1, 2]
        assert [data["text"] for name, data in got if name == "log"] == ["one", "two!"]
        assert got[-1] == ("end", {"state": "SUCCEEDED"})
        assert first == ["hello", "attempt", "log", "end"]

    world.run(ask)


def test_an_error_in_a_stream_is_its_last_event(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise Unavailable("the database is busy")

    monkeypatch.setattr(events_api.events, "since", fail)

    async def ask(client: httpx.AsyncClient) -> None:
        got = frames((await client.get("/api/v1/events/stream")).text)
        assert [name for name, _, _ in got] == ["hello", "error"]
        assert got[1][2]["error"]["code"] == "unavailable"

    world.run(ask)


def test_events_by_cursor_long_poll_and_stream(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.05)

    async def ask(client: httpx.AsyncClient) -> None:
        start = (await client.get("/api/v1/events")).json()
        cursor = start["cursor"]
        assert start["epoch"] == world.ctx.epoch
        poll = asyncio.create_task(client.get(f"/api/v1/events?since={cursor}&wait_s=20"))
        stream = asyncio.create_task(client.get("/api/v1/events/stream", headers={"Last-Event-ID": str(cursor)}))
        await asyncio.sleep(0.2)
        task = await launch(client)
        news = (await poll).json()
        assert news["events"][0]["kind"] == "task.created" and news["cursor"] > cursor
        mine = (await client.get(f"/api/v1/tasks/{task['id']}/events")).json()["events"]
        assert {event["task_id"] for event in mine} == {task["id"]}
        assert (await client.get("/api/v1/tasks/tsk_00000000000/events")).status_code == 404
        await asyncio.sleep(0.2)
        world.hub.close()
        answer = (await stream).text
        assert sse.HEARTBEAT.decode() in answer
        got = frames(answer)
        assert got[0][0] == "hello"
        numbers = [int(event_id) for _, event_id, _ in got[1:]]
        assert numbers == sorted(set(numbers)) and numbers[0] == cursor + 1
        assert (await client.get("/api/v1/events/stream", headers={"Last-Event-ID": "x"})).status_code == 422

    world.run(ask)


def test_a_stream_whose_reader_left_ends(world: World) -> None:
    """Driven by hand, since the in-process transport has no way of leaving."""

    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        left = asyncio.Event()
        requested = False
        started = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal requested
            if not requested:
                requested = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            started.set()

        for version in ("2.3", "2.4"):
            left.clear()
            started.clear()
            requested = False
            scope = {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": version},
                "http_version": "1.1",
                "method": "GET",
                "path": f"/api/v1/tasks/{task['id']}/logs/stream",
                "raw_path": b"",
                "query_string": b"",
                "root_path": "",
                "scheme": "http",
                "headers": [(b"authorization", f"Bearer {world.user_token}".encode())],
                "client": ("127.0.0.1", 1),
                "server": ("server", 80),
            }
            stream = asyncio.create_task(world.app(scope, receive, send))
            await started.wait()
            await asyncio.sleep(0.05)
            assert not stream.done()
            left.set()
            async with asyncio.timeout(2):
                await stream
        assert not [topic for topic in world.hub._by_topic if topic.startswith("task:")]

    world.run(ask)


def test_the_agents_poll_waits_for_orders_and_does_not_spin(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        async with world.client(world.agent_token) as agent:
            first = (await agent.get("/api/v1/agent/desired")).json()
            assert first["full"] and first["orders"] == []
            url = f"/api/v1/agent/desired?epoch={first['epoch']}&since={first['revision']}&wait_s=20"
            poll = asyncio.create_task(agent.get(url))
            await asyncio.sleep(0.2)
            assert not poll.done()
            task = await launch(client)
            orders = (await poll).json()
            assert [order["task_id"] for order in orders["orders"]] == [task["id"]]
            other = (await agent.get("/api/v1/agent/desired?epoch=other&since=999&wait_s=20")).json()
            assert other["full"] and len(other["orders"]) == 1

    world.run(ask)
