"""Routes of the files a task left behind."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from diamond.core.errors import NotFound
from diamond.server.api.answers import FileAnswer, Json
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import Ctx, User
from diamond.server.api.schemas import OutputList
from diamond.server.services import tasks

router = APIRouter(prefix="/api/v1", tags=["outputs"])


@router.get(
    "/tasks/{task_id}/outputs",
    summary="List a task's outputs",
    description="Files that matched `outputs` of the spec. Those not `stored` were too large and are on the endpoint.",
    responses=returns(OutputList, "The files.") | USER_FAILS | fails(NotFound),
)
def list_outputs(user: User, ctx: Ctx, task_id: str) -> Response:
    return Json(OutputList(outputs=list(tasks.get(ctx, user, task_id).outputs)))


@router.get(
    "/tasks/{task_id}/outputs/content",
    summary="Download an output",
    description="The bytes of one file, as an attachment. A `Range` of bytes is honoured, so a download can resume.",
    responses=returns("application/octet-stream", "The file.")
    | returns("application/octet-stream", "The range asked for.", status=206)
    | USER_FAILS
    | fails(NotFound),
)
def read_output(
    user: User,
    ctx: Ctx,
    task_id: str,
    path: Annotated[str, Query(min_length=1, max_length=4096, description="As `outputs` names it.")],
) -> Response:
    found = tasks.output(ctx, user, task_id, path)
    digest = found.sha256 if found.sha256.startswith("sha256:") else f"sha256:{found.sha256}"
    try:
        return FileAnswer(ctx.blobs.path(digest), name=found.path, headers={"ETag": f'"{digest}"'})
    except (FileNotFoundError, ValueError):
        raise NotFound(
            f"the bytes of {path[:80]!r} are not at the server", hint="they may still be on the endpoint", field="path"
        ) from None
