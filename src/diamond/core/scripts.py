"""The text of a job script, from one pure function, golden-tested.

User text never appears in it: the script reads the user's files (`setup.sh`, `run.sh`, `env`) from the run directory.
It needs bash 4 and a POSIX userland, nothing else, so it runs in any container and on any node.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

ALREADY_STARTED = 75  # EX_TEMPFAIL: another process began this run directory first
NO_RUN_DIR = 73  # EX_CANTCREAT


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """All that the script's text depends on."""

    job_id: str
    run_dir: str  # absolute, on the endpoint
    ranks_per_node: int
    has_setup: bool
    launcher_python: str = "python3"


_BODY = """\
#!/usr/bin/env bash
# Diamond job {job_id}. Generated; your commands are in run.sh and setup.sh beside it.
cd -- {run_dir} || exit {no_run_dir}

# A run directory starts once. Whoever makes this file first runs; a second submission of the same job
# (after a crash between submitting and noting it) ends here without having done anything.
{{ read -r stat < "/proc/$$/stat"; read -r boot < /proc/sys/kernel/random/boot_id; }} 2>/dev/null
fields=(0 ${{stat##*) }})
set -o noclobber
{{ printf '%s %s %s\\n' "$$" "${{fields[20]:-0}}" "${{boot:-none}}" > started; }} 2>/dev/null || exit {already_started}
set +o noclobber

# A trap that does something is reset in children, so programs get the signal and this shell outlives them.
trap : HUP INT TERM USR1 USR2
began=${{EPOCHREALTIME:-$(date +%s)}}

# Room for the exit status was laid down beforehand; writing over it works on a full disk too.
finish() {{
  local ended=${{EPOCHREALTIME:-$(date +%s)}}
  printf '{{"phase":"%s","exit_code":%d,"started_at":%s,"ended_at":%s,"host":"%s"}}' \\
    "$1" "$2" "${{began/,/.}}" "${{ended/,/.}}" "${{HOSTNAME//[^A-Za-z0-9._-]/}}" 1<> exit.tmp
  mv -f exit.tmp exit.json
  exit "$2"
}}

# Your variables are set in a subshell, so that none of them (PATH, a name used above) can harm this script.
DIAMOND_BASH=$BASH
enter() {{
  export DIAMOND_RUN_DIR=$PWD DIAMOND_METRICS_FILE=$PWD/metrics.jsonl
  cd work || exit {no_run_dir}
  while IFS= read -r -d '' DIAMOND_PAIR; do export "$DIAMOND_PAIR"; done < ../env
}}

# What this shell itself says of programs that are killed is noise in your log.
exec 3>&2 2> /dev/null
"""

_SETUP = """\
(enter; exec "$DIAMOND_BASH" -e ../setup.sh) 2>&3 3>&- || finish setup $?
"""

_RUN_ONE = """\
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 20000))
export WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=0
(enter; exec "$DIAMOND_BASH" ../run.sh) 2>&3 3>&-
finish run $?
"""

_RUN_RANKS = """\
(enter; exec {python} ../launch.py --ranks {ranks} -- "$DIAMOND_BASH" ../run.sh) 2>&3 3>&-
finish run $?
"""


def job_script(plan: ScriptPlan) -> str:
    """The script the scheduler runs on the (first) node of a job."""
    assert plan.job_id.isprintable(), "a job id must not end the comment it stands in"
    text = _BODY.format(
        job_id=plan.job_id,
        run_dir=shlex.quote(plan.run_dir),
        no_run_dir=NO_RUN_DIR,
        already_started=ALREADY_STARTED,
    )
    if plan.has_setup:
        text += _SETUP
    if plan.ranks_per_node == 1:
        return text + _RUN_ONE
    return text + _RUN_RANKS.format(python=shlex.quote(plan.launcher_python), ranks=plan.ranks_per_node)


def env_file(envs: Mapping[str, str]) -> bytes:
    """The bytes of the `env` file: values arrive exactly as written, newlines and quotes included."""
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in envs.items())


def job_envs(
    *, task_id: str, task_name: str, job_id: str, attempt: int, num_nodes: int, user_envs: Mapping[str, str]
) -> dict[str, str]:
    """A job's environment: the user's variables, then Diamond's own, which win."""
    return {
        **user_envs,
        "DIAMOND_TASK_ID": task_id,
        "DIAMOND_TASK_NAME": task_name,
        "DIAMOND_JOB_ID": job_id,
        "DIAMOND_ATTEMPT": str(attempt),
        "DIAMOND_NUM_NODES": str(num_nodes),
    }
