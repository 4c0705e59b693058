"""Routes of quotas: how one stands, and what administrators set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.errors import NotFound
from diamond.core.quotas import EVERYBODY, KINDS, Limits, Quota, QuotaSetting
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Administrator, Body, Ctx, User
from diamond.server.services import quotas

router = APIRouter(prefix="/api/v1", tags=["quotas"])
Kind = Annotated[str, Path(max_length=20, description=f"One of {', '.join(f'`{kind}`' for kind in KINDS)}.")]
Name = Annotated[str, Path(max_length=100, description=f"Of the user or project; `{EVERYBODY}` for `every-…`.")]


@dataclass(frozen=True, kw_only=True)
class QuotaList:
    quotas: list[Quota]


@dataclass(frozen=True, kw_only=True)
class QuotaSettings:
    quotas: list[QuotaSetting]


@router.get(
    "/quotas",
    summary="See how you stand",
    description="Limits, what is used and what is left: of yourself, then of each project you are in.",
    responses=returns(QuotaList, "Yours first, then projects by name.") | USER_FAILS,
)
def list_quotas(user: User, ctx: Ctx) -> Response:
    return Json({"quotas": quotas.list_quotas(ctx, user)})


@router.get(
    "/quotas/all",
    summary="List what is limited",
    description="For administrators: every limit that was set, defaults first.",
    responses=returns(QuotaSettings, "The limits.") | USER_FAILS,
)
def list_set_quotas(_administrator: Administrator, ctx: Ctx) -> Response:
    return Json({"quotas": quotas.list_set(ctx)})


@router.get(
    "/quotas/{kind}/{name}",
    summary="See how a user or project stands",
    description="For administrators.",
    responses=returns(Quota, "Its limits and what it uses.") | USER_FAILS | fails(NotFound),
)
def get_quota(_administrator: Administrator, ctx: Ctx, kind: Kind, name: Name) -> Response:
    return Json(quotas.get(ctx, kind, name))


@router.put(
    "/quotas/{kind}/{name}",
    summary="Set limits",
    description="For administrators. Replaces all limits of a user or project, or the defaults of `every-user` or "
    "`every-project`; what is left out or null is not limited. What runs goes on, even if it is more than that.",
    responses=returns(Quota, "How it stands now.") | USER_FAILS | fails(NotFound),
    openapi_extra=takes(Limits),
)
def set_quota(_administrator: Administrator, ctx: Ctx, kind: Kind, name: Name, body: Body) -> Response:
    return Json(quotas.set_limits(ctx, kind, name, decode(Limits, body, strict=True)))


@router.delete(
    "/quotas/{kind}/{name}",
    summary="Clear limits",
    description="For administrators. The default holds again; a default that is cleared limits nobody. Idempotent.",
    responses=returns(Quota, "How it stands now.") | USER_FAILS | fails(NotFound),
)
def clear_quota(_administrator: Administrator, ctx: Ctx, kind: Kind, name: Name) -> Response:
    return Json(quotas.clear(ctx, kind, name))
