"""Images as files: exported for download, and imported from a file that somebody sends."""

from __future__ import annotations

from typing import Any, BinaryIO, cast
from urllib.parse import urlencode

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from diamond.core.errors import DiamondError, InvalidInput
from diamond.server.services import build_places, image_copies, image_files, images
from diamond.server.services.identity import Identity
from diamond.server.web.forms import Fields, Form, Visitor
from diamond.server.web.pages import ctx_of, page_router, show, to
from diamond.server.web.uploads import files_of, large_form

router = page_router()
_FIELDS = ("file", "name", "endpoint")


@router.api_route("/images/import", methods=["GET", "HEAD"])
def import_page(request: Request, who: Visitor) -> Response:
    return _page(request, who, {})


def _page(request: Request, who: Identity, typed: Form, *, status: int = 200, **values: Any) -> Response:
    assert who.user_id is not None
    found = build_places.places(ctx_of(request), who.user_id)
    options = [("", "Whichever fits")] + [(place.name, place.name) for place in found]
    return show(request, "image_import.html", who=who, status=status, options=options, typed=typed, **values)


@router.post("/images/import", dependencies=[Depends(large_form)])
def import_image(request: Request, who: Visitor, form: Fields) -> Response:
    assert who.user_id is not None
    sent = [each for each in files_of(request) if each.field == "file"]
    try:
        if not sent:
            hint = "choose a file that another Diamond exported (NAME.diamond.tar)"
            raise InvalidInput("no file was chosen", hint=hint, field="file")
        made, _ = image_files.take_in(
            ctx_of(request),
            who.user_id,
            cast(BinaryIO, sent[0].file),
            sent[0].name,
            endpoint=form.get("endpoint") or None,
            name=form.get("name", "").strip() or None,
        )
    except DiamondError as error:
        shown: dict[str, Any] = {"errors": {error.field: error}} if error.field in _FIELDS else {"problem": error}
        return _page(request, who, form, status=error.status, **shown)
    if made.cached:
        return to(f"/images/{made.image.id}?done=cached")
    return to(f"/images/{made.image.id}/log?{urlencode({'endpoint': made.replica.endpoint})}")


@router.post("/images/{image}/export")
def export_image(request: Request, who: Visitor, image: str) -> Response:
    """Has its bytes brought to the server, from where they are then downloaded."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    found = images.get(ctx, who.user_id, image)
    image_copies.export(ctx, who.user_id, image)
    return to(f"/images/{found.id}?done=export#export-title")


@router.api_route("/images/{image}/download", methods=["GET", "HEAD"])
def download_image(request: Request, who: Visitor, image: str) -> Response:
    assert who.user_id is not None
    made = image_files.download(ctx_of(request), who.user_id, image)
    request.scope["diamond.waits"] = True  # as slow as the reader's line, not as we are
    # The name of an image is plain ASCII without quotes: see core.recipes.
    head = {"Content-Disposition": f'attachment; filename="{made.name}"', "Content-Length": str(made.size_bytes)}
    pieces = iter(()) if request.method == "HEAD" else made.pieces
    return StreamingResponse(pieces, media_type="application/x-tar", headers=head)
