"""How sbatch reads a batch script: which lines are directives, which words stand in them, which options they give.

Owns the table of sbatch's options (Slurm 22.05 to 26.05) and the rules of its reader. Knows nothing of Diamond's
fields: that is `diamond.core.sbatch.importing`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum


class Takes(Enum):
    """Whether an option has a value. An OPTIONAL one must be joined to it: ``--exclusive=user``."""

    NOTHING = "nothing"
    OPTIONAL = "optional"
    VALUE = "value"


_FLAGS = """consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit oversubscribe parsable
    quiet reboot share spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait"""
_OPTIONAL = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
_VALUED = """account acctg-freq array autocomplete batch bb bbf begin chdir cluster cluster-constraint clusters comment
    constraint container container-id context core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
    delay-boot dependency distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses
    mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile nodelist
    nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output
    partition power prefer priority profile qos reservation resources runtime segment signal sockets-per-node switches
    tasks-per-node thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey
    workdir wrap"""
OPTIONS: dict[str, Takes] = {
    **dict.fromkeys(_FLAGS.split(), Takes.NOTHING),
    **dict.fromkeys(_OPTIONAL.split(), Takes.OPTIONAL),
    **dict.fromkeys(_VALUED.split(), Takes.VALUE),
}
SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec",
    "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error",
    "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
# Other spellings, some of them of older versions only.
ALIASES = {
    "cluster": "clusters",
    "ntasks-per-tres": "ntasks-per-gpu",
    "share": "oversubscribe",
    "tasks-per-node": "ntasks-per-node",
    "workdir": "chdir",
}
_MAGIC = ("#SBATCH", "#SLURM")
_COMPONENT = re.compile(r"(?:hetjob|packjob)(?=\s|$)", re.IGNORECASE)
_ALMOST = re.compile(r"\s*#\s*SBATCH\b", re.IGNORECASE)
_FOREIGN = re.compile(r"#(PBS|BSUB)\s")
_BLANK = " \t\n\v\f\r"  # what C calls blank; Python's idea is wider


@dataclass(frozen=True, kw_only=True)
class Directive:
    """One option of the script.

    Attributes:
        line: where it begins, from 1.
        name: the long name, aliases resolved; as written when `known` is false.
        value: None when it has none.
        text: as written, for people.
        component: which part of a heterogeneous job it belongs to, from 0.
    """

    line: int
    name: str
    value: str | None
    text: str
    known: bool = True
    component: int = 0


@dataclass(frozen=True, kw_only=True)
class Oddity:
    """Something in the script that looks like a directive and is none, or that sbatch would refuse, and why."""

    line: int
    text: str
    why: str


@dataclass
class Reading:
    """All that the reader found. `taken` are the numbers of the lines that hold directives, from 1."""

    directives: list[Directive] = field(default_factory=list)
    oddities: list[Oddity] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    first_command: int = 0  # its line, from 1; 0: there is none


@dataclass(frozen=True)
class _Word:
    line: int
    text: str


def read_directives(lines: list[str]) -> Reading:
    """Everything sbatch would take from these lines of a script, and everything that looks as if it would."""
    found = Reading()
    components: list[list[_Word]] = [[]]
    for number, line in enumerate(lines, 1):
        magic = next((word for word in _MAGIC if line.startswith(word)), "")
        if found.first_command:
            if magic:
                why = f"sbatch reads no directive after the first command, which is line {found.first_command}"
                found.oddities.append(Oddity(line=number, text=line.strip(_BLANK), why=why))
        elif magic:
            _read_line(number, line[len(magic) :], components, found)
        elif line.strip(_BLANK) and not line.lstrip(_BLANK).startswith("#"):
            found.first_command = number
        else:
            _look_at_comment(number, line, found)
    for index, words in enumerate(components):
        _read_words(words, index, found)
    found.oddities.sort(key=lambda odd: odd.line)
    return found


def _read_line(number: int, rest: str, components: list[list[_Word]], found: Reading) -> None:
    found.taken.add(number)
    rest = rest.lstrip(_BLANK)
    if separator := _COMPONENT.match(rest):
        components.append([])
        rest = rest[separator.end() :]
    try:
        words, unread = split_words(rest)
    except ValueError as error:
        found.oddities.append(Oddity(line=number, text=rest.strip(_BLANK), why=f"{error}; sbatch refuses such a line"))
        return
    components[-1] += [_Word(number, word) for word in words]
    if unread:
        why = "sbatch stops reading the line at an empty word"
        found.oddities.append(Oddity(line=number, text=unread, why=why))


def _look_at_comment(number: int, line: str, found: Reading) -> None:
    text = line.strip(_BLANK)
    if _ALMOST.match(line):
        why = "a comment to sbatch, which wants #SBATCH in capitals at the very beginning of the line"
        found.oddities.append(Oddity(line=number, text=text, why=why))
    elif foreign := _FOREIGN.match(line):
        why = f"sbatch understands some #{foreign[1]} lines; write it as #SBATCH and import again"
        found.oddities.append(Oddity(line=number, text=text, why=why))


def split_words(line: str) -> tuple[list[str], str]:
    """The words of a directive, and what sbatch leaves unread of the line.

    Quotes group; a backslash takes the next character as it is; # begins a comment.

    Raises:
        ValueError: saying why sbatch would not take the line.
    """
    words: list[str] = []
    at = 0
    while True:
        while at < len(line) and line[at] in _BLANK:
            at += 1
        if at >= len(line) or line[at] == "#":
            return words, ""
        if line[at] == ":":
            raise ValueError("a word begins with a colon")
        began, word, quote = at, "", ""
        while at < len(line) and (quote or line[at] not in _BLANK):
            char = line[at]
            at += 1
            if char == "\\":
                word += line[at : at + 1]
                at += 1
            elif quote and char == quote:
                quote = ""
            elif not quote and char in "\"'":
                quote = char
            elif not quote and char == "#":
                at = len(line)
            else:
                word += char
        if quote:
            raise ValueError(f"the quote {quote} is not closed")
        if not word:
            return words, "" if line[began:].strip(_BLANK) == "\\" else line[began:].strip(_BLANK)
        words.append(word)


def _read_words(words: list[_Word], component: int, found: Reading) -> None:
    """The options in the words of all lines together: as with any command, a value may be the next word."""
    at = 0

    def note(word: _Word, why: str) -> None:
        found.oddities.append(Oddity(line=word.line, text=word.text, why=f"{why}; sbatch refuses it"))

    def add(word: _Word, name: str, value: str | None, text: str, known: bool = True) -> None:
        name = ALIASES.get(name, name)
        found.directives.append(
            Directive(line=word.line, name=name, value=value, text=text, known=known, component=component)
        )

    def following() -> str | None:
        nonlocal at
        if at == len(words):
            return None
        at += 1
        return words[at - 1].text

    while at < len(words):
        word = words[at]
        at += 1
        if word.text.startswith("--") and len(word.text) > 2:
            given, joined, value = word.text[2:].partition("=")
            name = _full_name(given)
            if name is None:
                close = ", ".join(f"--{one}" for one in OPTIONS if one.startswith(given))
                note(word, f"it could be any of {close}")
            elif name not in OPTIONS:
                # A plug-in of the site may know it; whether it has a value, only that plug-in knows.
                alone = not joined and at < len(words) and not words[at].text.startswith("-")
                after = following() if alone and words[at].line == word.line else None
                shown = f"{word.text} {after}" if after is not None else word.text
                add(word, name, value if joined else after, shown, known=False)
            elif OPTIONS[name] is Takes.NOTHING:
                note(word, "it takes no value") if joined else add(word, name, None, word.text)
            elif joined or OPTIONS[name] is Takes.OPTIONAL:
                add(word, name, value if joined else None, word.text)
            elif (after := following()) is None:
                note(word, "its value is missing")
            else:
                add(word, name, after, f"{word.text} {after}")
        elif word.text.startswith("-") and len(word.text) > 1 and word.text != "--":
            letters = word.text[1:]
            while letters:
                letter, letters = letters[0], letters[1:]
                short = SHORT.get(letter, "")
                if not short:
                    note(_Word(word.line, word.text), f"there is no option -{letter}")
                    break
                if OPTIONS[short] is Takes.NOTHING:
                    add(word, short, None, f"-{letter}")
                    continue
                if letters or OPTIONS[short] is Takes.OPTIONAL:
                    add(word, short, letters or None, f"-{letter}{letters}")
                elif (after := following()) is None:
                    note(word, "its value is missing")
                else:
                    add(word, short, after, f"-{letter} {after}")
                break
        elif word.text == "--":
            for rest in words[at:]:
                note(rest, "it is not an option")
            return
        else:
            note(word, "it is not an option")


def _full_name(given: str) -> str | None:
    """The option meant: the beginning of a name will do where only one fits. None: several fit."""
    if given in OPTIONS:
        return given
    fitting = {ALIASES.get(name, name) for name in OPTIONS if name.startswith(given)} if given else set()
    if len(fitting) > 1:
        return None
    return fitting.pop() if fitting else given
