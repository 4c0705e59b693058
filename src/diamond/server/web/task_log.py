"""The log of a task for static/log.js, by line; and as a whole, to be kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from diamond.server.compression import smaller
from diamond.server.services import attempts, log_lines, tasks
from diamond.server.services.context import Context
from diamond.server.web.forms import Visitor
from diamond.server.web.pages import ctx_of, page_router

router = page_router()
_PIECE_BYTES = 1024 * 1024
_MOST = 10**9
_TAIL_LINES = 200

Attempt = Annotated[int, Query(ge=0, le=_MOST)]  # 0: the newest


def log_end(request: Request, ctx: Context, user_id: str, task_id: str) -> dict[str, Any]:
    """What templates/log_parts.html needs: the end of the attempt that was asked for. The script goes on from there."""
    asked = request.query_params.get("attempt", "")
    attempt = int(asked) if asked.isdecimal() and len(asked) < 9 else 0
    found = log_lines.read(ctx, user_id, task_id, attempt=attempt or None, count=_TAIL_LINES)
    return {"log": found, "log_text": log_lines.plain_tail(found), "attempt": attempt}


@router.get("/tasks/{task_id}/log")
def lines(
    request: Request,
    who: Visitor,
    task_id: str,
    attempt: Attempt = 0,
    first: Annotated[int | None, Query(ge=1, le=_MOST)] = None,
    count: Annotated[int, Query(ge=0, le=log_lines.MAX_LINES)] = 200,
) -> Response:
    """Some lines, as [number, text, offset, bytes of the whole line if `text` is only a part of it]."""
    assert who.user_id is not None
    found = log_lines.read(ctx_of(request), who.user_id, task_id, attempt=attempt or None, first=first, count=count)
    answer = JSONResponse(
        {
            "lines": [[one.number, one.text, one.offset, one.num_bytes if one.is_cut else 0] for one in found.lines],
            "total": found.total,
            "bytes": found.num_bytes,
            "attempt": found.attempt,
            "newest": found.newest,
            "over": found.is_over,
            "state": found.state,
        }
    )
    return smaller(request, answer)


@router.get("/tasks/{task_id}/log/find")
def find(
    request: Request,
    who: Visitor,
    task_id: str,
    q: Annotated[str, Query(max_length=log_lines.MAX_SEARCH)],
    attempt: Attempt = 0,
) -> Response:
    """Numbers of the lines that hold a text."""
    assert who.user_id is not None
    found = log_lines.find(ctx_of(request), who.user_id, task_id, q, attempt=attempt or None)
    return JSONResponse({"lines": found.lines, "more": found.more, "total": found.total})


@router.get("/tasks/{task_id}/log/download")
def download(request: Request, who: Visitor, task_id: str, attempt: Attempt = 0) -> Response:
    """All bytes that the server has."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    found = attempts.find(ctx, who.user_id, task_id, attempt or None)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", tasks.get(ctx, who.user_id, task_id).name).strip("-.") or task_id
    headers = {"Content-Disposition": f'attachment; filename="{name[:100]}-{found.number or 1}.log"'}
    request.scope["diamond.waits"] = True  # as slow as the reader's line
    return StreamingResponse(_bytes(ctx, found.job_id), media_type="application/octet-stream", headers=headers)


def _bytes(ctx: Context, job_id: str) -> Iterator[bytes]:
    offset = 0
    size = ctx.streams.size(job_id, "log") if job_id else 0
    while offset < size:
        piece = ctx.streams.read(job_id, "log", offset, min(_PIECE_BYTES, size - offset))
        if piece.next_offset == offset:
            return
        offset = piece.next_offset
        yield piece.data
