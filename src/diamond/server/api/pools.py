"""Routes of pools: make, list, look at, change, close. What goes on in them is decided by the server's rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from diamond.core.codec import shallow
from diamond.core.errors import Conflict, NotFound, TooLarge
from diamond.core.pools import Pool, PoolSpec
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, User
from diamond.server.services import pools

router = APIRouter(prefix="/api/v1/pools", tags=["pools"])
_DETAIL = ("pilots", "tasks", "decisions")


@dataclass(frozen=True, kw_only=True)
class PoolChange:
    """What is left out stays. `nodes`: "2..8" or 4; `walltime` and `idle` in seconds, or as "4h"."""

    nodes: str | None = None
    walltime: int | None = None
    idle: int | None = None


@dataclass(frozen=True, kw_only=True)
class PoolPage:
    """Without `pilots`, `tasks` and `decisions`."""

    pools: list[Pool]


@router.get(
    "",
    summary="List pools",
    description="Those of yours and of your projects, by name.",
    responses=returns(PoolPage, "The pools.") | USER_FAILS,
)
def list_pools(
    user: User,
    ctx: Ctx,
    closed: Annotated[bool, Query(description="Also closed ones; then the newest 200, newest first.")] = False,
) -> Response:
    return Json({"pools": [_short(pool) for pool in pools.list_pools(ctx, user, closed=closed)]})


def _short(pool: Pool) -> dict[str, Any]:
    return {key: value for key, value in shallow(pool).items() if key not in _DETAIL}


@router.post(
    "",
    status_code=201,
    summary="Make a pool",
    description="Holds nodes of an endpoint, between the least and the most of `nodes`, and runs inside what names "
    "the pool. The first nodes are asked for at once.",
    responses=returns(Pool, "The pool.", status=201) | USER_FAILS | fails(Conflict, NotFound, TooLarge),
    openapi_extra=takes(PoolSpec),
)
def create_pool(user: User, ctx: Ctx, body: Body) -> Response:
    made = pools.create(ctx, user, body)
    return Json(made, 201, {"Location": f"/api/v1/pools/{made.id}"})


# Older pools may have slashes in their names.
@router.get(
    "/{ref:path}",
    summary="Look at a pool",
    description="By its id or name, one's own of that name before others'. With its nodes (`pilots`), its tasks and "
    "the newest decisions, each with its reason.",
    responses=returns(Pool, "The pool.") | USER_FAILS | fails(NotFound),
)
def get_pool(user: User, ctx: Ctx, ref: str) -> Response:
    return Json(pools.get(ctx, user, ref))


@router.patch(
    "/{ref:path}",
    summary="Change a pool",
    description="By its owner, or an owner of its project. Pilots that run keep the walltime they have.",
    responses=returns(Pool, "As it now is.") | USER_FAILS | fails(NotFound),
    openapi_extra=takes(PoolChange),
)
def change_pool(user: User, ctx: Ctx, ref: str, body: Body) -> Response:
    return Json(pools.change(ctx, user, ref, body))


@router.delete(
    "/{ref:path}",
    summary="Close a pool",
    description="Its tasks are asked to save their state, then its nodes are let go. Tasks that are not done wait. "
    "Closing it again changes nothing.",
    responses=returns(Pool, "As it now is.") | USER_FAILS | fails(NotFound),
)
def close_pool(user: User, ctx: Ctx, ref: str) -> Response:
    return Json(pools.close(ctx, user, ref))
