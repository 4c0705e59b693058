"""Endpoints seen from a client: clusters and machines, what they offer, and who waits for them."""

from __future__ import annotations

import builtins
from urllib.parse import quote

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint, QueueEntry
from diamond.sdk.transport import API, Transport


class Endpoints:
    """Reached as `Client.endpoints`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, name: str) -> tuple[Endpoint, str]:
        """Register an endpoint.

        Args:
            name: what tasks will call it in ``resources.infra``.

        Returns:
            The endpoint, and the token its agent needs. The server keeps no copy of the token that could be shown
            again.

        Raises:
            Conflict: the name is taken.
            InvalidInput: the name cannot be used.
        """
        answer = self._transport.json("POST", f"{API}/endpoints", body={"name": name})
        return decode(Endpoint, answer["endpoint"]), str(answer["token"])

    def list(self) -> builtins.list[Endpoint]:
        """All endpoints, by name."""
        answer = self._transport.json("GET", f"{API}/endpoints")
        return [decode(Endpoint, raw) for raw in answer["endpoints"]]

    def get(self, name: str) -> Endpoint:
        """One endpoint. Raises NotFound."""
        answer = self._transport.json("GET", f"{API}/endpoints/{quote(name, safe='')}")
        return decode(Endpoint, answer.get("endpoint", answer))

    def queue(self, endpoint: str | None = None) -> builtins.list[QueueEntry]:
        """Jobs that run or wait, in the order their scheduler will take them; of all endpoints, or of one."""
        answer = self._transport.json("GET", f"{API}/queue", params={"endpoint": endpoint})
        return [decode(QueueEntry, raw) for raw in answer["queue"]]
