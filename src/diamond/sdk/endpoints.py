"""Endpoints seen from a client: clusters and machines, what they offer, and who waits for them."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from urllib.parse import quote

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint, QueueEntry
from diamond.core.enrolment import Enrolment
from diamond.sdk.transport import API, Transport


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How far a rotation got.

    Attributes:
        rotated: the agent has a new token, and the old one is dead.
        online: the agent was there to be asked. If it did not answer in time, it changes its token when it does.
        enrolment: for an agent that is offline, a code that replaces its token.
    """

    rotated: bool
    online: bool
    enrolment: Enrolment | None = None


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

    def create_with_code(self, name: str) -> tuple[Endpoint, Enrolment]:
        """Register an endpoint whose agent will enrol with a one-time code instead of a token.

        Args:
            name: what tasks will call it in ``resources.infra``.

        Returns:
            The endpoint, and what the line to paste on its machine is made of
            (`diamond.core.enrolment.enrolment_lines`). The code works once, for an hour.

        Raises:
            Conflict: the name is taken.
            InvalidInput: the name cannot be used.
        """
        answer = self._transport.json("POST", f"{API}/endpoints", body={"name": name, "token": False})
        return decode(Endpoint, answer["endpoint"]), decode(Enrolment, answer["enrolment"])

    def enrol(self, name: str) -> Enrolment:
        """A fresh code for an endpoint that exists; earlier codes are void. Its agent goes on until it is used.

        Raises:
            NotFound: there is no such endpoint.
        """
        return decode(Enrolment, self._transport.json("POST", f"{_path(name)}/enrolment"))

    def rotate(self, name: str, *, wait_s: float = 20.0) -> Rotation:
        """Have the endpoint's agent replace its token. May be repeated.

        Args:
            wait_s: seconds to wait for it.

        Raises:
            NotFound: there is no such endpoint.
            Conflict: it has no token to replace.
        """
        params = {"wait_s": wait_s}
        return decode(Rotation, self._transport.json("POST", f"{_path(name)}/rotate", params=params, wait_s=wait_s))

    def revoke(self, name: str) -> int:
        """Kill every token and code of an endpoint now; how many tokens that were. Its jobs go on where they run.

        Raises:
            NotFound: there is no such endpoint.
        """
        return int(self._transport.json("POST", f"{_path(name)}/revoke", repeatable=True)["revoked"])

    def remove(self, name: str, *, force: bool = False) -> int:
        """Forget an endpoint; finished tasks keep their record.

        Args:
            force: even if it has live jobs, which are then no longer watched.

        Returns:
            How many live jobs were given up.

        Raises:
            NotFound: there is no such endpoint.
            Conflict: it has live jobs, and `force` was not given.
        """
        return int(self._transport.json("DELETE", _path(name), params={"force": force or None})["given_up"])

    def list(self) -> builtins.list[Endpoint]:
        """All endpoints, by name."""
        answer = self._transport.json("GET", f"{API}/endpoints")
        return [decode(Endpoint, raw) for raw in answer["endpoints"]]

    def get(self, name: str) -> Endpoint:
        """One endpoint. Raises NotFound."""
        answer = self._transport.json("GET", _path(name))
        return decode(Endpoint, answer.get("endpoint", answer))

    def queue(self, endpoint: str | None = None) -> builtins.list[QueueEntry]:
        """Jobs that run or wait, in the order their scheduler will take them; of all endpoints, or of one."""
        answer = self._transport.json("GET", f"{API}/queue", params={"endpoint": endpoint})
        return [decode(QueueEntry, raw) for raw in answer["queue"]]


def _path(name: str) -> str:
    return f"{API}/endpoints/{quote(name, safe='')}"
