"""Which addresses are inside, however they are written."""

from __future__ import annotations

import pytest

from diamond.core.addresses import is_public

INSIDE = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.255.255.255
168.63.129.16 169.254.169.254 169.254.170.2 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.9 192.0.0.170 192.0.0.192
192.0.2.1 192.31.196.1 192.52.193.1 192.88.99.1 192.168.0.1 192.175.48.1 198.18.0.1 198.19.255.255 198.51.100.1
203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 ::10.0.0.1 ::8.8.8.8 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe ::ffff:8.8.8.8 64:ff9b::10.0.0.1 64:ff9b::a83f:8110
64:ff9b::a9fe:a9fe 64:ff9b:1::1 64:ff9b:1:a9fe:a9:fe00:: 100::1 2001::1 2001:0:a9fe:a9fe::1 2001:2::1 2001:10::1
2001:20::1 2001:1ff::1 2001:db8::1 2002:a00:1::1 2002:808:808::1 2620:4f:8000::1 2a00:1450:4001::5efe:a00:1
2a00:1450:4001::200:5efe:a00:1 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1
"""
NUMBERS = """
0 1 127.1 127.0.1 0177.0.0.1 0x7f.0.0.1 0x7f000001 2130706433 017700000001 127.0.0.1. 127.0.0.01 0x 08.8.8.8
3232235777 1.2.3.4.5
"""
PUBLIC = """
1.1.1.1 8.8.8.8 93.184.215.14 100.63.255.255 100.128.0.1 168.63.129.15 168.63.129.17 172.15.255.255 172.32.0.1
192.0.1.1 192.88.98.1 198.17.255.255 198.20.0.1 223.255.255.255 2606:4700::1111 2a00:1450:4001:830::200e
2001:200::1 2001:4860:4860::8888 64:ff9b::808:808 2620:0:2d0::1 3ffe::1
"""


@pytest.mark.parametrize("text", INSIDE.split())
def test_special_addresses_are_inside(text: str) -> None:
    assert not is_public(text)


@pytest.mark.parametrize("text", NUMBERS.split())
def test_numbers_that_a_resolver_may_take_for_an_address_are_no_names(text: str) -> None:
    assert not is_public(text)


@pytest.mark.parametrize("text", PUBLIC.split())
def test_addresses_of_everybodys_internet(text: str) -> None:
    assert is_public(text)


@pytest.mark.parametrize("text", ["example.org", "1.example.org", "0xdead.example.org", "a1"])
def test_names_are_checked_by_their_addresses(text: str) -> None:
    assert is_public(text)
