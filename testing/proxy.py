"""An HTTP proxy for one site: its login node's way to package indexes, as many real centres have one.

    with Proxy(site.server_address) as proxy:
        site.run(["pip", "download", "six"], env={"https_proxy": proxy.url})

Compute nodes of a site have no other road out than this one either, so a job without these variables has no network.
"""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import threading
from types import TracebackType
from urllib.parse import urlsplit

_PIECE = 64 * 1024
_MAX_HEAD = 64 * 1024


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            method, target, version = self.rfile.readline(_MAX_HEAD).decode("latin-1").split()
            head = []
            while (line := self.rfile.readline(_MAX_HEAD)) not in (b"\r\n", b"\n", b""):
                head.append(line)
            if self.server.is_cut.is_set():
                return
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                with socket.create_connection((host, int(port)), timeout=60) as far:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    self._pass_on(far)
                return
            url = urlsplit(target)
            with socket.create_connection((url.hostname or "", url.port or 80), timeout=60) as far:
                path = (url.path or "/") + (f"?{url.query}" if url.query else "")
                kept = [line for line in head if not line.lower().startswith((b"proxy-", b"connection:"))]
                first = f"{method} {path} {version}\r\n".encode("latin-1")
                far.sendall(first + b"".join(kept) + b"Connection: close\r\n\r\n")
                self._pass_on(far)

    def _pass_on(self, far: socket.socket) -> None:
        near = self.connection
        while not self.server.is_cut.is_set():
            ready, _, _ = select.select([near, far], [], [], 1.0)
            for source in ready:
                data = source.recv(_PIECE)
                if not data:
                    return
                self.server.num_bytes += len(data)
                (far if source is near else near).sendall(data)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    num_bytes = 0

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.is_cut = threading.Event()


class Proxy:
    """Use as a context manager. `num_bytes` counts what went through it."""

    def __init__(self, host: str) -> None:
        self._server = _Server((host, 0))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.is_cut.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def num_bytes(self) -> int:
        return self._server.num_bytes

    def cut(self) -> None:
        self._server.is_cut.set()

    def mend(self) -> None:
        self._server.is_cut.clear()
