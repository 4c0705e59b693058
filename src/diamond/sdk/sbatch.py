"""Existing batch scripts: from a file to a task, and from there to the text of a task file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.fields import MAX_SCRIPT_BYTES
from diamond.core.sbatch.importing import ImportedTask, Note, import_sbatch
from diamond.core.sbatch.values import ADVICE, CHANGED, KEPT, LEFT_OUT
from diamond.texts.yamltext import MAX_FILE_BYTES

# A literal block shows text as it is; characters it cannot hold, or that YAML would read otherwise, need quotes.
_BLOCK = re.compile(r"[\t\n -~\u00a1-\u1fff\u2070-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]*")
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\xa0\u2028-\u202e\u2066-\u2069\ufeff]")
_HEADS = {LEFT_OUT: "Left out:", CHANGED: "Changed, please check:", ADVICE: "Please note:", KEPT: "Kept as it is:"}


def load(path: str | os.PathLike[str], *, to: str | os.PathLike[str] | None = None) -> ImportedTask:
    """Read a batch script; ``-`` is standard input.

    Args:
        path: the script. Its folder becomes the task's `workdir`, unless that is a home folder or the root.
        to: where the task file will be written; `workdir` is relative to that. Left out: the current folder.

    Raises:
        InvalidInput: there is no such file, or it is no script.
    """
    shown = os.fspath(path)
    source = Path(shown).expanduser()
    try:
        if shown == "-":
            data = sys.stdin.buffer.read(MAX_SCRIPT_BYTES + 1)
        else:
            with open(source, "rb") as file:
                data = file.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            f"{shown}: {error.strerror or error}",
            hint="give the path of a batch script, e.g. diamond import job.sbatch",
        ) from error
    folder = Path.cwd() if shown == "-" else source.absolute().parent
    start = Path(to).expanduser().absolute().parent if to is not None else Path.cwd()
    name = "" if shown == "-" else source.stem
    return import_sbatch(data, name=name, workdir=None if _is_too_much(folder) else os.path.relpath(folder, start))


def _is_too_much(folder: Path) -> bool:
    """Whether sending this folder along can hardly be meant."""
    real = folder.resolve()
    return real in {Path("/"), Path.home().resolve(), Path("/tmp")}  # noqa: S108 - compared, not written to


def to_yaml(task: ImportedTask, source: str = "") -> str:
    """The text of a task file, with the notes as comments.

    Raises:
        TooLarge: a task file of that length could not be read back.
    """
    lines = [f"# Imported from {_visible(source)} by `diamond import`." if source else "# By `diamond import`."]
    for kind, head in _HEADS.items():
        if notes := [note for note in task.notes if note.kind == kind]:
            lines += ["#", f"# {head}", *(f"#   {text}" for text in note_lines(notes))]
    lines.append("")
    for key, value in task.fields.items():
        lines.append(_field(key, value))
    text = "\n".join(lines) + "\n"
    if len(text.encode()) > MAX_FILE_BYTES:
        raise TooLarge(
            "the task file would be larger than 1 MiB", hint="move data out of the script, into files beside it"
        )
    return text


def note_lines(notes: list[Note]) -> list[str]:
    """Notes for people, one a line and aligned."""
    sources = [f"line {note.line}  {_visible(note.source)[:60]}" if note.line else "" for note in notes]
    width = min(40, max((len(text) for text in sources), default=0))
    return [
        f"{source.ljust(width)}  {_visible(note.text)}" if source else _visible(note.text)
        for source, note in zip(sources, notes, strict=True)
    ]


def _field(key: str, value: Any) -> str:
    if key == "run":
        return _script(value)
    dumped: str = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=10_000)
    return dumped.rstrip("\n")


def _script(text: str) -> str:
    # A block that begins with a blank would need its indentation told; one that ends otherwise, how it ends.
    if _BLOCK.fullmatch(text) and text[:1] not in " \n\t" and text.endswith("\n") and not text.endswith("\n\n"):
        return "run: |\n" + "\n".join(f"  {line}" if line else "" for line in text[:-1].split("\n"))
    quoted: str = yaml.safe_dump({"run": text}, default_style='"', width=2**31 - 1)
    return quoted.replace('"run"', "run", 1).rstrip("\n")


def _visible(text: str) -> str:
    return _UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
