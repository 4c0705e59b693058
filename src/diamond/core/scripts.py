"""The text of a job script, from one pure function, golden-tested.

User text never appears in it: the script reads the user's files (`setup.sh`, `run.sh`, `env`) from the run directory.
It needs bash 4 and a POSIX userland, nothing else, so it runs in any container and on any node; where there are several
ranks, also a Python 3 for the launcher.

A chain (a task longer than one job may run) is a row of run directories that share one work directory. Each link says
how it ended in two files: `exit.json`, and `over` when nothing is left to do, which keeps a successor that was queued
in advance from running the task again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from diamond.core.pool_scripts import EACH_PILOT, EACH_PILOT_END, NO_END, SlotShare, pilot_step
from diamond.core.views import VIEW
from diamond.core.warning_scripts import WARN

ALREADY_STARTED = 75  # EX_TEMPFAIL: another process began this run directory first
NO_RUN_DIR = 73  # EX_CANTCREAT
NOT_NEEDED = 76  # the job before this one finished the task
CONTINUE = 85  # a program's way of saying "my state is saved, start me again"; HTCondor uses the same number


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """All that the script's text depends on.

    Attributes:
        run_dir: absolute, on the endpoint.
        ranks_per_node: how often `run` is started on each node; 0: once, on the first, and it starts its own ranks.
        min_nodes: under Slurm, with how many nodes the job goes on when others are lost; 0: it ends with the first.
        scheduler: "local", which warns the job's processes itself, or "slurm", which warns this script.
        chained: whether the job may ask to be continued.
        previous: absolute path of the run directory this one continues; empty for a first job.
        modules: environment modules to load before the user's commands.
        library: where `import diamond` finds it, should the program's own Python not have it; empty for nowhere.
        image: whether the user's commands run in an image, through inside.sh in the run directory, which then sets
            their variables (see `diamond.core.inside`).
        is_guest: of a task in an image, whether it is of somebody else than the endpoint's owner.
        secrets: whether the job was given secrets, which lie in the run directory and are removed at its end.
        measure: under Slurm, whether measure.sh in the run directory notes what the job uses.
        time_limit_s: under Slurm, how long the job may run, where Slurm itself does not tell a job when it ends; the
            local scheduler does.
        slot: of a job that runs inside pilots (see `diamond.core.pools`), what one slot is. Whatever the scheduler of
            the pilots is, it is the script that is warned; which nodes it has is in the file `pilots`.
    """

    job_id: str
    run_dir: str
    ranks_per_node: int
    has_setup: bool
    launcher_python: str = "python3"
    scheduler: str = "local"
    num_nodes: int = 1
    min_nodes: int = 0
    chained: bool = False
    previous: str = ""
    modules: tuple[str, ...] = ()
    library: str = ""
    image: bool = False
    is_guest: bool = False
    secrets: bool = False
    measure: bool = False
    time_limit_s: int | None = None
    slot: SlotShare | None = None


_HEAD = """\
#!/usr/bin/env bash
# Diamond job {job_id}. Generated; your commands are in run.sh and setup.sh beside it.
{directives}
# A trap that does something is reset in children, so programs get the signal and this shell outlives them. First of
# all, since a warning may come at any moment.
warned=
trap : HUP INT TERM USR2
trap 'warned=1' USR1
cd -- {run_dir} || exit {no_run_dir}

"""

# Read by sbatch, above the first command. Slurm then takes a lost node out of the job instead of ending it.
_NO_KILL = """\
#SBATCH --no-kill
"""

# Slurm itself starts a job again when somebody requeues it; the run before is over then.
_RESTARTED = """\
if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then rm -f started exit.json over warning out-of-time@view@; fi

"""

_CLAIM = """\
# A run directory starts once. Whoever makes this file first runs; a second submission of the same job
# (after a crash between submitting and noting it) ends here without having done anything.
{{ read -r stat < "/proc/$$/stat"; read -r boot < /proc/sys/kernel/random/boot_id; }} 2>/dev/null
fields=(0 ${{stat##*) }})
set -o noclobber
{{ printf '%s %s %s\\n' "$$" "${{fields[20]:-0}}" "${{boot:-none}}" > started; }} 2>/dev/null || exit {already_started}
set +o noclobber

began=${{EPOCHREALTIME:-$(date +%s)}} more=false

# Room for the exit status was laid down beforehand; writing over it works on a full disk too.
finish() {{
  local ended=${{EPOCHREALTIME:-$(date +%s)}}
"""

# Exit code 0 always means finished, unless the program left the mark that says otherwise.
_MORE = """\
  if [[ $1 == run && ( $2 -eq {code} || -e {mark} || ( -n $warned && $2 -ne 0 ) ) ]]; then more=true; fi
"""

_FINISH = """\
  printf '{{"phase":"%s","exit_code":%d,"started_at":%s,"ended_at":%s,"more":%s,"warned":%d,"host":"%s"}}' \\
    "$1" "$2" "${{began/,/.}}" "${{ended/,/.}}" "$more" "${{warned:-0}}" "${{HOSTNAME//[^A-Za-z0-9._-]/}}" 1<> exit.tmp
  mv -f exit.tmp exit.json
{over}{wipe}  exit "$2"
}}

{where}
DIAMOND_BASH=$BASH
enter() {{
  export DIAMOND_RUN_DIR=$PWD DIAMOND_METRICS_FILE=$PWD/metrics.jsonl DIAMOND_TRAIN_FILE=$PWD/train.jsonl{chain}
{ends}  cd work || exit {no_run_dir}
{envs}}}
"""

_IN_SUBSHELL = (
    "# Your variables are set in a subshell, so that none of them (PATH, a name used above) can harm this script."
)
_IN_IMAGE = "# Your variables are set in the image, where your commands run; out here they could harm this script."

_ENVS = """\
  while IFS= read -r -d '' DIAMOND_PAIR; do export "$DIAMOND_PAIR"; done < "$DIAMOND_RUN_DIR/env"
"""

# Names only: what the job was given is in a file that nobody else can read, and no command line ever holds it.
_SECRETS = """\
  if [[ ! -r $DIAMOND_RUN_DIR/secrets ]]; then
    echo "diamond: the secrets of this job are gone; launch its task again" >&2; exit {no_run_dir}
  fi
  while IFS= read -r -d '' DIAMOND_PAIR; do export "$DIAMOND_PAIR"; done < "$DIAMOND_RUN_DIR/secrets"
"""

_WIPE = """\
  rm -rf secrets secrets.sh secret-files
"""

# See `diamond.core.views`. Other nodes' own folders for temporary files are the site's to remove.
_WIPE_TMP = """\
  rm -rf tmp
  if [[ $TMPDIR == /?* ]]; then rm -rf "$TMPDIR/diamond-${PWD##*/}"; fi
"""

_MEASURED = """\
  if [[ -n $measuring ]]; then kill "$measuring"; fi
"""

_MEASURE = """\
# What the job uses of this node, for its curves.
"$BASH" measure.sh util.jsonl < /dev/null > /dev/null 2>&1 3>&- &
measuring=$!
"""

_LIBRARY = """\
  export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{library}
"""

_OVER = """\
  if [[ $more == false ]]; then : > over; fi
"""

_ENDS = """\
  export DIAMOND_ENDS_AT=${{SLURM_JOB_END_TIME:-$((${{began%%[.,]*}} + {limit_s}))}}
"""

_CHAIN_ENV = " DIAMOND_CONTINUE_FILE=$PWD/{mark} DIAMOND_RESUMED={resumed}"

_NOT_NEEDED = """\

# Queued in advance, in case the job before it would not be done in its time. It was.
if [[ -e {previous}/over ]]; then : > not-needed; finish run {not_needed}; fi
"""

_QUIET = """
# What this shell itself says of programs that are killed is noise in your log.
exec 3>&2 2> /dev/null
"""

_MODULES = """
# On many clusters only login shells know `module`.
if ! type module; then
  for init in "${{LMOD_PKG:-/usr/share/lmod/lmod}}/init/bash" "${{MODULESHOME:-/usr/share/modules}}/init/bash"; do
    if [[ -r $init ]]; then . "$init"; break; fi
  done
fi 2> /dev/null > /dev/null
for name in {modules}; do module load "$name" 2>&3 || {{
  printf 'diamond: module load %s failed\\n' "$name" >&3; finish setup 1
}}; done
"""

_SETUP = """\
(enter; exec "$DIAMOND_BASH" {setup}) 2>&3 3>&- || finish setup $?
"""

_SETUP_UNLESS_DONE = """\
# The work directory is as the job before left it, with what setup put there.
if [[ ! -e {previous}/setup.done ]]; then
  (enter; exec "$DIAMOND_BASH" {setup}) 2>&3 3>&- || finish setup $?
fi
"""

_SETUP_DONE = """\
: > setup.done
"""

_ONE_RANK = """\
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 12000))
export WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=0
"""

_RUN_ONE = """\
(enter; exec "$DIAMOND_BASH" {run}) 2>&3 3>&-
finish run $?
"""

_RUN_RANKS = """\
(enter
 exec {python} "$DIAMOND_RUN_DIR/launch.py" --ranks {ranks} -- "$DIAMOND_BASH" {run}) 2>&3 3>&-
finish run $?
"""

# Slurm warns this shell alone (and stops everybody). A shell that waits for a child in the foreground runs no trap
# until the child is gone, so the child goes to the background. A trap ends a wait early, and the child may have ended
# meanwhile, which is why it is asked for once more at the end; bash answers -1 when both happened in the same moment.
_WAIT = """\
child={child}
trap '{on_warning}' USR1
# Warned before there was anybody to tell: once the program had time to say that it listens.
if [[ -n $warned ]]; then (sleep 2; {on_warning}) & fi
while wait "$child"; code=$?; kill -0 "$child"; do :; done
wait "$child"; again=$?
{others}finish run "$((again == 127 || again < 0 ? code : again))"
"""

_SLURM_ONE = """\
{ranks}(enter; exec "$DIAMOND_BASH" {run}) 2>&3 3>&- &
"""

# The launcher passes warnings on, on every node. Given to srun, a signal would reach every process of the step, and end
# those that do not expect it.
_SLURM_RANKS = """\
DIAMOND_PYTHON=$(command -v {python} || command -v python3)
{several}(enter
 {step}"$DIAMOND_PYTHON" "$DIAMOND_RUN_DIR/launch.py" --ranks {ranks}{rendezvous} -- \\
   "$DIAMOND_BASH" {run}) 2>&3 3>&- &
"""

_SEVERAL_NODES = """\
DIAMOND_SRUN=$(command -v srun)
export MASTER_ADDR=${{HOSTNAME:-$(hostname)}} MASTER_PORT=$((20000 + RANDOM % 12000))
read -r DIAMOND_LAUNCH_KEY < /proc/sys/kernel/random/uuid
export DIAMOND_LAUNCH_KEY
"""

_STEP = (
    'exec "$DIAMOND_SRUN" {nodes} --ntasks-per-node=1 '
    '--cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" --kill-on-bad-exit=0 --export=ALL \\\n   '
)

# What Slurm does with a lost node, and why one step for all nodes would not do, is in docs/adr/0008. kill.json says why
# a job was ended (see `diamond.agent.schedulers.causes`): the others, not Slurm, end one whose first node is lost.
_EACH_NODE = """\
# Each node has a step of its own: one for all counts as failed when a node is lost, and srun may wait for it for ever.
DIAMOND_NODES=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export DIAMOND_NODE DIAMOND_FIRST_NODE=${{DIAMOND_NODES[0]}} DIAMOND_PATH=$PATH
# When the first node is lost, nobody is left who ends the job: Slurm would keep the others until its time is over.
DIAMOND_STEP='trap : HUP INT TERM USR1 USR2
"$@"; code=$?
PATH=$DIAMOND_PATH
until [[ $code -eq 0 || $code -eq {more} || $DIAMOND_NODE -eq 0 || -e $DIAMOND_RUN_DIR/exit.node0.json ]]; do
  sleep 5
  left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && left=($(scontrol show hostnames "$left")) || continue
  if [[ " ${{left[*]}} " != *" $DIAMOND_FIRST_NODE "* ]]; then
    printf "{{\\"reason\\":\\"NODE_FAIL\\",\\"detail\\":\\"the first node of the job went down (%s)\\",\\"at\\":%d}}" \\
      "$DIAMOND_FIRST_NODE" "$(date +%s)" > "$DIAMOND_RUN_DIR/kill.json"
    scancel "$SLURM_JOB_ID"
  fi
done
exit "$code"'
steps=()
for ((DIAMOND_NODE = 0; DIAMOND_NODE < {nodes}; DIAMOND_NODE++)); do
"""

_EACH_NODE_END = """\
steps+=($!)
done
"""

# A lost node's srun may wait for it until Slurm has noticed, and says nothing about the training.
_OTHERS = """\
# How it ended the first node knows; the others end with it, but for those that are lost.
for ((waited = 0; waited < 150; waited++)); do kill -0 "${steps[@]:1}" || break; sleep 0.2; done
kill "${steps[@]:1}"
"""


def job_script(plan: ScriptPlan) -> str:
    """The script the scheduler runs on the (first) node of a job."""
    assert plan.job_id.isprintable(), "a job id must not end the comment it stands in"
    previous = shlex.quote(plan.previous)
    numbers = {"no_run_dir": NO_RUN_DIR, "already_started": ALREADY_STARTED, "not_needed": NOT_NEEDED}
    directives = _NO_KILL if _may_shrink(plan) else ""
    text = _HEAD.format(job_id=plan.job_id, run_dir=shlex.quote(plan.run_dir), directives=directives, **numbers)
    if plan.scheduler == "slurm" and plan.slot is None:
        text += _RESTARTED.replace("@view@", f" {VIEW}/out-of-time" if plan.is_guest else "")
    measures = plan.measure and _starts_once(plan)  # where ranks are started, the launcher sees to it on each node
    if measures:
        text += "measuring=\n"
    text += _CLAIM.format(**numbers)
    if measures:
        text += _MEASURED
    # What a guest's program leaves behind is in the folder that it sees in the place of this one.
    mark = f"{VIEW}/continue" if plan.is_guest else "continue"
    if plan.chained:
        text += _MORE.format(code=CONTINUE, mark=mark)
    chain = _CHAIN_ENV.format(mark=mark, resumed=int(bool(plan.previous))) if plan.chained or plan.previous else ""
    library = _LIBRARY.format(library=shlex.quote(plan.library)) if plan.library else ""
    text += _FINISH.format(
        over=_OVER if plan.chained else "",
        chain=chain,
        ends=_ends(plan),
        where=_IN_IMAGE if plan.image else _IN_SUBSHELL,
        envs="" if plan.image else _ENVS + (_SECRETS.format(**numbers) if plan.secrets else "") + library,
        wipe=(_WIPE if plan.secrets else "") + (_WIPE_TMP if plan.is_guest else ""),
        **numbers,
    )
    if plan.previous and plan.slot is None:  # in a pool no job waits in advance
        text += _NOT_NEEDED.format(previous=previous, **numbers)
    text += _QUIET
    if plan.modules:
        text += _MODULES.format(modules=" ".join(map(shlex.quote, plan.modules)))
    if plan.has_setup:
        setup = f"{_INSIDE} setup" if plan.image else '-e "$DIAMOND_RUN_DIR/setup.sh"'
        text += (_SETUP_UNLESS_DONE if plan.previous else _SETUP).format(previous=previous, setup=setup)
        if plan.chained:
            text += _SETUP_DONE
    return text + _run(plan)


_INSIDE = '"$DIAMOND_RUN_DIR/inside.sh"'


def _ends(plan: ScriptPlan) -> str:
    if plan.slot is not None:
        return NO_END
    return _ENDS.format(limit_s=int(plan.time_limit_s)) if plan.time_limit_s and plan.scheduler == "slurm" else ""


def _starts_once(plan: ScriptPlan) -> bool:
    return plan.ranks_per_node == 0 or (plan.ranks_per_node == 1 and plan.num_nodes == 1)


def _may_shrink(plan: ScriptPlan) -> bool:
    in_one_job = plan.scheduler == "slurm" and plan.slot is None
    return in_one_job and plan.ranks_per_node > 0 and 0 < plan.min_nodes < plan.num_nodes


def _run(plan: ScriptPlan) -> str:
    python = shlex.quote(plan.launcher_python)
    ranks = _ONE_RANK if plan.ranks_per_node == 1 else ""
    run = f"{_INSIDE} run" if plan.image else '"$DIAMOND_RUN_DIR/run.sh"'
    if plan.scheduler != "slurm" and plan.slot is None:
        text = ranks + _RUN_ONE if _starts_once(plan) else _RUN_RANKS
        return text.format(python=python, ranks=plan.ranks_per_node, run=run)
    if _starts_once(plan):
        measure = _MEASURE if plan.measure else ""
        return measure + WARN + _SLURM_ONE.format(ranks=ranks, run=run) + _wait("warn")
    if plan.num_nodes == 1:
        start = _SLURM_RANKS.format(
            python=python, ranks=plan.ranks_per_node, several="", step="exec ", rendezvous=_measuring(plan), run=run
        )
        return start + _wait('warned=1; kill -USR1 "$child"')
    return _several_nodes(plan, python, run)


def _several_nodes(plan: ScriptPlan, python: str, run: str) -> str:
    nodes = plan.num_nodes
    rendezvous = f' --nodes {nodes} --warning-file "$DIAMOND_RUN_DIR/warning"'
    several, end, has_own_steps = "", "", True
    if plan.slot is not None:
        several, step, end = EACH_PILOT, pilot_step(plan.slot), EACH_PILOT_END
        rendezvous += ' --node-rank "$DIAMOND_NODE"'
    elif _may_shrink(plan):  # not --relative: that of 0 means any node
        several, end = _EACH_NODE.format(nodes=nodes, more=CONTINUE), _EACH_NODE_END
        step = _STEP.format(nodes='--nodes=1 --ntasks=1 --nodelist="${DIAMOND_NODES[DIAMOND_NODE]}"')
        step += '"$DIAMOND_BASH" -c "$DIAMOND_STEP" step '
        rendezvous += f' --node-rank "$DIAMOND_NODE" --min-nodes {plan.min_nodes}'
    else:
        step, has_own_steps = _STEP.format(nodes=f"--nodes={nodes} --ntasks={nodes}"), False
    start = _SLURM_RANKS.format(
        python=python,
        ranks=plan.ranks_per_node,
        several=_SEVERAL_NODES.format() + several,
        step=step,
        rendezvous=rendezvous + _measuring(plan),
        run=run,
    )
    on_warning = "warned=1; : > warning"
    if not has_own_steps:
        return start + _wait(on_warning)
    return start + end + _wait(on_warning, child="${steps[0]}", others=_OTHERS)


def _measuring(plan: ScriptPlan) -> str:
    return ' --measure "$DIAMOND_BASH" "$DIAMOND_RUN_DIR/measure.sh"' if plan.measure else ""


def _wait(on_warning: str, child: str = "$!", others: str = "") -> str:
    return _WAIT.format(on_warning=on_warning, child=child, others=others)


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
