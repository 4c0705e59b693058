"""Clients that send next to nothing, or take no answer, over real sockets: none keeps a connection for ever, and none
is inflated."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from diamond.core.home import ClientConfig
from testing.service import Service

HEAD_S, BODY_S, DRAIN_S = 2.0, 2.0, 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("slow") / "home"
    limits = {"header_timeout_s": HEAD_S, "body_timeout_s": BODY_S, "drain_timeout_s": DRAIN_S, "threads": 4}
    running = Service(folder, **{name: str(value) for name, value in limits.items()})
    running.start_server()
    yield running
    running.stop()


def token(server: Service) -> str:
    config = ClientConfig.load(server.home)
    assert config is not None
    return config.token


def drip(server: Service, first: bytes, *, every_s: float = 0.2, within_s: float = 20) -> tuple[bytes, float]:
    """Send `first`, then a byte now and then; what came back, and after how long the server hung up."""
    began, answer = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(first)
        connection.settimeout(every_s)
        while time.monotonic() - began < within_s:
            try:
                piece = connection.recv(65536)
                if not piece:
                    return answer, time.monotonic() - began
                answer += piece
            except TimeoutError:
                pass
            except ConnectionError:
                return answer, time.monotonic() - began
            try:
                connection.sendall(b"a")
            except ConnectionError:
                return answer, time.monotonic() - began
    raise AssertionError(f"still connected after {within_s} s; got {answer!r}")


def head(server: Service, path: str, *lines: str) -> bytes:
    sent = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {token(server)}", *lines]
    return "\r\n".join(sent).encode() + b"\r\n\r\n"


@pytest.mark.parametrize("first", [b"", b"GET / HT", b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: "])
def test_a_head_that_never_ends(server: Service, first: bytes) -> None:
    answer, took = drip(server, first)
    assert took < HEAD_S + 3 and b"200" not in answer


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("/api/v1/tasks", ("Content-Length: 1000",)),
        ("/api/v1/tasks", ("Content-Length: 1000", "Expect: 100-continue")),
        ("/sign-in", ("Content-Type: application/x-www-form-urlencoded", "Content-Length: 1000")),
        ("/api/v1/bundles", ("Content-Length: 1000",)),
        ("/api/v1/blobs/pack", ("Content-Length: 100000",)),
    ],
)
def test_a_body_that_never_ends(server: Service, path: str, lines: tuple[str, ...]) -> None:
    answer, took = drip(server, head(server, path, *lines))
    assert BODY_S * 0.8 < took < BODY_S + 3
    assert b" 408 " in answer, answer
    assert b"connection: close" in answer.lower()


def test_a_body_after_its_answer(server: Service) -> None:
    """Refused before it was read: what is left of it is not waited for either."""
    sent = b"POST /api/v1/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
    answer, took = drip(server, sent, within_s=60)
    assert b" 401 " in answer and took < 30 + HEAD_S + 5


def test_many_of_them_hold_nobody_up(server: Service) -> None:
    """More than there are threads."""
    held = []
    try:
        for _ in range(40):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(head(server, "/api/v1/tasks", "Content-Length: 1000"))
            held.append(connection)
        began = time.monotonic()
        answer = httpx.get(
            f"{server.url}/api/v1/info", headers={"Authorization": f"Bearer {token(server)}"}, timeout=30
        )
        assert answer.status_code == 200 and time.monotonic() - began < 1.5
    finally:
        for connection in held:
            connection.close()


def test_slow_but_steady_is_fine(server: Service) -> None:
    """Beyond the time for nothing, every byte that came has bought some."""
    body = json.dumps({"spec": {"run": "true", "name": "x" * 20, "envs": {"A": "b" * 30_000}}}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head(server, "/api/v1/tasks", f"Content-Length: {len(body)}"))
        for at in range(0, len(body), 4096):
            connection.sendall(body[at : at + 4096])
            time.sleep(0.4)
        connection.settimeout(20)
        assert b" 201 " in connection.recv(65536)


def test_waiting_for_news_is_not_being_slow(server: Service) -> None:
    began = time.monotonic()
    headers = {"Authorization": f"Bearer {token(server)}"}
    wait_s = HEAD_S + BODY_S + 1
    answer = httpx.get(
        f"{server.url}/api/v1/events", params={"since": 10**6, "wait_s": wait_s}, headers=headers, timeout=30
    )
    assert answer.status_code == 200 and time.monotonic() - began > wait_s - 0.5


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
@pytest.mark.parametrize("path", ["/api/v1/tasks", "/api/v1/bundles"])
def test_nothing_is_inflated(server: Service, path: str, encoding: str) -> None:
    """A thousand to one is what gzip makes of zeros: bodies are taken as they come, so there is no bomb."""
    bomb = gzip.compress(b'{"spec": "' + b"0" * 50_000_000 + b'"}')
    assert len(bomb) < 100_000
    answer = httpx.post(
        f"{server.url}{path}", content=bomb, timeout=30,
        headers={"Authorization": f"Bearer {token(server)}", "Content-Encoding": encoding},
    )  # fmt: skip
    assert answer.status_code == 422 and "without compression" in answer.json()["error"]["hint"]


@pytest.fixture
def large(server: Service) -> str:
    """The path of an answer that fits into no buffer."""
    data = os.urandom(32 * 1024 * 1024)
    path = f"/api/v1/blobs/sha256:{hashlib.sha256(data).hexdigest()}"
    headers = {"Authorization": f"Bearer {token(server)}"}
    sent = httpx.put(f"{server.url}{path}", params={"total": len(data)}, content=data, headers=headers, timeout=60)
    assert sent.json()["complete"]
    return path


def asking(server: Service, path: str) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    connection.connect(("127.0.0.1", server.port))
    lines = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token(server)}\r\n\r\n"
    connection.sendall(lines.encode())
    return connection


def received(connection: socket.socket, pause_s: float) -> int:
    """How many bytes come when they are taken slowly, until the end or the server's hanging up."""
    connection.settimeout(20)
    total = 0
    try:
        while piece := connection.recv(1024 * 1024):
            total += len(piece)
            if total > 32 * 1024 * 1024:
                break
            time.sleep(pause_s)
    except ConnectionResetError:
        pass
    return total


def test_an_answer_that_nobody_takes(server: Service, large: str) -> None:
    with asking(server, large) as connection:
        time.sleep(DRAIN_S * 2 + 1)
        assert received(connection, 0) < 32 * 1024 * 1024


def test_an_answer_that_is_taken_slowly(server: Service, large: str) -> None:
    """For longer than the limit, but steadily."""
    began = time.monotonic()
    with asking(server, large) as connection:
        assert received(connection, 0.01) > 32 * 1024 * 1024
    assert time.monotonic() - began > DRAIN_S * 1.5
