"""Webhooks go where they may, and nowhere else: nothing here may even try to connect."""

from __future__ import annotations

import pytest

from diamond.core.errors import InvalidInput, Unavailable
from diamond.server import webhooks

BODY = b"{}"


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["fd00::1"],
        ["93.184.215.14", "192.168.0.1"],  # one of them is enough
        ["93.184.215.14", "fe80::1%eth0"],
        ["0.0.0.0"],
    ],
)
def test_a_name_that_leads_inside_is_refused(addresses: list[str]) -> None:
    with pytest.raises(InvalidInput, match="inside") as caught:
        webhooks.post("https://receiver.example.org/x", BODY, {}, resolve=lambda _host, _port: addresses)
    assert caught.value.field == "target"


def test_a_name_without_an_address() -> None:
    with pytest.raises(Unavailable, match="no address"):
        webhooks.post("https://receiver.example.org/x", BODY, {}, resolve=lambda _host, _port: [])


def test_plain_http_only_to_this_machine_itself() -> None:
    with pytest.raises(InvalidInput, match="https"):
        webhooks.post(
            "http://localhost/x", BODY, {}, allow_private=True, resolve=lambda _host, _port: ["127.0.0.1", "10.0.0.1"]
        )


def test_urls_are_checked_again_when_they_are_used() -> None:
    for url in ("https://127.0.0.1/", "http://example.org/", "https://a@example.org/"):
        with pytest.raises(InvalidInput):
            webhooks.post(url, BODY, {})
