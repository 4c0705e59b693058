"""Jobs inside of pilots that are Slurm's: each is a step of its pilot's job."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from diamond.agent.schedulers.base import ShellCommand
from diamond.agent.schedulers.beside import Beside, slurm_and_login
from diamond.agent.schedulers.pool_result import pilots_of, read_pilot
from diamond.agent.schedulers.pooled import Pooled
from diamond.agent.schedulers.slurm.sbatch import sbatch_env
from diamond.agent.schedulers.slurm.shells import slurm_shell_argv
from diamond.core.errors import NotFound


class PooledSlurm(Pooled):
    """Around a cluster and its login node."""

    def __init__(self, base: Beside, jobs_dir: Path) -> None:
        self._beside = base
        super().__init__(base, jobs_dir)

    @property
    def on_new_facts(self) -> Callable[[], None]:
        return self._beside.on_new_facts

    @on_new_facts.setter
    def on_new_facts(self, call: Callable[[], None]) -> None:
        self._beside.on_new_facts = call

    @property
    def cluster_name(self) -> str:
        return self._beside.cluster_name

    def shell_argv(self, name: str, argv: Sequence[str], tty: bool, node: int = 0) -> ShellCommand:
        job = self._job(name)
        if job is None:
            return self._beside.shell_argv(name, argv, tty, node)
        asked, place = job.spooled.submission, job.spooled.place
        pilot = read_pilot(pilots_of(job.spooled)[node]) if node < len(place.nodes) else None
        if not job.is_running or pilot is None or not pilot.slurm_id:
            raise NotFound(f"no such job runs here, or not on a node {node}: {name}")
        return slurm_shell_argv(
            pilot.slurm_id,
            asked.run_dir,
            argv,
            tty,
            environ=sbatch_env(asked, os.environ, python_dir=os.path.dirname(sys.executable)),
            mark=secrets.token_hex(8),
            host=pilot.host,
            cpus=place.nodes[node].slots * place.cpus,
            modules=asked.slurm.modules,
        )


def slurm_with_pools(jobs_dir: Path) -> PooledSlurm:
    """Slurm's jobs of this directory, those of the login node, and those in pilots."""
    return PooledSlurm(slurm_and_login(jobs_dir), jobs_dir)
