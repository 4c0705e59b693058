"""What every route needs: the Context, the hub, who is asking, and waiting without a thread.

Owns the dependencies of the routes. Nothing here knows a particular noun.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request

from diamond.core.bundles import is_digest
from diamond.core.errors import InvalidInput
from diamond.server.api.bodies import json_object
from diamond.server.auth import Authenticator, Failures, require_agent, require_user
from diamond.server.hub import Hub
from diamond.server.prometheus import ServerMetrics
from diamond.server.services.context import Context
from diamond.server.services.shells import ShellTable
from diamond.server.services.tokens import Identity
from diamond.server.settings import Settings
from diamond.server.trust import Trust

MAX_WAIT_S = 60.0
MAX_CURSOR = 2**63 - 1
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
        with self.waiting(request), self.hub.subscribe(*topics) as subscription:
            while True:
                answer, worth_sending = await look()
                left_s = deadline - time.monotonic()
                if worth_sending or left_s <= 0 or self.hub.closing:
                    return answer
                await subscription.wait(min(left_s, self.hub.recheck_s))


async def _runtime(request: Request) -> Runtime:
    return cast(Runtime, request.app.state.runtime)


async def _ctx(request: Request) -> Context:
    return cast(Runtime, request.app.state.runtime).ctx


async def _identity(request: Request) -> Identity:
    runtime = cast(Runtime, request.app.state.runtime)
    return await runtime.authenticator.identify(request.headers.get("authorization"))


async def _user(request: Request) -> str:
    return require_user(await _identity(request))


async def _agent(request: Request) -> str:
    return require_agent(await _identity(request))


async def _digest(digest: str) -> str:
    if not is_digest(digest):
        raise InvalidInput(f"{digest[:90]!r} is not sha256:<64 hex digits>", field="digest")
    return digest


Server = Annotated[Runtime, Depends(_runtime)]
Ctx = Annotated[Context, Depends(_ctx)]
Anyone = Annotated[Identity, Depends(_identity)]
User = Annotated[str, Depends(_user)]
Agent = Annotated[str, Depends(_agent)]
Digest = Annotated[str, Depends(_digest)]
# FastAPI solves dependencies in the order of a route's parameters: routes name who is asking first, so that nobody
# unknown makes the server read or parse a body.
Body = Annotated[dict[str, Any], Depends(json_object)]
