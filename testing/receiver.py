"""A receiver of webhooks that does what a careful one does: it checks the signature before it believes anything."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from diamond.core.errors import Unauthenticated
from diamond.core.notices import SIGNATURE_HEADER, verify_signature


class Receiver:
    """Use as a context manager.

    Attributes:
        key: of the rule; messages that do not fit it are counted as `forged` and answered with 401.
        status: what it answers otherwise. Settable.
        taken: the JSON of every message that was believed, whatever it was answered with.
        headers: of each of them.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, behave: Callable[[Any], None] | None = None) -> None:
        self.key, self.status, self.forged = "", 200, 0
        self.taken: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                receiver.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    verify_signature(receiver.key, self.headers[SIGNATURE_HEADER] or "", body, time.time())
                except Unauthenticated:
                    receiver.forged += 1
                    self.send_error(401)
                    return
                receiver.taken.append(json.loads(body))
                receiver.headers.append(dict(self.headers))
                if behave is not None:
                    behave(self)
                    return
                self.send_response(receiver.status)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
