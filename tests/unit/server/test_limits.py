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
