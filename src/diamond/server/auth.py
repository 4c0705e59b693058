"""Who is asking: from the Authorization header to an Identity, once every few seconds per token.

Must not accept a token from anywhere but the header: URLs end up in histories, proxies' logs and referrers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from diamond.core.errors import Forbidden, Unauthenticated
from diamond.server.services import tokens
from diamond.server.services.context import Context
from diamond.server.services.tokens import Identity

CACHE_S = 5.0
_MAX_CACHED = 1000
_MAX_TOKEN_CHARS = 512


class Authenticator:
    """Looks tokens up, and remembers the good ones for `CACHE_S` seconds: a revoked token works that much longer."""

    def __init__(self, ctx: Context, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ctx = ctx
        self._clock = clock
        self._known: dict[bytes, tuple[float, Identity]] = {}

    async def identify(self, authorization: str | None) -> Identity:
        """The identity behind an Authorization header.

        Raises:
            Unauthenticated: there is none, or it is not a valid bearer token.
        """
        token = bearer_token(authorization)
        key = hashlib.sha256(token.encode()).digest()
        now = self._clock()
        found = self._known.get(key)
        if found and found[0] > now:
            return found[1]
        identity = await run_in_threadpool(tokens.authenticate, self._ctx, token)
        if len(self._known) >= _MAX_CACHED:
            self._known = {k: v for k, v in self._known.items() if v[0] > now}
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
        self._known[key] = (now + CACHE_S, identity)
        return identity


def bearer_token(authorization: str | None) -> str:
    if not authorization:
        raise Unauthenticated(
            "this needs a token",
            hint="send the header `Authorization: Bearer <token>`; yours is in $DIAMOND_HOME/client.json",
        )
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > _MAX_TOKEN_CHARS or not token.isascii():
        raise Unauthenticated(
            "the Authorization header is not `Bearer <token>`",
            hint="send the header `Authorization: Bearer <token>`; yours is in $DIAMOND_HOME/client.json",
        )
    return token


def require_user(identity: Identity) -> str:
    if identity.user_id is None:
        raise Forbidden(
            "this is for users, and the token belongs to an agent", hint="use the token in $DIAMOND_HOME/client.json"
        )
    return identity.user_id


def require_agent(identity: Identity) -> str:
    if identity.endpoint_id is None:
        raise Forbidden(
            "this is for agents, and the token belongs to a user",
            hint="an agent's token is shown once, by `diamond endpoint create`",
        )
    return identity.endpoint_id
