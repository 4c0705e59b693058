"""Answers of a server that never end, lie about their length, or lead elsewhere, over a real connection."""

from __future__ import annotations

import contextlib
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from diamond.agent.link import Link
from diamond.core.errors import DiamondError, ProtocolError, ServerUnreachable


@pytest.fixture(autouse=True)
def _no_network() -> None:
    """This module is about the network; it stays on 127.0.0.1."""


class Endless(BaseHTTPRequestHandler):
    """Answers that never end, or lead elsewhere."""

    protocol_version = "HTTP/1.1"
    elsewhere: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name == "stolen":
            self.elsewhere.append(self.headers.get("Authorization", ""))
        self.send_response(307 if name == "redirect" else 200)
        if name == "redirect":
            port = self.server.server_address[1]  # type: ignore[index]
            self.send_header("Location", f"http://localhost:{port}/stolen")
            self.send_header("Content-Length", "0")
        elif name == "announced":
            self.send_header("Content-Length", str(2**45))
        elif name == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
        elif name == "deep":
            self.send_header("Content-Length", "2000000")
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        piece = b" " * 2**20
        if name == "deep":
            self.wfile.write(b"[" * 1_000_000 + b"]" * 1_000_000)
            return
        with contextlib.suppress(OSError):
            while name in ("announced", "chunks", "open"):
                self.wfile.write(b"100000\r\n" + piece + b"\r\n" if name == "chunks" else piece)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}"
    listener.shutdown()
    listener.server_close()


@pytest.mark.parametrize("path", ["/announced", "/chunks", "/open", "/deep"])
def test_an_answer_without_end_fills_no_memory(path: str, endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 8 * 2**20
    monkeypatch.setattr("diamond.agent.link._MAX_JSON_BYTES", most)
    link = Link(endless, "a token")
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            link.call("GET", path)
        if path != "/deep":
            with pytest.raises(DiamondError):
                link.fetch_bytes(path)
        assert tracemalloc.get_traced_memory()[1] < 6 * most
    finally:
        tracemalloc.stop()
        link.release()


def test_a_token_goes_nowhere_else(endless: str) -> None:
    link = Link(endless, "a token")
    with pytest.raises(ServerUnreachable, match="307"):
        link.call("GET", "/redirect")
    assert Endless.elsewhere == []
    link.release()
