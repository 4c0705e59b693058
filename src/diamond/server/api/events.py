"""Routes of events: a page after a cursor (with a long poll) and a live stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from diamond.core.errors import InvalidInput, NotFound, RateLimited
from diamond.core.events import Event
from diamond.server import sse
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import MAX_CURSOR, Server, User
from diamond.server.api.schemas import EventPage
from diamond.server.runtime import MAX_WAIT_S, Runtime
from diamond.server.services import attempts, events

log = logging.getLogger("diamond.server")
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
    return await _page(request, server, user, events.topic_of(user), None, since, limit, wait_s)


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
    await server.looks.look(attempts.find, server.ctx, user, task_id)
    return await _page(request, server, user, f"task:{task_id}", task_id, since, limit, wait_s)


async def keep_waking(server: Runtime) -> None:
    """Wake those whose events came: of many who follow theirs, each looks only when there is something to see."""
    seq = -1
    with server.hub.subscribe("events") as subscription:
        while not server.hub.closing:
            try:
                if seq < 0:
                    seq = await server.looks.look(events.newest, server.ctx)
                owners, seq = await server.looks.look(events.owners_since, server.ctx, seq)
                server.hub.wake_here(*map(events.topic_of, owners))
            except Exception:
                # Followers look again by themselves now and then; this goes on when the database does.
                log.exception("looking for events failed")
            if await subscription.wait(server.hub.recheck_s):
                await asyncio.sleep(sse.SETTLE_S)


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
        found = await server.looks.look(events.since, server.ctx, user, since, task_id=task_id, limit=limit)
        return found, bool(found)

    found = await server.long_poll(request, (topic,), wait_s, look)
    return Json(EventPage(events=found, cursor=found[-1].seq if found else since, epoch=server.ctx.epoch))


@router.get(
    "/events/stream",
    summary="Follow events",
    description="Server-sent events: `hello` {epoch} first, then one unnamed message per event, its id being the "
    "event's number. `Last-Event-ID` wins over `since`.",
    responses=returns("text/event-stream", "The stream.") | USER_FAILS | fails(RateLimited),
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
    server.open_streams.check(user)
    return sse.EventStream(_frames(request, server, user, since))


async def _frames(request: Request, server: Runtime, user: str, since: int) -> AsyncGenerator[bytes, None]:
    with server.open_streams.one_more(user), server.following(request, events.topic_of(user)) as subscription:
        yield sse.frame({"epoch": server.ctx.epoch}, event="hello")
        while not server.hub.closing:
            await server.still_welcome(request)
            found = await server.looks.look(events.since, server.ctx, user, since, limit=_PAGE)
            if found:
                since = found[-1].seq
                yield b"".join(sse.frame(event, event_id=str(event.seq)) for event in found)
            if len(found) == _PAGE:
                continue
            if await subscription.wait(min(sse.HEARTBEAT_S, server.hub.recheck_s)):
                await asyncio.sleep(sse.SETTLE_S)
            else:
                yield sse.HEARTBEAT
