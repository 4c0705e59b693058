"""What the Slurm driver keeps in a job's run directory: slurm.json, the submission and what became of it.

A job without an id in it may or may not have reached Slurm: only a look at the queue can tell. Why Diamond ends a job
(kill.json) and the mark that takes a directory's one start away (`started`) are the same for every scheduler: see
`spool`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diamond.agent.machine import FULL_ERRORS
from diamond.agent.schedulers import spooling
from diamond.agent.schedulers.base import Observed, Submission
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, StorageFull, Unavailable
from diamond.core.rundir import moment, read_json, whole, write_atomic
from diamond.core.slurm import SlurmOptions

log = logging.getLogger(__name__)

_SPOOL = "slurm.json"
_SPOOL_BYTES = 4 * 1024 * 1024  # a submission may carry variables


@dataclass(frozen=True, kw_only=True)
class Spooled:
    """A submission with what the driver knows of it.

    Attributes:
        order: nanoseconds of the submission.
        slurm_id: Slurm's number of the job; empty until it is known.
        result: how it ended, once that is certain: Slurm forgets its jobs after minutes.
    """

    submission: Submission
    order: int
    slurm_id: str = ""
    host: str = ""  # where it was submitted from
    result: Observed | None = None

    @property
    def queued_at(self) -> float:
        return self.order / 1e9


@dataclass(frozen=True, kw_only=True)
class _File:
    """slurm.json."""

    name: str
    script: str
    order: int
    cpus: int = 1
    gpus: int = 0
    gpu_type: str | None = None
    mem_bytes: int = 0
    time_limit_s: float | None = None
    warn_s: float | None = None
    priority: int = 0
    num_nodes: int = 1
    envs: dict[str, str]
    partition: str = ""
    after: str = ""
    slurm: dict[str, Any]
    slurm_id: str = ""
    host: str = ""
    result: dict[str, Any] | None = None


def exists(run_dir: Path) -> bool:
    return os.path.lexists(run_dir / _SPOOL)


def save(spooled: Spooled) -> None:
    """Write slurm.json.

    Raises:
        StorageFull: no room for it.
        Unavailable: the run directory cannot be written to.
    """
    job = spooled.submission
    raw = _File(
        name=job.name,
        script=str(job.script),
        order=spooled.order,
        cpus=job.cpus,
        gpus=job.gpus,
        gpu_type=job.gpu_type,
        mem_bytes=job.mem_bytes,
        time_limit_s=job.time_limit_s,
        warn_s=job.warn_s,
        priority=job.priority,
        num_nodes=job.num_nodes,
        envs=dict(job.envs),
        partition=job.partition,
        after=job.after,
        slurm=encode(job.slurm),
        slurm_id=spooled.slurm_id,
        host=spooled.host,
        result=None if spooled.result is None else encode(spooled.result),
    )
    try:
        write_atomic(job.run_dir / _SPOOL, json.dumps(encode(raw)).encode())
    except OSError as error:
        kind = StorageFull if error.errno in FULL_ERRORS else Unavailable
        raise kind(f"{job.run_dir}: {error.strerror}", hint="free space on the endpoint") from error


def note(spooled: Spooled) -> None:
    """`save` for what can be found out again, if need be: never raises."""
    try:
        save(spooled)
    except DiamondError as error:
        log.warning("job %s: %s", spooled.submission.name, error.message)


def load(run_dir: Path) -> Spooled | None:
    """What `save` wrote in this directory; None when there is nothing, or what no `save` wrote."""
    raw = read_json(run_dir / _SPOOL, _SPOOL_BYTES)
    if raw.get("name") != run_dir.name:
        return None
    try:
        file = decode(_File, raw)
        return Spooled(
            submission=Submission(
                name=run_dir.name,
                run_dir=run_dir,
                script=Path(file.script),
                cpus=whole(file.cpus, 0, 2**53),
                gpus=whole(file.gpus, 0, 2**53),
                gpu_type=file.gpu_type,
                mem_bytes=whole(file.mem_bytes, 0, 2**60),
                time_limit_s=None if file.time_limit_s is None else moment(file.time_limit_s),
                warn_s=None if file.warn_s is None else moment(file.warn_s),
                priority=file.priority,
                num_nodes=whole(file.num_nodes, 1, 2**31),
                envs=file.envs,
                partition=file.partition,
                after=file.after,
                slurm=decode(SlurmOptions, file.slurm),
            ),
            order=whole(file.order, 0, 2**63 - 1),
            slurm_id=file.slurm_id if file.slurm_id.isdecimal() else "",
            host=file.host,
            result=None if file.result is None else decode(Observed, file.result),
        )
    except (DiamondError, ValueError, TypeError):
        return None


def load_all(jobs_dir: Path) -> list[Spooled]:
    """What `save` wrote below this directory, in the order of the submissions. Raises nothing, whatever is there."""
    return spooling.load_all(jobs_dir, load)


def remove(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / _SPOOL).unlink()
