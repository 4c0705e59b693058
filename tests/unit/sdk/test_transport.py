"""Requests: what is repeated, what is not, and which error comes out."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from diamond.core.errors import (
    InvalidInput,
    NotFound,
    ProtocolError,
    ServerUnreachable,
    StorageFull,
    Unavailable,
)
from diamond.sdk.transport import Transport

Step = httpx.Response | Exception


class Script:
    """Answers requests from a list; the last entry is repeated."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return step

    def transport(self, **options: Any) -> Transport:
        return Transport(
            "http://diamond.test", "secret", transport=httpx.MockTransport(self), sleep=self.slept.append, **options
        )


def refusal() -> httpx.ConnectError:
    return httpx.ConnectError("refused")


def ok(value: Any = None) -> httpx.Response:
    return httpx.Response(200, json=value if value is not None else {"ok": 1})


def test_get_is_repeated_with_growing_pauses() -> None:
    script = Script(refusal(), httpx.Response(502), refusal(), ok())
    assert script.transport().json("GET", "/x") == {"ok": 1}
    assert len(script.requests) == 4
    assert script.slept == sorted(script.slept) or max(script.slept) < 2
    assert script.requests[0].headers["Authorization"] == "Bearer secret"


def test_repetition_ends() -> None:
    script = Script(refusal())
    with pytest.raises(ServerUnreachable, match=r"diamond\.test") as caught:
        script.transport(retries=2).json("GET", "/x")
    assert "its operator knows" in caught.value.hint and "diamond up" not in caught.value.hint
    assert "secret" not in str(caught.value)
    assert len(script.requests) == 3


def test_post_is_sent_once_unless_it_may_be_repeated() -> None:
    script = Script(refusal(), ok())
    with pytest.raises(ServerUnreachable):
        script.transport().json("POST", "/x", body={})
    assert len(script.requests) == 1
    script = Script(httpx.ReadTimeout("slow"), ok())
    assert script.transport().json("POST", "/x", body={"a": 1}, repeatable=True) == {"ok": 1}
    assert [request.content for request in script.requests] == [b'{"a": 1}'] * 2


def test_streamed_body_begins_anew() -> None:
    script = Script(refusal(), ok())
    script.transport().request("PUT", "/x", content=lambda: iter([b"ab", b"cd"]), repeatable=True)
    assert [request.content for request in script.requests] == [b"abcd"] * 2


def test_transient_answers_are_repeated_and_others_not() -> None:
    full = httpx.Response(507, json=StorageFull("full").to_json())
    script = Script(full, ok())
    assert script.transport().json("GET", "/x") == {"ok": 1}
    script = Script(httpx.Response(404, json=NotFound("no task", hint="look").to_json()))
    with pytest.raises(NotFound, match="no task"):
        script.transport().json("GET", "/x")
    assert len(script.requests) == 1


def test_errors_keep_their_class_and_field() -> None:
    script = Script(httpx.Response(422, json=InvalidInput("bad", hint="mend", field="spec.run").to_json()))
    with pytest.raises(InvalidInput) as caught:
        script.transport().json("POST", "/x", body={})
    assert (caught.value.field, caught.value.hint) == ("spec.run", "mend")


def test_answers_of_strangers() -> None:
    with pytest.raises(ProtocolError, match="not an answer of Diamond"):
        Script(httpx.Response(404, text="<html>")).transport().json("GET", "/x")
    with pytest.raises(ProtocolError, match="not JSON"):
        Script(httpx.Response(200, text="<html>")).transport().json("GET", "/x")
    with pytest.raises(Unavailable):
        Script(httpx.Response(503, text="busy")).transport(retries=0).json("GET", "/x")


def test_params_that_are_none_are_left_out() -> None:
    script = Script(ok())
    script.transport().json("GET", "/x", params={"a": 1, "b": None})
    assert str(script.requests[0].url) == "http://diamond.test/x?a=1"


def test_stream_that_breaks_is_unreachable() -> None:
    def broken() -> Any:
        yield b"begin"
        raise httpx.ReadError("gone")

    transport = Script(httpx.Response(200, content=broken())).transport()
    got: list[bytes] = []
    with pytest.raises(ServerUnreachable), transport.stream("GET", "/x") as answer:
        got.extend(answer.iter_raw())
    assert got == [b"begin"]
