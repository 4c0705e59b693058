"""Routes about the server itself: whether it answers, what it is, what it counts."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

import diamond
from diamond.core.accounts import Scope
from diamond.server.api.answers import Json
from diamond.server.api.documents import OPEN, USER_FAILS, returns
from diamond.server.api.runtime import Anyone, Ctx, Server
from diamond.server.api.schemas import Health, Info
from diamond.server.auth import require_user
from diamond.server.prometheus import CONTENT_TYPE
from diamond.server.services import tasks

router = APIRouter(tags=["server"])


@router.head("/api/v1/health", include_in_schema=False)
@router.get(
    "/api/v1/health",
    summary="Whether the server answers",
    description="Needs no token and no database.",
    responses=returns(Health, "It does."),
    openapi_extra=OPEN,
)
async def health(ctx: Ctx) -> Response:
    return Json(Health(status="ok", version=diamond.__version__, epoch=ctx.epoch))


@router.get(
    "/api/v1/info",
    summary="What this server is",
    description="Its version. For administrators, also where its data lies, which database it uses, and how many tasks "
    "are in each state.",
    responses=returns(Info, "The facts.") | USER_FAILS,
)
def info(who: Anyone, server: Server) -> Response:
    require_user(who, Scope.READ)
    ctx = server.ctx
    if server.settings.multi_user and not who.is_admin:
        return Json(Info(version=diamond.__version__, epoch=ctx.epoch))
    return Json(
        Info(
            version=diamond.__version__,
            epoch=ctx.epoch,
            data_dir=str(ctx.home.server),
            database=ctx.db.url.get_backend_name(),
            counts=tasks.counts(ctx),
        )
    )


@router.head("/metrics", include_in_schema=False)
@router.get(
    "/metrics",
    summary="The server's own metrics",
    description="In Prometheus' text format. Needs no token; holds no user's data.",
    responses=returns("text/plain", "The metrics."),
    openapi_extra=OPEN,
)
def metrics(server: Server) -> Response:
    return Response(server.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
