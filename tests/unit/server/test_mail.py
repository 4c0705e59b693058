"""Mails: whatever a task is called, it stays in the line it belongs to."""

from __future__ import annotations

from email import message_from_bytes, policy
from pathlib import Path

import pytest

from diamond.core.errors import InvalidInput
from diamond.server import mail
from diamond.server.settings import load_settings

HOSTILE = "x\r\nBcc: bob@example.org\r\n\r\nbuy\u2028now \x00\u202e\ud800"


def test_nothing_a_user_wrote_becomes_a_header() -> None:
    made = mail.compose(
        "diamond@example.org", "alice@example.org", HOSTILE, f"{HOSTILE}\n.\n", message_id=f"msg_1{HOSTILE}", at=0.0
    )
    raw = made.as_bytes()
    found = message_from_bytes(raw, policy=policy.default)
    assert sorted(found.keys()) == sorted(
        ["From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "Content-Type", "Content-Transfer-Encoding",
         "MIME-Version"]
    )  # fmt: skip
    assert found["Subject"] == "x Bcc: bob@example.org buy now"
    assert found["To"] == "alice@example.org"
    assert str(found["Message-ID"]).endswith("@example.org>")
    assert found["Auto-Submitted"] == "auto-generated"
    assert "\x00" not in found.get_content()


def test_subjects_of_any_language_and_length() -> None:
    made = mail.compose("d@example.org", "a@example.org", "Aufgabe «größer» 💎 " * 30, "Straße\n", message_id="m", at=0)
    found = message_from_bytes(made.as_bytes(), policy=policy.default)
    assert found["Subject"].startswith("Aufgabe «größer» 💎")
    assert len(found["Subject"]) <= 150
    assert found.get_content().split() == ["Straße"]


@pytest.mark.parametrize("address", ["alice@example.org\r\nBcc: b@x.org", "alice@example.org, bob@example.org"])
def test_addresses_are_checked_again_when_they_are_used(address: str) -> None:
    with pytest.raises(InvalidInput):
        mail.compose("diamond@example.org", address, "s", "t", message_id="m", at=0.0)
    with pytest.raises(InvalidInput):
        mail.compose(address, "alice@example.org", "s", "t", message_id="m", at=0.0)


def test_where_this_server_mails_to(tmp_path: Path) -> None:
    none = load_settings(home=tmp_path)
    with pytest.raises(InvalidInput, match="sends no e-mail"):
        mail.check_allowed(none, "alice@example.org")
    with pytest.raises(InvalidInput, match="sends no e-mail") as caught:
        mail.check_allowed(load_settings(home=tmp_path, smtp_host="mail"), "alice@example.org")
    assert "DIAMOND_MAIL_FROM" in caught.value.hint
    some = load_settings(
        home=tmp_path, smtp_host="mail", mail_from="diamond@example.org", mail_domains="example.org, Lab.example.com"
    )
    assert mail.check_allowed(some, "alice@LAB.example.com")
    with pytest.raises(InvalidInput, match="only"):
        mail.check_allowed(some, "alice@notexample.org")
