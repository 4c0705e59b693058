"""What a server process holds while it runs, and how requests wait in it without a thread."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from diamond.server.auth import Authenticator, Failures
from diamond.server.hub import Hub, Subscription
from diamond.server.looks import Looks
from diamond.server.open_streams import OpenStreams
from diamond.server.prometheus import ServerMetrics
from diamond.server.services.context import Context
from diamond.server.services.shells import ShellTable
from diamond.server.settings import Settings
from diamond.server.trust import Trust

MAX_WAIT_S = 60.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One per process, at `app.state.runtime`."""

    ctx: Context
    hub: Hub
    settings: Settings
    metrics: ServerMetrics
    authenticator: Authenticator
    trust: Trust
    failures: Failures
    shells: ShellTable
    open_streams: OpenStreams
    looks: Looks

    @contextmanager
    def waiting(self, request: Request) -> Iterator[None]:
        """Marks a request that waits, so that it counts as waiting and not as slow."""
        request.scope["diamond.waits"] = True
        gauge = self.metrics.waiting.labels(getattr(request.scope.get("route"), "path", "unknown"))
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    @contextmanager
    def following(self, request: Request, *topics: str) -> Iterator[Subscription]:
        """A subscription of a stream, which is woken as well when somebody's credential dies."""
        with self.waiting(request), self.hub.subscribe(*topics, "credentials") as subscription:
            yield subscription

    async def still_welcome(self, request: Request) -> None:
        """Raises Unauthenticated once the credential of a request that waits has died: streams end with sessions."""
        await self.authenticator.identify(request)

    async def long_poll(
        self,
        request: Request,
        topics: tuple[str, ...],
        wait_s: float,
        look: Callable[[], Awaitable[tuple[T, bool]]],
    ) -> T:
        """Call `look` until it says its answer is worth sending, time runs out, or the server stops."""
        deadline = time.monotonic() + min(wait_s, MAX_WAIT_S)
        if wait_s <= 0:
            return (await look())[0]
        with self.following(request, *topics) as subscription:
            while True:
                await self.still_welcome(request)
                answer, worth_sending = await look()
                left_s = deadline - time.monotonic()
                if worth_sending or left_s <= 0 or self.hub.closing:
                    return answer
                await subscription.wait(min(left_s, self.hub.recheck_s))
