"""What every answer tells a browser not to do, and under which names this server answers at all.

Set on API answers as well: an answer that a browser is made to show as a page must be as harmless as one.
"""

from __future__ import annotations

import json
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diamond.core.errors import DiamondError, Forbidden, InvalidInput, Unavailable
from diamond.server.auth import is_secure, is_within
from diamond.server.hosts import HostNames, host_name
from diamond.server.settings import Settings

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_ALWAYS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Nothing to other sites. Not `no-referrer`: with that, browsers send our own forms with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=(), browsing-topics=()",
    "Cache-Control": "no-store",
}
# Styles and scripts are no pages: these say nothing of them, and come thirteen times with one page.
_OF_PAGES = ("X-Frame-Options", "Cross-Origin-Opener-Policy", "Permissions-Policy", "Referrer-Policy")
_OF_FILES = {name: value for name, value in _ALWAYS.items() if name not in _OF_PAGES}
# Of this name only, not of those below it: they may be others'.
_HSTS = "max-age=31536000"
_MISDIRECTED = 421
_FOR_MACHINES = ("/api/v1/health", "/metrics")  # they say nothing of anybody, and hold no links
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")


class SecurityHeaders:
    """Outermost, so that no answer is without them. What a route sets itself stays."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                wanted = _OF_FILES if scope["path"].startswith("/static/") else _ALWAYS
                for name, value in wanted.items():
                    headers.setdefault(name, value)
                if is_secure(Request(scope)):
                    headers.setdefault("Strict-Transport-Security", _HSTS)
            await send(message)

        await self._app(scope, receive, sender)


class HostCheck:
    """Refuses requests that were sent to another name than ours.

    A page from anywhere can make a browser resolve its own name to our address, and then talk to us as if we were it.
    What it cannot do is leave that name out of the request. With one user, as whom a browser on this machine is signed
    in by itself, only names of this machine are answered, and those the operator gave; with many, those the operator
    gave, once there are any. Where a proxy that the operator trusts says which name it was asked for, that one counts
    as well.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._names = HostNames(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._why_not(scope)):
            error, status = refused
            body = json.dumps(error.to_json()).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)

    def _why_not(self, scope: Scope) -> tuple[DiamondError, int] | None:
        headers = Headers(scope=scope)
        given = headers.getlist("host")
        if len(given) > 1 or (given and not _HOST.fullmatch(given[0])):
            error = InvalidInput(
                "the request's Host header is not a name", hint="send one Host header: name or name:port"
            )
            return error, error.status
        # Every browser gives one; what speaks HTTP/1.0 need not.
        asked = [*given, *self._asked_of_proxy(scope, headers)]
        unknown = next((host for host in asked if not self._names.knows(host)), None)
        if unknown is None or not self._names.is_strict:
            return None
        name = host_name(unknown)[:100]
        if not self._settings.multi_user:
            refused = Forbidden(
                f"this server has one user and answers on its own machine only, not as {name!r}",
                hint="open it as http://127.0.0.1 with its port; to use another name, set DIAMOND_PUBLIC_URL to it, or "
                "add it to DIAMOND_ALLOWED_HOSTS",
            )
            return refused, refused.status
        if scope["path"] in _FOR_MACHINES and scope["method"] in ("GET", "HEAD"):
            return None  # load balancers ask by address
        where = f"use {self._settings.public_url}" if self._settings.public_url else "use a name its operator gave"
        # As an error that passes: agents that came by this name wait until their operator has added it.
        passing = Unavailable(
            f"this server does not answer as {name!r}",
            hint=f"{where}; if {name!r} is a name of this server as well, its operator adds it to "
            "DIAMOND_ALLOWED_HOSTS and starts it again",
        )
        return passing, _MISDIRECTED

    def _asked_of_proxy(self, scope: Scope, headers: Headers) -> list[str]:
        client = scope.get("client")
        if not client or not is_within(client[0], self._settings.trusted_networks):
            return []  # anybody can write this header
        said = ",".join(headers.getlist("x-forwarded-host"))
        return [host.strip() for host in said.split(",") if host.strip()]
