"""Secrets seen from a client: given once, used by name, never shown again."""

from __future__ import annotations

import builtins
from urllib.parse import quote

from diamond.core.codec import decode
from diamond.core.secrets import Secret, check_secret_name, check_value
from diamond.sdk.transport import API, Transport


class Secrets:
    """Reached as `Client.secrets`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def set(self, name: str, value: str, *, project: str | None = None) -> Secret:
        """Keep a value under a name, in place of the one there was. May be repeated.

        Args:
            name: what tasks call it in ``secrets``.
            value: text of up to 64 KiB. One of less than 4 bytes cannot be hidden in logs.
            project: the project it is for; None: it is your own.

        Raises:
            InvalidInput: the name or the value cannot be used.
            NotFound: you are in no such project.
            Forbidden: you do not own the project, or the token lacks the scope: `launch`, of a project `admin`.
        """
        check_secret_name(name)
        check_value(value)
        body = {"value": value} | ({"project": project} if project is not None else {})
        return decode(Secret, self._transport.json("PUT", _path(name), body=body))

    def list(self) -> builtins.list[Secret]:
        """Your own, and those of projects you are a member of; no values."""
        return [decode(Secret, raw) for raw in self._transport.json("GET", f"{API}/secrets")["secrets"]]

    def remove(self, name: str, *, project: str | None = None) -> None:
        """Forget a secret. Jobs that run keep what they were given.

        Raises:
            NotFound: there is none of that name.
            Forbidden: you do not own the project, or the token lacks the scope: `launch`, of a project `admin`.
        """
        self._transport.request("DELETE", _path(name), params={"project": project})


def _path(name: str) -> str:
    return f"{API}/secrets/{quote(name, safe='')}"
