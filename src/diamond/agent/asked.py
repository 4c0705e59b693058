"""Who asked: whose endpoint this is, and a record of every job that runs here for somebody else.

The agent believes the first owner it is told of and keeps the name in its home: a server that later says otherwise is
not followed until the agent is enrolled anew by whoever runs it. Jobs of others are written to asked.jsonl, which
nobody but this home's user can read, before they are handed to the scheduler; the scheduler is told as well.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from dataclasses import replace
from pathlib import Path

from diamond.agent.schedulers.base import Observed, Submission
from diamond.agent.table import Tracked, submission_of
from diamond.core.errors import Unavailable
from diamond.core.rundir import write_atomic
from diamond.core.wire import JobOrder

log = logging.getLogger(__name__)

OWNER_FILE = "owner"
LEDGER = "asked.jsonl"
MAX_BYTES = 8 * 1024 * 1024  # of one file; the one before is kept as asked.jsonl.1
_MAX_NAME = 64
_MAX_NAMED = 10_000
_ODD = re.compile(r"[^A-Za-z0-9._@-]")


def forget_owner(home: Path) -> None:
    """The next server to answer says whose the endpoint is: whoever enrols it has chosen to believe that one."""
    (home / OWNER_FILE).unlink(missing_ok=True)


def plain_name(name: str) -> str:
    """A user's name as any program can take it; a server may send anything."""
    return _ODD.sub("?", name[:_MAX_NAME]) or "?"


class Asked:
    """Of one home. `told` may be called from any thread; the rest belongs to the loop's."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._named: set[str] = set()  # jobs whose number is on record
        self.warning = ""
        self.owner = self._kept()

    def _kept(self) -> str:
        try:
            return (self._home / OWNER_FILE).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def told(self, owner: str) -> None:
        """The server says whose endpoint this is."""
        kept = self._kept()
        if not owner or owner == kept:
            self.owner, self.warning = kept or self.owner, ""
        elif not kept:
            write_atomic(self._home / OWNER_FILE, owner.encode())
            self.owner, self.warning = owner, ""
        else:
            text = (
                f"the server says this endpoint is {plain_name(owner)}'s now; it was enrolled for {plain_name(kept)}, "
                "and their tasks count as another's until it is enrolled anew: diamond endpoint enroll"
            )
            if text != self.warning:
                log.error("%s", text)
            self.warning = text

    def is_other(self, order: JobOrder) -> bool:
        """Whether somebody else than the endpoint's owner asks. False while no server has said whose it is."""
        return bool(self.owner) and order.user != self.owner

    def submission(self, job: Tracked, time_limit_s: int | None) -> Submission:
        """What the scheduler is handed. Of another's job it is on record first.

        Raises:
            Unavailable: that could not be written, so the job must wait.
        """
        asked = submission_of(job, time_limit_s)
        if not self.is_other(job.order):
            return asked
        self._write(job.order, "")
        return replace(asked, asked_by=plain_name(job.order.user))

    def seen(self, job: Tracked, found: Observed) -> None:
        """Note the scheduler's own number of another's job, once."""
        if not found.scheduler_id or job.job_id in self._named or not self.is_other(job.order):
            return
        try:
            self._write(job.order, found.scheduler_id)
        except Unavailable as error:
            log.warning("%s: %s", LEDGER, error.message)
            return
        if len(self._named) >= _MAX_NAMED:
            self._named.clear()  # a job may then be named twice, which does no harm
        self._named.add(job.job_id)

    def _write(self, order: JobOrder, scheduler_id: str) -> None:
        path = self._home / LEDGER
        line = {
            "at": round(time.time(), 3),
            "user": order.user,
            "job": order.job_id,
            "task": order.task_id,
            "scheduler_id": scheduler_id,
        }
        try:
            if path.exists() and path.stat().st_size > MAX_BYTES:
                os.replace(path, path.with_name(f"{LEDGER}.1"))
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, json.dumps(line).encode() + b"\n")
                if not scheduler_id:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise Unavailable(f"{LEDGER} cannot be written: {error.strerror}") from error
