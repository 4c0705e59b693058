"""The HTTP link, against a real listener on the loopback: keep-alive and half answers cannot be pretended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from diamond.agent.link import Backoff, Link
from diamond.core.errors import NotFound, ProtocolError, ServerUnreachable, StorageFull, TooLarge, Unauthenticated


@pytest.fixture(autouse=True)
def _no_network() -> None:
    """This one module is about the network; it stays on 127.0.0.1."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections: ClassVar[set[Any]] = set()

    def do_GET(self) -> None:
        self.connections.add(self.client_address)
        name = self.path.removeprefix("/base/api/v1/")
        if name == "echo?a=b+c":
            self.answer(200, {"token": self.headers["Authorization"]})
        elif name == "error":
            self.answer(507, StorageFull("disk full", hint="wait").to_json())
        elif name == "token":
            self.answer(401, Unauthenticated("who are you?").to_json())
        elif name == "proxy":
            self.answer(502, {"nothing": "of ours"})
        elif name == "moved":
            self.answer(302, b"")
        elif name == "blob":
            data = b"0123456789"
            start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            self.answer(206 if start else 200, data[start:])
        elif name == "short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
        elif name == "hang-up":
            self.answer(200, {})
            self.close_connection = True
        else:
            self.answer(404, NotFound("no such thing").to_json())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/moved"):
            return self.answer(307, b"")
        self.answer(413, b"<html>") if self.path.endswith("/large") else self.answer(200, {"body": body.decode()})

    def answer(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def link() -> Iterator[Link]:
    Handler.connections = set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    link = Link(f"http://127.0.0.1:{server.server_address[1]}/base/", "s3cret")
    yield link
    link._drop()
    server.shutdown()
    thread.join()
    server.server_close()


def test_calls_share_one_connection(link: Link) -> None:
    for _ in range(3):
        assert link.call("GET", "/echo", query={"a": "b c"}) == {"token": "Bearer s3cret"}
    with pytest.raises(NotFound):
        link.call("GET", "/missing")
    assert link.call("GET", "/echo", query={"a": "b c"})
    assert len(Handler.connections) == 1


def test_errors_come_out_as_what_they_are(link: Link) -> None:
    with pytest.raises(StorageFull) as caught:
        link.call("GET", "/error")
    assert (caught.value.message, caught.value.hint, caught.value.transient) == ("disk full", "wait", True)
    with pytest.raises(Unauthenticated):
        link.call("GET", "/token")
    with pytest.raises(ServerUnreachable, match="502"):
        link.call("GET", "/proxy")


def test_a_connection_the_server_gave_up_is_made_anew(link: Link) -> None:
    for _ in range(3):
        assert link.call("GET", "/hang-up") == {}


def test_a_broken_answer_is_a_passing_failure(link: Link) -> None:
    with pytest.raises(ServerUnreachable):
        link.call("GET", "/short")
    assert link.call("GET", "/echo", query={"a": "b c"})


def test_downloads_from_an_offset(link: Link) -> None:
    with link.download("/blob") as (start, pieces):
        assert (start, b"".join(pieces)) == (0, b"0123456789")
    with link.download("/blob", offset=4) as (start, pieces):
        assert (start, b"".join(pieces)) == (4, b"456789")
    with link.download("/blob") as (_, pieces):
        pass  # left unread: must not spoil the next call
    assert link.call("GET", "/echo", query={"a": "b c"})


def test_text_travels_as_it_is(link: Link) -> None:
    assert link.call("POST", "/x", {"a": "é\ud800"})["body"] == '{"a":"é?"}'
    assert link.call("POST", "/x", b'{"b":1}')["body"] == '{"b":1}'


def test_a_proxy_that_finds_a_message_too_large(link: Link) -> None:
    with pytest.raises(TooLarge):
        link.call("POST", "/large", {})


def test_being_sent_elsewhere_is_not_an_answer(link: Link) -> None:
    """Else a report, or a new token, would be taken for received by whatever stands in the way of the server."""
    for method, body in (("GET", None), ("POST", {})):
        with pytest.raises(ServerUnreachable, match=r"answered 30[27]"):
            link.call(method, "/moved", body)
    with pytest.raises(ServerUnreachable):
        link.fetch_bytes("/moved")


def test_nobody_there() -> None:
    with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
        Link("http://127.0.0.1:1", "x").call("GET", "/x")


@pytest.mark.parametrize("url", ["", "host:7421", "ftp://host", "http://"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ProtocolError):
        Link(url, "x")


def test_backoff_grows_and_begins_anew() -> None:
    backoff = Backoff()
    waits = [backoff.next_s() for _ in range(20)]
    assert 0.1 <= waits[0] <= 0.2
    assert all(7.5 <= wait <= 15 for wait in waits[8:])
    backoff.reset()
    assert backoff.next_s() <= 0.2
