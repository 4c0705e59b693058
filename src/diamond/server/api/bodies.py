"""Request bodies of JSON, from raw bytes to values, with errors a person can act on.

Parsed here and not by pydantic, so that every hostile or mistaken body gets Diamond's own error: not UTF-8, not JSON,
NaN, numbers no database holds, a key twice, half a surrogate pair, nesting without end.
"""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from diamond.core.errors import InvalidInput

MAX_DEPTH = 64
_MAX_INT = 2**63
_INLINE_BYTES = 64 * 1024  # parsing more than this would be felt by other requests
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


async def json_object(request: Request) -> dict[str, Any]:
    """Dependency: the request's body, which must be a JSON object.

    Raises:
        InvalidInput: saying what is wrong with it.
        TooLarge: from the limits middleware, while reading.
    """
    raw = await request.body()
    if len(raw) > _INLINE_BYTES:
        return await run_in_threadpool(parse_object, raw)
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise InvalidInput(
            f"the request body must be a JSON object, not {_KINDS.get(type(value), 'a number')}",
            hint='write {"field": value, …}',
        )
    return value


def parse_json(raw: bytes) -> Any:
    """Strict JSON.

    Raises:
        InvalidInput: naming what is wrong and where.
    """
    if not raw.strip():
        raise InvalidInput("the request body is empty", hint="send a JSON object")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"the request body is not UTF-8 text (byte {error.start})",
            hint="send JSON encoded as UTF-8, without compression",
        ) from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"the request body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(raw) and _has_surrogate(value):
        raise InvalidInput(
            "the request body contains half of a surrogate pair (\\ud800 to \\udfff), which is no character",
            hint="write the character itself, or both halves",
        )
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidInput(f"the request body gives the field {twice[:80]!r} twice", hint="give it once")
    return found


def _int(text: str) -> int:
    # The length first: turning 10^5 digits into a number costs seconds.
    number = int(text) if len(text) <= 20 else _MAX_INT
    if not -_MAX_INT <= number < _MAX_INT:
        raise InvalidInput(f"the number {_short(text)} is too large", hint="whole numbers must fit in 64 bits")
    return number


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise InvalidInput(f"the number {_short(text)} is too large for a floating-point number")
    return number


def _constant(text: str) -> Any:
    raise InvalidInput(f"{text} is not JSON", hint="leave the field out, or use null")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_int, parse_float=_float, parse_constant=_constant)
_KINDS = {list: "a list", str: "text", bool: "true or false", type(None): "null"}


def _check_depth(value: Any) -> None:
    """Nesting is bounded well below the interpreter's limit, since later steps walk the value recursively."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidInput:
    return InvalidInput(f"the request body is nested deeper than {MAX_DEPTH} levels")


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(_has_surrogate(key) or _has_surrogate(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_has_surrogate, value))


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:12]}… ({len(text)} digits)"
