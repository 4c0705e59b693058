"""Where one server process must do something for all: requests about it are handed to the first one.

Shells live in a process's memory, and so do the counts of wrong passwords and codes. The first worker keeps them; the
others pass on what concerns them, through a socket in a folder only this account can enter.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diamond.core.errors import Unavailable
from diamond.server.api.answers import error_answer

log = logging.getLogger("diamond.server")
# Shells and who is told of them; and every way to try a password or a code.
_FIRST = re.compile(
    r"/api/v1/((agent/)?shells(/.*)?|tasks/[^/]+/shells|agent/desired|enrolment|setup|reset|logins(/.*)?"
    r"|invitations/accept|me/password)"
    r"|/(sign-in|setup|invitation|reset|device|account)(/.*)?|/settings/(password|identities/.*)",
    re.DOTALL,
)
_FROM = "diamond-forwarded-from"
_SCHEME = "diamond-forwarded-scheme"
_KEY = "diamond-forwarded-key"
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "proxy-connection"}
)
_CONNECT_S = 10.0


class ToFirst:
    """Of every worker but the first: hands some requests on.

    Through the bare transport: a client would keep cookies that pass through, and send them along with the next
    person's request.
    """

    def __init__(self, app: ASGIApp, *, socket_path: str, key: str, has_tls: bool) -> None:
        self._app = app
        self._key = key
        self._scheme = "https" if has_tls else "http"
        # As many connections as there are long polls; nothing here limits how long an answer may take.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        # The socket's folder says who is at its other end; the certificate is for other names.
        self._transport = httpx.AsyncHTTPTransport(uds=socket_path, limits=limits, retries=2, verify=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _FIRST.fullmatch(scope["path"]):
            return await self._app(scope, receive, send)
        scope["diamond.waits"] = True  # counted where it is done
        has_begun = False

        async def sender(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._relay(scope, receive, sender)
        except Exception as error:
            # The first worker is gone, or the client sent less than it announced; nobody's request may end in a trace.
            log.debug("a request could not be handed on: %r", error)
            if not has_begun:
                answer = Unavailable("a part of the server did not answer", hint="try again in a moment")
                await error_answer(answer)(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        body_ended = asyncio.Event()
        has_body = _has_body(scope)
        request = httpx.Request(
            scope["method"],
            httpx.URL(f"{self._scheme}://first", raw_path=scope.get("raw_path", b"") + _query(scope)),
            headers=self._passed_on(scope),
            content=_body(receive, body_ended) if has_body else None,
            extensions={"timeout": {"connect": _CONNECT_S}},
        )
        if not has_body:
            body_ended.set()
        leaving = asyncio.create_task(_departure(receive, body_ended))
        answering = asyncio.create_task(self._transport.handle_async_request(request))
        try:
            await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return  # the client left; nobody reads the answer
            response = answering.result()
            try:
                headers = [
                    (key.lower(), value)
                    for key, value in response.headers.raw
                    if key.decode("latin-1").lower() not in _HOP_BY_HOP
                ]
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await response.aclose()
        finally:
            for task in (leaving, answering):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    def _passed_on(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        dropped = _HOP_BY_HOP | {_FROM, _SCHEME, _KEY, "content-length", "expect"}
        kept = [(key, value) for key, value in scope["headers"] if key.decode("latin-1").lower() not in dropped]
        if length := Headers(scope=scope).get("content-length"):
            kept.append((b"content-length", length.encode("latin-1")))
        address = scope["client"][0] if scope.get("client") else ""
        said = {_FROM: address, _SCHEME: scope["scheme"], _KEY: self._key}
        return [*kept, *((name.encode(), value.encode("latin-1")) for name, value in said.items())]


class FromOthers:
    """Of the first worker: a request another one handed on is treated as if it had come here.

    Another one is known by a key that the supervisor made for this start; that a connection has no address proves
    nothing, since one that was reset early has none either.
    """

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            given = headers.get(_KEY, "").encode("latin-1")
            ours = {_FROM, _SCHEME, _KEY}
            if ours & set(headers.keys()):
                kept = [(key, value) for key, value in scope["headers"] if key.decode("latin-1").lower() not in ours]
                scope = {**scope, "headers": kept}
            if hmac.compare_digest(given, self._key):
                origin = headers.get(_FROM, "")
                scope["client"] = (origin, 0) if origin else None
                scope["scheme"] = headers.get(_SCHEME, "http")
        await self._app(scope, receive, send)


def _query(scope: Scope) -> bytes:
    raw: bytes = scope.get("query_string", b"")
    return b"?" + raw if raw else b""


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def _body(receive: Receive, ended: asyncio.Event) -> AsyncIterator[bytes]:
    try:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            yield message.get("body", b"")
            if not message.get("more_body"):
                return
    finally:
        ended.set()


async def _departure(receive: Receive, body_ended: asyncio.Event) -> None:
    """Returns when the client has gone."""
    await body_ended.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
