"""Whose program is at the other end of a connection from this machine, as the kernel knows it.

One user's Diamond on a machine with many users must not let in whoever can connect to 127.0.0.1. Linux lists every
TCP socket with the account that made it: the peer's own is the one whose two addresses are ours, the other way round.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
_ESTABLISHED = "01"
Address = tuple[str, int]


def is_own(peer: Address | None, here: Address | None) -> bool:
    """Whether the connection comes from this machine and from a program of the account this server runs as.

    Root does not count, unless the server is root's: what runs as root and connects here carries others' connections
    more often than a browser of root's own (proxies, VPN daemons, container runtimes).
    """
    if peer is None or here is None or not is_loopback(peer[0]):
        return False
    uid = uid_of(peer, here)
    return uid is not None and uid == os.getuid() and uid != _overflow_uid()


def uid_of(peer: Address, here: Address, tables: tuple[Path, ...] = _TABLES) -> int | None:
    """The account that made the peer's socket; None: it is not on this machine, or cannot be known.

    Only connections that are established: once closed by its program, a socket is listed as root's.
    """
    wanted = (_normal(peer[0]), peer[1]), (_normal(here[0]), here[1])
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if len(words) < 8 or words[3] != _ESTABLISHED:
                continue
            if (_parse(words[1]), _parse(words[2])) == wanted:
                return int(words[7])
    return None


def is_loopback(host: str) -> bool:
    found = _normal(host)
    return found is not None and found.is_loopback


def _normal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def _parse(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address | None, int]:
    """``0100007F:1F90``: words of four bytes, each in the byte order of the machine."""
    words, _, port = text.partition(":")
    raw = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    return _normal(str(ipaddress.ip_address(raw))), int(port, 16)


def _overflow_uid() -> int:
    """What accounts of other user namespaces are shown as: it says nothing."""
    try:
        return int(_OVERFLOW.read_text())
    except (OSError, ValueError):
        return 65534
