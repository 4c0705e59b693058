"""The text of a batch script as Diamond's `run`: what is put in front of it, and who interprets it.

With `ranks_per_node: 0` Diamond starts `run` as sbatch starts a script, once and on the first node, but in an
allocation of one task a node. The lines put in front undo that, so that the script finds what sbatch would have given
it, and its own srun, mpirun or torchrun lines start what they always did.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from diamond.core.sbatch.layout import Layout

BEGIN = "# Added by `diamond import`, so that the script finds the job as sbatch would have made it."
END = "# End of what was added."


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the directives say about how the script is run.

    Attributes:
        exports: variables that sbatch would have set because of directives.
        whole_node: the script has its nodes to itself, so that mpirun may use every core.
        chdir, stdin: what --chdir and --input name.
    """

    layout: Layout
    exports: dict[str, str]
    whole_node: bool = False
    chdir: str = ""
    stdin: str = ""


def interpreter(script: str) -> list[str]:
    """What the kernel would run the script with: the program and, as one word, what follows it. Empty: bash will do."""
    first = script.split("\n", 1)[0]
    if not first.startswith("#!") or not first[2:].strip():
        return []
    words = first[2:].split(None, 1)
    words = [words[0], *(word.strip() for word in words[1:])]
    is_bash = words[0].endswith("/bash") and len(words) == 1
    return [] if is_bash or (words[0].endswith("/env") and words[1:] == ["bash"]) else words


def as_run(script: str, taken: set[int], first_command: int, around: Surroundings) -> str:
    """The text of `run`. A bash script goes into it without its directives; any other goes through a file, whole."""
    lead = preamble(around)
    words = interpreter(script)
    if words:
        return _through_file(script, words, lead)
    lines = script.split("\n")
    kept = [(number, line) for number, line in enumerate(lines, 1) if number not in taken]
    before = [line for number, line in kept if not first_command or number < first_command]
    after = [line for number, line in kept if first_command and number >= first_command]
    while before and not before[-1].strip():
        before.pop()
    return "\n".join([*before, *lead, *after]).strip("\n") + "\n"


def preamble(around: Surroundings) -> list[str]:
    """The lines in front, each for bash."""
    layout = around.layout
    lines = [BEGIN]
    exports = {**_task_envs(layout), **around.exports}
    foreign = ["SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"]
    if "SLURM_MEM_PER_CPU" in exports:
        foreign.append("SLURM_MEM_PER_NODE")
    if unset := [name for name in foreign if name not in exports]:
        lines.append(f"unset {' '.join(unset)}")
    if exports:
        lines.append("export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in exports.items()))
    if around.whole_node and layout.ntasks is None and (layout.cpus_per_task or 1) == 1:
        lines.append("export SLURM_TASKS_PER_NODE=${SLURM_JOB_CPUS_PER_NODE:-1}")
    lines.append("export SLURM_SUBMIT_DIR=$PWD")
    if around.chdir:
        lines.append(f"cd -- {shlex.quote(around.chdir)} || exit")
    if around.stdin:
        lines.append(f"exec < {shlex.quote(around.stdin)} || exit")
    return [*lines, END]


def _task_envs(layout: Layout) -> dict[str, str]:
    envs: dict[str, str] = {}
    if layout.ntasks is not None:
        total = str(layout.ntasks)
        envs |= {"SLURM_NTASKS": total, "SLURM_NPROCS": total, "SLURM_TASKS_PER_NODE": layout.tasks_by_node}
    if layout.says_per_node:
        envs["SLURM_NTASKS_PER_NODE"] = str(layout.tasks_per_node)
    if layout.cpus_per_task is not None:
        envs["SLURM_CPUS_PER_TASK"] = str(layout.cpus_per_task)
    return envs


def _through_file(script: str, words: list[str], lead: list[str]) -> str:
    mark = "END_OF_SCRIPT"
    while mark in script.split("\n"):
        mark += "_"
    body = script if script.endswith("\n") else script + "\n"
    end = f'exec {" ".join(map(shlex.quote, words))} "$DIAMOND_RUN_DIR/script"\n'
    return "\n".join([*lead, f"cat > \"$DIAMOND_RUN_DIR/script\" <<'{mark}' || exit", f"{body}{mark}", end])
