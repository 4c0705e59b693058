"""Several runs beside each other: what was asked of each, where it ran, and what came out. Reads, never writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from diamond.core.codec import encode
from diamond.core.errors import NotFound
from diamond.core.ids import is_id
from diamond.core.tasks import Task
from diamond.server.services import access, task_views, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import TaskRow
from diamond.server.store.series import SeriesInfo

MAX_RUNS = 12
PAGE = 30
Cell = str | int | float | bool | None

# Which part of a comparison a field of a spec belongs to; what is not named is about the task itself.
_GROUPS = {
    "resources": "Resources", "num_nodes": "Resources", "ranks_per_node": "Resources", "slurm": "Slurm",
    "envs": "Variables", "secrets": "Variables", "workdir": "Files", "file_mounts": "Files", "outputs": "Files",
    "curves": "Metrics", "image": "Software", "setup": "Commands", "run": "Commands",
}  # fmt: skip
_SPANS = ("max_duration", "retry.backoff", "retry.max_backoff")  # seconds
_ORDER = ("Result", "Metrics", "Commands", "Variables", "Resources", "Software", "Files", "Slurm", "Place", "Task")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing to compare. `key` names it to programs; `kind` is how people read it: value, text, time, span, ref."""

    group: str
    key: str
    label: str
    cells: tuple[Cell, ...]
    kind: str = "value"

    @property
    def differs(self) -> bool:
        return len({repr(cell) for cell in self.cells}) > 1


def find(ctx: Context, user_id: str, ids: Iterable[str]) -> tuple[list[Task], list[str]]:
    """The runs of these ids, in their order, each once; and the ids of none that the user sees."""
    found, missing = [], []
    for task_id in dict.fromkeys(ids):
        try:
            found.append(tasks.get(ctx, user_id, task_id))
        except NotFound:
            missing.append(task_id)
    return found, missing


def search(ctx: Context, user_id: str, text: str = "", cursor: str = "") -> tuple[list[Task], str]:
    """A page of runs the user sees, newest first, with `text` in the name or at the beginning of the id; the cursor."""
    where: list[Any] = [access.sees(TaskRow, user_id), TaskRow.kind == "command"]
    if text := text.replace("\x00", "").strip():
        where.append(
            sa.or_(TaskRow.name.icontains(text, autoescape=True), TaskRow.id.startswith(text, autoescape=True))
        )
    if is_id(cursor, "tsk"):
        where.append(TaskRow.id < cursor)
    with ctx.db.read() as session:
        rows = session.scalars(sa.select(TaskRow).where(*where).order_by(TaskRow.id.desc()).limit(PAGE + 1)).all()
        more, rows = len(rows) > PAGE, rows[:PAGE]
        known, named = task_views.whereabouts(ctx, session, rows), task_views.names_of(session, rows)
        found = [task_views.to_task(row, known, named) for row in rows]
    return found, found[-1].id if more else ""


def newest_values(ctx: Context, task: Task) -> list[SeriesInfo]:
    """The newest value of each metric, those of the newest job that has any."""
    for job in reversed(task.jobs):
        if found := ctx.series.keys(job.id):
            return found
    return []


def rows(ctx: Context, runs: Sequence[Task]) -> list[Row]:
    """Everything that is known of any of the runs, in groups; nothing that all of them leave empty."""
    found = [*_results(runs), *_metrics(ctx, runs), *_specs(runs), *_places(runs)]
    held = [row for row in found if any(cell not in (None, "") for cell in row.cells)]
    return sorted(held, key=lambda row: _ORDER.index(row.group))


def _results(runs: Sequence[Task]) -> list[Row]:
    def row(key: str, label: str, cells: Iterable[Cell], kind: str = "value") -> Row:
        return Row(group="Result", key=key, label=label, cells=tuple(cells), kind=kind)

    spans = [
        round(run.ended_at - run.started_at, 1) if run.started_at is not None and run.ended_at is not None else None
        for run in runs
    ]
    return [
        row("state", "State", (run.state.value for run in runs)),
        row("reason", "Reason", (run.reason.value if run.reason else None for run in runs)),
        row("exit_code", "Exit code", (run.exit_code for run in runs)),
        row("attempts", "Attempts", (run.attempt for run in runs)),
        row("started_at", "Started", (run.started_at for run in runs), "time"),
        row("duration_s", "Duration", spans, "span"),
    ]


def _metrics(ctx: Context, runs: Sequence[Task]) -> list[Row]:
    values = [
        {info.key: info.last_value for info in newest_values(ctx, run) if info.stream == "metrics"} for run in runs
    ]
    keys = sorted({key for each in values for key in each})
    return [
        Row(group="Metrics", key=f"metric {key}", label=key, cells=tuple(each.get(key) for each in values))
        for key in keys
    ]


def _specs(runs: Sequence[Task]) -> list[Row]:
    flat = [_flatten(encode(run.spec)) if run.spec else {} for run in runs]
    made = []
    for key in dict.fromkeys(key for each in flat for key in each):
        first, _, rest = key.partition(".")
        if key == "name":
            continue
        label = rest if first in ("envs", "secrets") else key
        cells = tuple(each.get(key) for each in flat)
        kind = (
            "span"
            if key in _SPANS
            else "text"
            if key in ("run", "setup")
            else "ref"
            if first in ("workdir", "file_mounts")
            else "value"
        )
        made.append(Row(group=_GROUPS.get(first, "Task"), key=key, label=label, cells=cells, kind=kind))
    return made


def _places(runs: Sequence[Task]) -> list[Row]:
    last = [run.jobs[-1] if run.jobs else None for run in runs]
    images = [job.image if job else None for job in last]
    return [
        Row(group="Task", key="owner", label="owner", cells=tuple(run.owner for run in runs)),
        Row(group="Place", key="endpoint", label="Endpoint", cells=tuple(run.endpoint for run in runs)),
        Row(
            group="Place", key="partition", label="Partition",
            cells=tuple(job.partition if job else None for job in last),
        ),
        Row(
            group="Place", key="hosts", label="Machines",
            cells=tuple(", ".join(job.hosts) if job else None for job in last),
        ),
        Row(group="Software", key="image_name", label="Image", cells=tuple(run.image for run in runs)),
        Row(
            group="Software", key="image_digest", label="Digest of the image", kind="ref",
            cells=tuple(image.digest if image else None for image in images),
        ),
    ]  # fmt: skip


def _flatten(value: Any, path: str = "") -> dict[str, Cell]:
    """Nested mappings as dotted names; a list is one value, as people write it."""
    if isinstance(value, dict):
        flat: dict[str, Cell] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{path}.{key}" if path else str(key))
        return flat
    if isinstance(value, list):
        parts = [", ".join(f"{k}={v}" for k, v in item.items()) if isinstance(item, dict) else item for item in value]
        return {path: ", ".join(map(str, parts))}
    return {path: value}
