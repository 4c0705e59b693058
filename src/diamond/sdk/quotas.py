"""Quotas seen from a client: how much may be had, and how much is."""

from __future__ import annotations

import builtins
from urllib.parse import quote

from diamond.core.codec import decode, encode
from diamond.core.quotas import Limits, Quota, QuotaSetting
from diamond.sdk.transport import API, Transport


class Quotas:
    """Reached as `Client.quotas`. All but `list` are for administrators.

    `kind` is "user" or "project", with its name, or "every-user" or "every-project", with the name "all": what holds
    for those that have no limits of their own.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[Quota]:
        """How you stand, then each of the projects you are in."""
        return [decode(Quota, raw) for raw in self._transport.json("GET", f"{API}/quotas")["quotas"]]

    def all(self) -> builtins.list[QuotaSetting]:
        """Every limit that was set, defaults first. Raises Forbidden."""
        return [decode(QuotaSetting, raw) for raw in self._transport.json("GET", f"{API}/quotas/all")["quotas"]]

    def get(self, kind: str, name: str) -> Quota:
        """How one user or project stands. Raises NotFound."""
        return decode(Quota, self._transport.json("GET", _path(kind, name)))

    def set(self, kind: str, name: str, limits: Limits) -> Quota:
        """Replace the limits; None limits nothing. May be repeated.

        Raises:
            NotFound: there is no such user or project.
            InvalidInput: it is somebody's own project, which has no limits beside theirs.
        """
        return decode(Quota, self._transport.json("PUT", _path(kind, name), body=encode(limits), repeatable=True))

    def clear(self, kind: str, name: str) -> Quota:
        """Let the default hold again. May be repeated. Raises NotFound."""
        return decode(Quota, self._transport.json("DELETE", _path(kind, name), repeatable=True))


def _path(kind: str, name: str) -> str:
    return f"{API}/quotas/{quote(kind, safe='')}/{quote(name, safe='')}"
