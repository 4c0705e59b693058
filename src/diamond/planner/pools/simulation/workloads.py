"""Who comes when: workloads of the Pollux and Sia artifacts, and what Slurm's accounting says of real tasks."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from diamond.core.errors import InvalidInput
from diamond.planner.pools.simulation.tables import Row, open_table, read_csv, require_columns

WORKLOAD_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
SLURM_COLUMNS = ("JobID", "Submit", "Start", "End", "NNodes")
LIMIT_COLUMNS = ("Timelimit", "TimelimitRaw", "TimelimitR")  # the last: as sacct cuts a heading to its width
_NOT_YET = {"", "Unknown", "None", "N/A"}
_NO_LIMIT = {"UNLIMITED", "Partition_Limit", "INVALID"}


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
    with open_table(path) as file:
        first = file.readline()
    if "application" in first.split(","):
        return _in_order(path, read_workload(path))
    found = _in_order(path, read_slurm(path, gpus_per_node=gpus_per_node))
    return tuple(replace(one, at=one.at - found[0].at) for one in found)


def read_workload(path: Path) -> Iterator[Arrival]:
    for row in read_csv(path, WORKLOAD_COLUMNS):
        yield Arrival(
            name=row.text("name"),
            at=row.number("time", least=0),
            application=row.text("application"),
            gpus=row.whole("num_replicas", least=1),
            batch=row.whole("batch_size", least=1),
        )


def read_slurm(path: Path, *, gpus_per_node: int = 1) -> Iterator[Arrival]:
    """Tasks that ran to an end, at the times of the log; without their steps, and what never started or still runs."""
    for row, limit in _accounting(path):
        if "." in row.text("JobID") or not _ran(row):
            continue
        submitted, start, end = (_moment(row, column) for column in ("Submit", "Start", "End"))
        if end <= start:
            continue
        yield Arrival(
            name=row.text("JobID"),
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
    twice = [name for name, number in Counter(one.name for one in arrivals).items() if number > 1]
    if twice:
        raise InvalidInput(f"{path.name}: {twice[0]} is there twice", hint="Every task needs a name of its own.")
    return tuple(arrivals)


def _accounting(path: Path) -> Iterator[tuple[Row, str]]:
    """Lines of accounting with the name of the column of time limits."""
    with open_table(path) as file:
        lines = enumerate(file, start=1)
        number, header = next(((n, line) for n, line in lines if not line.strip().isdigit()), (1, ""))
        separator = "|" if "|" in header else None
        columns = [name.strip() for name in header.split(separator) if name.strip()]
        require_columns(path, columns, SLURM_COLUMNS, line=number)
        limit = next((name for name in LIMIT_COLUMNS if name in columns), "")
        if not limit:
            require_columns(path, columns, LIMIT_COLUMNS[:1], line=number)
        for number, line in lines:
            if not line.strip(" -\t\r\n|"):
                continue
            values = [value.strip() for value in next(csv.reader([line], delimiter=separator or "\t"))]
            row = Row(path, number, dict(zip(columns, values, strict=False)))
            if len(values) < len(columns):
                raise row.wrong(columns[len(values)], "is missing")
            yield row, limit


def _ran(row: Row) -> bool:
    return row.optional("Start") not in _NOT_YET and row.optional("End") not in _NOT_YET


def _moment(row: Row, column: str) -> float:
    text = row.text(column)
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise row.wrong(column, f"{text[:40]!r} is not a time such as 2026-01-31T12:00:00") from None


def _gpus(row: Row, gpus_per_node: int) -> int:
    """As many as the accounting says, else those of the nodes."""
    said = re.search(r"gres/gpu=(\d+)", row.optional("AllocTRES") or row.optional("ReqTRES"))
    return int(said[1]) if said and int(said[1]) else row.whole("NNodes", least=1) * gpus_per_node


def _limit_s(row: Row, column: str) -> float | None:
    """Minutes, or days-hours:minutes:seconds; None where there is none."""
    text = row.text(column)
    if text in _NO_LIMIT:
        return None
    if ":" not in text:
        return row.number(column, least=0) * 60
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?", text)
    if not found:
        raise row.wrong(column, f"{text[:40]!r} is not a time such as 1-12:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(days * 86_400 + hours * 3600 + minutes * 60 + seconds)
