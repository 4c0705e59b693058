"""Server-sent events: framing, the response, and cutting bytes into text at character boundaries."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from diamond.core.errors import DiamondError
from diamond.server.plain import dumps

HEARTBEAT_S = 15.0
HEARTBEAT = b": still here\n\n"
# After a wake-up, wait this long for more to come: a burst of changes becomes one look.
SETTLE_S = 0.02


def frame(data: Any, *, event: str = "", event_id: str = "") -> bytes:
    """One event. JSON has no raw line breaks, so its data is always one line."""
    head = (f"id: {event_id}\n" if event_id else "") + (f"event: {event}\n" if event else "")
    return head.encode() + b"data: " + dumps(data) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of frames that ends when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        # Proxies that collect answers would turn live into late.
        super().__init__(
            _explained(frames), headers={"X-Accel-Buffering": "no", "Cache-Control": "no-store, no-transform"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # From ASGI 2.4 on, Starlette notices a client's departure only when it sends. A quiet stream would outlive
        # its reader, so have it listen for the departure, as it does for older versions.
        older = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        await super().__call__(older, receive, send)


async def _explained(frames: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """An error in a stream that has begun can no longer be a status: it becomes the stream's last event."""
    async with aclosing(frames):
        try:
            async for each in frames:
                yield each
        except DiamondError as error:
            yield frame(error.to_json(), event="error")


def whole_characters(data: bytes, *, last: bool) -> tuple[str, int]:
    """The text of `data` and how many bytes of it were used.

    A UTF-8 character cut off at the end is left for next time unless this is the `last` piece. What is not UTF-8 at all
    becomes U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(data, final=last)
    return text, len(data) - len(decoder.getstate()[0])
