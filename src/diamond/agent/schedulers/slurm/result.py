"""How a job under Slurm ended: from Slurm's last word on it and from what it left behind to an `Observed`.

The order of belief: what Diamond itself did to the job, then what Slurm did (time limit, preemption, a dead node),
then the record the job wrote as its last act. Reads the run directory; changes nothing.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from diamond.agent.schedulers.base import Observed, Submission, final_state
from diamond.agent.schedulers.causes import KillCause, load_cause
from diamond.agent.schedulers.result import Ending, conclude
from diamond.agent.schedulers.slurm.queue import Row, Status
from diamond.agent.schedulers.slurm.states import Stage, meaning
from diamond.core.durations import format_duration
from diamond.core.reasons import Reason
from diamond.core.rundir import ExitRecord, RunDir, may_have_started, read_exit
from diamond.core.scripts import ALREADY_STARTED

_NO_LAUNCH_SIGNAL = 53  # Slurm's own: it could not enter the directory or open the log on the node
_TAIL_BYTES = 8192
_EARLY_S = 90.0  # Slurm warns up to a minute early, and its own clock of a job begins before the job's script does
_OOM_HINTS = (b"oom_kill", b"oom-kill", b"exceeded memory limit", b"Exceeded job memory limit", b"out-of-memory")
# What these say is no longer true once the job's own record says that the program ended well before.
_FORGIVEN_WHEN_DONE = (Reason.NODE_FAIL, Reason.OUT_OF_MEMORY, Reason.LAUNCH_FAILED)


@dataclass(frozen=True, kw_only=True)
class Last:
    """All that is known of a job that is over.

    Attributes:
        row: Slurm's last word; None when it has forgotten the job.
        status: how the batch script ended, where that was asked.
        started_at: when it was first seen to run; None when it never was.
    """

    submission: Submission
    row: Row | None = None
    status: Status | None = None
    scheduler_id: str = ""
    queued_at: float | None = None
    started_at: float | None = None
    hosts: tuple[str, ...] = ()
    partition: str = ""


def end_of(last: Last) -> Observed:
    """The final word on a job."""
    run_dir = last.submission.run_dir
    record = read_exit(RunDir(run_dir))
    reason, detail = _by_slurm(last, record, _cause(run_dir, record))
    by_job = conclude(run_dir, _ending(last))
    if reason is not None:
        seen = replace(by_job, state=final_state(reason), reason=reason, detail=detail)
    elif record is None and last.row is None and last.status is None:
        seen = replace(by_job, detail=_vanished(run_dir))
    else:
        seen = _with_oom(by_job, run_dir)
    ran = record is not None or last.started_at is not None
    return replace(
        seen,
        scheduler_id=last.scheduler_id or None,
        hosts=last.hosts or (by_job.hosts if ran and by_job.hosts != ("",) else ()),
        partition=last.partition,
        started_at=seen.started_at if ran else None,
        ended_at=_ended_at(last, record),
    )


def _cause(run_dir: Path, record: ExitRecord | None) -> KillCause | None:
    """Why Diamond ended it; None when it was over before Diamond meant to."""
    cause = load_cause(run_dir)
    return None if cause is not None and record is not None and record.ended_at <= cause.at else cause


def _by_slurm(last: Last, record: ExitRecord | None, cause: KillCause | None) -> tuple[Reason | None, str]:
    """The reason where Diamond or Slurm, not the program, decided it; None leaves it to the record."""
    if cause is not None:
        return cause.reason, cause.detail
    row = last.row
    if row is None:
        return None, ""
    if row.state == "FAILED" and row.reason == "BadConstraints" and not row.nodes:
        return Reason.REJECTED, "Slurm refused the job: no node has what it asks for (BadConstraints)"
    found = meaning(row.state)
    if found.stage is Stage.OVER and found.reason is not None:
        if found.reason in _FORGIVEN_WHEN_DONE and record is not None and record.exit_code == 0:
            return None, ""
        return found.reason, _detail(last, found.reason, found.text)
    if record is None and last.status is not None:
        return _by_status(last, last.status)
    if record is None and row.state == "FAILED":
        return Reason.EXIT_NONZERO, f"Slurm says that it failed ({row.reason}); it left no exit record"
    return None, ""


def _detail(last: Last, reason: Reason, text: str) -> str:
    row = last.row
    assert row is not None
    if row.state == "TIMEOUT" and last.submission.time_limit_s is not None:
        return f"the limit was {format_duration(last.submission.time_limit_s)}"
    if reason is Reason.CANCELLED and row.reason.startswith("by uid "):
        return f"cancelled outside Diamond {row.reason}, with scancel"
    if reason is Reason.CANCELLED and row.reason == "DependencyNeverSatisfied":
        return "Slurm cancelled it: the job it depends on ended otherwise than it must"
    if reason is Reason.NODE_FAIL and row.nodes:
        return f"{text} ({row.nodes})"
    return text


def _by_status(last: Last, status: Status) -> tuple[Reason | None, str]:
    run_dir = last.submission.run_dir
    if status.signal == _NO_LAUNCH_SIGNAL:
        return Reason.LAUNCH_FAILED, f"Slurm could not enter {run_dir} or open the log there on its node"
    if status.exit_code == ALREADY_STARTED and may_have_started(RunDir(run_dir)):
        return Reason.LOST, "its run directory was begun by an earlier submission, which left no exit status"
    return None, ""


def _ending(last: Last) -> Ending:
    """The same in the words of the local scheduler, whose reading of exit records holds here too."""
    status: int | None = None
    if last.status is not None:
        status = -last.status.signal if last.status.signal else last.status.exit_code
    elif last.row is not None and last.row.state == "COMPLETED":
        status = 0
    return Ending(
        status=status,
        host=last.hosts[0] if last.hosts else "",
        scheduler_id=last.scheduler_id,
        queued_at=last.queued_at,
        started_at=last.started_at,
        submission=last.submission,
        early_s=_EARLY_S,
    )


def _vanished(run_dir: Path) -> str:
    if not os.path.isdir(run_dir):
        return f"the run directory {run_dir} is gone"
    return "Slurm does not know the job any more, and it left no exit status"


def _with_oom(seen: Observed, run_dir: Path) -> Observed:
    """A SIGKILL together with a word from Slurm in the log: memory, where Slurm itself has no state for it."""
    if seen.signal != signal.SIGKILL or not any(hint in _log_tail(run_dir) for hint in _OOM_HINTS):
        return seen
    detail = "the program was killed (SIGKILL), and Slurm wrote into its log that memory ran out"
    return replace(seen, state=final_state(Reason.OUT_OF_MEMORY), reason=Reason.OUT_OF_MEMORY, detail=detail)


def _log_tail(run_dir: Path) -> bytes:
    try:
        fd = os.open(RunDir(run_dir).stream("log"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    except OSError:
        return b""
    finally:
        os.close(fd)


def _ended_at(last: Last, record: ExitRecord | None) -> float:
    if record is not None:
        return record.ended_at
    if last.row is not None and last.row.end_at is not None:
        return min(last.row.end_at, time.time())
    return time.time()
