"""Routes of images: build, look at, share, copy, export, import, test, remove.

In a path, `{image}` is an image's id, its name, `NAME@sha256:…` (12 digits or more), or any of these of another user as
`OWNER/NAME`.
Where a name is also that of a route, use the id.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from diamond.core import bases
from diamond.core.codec import decode, shallow
from diamond.core.errors import Conflict, Forbidden, IdempotencyMismatch, InvalidInput, NotFound, StorageFull, TooLarge
from diamond.core.image_views import Build, BuildProgress, EndpointImages, ImagePlan
from diamond.core.images import BUILD_OUTPUTS, Image
from diamond.core.tasks import Task
from diamond.server.api.answers import FileAnswer, Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, User
from diamond.server.api.schemas import (
    BaseList,
    ImagePage,
    ImageQuestion,
    ImageRemoval,
    ImageSource,
    ImageTarget,
    ImageTest,
    ImportedImage,
    NewImage,
    Sharing,
)
from diamond.server.services import endpoints, image_builds, image_copies, image_progress, images, snapshots, tasks

router = APIRouter(prefix="/api/v1", tags=["images"])
_DETAIL = ("recipe", "used_by")
IdempotencyKey = Annotated[str | None, Header(description="1 to 200 printable characters.")]
AtEndpoint = Annotated[str | None, Query(max_length=100, description="Of its result there; else of the newest.")]


def _fields(body: dict[str, Any], *names: str, required: str = "") -> dict[str, Any]:
    """The body's fields; what a person wrote inside them is checked by whoever knows what they mean."""
    for name in body:
        if name not in names:
            raise InvalidInput(
                f"unknown field {name[:80]!r}", hint=f"valid fields: {', '.join(names)}", field=name[:80]
            )
    if required and body.get(required) is None:
        raise InvalidInput("is required", field=required)
    return body


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidInput("must be text", field=name)
    return value or None


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput("must be true or false", field=name)
    return value


@router.post(
    "/images",
    status_code=201,
    summary="Build an image",
    description="Has an image of the recipe at an endpoint. The same recipe at the same endpoint is there already "
    "(`cached`), or being built already. The log of the build is that of the task `task_id`.",
    responses=returns(Build, "A build was begun.", status=201)
    | returns(Build, "It was there, or under way.")
    | USER_FAILS
    | fails(NotFound, IdempotencyMismatch, TooLarge, StorageFull),
    openapi_extra=takes(NewImage),
)
def build_image(user: User, ctx: Ctx, body: Body, idempotency_key: IdempotencyKey = None) -> Response:
    asked = _fields(body, "recipe", "endpoint", "where", "fresh", "visibility", "project", required="recipe")
    made, is_new = image_builds.build(
        ctx,
        user,
        asked["recipe"],
        endpoint=_text(asked, "endpoint"),
        where=_text(asked, "where") or "auto",
        fresh=_flag(asked, "fresh"),
        visibility=_text(asked, "visibility"),
        project=_text(asked, "project"),
        idempotency_key=idempotency_key,
    )
    return Json(made, 201 if is_new else 200, {"Location": f"/api/v1/images/{made.image.id}"})


@router.post(
    "/images/plan",
    summary="Show what a build would do",
    description="A dry run: where it would be built and why, with what, in which steps, and whether it is there. "
    "Files need not be uploaded.",
    responses=returns(ImagePlan, "The plan.") | USER_FAILS | fails(TooLarge),
    openapi_extra=takes(ImageQuestion),
)
def plan_image(user: User, ctx: Ctx, body: Body) -> Response:
    asked = _fields(body, "recipe", "endpoint", "where", "project", required="recipe")
    where, project = _text(asked, "where") or "auto", _text(asked, "project")
    found = image_builds.plan(
        ctx, user, asked["recipe"], endpoint=_text(asked, "endpoint"), where=where, project=project
    )
    return Json(found)


@router.post(
    "/images/import",
    status_code=201,
    summary="Import an image",
    description="Takes in what an export wrote, here or on another installation. Where it does not fit the endpoint, "
    "it is rebuilt with the exact versions it has.",
    responses=returns(Build, "It is on its way.", status=201)
    | returns(Build, "It was there, or under way.")
    | USER_FAILS
    | fails(IdempotencyMismatch, TooLarge, StorageFull),
    openapi_extra=takes(ImportedImage),
)
def import_image(user: User, ctx: Ctx, body: Body, idempotency_key: IdempotencyKey = None) -> Response:
    asked = _fields(body, "recipe", "facts", "payload", "lock", "name", "endpoint", required="payload")
    made, is_new = image_copies.import_image(
        ctx,
        user,
        recipe=asked.get("recipe"),
        facts=asked.get("facts"),
        payload=_text(asked, "payload") or "",
        lock=asked.get("lock"),
        name=_text(asked, "name"),
        endpoint=_text(asked, "endpoint"),
        idempotency_key=idempotency_key,
    )
    return Json(made, 201 if is_new else 200, {"Location": f"/api/v1/images/{made.image.id}"})


@router.get(
    "/images",
    summary="List images",
    description="Those you may use, newest first: yours, and what others share. Of each name only the newest.",
    responses=returns(ImagePage, "A page of images.") | USER_FAILS | fails(NotFound),
)
def list_images(
    user: User,
    ctx: Ctx,
    name: Annotated[str | None, Query(max_length=100, description="Only images of exactly this name.")] = None,
    endpoint: Annotated[str | None, Query(max_length=100, description="Only those at this endpoint.")] = None,
    everything: Annotated[bool, Query(alias="all", description="Also older ones of a name.")] = False,
    limit: Annotated[int, Query(ge=1, le=images.MAX_PAGE, description="Images on a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=60, description="`next_cursor` of the page before.")] = None,
) -> Response:
    page, next_cursor, total = images.list_images(
        ctx, user, name=name, endpoint=endpoint, everything=everything, limit=limit, cursor=cursor
    )
    rows = [{key: value for key, value in shallow(image).items() if key not in _DETAIL} for image in page]
    return Json({"images": rows, "next_cursor": next_cursor, "total": total})


@router.get(
    "/images/find",
    summary="Find an image by its name",
    description="The same as looking at it, for names with a slash.",
    responses=returns(Image, "The image.") | USER_FAILS | fails(NotFound),
)
def find_image(
    user: User, ctx: Ctx, ref: Annotated[str, Query(max_length=300, description="As a task would name it.")]
) -> Response:
    return Json(images.get(ctx, user, ref))


@router.get(
    "/images/bases",
    summary="List suggested bases",
    description="What recipes may start from; with `endpoint`, the ones made for its GPUs.",
    responses=returns(BaseList, "The suggestions.") | USER_FAILS | fails(NotFound),
)
def list_bases(
    user: User,
    ctx: Ctx,
    endpoint: Annotated[str | None, Query(max_length=100, description="For its GPUs.")] = None,
) -> Response:
    models: list[str] = []
    if endpoint:
        endpoints.get(ctx, user, endpoint)
        with ctx.db.read() as session:
            models = snapshots.gpu_models(row for row in snapshots.endpoints(session) if row.name == endpoint)
    return Json(BaseList(bases=bases.suggest(models)))


@router.post(
    "/images/{image:path}/share",
    summary="Share an image",
    description="Says who may use it, and which project it is in. Its owner can; who uses it, the owners of its "
    "project can say as well.",
    responses=returns(Image, "The image as it now is.") | USER_FAILS | fails(NotFound, Forbidden),
    openapi_extra=takes(Sharing),
)
def share_image(user: User, ctx: Ctx, image: str, body: Body) -> Response:
    wanted = decode(Sharing, body, strict=True)
    return Json(images.share(ctx, user, image, wanted.visibility, project=wanted.project))


@router.post(
    "/images/{image:path}/copy",
    status_code=201,
    summary="Bring an image to an endpoint",
    description="Taken over, copied through the server, or rebuilt, whichever fits; `how` and `why` say which.",
    responses=returns(Build, "It is on its way.", status=201)
    | returns(Build, "It was there, or under way.")
    | USER_FAILS
    | fails(NotFound, IdempotencyMismatch),
    openapi_extra=takes(ImageTarget),
)
def copy_image(user: User, ctx: Ctx, image: str, body: Body, idempotency_key: IdempotencyKey = None) -> Response:
    target = decode(ImageTarget, body, strict=True).endpoint
    made, is_new = image_copies.copy(ctx, user, image, target, idempotency_key=idempotency_key)
    return Json(made, 201 if is_new else 200)


@router.post(
    "/images/{image:path}/export",
    summary="Export an image",
    description="Has its payload brought to the server, as an output of the task in the answer; once that has "
    "succeeded, `payload` has the bytes. A payload that is still here is not brought again.",
    responses=returns(Task, "The task that brings it.") | USER_FAILS | fails(NotFound),
    openapi_extra=takes(ImageSource),
)
def export_image(user: User, ctx: Ctx, image: str, body: Body) -> Response:
    source = decode(ImageSource, body, strict=True).endpoint
    return Json(image_copies.export(ctx, user, image, endpoint=source))


@router.get(
    "/images/{image:path}/payload",
    summary="Download an exported image",
    description="The bytes an export brought. A `Range` of bytes is honoured, so a download can resume.",
    responses=returns("application/octet-stream", "The payload.")
    | returns("application/octet-stream", "The range asked for.", status=206)
    | USER_FAILS
    | fails(NotFound),
)
def read_payload(user: User, ctx: Ctx, image: str, endpoint: AtEndpoint = None) -> Response:
    name, found = image_copies.payload(ctx, user, image, endpoint=endpoint)
    digest = f"sha256:{found.sha256}"
    return FileAnswer(ctx.blobs.path(digest), name=f"{name}.payload", headers={"ETag": f'"{digest}"'})


@router.post(
    "/images/{image:path}/test",
    status_code=201,
    summary="Run a command in an image",
    description="An ordinary task: the recipe's validation command, or another one.",
    responses=returns(Task, "The task.", status=201) | USER_FAILS | fails(NotFound),
    openapi_extra=takes(ImageTest),
)
def test_image(user: User, ctx: Ctx, image: str, body: Body) -> Response:
    asked = decode(ImageTest, body, strict=True)
    return Json(image_builds.run_test(ctx, user, image, endpoint=asked.endpoint, command=asked.command), 201)


@router.get(
    "/images/{image:path}/progress",
    summary="See how far an image is",
    description="The stages of its build (or how it came), and how it ended.",
    responses=returns(BuildProgress, "How it stands.") | USER_FAILS | fails(NotFound),
)
def read_progress(user: User, ctx: Ctx, image: str, endpoint: AtEndpoint = None) -> Response:
    return Json(image_progress.progress(ctx, user, image, endpoint))


@router.get(
    "/images/{image:path}/files/{name}",
    summary="Read what is known of an image",
    description="`image.json`, `lock.json`, `sbom.cdx.json` (CycloneDX), `definition.txt`, or `failure.json`.",
    responses=returns("application/octet-stream", "The file.") | USER_FAILS | fails(NotFound),
)
def read_image_file(user: User, ctx: Ctx, image: str, name: str, endpoint: AtEndpoint = None) -> Response:
    if name not in BUILD_OUTPUTS:
        raise NotFound(f"images have no file {name[:60]!r}", hint=f"files: {', '.join(BUILD_OUTPUTS)}")
    state = image_progress.progress(ctx, user, image, endpoint)
    found = tasks.output(ctx, user, state.task_id, name)
    try:
        return FileAnswer(ctx.blobs.path(f"sha256:{found.sha256}"), name=name)
    except FileNotFoundError:
        raise NotFound(f"the bytes of {name} are not at the server") from None


@router.get(
    "/images/{image:path}",
    summary="Look at an image",
    description="The image with its recipe, its results at endpoints, and the live tasks that run in it.",
    responses=returns(Image, "The image.") | USER_FAILS | fails(NotFound),
)
def get_image(user: User, ctx: Ctx, image: str) -> Response:
    return Json(images.get(ctx, user, image))


@router.delete(
    "/images/{image:path}",
    summary="Remove an image",
    description="Everywhere, or only at one endpoint; its files go with it. Refused while live tasks run in it.",
    responses=returns(ImageRemoval, "It is gone.") | USER_FAILS | fails(NotFound, Conflict, Forbidden),
)
def remove_image(
    user: User,
    ctx: Ctx,
    image: str,
    endpoint: Annotated[str | None, Query(max_length=100, description="Only its result there.")] = None,
    force: Annotated[bool, Query(description="Even while tasks run in it.")] = False,
) -> Response:
    removed, made = image_copies.remove(ctx, user, image, endpoint=endpoint, force=force)
    remains = images.remaining(ctx, user, image) if endpoint is None else ""
    return Json(ImageRemoval(removed=removed, tasks=made, remains=remains))


@router.get(
    "/endpoints/{name}/images",
    summary="See what images take up at an endpoint",
    description="Those you may see that are there, and the space they and kept build steps take.",
    responses=returns(EndpointImages, "What lies there.") | USER_FAILS | fails(NotFound),
)
def endpoint_images(user: User, ctx: Ctx, name: str) -> Response:
    return Json(image_copies.at_endpoint(ctx, user, name))


@router.post(
    "/endpoints/{name}/images/prune",
    status_code=201,
    summary="Remove unused build steps at an endpoint",
    description="Those none of its images was made of. A task, whose log says what went. Takes no body.",
    responses=returns(Task, "The task.", status=201) | USER_FAILS | fails(NotFound),
)
def prune_images(user: User, ctx: Ctx, name: str) -> Response:
    return Json(image_copies.prune(ctx, user, name), 201)
