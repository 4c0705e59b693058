"""The one place that runs Slurm's programs: time limits, counts, and an environment that cannot change their answers.

Nothing here knows what an answer means. Queries (squeue, scontrol, sinfo, sacct, sacctmgr) run one at a time, however
many threads ask: a cluster's controller serves everybody, and one agent must never be felt there.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
_SETTLE_S = 1.0  # for the pipes of a killed program to close

# Where Slurm itself is found. Every other variable of these families changes defaults (SQUEUE_PARTITION hides jobs,
# SBATCH_ARRAY_INX multiplies them) or belongs to a job this agent may run in.
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}
_FAMILIES = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SALLOC_", "SRUN_", "PMI_", "SCANCEL_")


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Slurm's programs behave as their options say."""
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(_FAMILIES)}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program said.

    Attributes:
        status: its exit status (negative: a signal ended it); None when it was killed for taking too long.
        began_at, ended_at: on the monotonic clock.
    """

    status: int | None
    out: str = ""
    err: str = ""
    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.status == 0

    @property
    def problem(self) -> str:
        """One line on what went wrong, for people."""
        if self.status is None:
            return f"no answer within {self.ended_at - self.began_at:.0f} s"
        said = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        text = next((line for line in said if "error" in line.lower()), said[-1] if said else "")
        for prefix in ("slurm_load_jobs error: ", "error: "):
            text = text.split(prefix, 1)[1] if prefix in text else text
        if self.status < 0:
            return f"ended by signal {-self.status}" + (f": {text}" if text else "")
        return text[:300] or f"exit status {self.status}"


class Commands:
    """Thread-safe.

    Attributes:
        counts: how often each program was run.
        queries: how many of those were queries.
        most_at_once: the most queries that ever ran together: 1.
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.queries = 0
        self.most_at_once = 0
        self.timeout_s = timeout_s
        self._environ = dict(os.environ if environ is None else environ)
        self._query_env = {
            **without_slurm(self._environ),
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",  # Unix seconds: no time zone to guess
        }
        self._lock = threading.Lock()
        self._one_query = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._at_once = 0
        self._recent: collections.deque[float] = collections.deque(maxlen=200)
        self._closed = False

    @property
    def environ(self) -> Mapping[str, str]:
        return self._environ

    def query(self, argv: Sequence[str], *, timeout_s: float | None = None) -> Answer:
        """Ask the controller (or slurmdbd) something. Waits its turn."""
        with self._one_query:
            with self._lock:
                self.queries += 1
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                self._recent.append(time.monotonic())
            try:
                return self._run(argv, self._query_env, timeout_s or self.timeout_s)
            finally:
                with self._lock:
                    self._at_once -= 1

    def queries_within(self, seconds: float) -> list[float]:
        """When the queries of the last `seconds` began, oldest first."""
        since = time.monotonic() - seconds
        with self._lock:
            return [at for at in self._recent if at >= since]

    def sbatch(self, argv: Sequence[str], env: Mapping[str, str]) -> Answer:
        """Submit. Several may run at once."""
        return self._run(argv, env, self.timeout_s)

    def scancel(self, ids: Iterable[str]) -> Answer:
        # --quiet: a job that ended meanwhile is no error.
        return self._run(["scancel", "--quiet", *ids], self._query_env, self.timeout_s)

    def close(self) -> None:
        """End what still runs; nothing starts any more. An sbatch cut short counts as one of unknown outcome."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _end(process)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Answer:
        began = time.monotonic()
        try:
            with self._lock:
                if self._closed:
                    return Answer(status=None, err="closing", began_at=began, ended_at=began)
                self.counts[argv[0]] += 1
                # A session of its own: Ctrl-C for the agent is not meant for its sbatch, and all of it can be ended.
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    env=dict(env),
                )
                self._running.add(process)
        except FileNotFoundError:
            return Answer(status=127, err=f"{argv[0]}: not found on PATH", began_at=began, ended_at=time.monotonic())
        except OSError as error:
            text = f"{argv[0]}: {error.strerror}"
            return Answer(status=126, err=text, began_at=began, ended_at=time.monotonic())
        status: int | None
        try:
            out, err = process.communicate(timeout=timeout_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            _end(process)
            status = None
            out, err = b"", b""
            with contextlib.suppress(subprocess.TimeoutExpired, ValueError, OSError):
                out, err = process.communicate(timeout=_SETTLE_S)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()  # whoever still holds the other end (an orphan of a wrapper) is not waited for
        finally:
            with self._lock:
                self._running.discard(process)
        return Answer(
            status=status,
            out=out.decode(errors="surrogateescape"),
            err=err.decode(errors="replace"),
            began_at=began,
            ended_at=time.monotonic(),
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SETTLE_S)
