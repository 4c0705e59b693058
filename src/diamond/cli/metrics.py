"""`diamond metrics`: newest values with sparklines, or one curve drawn in the terminal."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli.live import metric_rank
from diamond.cli.session import connect, emit, say
from diamond.core.errors import NotFound

if TYPE_CHECKING:
    from diamond.sdk.metrics import Curve


def metrics(ref: str | None, key: str | None, *, attempt: int | None, util: bool, as_json: bool) -> None:
    with connect() as client:
        task = client.tasks.resolve(ref)
        if key is not None:
            curve = client.tasks.curve(task.id, key, attempt=attempt)
            if not curve.points and not curve.non_finite:
                have = ", ".join(render.clean(each.key) for each in client.tasks.metrics(task.id, attempt)) or "none"
                raise NotFound(f"{task.id} has no metric {key[:80]!r}", hint=f"its metrics: {have}")
            emit({"task_id": task.id, **vars(curve)}) if as_json else _plot(curve)
            return
        found = client.tasks.metrics(task.id, attempt)
        if as_json:
            emit({"task_id": task.id, "attempt": attempt or task.attempt, "series": found})
            return
        shown = sorted(
            (each for each in found if util or each.stream == "metrics"), key=lambda each: metric_rank(each.key)
        )
        if not shown:
            say(f"{render.clean(task.name)} has logged no metrics" + ("." if task.state.is_final else " yet."))
            say("Log them from the training script:  import diamond.train; diamond.train.log(step=1, loss=0.5)")
            if found:
                say("What the agent measured: diamond metrics --util " + task.id)
            return
        rows = []
        for series in shown[:50]:
            curve = client.tasks.curve(task.id, series.key, attempt=attempt, max_points=200)
            spark = render.sparkline([point.mean for point in curve.points], 30)
            values = [point.min for point in curve.points] + [point.max for point in curve.points]
            low, high = (render.number(min(values)), render.number(max(values))) if values else ("", "")
            step = render.number(series.last_step)
            rows.append((render.clean(series.key), render.number(series.last_value), low, high, step, spark))
    render.print_table(
        ("METRIC", ">LAST", ">MIN", ">MAX", ">STEP", "CURVE"),
        rows,
        flexible=("METRIC",),
        droppable=("MIN", "MAX", "STEP", "CURVE"),
    )


def _plot(curve: Curve) -> None:
    points = [point for point in curve.points if math.isfinite(point.mean) and math.isfinite(point.x)]
    head = f"{render.clean(curve.key)}  {curve.count} samples"
    if points:
        last = render.number(points[-1].last)
        low, high = render.number(min(p.min for p in points)), render.number(max(p.max for p in points))
        head += f"  last {last}  min {low}  max {high}"
    print(head)
    if curve.non_finite:
        where = (
            ""
            if curve.first_non_finite_x is None
            else f", first at {curve.x} {render.number(curve.first_non_finite_x)}"
        )
        print(render.paint(f"{curve.non_finite} samples are NaN or infinite{where}", "31"))
    if points:
        width = min(100, shutil.get_terminal_size((80, 24)).columns)
        for line in render.plot([point.x for point in points], [point.mean for point in points], width=width):
            print(line)
