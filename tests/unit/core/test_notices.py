"""What users write into rules, where nothing is ever sent to, and signatures that receivers check."""

from __future__ import annotations

import pytest

from diamond.core.errors import InvalidInput, Unauthenticated
from diamond.core.notices import (
    NoticeEvent,
    parse_address,
    parse_events,
    parse_url,
    sign,
    verify_signature,
)


def test_events_are_written_short_or_whole() -> None:
    assert parse_events("succeeded, FAILED,image.failed") == ("task.succeeded", "task.failed", "image.failed")
    assert parse_events(["task.failed", "task.failed"]) == ("task.failed",)
    assert parse_events("ready,offline,near") == ("image.ready", "endpoint.offline", "quota.near")
    assert parse_events("failed,all") == ("all",)
    assert parse_events([event.value for event in NoticeEvent]) == tuple(NoticeEvent)


@pytest.mark.parametrize("raw", ["", "fail", [], None, 3, "failed,nothing", {"a": 1}])
def test_what_is_no_event_is_named(raw: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_events(raw)
    assert caught.value.field == "events"


@pytest.mark.parametrize("text", ["alice@example.org", "a.b+c@x.example.org", "root@localhost"])
def test_mail_addresses(text: str) -> None:
    assert parse_address(f" {text} ") == text


@pytest.mark.parametrize(
    "text",
    [
        "", "alice", "@example.org", "alice@", "a b@example.org", "alice@exa mple.org", "alice@-x.org", "a..b@x.org",
        "alice@example.org\r\nBcc: bob@example.org", "alice@example.org,bob@example.org", "<alice@example.org>",
        "alice@example.org>", "Alice <alice@example.org>", '"a b"@example.org', "al\x00ice@example.org",
        "ünï@example.org", "alice@ex\u0430mple.org", "x" * 250 + "@example.org", None, 3,
    ],
)  # fmt: skip
def test_what_is_no_plain_address_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput):
        parse_address(text)


@pytest.mark.parametrize("text", ["https://example.org", "https://example.org:8443/a/b?c=d", "https://8.8.8.8/x"])
def test_urls(text: str) -> None:
    assert parse_url(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "example.org", "ftp://example.org", "file:///etc/passwd", "http://example.org", "https://", "https:///x",
        "https://user:secret@example.org/", "https://example.org/#x", "https://example.org/a b",
        "https://example.org/\r\nX: y", "https://example.org:99999/", "https://[::1", "gopher://x/", "javascript:x",
        "https://localhost/", "https://127.0.0.1/", "https://[::1]/", "https://10.0.0.1/", "https://192.168.1.1/",
        "https://172.16.0.1/", "https://169.254.169.254/latest/meta-data", "https://100.64.0.1/", "https://0.0.0.0/",
        "https://[fd00::1]/", "https://[fe80::1]/", "https://[::ffff:127.0.0.1]/", "https://[64:ff9b::7f00:1]/",
        "https://[2002:7f00:1::]/", "https://2130706433/", "https://0x7f000001/", "https://127.1/", "https://0177.0.0.1/",
        "https://localhost./", "https://168.63.129.16/", "https://192.88.99.1/", "https://100.100.100.200/",
        "https://%31%32%37.0.0.1/", "https://a%2eb/", "https://exa&mple.org/", "https://[fd00:ec2::254]/",
        "https://127.0.0.1./", "https://224.0.0.1/", "https://255.255.255.255/", "https://exämple.org/", None, 3,
    ],
)  # fmt: skip
def test_urls_that_nothing_is_sent_to(text: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(text)
    assert caught.value.field == "target"


def test_an_operator_may_allow_what_is_inside() -> None:
    assert parse_url("http://127.0.0.1:9/x", allow_private=True)
    assert parse_url("https://10.0.0.1/x", allow_private=True)
    with pytest.raises(InvalidInput):
        parse_url("http://10.0.0.1/x", allow_private=True)


def test_a_signature_holds_for_its_body_its_key_and_its_time() -> None:
    header = sign("key", 1000, b"body")
    verify_signature("key", header, b"body", 1100)
    verify_signature("key", f" {header} ", b"body", 900)
    for key, text, body, now in (
        ("other", header, b"body", 1000),
        ("key", header, b"Body", 1000),
        ("key", header, b"body", 1301),
        ("key", header, b"body", 600),
        ("key", header.replace("t=1000", "t=1001"), b"body", 1000),
        ("key", "", b"body", 1000),
        ("key", "t=1000,v1=00", b"body", 1000),
        ("key", header + ",v1=" + "0" * 64, b"body", 1000),
    ):
        with pytest.raises(Unauthenticated):
            verify_signature(key, text, body, now)
