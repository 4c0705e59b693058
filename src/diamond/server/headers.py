"""What every answer tells a browser not to do, and under which names this server answers at all.

Set on API answers as well: an answer that a browser is made to show as a page must be as harmless as one.
"""

from __future__ import annotations

import ipaddress
import json
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diamond.core.errors import DiamondError, Forbidden, InvalidInput
from diamond.server.auth import is_secure
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

    A page from anywhere can make a browser resolve its own name to 127.0.0.1, and then talk to us as if we were it.
    What it cannot do is leave that name out of the request. With one user, as whom a browser on this machine is signed
    in by itself, only names of this machine are answered, and the one the operator gave.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._any = settings.multi_user
        self._names = {settings.host.lower(), urlsplit(settings.public_url).hostname or ""} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._why_not(scope)):
            body = json.dumps(error.to_json()).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)

    def _why_not(self, scope: Scope) -> DiamondError | None:
        given = Headers(scope=scope).getlist("host")
        if len(given) > 1 or (given and not _HOST.fullmatch(given[0])):
            return InvalidInput(
                "the request's Host header is not a name", hint="send one Host header: name or name:port"
            )
        if self._any or not given:  # every browser gives one; what speaks HTTP/1.0 need not
            return None
        name = host_name(given[0])
        if name in self._names or is_loopback_name(name):
            return None
        return Forbidden(
            f"this server has one user and answers on its own machine only, not as {name[:100]!r}",
            hint="open it as http://127.0.0.1 with its port; to use another name, set DIAMOND_PUBLIC_URL to it",
        )


def host_name(host: str) -> str:
    """``Example.org:8000`` without its port, in small letters."""
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def is_loopback_name(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
