"""The server's own log lines."""

from __future__ import annotations

import io
import json
import logging

import httpx
import pytest

from diamond.server.api import tasks as tasks_api
from diamond.server.app import create_app
from diamond.server.logs import JsonFormatter, TextFormatter, configure_logging, redact

from .conftest import World


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("token dmdu_abcDEF-123_x", "abcDEF"),
        ("Authorization: Bearer abc.def", "abc.def"),
        ("postgresql://me:hunter22@host/db", "hunter22"),
        ('{"token": "dmda_zzzzzz"}', "zzzzzz"),
    ],
)
def test_no_secret_survives(text: str, secret: str) -> None:
    assert secret not in redact(text) and "***" in redact(text)


def test_addresses_survive() -> None:
    assert redact("at http://127.0.0.1:7421/x") == "at http://127.0.0.1:7421/x"


def test_json_lines_and_text_lines() -> None:
    record = logging.LogRecord("diamond.x", logging.INFO, "f", 1, "two\nlines %s", ("dmdu_secret1",), None)
    record.request_id = "r1"
    record.status = 200
    line = json.loads(JsonFormatter().format(record))
    assert line["msg"] == "two\nlines dmdu_***" and line["request_id"] == "r1" and line["status"] == 200
    assert {"ts", "level", "logger"} <= line.keys()
    assert "\n    lines" in TextFormatter().format(record)


@pytest.mark.usefixtures("root_logger")
def test_access_log_only_of_what_is_slow_or_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    configure_logging("INFO", "json", out)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("boom")

    async def ask(client: httpx.AsyncClient) -> None:
        await client.get("/api/v1/tasks")
        await client.get("/api/v1/events?wait_s=0.01&since=99")
        assert out.getvalue() == ""
        monkeypatch.setattr(tasks_api.tasks, "list_tasks", fail)
        await client.get("/api/v1/tasks", headers={"X-Request-Id": "r-7"})

    world.run(ask)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["request_id"] for line in lines] == ["r-7", "r-7"]
    assert "boom" in lines[0]["exception"]
    assert (lines[1]["status"], lines[1]["route"]) == (500, "/api/v1/tasks")
    assert world.user_token not in out.getvalue()


@pytest.mark.usefixtures("root_logger")
def test_waiting_is_not_slow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    configure_logging("INFO", "json", out)
    monkeypatch.setattr("diamond.server.app.planning.run_due", lambda _ctx: None)
    world.settings.__dict__["slow_request_s"] = 0.001
    app = create_app(world.ctx, world.hub, world.settings)
    world.app = app

    async def ask(client: httpx.AsyncClient) -> None:
        await client.get("/api/v1/events?wait_s=0.2&since=99")
        assert out.getvalue() == ""
        await client.get("/api/v1/tasks")
        text = (await client.get("/metrics")).text
        assert 'diamond_http_request_seconds_count{method="GET",route="/api/v1/tasks"}' in text
        assert 'seconds_count{method="GET",route="/api/v1/events"}' not in text
        assert 'diamond_http_waiting{route="/api/v1/events"} 0.0' in text

    world.run(ask)
    assert [json.loads(line)["route"] for line in out.getvalue().splitlines()] == ["/api/v1/tasks", "/metrics"]


@pytest.mark.usefixtures("root_logger")
def test_debug_logs_every_request(world: World) -> None:
    out = io.StringIO()
    configure_logging("DEBUG", "text", out)

    async def ask(client: httpx.AsyncClient) -> None:
        await client.get("/api/v1/tasks?name=private")

    world.run(ask)
    assert "GET /api/v1/tasks -> 200" in out.getvalue() and "private" not in out.getvalue()
