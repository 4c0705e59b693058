"""Answers: JSON from core's dataclasses, files with ranges, and the one mapping from exceptions to error answers.

Must not decide anything about tasks; it only writes down what services said.
"""

from __future__ import annotations

import errno
import math
import os
import re
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from sqlalchemy import exc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from diamond.core.errors import DiamondError, InvalidInput, NotFound, StorageFull, Unavailable
from diamond.server.plain import dumps

_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{1,18}-\d{0,18}|-\d{1,18})\s*", re.IGNORECASE)


class Json(Response):
    """An answer of dataclasses or plain values as JSON. Non-finite numbers must have been replaced before."""

    media_type = "application/json"

    def __init__(self, value: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(dumps(value), status_code, headers)


def error_answer(error: DiamondError, *, status: int | None = None, headers: dict[str, str] | None = None) -> Json:
    extra = dict(headers or {})
    if error.status == 401:
        extra.setdefault("WWW-Authenticate", 'Bearer realm="diamond"')
    if error.transient:
        after_s = error.retry_after_s
        extra.setdefault("Retry-After", "2" if after_s is None else str(max(1, math.ceil(after_s))))
    if error.status == 413:
        extra.setdefault("Connection", "close")
    return Json(error.to_json(), status or error.status, extra)


async def on_diamond_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, DiamondError)
    return error_answer(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_answer(
            NotFound(f"there is nothing at {_shown_path(request)}", hint="GET /openapi.json lists every route")
        )
    if error.status_code == 405:
        allowed = _allowed(request) or (error.headers or {}).get("Allow", "")
        found = InvalidInput(
            f"{request.method[:20]} is not possible at {_shown_path(request)}",
            hint=f"possible there: {allowed}" if allowed else "GET /openapi.json lists every route",
        )
        return error_answer(found, status=405, headers={"Allow": allowed} if allowed else None)
    kind = InvalidInput if error.status_code < 500 else DiamondError
    return error_answer(kind(str(error.detail)), status=error.status_code, headers=dict(error.headers or {}))


async def on_validation_error(_request: Request, error: Exception) -> Response:
    """A query parameter, path or header that does not fit."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place, *names = first["loc"]
    return error_answer(
        InvalidInput(
            f"{place} parameter {'.'.join(map(str, names))}: {first['msg']}",
            hint="GET /openapi.json describes the parameters of every route",
            field=".".join(map(str, names)),
        )
    )


async def on_database_error(_request: Request, error: Exception) -> Response:
    """What slipped past the store's own translation."""
    text = str(getattr(error, "orig", error)).lower()
    if "full" in text or "no space" in text:
        return error_answer(_storage_full())
    if isinstance(error, exc.OperationalError | exc.TimeoutError):
        return error_answer(Unavailable("the database does not answer now", hint="try again in a moment"))
    raise error


async def on_data_error(_request: Request, _error: Exception) -> Response:
    """PostgreSQL takes no NUL in text and no number beyond its column; SQLite would."""
    return error_answer(
        InvalidInput(
            "a value in the request cannot be stored", hint="leave out NUL characters and numbers beyond 32 bits"
        )
    )


async def on_os_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error_answer(_storage_full())
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return error_answer(
            Unavailable("the server has too many files open", hint="try again; the operator can raise `ulimit -n`")
        )
    raise error


def _storage_full() -> StorageFull:
    return StorageFull(
        "the server's disk is full; nothing was changed",
        hint="free space in the server's data directory; the same request will then work",
    )


ERROR_HANDLERS: dict[Any, Any] = {
    DiamondError: on_diamond_error,
    HTTPException: on_http_exception,
    RequestValidationError: on_validation_error,
    exc.OperationalError: on_database_error,
    exc.TimeoutError: on_database_error,
    exc.DataError: on_data_error,
    OSError: on_os_error,
}


def _allowed(request: Request) -> str:
    """Every method of this path; Starlette itself names only those of the first route that has it."""
    methods: set[str] = set()
    for route in request.app.state.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods
    return ", ".join(sorted(methods))


def _shown_path(request: Request) -> str:
    return quote(request.url.path[:200])


class FileAnswer(FileResponse):
    """A stored file for download: ranges, never rendered by a browser, whatever its name claims to be."""

    def __init__(self, path: str | os.PathLike[str], *, name: str, headers: dict[str, str] | None = None) -> None:
        stat = os.stat(path)
        super().__init__(
            path,
            media_type="application/octet-stream",
            stat_result=stat,
            headers={"Content-Disposition": attachment(name), **(headers or {})},
        )
        self._size = stat.st_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["diamond.waits"] = True  # as slow as the reader's line, not as we are
        # One range or none. What is not a range we know is ignored, as RFC 9110 allows: the whole file follows.
        given = [value.decode("latin-1") for key, value in scope["headers"] if key == b"range"]
        asked = given[0] if len(given) == 1 else ""
        if given and not _RANGE.fullmatch(asked):
            plain = [(key, value) for key, value in scope["headers"] if key != b"range"]
            scope = {**scope, "headers": plain}
        elif given and not self._satisfiable(asked):
            error = InvalidInput(
                f"the range {asked[:60]!r} lies outside the file of {self._size} bytes",
                hint="ask for a range that begins before the end, or leave the Range header out",
            )
            refusal = error_answer(error, status=416, headers={"Content-Range": f"bytes */{self._size}"})
            return await refusal(scope, receive, send)
        await super().__call__(scope, receive, send)

    def _satisfiable(self, asked: str) -> bool:
        first, _, last = asked.partition("=")[2].strip().partition("-")
        if not first:
            return int(last) > 0 and self._size > 0
        return int(first) < self._size and (not last or int(first) <= int(last))


def attachment(name: str) -> str:
    """Content-Disposition for any file name: plain ASCII for old clients, UTF-8 by RFC 8187 for all others."""
    last = name.rsplit("/", 1)[-1]
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", last)[:150].strip(" .") or "download"
    if plain == last:
        return f'attachment; filename="{plain}"'
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(last, safe='')}"
