"""What the local scheduler keeps in a job's run directory, so that it survives its own process.

local.json   the job as submitted, its place in the queue, the devices assigned to it
kill.json    why Diamond ends (or ended) the job; written before the first signal is sent

The scheduler's memory can always be rebuilt from these two, `started` and `exit.json`; there is no other state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diamond.agent.machine import FULL_ERRORS
from diamond.agent.schedulers import spooling
from diamond.agent.schedulers.base import Submission
from diamond.core.errors import StorageFull, Unavailable
from diamond.core.rundir import moment, read_json, whole, write_atomic

log = logging.getLogger(__name__)

_SPOOL = "local.json"
_SPOOL_BYTES = 4 * 1024 * 1024  # a submission may carry variables
_MOST = 2**53


@dataclass(frozen=True, kw_only=True)
class Spooled:
    """A submission with what the scheduler added to it."""

    submission: Submission
    order: int  # nanoseconds of the submission: earlier goes first among equals
    oom_kills: int = 0  # the machine's count of out-of-memory kills by then
    gpus: tuple[int, ...] = ()

    @property
    def queued_at(self) -> float:
        return self.order / 1e9


def save(spooled: Spooled) -> None:
    """Write local.json.

    Raises:
        StorageFull: no room for it.
        Unavailable: the run directory cannot be written to.
    """
    job = spooled.submission
    raw: dict[str, Any] = {
        "name": job.name,
        "script": str(job.script),
        "cpus": job.cpus,
        "gpus": job.gpus,
        "gpu_type": job.gpu_type,
        "mem_bytes": job.mem_bytes,
        "time_limit_s": job.time_limit_s,
        "warn_s": job.warn_s,
        "priority": job.priority,
        "num_nodes": job.num_nodes,
        "envs": dict(job.envs),
        "user": job.user,
        "order": spooled.order,
        "oom_kills": spooled.oom_kills,
        "assigned_gpus": spooled.gpus,
    }
    try:
        write_atomic(job.run_dir / _SPOOL, json.dumps(raw).encode())
    except OSError as error:
        kind = StorageFull if error.errno in FULL_ERRORS else Unavailable
        raise kind(f"{job.run_dir}: {error.strerror}", hint="free space on the endpoint") from error


def load(run_dir: Path) -> Spooled | None:
    """What `save` wrote in this directory; None when there is nothing (any more), or what no `save` wrote."""
    raw = read_json(run_dir / _SPOOL, _SPOOL_BYTES)
    try:
        if raw["name"] != run_dir.name:
            return None
        return Spooled(
            submission=Submission(
                name=run_dir.name,
                run_dir=run_dir,
                script=Path(_text(raw["script"])),
                cpus=whole(raw["cpus"], 0, _MOST),
                gpus=whole(raw["gpus"], 0, _MOST),
                gpu_type=None if raw["gpu_type"] is None else _text(raw["gpu_type"]),
                mem_bytes=whole(raw["mem_bytes"], 0, _MOST),
                time_limit_s=_seconds(raw["time_limit_s"]),
                warn_s=_seconds(raw["warn_s"]),
                priority=whole(raw["priority"], -_MOST, _MOST),
                num_nodes=whole(raw["num_nodes"], 1, _MOST),
                envs={_text(name): _text(value) for name, value in raw["envs"].items()},
                user=_text(raw.get("user", "")),  # an older agent wrote none
            ),
            order=whole(raw["order"], 0, 2**63 - 1),
            oom_kills=whole(raw["oom_kills"], 0, _MOST),
            gpus=tuple(whole(index, 0, _MOST) for index in raw["assigned_gpus"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def load_all(jobs_dir: Path) -> list[Spooled]:
    """What `save` wrote below this directory, in the order of the submissions. Raises nothing, whatever is there."""
    return spooling.load_all(jobs_dir, load)


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("not text")
    return raw


def _seconds(raw: object) -> float | None:
    return None if raw is None else moment(raw)


def with_gpus(spooled: Spooled, gpus: tuple[int, ...]) -> Spooled:
    return dataclasses.replace(spooled, gpus=gpus)


def remove(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / _SPOOL).unlink()
