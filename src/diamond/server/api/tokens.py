"""Routes of a user's own tokens. One may always give up the token it asks with; all else needs the scope `admin`."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.accounts import Scope, Token
from diamond.core.codec import decode
from diamond.core.errors import NotFound
from diamond.core.logins import DEFAULT_SCOPES
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Anyone, Body, Ctx, Holder
from diamond.server.auth import require_user
from diamond.server.services import tokens

router = APIRouter(prefix="/api/v1", tags=["tokens"])
CURRENT = "current"


@dataclass(frozen=True, kw_only=True)
class NewUserToken:
    """`expires_in_s` null: it works until it is revoked."""

    name: str
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES
    expires_in_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokenList:
    tokens: list[Token]


@router.get(
    "/tokens",
    summary="List your tokens",
    description="Those that are not revoked, newest first: what each may do, until when, and when and from where it "
    "was last used. No values.",
    responses=returns(TokenList, "The tokens.") | USER_FAILS,
)
def list_tokens(holder: Holder, ctx: Ctx) -> Response:
    assert holder.user_id is not None
    return Json(TokenList(tokens=tokens.list_tokens(ctx, holder.user_id, current=holder.via)))


@router.post(
    "/tokens",
    status_code=201,
    summary="Make a token",
    description="Its value is in this answer and is never shown again. It may do no more than what asked for it.",
    responses=returns(Token, "The token, with its value.", status=201) | USER_FAILS,
    openapi_extra=takes(NewUserToken),
)
def create_token(holder: Holder, ctx: Ctx, body: Body) -> Response:
    assert holder.user_id is not None
    wanted = decode(NewUserToken, body, strict=True)
    scopes = tuple(scope for scope in Scope if scope in wanted.scopes)
    made = tokens.create(ctx, holder.user_id, wanted.name, scopes, wanted.expires_in_s, held=holder.scopes)
    return Json(made, 201)


@router.delete(
    "/tokens/{token_id}",
    summary="Revoke a token",
    description="It is dead at once, and so are its open streams; revoking it twice is harmless. `current` means the "
    "token that asks, which needs no scope.",
    responses=returns(Token, "It is revoked.") | USER_FAILS | fails(NotFound),
)
def revoke_token(identity: Anyone, ctx: Ctx, token_id: str) -> Response:
    if token_id == CURRENT and not identity.session_id:
        token_id = identity.via
    its_own = token_id == identity.via and bool(identity.user_id)
    # Giving up what one holds is no power: any token may end itself.
    user_id = identity.user_id if its_own else require_user(identity, Scope.ADMIN)
    assert user_id is not None
    return Json(tokens.revoke(ctx, user_id, token_id))
