"""The curves of one task on a page of their own, and what templates/curves.html needs on any page that includes it."""

from __future__ import annotations

import math
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.measuring import node_of
from diamond.core.tasks import Task
from diamond.server.services import comparisons, kept, tasks
from diamond.server.services.context import Context
from diamond.server.web.forms import Visitor
from diamond.server.web.pages import ctx_of, page_router, show, shown_bytes

router = page_router()
_USAGE = {
    "sys/cpu_percent": "CPU (100 % is one core)",
    "sys/rss_bytes": "Memory",
    "sys/gpu_percent": "GPU",
    "sys/gpu_mem_bytes": "GPU memory",
}


class LastValue(NamedTuple):
    """The newest value of a metric, as people read it. `at` is None where the program gave no time."""

    name: str
    value: str
    step: str
    at: float | None
    samples: int


def last_values(ctx: Context, task: Task) -> list[LastValue]:
    """For the `curve_values` of curves.html: what there is without scripts."""
    found = []
    for info in comparisons.newest_values(ctx, task):
        is_usage = info.stream == "util"
        value = shown_bytes(info.last_value) if is_usage and info.key.endswith("_bytes") else number(info.last_value)
        found.append(
            LastValue(
                name=_usage_name(info.key) if is_usage else info.key,
                value=value,
                step="" if is_usage else number(info.last_step),
                at=info.last_t if math.isfinite(info.last_t) else None,
                samples=info.count,
            )
        )
    return found


def _usage_name(key: str) -> str:
    node = node_of(key)
    if node is None:
        return _USAGE.get(key, key)
    what = key.replace(f"node{node}/", "", 1)
    return f"{_USAGE[what]}, node {node}" if what in _USAGE else key


def number(value: float) -> str:
    """As many digits as tell two runs apart."""
    if math.isnan(value):
        return "NaN"
    return f"{value:.6g}"


def notes(ctx: Context, task: Task) -> list[str]:
    """For the `curve_notes` of curves.html: what of the newest job is in no curve."""
    for job in reversed(task.jobs):
        if found := ctx.series.keys(job.id):
            return kept.curve_notes(ctx, job.id, found)
    return []


@router.api_route("/tasks/{task_id}/curves", methods=["GET", "HEAD"])
def curves_page(request: Request, who: Visitor, task_id: str) -> Response:
    ctx = ctx_of(request)
    assert who.user_id is not None
    task = tasks.get(ctx, who.user_id, task_id)
    values, told = last_values(ctx, task), notes(ctx, task)
    return show(request, "curves_page.html", who=who, task=task, curve_values=values, curve_notes=told)
