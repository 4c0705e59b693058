"""The route of how a task's training stands."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.errors import NotFound
from diamond.core.training import Training
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import Ctx, User
from diamond.server.services import training

router = APIRouter(prefix="/api/v1", tags=["metrics"])


@router.get(
    "/tasks/{task_id}/training",
    summary="Say how a task's training stands",
    description="What a program that uses `diamond.train` measured of itself, over all jobs of the task: where the "
    "time of a step goes, what it did at each size, how long it still takes and in how many jobs. Empty for others.",
    responses=returns(Training, "How it stands; `latest` is null where nothing was measured.")
    | USER_FAILS
    | fails(NotFound),
)
def read_training(user: User, ctx: Ctx, task_id: str) -> Response:
    return Json(training.of_task(ctx, user, task_id))
