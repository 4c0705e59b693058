"""The two centres everybody is measured on: the same data at both, other partitions at the second, a way to packages.

What slurmctld writes into its own log says when jobs came, began and ended; nobody asks Slurm anything for the sake of
measuring.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from benchmarks.images_workloads import DATA_INSIDE, data
from testing.cluster import BINDS
from testing.images import BASE_INSIDE, CA_INSIDE, build_envs, image_binds
from testing.minihpc import Node, Partition, Site
from testing.proxy import Proxy

_SUBMITTED = re.compile(r"^\[(\S+)\] _slurm_rpc_submit_batch_job: JobId=(\d+) ", re.MULTILINE)
_STARTED = re.compile(r"^\[(\S+)\] (?:sched: Allocate|sched/backfill: _start_job: Started) JobId=(\d+) ", re.MULTILINE)
_ENDED = re.compile(r"^\[(\S+)\] _job_complete: JobId=(\d+) done$", re.MULTILINE)

# The base image both centres offer to everybody.
BASE = "/scratch/bases/debian.sif"
# Where the system's certificates are in a Debian image, as in most.
_CA_IN_IMAGES = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """Unix seconds; None for what has not happened."""

    submitted: float
    started: float | None = None
    ended: float | None = None

    @property
    def queue_s(self) -> float:
        return 0.0 if self.started is None else self.started - self.submitted

    @property
    def run_s(self) -> float:
        return 0.0 if self.started is None or self.ended is None else self.ended - self.started


class Centre:
    """One site with data and proxy. Use as a context manager."""

    def __init__(self, site: Site) -> None:
        self.site = site

    @staticmethod
    def alpha() -> Centre:
        """The default centre: a short default partition, others by kind of node."""
        return Centre(Site("alpha", binds={**BINDS, **image_binds()}))

    @staticmethod
    def beta() -> Centre:
        """Another one, which calls everything by other names."""
        nodes = (
            *(Node(name=f"n{number}", gpu_type="a100", num_gpus=2) for number in (1, 2)),
            *(Node(name=f"n{number}") for number in (3, 4)),
        )
        every = tuple(node.name for node in nodes)
        day = {"MaxTime": "1-00:00:00", "DefaultTime": "01:00:00"}
        partitions = [
            Partition(name="test", nodes=every, options={"Default": "YES", "MaxTime": "00:02:00"}),
            Partition(name="batch", nodes=every, options=day),
            Partition(name="accel", nodes=("n1", "n2"), options=day),
        ]
        return Centre(Site("beta", nodes=nodes, partitions=partitions, binds={**BINDS, **image_binds()}))

    def __enter__(self) -> Centre:
        self.site.start()
        try:
            self.proxy = Proxy(self.site.server_address)
            self.proxy.__enter__()
            self.site.run(["mkdir", DATA_INSIDE], user="root")
            for name, text in data().items():
                self.site.write(f"{DATA_INSIDE}/{name}.csv", text, user="root")
        except BaseException:
            self.site.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.proxy.__exit__(kind, error, trace)
        self.site.stop()

    def offer_base(self, other: Centre | None = None) -> None:
        """Make the base image, or take the one of another centre."""
        self.site.run(["mkdir", os.path.dirname(BASE)])
        if other is None:
            argv = ["apptainer", "--quiet", "build", BASE, BASE_INSIDE]
            self.site.run(argv, env={"APPTAINER_TMPDIR": "/scratch"}, timeout=600)
        else:
            self.site.put(other.site.path(BASE), BASE)

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def agent_env(self) -> dict[str, str]:
        return build_envs(self.proxy)

    @property
    def login_env(self) -> dict[str, str]:
        """Of somebody who is logged in: what the centre's profile sets so that builds get through its proxy.

        Temporary folders are on disk, as at most centres and as Diamond's are; the /tmp of these sites is in memory.
        """
        kept = {name: value for name, value in self.agent_env.items() if value != CA_INSIDE}
        return kept | {"APPTAINER_BIND": f"{CA_INSIDE}:{_CA_IN_IMAGES}", "APPTAINER_TMPDIR": "/scratch"}

    def mark(self) -> int:
        """A place in slurmctld's log."""
        return self._log.stat().st_size

    def jobs(self, mark: int) -> dict[int, JobTimes]:
        """What became of the jobs submitted since the mark."""
        with self._log.open("rb") as file:
            file.seek(mark)
            text = file.read().decode(errors="replace")
        started, ended = _moments(_STARTED, text), _moments(_ENDED, text)
        return {
            job: JobTimes(submitted=when, started=started.get(job), ended=ended.get(job))
            for job, when in _moments(_SUBMITTED, text).items()
        }

    def wait_job(self, mark: int, job: int, within_s: float = 300) -> JobTimes:
        """Wait until it is over."""
        deadline = time.monotonic() + within_s
        while (found := self.jobs(mark).get(job)) is None or found.ended is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} of {self.name} is not over after {within_s:g} s")
            time.sleep(0.02)
        return found

    @property
    def _log(self) -> Path:
        return self.site.path("/var/log/slurm/slurmctld.log")


def _moments(form: re.Pattern[str], text: str) -> dict[int, float]:
    """The first time of each job."""
    found: dict[int, float] = {}
    for when, job in form.findall(text):
        found.setdefault(int(job), datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp())
    return found
