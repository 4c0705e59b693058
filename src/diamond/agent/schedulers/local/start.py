"""Starts one job's shell on this machine, in a session of its own, with the environment a job is owed.

Must not decide when, nor remember that it did.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from diamond.agent.gpus import GpuSlot
from diamond.agent.schedulers.base import Submission
from diamond.core.rundir import RunDir


def spawn(job: Submission, gpus: Sequence[GpuSlot], hide_other_gpus: bool, nice: int = 0) -> subprocess.Popen[bytes]:
    """Start the job's script; `nice` becomes the shell itself, so its number is the job's.

    Raises:
        OSError: there is no bash, no process to be had, or no run directory.
    """
    # Neither through a link nor into a pipe nobody reads: another job may have put one there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    out = os.open(RunDir(job.run_dir).stream("log"), flags, 0o600)
    try:
        os.set_blocking(out, True)
        return subprocess.Popen(
            [*(["nice", "-n", str(nice)] if nice else []), "bash", str(job.script)],
            cwd=job.run_dir,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(job, gpus, hide_other_gpus),
        )
    finally:
        os.close(out)


def environment(job: Submission, gpus: Sequence[GpuSlot], hide_other_gpus: bool) -> dict[str, str]:
    """The agent's own environment without what is Diamond's (tokens, addresses), plus what the job was given."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIAMOND_")}
    # So that `import diamond` works in a task as it does here.
    env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env.get("PATH", os.defpath)
    if hide_other_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.cuda_name for slot in gpus)
    own = {
        "DIAMOND_CPUS": str(job.cpus),
        "DIAMOND_RUN_DIR": str(job.run_dir),  # also marks processes that leave the job's session
    }
    if job.time_limit_s is not None:
        own["DIAMOND_ENDS_AT"] = f"{time.time() + job.time_limit_s:.0f}"  # when it is made to end
    return env | dict(job.envs) | own
