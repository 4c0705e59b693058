"""What the local scheduler keeps in a job's run directory, so that it survives its own process.

local.json   the job as submitted, its place in the queue, the devices assigned to it
kill.json    why Diamond ends (or ended) the job; written before the first signal is sent

The scheduler's memory can always be rebuilt from these two, `started` and `exit.json`; there is no other state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diamond.agent.machine import FULL_ERRORS
from diamond.agent.schedulers.base import Submission
from diamond.core.errors import StorageFull, Unavailable
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, write_atomic

_SPOOL = "local.json"
_KILL = "kill.json"
NOBODY = "0 0 none\n"  # the mark of a directory that was cancelled before it could start


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


@dataclass(frozen=True, kw_only=True)
class KillCause:
    """Why Diamond itself ends a job."""

    reason: Reason
    detail: str = ""
    at: float = 0.0


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
    """What `save` wrote in this directory; None when there is nothing (any more)."""
    raw = _read(run_dir / _SPOOL)
    try:
        return Spooled(
            submission=Submission(
                name=str(raw["name"]),
                run_dir=run_dir,
                script=Path(raw["script"]),
                cpus=int(raw["cpus"]),
                gpus=int(raw["gpus"]),
                gpu_type=raw["gpu_type"],
                mem_bytes=int(raw["mem_bytes"]),
                time_limit_s=raw["time_limit_s"],
                warn_s=raw["warn_s"],
                priority=int(raw["priority"]),
                num_nodes=int(raw["num_nodes"]),
                envs=dict(raw["envs"]),
            ),
            order=int(raw["order"]),
            oom_kills=int(raw["oom_kills"]),
            gpus=tuple(int(index) for index in raw["assigned_gpus"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def with_gpus(spooled: Spooled, gpus: tuple[int, ...]) -> Spooled:
    return dataclasses.replace(spooled, gpus=gpus)


def remove(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / _SPOOL).unlink()


def save_cause(run_dir: Path, cause: KillCause) -> None:
    """Record why the job is about to be killed. A full disk must not keep a job alive, so this never raises."""
    raw = {"reason": cause.reason.value, "detail": cause.detail, "at": cause.at}
    with contextlib.suppress(OSError):
        write_atomic(run_dir / _KILL, json.dumps(raw).encode())


def load_cause(run_dir: Path) -> KillCause | None:
    raw = _read(run_dir / _KILL)
    try:
        return KillCause(reason=Reason(raw["reason"]), detail=str(raw["detail"]), at=float(raw["at"]))
    except (KeyError, TypeError, ValueError):
        return None


def claim(run_dir: RunDir) -> bool:
    """Take the directory's one start away, so that a script already on its way finds it taken; False: too late."""
    try:
        fd = os.open(run_dir.started, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    except OSError:
        return True  # nobody can make the file, so nobody can start
    with contextlib.suppress(OSError):
        os.write(fd, NOBODY.encode())
    os.close(fd)
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
