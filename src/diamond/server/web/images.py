"""The Image Manager: images that were built, what is in them, where they are, who uses them, and what can be done."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.codec import encode
from diamond.core.errors import Conflict, DiamondError, NotFound
from diamond.core.images import BUILD_OUTPUTS, ReplicaState
from diamond.core.projects import Visibility
from diamond.core.tasks import Task
from diamond.server.services import (
    build_places,
    image_builds,
    image_copies,
    image_files,
    image_search,
    images,
    ownership,
    projects,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.web.forms import Fields, Form, Visitor
from diamond.server.web.image_pages import about, frame, recipe_text
from diamond.server.web.pages import ctx_of, page_router, show, to

router = page_router()
_NOTICES = {
    "deleted": "The image is deleted; its files go as soon as their endpoints are told.",
    "cached": "It was there already: the same recipe was built before. Nothing had to be built.",
    "shared": "Saved who may use it.",
    "transferred": "The image was handed on.",
    "removed": "It is removed at that endpoint.",
    "export": "The image is being brought to the server; the file can be downloaded as soon as it is there.",
    "there": "It is there already.",
}
_PAGE = 50
_PACKAGES = 100
_VISIBILITIES = [
    (Visibility.PRIVATE.value, "Private: its owner alone"),
    (Visibility.PROJECT.value, "Project: its members"),
    (Visibility.PUBLIC.value, "Public: everybody here"),
]
_FILTERS = ("text", "state", "endpoint", "visibility", "whose", "sort")


def _notice(request: Request) -> str:
    return _NOTICES.get(request.query_params.get("done", ""), "")


def _number(request: Request, name: str = "page") -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 8 else 1


@router.api_route("/images", methods=["GET", "HEAD"])
def images_page(request: Request, who: Visitor) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    asked = {name: request.query_params.get(name, "")[:100] for name in _FILTERS}
    everything = request.query_params.get("all", "") == "1"
    found = image_search.search(
        ctx, who.user_id, image_search.Filters(**asked, everything=everything), page=_number(request), size=_PAGE
    )
    kept = {name: value for name, value in asked.items() if value} | ({"all": "1"} if everything else {})
    return show(
        request,
        "images.html",
        who=who,
        found=found,
        asked=asked,
        everything=everything,
        is_filtered=bool(set(kept) - {"sort"}),
        link=lambda **changed: "/images?" + urlencode(kept | {name: str(value) for name, value in changed.items()}),
        endpoints=[place.name for place in build_places.places(ctx, who.user_id)],
        sorts=image_search.SORTS,
        states=image_search.STATES,
        visibilities=[each.value for each in Visibility],
        notice=_notice(request),
    )


@router.api_route("/images/{image}", methods=["GET", "HEAD"])
def image_page(request: Request, who: Visitor, image: str) -> Response:
    return _overview(request, who, image, notice=_notice(request))


def _overview(
    request: Request, who: Identity, ref: str, *, status: int = 200, typed: Form | None = None, **values: Any
) -> Response:
    assert who.user_id is not None
    ctx, user_id = ctx_of(request), who.user_id
    image = images.get(ctx, user_id, ref)
    live = [each for each in image.replicas if each.state in (ReplicaState.READY, ReplicaState.BUILDING)]
    ready = [each for each in live if each.state is ReplicaState.READY]
    places = build_places.places(ctx, user_id)
    targets = [place for place in places if place.name not in {each.endpoint for each in live}]
    return show(
        request,
        "image.html",
        who=who,
        status=status,
        **frame(ctx, user_id, image),
        may_change=image_search.may_change(ctx, user_id, image.id),
        users=[task for task_id in image.used_by[:50] if (task := _task(ctx, user_id, task_id)) is not None],
        targets=targets,
        ready=ready,
        ready_options=[(each.endpoint, each.endpoint) for each in ready if each.endpoint != images.ELSEWHERE],
        target_options=[(each.name, each.name) for each in targets],
        projects=[(each.name, each.title or each.name) for each in projects.list_projects(ctx, user_id)],
        visibilities=_VISIBILITIES,
        exporting=image_files.exporting(ctx, user_id, image.id) if ready else image_files.Exporting(),
        typed=typed or {},
        **values,
    )


def _task(ctx: Context, user_id: str, task_id: str) -> Task | None:
    try:
        return tasks.get(ctx, user_id, task_id)
    except NotFound:
        return None


@router.api_route("/images/{image}/packages", methods=["GET", "HEAD"])
def packages_page(request: Request, who: Visitor, image: str) -> Response:
    """What is in it, exactly: searched and in pages, since an image has hundreds of packages."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    found = images.get(ctx, who.user_id, image)
    asked = request.query_params.get("text", "").strip()[:100]
    kind = request.query_params.get("kind", "")[:20]
    lock, where = None, ""
    with contextlib.suppress(NotFound):
        lock, where = image_search.packages(ctx, who.user_id, image, request.query_params.get("endpoint") or None)
    all_of_it = lock.packages if lock is not None else ()
    kept = [p for p in all_of_it if asked.lower() in p.name.lower() and kind in ("", p.kind)]
    pages = max(1, -(-len(kept) // _PACKAGES))
    page = min(_number(request), pages) or 1
    return show(
        request,
        "image_packages.html",
        who=who,
        **frame(ctx, who.user_id, found),
        lock=lock,
        where=where,
        asked=asked,
        kind=kind,
        kinds=sorted({each.kind for each in all_of_it}),
        total=len(kept),
        packages=kept[(page - 1) * _PACKAGES : page * _PACKAGES],
        page=page,
        pages=pages,
        link=lambda number: "?" + urlencode({"text": asked, "kind": kind, "page": number}),
    )


@router.api_route("/images/{image}/recipe", methods=["GET", "HEAD"])
def recipe_page(request: Request, who: Visitor, image: str) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    found = images.get(ctx, who.user_id, image)
    assert found.recipe is not None
    definition = about(ctx, who.user_id, found, "definition.txt")
    values: dict[str, Any] = {
        "recipe": recipe_text(found.recipe),
        "definition": definition,
        "files": found.recipe.files,
    }
    return show(request, "image_recipe.html", who=who, **frame(ctx, who.user_id, found), **values)


@router.post("/images/{image}/test")
def test_image(request: Request, who: Visitor, image: str, form: Fields) -> Response:
    assert who.user_id is not None
    try:
        task = image_builds.run_test(
            ctx_of(request),
            who.user_id,
            image,
            endpoint=form.get("endpoint") or None,
            command=form.get("command", "").replace("\r\n", "\n").strip() or None,
        )
    except NotFound:
        raise
    except DiamondError as error:
        return _again(request, who, image, form, error, ("command",))
    return to(f"/tasks/{task.id}")


@router.post("/images/{image}/copy")
def copy_image(request: Request, who: Visitor, image: str, form: Fields) -> Response:
    assert who.user_id is not None
    target = form.get("target", "")
    try:
        made, is_new = image_copies.copy(ctx_of(request), who.user_id, image, target)
    except NotFound:
        raise
    except DiamondError as error:
        return _again(request, who, image, form, error, ("target",), endpoint="target")
    if made.cached or not is_new:
        return to(f"/images/{made.image.id}?done=there")
    return to(f"/images/{made.image.id}/log?{urlencode({'endpoint': made.replica.endpoint})}")


@router.post("/images/{image}/rebuild")
def rebuild(request: Request, who: Visitor, image: str, form: Fields) -> Response:
    """Build its recipe once more, say after the reason why it failed is gone."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    found = images.get(ctx, who.user_id, image)
    try:
        recipe = encode(found.recipe) | {"name": found.name}
        made, _ = image_builds.build(ctx, who.user_id, recipe, endpoint=form.get("endpoint") or None)
    except NotFound:
        raise
    except DiamondError as error:
        return _again(request, who, image, form, error, ())
    return to(f"/images/{made.image.id}/log?{urlencode({'endpoint': made.replica.endpoint})}")


@router.post("/images/{image}/share")
def share_image(request: Request, who: Visitor, image: str, form: Fields) -> Response:
    assert who.user_id is not None
    project = form.get("project") or None
    ctx = ctx_of(request)
    try:
        before = images.get(ctx, who.user_id, image)
        moved = project if project != before.project and before.is_mine else None
        images.share(ctx, who.user_id, image, form.get("visibility") or None, project=moved)
    except NotFound as error:
        if error.field != "project":
            raise
        return _again(request, who, image, form, error, ("project",))
    except DiamondError as error:
        return _again(request, who, image, form, error, ("visibility", "project"))
    return to(f"/images/{before.id}?done=shared")


@router.post("/images/{image}/transfer")
def transfer_image(request: Request, who: Visitor, image: str, form: Fields) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    try:
        ownership.transfer_image(ctx, ownership.Giver(user_id=who.user_id), image, form.get("to", "").strip())
    except NotFound as error:
        if error.field not in ("to", "user"):
            raise
        return _again(request, who, image, form, error, ("to",), user="to")
    except DiamondError as error:
        return _again(request, who, image, form, error, ("to",), user="to")
    return to("/images?done=transferred")


@router.post("/images/{image}/delete")
def delete_image(request: Request, who: Visitor, image: str, form: Fields) -> Response:
    """Everywhere, or at one endpoint. Asks for a second confirmation while tasks run in it."""
    assert who.user_id is not None
    endpoint = form.get("endpoint") or None
    try:
        image_copies.remove(ctx_of(request), who.user_id, image, endpoint=endpoint, force=form.get("force", "") == "1")
    except Conflict as error:
        return _overview(
            request, who, image, status=409, typed=form, problem=error, still_used=endpoint or "everywhere"
        )
    return to("/images?done=deleted" if endpoint is None else f"/images/{image}?done=removed")


@router.api_route("/images/{image}/files/{name}", methods=["GET", "HEAD"])
def read_file(request: Request, who: Visitor, image: str, name: str) -> Response:
    """What is known of it, for download: lock, bill of materials, definition."""
    assert who.user_id is not None
    if name not in BUILD_OUTPUTS:
        raise NotFound(f"images have no file {name[:60]!r}", hint=f"files: {', '.join(BUILD_OUTPUTS)}")
    ctx = ctx_of(request)
    found = images.get(ctx, who.user_id, image)
    text = about(ctx, who.user_id, found, name, request.query_params.get("endpoint") or None)
    if text is None:
        raise NotFound(f"{name} of image {found.name} is not at the server", hint="its build may not have left one")
    kind = "application/json" if name.endswith(".json") else "text/plain; charset=utf-8"
    head = {"Content-Disposition": f'attachment; filename="{found.name}.{name}"', "Content-Type": kind}
    return Response(text.encode(), headers=head)


def _again(
    request: Request,
    who: Identity,
    image: str,
    form: Form,
    error: DiamondError,
    fields: tuple[str, ...],
    **renamed: str,
) -> Response:
    """The same page, with everything that was typed, and the error beside its field."""
    field = renamed.get(error.field, error.field)
    shown: dict[str, Any] = {"errors": {field: error}} if field in fields else {"problem": error}
    return _overview(request, who, image, status=error.status, typed=form, **shown)
