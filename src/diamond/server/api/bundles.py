"""Routes of bundles: folders as lists of content-addressed files."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.bundles import Manifest
from diamond.core.errors import Forbidden, NotFound, QuotaExceeded, StorageFull, TooLarge
from diamond.server.api.answers import Json
from diamond.server.api.documents import AGENT_FAILS, USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, Digest, Party, User
from diamond.server.api.schemas import BundleAnswer
from diamond.server.services import bundles, holdings

router = APIRouter(prefix="/api/v1", tags=["bundles"])


@router.post(
    "/bundles",
    summary="Register a bundle",
    description="Takes a manifest. When files are missing it says which; upload them (`PUT /blobs/{digest}`, or many "
    "small ones with `POST /blobs/pack`) and send the manifest again. Idempotent.",
    responses=returns(BundleAnswer, "What is missing, or the reference to use.")
    | USER_FAILS
    | fails(Forbidden, QuotaExceeded)
    | fails(TooLarge, StorageFull),
    openapi_extra=takes(Manifest),
)
def register_bundle(user: User, ctx: Ctx, body: Body) -> Response:
    return Json(bundles.register(ctx, body, user))


@router.get(
    "/bundles/{digest}",
    summary="Read a bundle's manifest",
    description="For users who registered it, or may see a task or an image that holds it, and for agents whose jobs "
    "need it.",
    responses=returns(Manifest, "The manifest.") | AGENT_FAILS | fails(NotFound),
)
def get_bundle(party: Party, ctx: Ctx, digest: Digest) -> Response:
    if not holdings.may_read(ctx, party, digest):
        raise bundles.not_here(digest)
    return Json(bundles.manifest(ctx, digest))
