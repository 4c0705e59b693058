"""What the agent needs of any batch scheduler: the `Scheduler` protocol and the values that pass through it.

Owns no state and starts nothing. What only some schedulers can do is a protocol of its own (`HasProcesses`,
`HasShells`, `HasWarnings`), so that the first stays small enough for every scheduler to keep whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.pools import PoolPlace
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.slurm import SlurmOptions
from diamond.core.states import JobState


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job as a scheduler gets it. The run directory is complete; the script in it needs nothing else.

    Attributes:
        name: the job's id; the scheduler knows the job by it, also after everybody restarted.
        script: absolute path of job.sh.
        cpus: cores per node; mem_bytes: bytes per node, 0 for no limit; gpus: GPUs per node.
        gpu_type: model asked for; None takes any.
        time_limit_s: seconds from its start; None for no limit.
        warn_s: how long before the limit the program is warned with SIGUSR1; None lets the scheduler choose.
        priority: higher goes first.
        envs: variables for the script itself, beside those in the run directory's `env` file.
        partition: the queue to use; empty leaves it to the scheduler.
        after: name of a job of this scheduler that must be over, however it ended, before this one may start.
        slurm: what the task says to Slurm in particular; other schedulers ignore it.
        user: who asked, for schedulers that share between users themselves.
        asked_by: the same, where that is not the endpoint's owner, for the scheduler's own records.
        on_login: for the machine the agent runs on, also where that is only a cluster's login node.
        place: in which pilots, jobs of this scheduler, it runs; None for a job of the scheduler's own.
    """

    name: str
    run_dir: Path
    script: Path
    cpus: int = 1
    gpus: int = 0
    gpu_type: str | None = None
    mem_bytes: int = 0
    time_limit_s: float | None = None
    warn_s: float | None = None
    priority: int = 0
    num_nodes: int = 1
    envs: Mapping[str, str] = field(default_factory=dict)
    partition: str = ""
    after: str = ""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    on_login: bool = False
    user: str = ""
    asked_by: str = ""
    place: PoolPlace | None = None

    @property
    def warning_s(self) -> float | None:
        """Seconds before the limit at which to warn; None without a limit."""
        if self.time_limit_s is None:
            return None
        return min(60.0, self.time_limit_s / 10) if self.warn_s is None else min(self.warn_s, self.time_limit_s)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a scheduler says of one job: QUEUED, RUNNING or a final state. Times are Unix seconds."""

    state: JobState
    reason: Reason | None = None
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    scheduler_id: str | None = None
    hosts: tuple[str, ...] = ()
    pending_reason: str = ""
    partition: str = ""
    expected_start_at: float | None = None  # the scheduler's estimate for a job that waits
    queued_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None


def final_state(reason: Reason) -> JobState:
    """The state a job ends in for this reason; the table of reasons decides."""
    return JobState(MEANINGS[reason].outcome)


class Scheduler(Protocol):
    """A batch scheduler, seen from the agent.

    Thread-safety: every method may be called from any thread. Ownership: the scheduler owns the processes and what
    it writes beside them in the run directories; the agent owns everything else there, and removes a run directory
    only after `forget`. Durability: a job survives the agent; a scheduler object made anew for the same place knows
    every job that was submitted and not forgotten. Nothing here raises for what becomes of a job: that is
    data, in `Observed`.
    """

    wake: Callable[[], None]
    """Called when `observe` has news, from any thread; must return at once. Set by the agent."""

    def submit(self, submission: Submission) -> str:
        """Hand a job over; returns the scheduler's own id for it ("" while there is none).

        Idempotent by name: a job the scheduler already knows is not submitted again, whatever became of it.

        Raises:
            Unavailable: the scheduler cannot take jobs now; the same call may work later.
            StorageFull: the job could not be recorded.
        """
        ...

    def observe(self) -> dict[str, Observed]:
        """Every job submitted and not forgotten, by name, in one query. An unchanged job is the same object again."""
        ...

    def cancel(self, names: Iterable[str]) -> None:
        """Stop jobs, queued or running. Idempotent; unknown and ended jobs are left as they are."""
        ...

    def forget(self, names: Iterable[str]) -> None:
        """Drop ended jobs from `observe`. Idempotent. The run directories stay."""
        ...

    def capacity(self) -> EndpointFacts:
        """What the scheduler may hand out. Raises nothing; unknown numbers are 0."""
        ...

    def usage(self) -> EndpointUsage:
        """What is handed out now."""
        ...

    def close(self) -> None:
        """Stop watching. Jobs go on. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class JobProcesses:
    """A running job's place in the process table of this machine."""

    name: str
    run_dir: Path
    pid: int  # the leader; also the number of its session
    started_at: float
    gpus: tuple[int, ...] = ()  # device indices assigned to it


@runtime_checkable
class HasProcesses(Protocol):
    """A scheduler whose jobs run on this very machine, where the agent can sample them."""

    def processes(self) -> tuple[JobProcesses, ...]:
        """The jobs running now. Thread-safe."""
        ...


@runtime_checkable
class LearnsFacts(Protocol):
    """A scheduler that finds out in the background what it may hand out."""

    on_new_facts: Callable[[], None]
    """Called when `capacity` has another answer than before, from any thread. Set by the agent."""


@runtime_checkable
class HasWarnings(Protocol):
    """A scheduler that holds pools: it runs jobs inside of pilots, and can be asked to let jobs save and stop."""

    def warn(self, names: Iterable[str]) -> None:
        """Warn jobs that run in pilots (SIGUSR1, as before a walltime); one that has not begun gives up its place.

        A pilot that is named ends as soon as nothing runs in it. Idempotent; others are left as they are. Thread-safe.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ShellCommand:
    """How to start a program inside a running job: argv, the whole environment of what is started, and where.

    With a `mark`, what is started ends its error output with RS, the mark, a colon, the program's exit status and RS.
    Its own status is that of a middleman, who would remark on a program's failure among the program's own words.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    mark: str = ""


@runtime_checkable
class HasShells(Protocol):
    """A scheduler into whose running jobs another program can be started."""

    def shell_argv(self, name: str, argv: Sequence[str], tty: bool, node: int = 0) -> ShellCommand:
        """How to run `argv` in the job, on its node of this number, with the job's environment and work directory.

        What is started that way is ended with the job at the latest. `tty`: its standard streams will be a terminal.
        Thread-safe.

        Raises:
            NotFound: no such job runs, or it has no such node.
        """
        ...
