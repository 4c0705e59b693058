"""Routes of the identities that sign somebody in. How they come to is for browsers: `web.federation`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.errors import Conflict, NotFound
from diamond.server.api.documents import USER_FAILS, fails
from diamond.server.api.runtime import Ctx, Holder
from diamond.server.services import federation

router = APIRouter(prefix="/api/v1", tags=["accounts"])


@router.delete(
    "/me/identities/{identity_id}",
    status_code=204,
    summary="Unlink an identity of yours",
    description="It no longer signs you in; your other sessions end. `GET /api/v1/me` lists them. Not the last way to "
    "sign in.",
    responses=USER_FAILS | fails(NotFound, Conflict),
)
def unlink_identity(holder: Holder, ctx: Ctx, identity_id: str) -> Response:
    federation.unlink(ctx, holder.user_id or "", identity_id, keep_session=holder.session_id)
    return Response(status_code=204)
