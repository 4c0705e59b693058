"""The command line and environment of one sbatch, and what its refusals mean. Pure, golden-tested.

Nothing a user wrote is ever part of a shell's text: options are single arguments, and the script is a file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.slurm.commands import without_slurm
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir

_MIB = 1024**2
_MAX_WARNING_S = 65535  # what --signal can say
_NICE_PER_PRIORITY = 100  # sites weigh priorities in thousands: a smaller step would not be felt
_MAX_NICE = 2_000_000_000
# A user's own defaults, which task files need not repeat; a batch job's environment never holds these.
_OWN_DEFAULTS = ("SBATCH_ACCOUNT", "SBATCH_QOS")


def sbatch_argv(job: Submission, *, after_id: str = "", refuses: Collection[str] = ()) -> list[str]:
    """What submits this job.

    Args:
        after_id: the Slurm job that must be over first.
        refuses: options for which this site turns jobs away (it hands out whole nodes). What Diamond itself would say
            with them is left unsaid; what the task's author says in so many words is not.
    """
    asked = job.slurm
    argv = [
        "sbatch",
        "--parsable",
        f"--job-name={job.name}",
        f"--chdir={job.run_dir}",
        f"--output={literal(RunDir(job.run_dir).stream('log'))}",
        "--open-mode=append",
        "--no-requeue",  # a run directory starts once; another attempt is another job
        "--export=ALL",
        f"--nodes={job.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus}",
    ]
    if job.mem_bytes and "--mem" not in refuses:
        argv.append(f"--mem={math.ceil(job.mem_bytes / _MIB)}M")
    gres = []
    if job.gpus and "--gres" not in refuses:
        gres.append(f"gpu:{job.gpu_type}:{job.gpus}" if job.gpu_type else f"gpu:{job.gpus}")
    if asked.gres:
        gres.append(asked.gres)
    if gres:
        argv.append(f"--gres={','.join(gres)}")
    if job.time_limit_s is not None:
        argv.append(f"--time={max(1, math.ceil(job.time_limit_s / 60))}")
        warning_s = job.warning_s
        if warning_s is not None and round(warning_s) >= 1:
            argv.append(f"--signal=B:USR1@{min(_MAX_WARNING_S, round(warning_s))}")
    if job.priority < 0:
        # Users may only lower a job's priority.
        argv.append(f"--nice={min(_MAX_NICE, -job.priority * _NICE_PER_PRIORITY)}")
    named = {
        "partition": job.partition or asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "reservation": asked.reservation,
        "nodelist": asked.nodelist,
        "exclude": asked.exclude,
        "dependency": f"afterany:{after_id}" if after_id else None,
    }
    argv += [f"--{name}={value}" for name, value in named.items() if value]
    if asked.exclusive:
        argv.append("--exclusive")
    # Last, so that a task cannot hide who asked for it behind a comment of its own.
    comment = [f"--comment=diamond: asked by {job.asked_by}"] if job.asked_by else []
    return [*argv, *asked.extra, *comment, str(job.script)]


def literal(path: Path) -> str:
    """A path as a file name pattern that means just this path.

    Slurm replaces %j and the like in the whole path, the directory included, also for a relative name. A backslash
    anywhere turns that off and is taken away itself.
    """
    text = str(path)
    return text.replace("\\", "\\\\") if "\\" in text else text.replace("%", "%%")


def sbatch_env(job: Submission, environ: Mapping[str, str], *, python_dir: str = "") -> dict[str, str]:
    """The agent's own environment without Diamond's variables (tokens) and without an enclosing job's.

    Args:
        python_dir: where the agent's Python is; last on PATH, so that a job without any other finds one.
    """
    env = {name: value for name, value in without_slurm(environ).items() if not name.startswith("DIAMOND_")}
    env |= {name: environ[name] for name in _OWN_DEFAULTS if name in environ}
    path = env.get("PATH", os.defpath)
    if python_dir and python_dir not in path.split(os.pathsep):
        path = f"{path}{os.pathsep}{python_dir}"
    own = {"DIAMOND_CPUS": str(job.cpus), "DIAMOND_RUN_DIR": str(job.run_dir)}
    return {**env, "PATH": path, **job.envs, **own}


def parse_job_id(out: str) -> str:
    """The number from what --parsable prints: `4711`, or `4711;cluster`. Empty when there is none."""
    for line in reversed(out.strip().splitlines()):
        number = line.split(";")[0].strip()
        if number.isdecimal():
            return number
    return ""


class Kind(Enum):
    """What to do about an sbatch that failed."""

    REFUSED = "refused"  # the job as it is will never be taken
    BUSY = "busy"  # the controller cannot take jobs now
    LIMIT = "limit"  # the user has as many jobs in the queue as allowed
    UNKNOWN = "unknown"  # nobody can say whether the job was taken


@dataclass(frozen=True, kw_only=True)
class Refusal:
    kind: Kind
    text: str  # for people
    reason: Reason = Reason.REJECTED  # with Kind.REFUSED
    dependency: bool = False  # it was the --dependency that did not please


# The first that is found in what sbatch said decides. Slurm's own words, all versions from 20.02 on.
_UNSURE = (
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Message receive failure",
    "Communication shutdown failure",
    "Unexpected message received",
    "Transport endpoint",
    "Connection reset",
)
_BUSY = (
    "Unable to contact slurm controller",
    "standby mode",
    "Connection refused",
    "Communication connection failure",
    "temporarily unable to accept job",
    "temporarily unavailable",
    "Resource temporarily",
    "Unable to resolve",
    "DNS SRV lookup failed",
    "failed to fetch config",
    "munge",
    "authentication error",
    "writing script/environment to file",
    "Please try again",
    "not found on PATH",
)
_SENTENCES: tuple[tuple[str, str], ...] = (
    ("invalid partition", "Choose a partition this cluster has (`diamond endpoint show` lists them)."),
    ("group not permitted", "You may not use this partition; choose another."),
    ("qos policy", "The job is larger or longer than your QoS or account allows."),
    ("account", "Set slurm.account to one you may charge."),
    ("qos", "Set slurm.qos to one you may use."),
    ("feature specification", "No node has what slurm.constraint asks for."),
    ("reservation", "Check slurm.reservation: it must exist and be open to you."),
    ("time limit is invalid", "Lower slurm.time (or max_duration), or choose a partition that allows more."),
    ("invalid --time", "Give slurm.time as 90m, 2h or 01:30:00."),
    ("node count", "Change num_nodes or choose another partition."),
    ("node configuration", "No node of the partition has what the task asks for."),
    ("generic resource", "This cluster has no such generic resource; check slurm.gres and resources.accelerators."),
    ("license", "This cluster has no such licence."),
    ("node name", "slurm.nodelist or slurm.exclude names a node that does not exist."),
    ("unrecognized option", "slurm.extra holds an option that this version of sbatch does not know."),
    ("permission denied", "You may not do this on this cluster; ask its support."),
    ("dependency", "The job it should wait for is not known to Slurm any more."),
)
_PREFIX = re.compile(r"^(sbatch: )?(error: )?(Batch job submission failed: )?")


def refusal(status: int | None, err: str) -> Refusal:
    """What an sbatch that gave no job number means."""
    said = _words(err)
    if status is None:
        return Refusal(kind=Kind.UNKNOWN, text=said or "sbatch did not answer in time")
    if status < 0:
        return Refusal(kind=Kind.UNKNOWN, text=f"sbatch was ended by signal {-status}")
    low = err.lower()
    if any(word.lower() in low for word in _UNSURE):
        return Refusal(kind=Kind.UNKNOWN, text=said)
    if re.search(r"Max\w*Submit|GrpSubmit|MaxJobCount", err):
        return Refusal(kind=Kind.LIMIT, text=f"you have as many jobs in Slurm's queue as you may ({said})")
    if any(word.lower() in low for word in _BUSY):
        return Refusal(kind=Kind.BUSY, text=said)
    if "unable to open file" in low or "does not look like a batch script" in low:
        return Refusal(kind=Kind.REFUSED, text=f"sbatch: {said}", reason=Reason.LAUNCH_FAILED)
    sentence = next((text for word, text in _SENTENCES if word in low), "")
    text = f"Slurm refused the job: {said or f'sbatch ended with status {status}'}"
    return Refusal(
        kind=Kind.REFUSED,
        text=f"{text}. {sentence}" if sentence else text,
        dependency="job dependency problem" in low,
    )


def _words(err: str) -> str:
    """What sbatch said, in one line, without its own name before every line and without saying anything twice."""
    lines: list[str] = []
    for line in err.splitlines():
        text = _PREFIX.sub("", line.strip()).rstrip(".")
        if text and not text.startswith("Try ") and text not in lines:
            lines.append(text)
    return "; ".join(lines)[:1000]
