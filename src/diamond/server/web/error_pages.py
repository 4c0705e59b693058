"""Errors that no page of ours turned into an answer, for a person: what was too large, too slow or went wrong.

Such answers are made by whoever meets the error first, middlewares among them, as JSON for programs. A browser that
asks for a page gets one with the same words instead. Must not decide what an error is.
"""

from __future__ import annotations

import json
import logging

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diamond.core.errors import DiamondError, error_from_json
from diamond.server.web.pages import nothing_here, problem_page

log = logging.getLogger("diamond.server")
_MAX_BYTES = 64 * 1024  # no error of ours is as long
# What the answer says of itself, and not of what it holds, goes along.
_ABOUT_THE_OLD = (b"content-type", b"content-length", b"content-encoding")


class ErrorPages:
    """Outside of everything that answers with errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not wants_page(scope):
            return await self._app(scope, receive, send)
        begun: Message | None = None
        body = bytearray()

        async def sender(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and _is_error(message):
                begun = message
                return
            if begun is None:
                return await send(message)
            body.extend(message.get("body", b"")[: _MAX_BYTES + 1 - len(body)])
            if message.get("more_body"):
                return
            first = begun
            begun = None
            page = _page(scope, first, bytes(body))
            if page is None:
                await send(first)
                return await send({"type": "http.response.body", "body": bytes(body)})
            await page(scope, receive, send)

        await self._app(scope, receive, sender)


def wants_page(scope: Scope) -> bool:
    """Whether a person's browser asks, and not a program, nor a script of a page."""
    if scope["path"].startswith("/api/") or scope["method"] == "HEAD":
        return False
    return "text/html" in Headers(scope=scope).get("accept", "")


def _is_error(message: Message) -> bool:
    kind = Headers(raw=message.get("headers", [])).get("content-type", "")
    return message["status"] >= 400 and kind.partition(";")[0].strip() == "application/json"


def _page(scope: Scope, first: Message, body: bytes) -> Response | None:
    """None where there is none to be made: then the answer goes as it is."""
    request = Request(scope)
    try:
        error = error_from_json(json.loads(body))
        page = nothing_here(request) if first["status"] == 404 else problem_page(request, _for_people(error, first))
    except Exception:
        # Whatever made the first answer an error may break this one too.
        log.exception("no page could be made of an error")
        return None
    page.status_code = first["status"]
    known = {name for name, _ in page.raw_headers}
    page.raw_headers += [
        (name, value) for name, value in first["headers"] if name not in known and name not in _ABOUT_THE_OLD
    ]
    return page


def _for_people(error: DiamondError, first: Message) -> DiamondError:
    if first["status"] == 405:
        return type(error)("this address takes no such form", hint="go back, reload the page and send it again")
    return error
