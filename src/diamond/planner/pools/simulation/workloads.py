"""Who comes when: workloads of the Pollux and Sia artifacts, and what Slurm's accounting says of real tasks."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from diamond.core.errors import InvalidInput
from diamond.planner.pools.simulation.tables import MOST, Row, lines_of, read_csv, require_columns, too_many

WORKLOAD_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
SLURM_COLUMNS = ("JobID", "Submit", "Start", "End", "NNodes")
LIMIT_COLUMNS = ("Timelimit", "TimelimitRaw", "TimelimitR")  # the last: as sacct cuts a heading to its width
_NOT_YET = {"", "Unknown", "None", "N/A"}
_NO_LIMIT = {"", "unlimited", "infinite", "partition_limit", "invalid", "unknown", "none", "n/a"}
_LIMIT = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)
_LATEST_S = 1e10  # three hundred years: with much more, a round more or less is lost in the rounding


@dataclass(frozen=True)
class Arrival:
    """A task and when it comes.

    Attributes:
        at: seconds from the workload's beginning.
        gpus, batch: what its user asked for; policies that choose themselves do not look.
        duration_s: of a task that was recorded as a whole: it runs so long on exactly `gpus`, and cannot be moved.
        limit_s: what its user said it would take at most.
    """

    name: str
    at: float
    application: str = ""
    gpus: int = 1
    batch: int | None = None
    duration_s: float | None = None
    limit_s: float | None = None
    priority: int = 0
    owner: str = ""

    @property
    def recorded(self) -> bool:
        return self.duration_s is not None


def read_arrivals(path: Path, *, gpus_per_node: int = 1) -> tuple[Arrival, ...]:
    """A workload's CSV, or Slurm's accounting (as columns, or `sacct -P`): its first line tells which it is.

    Args:
        gpus_per_node: what a node of an accounting log counts for where the log does not say.
    """
    path = Path(path)
    lines = lines_of(path)
    first = next(lines, "")
    lines = chain([first], lines)
    if "application" in next(csv.reader([first]), []):
        return _in_order(path, _workload(path, lines))
    found = _in_order(path, _slurm(path, lines, gpus_per_node))
    return tuple(replace(one, at=one.at - found[0].at) for one in found)


def _workload(path: Path, lines: Iterable[str]) -> Iterator[Arrival]:
    seen: dict[str, int] = {}
    for row in read_csv(path, WORKLOAD_COLUMNS, lines):
        yield Arrival(
            name=_own_name(row, "name", seen),
            at=row.number("time", least=0, most=_LATEST_S),
            application=row.text("application"),
            gpus=row.whole("num_replicas", least=1),
            batch=row.whole("batch_size", least=1),
        )


def _slurm(path: Path, lines: Iterable[str], gpus_per_node: int) -> Iterator[Arrival]:
    """Tasks that ran to an end, at the times of the log; without their steps, and what never started or still runs."""
    seen: dict[str, int] = {}
    for row, limit in _accounting(path, lines):
        if "." in row.text("JobID") or not _ran(row):
            continue
        submitted, start, end = (_moment(row, column) for column in ("Submit", "Start", "End"))
        if end < start:
            raise row.wrong("End", "is before Start")
        if end == start:
            continue
        yield Arrival(
            name=_own_name(row, "JobID", seen),
            at=submitted,
            gpus=_gpus(row, gpus_per_node),
            duration_s=end - start,
            limit_s=_limit_s(row, limit),
            owner=row.optional("User") or row.optional("UID"),
        )


def in_bursts(arrivals: Iterable[Arrival], window_s: float) -> tuple[Arrival, ...]:
    """The same tasks, but those that come within one window all come at its beginning."""
    if not window_s > 0:
        raise InvalidInput(f"{window_s:g} s is no window", hint="Give a number of seconds above 0.", field="window_s")
    return tuple(replace(one, at=one.at // window_s * window_s) for one in arrivals)


def _in_order(path: Path, found: Iterator[Arrival]) -> tuple[Arrival, ...]:
    arrivals = sorted(found, key=lambda one: (one.at, one.name))
    if not arrivals:
        raise InvalidInput(f"{path.name}: no task in it", hint="Name a workload that holds at least one finished task.")
    return tuple(arrivals)


def _own_name(row: Row, column: str, seen: dict[str, int]) -> str:
    name = row.text(column)
    if name in seen:
        raise row.wrong(
            column,
            f"{name[:40]} is there twice, first in line {seen[name]}",
            hint="Every task needs a name of its own; sacct says each once without --duplicates.",
        )
    seen[name] = row.line
    return name


def _accounting(path: Path, lines: Iterable[str]) -> Iterator[tuple[Row, str]]:
    """Lines of accounting with the name of the column of time limits."""
    numbered = enumerate(lines, start=1)
    number, header = next(((n, line) for n, line in numbered if not line.strip().isdigit()), (1, ""))
    barred = "|" in header
    columns = [name.strip() for name in (header.rstrip().removesuffix("|").split("|") if barred else header.split())]
    if SLURM_COLUMNS[0] not in columns:
        raise InvalidInput(
            f"{path.name}, line {number}: these are neither a workload's columns nor those of Slurm's accounting",
            hint=f"Give CSV with the columns {','.join(WORKLOAD_COLUMNS)}, or what sacct -P prints with "
            f"-o {','.join((*SLURM_COLUMNS, LIMIT_COLUMNS[0]))}.",
        )
    require_columns(path, columns, SLURM_COLUMNS, line=number)
    limit = next((name for name in LIMIT_COLUMNS if name in columns), LIMIT_COLUMNS[0])
    require_columns(path, columns, (limit,), line=number)
    for number, line in numbered:
        if not line.strip(" -\t\r\n|"):
            continue
        values = _values(line, len(columns), barred=barred)
        if len(values) > len(columns):
            raise too_many(path, number, len(columns))
        row = Row(path, number, dict(zip(columns, values, strict=False)))
        if len(values) < len(columns):
            raise row.wrong(columns[len(values)], "is missing")
        yield row, limit


def _values(line: str, columns: int, *, barred: bool) -> Sequence[str]:
    """Slurm quotes nothing. A bar at the end, or after a backslash, only counts where there are not too many."""
    values = [value.strip() for value in line.split("|" if barred else "\t")]
    if barred and len(values) > columns:
        values = [value.strip() for value in re.split(r"(?<!\\)\|", line)]
    return values[:-1] if len(values) == columns + 1 and not values[-1] else values


def _ran(row: Row) -> bool:
    return row.optional("Start") not in _NOT_YET and row.optional("End") not in _NOT_YET


def _moment(row: Row, column: str) -> float:
    text = row.text(column)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise row.wrong(column, f"{text[:40]!r} is not a time such as 2026-01-31T12:00:00") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _gpus(row: Row, gpus_per_node: int) -> int:
    """As many as the accounting says, else those of the nodes."""
    column = "AllocTRES" if row.optional("AllocTRES") else "ReqTRES"
    said = re.search(r"gres/gpu=(\d+)", row.optional(column), re.ASCII)
    if said is None or not said[1].strip("0"):
        return row.whole("NNodes", least=1) * gpus_per_node
    if len(said[1]) >= len(str(MOST)):
        raise row.wrong(column, f"{said[1][:40]} GPUs are too many")
    return int(said[1])


def _limit_s(row: Row, column: str) -> float | None:
    """As Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, or days- and hours first; None: no limit."""
    text = row.optional(column)
    if text.lower() in _NO_LIMIT:
        return None
    found = _LIMIT.fullmatch(text)
    if not found:
        raise row.wrong(column, f"{text[:40]!r} is not a time such as 90 (minutes) or 1-12:00:00")
    days, *said = found.groups()
    parts = [int(part) for part in said if part is not None]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    return float(int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False)))
