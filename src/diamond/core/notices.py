"""Notices: what a user wants to be told, by which channel, and how a receiver knows that it was Diamond who told.

A rule chooses events; each of those becomes one notice for it. `verify_signature` is for whoever receives webhooks.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from diamond.core.addresses import is_public
from diamond.core.compat import StrEnum
from diamond.core.errors import InvalidInput, Unauthenticated

SIGNATURE_HEADER = "Diamond-Signature"
EVENT_HEADER = "Diamond-Event"
DELIVERY_HEADER = "Diamond-Delivery"
TOLERANCE_S = 300.0
MAX_URL = 2000
ALL = "all"
_MAX_ADDRESS = 254
_MAILBOX = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_DOMAIN = re.compile(r"([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_URL_TEXT = re.compile(r"[!-~]+")  # printable ASCII, no blanks: nothing that could end a line of the request
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9]{1,20})?")
_SIGNATURE = re.compile(r"t=(\d{1,15}),v1=([0-9a-f]{64})")


class Channel(StrEnum):
    EMAIL = "email"
    WEBHOOK = "webhook"


class NoticeEvent(StrEnum):
    """What can be told of."""

    TASK_STARTED = "task.started"
    TASK_SUCCEEDED = "task.succeeded"
    TASK_FAILED = "task.failed"
    TASK_CANCELLED = "task.cancelled"
    TASK_RETRYING = "task.retrying"
    IMAGE_READY = "image.ready"
    IMAGE_FAILED = "image.failed"
    ENDPOINT_OFFLINE = "endpoint.offline"
    SHARE_ASKED = "endpoint.share_asked"
    SHARE_APPROVED = "endpoint.share_approved"
    SHARE_DECLINED = "endpoint.share_declined"
    QUOTA_NEAR = "quota.near"


# "failed" means the task's; "ready" and "offline" are unmistakable too.
_SHORT = {
    **{event.value.partition(".")[2]: event for event in reversed(NoticeEvent)},
    "failed": NoticeEvent.TASK_FAILED,
}


@dataclass(frozen=True, kw_only=True)
class NoticeRule:
    """One way a user is told of some events.

    Attributes:
        events: as chosen; ("all",) for every one there is, also those to come.
        paused_at: since when nothing is sent, because too many attempts in a row failed; `last_error` says why.
        failures: attempts in a row that failed.
        waiting: messages on their way.
        key: what webhooks are signed with; only in the answer that made the rule.
    """

    id: str
    channel: Channel
    target: str
    events: tuple[str, ...]
    created_at: float
    paused_at: float | None = None
    failures: int = 0
    last_error: str = ""
    waiting: int = 0
    delivered_at: float | None = None
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class NoticeTest:
    """What became of a message that was sent to try a rule."""

    delivered: bool
    error: str = ""


def parse_events(raw: object, field: str = "events") -> tuple[str, ...]:
    """``["task.failed"]`` or ``"failed,succeeded"``, in the order of `NoticeEvent`; "all" swallows the rest.

    Raises:
        InvalidInput: naming the one that is none.
    """
    items = raw.split(",") if isinstance(raw, str) else raw
    hint = f"write {ALL}, or any of {', '.join(NoticeEvent)}"
    if not isinstance(items, list | tuple) or not items:
        raise InvalidInput("must be a list of events", hint=hint, field=field)
    wanted: set[NoticeEvent] = set()
    for item in items:
        word = str(item).strip().lower()
        if word == ALL:
            return (ALL,)
        try:
            wanted.add(_SHORT.get(word) or NoticeEvent(word))
        except ValueError:
            raise InvalidInput(f"{word[:40]!r} is no event that can be told of", hint=hint, field=field) from None
    return tuple(event.value for event in NoticeEvent if event in wanted)


def parse_channel(raw: object, field: str = "channel") -> Channel:
    try:
        return Channel(str(raw))
    except ValueError:
        raise InvalidInput(f"{str(raw)[:40]!r} is not one of {', '.join(Channel)}", field=field) from None


def parse_address(raw: object, field: str = "target") -> str:
    """A mail address that can stand in a header and a command of SMTP as it is."""
    text = raw.strip() if isinstance(raw, str) else ""
    mailbox, _, domain = text.rpartition("@")
    if len(text) > _MAX_ADDRESS or not _MAILBOX.fullmatch(mailbox) or not _DOMAIN.fullmatch(domain):
        raise InvalidInput(
            f"{str(raw)[:60]!r} is not a mail address", hint="write it plainly: alice@example.org", field=field
        )
    return text


def parse_url(raw: object, *, allow_private: bool = False, field: str = "target") -> str:
    """The URL of a webhook: HTTPS, without credentials in it, and not the address of a machine nobody else can see.

    Names are resolved, and their addresses checked, each time something is sent there.

    Args:
        allow_private: also addresses inside the server's network, and plain HTTP on its own machine.
    """
    text = raw.strip() if isinstance(raw, str) else ""
    try:
        parts = urlsplit(text)
        host, _port = parts.hostname or "", parts.port
    except ValueError:
        parts, host = urlsplit(""), ""
    if len(text) > MAX_URL or not _URL_TEXT.fullmatch(text) or parts.scheme not in ("http", "https"):
        raise InvalidInput(
            f"{str(raw)[:80]!r} is not a URL", hint="write e.g. https://example.org/diamond", field=field
        )
    if not _HOST.fullmatch(host):
        raise InvalidInput(
            f"{host[:80]!r} is not the name of a host",
            hint="write it in letters, digits, dots and hyphens",
            field=field,
        )
    if "@" in parts.netloc:
        raise InvalidInput(
            "must hold no name or password",
            hint="messages are signed: let the receiver check that instead",
            field=field,
        )
    if parts.fragment or "#" in text:
        raise InvalidInput("must have no #fragment: servers never see it", field=field)
    local = host.rstrip(".") == "localhost" or _is_loopback(host)
    if parts.scheme == "http" and not (local and allow_private):
        raise InvalidInput("must begin with https://", hint="plain HTTP can be read on its way", field=field)
    if not allow_private and (local or not is_public(host)):
        raise InvalidInput(
            f"{host[:80]} is inside the server's own network, where it sends nothing",
            hint="use an address that everybody can reach; or the operator allows it: DIAMOND_WEBHOOK_ALLOW_PRIVATE",
            field=field,
        )
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def sign(key: str, at: int, body: bytes) -> str:
    """The value of `SIGNATURE_HEADER` for a body sent at this time."""
    made = hmac.new(key.encode(), str(at).encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={made}"


def verify_signature(key: str, header: str, body: bytes, now: float, tolerance_s: float = TOLERANCE_S) -> None:
    """Make sure that a webhook came from the server that made `key`, and was not recorded and sent again.

    Args:
        header: value of `Diamond-Signature`.
        body: exactly as received.
        now: Unix seconds; messages signed more than `tolerance_s` before or after it are refused.

    Raises:
        Unauthenticated: it did not, or cannot be told.
    """
    found = _SIGNATURE.fullmatch(header.strip())
    if found is None:
        raise Unauthenticated("the signature has not the form t=<seconds>,v1=<hex>", field=SIGNATURE_HEADER)
    at = int(found[1])
    if not hmac.compare_digest(sign(key, at, body), f"t={at},v1={found[2]}"):
        raise Unauthenticated(
            "the signature does not fit", hint="is the key that of this rule, and the body as received?",
            field=SIGNATURE_HEADER,
        )  # fmt: skip
    if abs(now - at) > tolerance_s:
        raise Unauthenticated(f"it was signed {abs(now - at):.0f} s ago: too long", field=SIGNATURE_HEADER)


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a notice says: the JSON of a webhook, and what a mail is written from.

    Attributes:
        title: one line: what happened.
        why: why it did, as far as is known.
        advice: what to do next.
        about: the ids and names of what it happened to.
    """

    event: str
    at: float
    title: str
    why: str = ""
    advice: str = ""
    about: dict[str, Any]
