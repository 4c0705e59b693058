"""Sending a webhook: one POST to an address a user chose, from a machine that can reach what that user cannot.

So the name is resolved here, every address it has must be a public one, and the connection goes to exactly the address
that was checked: a name that means something else a moment later changes nothing. Redirects are not followed, no proxy
of the environment is used, of the answer only the status is read, and the whole exchange has a time limit.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from diamond.core.addresses import is_public
from diamond.core.notices import parse_url
from diamond.core.tls import client_context

TIMEOUT_S = 10.0
_CONNECT_S = 5.0
_MOST_ADDRESSES = 4
Resolve = Callable[[str, int], list[str]]
Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]


class Undelivered(Exception):
    """A message did not arrive. The text says why, and is for the operator alone."""


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    allow_private: bool = False,
    refused: Networks = (),
    timeout_s: float = TIMEOUT_S,
    ca_file: str = "",
    resolve: Resolve | None = None,
) -> int:
    """Send `body`; the status of a success.

    Args:
        allow_private: also to addresses inside this network.
        refused: networks nothing is sent to, beside those that are special everywhere.
        timeout_s: for everything together, from the connection on.
        ca_file: the one authority to trust; empty: those of the system.
        resolve: gives the addresses of a name; None: as the system does.

    Raises:
        InvalidInput: nothing may be sent to such a URL.
        Undelivered: it did not arrive, or the name leads to where nothing may be sent.
    """
    parts = urlsplit(parse_url(url, allow_private=allow_private))
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = (resolve or _resolve)(host, port)
    _check(addresses, refused, allow_private=allow_private, is_plain=parts.scheme == "http")
    context = client_context(ca_file) if parts.scheme == "https" else None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with _connected(addresses[:_MOST_ADDRESSES], host, port, context, timeout_s) as connection:
            connection.request("POST", target, body, {"Host": parts.netloc, **headers})
            status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Undelivered(_why(error)) from error
    if 300 <= status < 400:
        raise Undelivered(f"it answered {status}, and redirects are not followed")
    if not 200 <= status < 300:
        raise Undelivered(f"it answered {status}")
    return status


def _resolve(host: str, port: int) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Undelivered(f"its name cannot be resolved: {_why(error)}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _check(addresses: list[str], refused: Networks, *, allow_private: bool, is_plain: bool) -> None:
    """Raises Undelivered unless every address may be sent to: a name with one inside is not half trusted."""
    if not addresses:
        raise Undelivered("its name has no address")
    for address in addresses:
        if _is_in(address, refused):
            raise Undelivered(f"it has the address {address}, which the operator excluded")
        if not allow_private and (not is_public(address) or is_own(address)):
            raise Undelivered(f"it has the address {address}, which is inside the server's own network")
        if is_plain and not ipaddress.ip_address(address).is_loopback:
            raise Undelivered("it is not this machine: it must be reached by https://")


def _is_in(address: str, networks: Networks) -> bool:
    plain = ipaddress.ip_address(address.partition("%")[0])
    mapped = plain.ipv4_mapped if isinstance(plain, ipaddress.IPv6Address) else None
    return any((mapped or plain) in network for network in networks)


def is_own(address: str) -> bool:
    """Whether this machine itself has the address, however public it looks. Sends nothing: a datagram socket only looks
    up from which of our addresses it would go there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    except OSError:  # there is no way there at all
        return False


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
