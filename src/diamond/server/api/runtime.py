"""What every route needs: the Context, the hub, who is asking, and waiting without a thread.

Owns the dependencies of the routes. Nothing here knows a particular noun.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from diamond.core.accounts import Scope
from diamond.core.bundles import is_digest
from diamond.core.errors import Forbidden, InvalidInput
from diamond.server.api.bodies import json_object
from diamond.server.auth import (
    SAFE_METHODS,
    client_address,
    require_administrator,
    require_agent,
    require_user,
)
from diamond.server.runtime import Runtime
from diamond.server.services import audit
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.store.acting import become

MAX_CURSOR = 2**63 - 1


async def _runtime(request: Request) -> Runtime:
    return cast(Runtime, request.app.state.runtime)


async def _ctx(request: Request) -> Context:
    return cast(Runtime, request.app.state.runtime).ctx


async def _identity(request: Request) -> Identity:
    runtime = cast(Runtime, request.app.state.runtime)
    identity = await runtime.authenticator.identify(request)
    become(identity.actor(client_address(request)))
    return identity


async def _user(request: Request) -> str:
    """Somebody who looks (GET) or does something."""
    scope = Scope.READ if request.method in SAFE_METHODS else Scope.LAUNCH
    return require_user(await _identity(request), scope)


async def _enroller(request: Request) -> str:
    return require_user(await _identity(request), Scope.AGENT)


async def _holder(request: Request) -> Identity:
    """Somebody who changes their own account, or what they own for good."""
    identity = await _identity(request)
    require_user(identity, Scope.READ if request.method in SAFE_METHODS else Scope.ADMIN)
    return identity


async def _administrator(request: Request) -> str:
    identity = await _identity(request)
    try:
        return require_administrator(identity)
    except Forbidden as refusal:
        path = getattr(request.scope.get("route"), "path", "unknown")
        ctx = cast(Runtime, request.app.state.runtime).ctx
        why = {"method": request.method, "path": path, "why": refusal.message}
        await run_in_threadpool(functools.partial(audit.refuse, ctx, "access.refused", identity.user_id or "", **why))
        raise


async def _agent(request: Request) -> str:
    endpoint_id = require_agent(await _identity(request))
    (await _ctx(request)).ingestion.call(endpoint_id)
    return endpoint_id


async def _party(request: Request) -> Identity:
    """An agent, or a user who looks or does something: what is for both must not be open to a token without scopes."""
    identity = await _identity(request)
    if identity.endpoint_id is not None:
        (await _ctx(request)).ingestion.call(identity.endpoint_id)
    else:
        require_user(identity, Scope.READ if request.method in SAFE_METHODS else Scope.LAUNCH)
    return identity


async def _digest(digest: str) -> str:
    if not is_digest(digest):
        raise InvalidInput(f"{digest[:90]!r} is not sha256:<64 hex digits>", field="digest")
    return digest


Server = Annotated[Runtime, Depends(_runtime)]
Ctx = Annotated[Context, Depends(_ctx)]
Anyone = Annotated[Identity, Depends(_identity)]
User = Annotated[str, Depends(_user)]
Party = Annotated[Identity, Depends(_party)]
Enroller = Annotated[str, Depends(_enroller)]
Holder = Annotated[Identity, Depends(_holder)]
Administrator = Annotated[str, Depends(_administrator)]
Agent = Annotated[str, Depends(_agent)]
Digest = Annotated[str, Depends(_digest)]
# FastAPI solves dependencies in the order of a route's parameters: routes name who is asking first, so that nobody
# unknown makes the server read or parse a body.
Body = Annotated[dict[str, Any], Depends(json_object)]
