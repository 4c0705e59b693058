"""What the pages of one image have in common, and the page that shows how it is made: stages, log, failure."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.bundles import is_bundle_ref
from diamond.core.codec import encode
from diamond.core.errors import NotFound
from diamond.core.image_views import BuildProgress
from diamond.core.images import Image, ReplicaState, StageRecord
from diamond.core.recipes import Recipe
from diamond.server.services import attempts, image_progress, images, tasks
from diamond.server.services.context import Context
from diamond.server.web.forms import Visitor
from diamond.server.web.pages import PART_HEADER, ctx_of, page_router, show
from diamond.server.web.task_log import log_end
from diamond.texts import tasktext

router = page_router()
_MAX_FILE_BYTES = 64 * 1024 * 1024
_BEST = [ReplicaState.READY, ReplicaState.BUILDING, ReplicaState.FAILED, ReplicaState.GONE]


def frame(ctx: Context, user_id: str, image: Image) -> dict[str, Any]:
    """What the head of every page about an image shows."""
    ranked = sorted(image.replicas, key=lambda one: (_BEST.index(one.state), -one.created_at))
    best = ranked[0] if ranked else None
    return {
        "image": image,
        "best": best,
        "full_name": image.name if image.is_mine else f"{image.owner}/{image.name}",
        "is_built": bool(best and best.facts),
        "making": _making(ctx, user_id, image) if image.state is not ReplicaState.READY else None,
    }


def _making(ctx: Context, user_id: str, image: Image, endpoint: str | None = None) -> BuildProgress | None:
    try:
        return image_progress.progress(ctx, user_id, image.id, endpoint)
    except NotFound:
        return None


@router.api_route("/images/{image}/log", methods=["GET", "HEAD"])
def log_page(request: Request, who: Visitor, image: str) -> Response:
    """How it is made, or was: at `endpoint`, else wherever that was last."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    found = images.get(ctx, who.user_id, image)
    progress = _making(ctx, who.user_id, found, request.query_params.get("endpoint") or None)
    task_id = progress.task_id if progress is not None and _sees(ctx, who.user_id, progress.task_id) else ""
    values: dict[str, Any] = {}
    if task_id and PART_HEADER not in request.headers:  # an open page has the log already, and asks for its lines
        values = log_end(request, ctx, who.user_id, task_id)
    return show(
        request,
        "image_log.html",
        who=who,
        **frame(ctx, who.user_id, found),
        progress=progress,
        stages=_stages(progress) if progress is not None else [],
        replica=next((each for each in found.replicas if progress and each.endpoint == progress.endpoint), None),
        task_id=task_id,
        is_whole=PART_HEADER not in request.headers,
        **values,
    )


def _sees(ctx: Context, user_id: str, task_id: str | None) -> bool:
    """Whether this user may read the log of the task that makes an image; who may use the image need not."""
    if not task_id:
        return False
    try:
        attempts.find(ctx, user_id, task_id)
    except NotFound:
        return False
    return True


def _stages(progress: BuildProgress) -> list[StageRecord]:
    """Those it has come to, and blanks for what is still to come."""
    left = max(0, progress.total - len(progress.stages)) if progress.state is ReplicaState.BUILDING else 0
    return [*progress.stages, *(StageRecord(name="", title="", state="waiting") for _ in range(left))]


def about(ctx: Context, user_id: str, image: Image, name: str, endpoint: str | None = None) -> str | None:
    """A text that its build left; None when there is none that this user may read."""
    progress = _making(ctx, user_id, image, endpoint)
    if progress is None or not progress.task_id:
        return None
    try:
        found = tasks.output(ctx, user_id, progress.task_id, name)
        with ctx.blobs.open(f"sha256:{found.sha256}") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except (NotFound, FileNotFoundError):
        return None


def recipe_text(recipe: Recipe) -> str:
    """As the file would be that `diamond image build` takes, without what is so by default."""
    usual = encode(Recipe(base=recipe.base))
    lines = []
    for key, value in encode(recipe).items():
        if key != "base" and (value is None or value == usual[key]):
            continue
        if key == "time_limit":
            value = tasktext.duration(value)
        if key == "files":
            value = {path: "(uploaded)" if is_bundle_ref(str(ref)) else ref for path, ref in value.items()}
        lines.append(tasktext.write({key: value}))
    return "".join(lines)
