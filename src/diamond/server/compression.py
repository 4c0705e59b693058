"""Answers made smaller where the client takes it. Only for what holds no secret that somebody else's words could be
guessed beside (see forms_token.py)."""

from __future__ import annotations

import gzip
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

Answer = TypeVar("Answer", bound=Response)
_WORTH_IT = 1500  # bytes; below that it is one packet either way
_QUICKLY = 4  # of gzip's levels: half the time of the usual one, for three hundredths more bytes


def takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def smaller(request: Request, response: Answer) -> Answer:
    """The same answer, compressed if that is wanted and worth it."""
    response.headers.add_vary_header("Accept-Encoding")
    body = bytes(response.body)
    if len(body) >= _WORTH_IT and takes_gzip(request):
        response.body = gzip.compress(body, _QUICKLY, mtime=0)
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Content-Length"] = str(len(response.body))
    return response
