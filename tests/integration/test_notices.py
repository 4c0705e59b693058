"""Notices really sent: to a mail server over TLS, and to a receiver that checks signatures; and what becomes of them
when the server is killed in between."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import InstallationProblem, InvalidInput, Unavailable
from diamond.core.notices import Channel, sign
from diamond.server import mail, notifier, tls, webhooks
from diamond.server.services import notices, outbox
from diamond.server.services.context import Context
from diamond.server.settings import Settings, load_settings
from diamond.server.store.db import record_event
from diamond.server.store.models import TaskRow
from diamond.server.webhooks import Undelivered
from testing.context import Clock
from testing.mail_server import MailServer
from testing.receiver import Receiver
from testing.service import Service
from testing.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tls.Certificates:
    settings = load_settings(
        home=tmp_path_factory.mktemp("tls"), tls=True, public_url="https://receiver.invalid", host="127.0.0.1"
    )
    settings.home_dir.make()
    return tls.prepare(settings, now=time.time())


@pytest.fixture(scope="module")
def mail_server(certificates: tls.Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MailServer]:
    folder = tmp_path_factory.mktemp("mail") / "box"
    with MailServer(folder, Path(certificates.cert), Path(certificates.key)) as running:
        yield running


def mail_settings(server: MailServer, certificates: tls.Certificates, folder: Path, **more: Any) -> dict[str, Any]:
    secret = folder / "password"
    secret.write_text(server.password + "\n")
    return {
        "smtp_host": "127.0.0.1", "smtp_port": str(server.port), "smtp_ca": str(certificates.ca),
        "smtp_user": server.user, "smtp_password_file": str(secret), "mail_from": "diamond@example.org", **more,
    }  # fmt: skip


def test_a_failed_task_is_told_of_by_mail_and_by_webhook(
    mail_server: MailServer, certificates: tls.Certificates, tmp_path: Path
) -> None:
    settings = mail_settings(mail_server, certificates, tmp_path, public_url="http://diamond.invalid")
    with (
        Receiver() as receiver,
        Service(tmp_path / "home", webhook_allow_private="true", **settings) as service,
        service.client() as client,
    ):
        by_mail = service.diamond("notify", "add", "email", "alice@example.org", "--on", "failed", "--json")
        assert by_mail.returncode == 0, by_mail.stderr
        rule = client.notices.create("webhook", f"http://127.0.0.1:{receiver.port}/hook", ["all"])
        receiver.key = rule.key
        tried = service.diamond("notify", "test", rule.id)
        assert tried.returncode == 0, tried.stderr
        assert receiver.taken[0]["event"] == "test"
        task = client.tasks.create({"run": "echo last words; sleep 3; exit 3", "name": "träning: 50 %"})
        client.tasks.wait(task.id)
        eventually(lambda: len(receiver.taken) >= 3, what="test, started and failed arrive")
        assert [item["event"] for item in receiver.taken] == ["test", "task.started", "task.failed"]
        told = receiver.taken[-1]
        assert told["about"]["task_id"] == task.id
        assert (told["about"]["exit_code"], told["about"]["reason"]) == (3, "EXIT_NONZERO")
        assert told["url"] == f"http://diamond.invalid/api/v1/tasks/{task.id}"
        assert receiver.headers[-1]["Diamond-Event"] == "task.failed"
        assert receiver.headers[-1]["Diamond-Delivery"] == told["id"]
        assert receiver.forged == 0
        (found,) = eventually(lambda: mail_server.mails, what="the mail arrives")
        assert found["X-To"] == "alice@example.org"
        assert found["Subject"] == "[Diamond] Task träning: 50 % failed"
        text = found.get_content()
        assert "exit code 3" in text and f"diamond logs {task.id}" in text and "http://diamond.invalid/" in text
        (email_rule, _) = client.notices.list()
        eventually(lambda: client.notices.list()[0].delivered_at, what="it is written down")
        assert email_rule.id in text
        actions = [entry.action for entry in client.audit.entries(action="notice_rule")]
        assert actions == ["notice_rule.tested", "notice_rule.created", "notice_rule.created"]
        checked = service.diamond("audit", "verify", "--json")
        assert json.loads(checked.stdout)["ok"] is True
        out = tmp_path / "audit.jsonl"
        assert service.diamond("audit", "export", str(out)).returncode == 0
        assert service.diamond("audit", "verify", "--file", str(out)).returncode == 0
        out.write_bytes(out.read_bytes().replace(b"notice_rule.tested", b"notice_rule.teased"))
        broken = service.diamond("audit", "verify", "--file", str(out))
        assert broken.returncode == 1 and "changed" in broken.stderr


def test_a_server_killed_while_it_makes_notices_loses_and_doubles_none(tmp_path: Path) -> None:
    with (
        Receiver() as receiver,
        Service(tmp_path / "home", webhook_allow_private="true") as service,
    ):
        with service.client() as client:
            rule = client.notices.create("webhook", f"http://127.0.0.1:{receiver.port}/", ["succeeded"])
        receiver.key = rule.key
        service.kill(service.server)
        service.start_server(fault="server.notices_made")
        with service.client() as client:
            made = [client.tasks.create({"run": "true", "name": f"t{number}"}).id for number in range(4)]
        assert service.server is not None
        eventually(lambda: service.server.poll() == -signal.SIGKILL, what="the server was killed")  # type: ignore[union-attr]
        service.start_server()
        eventually(lambda: len(receiver.taken) >= 4, within_s=60, what="all four are told of")
        time.sleep(1)
        assert sorted(item["about"]["task_id"] for item in receiver.taken) == sorted(made)


SENDER = """
import sys
from pathlib import Path
from diamond.server import notifier
from diamond.server.services import outbox
from diamond.server.settings import load_settings
from testing.context import Clock, make_context
clock = Clock()
clock.now = float(sys.argv[3])
ctx = make_context(sys.argv[1], Path(sys.argv[2]), clock)
settings = load_settings(home=Path(sys.argv[2]) / "home", webhook_allow_private=True)
while outbox.match(ctx):
    pass
for parcel in outbox.claim(ctx, 4):
    notifier.deliver(ctx, settings, parcel)
"""


def prepared(ctx: Context, user_id: str, receiver: Receiver, path: str = "/") -> str:
    rule = notices.create(ctx, user_id, Channel.WEBHOOK, f"http://127.0.0.1:{receiver.port}{path}", ("all",))
    receiver.key = rule.key
    with ctx.db.write() as session:
        row = TaskRow(
            id="tsk_000000001", owner_id=user_id, name="t", spec={}, state="SUCCEEDED", desired="run", detail="",
            attempt=1, priority=0, pending_reason="", failures=0, outputs=[], created_at=1.0,
        )  # fmt: skip
        session.add(row)
        session.flush()
        data = {"state": "SUCCEEDED"}
        record_event(session, at=1.0, kind="task.state", owner_id=user_id, task_id=row.id, data=data)
    return rule.id


@pytest.mark.parametrize(
    ("fault", "times"), [("server.notices_made", 1), ("server.notices_claimed", 1), ("server.notice_sent", 2)]
)
def test_killed_at_any_step_it_arrives_with_the_same_id(
    ctx: Context, user_id: str, clock: Clock, database_url: str, tmp_path: Path, fault: str, times: int
) -> None:
    def run(now: float, fault: str = "") -> int:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "DIAMOND_FAULT": fault}
        argv = [sys.executable, "-c", SENDER, database_url, str(tmp_path), str(now)]
        return subprocess.run(argv, env=env, timeout=120, check=False).returncode

    with Receiver() as receiver:
        clock.now = time.time()
        prepared(ctx, user_id, receiver)
        assert run(clock.now, fault) == -signal.SIGKILL
        assert run(clock.now + outbox.DELAYS_S[0] + 1) == 0
        assert run(clock.now + outbox.DELAYS_S[0] + 2) == 0
        assert len(receiver.taken) == times
        assert len({item["id"] for item in receiver.taken}) == 1
        assert outbox.next_due(ctx) is None


def deliver_all(ctx: Context, settings: Settings) -> None:
    while outbox.match(ctx):
        pass
    for parcel in outbox.claim(ctx, 4):
        notifier.deliver(ctx, settings, parcel)


@pytest.mark.parametrize("status", [500, 302, 404])
def test_what_is_not_taken_is_kept_and_redirects_lead_nowhere(
    ctx: Context, user_id: str, clock: Clock, tmp_path: Path, status: int
) -> None:
    settings = load_settings(home=tmp_path / "home", webhook_allow_private=True)
    with Receiver() as receiver:
        clock.now = time.time()
        prepared(ctx, user_id, receiver)
        receiver.status = status
        deliver_all(ctx, settings)
        (rule,) = notices.list_rules(ctx, user_id)
        assert "did not arrive" in rule.last_error and rule.waiting == 1
        assert str(status) not in rule.last_error, "what is inside is not to be learned from a rule"
        receiver.status = 200
        clock.advance(61)
        deliver_all(ctx, settings)
        (rule,) = notices.list_rules(ctx, user_id)
        assert (rule.last_error, rule.waiting, rule.failures) == ("", 0, 0)
        assert receiver.connections == 2
        assert len({item["id"] for item in receiver.taken}) == 1


def test_what_was_allowed_once_is_not_for_ever(ctx: Context, user_id: str, clock: Clock, tmp_path: Path) -> None:
    """The operator changed their mind, or the name now leads inside: nothing is sent, and nothing is tried again."""
    with Receiver() as receiver:
        prepared(ctx, user_id, receiver)
        deliver_all(ctx, load_settings(home=tmp_path / "home"))
        assert receiver.connections == 0
    assert outbox.next_due(ctx) is None


def test_a_receiver_that_never_finishes_is_cut_off() -> None:
    def drip(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):
            try:
                handler.wfile.write(b"X-A: b\r\n")
                handler.wfile.flush()
            except OSError:
                return
            time.sleep(0.1)

    with Receiver(behave=drip) as receiver:
        body, began = b"{}", time.monotonic()
        headers = {"Diamond-Signature": sign("", int(time.time()), body)}
        with pytest.raises(Undelivered, match="time"):
            webhooks.post(f"http://127.0.0.1:{receiver.port}/", body, headers, allow_private=True, timeout_s=1.5)
        assert time.monotonic() - began < 5


def test_the_connection_goes_to_the_address_that_was_checked(certificates: tls.Certificates) -> None:
    """A name is looked up once; what it means a moment later does not matter. TLS is checked by the name."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.cert, certificates.key)
    asked: list[str] = []

    def resolve(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    body = b"{}"
    headers = {"Diamond-Signature": sign("", int(time.time()), body)}
    with Receiver(tls=context) as receiver:
        url = f"https://receiver.invalid:{receiver.port}/x"
        given: dict[str, Any] = {"allow_private": True, "resolve": resolve, "ca_file": str(certificates.ca)}
        assert webhooks.post(url, body, headers, **given) == 200
        assert asked == ["receiver.invalid"]
        assert receiver.headers[0]["Host"] == f"receiver.invalid:{receiver.port}"
        with pytest.raises(Undelivered, match="certificate"):
            webhooks.post(url.replace("receiver", "other"), body, headers, **given)
        with pytest.raises(Undelivered, match="certificate"):
            webhooks.post(url, body, headers, allow_private=True, resolve=resolve)


def test_nobody_listens() -> None:
    with pytest.raises(Undelivered, match="refuses"):
        webhooks.post("http://127.0.0.1:1/", b"", {}, allow_private=True)
    with pytest.raises(Undelivered, match="resolved"):
        webhooks.post("https://no-such-name.invalid/", b"", {})


def test_mail_that_cannot_be_sent_says_why(
    mail_server: MailServer, certificates: tls.Certificates, tmp_path: Path
) -> None:
    good = mail_settings(mail_server, certificates, tmp_path)

    def send(to: str = "alice@example.org", **changed: Any) -> None:
        made = mail.compose("diamond@example.org", to, "s", "t", message_id="m", at=0.0)
        mail.send(load_settings(home=tmp_path, **{**good, **changed}), made)

    before = len(mail_server.mails)
    send()
    assert len(mail_server.mails) == before + 1
    with pytest.raises(InvalidInput, match="nobody here"):
        send("nobody@example.org")
    with pytest.raises(InstallationProblem, match="TLS"):
        send(smtp_ca="")
    with pytest.raises(Unavailable, match="STARTTLS"):
        send(smtp_starttls=False, smtp_user="")
    wrong = tmp_path / "wrong"
    wrong.write_text("not it")
    with pytest.raises(InstallationProblem, match="sign in"):
        send(smtp_password_file=str(wrong))
    with pytest.raises(InstallationProblem, match="cannot be read"):
        send(smtp_password_file=str(tmp_path / "missing"))
    with pytest.raises(Unavailable, match="does not answer"):
        send(smtp_port=1)
    assert len(mail_server.mails) == before + 1
