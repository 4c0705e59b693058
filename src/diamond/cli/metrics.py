"""`diamond metrics`: newest values with sparklines, or one curve drawn in the terminal."""

from __future__ import annotations

import difflib
import math
import shutil
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli.describe import metric_rank
from diamond.cli.session import connect, emit, say
from diamond.core.errors import NotFound
from diamond.core.tasks import Task

if TYPE_CHECKING:
    from diamond.sdk.metrics import Curve, Series


def metrics(ref: str | None, key: str | None, *, attempt: int | None, util: bool, as_json: bool) -> None:
    with connect() as client:
        task = client.tasks.resolve(ref)
        if key is not None:
            try:
                curve = client.tasks.curve(task.id, key, attempt=attempt)
            except NotFound as error:
                # Raises by itself when it is the attempt that is not there.
                raise _unknown(task, key, client.tasks.metrics(task.id, attempt)) from error
            if not curve.points and not curve.non_finite:
                raise _unknown(task, key, client.tasks.metrics(task.id, attempt))
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
            say("or say in the task file where they stand in what it prints:  curves: ['loss: {loss}']")
            if found:
                say("What the agent measured: diamond metrics --util " + task.id)
            return
        notes = client.tasks.metric_notes(task.id, attempt)
        rows = []
        for series in shown[:50]:
            curve = client.tasks.curve(task.id, series.key, attempt=attempt, max_points=200)
            spark = render.sparkline([point.mean for point in curve.points], 30)
            values = [point.min for point in curve.points] + [point.max for point in curve.points]
            texts = [render.measured(series.key, each(values)) for each in (min, max)] if values else ["", ""]
            last = render.measured(series.key, series.last_value)
            rows.append((render.clean(series.key), last, *texts, render.number(series.last_step), spark))
    render.print_table(
        ("METRIC", ">LAST", ">MIN", ">MAX", ">STEP", "CURVE"),
        rows,
        flexible={"METRIC": 10},
        droppable=("MIN", "MAX", "STEP", "CURVE"),
    )
    for note in notes:
        say(render.clean(note))


def _unknown(task: Task, key: str, have: list[Series]) -> NotFound:
    near = difflib.get_close_matches(key, [series.key for series in have], n=1)
    guess = f"did you mean {render.clean(near[0])!r}? " if near else ""
    util = " --util" if key.startswith("sys/") or (have and all(each.stream != "metrics" for each in have)) else ""
    listing = f"`diamond metrics{util} {task.id}` lists them"
    if not have:
        listing = "it has logged none" if task.state.is_final else "it has logged none yet"
    return NotFound(f"{task.name} has no metric {key[:80]!r}", hint=guess + listing)


def _plot(curve: Curve) -> None:
    def text(value: float) -> str:
        return render.measured(curve.key, value)

    points = [point for point in curve.points if math.isfinite(point.mean) and math.isfinite(point.x)]
    head = f"{render.clean(curve.key)}  {render.count(curve.count, 'sample')}"
    if points:
        last, low, high = text(points[-1].last), text(min(p.min for p in points)), text(max(p.max for p in points))
        head += f"  last {last}  min {low}  max {high}"
    print(head)
    if curve.thinned:
        print("Some older samples are no longer kept; the smallest and the largest are.")
    if curve.non_finite:
        where = (
            ""
            if curve.first_non_finite_x is None
            else f", first at {curve.x} {render.number(curve.first_non_finite_x)}"
        )
        print(
            render.paint(f"{render.count(curve.non_finite, 'sample is', 'samples are')} NaN or infinite{where}", "31")
        )
    if points:
        width = min(100, shutil.get_terminal_size((80, 24)).columns)
        xs, ys = [point.x for point in points], [point.mean for point in points]
        for line in render.plot(xs, ys, width=width, text=text):
            print(line)
