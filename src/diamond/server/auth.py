"""Who is asking: from the Authorization header to an Identity, once every few seconds per token.

Must not accept a token from anywhere but the header: URLs end up in histories, proxies' logs and referrers.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from diamond.core.errors import Forbidden, RateLimited, Unauthenticated
from diamond.server.services import tokens
from diamond.server.services.context import Context
from diamond.server.services.tokens import Identity

CACHE_S = 5.0
_MAX_CACHED = 1000
_MAX_TOKEN_CHARS = 512
MAX_FAILURES = 20
_FAILURES_WITHIN_S = 60.0
_MAX_ADDRESSES = 10_000


class Authenticator:
    """Looks tokens up, and remembers the good ones for `CACHE_S` seconds: a token that another server process revoked
    works that much longer."""

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

    async def recheck(self, authorization: str | None) -> None:
        """Raises Unauthenticated if the token has died, whatever is remembered of it."""
        await run_in_threadpool(tokens.authenticate, self._ctx, bearer_token(authorization))

    def forget(self) -> None:
        """Somebody's token died: ask again about all of them, so that it is dead in this process at once."""
        self._known = {}


class Failures:
    """Wrong enrolment codes by address, so that nobody can try many. Kept in this process, for a minute."""

    def __init__(self) -> None:
        self._at: dict[str, deque[float]] = {}

    def check(self, address: str, now: float) -> None:
        """Raises RateLimited for an address that has failed too often lately."""
        times = self._at.get(address)
        if times and len(times) >= MAX_FAILURES and now - times[0] < _FAILURES_WITHIN_S:
            raise RateLimited(
                "too many wrong enrolment codes from this address", hint="wait a minute, then check the code"
            )

    def add(self, address: str, now: float) -> None:
        if len(self._at) >= _MAX_ADDRESSES:
            self._at = {key: times for key, times in self._at.items() if now - times[-1] < _FAILURES_WITHIN_S}
        self._at.setdefault(address, deque(maxlen=MAX_FAILURES)).append(now)


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
            hint="an agent has a token of its own, from its enrolment: `diamond endpoint enroll NAME`",
        )
    return identity.endpoint_id
