"""YAML as plain values, without any of YAML's surprises, and where in the file each of them stands.

Owns how text becomes a dictionary. Must not know what fields mean, with one exception: a variable's value and a label's
are text (`TEXT_FIELDS`), so that ``VERSION: 1.10`` does not arrive as 1.1.

Built on the parser's events instead of its loader, because everything that makes YAML dangerous happens after that:
tags, merge keys, ``on:`` becoming true, and aliases that expand to gigabytes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diamond.core.errors import InvalidInput, TooLarge

MAX_FILE_BYTES = 1024 * 1024
MAX_NODES = 100_000
MAX_DEPTH = 50
TEXT_FIELDS = re.compile(r"(?:image\.)?(?:envs|labels|variables)\..*")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Any] = {"": None, "~": None} | {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.capitalize(), word.upper())
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What sort of file it is, for messages."""

    name: str  # "a task file"
    given: str  # how a person gives one
    empty: str  # what it needs at least
    start: str  # how one begins


@dataclass(frozen=True)
class Document:
    """What a file says, and where: `positions` maps dotted field paths to (line, column), from 1."""

    path: str
    raw: dict[str, Any]
    positions: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def located(self, error: InvalidInput) -> InvalidInput:
        """The same error, saying where in the file its field stands."""
        name = error.field
        while name and name not in self.positions:
            name = name[: name.rindex("[")] if name.endswith("]") else name.rpartition(".")[0]
        line, column = self.positions.get(name, (1, 1))
        where = f"{self.path}, line {line}, column {column}"
        return type(error)(f"{error.message} ({where})", hint=error.hint, field=error.field)


def read_text(path: str | os.PathLike[str], kind: Kind) -> tuple[str, str, Path]:
    """A file's text, how to call the file, and the folder its relative paths are taken from; ``-`` is standard input.

    Raises:
        InvalidInput: naming the file, and the line where there is one.
    """
    shown = os.fspath(path)
    if shown == "-":
        shown, folder = "<stdin>", Path.cwd()
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        folder = Path(shown).expanduser().absolute().parent
        try:
            with open(Path(shown).expanduser(), "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            reason = {FileNotFoundError: "there is no such file", IsADirectoryError: "is a folder, not a file"}
            raise InvalidInput(
                f"{shown}: {reason.get(type(error), error.strerror or str(error))}", hint=kind.given
            ) from error
    if len(data) > MAX_FILE_BYTES:
        raise TooLarge(
            f"{shown} is larger than 1 MiB", hint=f"{kind.name} holds the description; put data into files beside it"
        )
    try:
        return data.decode("utf-8-sig"), shown, folder
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidInput(f"{shown}, line {line}: not UTF-8 text", hint="save the file as UTF-8") from error


def parse(text: str, path: str, kind: Kind) -> Document:
    """Turn YAML text into a dictionary of plain values. Raises InvalidInput with the place."""
    builder = _Builder(path, kind)
    try:
        value = builder.document(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else path
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise InvalidInput(f"{where}: this is not YAML: {what}", hint=_yaml_hint(what)) from error
    except yaml.YAMLError as error:  # a character YAML does not allow; carries no mark
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise InvalidInput(f"{path}, line {line}: a character that YAML does not allow") from error
    except RecursionError as error:
        raise InvalidInput(f"{path}: nested too deeply") from error
    if value is None:
        raise InvalidInput(f"{path} is empty", hint=kind.empty)
    if not isinstance(value, dict):
        raise InvalidInput(
            f"{path}, line 1: {kind.name} is a mapping of fields, not {_kind(value)}",
            hint=f"start with e.g.  {kind.start}",
        )
    return Document(path, value, builder.positions)


def absolute(source: str, folder: Path) -> str:
    """A local path taken from `folder`; ``~`` is the home folder."""
    return os.path.normpath(folder / os.path.expanduser(source))


class _Builder:
    """Values from parser events. Aliases share the value they name but are counted as if it were written again."""

    def __init__(self, path: str, kind: Kind) -> None:
        self.positions: dict[str, tuple[int, int]] = {}
        self._path = path
        self._name = kind.name
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._open: set[str] = set()
        self._count = 0

    def document(self, events: Iterator[Any]) -> Any:
        documents = 0
        value: Any = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._refuse(event, f"a second document begins here; {self._name} holds one", "remove the --- line")
                value = self._value(next(events), events, "", 0)
        return value

    def _value(self, event: Any, events: Iterator[Any], where: str, depth: int) -> Any:
        self.positions.setdefault(where, self._place(event))
        self._count_node(event)
        if depth > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} levels deep", "flatten it", where)
        anchor: str | None = event.anchor
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, str(anchor), where)
        if event.tag is not None:
            self._refuse(event, f"the tag {event.tag[:60]} is not allowed", "write the plain value", where)
        before = self._count
        if anchor:
            self._open.add(anchor)
        value: Any
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(events, where, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(events), yaml.SequenceEndEvent):
                value.append(self._value(item, events, f"{where}[{len(value)}]", depth + 1))
        else:
            value = self._scalar(event, where)
        if anchor:
            self._open.discard(anchor)
            self._anchors[anchor] = (value, self._count - before + 1)
        return value

    def _mapping(self, events: Iterator[Any], where: str, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            self._count_node(event)
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(event, "a field name must be plain text", "quote it", where)
            key = event.value
            if event.tag is not None:
                self._refuse(event, f"the tag {event.tag[:60]} is not allowed", "write the plain name", where)
            if event.implicit[0] and not isinstance(resolve(key), str) and key not in ("", "~"):
                self._refuse(event, f"the field name {key[:60]!r} is not text", "put quotes around it", where)
            if key in ("", "~", "<<") and event.implicit[0]:
                self._refuse(event, f"{key[:60]!r} is not a field name", "write every field out", where)
            inner = f"{where}.{key}" if where else key
            if key in value:
                line, _ = self.positions[inner]
                hint = f"it stands in line {line} already; remove one of the two"
                self._refuse(event, f"the field {key[:60]!r} is given twice", hint, where)
            self.positions[inner] = self._place(event)
            value[key] = self._value(next(events), events, inner, depth + 1)
        return value

    def _alias(self, event: Any, anchor: str, where: str) -> Any:
        if anchor in self._open:
            self._refuse(event, f"*{anchor[:60]} contains itself", "write the value out", where)
        if anchor not in self._anchors:
            self._refuse(event, f"*{anchor[:60]} names nothing defined above", "", where)
        value, size = self._anchors[anchor]
        self._count += size
        self._count_node(event)
        return value

    def _scalar(self, event: Any, where: str) -> Any:
        if not event.implicit[0]:
            return event.value  # quoted, or a block
        value = resolve(event.value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and TEXT_FIELDS.fullmatch(where):
            return event.value
        return value

    def _count_node(self, event: Any) -> None:
        self._count += 1
        if self._count > MAX_NODES:
            self._refuse(event, f"expands to more than {MAX_NODES} values", "write a smaller file")

    def _place(self, event: Any) -> tuple[int, int]:
        return event.start_mark.line + 1, event.start_mark.column + 1

    def _refuse(self, event: Any, message: str, hint: str, where: str = "") -> None:
        line, column = self._place(event)
        raise InvalidInput(f"{message} ({self._path}, line {line}, column {column})", hint=hint, field=where)


def resolve(text: str) -> Any:
    """A plain scalar by YAML 1.2's core rules: no yes/no/on/off, no dates, no base-60 numbers."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) and len(text) < 400:
        return int(text)
    if _FLOAT.fullmatch(text) and len(text) < 400:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"a single value ({str(value)[:40]!r})"


def _yaml_hint(problem: str) -> str:
    if "'\\t'" in problem:
        return "indent with spaces: YAML does not allow tabs"
    if "mapping values are not allowed" in problem:
        return "a colon inside text needs quotes; several lines of text need `|` after the field name"
    return "check the indentation and the quotes around this place"
