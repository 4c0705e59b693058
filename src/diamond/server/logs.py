"""The server's own log: structured lines, one id per request, and never a token.

Owns the format of log lines and the outermost middleware, which gives each request its id, sets the headers every
answer has, answers unexpected exceptions and logs what was slow or failed. A task's log is another thing: see
`diamond.server.api.logs`.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
import traceback
from contextvars import ContextVar
from typing import IO

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diamond.core.errors import DiamondError

log = logging.getLogger("diamond.server")
request_id: ContextVar[str] = ContextVar("diamond_request_id", default="")

_FIELDS = ("method", "route", "path", "status", "duration_ms", "client")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# What our tokens and Authorization headers look like. Nothing should log one; this is the net below that rule.
_SECRETS = re.compile(
    r"""(dmd[ua]_ | Bearer\s+) [^\s"'@,}]{4,} | ((?<=://)[^/\s:@]*:) [^/\s@]+ (?=@)""", re.IGNORECASE | re.VERBOSE
)


def redact(text: str) -> str:
    return _SECRETS.sub(lambda found: (found[1] or found[2]) + "***", text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if found := getattr(record, "request_id", "") or request_id.get():
            line["request_id"] = found
        line |= {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info and record.exc_info[0]:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return redact(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """The same for a person at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {record.levelname.lower():7} {record.getMessage()}"
        if found := getattr(record, "request_id", "") or request_id.get():
            text += f" [{found}]"
        if record.exc_info and record.exc_info[0]:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        # A line break inside a message could forge a log line.
        first, *rest = redact(text).split("\n")
        return "\n    ".join([first, *rest])


def configure_logging(level: str, style: str, stream: IO[str] | None = None) -> None:
    """Send everything of this process to one handler. Called once by `main`."""
    stream = stream or sys.stderr
    as_text = style == "text" or (style == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # DEBUG is about Diamond, not about the libraries below it.
    root.setLevel("INFO" if level == "DEBUG" else level)
    logging.getLogger("diamond").setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Its "started"/"finished" lines say nothing ours do not.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)


class RequestLog:
    """Outermost middleware: request id, headers every answer has, unexpected exceptions, the access log."""

    def __init__(self, app: ASGIApp, *, slow_s: float = 1.0) -> None:
        self._app = app
        self._slow_s = slow_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        chosen = given if _REQUEST_ID.fullmatch(given) else "req_" + secrets.token_hex(8)
        token = request_id.set(chosen)
        started = time.monotonic()
        status = 0

        async def sender(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["X-Request-Id"] = chosen
                headers["X-Content-Type-Options"] = "nosniff"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            await self._app(scope, receive, sender)
        except Exception:
            log.exception("unexpected error in %s %s", scope["method"], scope["path"], extra={"request_id": chosen})
            if status:
                raise  # the answer has begun: all that is left is to break the connection
            await _send_error(chosen, sender)
        finally:
            duration_s = time.monotonic() - started
            self._note(scope, status, duration_s, chosen)
            request_id.reset(token)

    def _note(self, scope: Scope, status: int, duration_s: float, chosen: str) -> None:
        # Waiting is what long polls and streams are for; it does not make them slow.
        slow = duration_s > self._slow_s and not scope.get("diamond.waits")
        level = logging.INFO if slow or status >= 500 or status == 0 else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        route = getattr(scope.get("route"), "path", "")
        log.log(
            level,
            "%s %s -> %d in %.0f ms",
            scope["method"],
            scope["path"],
            status,
            duration_s * 1000,
            extra={
                "method": scope["method"],
                "route": route,
                "path": scope["path"],
                "status": status,
                "duration_ms": round(duration_s * 1000, 1),
                "client": (scope.get("client") or [""])[0],
                "request_id": chosen,
            },
        )


async def _send_error(chosen: str, send: Send) -> None:
    error = DiamondError(
        "the server met an error it did not expect",
        hint=f"try again; if it persists, give the operator this request id: {chosen}",
    )
    body = json.dumps(error.to_json()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
