"""Which scheduler an agent speaks for: the cluster's Slurm where there is one (with a few slots of the login node),
else this machine's own queue, unless it belongs to a cluster of another kind. Around each of them is what runs jobs
inside of pilots."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from diamond.agent.schedulers import foreign
from diamond.agent.schedulers.base import Scheduler
from diamond.core.errors import InstallationProblem
from diamond.core.rundir import read_json

KINDS = ("auto", "slurm", "local")
_SLURM_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol")


def choose(asked: str | None, home: Path) -> Callable[[Path], Scheduler]:
    """What makes the scheduler for a jobs directory.

    Args:
        asked: one of `KINDS`; None leaves it to `scheduler` in the home's agent.json, and then to "auto".

    Raises:
        InstallationProblem: Slurm is asked for and its programs are not there, nothing is asked for and this machine
            belongs to a cluster that Diamond cannot submit to, or the word is none of `KINDS`.
    """
    kind = asked or read_json(home / "agent.json").get("scheduler") or "auto"
    if kind not in KINDS:
        raise InstallationProblem(f"{str(kind)[:40]!r} is no scheduler", hint=f"choose one of {', '.join(KINDS)}")
    missing = [program for program in _SLURM_PROGRAMS if shutil.which(program) is None]
    if kind == "slurm" and missing:
        raise InstallationProblem(
            f"Slurm's {', '.join(missing)} cannot be found on PATH",
            hint="load the module that provides it, then start the agent",
        )
    is_slurm = kind == "slurm" or (kind == "auto" and not missing and _belongs_to_a_cluster())
    if kind == "auto" and not is_slurm and (other := foreign.find()):
        raise refusal(other)
    # Each is loaded only where it is used: agents start often, on small login nodes.
    if is_slurm:
        from diamond.agent.schedulers.pooled_slurm import slurm_with_pools

        return slurm_with_pools
    from diamond.agent.schedulers.pooled_local import local_with_pools

    return local_with_pools


def refusal(other: foreign.Foreign) -> InstallationProblem:
    return InstallationProblem(
        f"this machine belongs to a cluster of {other}, and Diamond submits to Slurm only",
        hint="tasks would run on this machine itself, which login nodes are not for. If that is what you want, say so: "
        'add --scheduler local to the enrolment line, or "scheduler": "local" to agent.json of one that is enrolled',
        field="--scheduler",
    )


def _belongs_to_a_cluster() -> bool:
    """Whether Slurm's programs here know of a cluster, be its controller up or down.

    A workstation may have the programs and no cluster. A login node whose controller is away must not be taken for
    one: its jobs would run on the login node.
    """
    try:
        done = subprocess.run(
            ["scontrol", "ping"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return "configuration source" not in done.stderr
