"""The way to the server: JSON calls and blobs over HTTP(S), one kept-alive connection a thread.

Connections only leave: the agent never listens. Every failure comes out as one of `diamond.core.errors`, so callers
tell "later" (`transient`) from "never". Must not retry by itself: who calls knows what waiting means (`Backoff`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diamond.agent.credentials import Credentials
from diamond.core.errors import (
    DiamondError,
    InvalidInput,
    ProtocolError,
    ServerUnreachable,
    TooLarge,
    Unauthenticated,
    error_from_json,
)
from diamond.core.tls import client_context, explain
from diamond.core.wire import INSTANCE_HEADER

_PREFIX = "/api/v1"
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 60.0
_CHUNK_BYTES = 256 * 1024
_LONGEST_RETRY_S = 60.0  # that a server may ask to be left alone for
_MAX_JSON_BYTES = 64 * 1024 * 1024


class Backoff:
    """How long to wait after the n-th failure in a row: doubling, with jitter, so agents do not come back as one."""

    def __init__(self, *, first_s: float = 0.2, longest_s: float = 15.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0

    def next_s(self) -> float:
        self._failures = min(self._failures + 1, 30)
        full: float = min(self._longest_s, self._first_s * 2 ** (self._failures - 1))
        return full * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def reset(self) -> None:
        self._failures = 0


class Link:
    """Thread-safe: each thread has its own connection."""

    def __init__(
        self,
        server_url: str,
        token: str | Credentials,
        *,
        instance: str = "",
        ca_file: Path | None = None,
        ca_pem: str | None = None,
    ) -> None:
        """`ca_file` (or its text, `ca_pem`) is the one authority to trust, instead of the system's.

        Raises:
            ProtocolError: the address is none.
            InvalidInput: it is one of plain HTTP, and an authority was named.
            InstallationProblem: `ca_file` cannot be used.
        """
        parts = urllib.parse.urlsplit(server_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ProtocolError(f"{server_url!r} is not the address of a server", hint="write e.g. https://host:7421")
        if parts.scheme == "http" and (ca_file or ca_pem):
            # Whoever names an authority wants to be sure of the server; plain HTTP would drop that without a word.
            raise InvalidInput(f"{server_url!r} is not encrypted, so no certificate is checked", field="--ca")
        self._host = parts.hostname
        self._port = parts.port
        self._root = parts.path.rstrip("/")
        self._base = self._root + _PREFIX
        self._tls = client_context(ca_file, ca_pem=ca_pem) if parts.scheme == "https" else None
        self.credentials = token if isinstance(token, Credentials) else Credentials(token)
        self._headers = {"User-Agent": "diamond-agent"}
        if instance:
            self._headers[INSTANCE_HEADER] = instance
        self._local = threading.local()
        self._all_lock = threading.Lock()
        self._all: set[http.client.HTTPConnection] = set()
        self._closed = False
        self.where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str | int | float] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Any:
        """One JSON exchange. A `body` of bytes is JSON already.

        Raises:
            DiamondError: what the server answered, or `ServerUnreachable`.
        """
        data = body if body is None or isinstance(body, bytes) else json_bytes(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        with self._exchange(method, path, data, headers, query, timeout_s) as answer:
            return _json_of(answer)

    def send_bytes(
        self,
        method: str,
        path: str,
        data: bytes,
        *,
        query: Mapping[str, str | int | float] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Any:
        """Send raw bytes; the answer is JSON. Raises as `call` does."""
        headers = {"Content-Type": "application/octet-stream"}
        with self._exchange(method, path, data, headers, query, timeout_s) as answer:
            return _json_of(answer)

    def fetch_bytes(
        self, path: str, *, query: Mapping[str, str | int | float] | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> bytes:
        """The bytes of a small answer. Raises as `call` does."""
        with self._exchange("GET", path, None, {}, query, timeout_s) as answer:
            try:
                return _whole(answer)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error

    def fetch_file(self, path: str) -> bytes:
        """A small file beside the API, such as the one-file agent. Raises as `call` does."""
        with self._exchange("GET", path, None, {}, None, ANSWER_TIMEOUT_S, base=self._root) as answer:
            try:
                return _whole(answer)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error

    def release(self) -> None:
        """Close this thread's connection: the thread ends, or will not speak for long."""
        self._drop()

    @contextlib.contextmanager
    def download(self, path: str, *, offset: int = 0) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The bytes of a blob from `offset` on: yields the offset the server really starts at, and the pieces.

        Raises as `call` does, also while the pieces are being read.
        """
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with self._exchange("GET", path, None, headers, None, ANSWER_TIMEOUT_S) as answer:
            start = offset if answer.status == 206 else 0
            yield start, self._pieces(answer)

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        while True:
            try:
                piece = answer.read(_CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                raise self._unreachable(error) from error
            if not piece:
                return
            yield piece

    def close(self) -> None:
        """Cut every connection, also those another thread waits on."""
        with self._all_lock:
            self._closed = True
            for connection in self._all:
                sock = connection.sock
                if sock is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    # One exchange

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        query: Mapping[str, str | int | float] | None,
        timeout_s: float,
        base: str | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        target = (self._base if base is None else base) + path
        target += f"?{urllib.parse.urlencode(query)}" if query else ""
        used = self.credentials.token
        answer = self._request(method, target, data, self._with_token(used, headers), timeout_s)
        if answer.status == Unauthenticated.status and (token := self.credentials.newer_than(used)):
            # Another thread replaced the token meanwhile, or the agent was enrolled anew.
            self._drop()
            answer = self._request(method, target, data, self._with_token(token, headers), timeout_s)
        try:
            if answer.status >= 300:
                raise self._refusal(answer)
            yield answer
        finally:
            # What is left unread would be taken for the next answer; a torn connection is cheaper than draining a blob.
            if not answer.isclosed() or answer.will_close:
                self._drop()

    def _with_token(self, token: str, headers: dict[str, str]) -> dict[str, str]:
        return {**({"Authorization": f"Bearer {token}"} if token else {}), **self._headers, **headers}

    def _request(
        self, method: str, target: str, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> http.client.HTTPResponse:
        for is_last in (False, True):
            connection, is_fresh = self._connection()
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                connection.request(method, target, body=data, headers=headers)
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                # A kept-alive connection may have been closed by the server meanwhile: that deserves one more try.
                # Every message is safe to repeat. A timeout has waited long enough.
                if is_fresh or is_last or isinstance(error, TimeoutError) or self._closed:
                    raise self._unreachable(error) from error
        raise AssertionError("unreachable")

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None and connection.sock is not None:
            return connection, False
        if self._closed:
            raise ServerUnreachable("the agent is stopping")
        self._drop()
        if self._tls is not None:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_TIMEOUT_S, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            # Small requests, each waited for: Nagle's algorithm would add 40 ms to many of them.
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from error
        self._local.connection = connection
        with self._all_lock:
            self._all.add(connection)
        return connection, True

    def _drop(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None
            with self._all_lock:
                self._all.discard(connection)

    def _refusal(self, answer: http.client.HTTPResponse) -> DiamondError:
        if answer.status < 400:
            # Not followed: a token must not go where nobody sent it, and what stands in the way may go away.
            where = "".join(char for char in answer.getheader("Location", "")[:200] if char.isprintable())
            hint = f"it sends elsewhere, to {where}; if the server is there, enrol with that address" if where else ""
            return ServerUnreachable(f"{self.where} answered {answer.status} {answer.reason}", hint=hint)
        try:
            body = json.loads(answer.read(_MAX_JSON_BYTES))
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            body = None
        if not (isinstance(body, dict) and isinstance(body.get("error"), dict)):
            # Not Diamond's own words: a proxy, or a server that is just starting.
            if answer.status == TooLarge.status:
                return TooLarge(f"{self.where} answered {answer.status} {answer.reason}")
            if answer.status >= 500:
                return ServerUnreachable(f"{self.where} answered {answer.status} {answer.reason}")
            return ProtocolError(f"{self.where} answered {answer.status} {answer.reason}")
        error = error_from_json(body)
        after = answer.getheader("Retry-After", "")
        error.retry_after_s = min(float(after), _LONGEST_RETRY_S) if after.isdecimal() and len(after) < 6 else None
        return error

    def _unreachable(self, error: Exception) -> ServerUnreachable:
        if (found := explain(error, self.where)) is not None:
            return ServerUnreachable(found[0], hint=found[1])
        return ServerUnreachable(f"no answer from {self.where}: {str(error) or type(error).__name__}")


def json_bytes(value: Any) -> bytes:
    """A message as it travels. Half a surrogate pair, which no server takes, becomes a question mark."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """All of an answer, as long as it has an end: a server without measure must not fill this machine's memory."""
    if answer.length is not None and answer.length <= _MAX_JSON_BYTES:
        return answer.read()  # without a number it notices an answer that broke off
    data = answer.read(_MAX_JSON_BYTES + 1) if answer.length is None else b""
    if answer.length is not None or len(data) > _MAX_JSON_BYTES:
        raise ProtocolError(f"the server's answer is longer than {_MAX_JSON_BYTES} bytes")
    return data


def _json_of(answer: http.client.HTTPResponse) -> Any:
    try:
        data = _whole(answer)
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnreachable(f"the server's answer broke off: {error}") from error
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            "the server's answer is not JSON", hint="is this the address of a Diamond server?"
        ) from error
