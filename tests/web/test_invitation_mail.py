"""Where the server sends mail: an invitation arrives; and when it cannot, the link is still there."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from diamond.server import tls
from diamond.server.settings import load_settings
from testing import people
from testing.browser import Visitor
from testing.mail_server import MailServer
from testing.service import Service


def test_an_invitation_by_mail(chromium: Any, tmp_path: Path) -> None:
    settings = load_settings(
        home=tmp_path / "tls", tls=True, public_url="https://receiver.invalid", host="127.0.0.1"
    )  # fmt: skip
    settings.home_dir.make()
    certificates = tls.prepare(settings, now=time.time())
    with MailServer(tmp_path / "box", Path(certificates.cert), Path(certificates.key)) as mail_server:
        secret = tmp_path / "password"
        secret.write_text(mail_server.password + "\n")
        sends = {
            "smtp_host": "127.0.0.1", "smtp_port": str(mail_server.port), "smtp_ca": str(certificates.ca),
            "smtp_user": mail_server.user, "smtp_password_file": str(secret), "mail_from": "diamond@example.org",
        }  # fmt: skip
        with Service(tmp_path / "home", multi_user="1", **sends) as service:
            visitor = Visitor(chromium, service.url)
            visitor.page.goto("/sign-in?next=/users")
            visitor.fill(User_name="alice", Password=people.PASSWORD)
            visitor.press("Sign in")
            visitor.page.get_by_label("User name").fill("bob")
            visitor.page.get_by_label("E-mail").fill("bob@example.org")
            visitor.press("Make the invitation")
            visitor.page.get_by_text("The link was sent to bob@example.org.").wait_for()
            link = visitor.page.get_by_label("Link", exact=True).input_value()
            [letter] = mail_server.mails
            assert letter["To"] == "bob@example.org" and link in letter.get_content()

            visitor.page.get_by_label("User name").fill("")
            visitor.page.get_by_label("E-mail").fill("nobody@example.org")
            visitor.press("Make the invitation")
            visitor.page.get_by_text("The mail was not sent. Give them the link yourself.").wait_for()
            assert "/invitation#" in visitor.page.get_by_label("Link", exact=True).input_value()

            visitor.page.goto("/settings")
            visitor.page.get_by_label("E-mail").fill("alice@example.org")
            visitor.press("Save")
            visitor.page.goto("/settings/notifications")
            assert visitor.page.get_by_label("Where to").input_value() == "alice@example.org"
            visitor.press("Tell me")
            visitor.page.get_by_text("From now on you are told.").wait_for()
            visitor.page.get_by_role("button", name=re.compile("^Test rule")).click()
            visitor.page.get_by_text("The test message was delivered.").wait_for()
            assert mail_server.mails[-1]["To"] == "alice@example.org"
            visitor.leave()
