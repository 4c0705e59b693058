"""Routes of a task's log: bytes by offset (with a long poll) and a live stream of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from diamond.core.errors import InvalidInput, NotFound, RateLimited
from diamond.core.states import TaskState
from diamond.server import sse
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import MAX_CURSOR, Server, User
from diamond.server.runtime import MAX_WAIT_S, Runtime
from diamond.server.services import attempts
from diamond.server.services.context import Context

router = APIRouter(prefix="/api/v1", tags=["logs"])
MAX_READ_BYTES = 8 * 1024 * 1024
_STREAM_BYTES = 256 * 1024

Attempt = Annotated[int | None, Query(ge=0, le=10**9, description="Which attempt; the newest when 0 or left out.")]
Offset = Annotated[int, Query(ge=0, le=MAX_CURSOR, description="First byte wanted.")]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some of a log, and what is known of the job that writes it. `eof`: the job ended and no byte follows."""

    data: bytes
    offset: int
    next_offset: int
    dropped: int
    attempt: int  # 0: no job yet
    newest: int
    eof: bool
    behind: bool  # there are more bytes after these already
    state: TaskState


def _read(
    ctx: Context, user: str, task_id: str, attempt: int | None, offset: int, limit: int, tail: int | None = None
) -> _Piece:
    # State before bytes: an agent reports a final state only after its last bytes, so bytes read after a final state
    # are all there will ever be.
    found = attempts.find(ctx, user, task_id, attempt)
    if not found.job_id:
        return _Piece(
            data=b"", offset=0, next_offset=0, dropped=0, attempt=0, newest=found.newest,
            eof=found.task_state.is_final, behind=False, state=found.task_state,
        )  # fmt: skip
    size = ctx.streams.size(found.job_id, "log")
    if tail is not None:
        piece = ctx.streams.read_tail(found.job_id, "log", min(tail, limit))
    else:
        # An offset beyond the newest attempt's log was meant for the attempt before it.
        begin = 0 if attempt is None and offset > size else offset
        piece = ctx.streams.read(found.job_id, "log", begin, limit)
    return _Piece(
        data=piece.data, offset=piece.offset, next_offset=piece.next_offset, dropped=piece.dropped,
        attempt=found.number, newest=found.newest, eof=found.job_state.is_final and piece.next_offset >= size,
        behind=piece.next_offset < size, state=found.task_state,
    )  # fmt: skip


@router.get(
    "/tasks/{task_id}/logs",
    summary="Read a log",
    description="Raw bytes from `offset` on. The headers say where they lie (`Diamond-Offset`, `Diamond-Next-Offset`), "
    "how many in between are no longer held (`Diamond-Dropped`), of which attempt they are (`Diamond-Attempt`, 0 "
    "before the first), whether the job ended and nothing follows (`Diamond-Eof: 1`), and the state of the task "
    "(`Diamond-Task-State`). With `wait_s`, waits for bytes, the end, or a newer attempt. To follow, pass `attempt` "
    "and the last `Diamond-Next-Offset`.",
    responses=returns("application/octet-stream", "Bytes of the log.") | USER_FAILS | fails(NotFound),
)
async def read_log(
    request: Request,
    user: User,
    server: Server,
    task_id: str,
    attempt: Attempt = None,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_READ_BYTES, description="Most bytes wanted.")] = 1024 * 1024,
    tail: Annotated[int | None, Query(ge=0, le=MAX_READ_BYTES, description="The last so many bytes instead.")] = None,
    wait_s: Annotated[float, Query(ge=0, description=f"Seconds to wait for news, at most {MAX_WAIT_S:.0f}.")] = 0,
) -> Response:
    attempt = attempt or None
    first_seen: list[int] = []

    async def look() -> tuple[_Piece, bool]:
        piece = await server.looks.look(_read, server.ctx, user, task_id, attempt, offset, limit, tail)
        first_seen.append(piece.newest)
        moved_on = piece.newest != first_seen[0] or (attempt is not None and piece.newest > attempt)
        return piece, bool(piece.data or piece.dropped or piece.eof or moved_on)

    piece = await server.long_poll(request, (f"task:{task_id}",), wait_s, look)
    headers = {
        "Diamond-Offset": str(piece.offset),
        "Diamond-Next-Offset": str(piece.next_offset),
        "Diamond-Dropped": str(piece.dropped),
        "Diamond-Attempt": str(piece.attempt),
        "Diamond-Eof": "1" if piece.eof else "0",
        "Diamond-Task-State": piece.state.value,
    }
    return Response(piece.data, media_type="application/octet-stream", headers=headers)


@router.get(
    "/tasks/{task_id}/logs/stream",
    summary="Follow a log",
    description="Server-sent events. `hello` {epoch}; `attempt` {attempt} when one begins; `log` {attempt, offset, "
    "next_offset, text} with UTF-8 split only between characters; `end` {state}. Without `attempt`, retries are "
    "followed until the task ends. Ids are `<attempt>:<next offset>`; a client that reconnects with `Last-Event-ID` "
    "misses and repeats nothing.",
    responses=returns("text/event-stream", "The stream.") | USER_FAILS | fails(NotFound, RateLimited),
)
async def stream_log(
    request: Request,
    user: User,
    server: Server,
    task_id: str,
    attempt: Attempt = None,
    offset: Offset = 0,
    last_event_id: Annotated[str | None, Header(description="`<attempt>:<offset>` to go on from.")] = None,
) -> Response:
    attempt = attempt or None
    at_attempt, at_offset = attempt, offset
    if last_event_id:
        at_attempt, at_offset = _resume(last_event_id, attempt)
    # Once before answering, so that an unknown task is a 404 and not a stream that breaks.
    await server.looks.look(attempts.find, server.ctx, user, task_id, at_attempt)
    server.open_streams.check(user)
    return sse.EventStream(_frames(request, server, user, task_id, at_attempt, at_offset, follow=attempt is None))


def _resume(text: str, attempt: int | None) -> tuple[int | None, int]:
    before, colon, after = text.strip().rpartition(":")
    if not after.isdecimal() or len(after) > 18 or (colon and not (before.isdecimal() and len(before) < 10)):
        raise InvalidInput(f"{text[:40]!r} is not an event id of this stream", field="Last-Event-ID")
    found = (int(before) or None) if colon else attempt
    return (attempt or found), (int(after) if attempt in (None, found) else 0)


async def _frames(
    request: Request, server: Runtime, user: str, task_id: str, attempt: int | None, offset: int, *, follow: bool
) -> AsyncGenerator[bytes, None]:
    with server.open_streams.one_more(user), server.following(request, f"task:{task_id}") as subscription:
        yield sse.frame({"epoch": server.ctx.epoch}, event="hello")
        announced: int | None = None
        while not server.hub.closing:
            await server.still_welcome(request)
            piece = await server.looks.look(_read, server.ctx, user, task_id, attempt, offset, _STREAM_BYTES)
            if piece.attempt and attempt is None:
                attempt, offset = piece.attempt, piece.offset
            if piece.attempt and piece.attempt != announced:
                announced = piece.attempt
                yield sse.frame({"attempt": announced}, event="attempt")
            text, used = sse.whole_characters(piece.data, last=piece.eof)
            if piece.behind and piece.data and not used:
                # A hole follows half a character: the rest of it will never come.
                text, used = sse.whole_characters(piece.data, last=True)
            if used or piece.dropped:
                offset = piece.next_offset - (len(piece.data) - used)
                shown = {"attempt": announced, "offset": piece.offset, "next_offset": offset, "text": text}
                yield sse.frame(shown, event="log", event_id=f"{announced}:{offset}")
            if piece.behind:
                continue
            if piece.eof:
                if follow and piece.newest > piece.attempt:
                    attempt, offset = piece.attempt + 1, 0
                    continue
                if not follow or piece.state.is_final:
                    yield sse.frame({"state": piece.state.value}, event="end")
                    return
            if await subscription.wait(min(sse.HEARTBEAT_S, server.hub.recheck_s)):
                await asyncio.sleep(sse.SETTLE_S)
            else:
                yield sse.HEARTBEAT
