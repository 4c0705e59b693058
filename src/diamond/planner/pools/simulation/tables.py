"""Reading tables: text with named columns. What is wrong is said with its file, line and column."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from diamond.core.errors import InvalidInput

MOST = 10**9
"""No whole number of a table is larger: so many GPUs or samples there are nowhere."""
LONGEST_LINE = 100_000  # bytes; a longer one is no table's, and must not fill the memory
_BYTE_ORDER_MARK = "\ufeff"


class Row:
    """One line of a table, its values found by the names of their columns."""

    def __init__(self, path: Path, line: int, values: Mapping[str, str]) -> None:
        self.line = line
        self._path = path
        self._values = values

    def text(self, column: str) -> str:
        value = self._values.get(column)
        if value is None or not value.strip():
            raise self.wrong(column, "is empty")
        return value.strip()

    def optional(self, column: str) -> str:
        return (self._values.get(column) or "").strip()

    def number(self, column: str, *, least: float = -math.inf, most: float = math.inf) -> float:
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise self.wrong(column, f"{text[:40]!r} is not a number") from None
        if not math.isfinite(value) or not least <= value <= most:
            raise self.wrong(column, f"{text[:40]} is out of range{_bounds(least, most)}")
        return value

    def whole(self, column: str, *, least: int = 0) -> int:
        value = self.number(column, least=least, most=MOST)
        if value != int(value):
            raise self.wrong(column, f"{value:g} is not a whole number")
        return int(value)

    def wrong(self, column: str, message: str, *, hint: str = "") -> InvalidInput:
        return InvalidInput(
            f"{self._path.name}, line {self.line}, column {column}: {message}",
            hint=hint or f"Correct this line of {self._path}, or leave it out.",
        )


def _bounds(least: float, most: float) -> str:
    if least == -math.inf:
        return ""
    return f" (>= {least:g})" if most == math.inf else f" ({least:g} to {most:,.0f})"


def read_csv(path: Path, columns: Sequence[str], lines: Iterable[str] | None = None) -> Iterator[Row]:
    """Lines of a CSV file whose first line names its columns, which must hold these.

    Args:
        lines: of that file, where they are being read already.
    """
    reader = csv.DictReader(lines_of(path) if lines is None else lines)
    try:
        require_columns(path, reader.fieldnames or (), columns)
        for values in reader:
            if None in values:
                raise too_many(path, reader.line_num, len(reader.fieldnames or ()))
            yield Row(path, reader.line_num, values)
    except csv.Error as error:
        raise InvalidInput(f"{path.name}, line {reader.line_num}: {error}", hint="Is a quotation mark open?") from None


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a text. It is opened once and read as it comes: what another program writes into a pipe will do."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
                yield _decoded(path, number, line)
    except (OSError, ValueError) as error:  # a ValueError: a path with a NUL in it
        raise InvalidInput(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})",
            hint="Name a file that exists and may be read.",
        ) from None


def _decoded(path: Path, number: int, line: bytes) -> str:
    where = f"{path.name}, line {number}"
    if len(line) > LONGEST_LINE:
        raise InvalidInput(f"{where}: longer than {LONGEST_LINE} bytes", hint="Name a table, as text.")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(f"{where}: not UTF-8", hint="Name a table, as text in UTF-8.") from None
    if "\0" in text:
        raise InvalidInput(f"{where}: holds a NUL", hint="Name a table, as text in UTF-8.")
    return text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text


def too_many(path: Path, line: int, columns: int) -> InvalidInput:
    return InvalidInput(
        f"{path.name}, line {line}: more values than the {columns} columns",
        hint="Does a value hold what separates the columns? Quote it (CSV), or leave its column out (sacct -o …).",
    )


def require_columns(path: Path, there: Sequence[str], wanted: Sequence[str], *, line: int = 1) -> None:
    """Each of them, once."""
    missing = [name for name in wanted if name not in there]
    if missing:
        raise InvalidInput(
            f"{path.name}, line {line}: no column {', '.join(missing)}",
            hint=f"The columns are {_listed(there)}; needed are {', '.join(wanted)}.",
        )
    twice = [name for name in wanted if list(there).count(name) > 1]
    if twice:
        raise InvalidInput(f"{path.name}, line {line}: column {twice[0]} is there twice", hint="Leave one of them out.")


def _listed(names: Sequence[str], most: int = 20) -> str:
    if not names:
        return "none"
    return ", ".join(name[:40] for name in names[:most]) + (", …" if len(names) > most else "")
