"""Notices seen from a client: rules that say what you are told, and how."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from urllib.parse import quote

from diamond.core.codec import decode
from diamond.core.notices import NoticeRule, NoticeTest
from diamond.sdk.transport import API, Transport

_RULES = f"{API}/notices/rules"


class Notices:
    """Reached as `Client.notices`. `diamond.core.notices.verify_signature` is for whoever receives webhooks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, channel: str, target: str, events: Sequence[str]) -> NoticeRule:
        """Be told of what happens from now on.

        Args:
            channel: "email" or "webhook".
            target: a mail address, or an HTTPS URL.
            events: names of events (`diamond.core.notices.NoticeEvent`), or ("all",).

        Returns:
            The rule. The `key` that a webhook's messages are signed with is shown this once.

        Raises:
            InvalidInput: naming what cannot be used.
        """
        body = {"channel": channel, "target": target, "events": list(events)}
        return decode(NoticeRule, self._transport.json("POST", _RULES, body=body))

    def list(self) -> builtins.list[NoticeRule]:
        """Your rules, oldest first."""
        return [decode(NoticeRule, raw) for raw in self._transport.json("GET", _RULES)["rules"]]

    def change(self, rule_id: str, *, events: Sequence[str] | None = None, paused: bool | None = None) -> NoticeRule:
        """Choose other events, pause a rule, or have it go on. Raises NotFound."""
        body = {"events": list(events) if events is not None else None, "paused": paused}
        return decode(NoticeRule, self._transport.json("PATCH", _path(rule_id), body=body, repeatable=True))

    def remove(self, rule_id: str) -> None:
        """Be told no more, not even of what waits to be sent. Raises NotFound."""
        self._transport.request("DELETE", _path(rule_id))

    def test(self, rule_id: str) -> NoticeTest:
        """Have a test message sent now; what became of it.

        Raises:
            NotFound: you have no such rule.
            RateLimited: too many tests within an hour.
        """
        return decode(NoticeTest, self._transport.json("POST", f"{_path(rule_id)}/test", wait_s=30.0))


def _path(rule_id: str) -> str:
    return f"{_RULES}/{quote(rule_id, safe='')}"
