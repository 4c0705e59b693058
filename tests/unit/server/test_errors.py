"""Every error has its own code and an HTTP answer; what is not expected shows nothing of the inside."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from typing import Any

import httpx
import pytest
from sqlalchemy import exc

from diamond.core.errors import DiamondError, StorageFull, all_errors, error_from_json
from diamond.server.api import tasks as tasks_api
from diamond.server.api.answers import attachment

from .conftest import World


def test_every_error_of_the_tree_is_answered_with_its_status_and_body(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [kind.code for kind in all_errors()]
    assert len(set(codes)) == len(codes)

    async def ask(client: httpx.AsyncClient) -> None:
        for kind in all_errors():
            error = kind("what happened", hint="what to do", field="which")
            monkeypatch.setattr(tasks_api.tasks, "list_tasks", _raiser(error))
            answer = await client.get("/api/v1/tasks")
            assert answer.status_code == kind.status and 400 <= kind.status < 600
            assert answer.json() == error.to_json()
            assert type(error_from_json(answer.json())) is kind
            assert ("retry-after" in answer.headers) == kind.transient
            assert ("www-authenticate" in answer.headers) == (kind.status == 401)

    world.run(ask)


def _raiser(error: BaseException) -> Any:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RuntimeError("secret dmdu_inside"), 500, "internal_error"),
        (
            exc.OperationalError("SELECT 1", {}, sqlite3.OperationalError("database or disk is full")),
            507,
            "storage_full",
        ),
        (exc.OperationalError("SELECT 1", {}, sqlite3.OperationalError("database is locked")), 503, "unavailable"),
        (exc.TimeoutError("pool"), 503, "unavailable"),
        (OSError(errno.ENOSPC, "No space left on device", "/srv/secret"), 507, "storage_full"),
        (OSError(errno.EMFILE, "Too many open files"), 503, "unavailable"),
        (PermissionError(errno.EACCES, "no", "/srv/secret"), 500, "internal_error"),
        (RecursionError("deep"), 500, "internal_error"),
    ],
)
def test_unexpected_errors(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    monkeypatch.setattr(tasks_api.tasks, "list_tasks", _raiser(error))

    async def ask(client: httpx.AsyncClient) -> None:
        answer = await client.get("/api/v1/tasks", headers={"X-Request-Id": "abc-1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert "secret" not in answer.text and "Traceback" not in answer.text and "SELECT" not in answer.text
        assert answer.headers["x-request-id"] == "abc-1"
        if status == 500:
            assert "abc-1" in answer.json()["error"]["hint"]

    world.run(ask)


def test_routes_and_methods_that_do_not_exist(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        nothing = await client.get("/api/v1/nonsense")
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "not_found")
        slash = await client.get("/api/v1/tasks/")
        assert slash.status_code == 404
        method = await client.patch("/api/v1/tasks")
        assert method.status_code == 405
        assert method.headers["allow"] == "GET, POST"
        assert "error" in method.json()

    world.run(ask)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=1e400", "state=SLEEPING", "cursor=x", "limit=99999999999999999999999"]
)
def test_query_errors_are_ours_and_name_the_parameter(world: World, query: str) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        answer = await client.get(f"/api/v1/tasks?{query}")
        assert answer.status_code == 422
        assert answer.json()["error"]["field"] == query.partition("=")[0]

    world.run(ask)


def test_request_ids_are_kept_only_when_harmless(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        for given in ("ok.1-2_3", "x" * 65, "a b", "é"):
            answer = await client.get("/api/v1/health", headers=[("X-Request-Id", given.encode())])
            assert (answer.headers["x-request-id"] == given) == (given == "ok.1-2_3")

    world.run(ask)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("out/model.pt", 'attachment; filename="model.pt"'),
        ('a"b\r\nX: 1.txt', "attachment; filename=\"a_b__X_ 1.txt\"; filename*=UTF-8''a%22b%0D%0AX%3A%201.txt"),
        ("ü.bin", "attachment; filename=\"_.bin\"; filename*=UTF-8''%C3%BC.bin"),
        ("...", "attachment; filename=\"download\"; filename*=UTF-8''..."),
    ],
)
def test_attachment_names_cannot_break_the_header(name: str, header: str) -> None:
    assert attachment(name) == header


def test_storage_full_says_nothing_was_changed() -> None:
    assert issubclass(StorageFull, DiamondError) and StorageFull.transient
    assert asyncio.iscoroutinefunction(tasks_api.create_task) is False
