"""How a job inside pilots stands, from its run directory and those of its pilots. Reads; changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from diamond.agent.schedulers.base import Observed, final_state
from diamond.agent.schedulers.causes import load_cause
from diamond.agent.schedulers.pool_spool import Spooled
from diamond.agent.schedulers.result import Ending, conclude, lost
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir, clean, may_have_started, moment, read_exit, read_json, read_process_mark, whole
from diamond.core.scripts import ALREADY_STARTED
from diamond.core.states import JobState

PILOT_ENDED = "the pilot that held its node ended"
_NOT_BEGUN = "its pilot has not begun"
_HANDED = "its pilot has it and starts it"
_EARLY_S = 2.0  # the steward looks twice a second
_TOLD_S = 5.0  # between a pilot being told to stop and its noting that
_SETTLE_S = 1.0  # for a pilot that ends together with its steps to say so
_MAX_TEXT = 1000
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}")  # it becomes part of scripts


@dataclass(frozen=True, kw_only=True)
class PilotFile:
    """pilot.json: what the steward said of itself when it began."""

    host: str
    slurm_id: str = ""


def read_pilot(run_dir: RunDir) -> PilotFile | None:
    """None for a pilot that has not begun."""
    _ask_anew(run_dir.path)
    raw = read_json(run_dir.pilot)
    try:
        slurm_id = raw["slurm_id"]
        if (
            not isinstance(raw["host"], str)
            or not _HOST.fullmatch(raw["host"])
            or not (slurm_id is None or str(slurm_id).isdecimal())
        ):
            return None
        return PilotFile(host=clean(raw["host"], 255), slurm_id=str(slurm_id or ""))
    except KeyError:
        return None


def _ask_anew(*folders: Path) -> None:
    """Have a shared file system look again: that a name is not there it may otherwise believe for a minute."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.listdir(folder)


def pilots_of(spooled: Spooled) -> list[RunDir]:
    """The run directories of the pilots it runs in, the first one first."""
    jobs_dir = spooled.submission.run_dir.parent
    return [RunDir(jobs_dir / node.pilot) for node in spooled.place.nodes]


def look(spooled: Spooled, over: Mapping[str, float | None]) -> Observed:
    """How a job stands whose result is not known.

    Args:
        over: pilots that are over, by name, and when they ended (None: nobody knows).
    """
    run_dir = RunDir(spooled.submission.run_dir)
    pilots = pilots_of(spooled)
    name = spooled.submission.name
    _ask_anew(run_dir.path, pilots[0].step(name, "done").parent)
    done = read_json(pilots[0].step(name, "done"))
    mark = read_process_mark(run_dir)
    has_begun = mark is not None and mark.pid > 1
    if mark is not None and not has_begun and (cause := load_cause(run_dir.path)) is not None:
        return never_ran(spooled, cause.reason, cause.detail)
    if done.get("refused") is True and not has_begun:
        return never_ran(spooled, Reason.PREEMPTED, _text(done))
    if done and (done.get("status") == 0 or time.time() >= _ended_at(done) + _SETTLE_S):
        return _end(spooled, done, over) if may_have_started(run_dir) else _not_started(spooled, done, over)
    # While that settles, a pilot that ends together with its step may be about to say so.
    if not done and pilots[0].path.name in over:
        return _end(spooled, {}, over) if has_begun else never_ran(spooled, Reason.NODE_FAIL, PILOT_ENDED)
    if has_begun:
        return _running(spooled, pilots)
    handed = pilots[0].step(name, "json").exists()
    return Observed(
        state=JobState.QUEUED, pending_reason=_HANDED if handed else _NOT_BEGUN, queued_at=spooled.queued_at
    )


def never_ran(spooled: Spooled, reason: Reason, detail: str) -> Observed:
    """The result of a job that did not begin; why Diamond itself kept it from that comes first."""
    cause = load_cause(spooled.submission.run_dir)
    if cause is not None:
        reason, detail = cause.reason, cause.detail
    return Observed(
        state=final_state(reason), reason=reason, detail=detail, queued_at=spooled.queued_at, ended_at=time.time()
    )


def _running(spooled: Spooled, pilots: list[RunDir]) -> Observed:
    found = [read_pilot(pilot) for pilot in pilots]
    first = found[0]
    return Observed(
        state=JobState.RUNNING,
        scheduler_id=first.slurm_id or None if first is not None else None,
        hosts=tuple(one.host for one in found if one is not None),
        queued_at=spooled.queued_at,
        started_at=_started_at(spooled.submission.run_dir),
    )


def _started_at(run_dir: Path) -> float | None:
    try:
        return RunDir(run_dir).started.lstat().st_mtime
    except OSError:
        return None


def _ended_at(done: dict[str, object]) -> float:
    try:
        return moment(done.get("at"))
    except ValueError:
        return 0.0


def _end(spooled: Spooled, done: dict[str, object], over: Mapping[str, float | None]) -> Observed:
    """The final word on a job that began, or that its steward could not start."""
    submission = spooled.submission
    pilots = pilots_of(spooled)
    running = _running(spooled, pilots)
    status = _status(done)
    ending = Ending(
        status=status,
        host=running.hosts[0] if running.hosts else "",
        scheduler_id=running.scheduler_id,
        queued_at=spooled.queued_at,
        started_at=running.started_at,
        submission=submission,
        early_s=_EARLY_S,
    )
    record = read_exit(RunDir(submission.run_dir))
    if status == ALREADY_STARTED and record is None:
        return lost(ending, "its run directory was begun before, and whoever did left no exit status")
    text = _text(done)
    seen = replace(conclude(submission.run_dir, ending), hosts=running.hosts)
    cause = load_cause(submission.run_dir)
    if cause is not None and cause.reason is seen.reason:
        return replace(seen, detail=cause.detail)
    if seen.reason is Reason.COMPLETED or (record is not None and record.more):
        return seen
    if any(_is_lost(pilot, over, record.ended_at if record else None) for pilot in pilots):
        return replace(seen, state=final_state(Reason.NODE_FAIL), reason=Reason.NODE_FAIL, detail=PILOT_ENDED)
    if seen.signal == signal.SIGKILL and "oom" in text.lower():
        detail = f"Slurm ended it for want of memory: {text}"
        return replace(seen, state=final_state(Reason.OUT_OF_MEMORY), reason=Reason.OUT_OF_MEMORY, detail=detail)
    if record is None and text:
        return replace(seen, detail=f"{seen.detail}; {text}" if seen.detail else text)
    return seen


def _not_started(spooled: Spooled, done: dict[str, object], over: Mapping[str, float | None]) -> Observed:
    """The result of a job whose step ended, or could not begin, before its script did."""
    if any(_is_lost(pilot, over, _ended_at(done)) for pilot in pilots_of(spooled)):
        return never_ran(spooled, Reason.NODE_FAIL, PILOT_ENDED)
    return never_ran(spooled, Reason.LAUNCH_FAILED, _text(done) or "its step ended before its script began")


def _status(done: dict[str, object]) -> int | None:
    """As `subprocess` gives it; a job can write there too."""
    try:
        return whole(done.get("status"), -64, 255)
    except ValueError:
        return None


def _text(done: dict[str, object]) -> str:
    return clean("; ".join(str(done.get("text", "")).splitlines()), _MAX_TEXT)


def _is_lost(pilot: RunDir, over: Mapping[str, float | None], ended_at: float | None) -> bool:
    """Whether a pilot was over, or was being stopped, when a step of it ended (None: nobody knows when)."""
    if ended_at is None and pilot.path.name in over:
        return True
    told_at = _ended_at(read_json(pilot.pilot_ending)) or over.get(pilot.path.name)
    return told_at is not None and (ended_at is None or told_at <= ended_at + _TOLD_S)
