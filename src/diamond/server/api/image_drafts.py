"""Routes of image drafts: a recipe described step by step, checked at every step, then built."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.errors import Conflict, IdempotencyMismatch, NotFound, TooLarge
from diamond.core.image_views import Build, ImageDraft
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.images import IdempotencyKey
from diamond.server.api.runtime import Body, Ctx, User
from diamond.server.api.schemas import DraftChange, DraftList, DraftVersion, NewDraft
from diamond.server.services import image_drafts

router = APIRouter(prefix="/api/v1", tags=["image-drafts"])


@router.post(
    "/image-drafts",
    status_code=201,
    summary="Begin a draft",
    description="Empty, or with the fields of a recipe.",
    responses=returns(ImageDraft, "The draft.", status=201) | USER_FAILS | fails(TooLarge),
    openapi_extra=takes(NewDraft),
)
def create_draft(user: User, ctx: Ctx, body: Body) -> Response:
    decode(NewDraft, {**body, "recipe": None}, strict=True)
    draft = image_drafts.create(ctx, user, body.get("recipe"))
    return Json(draft, 201, {"Location": f"/api/v1/image-drafts/{draft.id}"})


@router.get(
    "/image-drafts",
    summary="List drafts",
    description="Yours, the last changed first.",
    responses=returns(DraftList, "The drafts.") | USER_FAILS,
)
def list_drafts(user: User, ctx: Ctx) -> Response:
    return Json(DraftList(drafts=image_drafts.list_drafts(ctx, user)))


@router.get(
    "/image-drafts/{draft_id}",
    summary="Look at a draft",
    description="Its steps with what is wrong in them; once all are right, what a build would do (`plan`).",
    responses=returns(ImageDraft, "The draft.") | USER_FAILS | fails(NotFound),
)
def get_draft(user: User, ctx: Ctx, draft_id: str) -> Response:
    return Json(image_drafts.get(ctx, user, draft_id))


@router.put(
    "/image-drafts/{draft_id}/{step}",
    summary="Fill in a step",
    description="The steps are endpoint, base, dependencies, envs, commands and review. What is wrong is kept as well, "
    "with its errors. Refused when the draft was changed since `version`.",
    responses=returns(ImageDraft, "The draft.") | USER_FAILS | fails(NotFound, Conflict, TooLarge),
    openapi_extra=takes(DraftChange),
)
def save_step(user: User, ctx: Ctx, draft_id: str, step: str, body: Body) -> Response:
    change = decode(DraftChange, body, strict=True)
    return Json(image_drafts.save(ctx, user, draft_id, step, change.contents, version=change.version))


@router.post(
    "/image-drafts/{draft_id}/submit",
    status_code=201,
    summary="Build a draft",
    description="As building its recipe does. An error's field begins with the name of the step it is in.",
    responses=returns(Build, "A build was begun.", status=201)
    | returns(Build, "It was there, or under way.")
    | USER_FAILS
    | fails(NotFound, Conflict, IdempotencyMismatch),
    openapi_extra=takes(DraftVersion),
)
def submit_draft(user: User, ctx: Ctx, draft_id: str, body: Body, idempotency_key: IdempotencyKey = None) -> Response:
    version = decode(DraftVersion, body, strict=True).version
    made, is_new = image_drafts.submit(ctx, user, draft_id, version=version, idempotency_key=idempotency_key)
    return Json(made, 201 if is_new else 200)


@router.delete(
    "/image-drafts/{draft_id}",
    status_code=204,
    summary="Remove a draft",
    description="Harmless when it is gone already.",
    responses=USER_FAILS,
)
def remove_draft(user: User, ctx: Ctx, draft_id: str) -> Response:
    image_drafts.remove(ctx, user, draft_id)
    return Response(status_code=204)
