"""Routes of events: a page after a cursor (with a long poll) and a live stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diamond.core.codec import encode
from diamond.core.errors import InvalidInput, NotFound
from diamond.core.events import Event
from diamond.server.api import sse
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import MAX_CURSOR, MAX_WAIT_S, Runtime, Server, User
from diamond.server.api.schemas import EventPage
from diamond.server.services import events, tasks

router = APIRouter(prefix="/api/v1", tags=["events"])
_PAGE = 500

Since = Annotated[int, Query(ge=0, le=MAX_CURSOR, description="Events after this number.")]
Limit = Annotated[int, Query(ge=1, le=5000, description="Most events wanted.")]
Wait = Annotated[float, Query(ge=0, description=f"Seconds to wait for one, at most {MAX_WAIT_S:.0f}.")]


@router.get(
    "/events",
    summary="Read events",
    description="What happened to anything of yours after `since`, oldest first. With `wait_s`, waits for the first.",
    responses=returns(EventPage, "Events and the next cursor.") | USER_FAILS,
)
async def read_events(
    request: Request, user: User, server: Server, since: Since = 0, limit: Limit = _PAGE, wait_s: Wait = 0
) -> Response:
    return await _page(request, server, user, "events", None, since, limit, wait_s)


@router.get(
    "/tasks/{task_id}/events",
    summary="Read a task's events",
    description="What happened to one task after `since`, oldest first. With `wait_s`, waits for the first.",
    responses=returns(EventPage, "Events and the next cursor.") | USER_FAILS | fails(NotFound),
)
async def read_task_events(
    request: Request,
    user: User,
    server: Server,
    task_id: str,
    since: Since = 0,
    limit: Limit = _PAGE,
    wait_s: Wait = 0,
) -> Response:
    await run_in_threadpool(tasks.find_job, server.ctx, user, task_id)
    return await _page(request, server, user, f"task:{task_id}", task_id, since, limit, wait_s)


async def _page(
    request: Request,
    server: Runtime,
    user: str,
    topic: str,
    task_id: str | None,
    since: int,
    limit: int,
    wait_s: float,
) -> Response:
    async def look() -> tuple[list[Event], bool]:
        found = await run_in_threadpool(events.since, server.ctx, user, since, task_id=task_id, limit=limit)
        return found, bool(found)

    found = await server.long_poll(request, (topic,), wait_s, look)
    return Json(EventPage(events=found, cursor=found[-1].seq if found else since, epoch=server.ctx.epoch))


@router.get(
    "/events/stream",
    summary="Follow events",
    description="Server-sent events: `hello` {epoch} first, then one unnamed message per event, its id being the "
    "event's number. `Last-Event-ID` wins over `since`.",
    responses=returns("text/event-stream", "The stream.") | USER_FAILS,
)
async def stream_events(
    request: Request,
    user: User,
    server: Server,
    since: Since = 0,
    last_event_id: Annotated[str | None, Header(description="Number of the last event seen.")] = None,
) -> Response:
    if last_event_id:
        if not last_event_id.isdecimal() or len(last_event_id) > 18:
            raise InvalidInput(f"{last_event_id[:40]!r} is not an event's number", field="Last-Event-ID")
        since = int(last_event_id)
    return sse.EventStream(_frames(request, server, user, since))


async def _frames(request: Request, server: Runtime, user: str, since: int) -> AsyncGenerator[bytes, None]:
    with server.waiting(request), server.hub.subscribe("events") as subscription:
        yield sse.frame({"epoch": server.ctx.epoch}, event="hello")
        while not server.hub.closing:
            found = await run_in_threadpool(events.since, server.ctx, user, since, limit=_PAGE)
            if found:
                since = found[-1].seq
                yield b"".join(sse.frame(encode(event), event_id=str(event.seq)) for event in found)
            if len(found) == _PAGE:
                continue
            if await subscription.wait(min(sse.HEARTBEAT_S, server.hub.recheck_s)):
                await asyncio.sleep(sse.SETTLE_S)
            else:
                yield sse.HEARTBEAT
