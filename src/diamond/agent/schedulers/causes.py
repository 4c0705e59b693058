"""Why Diamond itself ends a job, kept in its run directory, and the claim that keeps a job from starting at all.

kill.json is written before the first signal is sent (or scancel is called), so a crash in between changes no reason.
Shared by the schedulers.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, clean, moment, read_json, write_atomic

_KILL = "kill.json"
_MAX_DETAIL = 2000
NOBODY = "0 0 none\n"  # the mark of a directory that was cancelled before it could start


@dataclass(frozen=True, kw_only=True)
class KillCause:
    """Why Diamond itself ends a job."""

    reason: Reason
    detail: str = ""
    at: float = 0.0


def save_cause(run_dir: Path, cause: KillCause) -> None:
    """Record why the job is about to be killed. A full disk must not keep a job alive, so this never raises."""
    raw = {"reason": cause.reason.value, "detail": cause.detail, "at": cause.at}
    with contextlib.suppress(OSError):
        write_atomic(run_dir / _KILL, json.dumps(raw).encode())


def load_cause(run_dir: Path) -> KillCause | None:
    raw = read_json(run_dir / _KILL)
    try:
        detail = clean(str(raw["detail"]), _MAX_DETAIL)
        return KillCause(reason=Reason(raw["reason"]), detail=detail, at=moment(raw["at"]))
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
