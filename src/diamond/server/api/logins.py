"""Routes of `diamond login`: two for the terminal, which has no token yet, and three for whoever approves it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.errors import Conflict, NotFound, RateLimited
from diamond.core.logins import Login, LoginAnswer, LoginQuestion, NewLogin, StartedLogin
from diamond.server.api.answers import Json
from diamond.server.api.bodies import json_object
from diamond.server.api.documents import OPEN, USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Ctx, Holder, Server
from diamond.server.auth import client_address
from diamond.server.hosts import base_url
from diamond.server.services import logins

router = APIRouter(prefix="/api/v1", tags=["logins"])


@router.post(
    "/logins",
    status_code=201,
    summary="Begin a login",
    description="A terminal names the SHA-256 of a token it has made and keeps, and shows the code in the answer. "
    "Needs no token.",
    responses=returns(StartedLogin, "The codes, and where the short one is entered.", status=201)
    | USER_FAILS
    | fails(RateLimited),
    openapi_extra=takes(NewLogin) | OPEN,
)
async def begin_login(request: Request, server: Server) -> Response:
    wanted = decode(NewLogin, await json_object(request), strict=True)
    settings = server.settings

    def begin() -> StartedLogin:
        return logins.begin(
            server.ctx,
            wanted,
            lifetime_s=settings.login_token_days * 86_400.0,
            address=client_address(request),
            url=base_url(request),
        )

    return Json(await run_in_threadpool(begin), 201)


@router.post(
    "/logins/poll",
    summary="Ask how a login stands",
    description="Every few seconds, as the first answer said; asking again is harmless. With `cancel` it is over. "
    "Needs no token.",
    responses=returns(LoginAnswer, "How it stands.") | USER_FAILS | fails(NotFound, RateLimited),
    openapi_extra=takes(LoginQuestion) | OPEN,
)
async def poll_login(request: Request, server: Server) -> Response:
    asked = decode(LoginQuestion, await json_object(request), strict=True)
    return Json(await run_in_threadpool(logins.poll, server.ctx, asked.device_code, cancel=asked.cancel))


@router.get(
    "/logins/{user_code}",
    summary="Look at a login before deciding",
    description="What asks, from where, and for how much.",
    responses=returns(Login, "The login.") | USER_FAILS | fails(NotFound, RateLimited),
)
def get_login(holder: Holder, ctx: Ctx, user_code: str) -> Response:
    return Json(logins.find(ctx, holder, user_code))


@router.post(
    "/logins/{user_code}/approve",
    summary="Approve a login",
    description="The terminal's token acts for you from now on. Takes no body.",
    responses=returns(Login, "It is approved.") | USER_FAILS | fails(NotFound, Conflict, RateLimited),
)
def approve_login(holder: Holder, ctx: Ctx, user_code: str) -> Response:
    return Json(logins.approve(ctx, holder, user_code))


@router.post(
    "/logins/{user_code}/refuse",
    summary="Refuse a login",
    description="The terminal is told no. Takes no body.",
    responses=returns(Login, "It is refused.") | USER_FAILS | fails(NotFound, Conflict, RateLimited),
)
def refuse_login(holder: Holder, ctx: Ctx, user_code: str) -> Response:
    return Json(logins.refuse(ctx, holder, user_code))
