"""Body limits, by announced length and while the body arrives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from diamond.server.limits import MAX_MANIFEST_BYTES, BodyLimit

LIMIT = 1000


async def _reader(scope: Scope, receive: Receive, send: Send) -> None:
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def _ask(path: str, chunks: list[bytes], headers: dict[str, str] | None = None) -> tuple[int, bytes, int]:
    """Status, body, and how many chunks the application side took."""
    app = BodyLimit(_reader, max_json_bytes=LIMIT, max_report_bytes=2 * LIMIT)
    sent: list[Message] = []
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        if taken >= len(chunks):
            return {"type": "http.disconnect"}
        taken += 1
        return {"type": "http.request", "body": chunks[taken - 1], "more_body": taken < len(chunks)}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()]
    scope: dict[str, Any] = {"type": "http", "path": path, "method": "POST", "headers": raw}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]), taken


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        ("/api/v1/tasks", LIMIT, 200),
        ("/api/v1/tasks", LIMIT + 1, 413),
        ("/api/v1/agent/reports", 2 * LIMIT, 200),
        ("/api/v1/agent/reports", 2 * LIMIT + 1, 413),
        ("/api/v1/blobs/sha256:00", 50 * LIMIT, 200),
        ("/api/v1/blobs/pack", 50 * LIMIT, 200),
        ("/api/v1/blobs/missing", 50 * LIMIT, 200),
        ("/api/v1/bundles", 50 * LIMIT, 200),
        ("/images/import", 50 * LIMIT, 200),
        ("/images/import/more", LIMIT + 1, 413),
        ("/image-builder/dra_1/dependencies", 50 * LIMIT, 200),
        ("/image-builder/dra_1/commands", LIMIT + 1, 413),
        ("/elsewhere", LIMIT + 1, 413),
    ],
)
@pytest.mark.parametrize("announced", [True, False])
def test_limits(path: str, size: int, status: int, announced: bool) -> None:
    chunks = [b"x" * min(100, size - at) for at in range(0, size, 100)]
    got, body, _ = _ask(path, chunks, {"Content-Length": str(size)} if announced else None)
    assert got == status
    if status == 413:
        assert json.loads(body)["error"]["code"] == "too_large"
    else:
        assert int(body) == size


def test_manifests_have_a_limit_too() -> None:
    status, _, taken = _ask("/api/v1/bundles", [b"x"], {"Content-Length": str(MAX_MANIFEST_BYTES + 1)})
    assert (status, taken) == (413, 1)


def test_a_client_that_asks_first_is_told_before_it_sends() -> None:
    status, _, taken = _ask("/x", [b"x"] * 5, {"Content-Length": "5000", "Expect": "100-continue"})
    assert status == 413 and taken == 0


def test_an_absurd_length_is_refused() -> None:
    assert _ask("/x", [b"x"], {"Content-Length": "9" * 5000, "Expect": "100-continue"})[0] == 413


def test_what_is_taken_in_after_refusing_is_bounded() -> None:
    _, _, taken = _ask("/x", [b"x" * 100] * 1000)
    assert taken * 100 <= 6 * LIMIT


def _ask_slowly(chunks: list[tuple[float, bytes]], *, patience_s: float, then_wait_s: float = 0.0) -> tuple[int, Any]:
    """Status and headers of an answer to a body whose pieces take their time; the reader waits on after its end."""
    sent: list[Message] = []
    left = list(chunks)

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(then_wait_s)
            return {"type": "http.disconnect"}
        pause_s, piece = left.pop(0)
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    async def reader(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        assert then_wait_s == 0 or (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    app = BodyLimit(reader, max_json_bytes=10**6, max_report_bytes=10**6, body_timeout_s=patience_s)
    asyncio.run(app({"type": "http", "path": "/x", "method": "POST", "headers": []}, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"])


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    status, headers = _ask_slowly([(0, b"x"), (60, b"x")], patience_s=0.05)
    assert status == 408 and headers[b"connection"] == b"close"


def test_dripping_does_not_help() -> None:
    assert _ask_slowly([(0.02, b"x")] * 1000, patience_s=0.2)[0] == 408


def test_bytes_buy_time() -> None:
    assert _ask_slowly([(0.05, b"x" * 4096)] * 6, patience_s=0.1)[0] == 200


def test_waiting_after_the_body_is_no_slowness() -> None:
    assert _ask_slowly([(0, b"x")], patience_s=0.05, then_wait_s=0.3)[0] == 200
