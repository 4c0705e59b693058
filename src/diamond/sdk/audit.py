"""The audit log seen from a client."""

from __future__ import annotations

from collections.abc import Iterator

from diamond.core.audit import AuditEntry, AuditHead, AuditVerdict
from diamond.core.codec import decode
from diamond.sdk.transport import API, Transport


class Audit:
    """Reached as `Client.audit`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def entries(
        self,
        *,
        mine: bool = False,
        user: str | None = None,
        action: str | None = None,
        object: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
    ) -> Iterator[AuditEntry]:
        """Who did what, newest first.

        Args:
            mine: only what was done in your name; needs no administrator.
            user: only of this user, by name or id.
            action: only this action (``task.created``), or all about a noun (``task``).
            object: only what was done to the object with this id.
            since, until: Unix seconds; `until` itself is not among them.
            limit: at most this many; None: all.

        Raises:
            Forbidden: you are no administrator, and `mine` is off.
        """
        cursor, left = None, limit
        path = f"{API}/me/audit" if mine else f"{API}/audit"
        while left is None or left > 0:
            params = {"user": user, "action": action, "object": object, "since": since, "until": until}
            page = self._transport.json(
                "GET", path, params={**params, "cursor": cursor, "limit": min(left or 1000, 1000)}
            )
            found = [decode(AuditEntry, raw) for raw in page["entries"]]
            yield from found
            left = None if left is None else left - len(found)
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def head(self) -> AuditHead:
        """Where the log ends now. Keep it somewhere else, to have `verify` compare it later."""
        return decode(AuditHead, self._transport.json("GET", f"{API}/audit/head"))

    def verify(self, head: AuditHead | None = None) -> AuditVerdict:
        """Have the server recompute the whole chain.

        Args:
            head: the log as it once ended, which it must still contain.
        """
        params = {"head": str(head) if head else None}
        # A log of years takes a while.
        return decode(AuditVerdict, self._transport.json("GET", f"{API}/audit/verify", params=params, wait_s=300.0))

    def export(self, after: int = 0) -> Iterator[bytes]:
        """The log as lines of JSON, in pieces of any size; `diamond.core.audit.verify_export` checks them.

        Args:
            after: from the entry after this number on.
        """
        with self._transport.stream("GET", f"{API}/audit/export", params={"after": after or None}) as answer:
            yield from answer.iter_bytes()
