"""Pilots and jobs inside them, for tests: orders as a server would send them, put in place by the real stager."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from diamond.agent.cache import Cache
from diamond.agent.link import Link
from diamond.agent.schedulers.base import Submission
from diamond.agent.staging import Stager
from diamond.agent.table import Tracked, submission_of
from diamond.core.codec import decode, encode
from diamond.core.pools import PilotOrder, PoolNode, PoolPlace
from diamond.core.rundir import RunDir
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder
from testing import slurm_driver_host as driver

POOL = "pol_00000001"


def job_id(number: int) -> str:
    return f"job_{number:08d}"


def pilot_order(number: int, *, slots: int = 2, cpus: int = 1, gpus: str = "", walltime_s: int = 600) -> JobOrder:
    """A pilot of so many slots; `gpus` names the model of those it has, if they are GPUs."""
    resources = {"cpus": slots * cpus, **({"accelerators": f"{gpus}:{slots}"} if gpus else {})}
    spec = {"run": "true", "num_nodes": 1, "ranks_per_node": 0, "resources": resources}
    pilot = PilotOrder(pool_id=POOL, slots=slots, cpus=cpus, has_gpus=bool(gpus))
    return _order(number, TaskSpec.parse(spec), pilot=pilot, time_limit_s=walltime_s)


def pooled_order(number: int, run: str, *pilots: int, slots: int = 1, gpus: bool = False, **more: Any) -> JobOrder:
    """A job with so many slots in each of these pilots, and a rank for each slot."""
    nodes = tuple(PoolNode(pilot=job_id(pilot), slots=slots) for pilot in pilots)
    place = PoolPlace(pool_id=POOL, nodes=nodes, has_gpus=gpus, mem_bytes=more.pop("mem_bytes", 0))
    limit_s, continues = more.pop("time_limit_s", None), more.pop("continues", "")
    spec = TaskSpec.parse({"run": run, "num_nodes": len(nodes), "ranks_per_node": slots, **more})
    return _order(number, spec, place=place, chained=True, time_limit_s=limit_s, continues=continues)


def _order(number: int, spec: TaskSpec, **fields: Any) -> JobOrder:
    one = {"task_id": f"tsk_{number:08d}", "task_name": "t", "attempt": 1, "desired": Desired.RUN}
    return JobOrder(job_id=job_id(number), spec=spec, **one, **fields)


def stage(jobs_dir: Path, order: JobOrder, scheduler: str = "local") -> Submission:
    """Put its run directory in place; what the scheduler would be handed."""
    stager = Stager(
        cache=Cache(jobs_dir.parent / "cache", cast(Link, None)), stop=threading.Event(), scheduler=scheduler
    )
    path = jobs_dir / order.job_id
    stager.stage(order, path)
    stager.close()
    return submission_of(Tracked(order, path), order.time_limit_s)


class Pools(driver.RemoteScheduler):
    """Slurm's scheduler with pilots, at work on the login node of a site. Orders are put in place there."""

    def __init__(self, site: Any, jobs_dir: str, *, log: IO[str]) -> None:
        super().__init__(_ThisModule(site), jobs_dir, log=log)
        self._jobs_dir = jobs_dir
        self._site = site

    def put(self, order: JobOrder) -> RunDir:
        """Where its run directory is on this side."""
        self.call("put", order=encode(order))
        return RunDir(self._site.path(f"{self._jobs_dir}/{order.job_id}"))

    def warn(self, *numbers: int) -> None:
        self.call("warn", names=[job_id(number) for number in numbers])

    def shell(self, number: int, argv: list[str], node: int = 0) -> list[str]:
        return list(self.call("shell", name=job_id(number), argv=argv, node=node))


class _ThisModule:
    """A site that starts this module where another is named."""

    def __init__(self, site: Any) -> None:
        self._site = site

    def popen(self, argv: Sequence[str], **how: Any) -> Any:
        return self._site.popen(["python3", "-m", "testing.pools", argv[-1]], **how)


class _Host(driver.Host):
    def __init__(self, jobs_dir: Path) -> None:
        from diamond.agent.schedulers.beside import Beside
        from diamond.agent.schedulers.local.scheduler import LocalScheduler
        from diamond.agent.schedulers.pooled_slurm import PooledSlurm

        super().__init__(jobs_dir)
        self._dir = jobs_dir
        self.scheduler = PooledSlurm(Beside(self._slurm, LocalScheduler(jobs_dir, cpus=1, gpus=())), jobs_dir)
        self.scheduler.wake = lambda: self.say({"wake": True})

    def put(self, order: dict[str, Any]) -> None:
        self.scheduler.submit(stage(self._dir, decode(JobOrder, order), "slurm"))

    def warn(self, names: list[str]) -> None:
        self.scheduler.warn(names)

    def shell(self, name: str, argv: list[str], node: int) -> list[str]:
        return list(self.scheduler.shell_argv(name, argv, False, node).argv)


if __name__ == "__main__":
    driver.Host = _Host  # type: ignore[misc] # which its main program serves
    driver.main()
