"""How large a request body may be: checked by its announced length and again while it arrives.

Owns the limits middleware. Must not look into bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diamond.core.errors import TooLarge
from diamond.core.shells import MAX_CHUNK_BYTES

_STREAMED = re.compile(r"/api/v1/blobs/")  # written to disk as it arrives
# Lists of up to core.bundles.MAX_FILES files, of some 250 bytes each and more where paths are long.
_MANIFESTS = ("/api/v1/bundles", "/api/v1/blobs/missing")
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_SHELLS = re.compile(r"/api/v1/(agent/)?shells/[^/]+/(input|output)")
_REPORTS = "/api/v1/agent/reports"
_ENROLMENT = "/api/v1/enrolment"  # anybody may ask there
MAX_ENROLMENT_BYTES = 16 * 1024
_DRAIN_FACTOR = 4
_DRAIN_S = 5.0


class BodyLimit:
    """Answers 413 to a body over the limit of its route."""

    def __init__(self, app: ASGIApp, *, max_json_bytes: int, max_report_bytes: int) -> None:
        self._app = app
        self._max_json_bytes = max_json_bytes
        self._max_report_bytes = max_report_bytes

    def limit_for(self, path: str) -> int | None:
        if path == _REPORTS:
            return self._max_report_bytes
        if path == _ENROLMENT:
            return MAX_ENROLMENT_BYTES
        if path in _MANIFESTS:
            return MAX_MANIFEST_BYTES
        if _STREAMED.match(path):
            return None
        if _SHELLS.fullmatch(path):
            return MAX_CHUNK_BYTES
        return self._max_json_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.limit_for(scope["path"]) if scope["type"] == "http" else None
        if limit is None:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
            # A client that asked first has sent nothing yet. Any other is still writing and may not read our answer
            # before it is done, so take in some more of it.
            if headers.get("expect", "").lower() != "100-continue":
                await drain(receive, limit * _DRAIN_FACTOR)
            return await _refuse(limit, send)
        received = 0
        over = False
        started = False

        async def counted() -> Message:
            nonlocal received, over
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    over = True
                    if message.get("more_body"):
                        await drain(receive, limit * _DRAIN_FACTOR)
                    raise too_large(limit)
            return message

        async def sender(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, sender)
        except TooLarge:
            # Normally the application has turned it into an answer by itself.
            if not over or started:
                raise
            await _refuse(limit, send)


def too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the request body is larger than the {limit} bytes allowed here",
        hint="files belong into a bundle (POST /api/v1/bundles), not into a request body",
    )


async def drain(receive: Receive, max_bytes: int) -> None:
    """Take in and forget what a client is still sending, within bounds of size and time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            left = max_bytes
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))


async def _refuse(limit: int, send: Send) -> None:
    error = too_large(limit)
    body = json.dumps(error.to_json()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
