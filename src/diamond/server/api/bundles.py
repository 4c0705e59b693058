"""Routes of bundles: folders as lists of content-addressed files."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.bundles import Manifest
from diamond.core.errors import NotFound, StorageFull, TooLarge
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Anyone, Body, Ctx, Digest, User
from diamond.server.api.schemas import BundleAnswer
from diamond.server.services import bundles

router = APIRouter(prefix="/api/v1", tags=["bundles"])


@router.post(
    "/bundles",
    summary="Register a bundle",
    description="Takes a manifest. When files are missing it says which; upload them (`PUT /blobs/{digest}`, or many "
    "small ones with `POST /blobs/pack`) and send the manifest again. Idempotent.",
    responses=returns(BundleAnswer, "What is missing, or the reference to use.")
    | USER_FAILS
    | fails(TooLarge, StorageFull),
    openapi_extra=takes(Manifest),
)
def register_bundle(_user: User, ctx: Ctx, body: Body) -> Response:
    return Json(bundles.register(ctx, body))


@router.get(
    "/bundles/{digest}",
    summary="Read a bundle's manifest",
    description="For users and agents.",
    responses=returns(Manifest, "The manifest.") | USER_FAILS | fails(NotFound),
)
def get_bundle(_anyone: Anyone, ctx: Ctx, digest: Digest) -> Response:
    return Json(bundles.manifest(ctx, digest))
