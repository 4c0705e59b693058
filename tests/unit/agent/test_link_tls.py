"""The link over real TLS on the loopback: whom it believes, and what it says of those it does not."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.enrol import fetch_authority
from diamond.agent.link import Link
from diamond.core.errors import InstallationProblem, InvalidInput, ServerUnreachable
from diamond.core.tls import check_pin, parse_pin, pin_of
from diamond.server.settings import load_settings
from diamond.server.tls import prepare
from diamond.server.trust import Certificates

YEAR_S = 365 * 86_400.0


@pytest.fixture(autouse=True)
def _no_network() -> None:
    """This one module is about the network; it stays on 127.0.0.1."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    authority = ""

    def do_GET(self) -> None:
        body = self.authority.encode() if self.path == "/agent/ca.pem" else b'{"ok": true}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Handshakes that fail are what these tests are about."""


@contextmanager
def listening(certificates: Certificates | None, address: str = "127.0.0.1") -> Iterator[int]:
    server = Quiet((address, 0), Handler)
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.cert, certificates.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Listen = Callable[[Certificates | None], int]


@pytest.fixture
def listen() -> Iterator[Listen]:
    with ExitStack() as stack:
        yield lambda certificates: stack.enter_context(listening(certificates))


def made(folder: Path, *, age_s: float = 0.0) -> Certificates:
    return prepare(load_settings(home=folder, tls=True), now=time.time() - age_s)


def ask(url: str, ca_file: Path | None = None) -> Any:
    link = Link(url, "token", ca_file=ca_file)
    try:
        return link.call("GET", "/x")
    finally:
        link.release()


def test_the_pinned_authority_and_no_other(listen: Listen, tmp_path: Path) -> None:
    certificates = made(tmp_path)
    port = listen(certificates)
    assert ask(f"https://127.0.0.1:{port}", certificates.ca) == {"ok": True}
    assert ask(f"https://localhost:{port}", certificates.ca) == {"ok": True}
    other = made(tmp_path / "other")
    for trusted in (other.ca, None):
        with pytest.raises(ServerUnreachable, match="not signed by an authority trusted here") as caught:
            ask(f"https://127.0.0.1:{port}", trusted)
        assert "diamond endpoint enroll" in caught.value.hint


def test_an_expired_certificate(listen: Listen, tmp_path: Path) -> None:
    certificates = made(tmp_path, age_s=2 * YEAR_S)
    with pytest.raises(ServerUnreachable, match=r"certificate of 127\.0\.0\.1 has expired") as caught:
        ask(f"https://127.0.0.1:{listen(certificates)}", certificates.ca)
    assert "clock" in caught.value.hint


def test_a_certificate_of_tomorrow(listen: Listen, tmp_path: Path) -> None:
    certificates = made(tmp_path, age_s=-YEAR_S)
    with pytest.raises(ServerUnreachable, match="not valid yet"):
        ask(f"https://127.0.0.1:{listen(certificates)}", certificates.ca)


def test_a_certificate_for_another_name(tmp_path: Path) -> None:
    certificates = made(tmp_path)
    # All of 127.0.0.0/8 is this machine, but only 127.0.0.1 is named.
    with listening(certificates, "127.0.0.2") as port:
        with pytest.raises(ServerUnreachable, match=r"not for 127\.0\.0\.2") as caught:
            ask(f"https://127.0.0.2:{port}", certificates.ca)
        assert "DIAMOND_PUBLIC_URL" in caught.value.hint


def test_the_wrong_protocol_either_way(listen: Listen, tmp_path: Path) -> None:
    plain, secure = listen(None), listen(made(tmp_path))
    with pytest.raises(ServerUnreachable, match="does not speak HTTPS") as caught:
        ask(f"https://127.0.0.1:{plain}")
    assert "http://" in caught.value.hint
    with pytest.raises(ServerUnreachable) as caught:
        ask(f"http://127.0.0.1:{secure}")
    assert "https://" in caught.value.hint


def test_the_authority_is_fetched_blindly_and_compared(listen: Listen, tmp_path: Path) -> None:
    certificates = made(tmp_path)
    assert certificates.ca is not None
    Handler.authority = certificates.ca.read_text()
    url = f"https://127.0.0.1:{listen(certificates)}"
    pem = fetch_authority(url)
    check_pin(pem, pin_of(Handler.authority))
    with pytest.raises(InstallationProblem, match="not the one pinned"):
        check_pin(pem, "sha256:" + "0" * 64)
    with pytest.raises(InvalidInput):
        fetch_authority("http://127.0.0.1:1")
    Handler.authority = "<html>"
    with pytest.raises(InstallationProblem, match="no authority of its own"):
        fetch_authority(url)


@pytest.mark.parametrize("pin", ["", "sha256:", "md5:00", "sha256:" + "g" * 64, "x" * 64, "0" * 63])
def test_pins_that_are_none(pin: str) -> None:
    with pytest.raises(InvalidInput, match="not a pin"):
        parse_pin(pin)


@pytest.mark.parametrize("head", ["", "sha256:", "SHA256 Fingerprint=", "sha256 Fingerprint="])
def test_pins_as_openssl_writes_them(head: str) -> None:
    pairs = [f"{number:02X}" for number in range(32)]
    assert (
        parse_pin(f"{head}{':'.join(pairs)}\n")
        == parse_pin(head + "".join(pairs))
        == "sha256:" + "".join(pairs).lower()
    )


def test_a_missing_authority_is_named(tmp_path: Path) -> None:
    with pytest.raises(InstallationProblem, match=r"none\.pem"):
        Link("https://127.0.0.1:1", "x", ca_file=tmp_path / "none.pem")


def test_an_authority_is_not_forgotten_over_plain_http(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not encrypted"):
        Link("http://127.0.0.1:1", "x", ca_file=tmp_path / "ca.pem")
