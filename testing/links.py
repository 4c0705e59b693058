"""A wire between two processes that a test can freeze, or cut."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType


class Wire:
    """A TCP relay on loopback. Use as a context manager.

    Frozen, it passes nothing and closes nothing, as a cable that was pulled; `cut` breaks every connection.

    Attributes:
        url: where to connect instead of to the target.
    """

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._flows = threading.Event()
        self._flows.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self.thaw()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def freeze(self) -> None:
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        self._flows.wait()
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            near.close()
            return
        pair = (near, far)
        for each in pair:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.update(pair)
        try:
            while True:
                for source in select.select(pair, [], [])[0]:
                    data = source.recv(65536)
                    self._flows.wait()
                    if not data:
                        return
                    (far if source is near else near).sendall(data)
        except OSError:
            return
        finally:
            with self._lock:
                self._open.difference_update(pair)
            for each in pair:
                each.close()
