"""The route of a pool's record: what went on in it, for the simulator."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.errors import NotFound
from diamond.core.pool_records import PoolRecord
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import Ctx, User
from diamond.server.services import pool_records

router = APIRouter(prefix="/api/v1/pools", tags=["pools"])


@router.get(
    "/{ref:path}/record",
    summary="Record a pool",
    description="Its nodes, tasks and jobs over time with what they measured, for `diamond simulate`. For its owner "
    "and owners of its project: it tells of everybody's tasks, by numbers, without names and code. At most the newest "
    "5000 tasks.",
    responses=returns(PoolRecord, "The record.") | USER_FAILS | fails(NotFound),
)
def record_pool(user: User, ctx: Ctx, ref: str) -> Response:
    return Json(pool_records.record(ctx, user, ref))
