"""Routes of administrators about people, and of whoever invites them."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Request
from starlette.responses import Response

from diamond.core.accounts import Invitation, User
from diamond.core.codec import decode
from diamond.core.errors import Conflict, NotFound
from diamond.server.api.account_schemas import (
    AdminChange,
    Closing,
    InvitationList,
    NewInvitation,
    NewReset,
    ResetCode,
    UserList,
)
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Administrator, Body, Ctx, Holder, Server
from diamond.server.hosts import base_url
from diamond.server.services import invitations, users

router = APIRouter(prefix="/api/v1", tags=["users"])


def page_url(request: Request, page: str, code: str) -> str:
    """Where a code is used; after the #, which browsers keep to themselves."""
    return f"{base_url(request)}/{page}#{code}"


@router.get(
    "/users",
    summary="List users",
    description="Everybody with an account, closed ones too. For administrators.",
    responses=returns(UserList, "The users, by name.") | USER_FAILS,
)
def list_users(_admin: Administrator, ctx: Ctx) -> Response:
    return Json(UserList(users=users.list_users(ctx)))


@router.get(
    "/users/{name}",
    summary="Look at a user",
    description="One account. For administrators.",
    responses=returns(User, "The user.") | USER_FAILS | fails(NotFound),
)
def get_user(_admin: Administrator, ctx: Ctx, name: str) -> Response:
    return Json(users.get(ctx, name))


@router.post(
    "/users/{name}/disable",
    summary="Close an account",
    description="Its sessions end, its tokens die and its live tasks are stopped, at once. What it owns stays. For "
    "administrators. Takes no body.",
    responses=returns(Closing, "The user, and how many tasks were stopped.") | USER_FAILS | fails(NotFound, Conflict),
)
def disable_user(_admin: Administrator, ctx: Ctx, name: str) -> Response:
    user, stopped = users.disable(ctx, name)
    return Json(Closing(user=user, stopped=stopped))


@router.post(
    "/users/{name}/enable",
    summary="Open a closed account",
    description="Sessions and tokens it had stay dead. For administrators. Takes no body.",
    responses=returns(User, "The user.") | USER_FAILS | fails(NotFound),
)
def enable_user(_admin: Administrator, ctx: Ctx, name: str) -> Response:
    return Json(users.enable(ctx, name))


@router.post(
    "/users/{name}/admin",
    summary="Make somebody an administrator, or an ordinary user",
    description="The last administrator stays one. For administrators.",
    responses=returns(User, "The user.") | USER_FAILS | fails(NotFound, Conflict),
    openapi_extra=takes(AdminChange),
)
def set_admin(_admin: Administrator, ctx: Ctx, name: str, body: Body) -> Response:
    return Json(users.set_admin(ctx, name, decode(AdminChange, body, strict=True).is_admin))


@router.post(
    "/users/{name}/reset",
    summary="Get a code for a user's new password",
    description="Works once, for a day; earlier ones are void. Give it to that user alone. For administrators.",
    responses=returns(ResetCode, "The code, this once.") | USER_FAILS | fails(NotFound),
    openapi_extra=takes(NewReset),
)
def reset_user(request: Request, admin: Administrator, ctx: Ctx, name: str, body: Body) -> Response:
    wanted = decode(NewReset, body, strict=True)
    code, expires_at = users.reset(ctx, admin, name, revoke_tokens=wanted.revoke_tokens)
    return Json(ResetCode(user=name, code=code, url=page_url(request, "reset", code), expires_at=expires_at))


@router.get(
    "/invitations",
    summary="List open invitations",
    description="All of them, for an administrator; else yours, and those into projects you own.",
    responses=returns(InvitationList, "The invitations, newest first.") | USER_FAILS,
)
def list_invitations(holder: Holder, ctx: Ctx) -> Response:
    return Json(InvitationList(invitations=invitations.list_invitations(ctx, holder.user_id or "")))


@router.post(
    "/invitations",
    status_code=201,
    summary="Invite somebody",
    description="A code for a new account, valid for a week, shown this once. Administrators invite anybody, owners "
    "of a project into that project.",
    responses=returns(Invitation, "The invitation with its code.", status=201) | USER_FAILS | fails(NotFound, Conflict),
    openapi_extra=takes(NewInvitation),
)
def invite(request: Request, holder: Holder, server: Server, body: Body) -> Response:
    wanted = decode(NewInvitation, body, strict=True)
    if not server.settings.multi_user:
        raise Conflict(
            "this server has one user, and listens on this machine only",
            hint="for many, start it with `diamond serve --multi-user`",
        )
    made = invitations.invite(
        server.ctx, holder.user_id or "", name=wanted.name, email=wanted.email, project=wanted.project,
        role=wanted.role, is_admin=wanted.is_admin,
    )  # fmt: skip
    return Json(dataclasses.replace(made, url=page_url(request, "invitation", made.code)), 201)


@router.delete(
    "/invitations/{invitation_id}",
    status_code=204,
    summary="Withdraw an invitation",
    description="Its code stops working.",
    responses=USER_FAILS | fails(NotFound),
)
def withdraw_invitation(holder: Holder, ctx: Ctx, invitation_id: str) -> Response:
    invitations.withdraw(ctx, holder.user_id or "", invitation_id)
    return Response(status_code=204)
