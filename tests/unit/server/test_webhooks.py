"""Webhooks go where they may, and nowhere else: nothing here may even try to connect."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from diamond.core.errors import InvalidInput
from diamond.server import webhooks
from diamond.server.webhooks import Undelivered

BODY = b"{}"
RECEIVER = "https://receiver.example.org/x"
PUBLIC = "93.184.215.14"


@pytest.fixture(autouse=True)
def _no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> socket.socket:
        raise AssertionError("it tried to connect")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(webhooks, "is_own", lambda address: address == "93.184.215.99")


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["168.63.129.16"],
        ["100.100.100.200"],
        ["192.88.99.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["fd00::1"],
        ["fd00:ec2::254"],
        ["2002:a9fe:a9fe::1"],
        ["64:ff9b::a9fe:a9fe"],
        ["64:ff9b:1::1"],
        [PUBLIC, "192.168.0.1"],  # one of them is enough
        [PUBLIC, PUBLIC, PUBLIC, PUBLIC, "192.168.0.1"],  # also where it would not be tried
        [PUBLIC, "fe80::1%eth0"],
        ["0.0.0.0"],
        ["93.184.215.99"],  # this machine's own
    ],
)
def test_a_name_that_leads_inside_is_refused(addresses: list[str]) -> None:
    with pytest.raises(Undelivered, match="inside"):
        webhooks.post(RECEIVER, BODY, {}, resolve=lambda _host, _port: addresses)


@pytest.mark.parametrize("allow_private", [False, True])
@pytest.mark.parametrize("address", ["93.184.215.14", "::ffff:93.184.215.14", "2606:4700::1111"])
def test_an_operator_excludes_networks(allow_private: bool, address: str) -> None:
    refused = [ipaddress.ip_network("93.184.0.0/16"), ipaddress.ip_network("2606:4700::/32")]
    with pytest.raises(Undelivered, match="excluded"):
        webhooks.post(
            RECEIVER, BODY, {}, allow_private=allow_private, refused=refused, resolve=lambda _host, _port: [address]
        )


def test_a_name_without_an_address() -> None:
    with pytest.raises(Undelivered, match="no address"):
        webhooks.post(RECEIVER, BODY, {}, resolve=lambda _host, _port: [])


def test_the_machine_knows_its_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert webhooks.is_own("127.0.0.1")
    assert not webhooks.is_own("192.0.2.1")


def test_plain_http_only_to_this_machine_itself() -> None:
    with pytest.raises(Undelivered, match="https"):
        webhooks.post(
            "http://localhost/x", BODY, {}, allow_private=True, resolve=lambda _host, _port: ["127.0.0.1", "10.0.0.1"]
        )


def test_urls_are_checked_again_when_they_are_used() -> None:
    for url in ("https://127.0.0.1/", "http://example.org/", "https://a@example.org/"):
        with pytest.raises(InvalidInput):
            webhooks.post(url, BODY, {})
