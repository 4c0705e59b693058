"""Routes of a task's curves. (The server's own metrics are in `diamond.server.prometheus`.)"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import InvalidInput, NotFound
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import Ctx, Server, User
from diamond.server.api.schemas import CurveAnswer, Series, SeriesList
from diamond.server.compression import smaller
from diamond.server.services import attempts, kept
from diamond.server.services.context import Context
from diamond.server.store.series import SeriesInfo

router = APIRouter(prefix="/api/v1", tags=["metrics"])
MAX_POINTS = 10_000

Attempt = Annotated[int | None, Query(ge=0, le=10**9, description="Which attempt; the newest when 0 or left out.")]


def finite(number: float | None) -> float | None:
    """JSON knows no NaN."""
    return number if number is not None and math.isfinite(number) else None


@router.get(
    "/tasks/{task_id}/metrics",
    summary="List a task's metrics",
    description="Every key the attempt logged (`metrics`) or the agent sampled (`util`), with its newest value.",
    responses=returns(SeriesList, "The keys.") | USER_FAILS | fails(NotFound),
)
async def list_metrics(user: User, server: Server, task_id: str, attempt: Attempt = None) -> Response:
    job, found, notes = await server.looks.look(_all, server.ctx, user, task_id, attempt)
    series = [
        Series(
            key=info.key,
            stream=info.stream,
            count=info.count,
            last_step=finite(info.last_step),
            last_t=finite(info.last_t),
            last_value=finite(info.last_value),
            thinned=info.thinned,
        )
        for info in found
    ]
    return Json(SeriesList(attempt=job.number, series=series, notes=notes))


def _all(
    ctx: Context, user: str, task_id: str, attempt: int | None
) -> tuple[attempts.Attempt, list[SeriesInfo], list[str]]:
    job, found = _keys(ctx, user, task_id, attempt)
    return job, found, kept.curve_notes(ctx, job.job_id, found) if job.job_id else []


def _keys(ctx: Context, user: str, task_id: str, attempt: int | None) -> tuple[attempts.Attempt, list[SeriesInfo]]:
    job = attempts.find(ctx, user, task_id, attempt or None)
    return job, ctx.series.keys(job.job_id) if job.job_id else []


@router.get(
    "/tasks/{task_id}/metrics/curve",
    summary="Read a curve",
    description="At most `max_points` points of one key, downsampled by the server: each keeps the minimum, maximum, "
    "mean and last value of the samples it stands for.",
    responses=returns(CurveAnswer, "The curve.") | USER_FAILS | fails(NotFound),
)
def read_curve(
    request: Request,
    user: User,
    ctx: Ctx,
    task_id: str,
    key: Annotated[str, Query(min_length=1, max_length=500, description="Name of the metric.")],
    attempt: Attempt = None,
    max_points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="Most points wanted.")] = 2000,
    x: Annotated[Literal["step", "time"], Query(description="What runs along the x axis.")] = "step",
    x_min: Annotated[float | None, Query(description="Leave out what lies before.")] = None,
    x_max: Annotated[float | None, Query(description="Leave out what lies after.")] = None,
    stream: Annotated[
        Literal["metrics", "util"] | None, Query(description="Which, where both have the key; metrics comes first.")
    ] = None,
) -> Response:
    for name, bound in (("x_min", x_min), ("x_max", x_max)):
        if bound is not None and math.isnan(bound):
            raise InvalidInput("must be a number", field=name)
    job, known = _keys(ctx, user, task_id, attempt)
    if not any(info.key == key and stream in (None, info.stream) for info in known):
        raise NotFound(
            f"task {task_id} has no metric {key[:80]!r}" + (f" in attempt {job.number}" if job.number else " yet"),
            hint=f"GET /api/v1/tasks/{task_id}/metrics lists what there is",
            field="key",
        )
    curve = ctx.series.curve(job.job_id, key, max_points=max_points, x=x, x_min=x_min, x_max=x_max, stream=stream)
    points: list[Any] = [[finite(number) for number in point] for point in curve.points]
    answer = Json(
        CurveAnswer(
            attempt=job.number,
            key=curve.key,
            x=curve.x,
            count=curve.count,
            points=points,
            exact=curve.exact,
            non_finite=curve.non_finite,
            first_non_finite_x=finite(curve.first_non_finite_x),
            gaps=[list(gap) for gap in curve.gaps],
            thinned=curve.thinned,
        )
    )
    return smaller(request, answer)
