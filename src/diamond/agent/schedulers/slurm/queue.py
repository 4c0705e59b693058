"""What squeue (and, where it exists, sacct) is asked, and what its answers say. Pure: no program is run here.

The formats work from Slurm 20.02 on. Fields are divided by a control character, and the job's name, which may be
anything, comes last; a line that does not fit is somebody else's odd name and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DIVIDER = "\x1f"
# id, state, reason, start (expected while it waits), end, submitted, cores, partition, nodes, name
_FIELDS = ("%A", "%T", "%r", "%S", "%e", "%V", "%C", "%P", "%N", "%j")
_PLACE_FIELDS = ("%A", "%Q", "%P")
MAX_IDS = 500  # in one command line


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job as squeue shows it. Times are Unix seconds; None when Slurm does not know."""

    job_id: str
    name: str
    state: str
    reason: str = ""
    start_at: float | None = None
    end_at: float | None = None
    submitted_at: float | None = None
    cpus: int = 0
    partition: str = ""
    nodes: str = ""

    @property
    def number(self) -> int:
        """For ordering: Slurm numbers jobs upwards."""
        return int(self.job_id) if self.job_id.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a batch script ended: Slurm tells one of the two."""

    exit_code: int = 0
    signal: int = 0


def squeue_argv() -> list[str]:
    """Every job of this user that Slurm still remembers, ended ones too, in hidden partitions too."""
    return ["squeue", "--me", "--all", "--states=all", "--noheader", f"--format={DIVIDER.join(_FIELDS)}"]


def parse_rows(text: str) -> list[Row]:
    rows = []
    for line in text.split("\n"):
        parts = line.split(DIVIDER, len(_FIELDS) - 1)
        if len(parts) != len(_FIELDS) or not parts[0].strip().isdecimal():
            continue
        job_id, state, reason, start, end, submitted, cpus, partition, nodes, name = parts
        rows.append(
            Row(
                job_id=job_id.strip(),
                name=name,
                state=state.strip().upper(),
                reason=reason.strip(),
                start_at=parse_time(start),
                end_at=parse_time(end),
                submitted_at=parse_time(submitted),
                cpus=int(cpus) if cpus.strip().isdecimal() else 0,
                partition=partition.strip(),
                nodes=nodes.strip(),
            )
        )
    return rows


def parse_time(text: str) -> float | None:
    """Unix seconds; a Slurm too old to write them writes local time instead."""
    text = text.strip()
    if text.isdecimal():
        return float(text) or None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


# How a script ended: asked only for jobs that left no record of their own


def status_argv(ids: Sequence[str]) -> list[str]:
    fields = "JobID:.20,exit_code:.12"
    return ["squeue", "--all", "--states=all", "--noheader", f"--jobs={','.join(ids)}", f"--Format={fields}"]


def parse_statuses(text: str) -> dict[str, Status]:
    found = {}
    for line in text.splitlines():
        words = line.split()
        code = parse_exit_code(words[1]) if len(words) == 2 and words[0].isdecimal() else None
        if code is not None:
            found[words[0]] = Status(exit_code=code[0], signal=code[1])
    return found


def parse_exit_code(text: str) -> tuple[int, int] | None:
    """Exit code and signal from `3:0`, or from the wait status (768) that Slurm before 23.02 writes."""
    code, colon, number = text.partition(":")
    if not code.isdecimal() or (colon and not number.isdecimal()):
        return None
    if colon:
        return int(code), int(number)
    return int(code) >> 8, int(code) & 0x7F


# What accounting remembers, where there is any


def sacct_argv(ids: Sequence[str]) -> list[str]:
    fields = "JobIDRaw,State,ExitCode,Start,End"
    return ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(ids)}", f"--format={fields}"]


def parse_sacct(text: str) -> dict[str, tuple[Row, Status]]:
    """By job id. The state may carry who cancelled the job: `CANCELLED by 1001`."""
    found = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) != 5 or not parts[0].isdecimal():
            continue
        state, _, by = parts[1].strip().partition(" by ")
        code = parse_exit_code(parts[2]) or (0, 0)
        row = Row(
            job_id=parts[0],
            name="",
            state=state.rstrip("+").upper(),
            reason=f"by uid {by.strip()}" if by else "",
            start_at=parse_time(parts[3]),
            end_at=parse_time(parts[4]),
        )
        found[parts[0]] = (row, Status(exit_code=code[0], signal=code[1]))
    return found


# Places in the queue


def place_argv(partitions: Iterable[str]) -> list[str]:
    """Everybody's waiting jobs in these partitions; the cheapest format there is."""
    names = ",".join(sorted(set(partitions)))
    fields = DIVIDER.join(_PLACE_FIELDS)
    return ["squeue", "--all", "--states=PENDING", "--noheader", f"--partition={names}", f"--format={fields}"]


def parse_places(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Place and number of waiting jobs, by job id and partition: the highest priority first, then the oldest."""
    waiting: dict[str, list[tuple[int, int, str]]] = {}
    for line in text.splitlines():
        parts = line.split(DIVIDER)
        # A priority of 0 is a job that is held: it stands in nobody's way.
        if len(parts) == 3 and parts[0].isdecimal() and parts[1].strip().isdecimal() and int(parts[1]):
            for partition in parts[2].strip().split(","):
                waiting.setdefault(partition, []).append((-int(parts[1]), int(parts[0]), parts[0]))
    places = {}
    for partition, jobs in waiting.items():
        for place, (_, _, job_id) in enumerate(sorted(jobs), 1):
            places[job_id, partition] = (place, len(jobs))
    return places


def ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
