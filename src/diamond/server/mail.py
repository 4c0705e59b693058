"""Sending a mail through the operator's mail server. Plain text; nothing a user wrote can become a header."""

from __future__ import annotations

import logging
import re
import smtplib
import ssl
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from pathlib import Path

from diamond.core.errors import InstallationProblem, InvalidInput, Unavailable
from diamond.core.notices import parse_address
from diamond.core.tls import client_context
from diamond.server.settings import Settings

log = logging.getLogger("diamond.server")
TIMEOUT_S = 20.0
_IMPLICIT_TLS_PORT = 465
_MAX_SUBJECT = 150
_MAX_BODY = 20_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_CONTROL_BUT_LINES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")


def check_allowed(settings: Settings, address: str, field: str = "target") -> str:
    """The address, if this server mails to it.

    Raises:
        InvalidInput: it is none, or the operator allows other domains only, or no mail at all.
    """
    address = parse_address(address, field)
    if not settings.smtp_host or not settings.mail_from:
        raise InvalidInput(
            "this server sends no e-mail",
            hint="use a webhook; the operator can name a mail server: DIAMOND_SMTP_HOST and DIAMOND_MAIL_FROM",
            field="channel",
        )
    domains = [domain.strip().lower() for domain in settings.mail_domains.split(",") if domain.strip()]
    domain = address.rpartition("@")[2].lower()
    if domains and domain not in domains:
        raise InvalidInput(f"this server mails to {', '.join(domains)} only, not to {domain}", field=field)
    return address


def compose(sender: str, to: str, subject: str, text: str, *, message_id: str, at: float) -> EmailMessage:
    """A mail. `message_id` stays the same when it is sent again, so that a mail box shows it once.

    Raises:
        InvalidInput: an address is none.
    """
    domain = parse_address(sender, "mail_from").rpartition("@")[2]
    mail = EmailMessage(policy=SMTP)
    mail["From"] = f"Diamond <{sender}>"
    mail["To"] = parse_address(to)
    mail["Subject"] = _CONTROL.sub(" ", subject).strip()[:_MAX_SUBJECT]
    mail["Date"] = format_datetime(datetime.fromtimestamp(at, UTC))
    mail["Message-ID"] = f"<{re.sub(r'[^a-z0-9_.]', '', message_id)}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"  # so that nobody's absence note answers
    mail.set_content(_CONTROL_BUT_LINES.sub(" ", text)[:_MAX_BODY])
    return mail


def send(settings: Settings, mail: EmailMessage) -> None:
    """Hand it to the mail server. Blocks for seconds at most.

    Raises:
        InstallationProblem: the settings do not fit together, or the mail server refuses the server itself.
        InvalidInput: the mail server refuses the receiver for good.
        Unavailable: it could not be sent now.
    """
    context = client_context(settings.smtp_ca)
    host, port = settings.smtp_host, settings.smtp_port
    try:
        if port == _IMPLICIT_TLS_PORT:
            client: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=context)
        else:
            client = smtplib.SMTP(host, port, timeout=TIMEOUT_S)
        with client:
            if settings.smtp_starttls and port != _IMPLICIT_TLS_PORT:
                client.starttls(context=context)
            if settings.smtp_user:
                client.login(settings.smtp_user, _password(settings))
            client.send_message(mail)
    except smtplib.SMTPRecipientsRefused as error:
        code, said = next(iter(error.recipients.values()))
        kind = InvalidInput if code >= 500 else Unavailable
        raise kind(f"the mail server refuses this receiver: {_shown(code, said)}", field="target") from error
    except smtplib.SMTPAuthenticationError as error:
        raise InstallationProblem(
            f"the mail server does not let Diamond sign in: {_shown(error.smtp_code, error.smtp_error)}",
            hint="the operator should check DIAMOND_SMTP_USER and DIAMOND_SMTP_PASSWORD_FILE",
            field="smtp_user",
        ) from error
    except smtplib.SMTPNotSupportedError as error:
        raise InstallationProblem(
            f"the mail server cannot do what the settings ask for: {error}",
            hint="the operator should check DIAMOND_SMTP_STARTTLS and DIAMOND_SMTP_PORT",
            field="smtp_starttls",
        ) from error
    except smtplib.SMTPResponseException as error:
        raise Unavailable(f"the mail server answered: {_shown(error.smtp_code, error.smtp_error)}") from error
    except ssl.SSLError as error:
        raise InstallationProblem(
            f"no trusted TLS connection to the mail server could be made: {error.reason or error}",
            hint="the operator should check DIAMOND_SMTP_CA and DIAMOND_SMTP_STARTTLS",
            field="smtp_ca",
        ) from error
    except (OSError, smtplib.SMTPException) as error:
        log.warning("the mail server %s does not answer: %s", host, error)  # its name is for the operator
        raise Unavailable("the mail server does not answer; the server's log says more to its operator") from error


def _password(settings: Settings) -> str:
    try:
        return Path(settings.smtp_password_file).read_text().strip() if settings.smtp_password_file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InstallationProblem(
            "the file with the mail server's password cannot be read",
            hint="the operator should check DIAMOND_SMTP_PASSWORD_FILE",
            field="smtp_password_file",
        ) from error


def _shown(code: int, said: bytes | str) -> str:
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    return _CONTROL.sub(" ", f"{code} {text}")[:200]
