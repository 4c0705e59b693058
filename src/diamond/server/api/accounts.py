"""Routes of one's own account: who one is, one's sessions, and how one comes in."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diamond.core.accounts import SignInMethods, User
from diamond.core.codec import decode
from diamond.core.errors import Conflict, InvalidInput, NotFound, RateLimited, Unauthenticated
from diamond.server.api.account_schemas import (
    Acceptance,
    AccountChange,
    FirstAdministrator,
    NewAccount,
    NewPassword,
    PasswordChange,
    PersonList,
    SessionList,
)
from diamond.server.api.answers import Json
from diamond.server.api.bodies import json_object
from diamond.server.api.documents import OPEN, USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, Holder, Server
from diamond.server.api.runtime import User as UserId
from diamond.server.auth import client_address
from diamond.server.runtime import Runtime
from diamond.server.services import accounts, federation, sessions, tokens

router = APIRouter(prefix="/api/v1", tags=["accounts"])


def methods_of(server: Runtime) -> SignInMethods:
    """How one signs in here; for pages too."""
    is_many = server.settings.multi_user
    return SignInMethods(
        multi_user=is_many,
        password=is_many and accounts.offers_passwords(server.ctx),
        providers=tuple(federation.providers(server.ctx)) if is_many else (),
        setup_needed=is_many and accounts.setup_needed(server.ctx),
    )


@router.get(
    "/sign-in-methods",
    summary="How one signs in here",
    description="What a sign-in page or a client may offer. Needs no token.",
    responses=returns(SignInMethods, "The ways in."),
    openapi_extra=OPEN,
)
def sign_in_methods(server: Server) -> Response:
    return Json(methods_of(server))


@router.get(
    "/me",
    summary="Who you are",
    description="Your account, and what signs you in to it.",
    responses=returns(User, "You.") | USER_FAILS,
)
def me(user: UserId, ctx: Ctx) -> Response:
    return Json(accounts.me(ctx, user))


@router.patch(
    "/me",
    summary="Change what you say of yourself",
    description="Your full name and where notices go. What is left out stays.",
    responses=returns(User, "You, as you are now.") | USER_FAILS,
    openapi_extra=takes(AccountChange),
)
def change_me(holder: Holder, ctx: Ctx, body: Body) -> Response:
    wanted = decode(AccountChange, body, strict=True)
    return Json(accounts.change(ctx, holder.user_id or "", full_name=wanted.full_name, email=wanted.email))


@router.post(
    "/me/password",
    status_code=204,
    summary="Change your password",
    description="Every session of yours but this one ends. Tokens stay valid.",
    responses=USER_FAILS | fails(Conflict, RateLimited),
    openapi_extra=takes(PasswordChange),
)
def change_password(holder: Holder, ctx: Ctx, body: Body) -> Response:
    wanted = decode(PasswordChange, body, strict=True)
    accounts.change_password(
        ctx, holder.user_id or "", wanted.old_password, wanted.new_password, keep_session=holder.session_id
    )
    return Response(status_code=204)


@router.get(
    "/me/sessions",
    summary="List your sessions",
    description="Browsers that are signed in as you.",
    responses=returns(SessionList, "The sessions, newest first.") | USER_FAILS,
)
def list_sessions(holder: Holder, ctx: Ctx) -> Response:
    found = sessions.list_sessions(ctx, holder.user_id or "", current=holder.session_id)
    return Json(SessionList(sessions=found))


@router.delete(
    "/me/sessions/{session_id}",
    status_code=204,
    summary="End a session of yours",
    description="That browser is signed out, and what it follows ends.",
    responses=USER_FAILS | fails(NotFound),
)
def end_session(holder: Holder, ctx: Ctx, session_id: str) -> Response:
    sessions.end(ctx, holder.user_id or "", session_id)
    return Response(status_code=204)


@router.get(
    "/people",
    summary="List the people you work with",
    description="Names of everybody with whom you share a project, and yours.",
    responses=returns(PersonList, "The people, by name.") | USER_FAILS,
)
def list_people(user: UserId, ctx: Ctx) -> Response:
    return Json(PersonList(people=accounts.people(ctx, user)))


@router.post(
    "/setup",
    status_code=201,
    summary="Become the first administrator",
    description="With the code the server prints at its start while nobody can administer it. Needs no token.",
    responses=returns(NewAccount, "Your account.", status=201)
    | USER_FAILS
    | fails(Unauthenticated, Conflict, RateLimited),
    openapi_extra=takes(FirstAdministrator) | OPEN,
)
async def setup(request: Request, server: Server) -> Response:
    wanted = decode(FirstAdministrator, await json_object(request), strict=True)
    _check_token_name(wanted.token_name)
    address = client_address(request)

    def do() -> NewAccount:
        made = accounts.setup(
            server.ctx, wanted.code, name=wanted.name, password=wanted.password, full_name=wanted.full_name,
            email=wanted.email, address=address,
        )  # fmt: skip
        return _with_token(server, made, wanted.token_name, address)

    return Json(await run_in_threadpool(do), 201)


@router.post(
    "/invitations/accept",
    status_code=201,
    summary="Accept an invitation",
    description="Makes your account. Needs no token: the code is what lets you in.",
    responses=returns(NewAccount, "Your account.", status=201)
    | USER_FAILS
    | fails(Unauthenticated, Conflict, RateLimited),
    openapi_extra=takes(Acceptance) | OPEN,
)
async def accept_invitation(request: Request, server: Server) -> Response:
    wanted = decode(Acceptance, await json_object(request), strict=True)
    _check_token_name(wanted.token_name)
    address = client_address(request)

    def do() -> NewAccount:
        made = accounts.accept_invitation(
            server.ctx, wanted.code, name=wanted.name, password=wanted.password, full_name=wanted.full_name,
            email=wanted.email, address=address,
        )  # fmt: skip
        return _with_token(server, made, wanted.token_name, address)

    return Json(await run_in_threadpool(do), 201)


def _check_token_name(name: str) -> None:
    """Before the account is made: afterwards the code is used up."""
    if len(name) > tokens.MAX_NAME or not name.isprintable() or name != name.strip():
        raise InvalidInput(f"must be at most {tokens.MAX_NAME} printable characters", field="token_name")


def _with_token(server: Runtime, user: User, name: str, address: str) -> NewAccount:
    return NewAccount(user=user, token=accounts.first_token(server.ctx, user, name, address=address) if name else "")


@router.post(
    "/reset",
    summary="Set a new password with a code",
    description="With the code an administrator gave you. All your sessions end. Needs no token.",
    responses=returns(User, "You.") | USER_FAILS | fails(Unauthenticated, RateLimited),
    openapi_extra=takes(NewPassword) | OPEN,
)
async def use_reset(request: Request, server: Server) -> Response:
    wanted = decode(NewPassword, await json_object(request), strict=True)
    address = client_address(request)
    return Json(await run_in_threadpool(accounts.use_reset, server.ctx, wanted.code, wanted.password, address=address))
