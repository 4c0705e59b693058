"""What a training says of itself in `train.jsonl`, and what follows from it: how long it still takes, in how many jobs.

Pure. The lines are a job's own, which may put anything there: what is no finite number of a plausible size counts as
not said, a line without a time and a step as not written. Fields that are not known here are left alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MAX_LINE_BYTES = 8 * 1024
MIN_LINE_BYTES = 16  # nothing with a time and a step is shorter
MAX_SIZES = 64  # of one task; a training that changes its size more often than that is nobody's
PARTS = ("compute_s", "comm_s", "data_s", "save_s", "other_s")

_LATEST_S = 253402300799.0  # the end of the year 9999
_LONGEST_S = 1e9
_MOST = 2**53
_MOST_RANKS = 10_000_000
_MOST_TEXT = 80


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Checkpoints so far. `blocked_s`: how long one held the training up; `took_s`: until it was on disk."""

    count: int = 0
    blocked_s: float | None = None
    took_s: float | None = None
    interval_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """A rank whose computing takes `ratio` times as long as that of the rank in the middle."""

    rank: int
    host: str
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One window of a training. Times in seconds per step unless they say otherwise; None is not known.

    Attributes:
        t: Unix seconds at the end of the window; `steps`: how many steps it holds.
        step: steps done since the very beginning; `until`: how many there are to be.
        world: ranks; `nodes`: machines they are on.
        step_s: mean, of which the five parts (`PARTS`) are the sum.
        sync_s: a whole exchange of gradients that nothing overlaps.
        noise_scale: batches much larger than this gain little; see docs/training.md. `noise_scale_least`: what it is
            at least, while noise hides the gradient.
        samples: trained on since the very beginning; `until_samples`: how many there are to be, where the end is
            counted in them and not in steps.
        parallel_why: a few words on why it is this technique.
        grows: whether the batch may be another one in the next job; `first_batch`: the one its learning rate belongs
            to; `max_batch`: the most it may be.
        memory_peak_bytes: the largest over ranks; GPU memory, or that of the process on a CPU.
        generation: how often the training came together anew; `restarts`: how often after a failure.
        ends_at: when the job's time is over.
    """

    t: float
    step: int
    until: int | None = None
    samples: int | None = None
    until_samples: int | None = None
    steps: int = 0
    job: str = ""
    world: int = 1
    nodes: int = 1
    device: str = ""
    parallel: str = ""
    parallel_why: str = ""
    precision: str = ""
    global_batch: int | None = None
    per_rank: int | None = None
    accumulate: int | None = None
    grows: bool | None = None
    first_batch: int | None = None
    max_batch: int | None = None
    step_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    data_s: float | None = None
    save_s: float | None = None
    other_s: float | None = None
    sync_s: float | None = None
    samples_per_s: float | None = None
    noise_scale: float | None = None
    noise_scale_least: float | None = None
    memory_peak_bytes: int | None = None
    lr_scale: float | None = None
    generation: int = 0
    restarts: int = 0
    ends_at: float | None = None
    saves: Saves | None = None
    slowest: Slowest | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they are spent on; those that are known."""
        said = {name: getattr(self, name) for name in PARTS}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def remaining_s(self) -> float | None:
        """Seconds of training still to do at this pace."""
        if self.until is None or self.step_s is None:
            return None
        return max(0, self.until - self.step) * self.step_s

    @property
    def samples_done(self) -> int | None:
        """Since the very beginning; by its steps, where it does not say."""
        if self.samples is not None:
            return self.samples
        return self.step * self.global_batch if self.global_batch else None

    @property
    def samples_in_all(self) -> int | None:
        """How many there are to be; None where it does not say, nor when it ends."""
        if self.until_samples is not None:
            return self.until_samples
        return self.until * self.global_batch if self.until is not None and self.global_batch else None

    @property
    def began_s(self) -> float:
        """Unix seconds at which the window began, as far as the steps tell."""
        return self.t - self.steps * (self.step_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What a training does at one size: the newest window there, and the best.

    Attributes:
        per_rank: samples that a rank computes at once; `comm_s`: of a step, what it waits for other ranks.
    """

    nodes: int
    world: int
    global_batch: int | None
    device: str
    samples_per_s: float
    best_samples_per_s: float
    step_s: float | None
    at: float
    windows: int = 1
    per_rank: int | None = None
    comm_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a task's training stands, over all its jobs; `latest` is None where none has measured anything.

    Attributes:
        by_size: what it did at each size it had, the most recent first.
        remaining_s: seconds of training to do; None when that is not known, or the task is over.
        jobs_expected: how many jobs are to come, beside one that runs; None when that is not known.
        walltime_s: how long one of them may run; None for as long as it likes.
        chained: whether another job follows one whose time is over.
        over_s: how much longer than the task's `max_duration` it will take at this pace; None when it fits.
        stage: `running` while a job runs; `ending` when its program has ended and what follows is not settled yet;
            `waiting` for the next job; `over` when none comes.
    """

    latest: Measure | None = None
    by_size: tuple[Throughput, ...] = ()
    remaining_s: float | None = None
    jobs_expected: int | None = None
    walltime_s: float | None = None
    chained: bool = False
    over_s: float | None = None
    stage: str = "running"


Size = tuple[int, int, int | None, str]


def parse_line(line: bytes | str) -> Measure | None:
    """The measure a line holds; None for anything else."""
    if not MIN_LINE_BYTES <= len(line) <= MAX_LINE_BYTES:
        return None
    try:
        # Not UTF-8 is not JSON; numbers of thousands of digits are a ValueError as well.
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return parse(raw) if isinstance(raw, dict) else None


def parse(raw: Mapping[str, Any]) -> Measure | None:
    """The same from what was JSON."""
    t, step = _number(raw.get("t"), _LATEST_S), _whole(raw.get("step"), _MOST)
    if t is None or step is None:
        return None
    return Measure(
        t=t,
        step=step,
        until=_whole(raw.get("until"), _MOST),
        samples=_whole(raw.get("samples"), _MOST),
        until_samples=_whole(raw.get("until_samples"), _MOST),
        steps=_whole(raw.get("steps"), _MOST) or 0,
        job=_text(raw.get("job")),
        world=_whole(raw.get("world"), _MOST_RANKS) or 1,
        nodes=_whole(raw.get("nodes"), _MOST_RANKS) or 1,
        device=_text(raw.get("device")),
        parallel=_text(raw.get("parallel")),
        parallel_why=_text(raw.get("parallel_why")),
        precision=_text(raw.get("precision")),
        global_batch=_whole(raw.get("global_batch"), _MOST),
        per_rank=_whole(raw.get("per_rank"), _MOST),
        accumulate=_whole(raw.get("accumulate"), _MOST),
        grows=_flag(raw.get("grows")),
        first_batch=_whole(raw.get("first_batch"), _MOST),
        max_batch=_whole(raw.get("max_batch"), _MOST),
        step_s=_number(raw.get("step_s"), _LONGEST_S),
        **{name: _number(raw.get(name), _LONGEST_S) for name in PARTS},
        sync_s=_number(raw.get("sync_s"), _LONGEST_S),
        samples_per_s=_number(raw.get("samples_per_s"), _MOST),
        noise_scale=_number(raw.get("noise_scale"), _MOST),
        noise_scale_least=_number(raw.get("noise_scale_least"), _MOST),
        memory_peak_bytes=_whole(raw.get("memory_peak_bytes"), _MOST),
        lr_scale=_number(raw.get("lr_scale"), _MOST),
        generation=_whole(raw.get("generation"), _MOST) or 0,
        restarts=_whole(raw.get("restarts"), _MOST) or 0,
        ends_at=_number(raw.get("ends_at"), _LATEST_S),
        saves=_saves(raw.get("saves")),
        slowest=_slowest(raw.get("slowest")),
    )


def measures_in(data: bytes) -> Iterable[Measure]:
    """Every measure among complete lines, in their order."""
    for line in data.split(b"\n"):
        if (found := parse_line(line)) is not None:
            yield found


def jobs_expected(
    measure: Measure, *, walltime_s: float | None, startup_s: float = 0.0, left_s: float = 0.0
) -> int | None:
    """How many further jobs the training needs; None when that is not known, or a job is too short for a single step.

    Args:
        walltime_s: how long one job may run; None for as long as it likes.
        startup_s: what passes from the start of a job until its first step.
        left_s: what the job that runs now still has; 0 when none does.
    """
    remaining = measure.remaining_s
    if remaining is None:
        return None
    if remaining == 0 or (walltime_s is None and left_s > 0):
        return 0
    saving_s = (measure.saves.took_s if measure.saves else None) or 0.0
    rest = remaining - max(0.0, left_s - saving_s)
    if rest <= 1e-9 * remaining:
        return 0
    if walltime_s is None:
        return 1
    usable = walltime_s - max(0.0, startup_s) - saving_s
    if usable <= 0 or usable < (measure.step_s or 0.0):
        return None
    return math.ceil(rest / usable - 1e-9)


def by_size(measures: Iterable[Measure]) -> list[Throughput]:
    """What the training did at each size it had, the most recent first."""
    table: dict[Size, Throughput] = {}
    for measure in measures:
        note(table, measure)
    return ordered(table)


def note(table: dict[Size, Throughput], measure: Measure) -> None:
    """Take one measure in."""
    if measure.samples_per_s is None:
        return
    merge(
        table,
        Throughput(
            nodes=measure.nodes,
            world=measure.world,
            global_batch=measure.global_batch,
            device=measure.device,
            samples_per_s=measure.samples_per_s,
            best_samples_per_s=measure.samples_per_s,
            step_s=measure.step_s,
            at=measure.t,
            per_rank=measure.per_rank,
            comm_s=measure.comm_s,
        ),
    )


def merge(table: dict[Size, Throughput], row: Throughput) -> None:
    """Take in what else is known of a size. Of more than `MAX_SIZES`, the longest unseen is forgotten."""
    key = (row.nodes, row.world, row.global_batch, row.device)
    known = table.get(key)
    if known is None:
        if len(table) >= MAX_SIZES:
            del table[min(table, key=lambda each: table[each].at)]
        table[key] = row
        return
    newest = row if row.at >= known.at else known
    best = max(known.best_samples_per_s, row.best_samples_per_s)
    table[key] = replace(newest, best_samples_per_s=best, windows=known.windows + row.windows)


def ordered(table: Mapping[Size, Throughput]) -> list[Throughput]:
    return sorted(table.values(), key=lambda row: (-row.at, row.nodes, row.world, row.global_batch or 0, row.device))


def _number(raw: object, most: float) -> float | None:
    # Exact types: to Python, true is a number.
    if type(raw) is not float and type(raw) is not int:
        return None
    if not 0 <= raw <= most:  # neither is NaN
        return None
    return float(raw)


def _whole(raw: object, most: int) -> int | None:
    found = _number(raw, most)
    return int(found) if found is not None and found == int(found) else None


def _flag(raw: object) -> bool | None:
    return raw if isinstance(raw, bool) else None


def _text(raw: object) -> str:
    """One short line of text: no control characters, and none that turn others around."""
    if not isinstance(raw, str):
        return ""
    return "".join(char for char in raw[:_MOST_TEXT] if char.isprintable()).strip()


def _saves(raw: object) -> Saves | None:
    if not isinstance(raw, dict):
        return None
    return Saves(
        count=_whole(raw.get("count"), _MOST) or 0,
        blocked_s=_number(raw.get("blocked_s"), _LONGEST_S),
        took_s=_number(raw.get("took_s"), _LONGEST_S),
        interval_s=_number(raw.get("interval_s"), _LONGEST_S),
    )


def _slowest(raw: object) -> Slowest | None:
    if not isinstance(raw, dict):
        return None
    rank, ratio = _whole(raw.get("rank"), _MOST_RANKS), _number(raw.get("ratio"), 1e6)
    return None if rank is None or ratio is None else Slowest(rank=rank, host=_text(raw.get("host")), ratio=ratio)
