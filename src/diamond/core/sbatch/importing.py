"""An existing batch script as a Diamond task, losing nothing silently: every directive becomes a field or a note.

Pure: text in, `ImportedTask` out. How sbatch reads a script is in `diamond.core.sbatch.options`, what its numbers come
to in `diamond.core.sbatch.layout`, and the text of `run` in `diamond.core.sbatch.script`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diamond.core.durations import MAX_DURATION_S, parse_duration
from diamond.core.errors import DiamondError, InvalidInput, TooLarge
from diamond.core.fields import MAX_SCRIPT_BYTES, check_env_name, parse_name
from diamond.core.sbatch.layout import NUMBERS, Layout, explain, lay_out, mebibytes, show_memory, split_gres
from diamond.core.sbatch.options import Directive, Reading, read_directives
from diamond.core.sbatch.script import Surroundings, as_run, interpreter
from diamond.core.sbatch.values import (
    ADVICE,
    CHANGED,
    KEPT,
    LEFT_OUT,
    array_text,
    exports,
    parse_array,
    show_time,
    signal_warning,
    walltime_s,
)
from diamond.core.slurm import MAX_EXTRA, parse_extra, parse_word
from diamond.core.tasks import TaskSpec

_REQUEUE_RETRIES = 3
_WORDS = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude")
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_FILES = ("nodefile", "bbf", "container")  # options that name a file, which sbatch looks for where it is started
# What Diamond does in its own way, and how to get the same.
_LEFT_OUT = {
    **dict.fromkeys(("output", "error", "open-mode"), "Diamond keeps the log: `diamond logs`"),
    **dict.fromkeys(
        ("autocomplete", "help", "ignore-pbs", "parsable", "quiet", "test-only", "usage", "verbose", "version", "wait"),
        "it concerns the sbatch command, not the job",
    ),
    **dict.fromkeys(("uid", "gid"), "tasks run as the user of the endpoint's agent"),
    "batch": "which node starts the script cannot be chosen",
    "clusters": "name the endpoint in resources.infra",
    "dependency": "a task cannot wait for another; launch it when the other is done",
    "export-file": "put the variables into envs",
    "get-user-env": "the job has the environment of the endpoint's agent; put variables into envs",
    "kill-on-invalid-dep": "it belongs to --dependency",
    "no-requeue": "a task is not run again unless `retry` says so",
    "wrap": "the command is given by `run`",
}


@dataclass(frozen=True, kw_only=True)
class Note:
    """What became of one part of the script.

    Attributes:
        line: in the script, from 1; 0 when it concerns the whole.
        source: as it stands there; empty for advice.
        kind: "kept", "changed", "left out" or "note".
        text: where it is kept, or why not and what to do.
    """

    line: int
    source: str
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ImportedTask:
    """A task file's content (`fields`) and what its writer should know (`notes`, in the order of the script)."""

    fields: dict[str, Any]
    notes: tuple[Note, ...]

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec.parse(self.fields)

    @property
    def to_check(self) -> tuple[Note, ...]:
        """The notes a person has to read: everything that is not simply kept."""
        return tuple(note for note in self.notes if note.kind != KEPT)


def decode_script(data: bytes, shown: str = "the script") -> tuple[str, list[str]]:
    """The text of a script file, and what had to be mended in it.

    Raises:
        InvalidInput: it is no text, or too long for a task.
    """
    if b"\0" in data[: MAX_SCRIPT_BYTES + 1]:
        raise InvalidInput(f"{shown} is not a text file", hint="give a batch script: text that begins with #!/bin/bash")
    if len(data) > MAX_SCRIPT_BYTES:
        raise TooLarge(
            f"{shown} is longer than {MAX_SCRIPT_BYTES} bytes", hint="move data out of the script, into files beside it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        hint = "convert it first, e.g. iconv -f latin1 -t utf-8"
        raise InvalidInput(f"{shown}, line {line}: not UTF-8 text", hint=hint) from error
    mended = []
    if text.startswith("\ufeff"):
        text = text[1:]
        mended.append("a byte order mark stood in front of the first line, which sbatch refuses; it is removed")
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
        mended.append("lines ended as on Windows, which sbatch refuses; they end as on Unix now")
    if not text.strip():
        raise InvalidInput(f"{shown} is empty", hint="give a batch script")
    return text, mended


def import_sbatch(data: bytes, *, name: str = "", workdir: str | None = ".") -> ImportedTask:
    """Turn a batch script into a task.

    Args:
        data: the script, as it stands in its file.
        name: the task's name where the script gives none (sbatch takes the file's).
        workdir: the folder to send along; None for none.

    Raises:
        InvalidInput: it is no script.
    """
    text, mended = decode_script(data, name or "the script")
    work = _Import(text, read_directives(text.split("\n")))
    for sentence in mended:
        work.note(0, "", CHANGED, sentence)
    fields = work.task(name, workdir)
    notes = sorted(work.notes, key=lambda note: (note.line == 0, note.line))
    return ImportedTask(fields=fields, notes=tuple(notes))


class _Import:
    def __init__(self, text: str, reading: Reading) -> None:
        self._text = text
        self._reading = reading
        self._fields: dict[str, Any] = {}
        self._resources: dict[str, Any] = {}
        self._slurm: dict[str, Any] = {}
        self._extra: list[str] = []
        self._envs: dict[str, str] = {}
        self._exports: dict[str, str] = {}
        self._last: dict[str, Directive] = {}
        self.notes: list[Note] = []

    def note(self, line: int, source: str, kind: str, text: str) -> None:
        self.notes.append(Note(line=line, source=source, kind=kind, text=text))

    def _say(self, directive: Directive, kind: str, text: str) -> None:
        self.note(directive.line, directive.text, kind, text)

    def task(self, name: str, workdir: str | None) -> dict[str, Any]:
        for odd in self._reading.oddities:
            self.note(odd.line, odd.text, LEFT_OUT, odd.why)
        self._choose()
        layout = lay_out(self._last)
        for directive in list(self._last.values()):
            self._place(directive, layout)
        self._place_layout(layout)
        self._name(name)
        around = Surroundings(
            layout=layout,
            exports=self._exports,
            whole_node="exclusive" in self._last,
            chdir=self._chdir(),
            stdin=self._stdin(),
        )
        run = as_run(self._text, self._reading.taken, self._reading.first_command, around)
        self._advise(layout, workdir)
        return self._assembled(run, workdir)

    def _choose(self) -> None:
        """Of an option given twice the last one counts; mail types add up, and a plug-in's may."""
        memory = [d for d in self._reading.directives if d.name in _MEMORY and not d.component]
        for directive in self._reading.directives:
            if directive.component:
                why = f"it describes part {directive.component + 1} of a heterogeneous job; a task has one kind of node"
                self._say(directive, LEFT_OUT, why)
            elif directive.name == "mail-type" or not directive.known:
                self._keep_extra(directive)
            elif memory and directive in memory and directive is not memory[-1]:
                self._say(
                    directive, LEFT_OUT, f"line {memory[-1].line} says {memory[-1].text}, and the last one counts"
                )
            else:
                if before := self._last.pop(directive.name, None):
                    why = f"line {directive.line} says {directive.text}, and the last one counts"
                    self._say(before, LEFT_OUT, why)
                self._last[directive.name] = directive

    # One directive

    def _place(self, directive: Directive, layout: Layout) -> None:
        special: dict[str, Callable[[Directive], None]] = {
            "array": self._array,
            "chdir": self._note_chdir,
            "exclusive": self._exclusive,
            "export": self._export,
            "input": self._note_stdin,
            "job-name": self._job_name,
            "requeue": self._requeue,
            "signal": self._signal,
            "time": self._time,
        }
        if directive.name in special:
            special[directive.name](directive)
        elif directive.name in NUMBERS:
            self._number(directive, layout)
        elif directive.name in _WORDS:
            self._word(directive)
        elif directive.name in _LEFT_OUT:
            self._say(directive, LEFT_OUT, _LEFT_OUT[directive.name])
        else:
            self._keep_extra(directive)

    def _word(self, directive: Directive) -> None:
        if directive.name in ("nodelist", "exclude") and "/" in (directive.value or ""):
            self._say(directive, LEFT_OUT, f"it names a file; write the nodes themselves into slurm.{directive.name}")
            return
        try:
            self._slurm[directive.name] = parse_word(directive.value)
        except ValueError as error:
            self._say(directive, LEFT_OUT, str(error))
            return
        self._say(directive, KEPT, f"slurm.{directive.name}")

    def _keep_extra(self, directive: Directive) -> None:
        if directive.name in _FILES and not (directive.value or "").startswith("/"):
            self._say(directive, LEFT_OUT, "sbatch is started elsewhere; put it into slurm.extra with its full path")
            return
        option = f"--{directive.name}" if directive.value is None else f"--{directive.name}={directive.value}"
        try:
            parse_extra([option])
        except DiamondError as error:
            self._say(directive, LEFT_OUT, error.message)
            return
        if len(self._extra) == MAX_EXTRA:
            self._say(directive, LEFT_OUT, f"slurm.extra takes at most {MAX_EXTRA} options")
            return
        self._extra.append(option.strip())
        if directive.known:
            self._say(directive, KEPT, "slurm.extra")
        else:
            self._say(
                directive, CHANGED, "not an option of Slurm itself; kept in slurm.extra, for a plug-in of the site"
            )

    def _time(self, directive: Directive) -> None:
        seconds = walltime_s(directive.value)
        if seconds is None:
            self._say(directive, LEFT_OUT, "it is not a length of time")
        elif seconds == 0 or seconds > MAX_DURATION_S:
            self._say(directive, LEFT_OUT, "it means no limit; without slurm.time the partition's own limit holds")
        else:
            self._slurm["time"] = self._fields["max_duration"] = show_time(seconds)
            self._say(directive, KEPT, "slurm.time, and max_duration: raise that to let the task go on in further jobs")

    def _signal(self, directive: Directive) -> None:
        found = signal_warning(directive.value)
        if found is None:
            self._say(directive, LEFT_OUT, "it is not a signal, or comes at the very end; see slurm.warning")
            return
        signal, seconds = found
        self._slurm["warning"] = f"{parse_duration(seconds)}s"
        if signal in ("USR1", "10"):
            self._say(directive, KEPT, "slurm.warning: SIGUSR1 to the programs that handle it")
        else:
            self._say(
                directive, CHANGED, f"slurm.warning: Diamond warns with SIGUSR1, so handle that instead of {signal}"
            )

    def _requeue(self, directive: Directive) -> None:
        self._fields["retry"] = {"max_retries": _REQUEUE_RETRIES, "on": ["NODE_FAIL", "PREEMPTED"]}
        text = f"retry: at most {_REQUEUE_RETRIES} times; max_duration is for all attempts together"
        self._say(directive, CHANGED, text)

    def _exclusive(self, directive: Directive) -> None:
        self._slurm["exclusive"] = True
        if directive.value is None:
            self._say(directive, KEPT, "slurm.exclusive")
        else:
            self._say(directive, CHANGED, "slurm.exclusive: true, which shares the nodes with nobody at all")

    def _job_name(self, directive: Directive) -> None:
        try:
            self._fields["name"] = parse_name(directive.value)
        except (ValueError, InvalidInput) as error:
            self._say(directive, LEFT_OUT, f"as a task's name it {getattr(error, 'message', error)}")
            return
        self._say(directive, KEPT, "name")

    def _export(self, directive: Directive) -> None:
        found = exports(directive.value or "")
        problems = []
        for name, value in found.values.items():
            try:
                check_env_name(name)
                self._envs[name] = value
            except InvalidInput as error:
                problems.append(f"{name[:60]}: {error.message}")
        if found.from_shell:
            named = " ".join(f"--env {name}" for name in found.from_shell)
            problems.append(f"give your shell's values at launch: diamond launch … {named}")
        if problems:
            kept = f"envs has {', '.join(self._envs)}; " if self._envs else ""
            self._say(directive, CHANGED, kept + "; ".join(problems))
        elif self._envs:
            self._say(directive, KEPT, "envs")
        else:
            self._say(directive, LEFT_OUT, "your shell's environment does not go to the job; name variables in envs")

    def _array(self, directive: Directive) -> None:
        indices = parse_array(directive.value or "")
        if indices is None:
            self._say(directive, LEFT_OUT, "it is not a list of indices; Diamond has no job arrays")
            return
        self._envs |= indices.envs
        self._say(directive, CHANGED, array_text(indices))

    def _note_chdir(self, directive: Directive) -> None:
        usable = self._chdir()
        text = "`run` changes into it first; files sent with `workdir` are where it starts, in $SLURM_SUBMIT_DIR"
        self._say(directive, CHANGED if usable else LEFT_OUT, text if usable else "it is not a folder")

    def _note_stdin(self, directive: Directive) -> None:
        if self._stdin():
            self._say(directive, KEPT, "`run` reads it as its standard input")
        else:
            self._say(directive, LEFT_OUT, "write  exec < FILE  into `run`: the placeholders are sbatch's own")

    def _chdir(self) -> str:
        return (self._last["chdir"].value or "").strip() if "chdir" in self._last else ""

    def _stdin(self) -> str:
        value = (self._last["input"].value or "") if "input" in self._last else ""
        return "/dev/null" if value.lower() == "none" else "" if "%" in value else value

    # Numbers

    def _number(self, directive: Directive, layout: Layout) -> None:
        kind, text = explain(directive, layout, self._last)
        self._say(directive, kind, text)
        if kind == LEFT_OUT or directive.value is None:
            return
        if directive.name == "ntasks-per-gpu" and directive.value == "1":
            self._exports["SLURM_GPUS_PER_TASK"] = "1"  # the same, and srun binds it also within another step
        elif directive.name in ("gpus", "gpus-per-node", "gpus-per-task", "ntasks-per-gpu"):
            self._exports[f"SLURM_{directive.name.upper().replace('-', '_')}"] = directive.value
        if directive.name == "mem-per-cpu" and (mib := mebibytes(directive.value)):
            self._exports["SLURM_MEM_PER_CPU"] = str(int(mib))

    def _place_layout(self, layout: Layout) -> None:
        if layout.num_nodes > 1:
            self._fields["num_nodes"] = layout.num_nodes
        if layout.cpus is not None:
            self._resources["cpus"] = layout.cpus
        if layout.mem_mib:
            self._resources["memory"] = show_memory(layout.mem_mib)
        others = split_gres(self._last["gres"].value)[1] if "gres" in self._last else []
        if layout.accelerators:
            self._resources["accelerators"] = layout.accelerators
        else:
            others = [one.gres for one in layout.gpus] + others
        if others:
            try:
                self._slurm["gres"] = parse_word(",".join(others))
            except ValueError as error:
                self.note(0, "", LEFT_OUT, f"slurm.gres: {error}")

    # The whole

    def _name(self, name: str) -> None:
        if "name" not in self._fields and name:
            try:
                self._fields["name"] = parse_name(name)
            except (ValueError, InvalidInput):
                return
        if "SLURM_JOB_NAME" in self._text and "name" in self._fields:
            self._exports["SLURM_JOB_NAME"] = self._fields["name"]

    def _advise(self, layout: Layout, workdir: str | None) -> None:
        text = self._text
        if layout.spread:
            self.note(
                0, "", ADVICE,
                f"the script leaves the number of nodes to Slurm; one node with {layout.cpus} cores is assumed. "
                "For more, set num_nodes and divide resources.cpus",
            )  # fmt: skip
        if not text.startswith("#!"):
            self.note(0, "", ADVICE, "the first line names no interpreter, which sbatch refuses; bash is taken")
        if words := interpreter(text):
            shown = " ".join(words)
            self.note(0, "", ADVICE, f"`run` writes the whole script to a file and runs it with {shown[:200]}")
        if not self._reading.directives:
            self.note(0, "", ADVICE, "there is no #SBATCH directive: the task asks for one core and has no time limit")
        if not self._reading.first_command:
            self.note(0, "", ADVICE, "the script has no command")
        if re.search(r"^\s*(module|ml)\s", text, re.MULTILINE):
            self.note(
                0, "", ADVICE,
                "`module` lines stay in the script; where the endpoint does not know `module`, "
                "name the modules in slurm.modules instead",
            )  # fmt: skip
        self.note(
            0, "", ADVICE,
            "sbatch hands the environment of your shell to the job, Diamond does not: "
            "what the script needs of it belongs into envs",
        )  # fmt: skip
        where = (
            f"the folder {workdir} is sent along and the script starts in a copy of it" if workdir else "no folder is"
        )
        more = "" if workdir else " sent along: name one in workdir, or use full paths of the endpoint"
        self.note(0, "", ADVICE, f"{where}{more}; name the files to get back in outputs")

    def _assembled(self, run: str, workdir: str | None) -> dict[str, Any]:
        if self._extra:
            self._slurm["extra"] = self._extra
        fields: dict[str, Any] = {}
        if "name" in self._fields:
            fields["name"] = self._fields.pop("name")
        if workdir is not None:
            fields["workdir"] = workdir
        if "num_nodes" in self._fields:
            fields["num_nodes"] = self._fields.pop("num_nodes")
        fields["ranks_per_node"] = 0  # the script starts its own
        for key, value in (("resources", self._resources), ("slurm", self._slurm), ("envs", self._envs)):
            if value:
                fields[key] = value
        return {**fields, **self._fields, "run": run}
