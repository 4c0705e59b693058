"""A whole server in this process, over real services and SQLite, reached without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from diamond.core.endpoints import EndpointFacts
from diamond.core.states import JobState
from diamond.core.wire import Hello, JobReport, Report, StreamChunk
from diamond.server.app import create_app
from diamond.server.hub import Hub
from diamond.server.main import make_context, open_database
from diamond.server.services import agents, bootstrap, endpoints, tokens
from diamond.server.services.context import Context
from diamond.server.settings import Settings, load_settings
from testing import schema


@dataclass
class World:
    """A server with one user and one endpoint whose agent has said hello."""

    app: FastAPI
    ctx: Context
    hub: Hub
    settings: Settings
    user_token: str
    user_id: str
    agent_token: str
    endpoint_id: str

    def client(self, token: str | None = None) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.user_token if token is None else token}"} if token != "" else {}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=30)

    def run(self, test: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        """Run an async test against the application, background work included."""

        async def whole() -> Any:
            async with self.app.router.lifespan_context(self.app), self.client() as client:
                return await test(client)

        return asyncio.run(whole())

    def report(
        self, job_id: str, *, state: JobState | None = None, log: bytes = b"", offset: int = 0, **job: Any
    ) -> None:
        """Do what the agent would."""
        jobs = (JobReport(job_id=job_id, state=state, **job),) if state else ()
        streams = (StreamChunk.of(job_id, "log", offset, log),) if log else ()
        agents.report(self.ctx, self.endpoint_id, Report(epoch=self.ctx.epoch, jobs=jobs, streams=streams))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in ("DIAMOND_URL", "DIAMOND_TOKEN", "DIAMOND_HOME"):
        monkeypatch.delenv(name, raising=False)
    settings = load_settings(home=tmp_path / "home", sqlite_synchronous="OFF", max_json_bytes=64 * 1024)
    settings.home_dir.make()
    settings.home_dir.server.mkdir()
    database = open_database(settings)
    schema.give(database)
    hub = Hub()
    ctx = make_context(settings, database, hub)
    user_token = bootstrap.prepare(ctx, embedded=None).user_token
    user_id = tokens.authenticate(ctx, user_token).user_id
    assert user_id
    endpoint, agent_token = endpoints.create(ctx, user_id, "here")
    agents.hello(
        ctx, endpoint.id, Hello(facts=EndpointFacts(scheduler="local", cpus_per_node=8, mem_bytes_per_node=2**34))
    )
    yield World(
        app=create_app(ctx, hub, settings),
        ctx=ctx,
        hub=hub,
        settings=settings,
        user_token=user_token,
        user_id=user_id,
        agent_token=agent_token,
        endpoint_id=endpoint.id,
    )
    database.close()


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Puts pytest's own handlers back; keeps the test's own client quiet."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.getLogger("httpx").setLevel(logging.WARNING)
    yield
    logging.getLogger("httpx").setLevel(logging.NOTSET)
    logging.getLogger("diamond").setLevel(logging.NOTSET)
    root.handlers[:] = handlers
    root.setLevel(level)


async def launch(client: httpx.AsyncClient, **spec: Any) -> dict[str, Any]:
    answer = await client.post("/api/v1/tasks", json={"spec": {"run": "echo hi", **spec}})
    assert answer.status_code == 201, answer.text
    task: dict[str, Any] = answer.json()
    return task
