"""Sending a webhook: one POST to an address a user chose, from a machine that can reach what that user cannot.

So the name is resolved here, every address it has must be a public one, and the connection goes to exactly the address
that was checked: a name that means something else a moment later changes nothing. Redirects are not followed, no proxy
of the environment is used, of the answer only the status is read, and the whole exchange has a time limit.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from diamond.core.errors import InvalidInput, Unavailable
from diamond.core.notices import is_public, parse_url
from diamond.core.tls import client_context

TIMEOUT_S = 10.0
_CONNECT_S = 5.0
_MOST_ADDRESSES = 4
Resolve = Callable[[str, int], list[str]]


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    allow_private: bool = False,
    timeout_s: float = TIMEOUT_S,
    ca_file: str = "",
    resolve: Resolve | None = None,
) -> int:
    """Send `body`; the status of a success.

    Args:
        allow_private: also to addresses inside this network.
        timeout_s: for everything together, from the connection on.
        ca_file: the one authority to trust; empty: those of the system.
        resolve: gives the addresses of a name; None: as the system does.

    Raises:
        InvalidInput: nothing may be sent there.
        Unavailable: it did not arrive; says why, and nothing of what the receiver answered.
    """
    parts = urlsplit(parse_url(url, allow_private=allow_private))
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = _checked(host, (resolve or _resolve)(host, port), allow_private, plain=parts.scheme == "http")
    context = client_context(ca_file) if parts.scheme == "https" else None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with _connected(addresses, host, port, context, timeout_s) as connection:
            connection.request("POST", target, body, {"Host": parts.netloc, **headers})
            status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{host}: {_why(error)}", field="target") from error
    if 300 <= status < 400:
        raise Unavailable(f"{host} answered {status}, and redirects are not followed", field="target")
    if not 200 <= status < 300:
        raise Unavailable(f"{host} answered {status}", field="target")
    return status


def _resolve(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"the name {host} cannot be resolved: {_why(error)}", field="target") from error
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def _checked(host: str, addresses: list[str], allow_private: bool, *, plain: bool) -> list[str]:
    """The addresses, if every one of them may be sent to: a name with one inside is not half trusted."""
    if not addresses:
        raise Unavailable(f"the name {host} has no address", field="target")
    inside = [address for address in addresses if not is_public(address)]
    if inside and not allow_private:
        raise InvalidInput(
            f"{host} has the address {inside[0]}, which is inside the server's own network: nothing is sent there",
            hint="use a receiver that everybody can reach; or the operator allows it: DIAMOND_WEBHOOK_ALLOW_PRIVATE",
            field="target",
        )
    if plain and not all(address == "::1" or address.startswith("127.") for address in addresses):
        raise InvalidInput(f"{host} is not this machine: it must be reached by https://", field="target")
    return addresses[:_MOST_ADDRESSES]


@contextmanager
def _connected(
    addresses: list[str], host: str, port: int, context: ssl.SSLContext | None, timeout_s: float
) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)  # for the Host header; connects nowhere
    raw = _first(addresses, port, min(_CONNECT_S, timeout_s))
    sock = raw
    if context is not None:
        sock = context.wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
    sock.settimeout(timeout_s)
    # A receiver that sends a byte now and then would never run into a time limit of single calls.
    late = threading.Event()
    watchdog = threading.Timer(timeout_s, _cut, (sock, late))
    watchdog.daemon = True
    watchdog.start()
    try:
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        connection.sock = sock
        yield connection
        if late.is_set():  # what was cut off can look like a short answer
            raise TimeoutError
    finally:
        watchdog.cancel()
        connection.close()
        sock.close()


def _first(addresses: list[str], port: int, timeout_s: float) -> socket.socket:
    """A connection to the first of these that takes one."""
    failure: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=timeout_s)
        except OSError as error:
            failure = error
    assert failure is not None
    raise failure


def _cut(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which another thread is using


def _why(error: Exception) -> str:
    """In words that hold nothing the receiver sent: it is not to be a way to read what the server can reach."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "it refuses connections"
    if isinstance(error, ssl.SSLError):
        return "no TLS connection could be made"
    if isinstance(error, http.client.HTTPException | ConnectionError):
        return "it did not answer as a web server does, or not in time"
    return (error.strerror if isinstance(error, OSError) else "") or type(error).__name__
