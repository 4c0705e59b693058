"""Reading tables: text with named columns. What is wrong is said with its file, line and column."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from diamond.core.errors import InvalidInput


class Row:
    """One line of a table, its values found by the names of their columns."""

    def __init__(self, path: Path, line: int, values: Mapping[str, str]) -> None:
        self._path = path
        self._line = line
        self._values = values

    def text(self, column: str) -> str:
        value = self._values.get(column)
        if value is None or not value.strip():
            raise self.wrong(column, "is empty")
        return value.strip()

    def optional(self, column: str) -> str:
        return (self._values.get(column) or "").strip()

    def number(self, column: str, *, least: float = -math.inf) -> float:
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise self.wrong(column, f"{text[:40]!r} is not a number") from None
        if not math.isfinite(value) or value < least:
            raise self.wrong(
                column, f"{text[:40]} is out of range" + ("" if least == -math.inf else f" (>= {least:g})")
            )
        return value

    def whole(self, column: str, *, least: int = 0) -> int:
        value = self.number(column, least=least)
        if value != int(value):
            raise self.wrong(column, f"{value:g} is not a whole number")
        return int(value)

    def wrong(self, column: str, message: str) -> InvalidInput:
        return InvalidInput(f"{self._path.name}, line {self._line}, column {column}: {message}", hint=str(self._path))


def read_csv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Lines of a CSV file whose first line names its columns, which must hold these."""
    with open_table(path) as file:
        reader = csv.DictReader(file)
        require_columns(path, reader.fieldnames or (), columns)
        for values in reader:
            yield Row(path, reader.line_num, values)


def open_table(path: Path) -> TextIO:
    try:
        return path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(
            f"{path}: cannot be read ({error.strerror})", hint="Name a file that exists and may be read."
        ) from None


def require_columns(path: Path, there: Sequence[str], wanted: Sequence[str], *, line: int = 1) -> None:
    missing = [name for name in wanted if name not in there]
    if missing:
        raise InvalidInput(
            f"{path.name}, line {line}: no column {', '.join(missing)}",
            hint=f"The columns are {', '.join(there) or 'none'}; needed are {', '.join(wanted)}.",
        )
