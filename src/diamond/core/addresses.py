"""Which addresses belong to everybody's Internet, and which lead inside: to a machine, its network, or its cloud.

The list is our own, from the IANA registries of special-purpose addresses, since what Python calls private or global
differs between its versions. Must not resolve names or open connections.
"""

from __future__ import annotations

import ipaddress
import re

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SPECIAL_4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' NAT; metadata of Alibaba Cloud (100.100.100.200)
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's own services, at an address that looks public
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments; metadata of Oracle Cloud (192.0.0.192)
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")  # all that is given out; the rest is special or nobody's
_SPECIAL_6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks and others
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which carries an IPv4 address
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the one prefix whose IPv4 address everybody reads alike
_ISATAP = (0x00005EFE, 0x02005EFE)  # before an IPv4 address, in the lower half of an IPv6 address
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")


def is_public(host: str) -> bool:
    """Whether an IP address belongs to everybody's Internet. True also for a name: its addresses are to be checked."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return not _looks_numeric(host)
    return _is_public_4(address) if isinstance(address, ipaddress.IPv4Address) else _is_public_6(address)


def _is_public_4(address: ipaddress.IPv4Address) -> bool:
    return not any(address in network for network in _SPECIAL_4)


def _is_public_6(address: ipaddress.IPv6Address) -> bool:
    if address in _NAT64:
        return _is_public_4(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address not in _UNICAST_6 or any(address in network for network in _SPECIAL_6):
        return False
    return int(address) >> 32 & 0xFFFFFFFF not in _ISATAP


def _looks_numeric(host: str) -> bool:
    """``127.1``, ``0x7f000001``, ``0177.0.0.1``, ``2130706433``: some resolvers take them for addresses."""
    return all(_NUMBER.fullmatch(part) for part in host.rstrip(".").split("."))
