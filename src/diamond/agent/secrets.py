"""A job's secrets at the endpoint: fetched when the job is staged, written for it alone, hidden in all that is
reported, and removed when it is over.

Values are in the job's run directory (0600, nobody else's to read) from its staging to its end, and in this process;
never in the journal, in a log or in a command line. What was fetched for one job is not kept for another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from diamond.agent.link import Link
from diamond.agent.masking import Mask, cover, wash
from diamond.agent.run_dirs import remove
from diamond.agent.tail import Piece, read_from
from diamond.core.codec import decode
from diamond.core.errors import DiamondError, NotFound, Unauthenticated
from diamond.core.ids import is_id
from diamond.core.rundir import RunDir, read_json, read_small
from diamond.core.scripts import env_file
from diamond.core.secrets import MAX_SECRETS, MAX_VALUE_BYTES, JobSecret, JobSecrets
from diamond.core.wire import STREAMS, JobOrder, JobReport

log = logging.getLogger(__name__)

NOTHING = Mask()
_MAX_FILE_BYTES = MAX_SECRETS * (MAX_VALUE_BYTES + 1024)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Vault:
    """The secrets of this agent's jobs. Thread-safe."""

    def __init__(self, link: Link | None = None) -> None:
        """Without a link there are no secrets to be had."""
        self._link = link
        self._lock = threading.Lock()
        self._masks: dict[str, Mask] = {}

    # Before the job

    def fetch(self, job_id: str) -> tuple[JobSecret, ...]:
        """What the server gives a job. Raises DiamondError: later (`transient`), or never."""
        if self._link is None:
            raise NotFound("this agent was given no way to fetch secrets")
        return decode(JobSecrets, self._link.call("GET", f"/agent/jobs/{job_id}/secrets")).secrets

    def put(self, order: JobOrder, run_dir: RunDir, secrets: Iterable[JobSecret]) -> None:
        """Write them where the job's script looks for them. Raises OSError."""
        values, given = _wanted(order, secrets), dict[str, str]()
        with self._lock:
            self._masks[order.job_id] = Mask(secret.value for secret in values)
        for secret in values:
            given[secret.variable] = secret.value
            if secret.file:
                run_dir.secret_files.mkdir(mode=0o700, exist_ok=True)
                path = run_dir.secret_files / secret.variable
                _write(path, secret.value.encode())
                given[secret.variable] = str(path)
        versions = {secret.variable: secret.version for secret in values}
        _write(run_dir.secret_versions, json.dumps(versions).encode())
        if order.image is not None:
            lines = (f"export {name}={shlex.quote(value)}\n" for name, value in given.items())
            _write(run_dir.secrets_script, "".join(lines).encode())
        _write(run_dir.secrets, env_file(given))

    # While it runs

    def mask(self, order: JobOrder, path: Path) -> Mask | None:
        """What hides a job's secrets; None when that is not known now, so that nothing may be shown yet."""
        if not order.spec.secrets or order.work is not None:
            return NOTHING
        with self._lock:
            found = self._masks.get(order.job_id)
        if found is None and (found := self._recall(order, RunDir(path))) is not None:
            with self._lock:
                found = self._masks.setdefault(order.job_id, found)
        return found

    def read(self, order: JobOrder, run_dir: Path, stream: str, offset: int, room: int, *, is_over: bool) -> Piece:
        """The next bytes of a stream with no secret in them; nor are there any left in the file, as far as they go."""
        path = RunDir(run_dir).stream(stream)
        mask = self.mask(order, run_dir)
        if mask is None:
            return Piece(is_end=False)
        if mask.is_idle:
            return read_from(path, offset, room)
        piece = read_from(path, offset, room + mask.longest)
        found = mask.cut(piece.data, room, more=not (piece.is_end and is_over))
        cover(path, offset, found.spans)
        # What is held back until more comes is no reason to look again at once.
        held = piece.is_end and not is_over
        return replace(piece, data=found.data, is_end=(found.is_all or held) and piece.is_end)

    def hide(self, order: JobOrder, run_dir: Path, report: JobReport) -> JobReport:
        """A report with no secret in its words."""
        return _hidden(report, self.mask(order, run_dir) or NOTHING)

    # After it

    def end(self, order: JobOrder, path: Path, result: JobReport) -> JobReport:
        """The job is over: its files go, and its result is told without what was in them.

        The values stay known here until all is said of the job.
        """
        if not order.spec.secrets:
            return result
        self._remember(order, RunDir(path))
        clear(RunDir(path))
        with self._lock:
            known = self._masks.get(order.job_id, NOTHING)  # the server is not asked: this is no time to wait for it
        return _hidden(result, known)

    def forget(self, order: JobOrder, path: Path, told: Mapping[str, int]) -> None:
        """The last was said of the job. `told`: bytes of each stream that were; the rest is made harmless here."""
        with self._lock:
            mask = self._masks.pop(order.job_id, NOTHING)
        if not mask.is_idle:
            for stream in STREAMS:
                wash(RunDir(path).stream(stream), mask, told.get(stream, 0))

    def sweep(self, jobs_dir: Path, live: Iterable[tuple[JobOrder, bool]]) -> None:
        """Remove what a crash left of jobs that are over or that nobody knows any more.

        Args:
            live: the jobs in hand, and whether each is over.
        """
        needed = set()
        for order, is_over in live:
            if not is_over:
                needed.add(order.job_id)
            elif order.spec.secrets:
                self._remember(order, RunDir(jobs_dir / order.job_id))
        with contextlib.suppress(OSError):
            for folder in jobs_dir.iterdir():
                if is_id(folder.name, "job") and folder.name not in needed:
                    clear(RunDir(folder))

    def _remember(self, order: JobOrder, run_dir: RunDir) -> None:
        """What is hidden, from files that are about to go."""
        with self._lock:
            known = order.job_id in self._masks
        if not known and (values := _read_values(order, run_dir)) is not None:
            with self._lock:
                self._masks.setdefault(order.job_id, Mask(values.values()))

    def _recall(self, order: JobOrder, run_dir: RunDir) -> Mask | None:
        """After a restart: from the job's own files, else from the server, if it still has the same values."""
        values = _read_values(order, run_dir)
        if values is not None:
            return Mask(values.values())
        versions = read_json(run_dir.secret_versions)
        if not versions:
            return NOTHING  # it was never given any: its staging did not get so far
        try:
            given = _wanted(order, self.fetch(order.job_id))
        except DiamondError as error:
            if error.transient or isinstance(error, Unauthenticated):
                return None
            given = ()
        if {secret.variable: secret.version for secret in given} == versions:
            return Mask(secret.value for secret in given)
        log.warning("the secrets of job %s are not known any more; what is left of its log is hidden", order.job_id)
        return Mask(everything=True)


def _hidden(report: JobReport, mask: Mask) -> JobReport:
    if mask.is_idle:
        return report
    outputs = tuple(replace(output, path=mask.text(output.path)) for output in report.outputs)
    detail, why = mask.text(report.detail), mask.text(report.pending_reason)
    return replace(report, outputs=outputs, detail=detail, pending_reason=why)


def clear(run_dir: RunDir) -> None:
    """Remove a job's secrets from its run directory."""
    for path in (run_dir.secrets, run_dir.secrets_script):
        with contextlib.suppress(OSError):
            path.unlink()
    if os.path.lexists(run_dir.secret_files):
        remove(run_dir.secret_files)


def _wanted(order: JobOrder, secrets: Iterable[JobSecret]) -> tuple[JobSecret, ...]:
    """Those the task names, and no other: variables decide what a program does."""
    return tuple(secret for secret in secrets if secret.variable in order.spec.secrets and "\0" not in secret.value)


def _read_values(order: JobOrder, run_dir: RunDir) -> dict[str, str] | None:
    """Values by variable; None when they are not there (all)."""
    raw = read_small(run_dir.secrets, _MAX_FILE_BYTES)
    if not raw:
        return None
    found: dict[str, str] = {}
    for pair in raw.split(b"\0"):
        name, equals, value = pair.partition(b"=")
        if equals:
            found[name.decode(errors="replace")] = value.decode(errors="replace")
    for variable, use in order.spec.secrets.items():
        if use.file:
            data = read_small(run_dir.secret_files / variable, _MAX_FILE_BYTES)
            if data is None:
                return None
            found[variable] = data.decode(errors="replace")
    return found if set(order.spec.secrets) <= set(found) else None


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, _NEW_FILE, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(fd)
