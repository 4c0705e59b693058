"""A training in words, the same for pages and terminals. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from diamond.core.durations import format_duration
from diamond.core.training import Measure, Slowest, Training

PART_NAMES = {
    "compute_s": "Compute",
    "comm_s": "Communication",
    "data_s": "Data",
    "save_s": "Checkpoints",
    "other_s": "Other",
}


class Part(NamedTuple):
    """What a part of a step takes; `share` of all parts, from 0 to 1."""

    key: str
    name: str
    seconds: float
    share: float


def parts(measure: Measure) -> list[Part]:
    """Where the time of a step goes; nothing when that is not known."""
    found = measure.parts
    total = sum(found.values())
    if total <= 0:
        return []
    return [
        Part(key.removesuffix("_s"), PART_NAMES[key], seconds, seconds / total)
        for key, seconds in found.items()
        if seconds / total >= 0.0005 or key in ("compute_s", "comm_s", "data_s")
    ]


def progress(measure: Measure) -> str:
    """``step 1,200 of 10,000``."""
    return f"step {measure.step:,}" + (f" of {measure.until:,}" if measure.until is not None else "")


def outlook(training: Training) -> list[str]:
    """How long it still takes and in how many jobs, as sentences; none when that is not known, or the task is over."""
    left = training.remaining_s
    if left is None or training.stage == "over":
        return []
    if left == 0:
        return ["All steps are done."]
    pace = "at this pace" if training.stage == "running" else "at the pace of its last job"
    said = [f"About {about(left)} of training left {pace}.", _in_jobs(training)]
    if training.over_s is not None:
        said.append(
            f"That is {about(training.over_s)} more than max_duration leaves it: run it again with a larger one."
        )
    return [each for each in said if each]


def _in_jobs(training: Training) -> str:
    """What that means in jobs: of the one that runs, or of those to come."""
    jobs, walltime_s = training.jobs_expected, training.walltime_s
    if walltime_s is None or (training.stage == "ending" and not training.chained):
        return ""
    if jobs is None:
        return f"A job of {length(walltime_s)} is too short to get further."
    if training.chained and jobs > 0:
        return f"About {jobs:,} more {'job' if jobs == 1 else 'jobs'} of {length(walltime_s)} expected."
    if training.stage != "running":
        return _in_next_job(training, jobs, walltime_s)
    if jobs == 0:
        return "It should be done within this job."
    if training.over_s is None:
        return f"That is longer than its job may run ({length(walltime_s)}), and none follows it."
    return ""


def _in_next_job(training: Training, jobs: int, walltime_s: float) -> str:
    """Of a task that is tried once more: whether it goes on or begins anew is the program's affair."""
    if jobs <= 1:
        return "The next job should finish it, if it goes on from a checkpoint."
    if training.over_s is None:
        return f"That is longer than the next job may run ({length(walltime_s)}), and none follows that one."
    return ""


def slowest(rank: Slowest) -> str:
    where = f" on {rank.host}" if rank.host else ""
    return f"Rank {rank.rank}{where} computes {rank.ratio:.1f} times as long as the others."


def noise(measure: Measure) -> str:
    """What the gradient noise scale means."""
    said = "Batches much larger than this gain little."
    return f"{said} The batch is {shared(measure.global_batch, measure.world)}." if measure.global_batch else said


def batch(measure: Measure) -> str:
    """``256 = 64 × 4 ranks``."""
    if measure.global_batch is None:
        return ""
    if measure.per_rank is None or measure.world == 1:
        return shared(measure.global_batch, measure.world)
    again = f" × {measure.accumulate}" if measure.accumulate and measure.accumulate > 1 else ""
    return f"{measure.global_batch:,} = {measure.per_rank:,}{again} × {measure.world:,} ranks"


def shared(global_batch: int, ranks: int) -> str:
    """``32 = 16 × 2 ranks``: a batch of all ranks together, and what of it each has."""
    if ranks <= 1:
        return f"{global_batch:,}"
    each, rest = divmod(global_batch, ranks)
    return f"{global_batch:,} over {ranks:,} ranks" if rest else f"{global_batch:,} = {each:,} × {ranks:,} ranks"


def where(measure: Measure) -> str:
    """``4 ranks on 2 nodes, NVIDIA H200, ddp, bf16``."""
    ranks = "1 rank" if measure.world == 1 else f"{measure.world:,} ranks"
    nodes = "" if measure.nodes == 1 else f" on {measure.nodes:,} nodes"
    return ", ".join(each for each in (ranks + nodes, measure.device, measure.parallel, measure.precision) if each)


_TECHNIQUES = {
    "none": "one process",
    "ddp": "a copy of the model on each rank",
    "fsdp": "the model in shards over all ranks",
    "hybrid": "shards inside a node, copies across nodes",
}


def technique(measure: Measure) -> str:
    """``ddp, a copy of the model on each rank (fits on each rank: 1.2 GiB for training, 80 GiB a rank)``."""
    if not measure.parallel:
        return ""
    words = ", ".join(filter(None, [measure.parallel, _TECHNIQUES.get(measure.parallel, "")]))
    return f"{words} ({measure.parallel_why})" if measure.parallel_why else words


def checkpoints(measure: Measure) -> str:
    """``3, one every 1m 12s; each takes 1.20 s and holds the training up for 30.0 ms``."""
    saves = measure.saves
    if saves is None or saves.count == 0:
        return ""
    words = f"{saves.count:,}"
    if saves.interval_s:
        words += f", one every {length(saves.interval_s)}"
    if saves.took_s is not None:
        words += f"; each takes {moment(saves.took_s)}"
        if saves.blocked_s is not None:
            words += f" and holds the training up for {moment(saves.blocked_s)}"
    return words


def length(seconds: float) -> str:
    """``1h`` rather than ``1h 00m``."""
    return re.sub(r" 00[hms]$", "", format_duration(max(1.0, seconds) if seconds > 0 else 0))


def about(seconds: float) -> str:
    """A length of time that is not known to the second."""
    return length(seconds if seconds < 600 else round(seconds / 60) * 60)


def moment(seconds: float) -> str:
    """``210 ms``, ``1.52 s``, ``3m 05s``."""
    if seconds >= 60:
        return format_duration(seconds)
    if seconds >= 1:
        return f"{seconds:.2f} s"
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 100 or ms == 0 else f"{ms:.1f} ms" if ms >= 0.1 else f"{ms * 1000:.0f} µs"


def rate(number: float) -> str:
    """``1,219``, ``12.3``."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
