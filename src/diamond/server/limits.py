"""How large a request body may be, and how slow: checked by its announced length and again while it arrives.

Owns the limits middleware. Must not look into bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diamond.core.errors import DiamondError, TooLarge, TooSlow
from diamond.core.shells import MAX_CHUNK_BYTES

_STREAMED = re.compile(r"/api/v1/blobs/|/images/import$")  # written to disk as it arrives
# Lists of up to core.bundles.MAX_FILES files, of some 250 bytes each and more where paths are long.
_MANIFESTS = ("/api/v1/bundles", "/api/v1/blobs/missing")
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_SHELLS = re.compile(r"/api/v1/(agent/)?shells/[^/]+/(input|output)")
_REPORTS = "/api/v1/agent/reports"
_HELLO = "/api/v1/agent/hello"
MAX_HELLO_BYTES = 4 * 1024 * 1024  # of which no more than `core.bounds.MAX_ENTRIES` things are kept
_ENROLMENT = (
    "/api/v1/enrolment",
    "/api/v1/logins",
    "/api/v1/logins/poll",
    "/api/v1/setup",
    "/api/v1/invitations/accept",
    "/api/v1/reset",
)  # anybody may ask there
MAX_ENROLMENT_BYTES = 16 * 1024
# Pages that take files. Twice what they accept, so that who sends too much is told how much was allowed.
_WITH_FILES = ("/compose", "/compose/import")
_DRAFTED = re.compile(r"/image-builder/[^/]+/dependencies")
MAX_WITH_FILES_BYTES = 64 * 1024 * 1024
_DRAIN_FACTOR = 4
_DRAIN_S = 5.0
SLOWEST_BYTES_PER_S = 4096  # a line on which Diamond is no use


class BodyLimit:
    """Answers 413 to a body over the limit of its route, and 408 to one that does not come."""

    def __init__(
        self, app: ASGIApp, *, max_json_bytes: int, max_report_bytes: int, body_timeout_s: float = 60.0
    ) -> None:
        self._app = app
        self._max_json_bytes = max_json_bytes
        self._max_report_bytes = max_report_bytes
        self._body_timeout_s = body_timeout_s

    def limit_for(self, path: str) -> int | None:
        if path == _REPORTS:
            return self._max_report_bytes
        if path == _HELLO:
            return MAX_HELLO_BYTES
        if path in _ENROLMENT:
            return MAX_ENROLMENT_BYTES
        if path in _MANIFESTS:
            return MAX_MANIFEST_BYTES
        if path in _WITH_FILES or _DRAFTED.fullmatch(path):
            return MAX_WITH_FILES_BYTES
        if _STREAMED.match(path):
            return None
        if _SHELLS.fullmatch(path):
            return MAX_CHUNK_BYTES
        return self._max_json_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit = self.limit_for(scope["path"])
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        if limit is not None and announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
            # A client that asked first has sent nothing yet. Any other is still writing and may not read our answer
            # before it is done, so take in some more of it.
            if headers.get("expect", "").lower() != "100-continue":
                await drain(receive, limit * _DRAIN_FACTOR)
            return await _refuse(too_large(limit, scope["path"]), send)
        body = _Body(receive, scope["path"], limit, self._body_timeout_s)
        started = False

        async def sender(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start" and body.error is not None:
                # What is left of the body must not be waited for, nor taken for another request.
                MutableHeaders(raw=message.setdefault("headers", []))["Connection"] = "close"
            started = True
            await send(message)

        try:
            await self._app(scope, body.receive, sender)
        except (TooLarge, TooSlow):
            # Normally the application has turned it into an answer by itself.
            if body.error is None or started:
                raise
            await _refuse(body.error, send)


class _Body:
    """A request's body on its way in."""

    def __init__(self, receive: Receive, path: str, limit: int | None, patience_s: float) -> None:
        self.error: DiamondError | None = None
        self._path = path
        self._receive = receive
        self._limit = limit
        self._patience_s = patience_s
        self._received = 0
        self._waited_s = 0.0
        self._ended = False

    async def receive(self) -> Message:
        if self._ended:
            return await self._receive()  # for the client's departure, however long that takes
        message = await self._awaited()
        self._ended = message["type"] != "http.request" or not message.get("more_body")
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._limit is not None and self._received > self._limit:
                self.error = too_large(self._limit, self._path)
                if message.get("more_body"):
                    await drain(self._receive, self._limit * _DRAIN_FACTOR)
                raise self.error
        return message

    async def _awaited(self) -> Message:
        """The next piece. Only waiting counts: our own disk may take its time with what has come."""
        left_s = self._patience_s + self._received / SLOWEST_BYTES_PER_S - self._waited_s
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(left_s, 0)):
                return await self._receive()
        except TimeoutError:
            self._ended = True
            self.error = _too_slow(self._received, self._path)
            raise self.error from None
        finally:
            self._waited_s += time.monotonic() - began


def too_large(limit: int, path: str) -> TooLarge:
    if not path.startswith("/api/"):
        return TooLarge(
            f"what was sent is larger than the {limit / 2**20:.3g} MiB that this page takes",
            hint="go back and send less; `diamond launch` sends files and folders of any size",
        )
    return TooLarge(
        f"the request body is larger than the {limit} bytes allowed here",
        hint="files belong into a bundle (POST /api/v1/bundles), not into a request body",
    )


def _too_slow(received: int, path: str) -> TooSlow:
    if not path.startswith("/api/"):
        return TooSlow(
            f"what you sent did not arrive in time: {received} bytes came",
            hint="go back and send it again, over a better line or with less at once",
        )
    return TooSlow(
        f"the request body did not arrive in time: {received} bytes came",
        hint="send it again over a better line, or in smaller pieces",
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


async def _refuse(error: DiamondError, send: Send) -> None:
    body = json.dumps(error.to_json()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
