"""Hostile and mistaken JSON bodies get an error that says what is wrong, quickly."""

from __future__ import annotations

import json
import time

import pytest

from diamond.core.errors import InvalidInput
from diamond.server.api.bodies import MAX_DEPTH, parse_json, parse_object


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "line 1, column"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 9223372036854775808}', "too large"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\uDFFF": 1}', "surrogate"),
        (b'{"a": ["x", {"b": "\\udc00\\ud800"}]}', "surrogate"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"\x1f\x8b\x08\x00", "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "deeper"),
        (b'{"a":' * 100_000, "deeper"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "deeper"),
        (b'"\x00"', "not valid JSON"),
    ],
)
def test_refused_with_a_reason(raw: bytes, says: str) -> None:
    began = time.perf_counter()
    with pytest.raises(InvalidInput, match=says) as caught:
        parse_json(raw)
    assert time.perf_counter() - began < 1.0
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("raw", "kind"), [(b"[]", "a list"), (b"1", "a number"), (b'"x"', "text"), (b"null", "null")])
def test_not_an_object(raw: bytes, kind: str) -> None:
    with pytest.raises(InvalidInput, match=f"not {kind}"):
        parse_object(raw)


def test_accepted_unchanged() -> None:
    value = {
        "a": [1, -(2**63), 2**63 - 1, 0.5, True, None],
        "é😀": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    }
    assert parse_object(json.dumps(value).encode()) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_object(b"\xef\xbb\xbf{}") == {}
    nested = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(nested) is not None
