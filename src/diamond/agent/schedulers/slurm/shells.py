"""Programs started by hand in a running Slurm job: a step of its own that shares what the job has (`srun --overlap`).

Pure. The user's words are arguments from end to end: srun hands them over as they are, and the text that bash runs on
the node is always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from diamond.agent.schedulers.base import ShellCommand
from diamond.agent.schedulers.slurm.commands import without_slurm
from diamond.core.scripts import NO_RUN_DIR

# As job.sh does it: modules, then the variables, in the image if there is one; then the program, by its own words (a
# subshell that execs runs no builtin). Its exit status is told in the stream: given to srun, it would add a remark of
# its own.
# $1 is the run directory, $2 the mark, $3 how many modules follow.
_ENTER = f"""\
DIAMOND_RUN_DIR=$1 mark=$2 count=$3; shift 3
if (( count )) && ! type module > /dev/null 2>&1; then
  for init in "${{LMOD_PKG:-/usr/share/lmod/lmod}}/init/bash" "${{MODULESHOME:-/usr/share/modules}}/init/bash"; do
    if [[ -r $init ]]; then . "$init" > /dev/null; break; fi
  done
fi
for (( ; count; count-- )); do module load "$1" || exit; shift; done
export DIAMOND_RUN_DIR DIAMOND_METRICS_FILE=$DIAMOND_RUN_DIR/metrics.jsonl
cd -- "$DIAMOND_RUN_DIR/work" || exit {NO_RUN_DIR}
if [[ -e $DIAMOND_RUN_DIR/inside.sh ]]; then
  set -- "$BASH" "$DIAMOND_RUN_DIR/inside.sh" -- "$@"
else
  for file in env secrets; do
    if [[ -r $DIAMOND_RUN_DIR/$file ]]; then
      while IFS= read -r -d '' DIAMOND_PAIR; do export "$DIAMOND_PAIR"; done < "$DIAMOND_RUN_DIR/$file"
    fi
  done
fi
trap : HUP INT QUIT TERM USR1 USR2
exec 3>&2 2> /dev/null
(exec -- "$@") 2>&3 3>&-
printf '\\036%s:%d\\036' "$mark" $? >&3
"""


def slurm_shell_argv(
    slurm_id: str,
    run_dir: Path,
    argv: Sequence[str],
    tty: bool,
    *,
    environ: Mapping[str, str],
    mark: str,
    node: int = 0,
    host: str = "",
    cpus: int = 0,
    modules: Sequence[str] = (),
) -> ShellCommand:
    """How to run `argv` in a running job, from Slurm 20.11 on.

    Args:
        slurm_id: Slurm's number of the job.
        environ: what its sbatch was given.
        mark: a word the program cannot know, see `ShellCommand`.
        node: which of its nodes, from 0.
        host: the name of that node, if it is known: by the number alone Slurm may choose another that is less busy.
        cpus: cores the program may use; 0 leaves that to Slurm.
        modules: environment modules to load first.
    """
    assert slurm_id.isdecimal(), slurm_id
    options = [
        "srun",
        f"--jobid={slurm_id}",
        "--overlap",  # the job's own program has every core already
        "--ntasks=1",
        "--nodes=1",
        f"--nodelist={host}" if host else f"--relative={node}",
        "--export=ALL",
        "--mpi=none",
        "--job-name=diamond-shell",
        "--quiet",
        # One Ctrl-C is for the program, not for a report on it.
        "--pty" if tty else "--disable-status",
    ]
    if cpus:
        options.append(f"--cpus-per-task={cpus}")
    enter = ("bash", "-c", _ENTER, "bash", str(run_dir), mark, str(len(modules)), *modules)
    return ShellCommand(
        argv=(*options, *enter, *argv),
        env=without_slurm(environ),
        cwd=Path("/"),  # of srun; the program's is set on the node
        mark=mark,
    )
