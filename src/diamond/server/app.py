"""The ASGI application: routes, middlewares, and what runs in the background. Made anew for each server or test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio.to_thread
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from diamond.core.errors import DiamondError
from diamond.server.api import ROUTERS
from diamond.server.api.answers import ERROR_HANDLERS, Json
from diamond.server.api.documents import document
from diamond.server.api.runtime import Runtime
from diamond.server.api.shells import keep_shells
from diamond.server.auth import Authenticator, Failures
from diamond.server.hub import Hub
from diamond.server.limits import BodyLimit
from diamond.server.logs import RequestLog
from diamond.server.prometheus import RequestMetrics, ServerMetrics
from diamond.server.services import endpoints, image_copies, planning, tasks
from diamond.server.services.context import Context
from diamond.server.services.shells import ShellLimits, ShellTable
from diamond.server.settings import Settings
from diamond.server.store import series
from diamond.server.trust import Trust
from diamond.server.web import landing

log = logging.getLogger("diamond.server")
_LONGEST_PLANNING_PAUSE_S = 60.0
_AFTER_FAILURE_S = 5.0
_SWEEP_EVERY_S = 86_400.0


def create_app(ctx: Context, hub: Hub, settings: Settings, trust: Trust | None = None) -> FastAPI:
    """The application over `ctx`. `hub` must be the one in `ctx`; `trust` is what agents are told about TLS."""
    metrics = ServerMetrics(lambda: (tasks.counts(ctx), endpoints.counts(ctx)))
    limits = ShellLimits(
        per_task=settings.shells_per_task,
        per_user=settings.shells_per_user,
        per_endpoint=settings.shells_per_endpoint,
        patience_s=settings.shell_patience_s,
        idle_s=settings.shell_idle_s,
    )
    runtime = Runtime(
        ctx=ctx,
        hub=hub,
        settings=settings,
        metrics=metrics,
        authenticator=Authenticator(ctx),
        trust=trust or Trust(),
        failures=Failures(),
        shells=ShellTable(limits, hub.notify),
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.threads
        hub.start()
        background = [
            asyncio.create_task(keep_planning(runtime)),
            asyncio.create_task(keep_sweeping(runtime)),
            asyncio.create_task(keep_shells(runtime)),
            asyncio.create_task(asyncio.to_thread(series.warm_up)),
        ]
        try:
            yield
        finally:
            hub.close()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await asyncio.to_thread(hub.stop)

    app = FastAPI(
        title="Diamond",
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from a CDN
        redoc_url=None,
        openapi_url=None,  # served below with our own answer class
        redirect_slashes=False,
        exception_handlers={**ERROR_HANDLERS, ClientDisconnect: _gone},
        middleware=[
            Middleware(RequestLog, slow_s=settings.slow_request_s),
            Middleware(RequestMetrics, metrics=metrics),
            Middleware(BodyLimit, max_json_bytes=settings.max_json_bytes, max_report_bytes=settings.max_report_bytes),
        ],
    )
    app.state.runtime = runtime
    for router in (*ROUTERS, landing.router):
        app.include_router(router)
    app.state.routes = [route for router in (*ROUTERS, landing.router) for route in router.routes]

    async def openapi(_request: Request) -> Response:
        return Json(document(app))

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    return app


async def _gone(_request: Request, _error: Exception) -> Response:
    """The client hung up while sending: nobody reads this answer, and it is nobody's mistake."""
    return Response(status_code=499)


async def keep_planning(runtime: Runtime) -> None:
    """Place what is due, now and whenever something changes."""
    hub, clock = runtime.hub, runtime.ctx.clock
    with hub.subscribe("planning") as subscription:
        while not hub.closing:
            try:
                due = await run_in_threadpool(planning.run_due, runtime.ctx)
                pause_s = _LONGEST_PLANNING_PAUSE_S if due is None else due - clock()
            except Exception:
                # Whatever it was, tasks must go on being placed once it is mended.
                log.exception("planning failed; trying again in %.0f s", _AFTER_FAILURE_S)
                pause_s = _AFTER_FAILURE_S
            await subscription.wait(min(max(pause_s, 0.05), _LONGEST_PLANNING_PAUSE_S))


async def keep_sweeping(runtime: Runtime) -> None:
    """Remove uploads nobody finished and copies of images nobody fetches, once a day."""
    older_than_s = runtime.settings.partial_upload_days * 86_400
    with runtime.hub.subscribe() as subscription:
        while not runtime.hub.closing:
            with suppress(OSError, DiamondError):
                swept = await run_in_threadpool(runtime.ctx.blobs.sweep_partials, older_than_s)
                if swept:
                    log.info("removed %d unfinished uploads", swept)
                payloads = await run_in_threadpool(image_copies.sweep_payloads, runtime.ctx)
                if payloads:
                    log.info("removed %d images' payloads that nobody fetched", payloads)
            await subscription.wait(_SWEEP_EVERY_S)
