"""Programs started by hand in a job of the local scheduler: the job's own environment, read from its process.

Must not start anything; `diamond.agent.shells` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from diamond.agent.schedulers.base import HasProcesses, ShellCommand
from diamond.core.errors import NotFound
from diamond.core.rundir import RunDir, read_small

_ENV_BYTES = 4 * 1024 * 1024


class LocalShells:
    """The `HasShells` part of a scheduler whose jobs are processes of this machine (`HasProcesses`)."""

    def shell_argv(self: HasProcesses, name: str, argv: Sequence[str], tty: bool, node: int = 0) -> ShellCommand:
        job = next((job for job in self.processes() if job.name == name), None)
        if job is None or node != 0:
            raise NotFound(f"no such job runs here: {name}" if job is None else f"the job has no node {node}")
        run_dir = RunDir(job.run_dir)
        env = job_environment(job.pid, job.run_dir)
        if run_dir.inside.exists():  # which sets the job's own variables there
            return ShellCommand(argv=("bash", str(run_dir.inside), "--", *argv), env=env, cwd=run_dir.work_root)
        return ShellCommand(argv=tuple(argv), env=env, cwd=run_dir.work_root)


def job_environment(pid: int, run_dir: Path) -> Mapping[str, str]:
    """What a job's script was given (path, devices) and what it exports to the program, unless that is in an image.

    DIAMOND_RUN_DIR comes last: by it a process is known to belong to the job, and ended with it.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            given = file.read()
    except OSError as error:
        raise NotFound("the job has just ended") from error
    in_image = RunDir(run_dir).inside.exists()
    # Where the image sets them, they are not put into what starts it.
    files = () if in_image else (RunDir(run_dir).env, RunDir(run_dir).secrets)
    own = b"".join(read_small(file, _ENV_BYTES) or b"" for file in files)
    found: dict[str, str] = {}
    for block in (given, b"DIAMOND_METRICS_FILE=" + os.fsencode(RunDir(run_dir).stream("metrics")) + b"\0", own):
        for pair in block.split(b"\0"):
            variable, equals, value = pair.partition(b"=")
            if variable and equals:
                found[os.fsdecode(variable)] = os.fsdecode(value)
    return {**found, "DIAMOND_RUN_DIR": str(run_dir)}
