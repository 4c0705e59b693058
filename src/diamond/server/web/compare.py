"""Compare: runs beside each other, what differs between them, their curves over each other; and a CSV file of it."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.durations import format_duration
from diamond.core.errors import DiamondError, InvalidInput, NotFound
from diamond.core.tasks import Task
from diamond.server.services import comparisons
from diamond.server.services.comparisons import MAX_RUNS, Cell, Row
from diamond.server.web.curves import number
from diamond.server.web.forms import Visitor
from diamond.server.web.pages import ctx_of, page_router, show

router = page_router()
_MAX_QUERY = 200
# A spreadsheet takes a cell that begins so for a formula, and would run it; the last four are their wide forms.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
# Where the list separator is another than ours, what follows one inside a value begins a cell of its own, also after a
# line's end or a quotation mark: those mean something only to who splits at commas.
_LATER = re.compile(r'([;\t\r\n])(?=[\s"]*[=+\-@＝＋－＠])')
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(Infinity|inf)|NaN")


@router.api_route("/compare", methods=["GET", "HEAD"])
def compare_page(request: Request, who: Visitor) -> Response:
    ctx = ctx_of(request)
    assert who.user_id is not None
    asked, query = _asked(request), request.query_params.get("q", "")[:_MAX_QUERY]
    runs, missing = comparisons.find(ctx, who.user_id, asked[:MAX_RUNS])
    offered, cursor = comparisons.search(ctx, who.user_id, query, request.query_params.get("after", ""))
    rows = comparisons.rows(ctx, runs)
    return show(
        request,
        "compare.html",
        who=who,
        status=404 if missing and not runs else 200,
        problem=_problem(asked, missing),
        runs=runs,
        curve_runs=runs,
        without={run.id: compare_path([each.id for each in runs if each.id != run.id]) for run in runs},
        export="/compare.csv?" + urlencode([("task", run.id) for run in runs]),
        differing=_grouped([row for row in rows if row.differs]),
        same=_grouped([row for row in rows if not row.differs]),
        num_same=sum(not row.differs for row in rows),
        offered=[*runs, *(task for task in offered if task.id not in {run.id for run in runs})],
        query=query,
        more=compare_path([run.id for run in runs], q=query, after=cursor) if cursor else "",
        max_runs=MAX_RUNS,
        shown=shown_cell,
        lines=_lines,
    )


@router.api_route("/compare.csv", methods=["GET", "HEAD"])
def compare_csv(request: Request, who: Visitor) -> Response:
    """One line for each run, so that programs can read it as a table of observations."""
    ctx = ctx_of(request)
    assert who.user_id is not None
    asked = _asked(request)
    if len(asked) > MAX_RUNS:
        raise _too_many(asked)
    runs, missing = comparisons.find(ctx, who.user_id, asked)
    if missing:
        raise NotFound(f"there is no task {missing[0][:60]!r}", hint="choose the runs again on the page Compare")
    return Response(
        csv_text(runs, comparisons.rows(ctx, runs)),
        headers={
            "Content-Type": "text/csv; charset=utf-8",
            "Content-Disposition": 'attachment; filename="compare.csv"',
        },
    )


def compare_path(ids: Sequence[str], **more: str) -> str:
    """The page with these runs chosen."""
    query = urlencode([*(("task", each) for each in ids), *((key, value) for key, value in more.items() if value)])
    return f"/compare?{query}" if query else "/compare"


def _asked(request: Request) -> list[str]:
    return list(dict.fromkeys(each for each in request.query_params.getlist("task") if each))


def _problem(asked: Sequence[str], missing: Sequence[str]) -> DiamondError | None:
    if len(asked) > MAX_RUNS:
        return _too_many(asked)
    if missing:
        which = ", ".join(each[:60] for each in missing)
        return NotFound(f"there is no task {which}", hint="it was left out; perhaps it was deleted, or is not shared")
    return None


def _too_many(asked: Sequence[str]) -> InvalidInput:
    return InvalidInput(
        f"{len(asked)} runs were chosen; {MAX_RUNS} can be compared at once",
        hint=f"choose at most {MAX_RUNS}",
        field="task",
    )


def _grouped(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.items())


def shown_cell(row: Row, cell: Cell) -> str:
    """As people read it. Times are the template's."""
    if cell is None or cell == "":
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int | float):
        if row.kind == "span":
            return format_duration(cell) if cell >= 1 else f"{cell:g}s"
        return number(float(cell))
    if row.kind == "ref":
        return re.sub(r"([0-9a-f]{12})[0-9a-f]{20,}", r"\1…", cell)
    return cell


def _lines(row: Row, cell: Cell) -> list[tuple[str, bool]]:
    """The lines of a script, and whether each is one that not every run has."""
    everywhere = set.intersection(*(set(str(each or "").splitlines()) for each in row.cells))
    return [(line, line not in everywhere) for line in str(cell or "").splitlines()]


def csv_text(runs: Sequence[Task], rows: Sequence[Row]) -> str:
    made = io.StringIO()
    writer = csv.writer(made)
    writer.writerow(["task", "name", *(safe_cell(row.key) for row in rows)])
    for at, run in enumerate(runs):
        writer.writerow([run.id, safe_cell(run.name), *(safe_cell(_plain(row, row.cells[at])) for row in rows)])
    return made.getvalue()


def _plain(row: Row, cell: Cell) -> Any:
    if row.kind == "time" and isinstance(cell, int | float):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(cell))
    return cell


def safe_cell(value: Cell) -> str:
    """Numbers stay numbers. Text that a spreadsheet would take for a formula gets an apostrophe before it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = _number(value) if isinstance(value, int | float) else value
    # Blanks before it do not help: some programs drop them when they read the file.
    begins = text[:1] in _FORMULA or text.lstrip()[:1] in _FORMULA
    blanks = len(text) - len(text.lstrip())
    text = text[:blanks] + _LATER.sub(r"\1'", text[blanks:])
    return f"'{text}" if text and begins and not _NUMBER.fullmatch(text) else text


def _number(value: float) -> str:
    text = repr(value)
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
