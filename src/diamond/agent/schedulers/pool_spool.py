"""What is kept of a job inside pilots in its run directory, for a `Pooled` made anew to find it again: pooled.json."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diamond.agent.machine import FULL_ERRORS
from diamond.agent.schedulers import spooling
from diamond.agent.schedulers.base import Observed, Submission
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, StorageFull, Unavailable
from diamond.core.pools import PoolPlace
from diamond.core.rundir import moment, read_json, whole, write_atomic
from diamond.core.slurm import SlurmOptions

log = logging.getLogger(__name__)

_SPOOL = "pooled.json"
_SPOOL_BYTES = 4 * 1024 * 1024  # a place may have thousands of nodes


@dataclass(frozen=True, kw_only=True)
class Spooled:
    """A submission with a place, when it came (nanoseconds), and how it ended, once that is certain."""

    submission: Submission
    order: int
    result: Observed | None = None

    @property
    def place(self) -> PoolPlace:
        assert self.submission.place is not None
        return self.submission.place

    @property
    def queued_at(self) -> float:
        return self.order / 1e9


@dataclass(frozen=True, kw_only=True)
class _File:
    """pooled.json."""

    name: str
    script: str
    order: int
    place: PoolPlace
    time_limit_s: float | None = None
    warn_s: float | None = None
    envs: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    result: dict[str, Any] | None = None


def save(spooled: Spooled) -> None:
    """Write pooled.json.

    Raises:
        StorageFull: no room for it.
        Unavailable: the run directory cannot be written to.
    """
    job = spooled.submission
    raw = _File(
        name=job.name,
        script=str(job.script),
        order=spooled.order,
        place=spooled.place,
        time_limit_s=job.time_limit_s,
        warn_s=job.warn_s,
        envs=dict(job.envs),
        modules=job.slurm.modules,
        result=None if spooled.result is None else encode(spooled.result),
    )
    try:
        write_atomic(job.run_dir / _SPOOL, json.dumps(encode(raw)).encode())
    except OSError as error:
        kind = StorageFull if error.errno in FULL_ERRORS else Unavailable
        raise kind(f"{job.run_dir}: {error.strerror}", hint="free space on the endpoint") from error


def ended(spooled: Spooled, result: Observed) -> Spooled:
    """The same with its result, which is written down. What is in the way of that is no reason not to tell it."""
    spooled = replace(spooled, result=result)
    try:
        save(spooled)
    except DiamondError as error:
        log.warning("job %s: %s", spooled.submission.name, error.message)
    return spooled


def load(run_dir: Path) -> Spooled | None:
    """What `save` wrote in this directory; None when there is nothing, or what no `save` wrote."""
    raw = read_json(run_dir / _SPOOL, _SPOOL_BYTES)
    if raw.get("name") != run_dir.name:
        return None
    try:
        file = decode(_File, raw)
        submission = Submission(
            name=run_dir.name,
            run_dir=run_dir,
            script=Path(file.script),
            num_nodes=len(file.place.nodes),
            cpus=file.place.nodes[0].slots * file.place.cpus,
            time_limit_s=None if file.time_limit_s is None else moment(file.time_limit_s),
            warn_s=None if file.warn_s is None else moment(file.warn_s),
            envs=file.envs,
            slurm=SlurmOptions(modules=file.modules),
            place=file.place,
        )
        result = None if file.result is None else decode(Observed, file.result)
        return Spooled(submission=submission, order=whole(file.order, 0, 2**63 - 1), result=result)
    except (DiamondError, ValueError, TypeError, IndexError):
        return None


def load_all(jobs_dir: Path) -> list[Spooled]:
    """What `save` wrote below this directory, in the order of the submissions. Raises nothing, whatever is there."""
    return spooling.load_all(jobs_dir, load)


def remove(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / _SPOOL).unlink()
