"""The one place where requests to the server are made, repeated and turned into errors.

Owns time limits, retries and the translation of every failure into `diamond.core.errors`. Must not know what any
route means: callers say whether a call may be repeated, and this module repeats it.
"""

from __future__ import annotations

import ipaddress
import json
import random
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from diamond import __version__
from diamond.core.errors import DiamondError, ProtocolError, ServerUnreachable, Unavailable, error_from_json
from diamond.core.tls import client_context, explain

API = "/api/v1"
RETRIES = 4
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 3.0
MAX_JSON_BYTES = 64 * 1024 * 1024
_REPEATABLE_STATUS = frozenset({502, 503, 504, 507})
_ALWAYS_REPEATABLE = frozenset({"GET", "HEAD"})
Content = bytes | Callable[[], Iterable[bytes]]
START_HINT = "is it running? start it with: diamond up"
ELSEWHERE_HINT = "does it run, and does this machine reach it? its operator knows; another: diamond login URL"


class Transport:
    """Requests to one server with one token. Safe to share between threads.

    Args:
        url: address of the server, e.g. ``http://127.0.0.1:7421``.
        token: user token; empty for the few routes that need none.
        timeout_s: seconds to connect, and to wait for each piece of an answer.
        retries: how often a call that may be repeated is repeated after a passing failure.
        ca_file: certificate of the one authority to trust; empty: those of the system.
        transport: httpx transport to use instead of the network (tests).
        sleep: how to wait between repetitions (tests).
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 30.0,
        retries: int = RETRIES,
        ca_file: str = "",
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._retries = retries
        self._sleep = sleep or time.sleep
        headers = {"User-Agent": f"diamond/{__version__}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=self._timeout(0.0),
            transport=transport,
            verify=_tls(self.url, ca_file),
            # A proxy of the site is for the way out; asking it for this machine only fails.
            trust_env=not is_loopback(self.url),
        )

    def close(self) -> None:
        self._http.close()

    def json(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        wait_s: float = 0.0,
        retries: int | None = None,
    ) -> Any:
        """Call a route and decode its JSON answer.

        Args:
            repeatable: whether sending the call twice does what sending it once does. None: only for GET.
            wait_s: how long the server may hold the answer back (long poll); added to the time limit.
            retries: overrides the transport's own number for this call.

        Raises:
            ServerUnreachable: no connection, or it broke, and repeating did not help.
            DiamondError: the class the server's answer names.
        """
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        answer = self.request(
            method,
            path,
            params=params,
            content=content,
            headers={"Content-Type": "application/json", **(headers or {})} if content is not None else headers,
            repeatable=repeatable,
            wait_s=wait_s,
            retries=retries,
        )
        try:
            return answer.json()
        except ValueError as error:
            raise ProtocolError(
                f"{self.url} answered {method} {path} with something that is not JSON",
                hint="check that the address is that of a Diamond server (DIAMOND_URL, client.json)",
            ) from error

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        wait_s: float = 0.0,
        retries: int | None = None,
    ) -> httpx.Response:
        """Call a route and return the complete answer. Raises as `json` does.

        `content` may be a function that begins the body anew, so that a streamed body can be repeated too.
        """

        def once() -> httpx.Response:
            answer = self._http.request(
                method,
                path,
                params=_given(params),
                content=content() if callable(content) else content,
                headers=headers,
                timeout=self._timeout(wait_s),
            )
            self._raise_for(answer)
            return answer

        may_repeat = method in _ALWAYS_REPEATABLE if repeatable is None else repeatable
        return self._repeating(once, (self._retries if retries is None else retries) if may_repeat else 0)

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[httpx.Response]:
        """An answer read piece by piece. Only its beginning is repeated; the reader resumes what breaks later.

        Raises:
            ServerUnreachable: also when the connection breaks while the body is read.
        """

        def begin() -> httpx.Response:
            request = self._http.build_request(method, path, params=_given(params), headers=headers)
            answer = self._http.send(request, stream=True)
            if not answer.is_success:
                answer.read()
                self._raise_for(answer)
            return answer

        answer = self._repeating(begin, self._retries)
        try:
            yield answer
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        finally:
            answer.close()

    def _repeating(self, once: Callable[[], httpx.Response], retries: int) -> httpx.Response:
        delay_s = FIRST_DELAY_S
        while True:
            try:
                return once()
            except httpx.TransportError as error:
                failure: DiamondError = self._unreachable(error)
                cause: Exception = error
            except Unavailable as error:
                failure, cause = error, error
            except httpx.HTTPError as error:
                raise ProtocolError(f"{self.url} gave an answer that cannot be read: {error}") from error
            if retries <= 0:
                raise failure from (None if cause is failure else cause)
            retries -= 1
            # Many clients wait for the same restart; a spread keeps them from coming back as one.
            self._sleep(delay_s * random.uniform(0.7, 1.3))  # noqa: S311 - no secret
            delay_s = min(delay_s * 2, MAX_DELAY_S)

    def _raise_for(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            body = answer.json()
        except ValueError:
            body = None
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            raise error_from_json(body)
        if answer.status_code in _REPEATABLE_STATUS:
            raise Unavailable(f"{self.url} answered {answer.status_code} {answer.reason_phrase}", hint="try again soon")
        raise ProtocolError(
            f"{self.url} answered {answer.status_code} {answer.reason_phrase} to {answer.request.url.path}, "
            "which is not an answer of Diamond",
            hint="check that the address is that of a Diamond server (DIAMOND_URL, client.json)",
        )

    def _unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        if isinstance(error, httpx.TimeoutException):
            what = f"the server at {self.url} did not answer within {self.timeout_s:g} s"
        elif (found := explain(error, self.url)) is not None:
            return ServerUnreachable(found[0], hint=found[1])
        else:
            what = f"no answer from the server at {self.url} ({str(error) or type(error).__name__})"
        return ServerUnreachable(what, hint=START_HINT if is_loopback(self.url) else ELSEWHERE_HINT)

    def _timeout(self, wait_s: float) -> httpx.Timeout:
        return httpx.Timeout(self.timeout_s + wait_s, connect=min(self.timeout_s, 10.0))


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (params or {}).items() if value is not None}


def is_loopback(url: str) -> bool:
    """Whether an address means the machine it is used on, so that another machine cannot reach it."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls(url: str, ca_file: str) -> ssl.SSLContext:
    """Loading the certificate store takes 60 ms; over plain HTTP a context that trusts nobody does."""
    if urlsplit(url).scheme == "http":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return client_context(ca_file)
