"""A user's tokens seen from a client."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from urllib.parse import quote

from diamond.core.accounts import Scope, Token
from diamond.core.codec import decode
from diamond.core.logins import DEFAULT_SCOPES
from diamond.sdk.transport import API, Transport

_PATH = f"{API}/tokens"


class Tokens:
    """Reached as `Client.tokens`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self, name: str, *, scopes: Iterable[Scope | str] = DEFAULT_SCOPES, expires_in_s: float | None = None
    ) -> Token:
        """Make a token. Its `value` is in this answer alone; the server keeps nothing that could show it again.

        Args:
            name: what it is for.
            scopes: what it may be used for; no more than the token that asks may.
            expires_in_s: seconds until it stops working; None: it works until it is revoked.

        Raises:
            InvalidInput: naming the field that cannot be accepted.
            Forbidden: the token that asks lacks the scope `admin`.
        """
        body = {"name": name, "scopes": [str(scope) for scope in scopes], "expires_in_s": expires_in_s}
        return decode(Token, self._transport.json("POST", _PATH, body=body))

    def list(self) -> builtins.list[Token]:
        """Those that are not revoked, newest first. `current` marks the one that asks."""
        return [decode(Token, raw) for raw in self._transport.json("GET", _PATH)["tokens"]]

    def revoke(self, token_id: str) -> Token:
        """Make a token useless at once. May be repeated.

        Raises:
            NotFound: you have no such token.
            Forbidden: the token that asks lacks the scope `admin`, and is not the one named.
        """
        return decode(Token, self._transport.json("DELETE", f"{_PATH}/{quote(token_id, safe='')}", repeatable=True))

    def revoke_current(self) -> Token:
        """Give up the token that asks; needs no scope."""
        return decode(Token, self._transport.json("DELETE", f"{_PATH}/current"))
