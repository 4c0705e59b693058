"""The ASGI application: routes, middlewares, and what runs in the background. Made anew for each server or test."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
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
from diamond.server.api.events import keep_waking
from diamond.server.api.shells import keep_shells
from diamond.server.auth import Authenticator, Failures
from diamond.server.forwarding import FromOthers, ToFirst
from diamond.server.headers import HostCheck, SecurityHeaders
from diamond.server.hub import Hub
from diamond.server.limits import BodyLimit
from diamond.server.logs import RequestLog
from diamond.server.looks import Looks
from diamond.server.notifier import keep_audit_head, keep_notifying
from diamond.server.open_streams import OpenStreams
from diamond.server.prometheus import RequestMetrics, ServerMetrics
from diamond.server.runtime import Runtime
from diamond.server.services import collection, endpoints, image_copies, kept, planning, pools, tasks
from diamond.server.services.context import Context
from diamond.server.services.shells import ShellLimits, ShellTable
from diamond.server.settings import Settings
from diamond.server.store import series
from diamond.server.trust import Trust
from diamond.server.web import PAGES
from diamond.server.web.error_pages import ErrorPages
from diamond.server.workers import Place

log = logging.getLogger("diamond.server")
_LONGEST_PLANNING_PAUSE_S = 60.0
_AFTER_FAILURE_S = 5.0
_SWEEP_EVERY_S = 86_400.0


def create_app(
    ctx: Context, hub: Hub, settings: Settings, trust: Trust | None = None, place: Place | None = None
) -> FastAPI:
    """The application over `ctx`. `hub` must be the one in `ctx`; `trust` is what agents are told about TLS.

    Args:
        place: which of several workers this is; None: the only one.
    """
    metrics = ServerMetrics(lambda: (tasks.counts(ctx), endpoints.counts(ctx)))
    limits = ShellLimits(
        per_task=settings.shells_per_task,
        per_user=settings.shells_per_user,
        per_endpoint=settings.shells_per_endpoint,
        patience_s=settings.shell_patience_s,
        idle_s=settings.shell_idle_s,
    )
    authenticator = Authenticator(ctx, is_told=lambda: hub.connected)
    hub.on("credentials", authenticator.forget)
    runtime = Runtime(
        ctx=ctx,
        hub=hub,
        settings=settings,
        metrics=metrics,
        authenticator=authenticator,
        trust=trust or Trust(),
        failures=Failures(),
        shells=ShellTable(limits, hub.notify),
        open_streams=OpenStreams(per_user=settings.streams_per_user, total=settings.max_streams),
        looks=Looks(in_loop=ctx.db.is_sqlite),
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.threads
        # What is loaded by now stays: no collection needs to walk it again. Requests leave few cycles behind.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        hub.start()
        work = [keep_planning, keep_pools, keep_sweeping, keep_shells, keep_notifying, keep_audit_head]
        background = [
            asyncio.create_task(asyncio.to_thread(series.warm_up)),
            asyncio.create_task(keep_waking(runtime)),
        ]
        if place is None or place.is_first:
            background += [asyncio.create_task(keep(runtime)) for keep in work]
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
            Middleware(SecurityHeaders),
            Middleware(ErrorPages),
            Middleware(RequestLog, slow_s=settings.slow_request_s),
            Middleware(RequestMetrics, metrics=metrics),
            Middleware(HostCheck, settings=settings),
            *_between_workers(settings, place),
            Middleware(
                BodyLimit,
                max_json_bytes=settings.max_json_bytes,
                max_report_bytes=settings.max_report_bytes,
                body_timeout_s=settings.body_timeout_s,
            ),
        ],
    )
    app.state.runtime = runtime
    for router in (*ROUTERS, *PAGES):
        app.include_router(router)
    app.state.routes = [route for router in (*ROUTERS, *PAGES) for route in router.routes]

    async def openapi(_request: Request) -> Response:
        return Json(document(app))

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    return app


def _between_workers(settings: Settings, place: Place | None) -> list[Middleware]:
    if place is None:
        return []
    if place.is_first:
        return [Middleware(FromOthers, key=place.key)]
    return [Middleware(ToFirst, socket_path=place.first_path, key=place.key, has_tls=settings.has_tls)]


async def _gone(_request: Request, _error: Exception) -> Response:
    """The client hung up while sending: nobody reads this answer, and it is nobody's mistake."""
    return Response(status_code=499)


async def keep_planning(runtime: Runtime) -> None:
    """Place what is due, now and whenever something changes."""
    await _keep_at(runtime, "planning", planning.run_due, least_pause_s=0.05)


async def keep_pools(runtime: Runtime) -> None:
    """Rounds of all pools, now and whenever something changes in one."""
    await _keep_at(runtime, "pools", pools.run_rounds, least_pause_s=0.2)


async def _keep_at(
    runtime: Runtime, topic: str, work: Callable[[Context], float | None], *, least_pause_s: float
) -> None:
    """Do it again when it said it is due (None: when something changes), and whenever the topic is woken."""
    hub, clock = runtime.hub, runtime.ctx.clock
    with hub.subscribe(topic) as subscription:
        while not hub.closing:
            try:
                due = await run_in_threadpool(work, runtime.ctx)
                pause_s = _LONGEST_PLANNING_PAUSE_S if due is None else due - clock()
            except Exception:
                # Whatever it was, tasks must go on being placed once it is mended.
                log.exception("%s failed; trying again in %.0f s", topic, _AFTER_FAILURE_S)
                pause_s = _AFTER_FAILURE_S
            await subscription.wait(min(max(pause_s, least_pause_s), _LONGEST_PLANNING_PAUSE_S))


async def keep_sweeping(runtime: Runtime) -> None:
    """Remove what nothing refers to, uploads nobody finished and copies of images nobody fetches, once a day."""
    older_than_s = runtime.settings.partial_upload_days * 86_400
    with runtime.hub.subscribe() as subscription:
        while not runtime.hub.closing:
            try:
                # First: it finishes what it was killed in, of which the others see but files.
                gone = await run_in_threadpool(collection.collect, runtime.ctx, older_than_s)
                if gone.blobs:
                    log.info("removed %d files that nothing refers to, %d bytes", gone.blobs, gone.num_bytes)
            except Exception:
                # Whatever it was, it must not end the sweeping; what was not removed is only waste.
                log.exception("collecting files failed; trying again tomorrow")
            with suppress(OSError, DiamondError):
                swept = await run_in_threadpool(runtime.ctx.blobs.sweep_partials, older_than_s)
                if swept:
                    log.info("removed %d unfinished uploads", swept)
                payloads = await run_in_threadpool(image_copies.sweep_payloads, runtime.ctx)
                if payloads:
                    log.info("removed %d images' payloads that nobody fetched", payloads)
            try:
                if mended := await run_in_threadpool(kept.recount, runtime.ctx):
                    log.info("counted anew what the logs and curves of %d jobs take", mended)
            except Exception:
                log.exception("counting what is stored failed; trying again tomorrow")
            await subscription.wait(_SWEEP_EVERY_S)
