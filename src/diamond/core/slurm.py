"""The `slurm:` block of a task: what users of Slurm say to sbatch, in the words they know.

Everything here is passed on as it is; what Diamond itself decides for every job (its name, where its log goes, how it
is warned) cannot be set here, and the error says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput
from diamond.core.sbatch.options import ALIASES, OPTIONS, Takes

_WORD = re.compile(r"[!-~]{1,256}")  # one printable ASCII word: Slurm's own names have neither blanks nor accents
_OPTION = re.compile(r"--([a-z0-9][a-z0-9-]*)(?:=([ -~]*))?")
_PARTIAL_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?")
MAX_EXTRA = 50

# Options that Diamond sets for every job, and where to say the same thing.
OWN_OPTIONS = {
    "job-name": "name",
    "output": "",
    "error": "",
    "input": "",
    "open-mode": "",
    "chdir": "",
    "parsable": "",
    "wrap": "run",
    "array": "",
    "signal": "slurm.warning",
    "requeue": "retry",
    "no-requeue": "",
    "export": "envs",
    "export-file": "envs",
    "get-user-env": "",
    "wait": "",
    "test-only": "",
    "help": "",
    "usage": "",
    "version": "",
    "autocomplete": "",
    "uid": "",
    "gid": "",
    "batch": "",
    "quiet": "",
    "verbose": "",
    "nodes": "num_nodes",
    "ntasks": "ranks_per_node",
    "ntasks-per-node": "ranks_per_node",
    "cpus-per-task": "resources.cpus",
    "mem": "resources.memory",
    "mem-per-cpu": "resources.memory",
    "mem-per-gpu": "resources.memory",
    "gpus": "resources.accelerators",
    "gpus-per-node": "resources.accelerators",
    "gpus-per-task": "resources.accelerators",
    "time": "slurm.time",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "constraint": "slurm.constraint",
    "reservation": "slurm.reservation",
    "gres": "slurm.gres",
    "nodelist": "slurm.nodelist",
    "exclude": "slurm.exclude",
    "exclusive": "slurm.exclusive",
    "clusters": "resources.infra",
    "dependency": "",
}


def parse_word(raw: object) -> str:
    text = str(raw).strip() if isinstance(raw, str | int) and not isinstance(raw, bool) else ""
    if not _WORD.fullmatch(text) or text.startswith("-"):
        raise ValueError(f"{str(raw)[:40]!r} is not a name Slurm knows; give one word of plain characters")
    return text


def parse_walltime(raw: object) -> str:
    """Normal form ``[D-]HH:MM:SS``. Slurm's short forms (``1-12``, ``30:00``) are understood.

    A bare number is refused: it would be minutes to Slurm and is seconds everywhere else in Diamond.
    """
    text = raw.strip() if isinstance(raw, str) else ""
    if isinstance(raw, int | float) or text.isdecimal():
        raise ValueError(
            f'{str(raw)[:40]} of what? Write "90m", "2h" or "01:30:00" (a bare number is minutes to Slurm)'
        )
    found = _PARTIAL_CLOCK.fullmatch(text)
    if found and (found[1] is not None or found[3] is not None):
        days, first, second = found[1], int(found[2]), int(found[3] or 0)
        raw = int(days) * 86400 + first * 3600 + second * 60 if days is not None else first * 60 + second
    return format_walltime(parse_duration(raw))


def format_walltime(seconds: int) -> str:
    """As Slurm writes it."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def parse_extra(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = [raw]
    if not isinstance(raw, list | tuple) or len(raw) > MAX_EXTRA:
        raise ValueError(f'must be a list of at most {MAX_EXTRA} sbatch options such as "--licenses=matlab:1"')
    options = []
    for item in raw:
        found = _OPTION.fullmatch(item.strip()) if isinstance(item, str) else None
        if not found:
            raise InvalidInput(
                f"{str(item)[:60]!r} is not an sbatch option",
                hint='write each as one text in its long form, e.g. "--licenses=matlab:1"',
            )
        _check_option(found[1], has_value=found[2] is not None)
        options.append(item.strip())
    return tuple(options)


def _check_option(name: str, *, has_value: bool) -> None:
    """Refuse what Diamond itself sets, in any spelling sbatch would understand: it takes beginnings of names too."""
    meant = ALIASES.get(name, name)
    if meant in OWN_OPTIONS:
        instead = OWN_OPTIONS[meant]
        hint = f"use {instead} instead" if instead else "leave it out"
        raise InvalidInput(f"--{name} is set by Diamond itself", hint=hint)
    if name not in OPTIONS:  # one of a plug-in of the site, or of a later Slurm
        longer = [f"--{one}" for one in OPTIONS if one.startswith(name)]
        if longer:
            raise InvalidInput(f"--{name} is not a whole option", hint=f"write it in full: {', '.join(longer[:5])}")
    elif OPTIONS[name] is Takes.VALUE and not has_value:
        # sbatch would take the next word for it, which is another option or the script.
        raise InvalidInput(f"--{name} needs a value", hint=f'write both as one text: "--{name}=VALUE"')


def parse_modules(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = raw.split()
    if not isinstance(raw, list | tuple) or len(raw) > MAX_EXTRA:
        raise ValueError('must be a list of modules such as ["cuda/12.4"]')
    return tuple(parse_word(item) for item in raw)


def _word() -> str | None:
    return field(default=None, metadata={"parse": parse_word})


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a task says to Slurm in particular. Field order is the order documents and errors show.

    Attributes:
        partition: one name, or several with commas; None lets Diamond choose one that has what the task needs.
        time: walltime of one job (`time_s` in seconds). A longer `max_duration` makes a chain of jobs.
        gres: generic resources beyond `resources.accelerators`, per node.
        warning: how long before its walltime ends a job is warned with SIGUSR1, in seconds.
        modules: environment modules loaded before `setup` and `run`.
        extra: further sbatch options, passed on as they are.
    """

    partition: str | None = _word()
    account: str | None = _word()
    qos: str | None = _word()
    constraint: str | None = _word()
    reservation: str | None = _word()
    time: str | None = field(default=None, metadata={"parse": parse_walltime})
    gres: str | None = _word()
    nodelist: str | None = _word()
    exclude: str | None = _word()
    exclusive: bool = False
    warning: int | None = field(default=None, metadata={"parse": parse_duration})
    modules: tuple[str, ...] = field(default=(), metadata={"parse": parse_modules})
    extra: tuple[str, ...] = field(default=(), metadata={"parse": parse_extra})

    @property
    def time_s(self) -> int | None:
        return parse_duration(self.time) if self.time is not None else None

    @property
    def partitions(self) -> tuple[str, ...]:
        return tuple(name for name in (self.partition or "").split(",") if name)

    @property
    def first_set(self) -> str:
        """The first field that only a Slurm endpoint can honour; empty when there is none."""
        harmless = {"time", "warning"}  # every scheduler has time limits
        blank = SlurmOptions()
        for item in fields(self):
            if item.name not in harmless and getattr(self, item.name) != getattr(blank, item.name):
                return item.name
        return ""
