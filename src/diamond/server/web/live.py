"""GET /live: tells an open page when to look again. Carries no data: what changed, the page asks for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import InvalidInput
from diamond.server import sse
from diamond.server.runtime import Runtime
from diamond.server.services import attempts, events, images, pools
from diamond.server.services.context import Context
from diamond.server.web.forms import Visitor
from diamond.server.web.pages import page_router

router = page_router()
_MAX_TOPICS = 20
# A page looks again at most this often, however much happens: what people see changes no faster.
_REST_S = 0.4


@router.get("/live")
async def live(
    request: Request,
    who: Visitor,
    topic: Annotated[list[str], Query(max_length=_MAX_TOPICS)] = [],  # noqa: B006
    made: Annotated[float, Query(description="When what is shown was looked up.")] = 0.0,
) -> Response:
    """Server-sent events: `hello`, then `change` whenever something the page shows may have changed: at once, if it
    did since the page was `made`.

    Topics: `events` (whatever is mine), `task:ID`, `image:ID`, `pools`, `pool:ID`.
    """
    server: Runtime = request.app.state.runtime
    assert who.user_id is not None
    topics = await run_in_threadpool(_checked, server.ctx, who.user_id, topic)
    server.open_streams.check(who.user_id)
    return sse.EventStream(_frames(request, server, who.user_id, topics, made))


def _checked(ctx: Context, user_id: str, asked: list[str]) -> list[str]:
    """Hub topics; what somebody may not see cannot be waited for."""
    found = []
    for topic in asked:
        kind, _, key = topic.partition(":")
        if topic == "events":
            found.append(events.topic_of(user_id))
        elif kind == "task":
            attempts.find(ctx, user_id, key)  # raises NotFound for what is not theirs to see
            found.append(topic)
        elif kind == "image":
            found.append(f"image:{images.get(ctx, user_id, key).id}")
        elif topic == "pools":
            found.append(topic)
        elif kind == "pool":
            with ctx.db.read() as session:
                found.append(f"pool:{pools.find(session, user_id, key).id}")
        else:
            raise InvalidInput(
                f"{topic[:60]!r} is nothing to wait for",
                hint="events, task:ID, image:ID, pools or pool:ID",
                field="topic",
            )
    return found


async def _frames(
    request: Request, server: Runtime, user_id: str, topics: list[str], made: float
) -> AsyncGenerator[bytes, None]:
    with server.open_streams.one_more(user_id), server.following(request, *topics) as subscription:
        yield sse.frame({"epoch": server.ctx.epoch}, event="hello")
        if server.hub.told_since(made, *topics):
            yield sse.frame({}, event="change")
        while not server.hub.closing:
            await server.still_welcome(request)
            if await subscription.wait(sse.HEARTBEAT_S):
                await server.still_welcome(request)
                yield sse.frame({}, event="change")
                await asyncio.sleep(_REST_S)  # what comes meanwhile is told at the end of it
            else:
                yield sse.HEARTBEAT
