"""How a job of the local scheduler ended: one function from what is left of it to an `Observed`.

Reads the run directory and the machine's counters; changes nothing, sends nothing.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from diamond.agent.machine import is_disk_full
from diamond.agent.schedulers.base import Observed, Submission, final_state
from diamond.agent.schedulers.causes import KillCause, load_cause
from diamond.core.durations import format_duration
from diamond.core.reasons import Reason
from diamond.core.rundir import ExitRecord, RunDir, may_have_started, read_exit, read_first_failed_rank, read_hang
from diamond.core.scripts import ALREADY_STARTED, NO_RUN_DIR

# With these the script (or the shell in its place) says that it never began: 126 and 127 are the shell's own.
_NEVER_BEGAN = (NO_RUN_DIR, ALREADY_STARTED, 126, 127)
_NO_RECORD = "it left no readable exit record; this is the exit status of its script"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What the scheduler itself knows of a job that is over.

    Attributes:
        status: as `subprocess` gives it (negative: a signal); None for a process that was not our child.
        oom_rose: whether the kernel killed something for want of memory while the job ran.
        other_boot: whether the machine has restarted since the job began.
        submission: what was asked for it, where its time limit is to count.
        early_s: how much sooner than asked, by the job's own clock, its scheduler may warn or end it.
    """

    status: int | None
    host: str
    oom_rose: bool = False
    other_boot: bool = False
    scheduler_id: str | None = None
    queued_at: float | None = None
    started_at: float | None = None
    submission: Submission | None = None
    early_s: float = 1.0


def conclude(run_dir: Path, ending: Ending) -> Observed:
    """The final word on a job whose leader is gone."""
    record = read_exit(RunDir(run_dir))
    cause = load_cause(run_dir)
    if record is not None and cause is not None and record.ended_at <= cause.at:
        cause = None  # it was over before Diamond meant to end it
    note = ""
    if record is None and (record := _from_status(run_dir, ending)) is not None:
        note = _NO_RECORD
    number = _signal(record, ending)
    reason, detail = _reason(run_dir, record, cause, number, ending)
    if note:
        detail = f"{detail}; {note}" if detail else note
    code = record.exit_code if record is not None else None
    return Observed(
        state=final_state(reason),
        reason=reason,
        detail=detail,
        exit_code=code,
        signal=number,
        scheduler_id=ending.scheduler_id,
        hosts=(record.host or ending.host,) if record is not None else (ending.host,),
        queued_at=ending.queued_at,
        started_at=record.started_at if record is not None else ending.started_at,
        ended_at=record.ended_at if record is not None else time.time(),
    )


def lost(ending: Ending, detail: str) -> Observed:
    """For a job of which nothing sensible can be found out."""
    return Observed(
        state=final_state(Reason.LOST),
        reason=Reason.LOST,
        detail=detail,
        scheduler_id=ending.scheduler_id,
        hosts=(ending.host,),
        queued_at=ending.queued_at,
        started_at=ending.started_at,
        ended_at=time.time(),
    )


def _from_status(run_dir: Path, ending: Ending) -> ExitRecord | None:
    """What a child's own status tells of a job that could not leave a record: it made its directory read-only, say."""
    status = ending.status
    if status is None or status < 0 or not os.path.isdir(run_dir):
        return None
    if status in _NEVER_BEGAN and not may_have_started(RunDir(run_dir)):
        return None
    now = time.time()
    return ExitRecord(
        phase="run", exit_code=status, started_at=ending.started_at or now, ended_at=now, host=ending.host
    )


def _signal(record: ExitRecord | None, ending: Ending) -> int | None:
    if record is not None:
        return record.signal
    return -ending.status if ending.status is not None and ending.status < 0 else None


def _reason(
    run_dir: Path, record: ExitRecord | None, cause: KillCause | None, number: int | None, ending: Ending
) -> tuple[Reason, str]:
    if cause is not None:
        return cause.reason, cause.detail
    if record is not None and record.exit_code == 0:
        return Reason.COMPLETED, ""
    if number == signal.SIGKILL and ending.oom_rose:
        return Reason.OUT_OF_MEMORY, "the kernel killed the program: the machine had no memory left"
    if is_disk_full(run_dir):
        return Reason.DISK_FULL, f"no space left in {run_dir}"
    if record is None:
        return _without_record(run_dir, number, ending)
    if record.phase == "run" and (hang := read_hang(RunDir(run_dir))):
        return Reason.HUNG, hang
    if _ran_out_of_time(run_dir, record, number, ending):
        return Reason.TIME_LIMIT, _time_detail(ending)
    where = "setup" if record.phase == "setup" else "the command"
    rank = read_first_failed_rank(RunDir(run_dir)) if record.phase == "run" else None
    by = f"; rank {rank} failed first" if rank is not None else ""
    note = "; the kernel killed a process for want of memory meanwhile" if ending.oom_rose else ""
    if number is not None:
        name = _signal_name(number)
        if record.phase == "setup":
            return Reason.SETUP_FAILED, f"setup was ended by {name}{note}"
        return Reason.SIGNALLED, f"the program was ended by {name}{by}{note}"
    reason = Reason.SETUP_FAILED if record.phase == "setup" else Reason.EXIT_NONZERO
    return reason, f"{where} ended with exit code {record.exit_code}{by}{note}"


def _ran_out_of_time(run_dir: Path, record: ExitRecord, number: int | None, ending: Ending) -> bool:
    """Whether a program that a signal ended, or that ended as if one had, did so because the job's time was over.

    A training says so itself, since it may end before it is warned: as early as saving takes. Of others it is known
    that they were warned, and when.
    """
    if record.phase != "run" or record.more or number not in (signal.SIGUSR1, signal.SIGTERM):
        return False
    if number == signal.SIGUSR1 and RunDir(run_dir).is_out_of_time:
        return True
    asked = ending.submission
    if not record.warned or asked is None or asked.time_limit_s is None:
        return False
    # Where the scheduler cannot be asked any more, SIGTERM at the limit is its way of ending a job.
    before_s = asked.warning_s or 0.0 if number == signal.SIGUSR1 else 0.0
    began_at = min(record.started_at, ending.started_at or record.started_at)
    return record.ended_at - began_at >= asked.time_limit_s - before_s - ending.early_s


def _time_detail(ending: Ending) -> str:
    limit_s = ending.submission.time_limit_s if ending.submission is not None else None
    limit = f"; the limit was {format_duration(limit_s)}" if limit_s is not None else ""
    return f"the program ended as its time was about to be over{limit}"


def _without_record(run_dir: Path, number: int | None, ending: Ending) -> tuple[Reason, str]:
    if ending.other_boot:
        return Reason.LOST, "the machine restarted while the job ran"
    if not os.path.isdir(run_dir):
        return Reason.LOST, f"the run directory {run_dir} is gone"
    if number is not None:
        return Reason.SIGNALLED, f"the job's script was ended by {_signal_name(number)}"
    if ending.status == NO_RUN_DIR:
        return Reason.LAUNCH_FAILED, f"the job's script could not enter {run_dir}"
    if ending.status is not None:
        return Reason.LAUNCH_FAILED, f"the job's script ended with exit code {ending.status} and left no record"
    return Reason.LOST, "its process is gone and left no exit status"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
