"""A batch scheduler, and beside it a few slots on the login node itself, behind one `Scheduler`.

For jobs that look after images: compute nodes often cannot reach the networks that builds need. They are processes of
the login node, kept by a `LocalScheduler` of few cores and low priority; their durable state is in the same run
directories, under a name of its own, so they survive the agent as all jobs do.

Must not decide what runs here: a submission says so (`on_login`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from diamond.agent.machine import num_cpus
from diamond.agent.schedulers.base import Observed, Scheduler, ShellCommand, Submission
from diamond.agent.schedulers.local.scheduler import LocalScheduler
from diamond.agent.schedulers.slurm.scheduler import SlurmScheduler
from diamond.core.endpoints import EndpointFacts, EndpointUsage

MOST_CPUS = 4  # of the login node's, for all such jobs together: it is everybody's
NICE = 10


class Beside:
    """See `Scheduler` for what every method promises. Facts and numbers are the cluster's."""

    def __init__(self, cluster: SlurmScheduler, login: LocalScheduler) -> None:
        self._cluster = cluster
        self._login = login
        self._both: tuple[Scheduler, Scheduler] = (cluster, login)
        self._most_cpus = login.capacity().cpus_per_node

    @property
    def wake(self) -> Callable[[], None]:
        return self._cluster.wake

    @wake.setter
    def wake(self, call: Callable[[], None]) -> None:
        self._cluster.wake = self._login.wake = call

    @property
    def on_new_facts(self) -> Callable[[], None]:
        return self._cluster.on_new_facts

    @on_new_facts.setter
    def on_new_facts(self, call: Callable[[], None]) -> None:
        self._cluster.on_new_facts = call

    @property
    def cluster_name(self) -> str:
        return self._cluster.cluster_name

    def submit(self, submission: Submission) -> str:
        if not submission.on_login:
            return self._cluster.submit(submission)
        # What the task asks for was said with a compute node in mind; here everybody gets the same little.
        few = min(max(1, submission.cpus), self._most_cpus)
        return self._login.submit(replace(submission, cpus=few, gpus=0, gpu_type=None, mem_bytes=0, num_nodes=1))

    def observe(self) -> dict[str, Observed]:
        return {**self._cluster.observe(), **self._login.observe()}

    def cancel(self, names: Iterable[str]) -> None:
        named = list(names)
        for scheduler in self._both:
            scheduler.cancel(named)

    def forget(self, names: Iterable[str]) -> None:
        named = list(names)
        for scheduler in self._both:
            scheduler.forget(named)

    def capacity(self) -> EndpointFacts:
        return self._cluster.capacity()

    def usage(self) -> EndpointUsage:
        cluster, login = self._cluster.usage(), self._login.usage()
        return replace(
            cluster,
            jobs_running=cluster.jobs_running + login.jobs_running,
            jobs_queued=cluster.jobs_queued + login.jobs_queued,
        )

    def shell_argv(self, name: str, argv: Sequence[str], tty: bool, node: int = 0) -> ShellCommand:
        if name in self._login.observe():
            return self._login.shell_argv(name, argv, tty, node)
        return self._cluster.shell_argv(name, argv, tty, node)

    def close(self) -> None:
        for scheduler in self._both:
            scheduler.close()


def slurm_and_login(jobs_dir: Path) -> Beside:
    """Slurm's jobs of this directory, and those of the login node."""
    few = max(1, min(MOST_CPUS, num_cpus() // 2))
    return Beside(SlurmScheduler(jobs_dir), LocalScheduler(jobs_dir, cpus=few, gpus=(), nice=NICE))
