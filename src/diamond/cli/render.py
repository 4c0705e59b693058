"""How things look in a terminal: safe text, amounts, times, sparklines, plots and tables.

Whatever came from a task, a server or a file passes `clean` (or `clean_log`) before it is shown: a name or a log line
must not be able to move the cursor, change the title or forge other output. Standard library only at module level.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import IO, Any

from diamond.core.durations import format_duration as format_duration

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Whole escape sequences: strings (OSC, DCS, …) to their end, control sequences, and two-byte ones.
_ESCAPE = re.compile(
    r"\x1b(?:[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\[[0-?]*[ -/]*[@-~]?|[ -/]*[0-~]?)|\x9b[0-?]*[ -/]*[@-~]?"
)
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_BARS = "▁▂▃▄▅▆▇█"
_GAP = 2  # blanks between columns
STATE_COLOURS = {
    "PENDING": "33",
    "PLANNED": "33",
    "STAGING": "33",
    "QUEUED": "33",
    "RUNNING": "36",
    "FINISHING": "36",
    "SUCCEEDED": "32",
    "FAILED": "31",
    "CANCELLED": "35",
    "BUILDING": "36",
    "READY": "32",
    "GONE": "2",
    "ok": "32",
    "online": "32",
    "warn": "33",
    "fail": "31",
    "offline": "31",
    "up": "32",
    "down": "31",
    "info": "2",
}


def clean(text: object) -> str:
    """One line of harmless text: no escape sequences, control or direction-changing characters."""
    return " ".join(_CONTROL.sub("", _ESCAPE.sub("", str(text))).split("\n")).replace("\t", " ")


def clean_block(text: object) -> str:
    """Several lines of harmless text; line breaks and tabs stay."""
    return _CONTROL.sub("", _ESCAPE.sub("", str(text).replace("\r\n", "\n")))


def clean_log(line: str) -> str:
    """A log line for the terminal: colours stay and end with the line; all else that is not text goes.

    A carriage return means what it means on a terminal: what follows replaces what stood before (progress bars).
    """
    line = line.rstrip("\r\n")
    if "\r" in line:
        line = next((part for part in reversed(line.split("\r")) if part.strip()), "")
    if "\x1b" not in line:
        return _CONTROL.sub("", line)
    shown: list[str] = []
    end = 0
    for found in _ESCAPE.finditer(line):
        shown += [_CONTROL.sub("", line[end : found.start()]), found[0] if _SGR.fullmatch(found[0]) else ""]
        end = found.end()
    text = "".join(shown) + _CONTROL.sub("", line[end:])
    return text + "\x1b[0m" if "\x1b[" in text else text


def use_colour(stream: IO[str] | None = None) -> bool:
    stream = stream or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: IO[str] | None = None) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour and use_colour(stream) else text


def state_word(state: str) -> str:
    return paint(state, STATE_COLOURS.get(state, ""))


def size(num_bytes: float) -> str:
    """``0 B``, ``812 B``, ``1.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or abs(num_bytes) >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


def amount(num_bytes: float) -> str:
    """An amount somebody chose: `size` without the ``.0`` of a round number."""
    return size(num_bytes).replace(".0 ", " ")


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 task``, ``2 tasks``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def measured(key: str, value: float) -> str:
    """The value of a metric; bytes as people read them."""
    in_bytes = key.partition("@")[0].endswith("_bytes") and math.isfinite(value)
    return size(value) if in_bytes else number(value)


def number(value: float) -> str:
    """A measured value in at most about eight characters."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def ago(at: float | None, now: float | None = None) -> str:
    """``3m ago``; the coarse unit alone, since nobody needs the seconds of yesterday."""
    if not at:
        return "never"
    seconds = max(0.0, (time.time() if now is None else now) - at)
    return "just now" if seconds < 2 else f"{format_duration(seconds).split()[0]} ago"


def since(at: float | None, now: float | None = None) -> str:
    """How long ago, without the word: ``3m``."""
    seconds = max(0.0, (time.time() if now is None else now) - (at or 0.0))
    return format_duration(seconds).split()[0]


def countdown(seconds: float) -> str:
    """Time that is left, rounded up: what says 0s should have happened."""
    return format_duration(max(1, math.ceil(seconds)))


def written_duration(seconds: float) -> str:
    """A length of time as task files have it: ``10m``, ``1h30m``, ``90`` seconds as ``1m30s``."""
    left, parts = int(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        whole, left = divmod(left, length)
        parts.append(f"{whole}{unit}" if whole else "")
    return "".join(parts) or "0s"


def clock(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""


def duration(started_at: float | None, ended_at: float | None, now: float | None = None) -> str:
    if not started_at:
        return ""
    end = ended_at or (time.time() if now is None else now)
    return format_duration(max(0.0, end - started_at))


def expected(at: float, now: float | None = None, who: str = "the scheduler") -> str:
    """When something will start, as somebody else estimates: the clock, and how long that is from now."""
    now = time.time() if now is None else now
    if at <= now:
        return f"should start any moment ({who}'s estimate)"
    minutes = math.ceil((at - now) / 60)
    there, here = time.localtime(at), time.localtime(now)
    day = "" if there[:3] == here[:3] else "%a " if at - now < 6 * 86400 else "%Y-%m-%d "
    left = f"{minutes} min" if minutes < 120 else format_duration(at - now)
    return f"starts about {time.strftime(f'{day}%H:%M', there)}, in {left} ({who}'s estimate)"


def gauge(fraction: float, width: int = 10) -> str:
    """A bar that is filled to a fraction; what is not nothing shows, and only what is full looks full."""
    filled = min(width, max(0, round(fraction * width)))
    filled = max(filled, 1) if fraction > 0 else 0
    filled = min(filled, width - 1) if fraction < 1 else width
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """A curve one line high. NaN and infinite values are blanks; a constant curve is a middle line."""
    if not values or width < 1:
        return ""
    if len(values) > width:  # the mean of each slice, so that the whole curve shows
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    # Halved first: the difference of two large numbers may be infinite.
    span = high / 2 - low / 2

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return _BARS[min(7, int((value / 2 - low / 2) / span * 8))] if span > 0 else _BARS[3]

    return "".join(bar(value) for value in values)


def plot(
    xs: Sequence[float], ys: Sequence[float], *, width: int, height: int = 12, text: Callable[[float], str] = number
) -> list[str]:
    """A curve as lines of braille dots with its axes. Points must be finite. A single point stands in the middle.

    Args:
        text: how values of the vertical axis are written.
    """
    low, high = min(ys), max(ys)
    if high == low:
        low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
    labels = [text(high - (high - low) * row / (height - 1)) for row in range(height)]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 3)
    single = xs[-1] == xs[0]
    x_low, x_span = (xs[0] - 0.5, 1.0) if single else (xs[0], xs[-1] - xs[0])
    cells = [[0] * columns for _ in range(height)]
    dots = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    previous: tuple[int, int] | None = None
    for x, y in zip(xs, ys, strict=True):
        px = min(columns * 2 - 1, int((x - x_low) / x_span * (columns * 2 - 1)))
        py = min(height * 4 - 1, max(0, int((high - y) / (high - low) * (height * 4 - 1))))
        for qx, qy in _line(previous or (px, py), (px, py)):
            cells[qy // 4][qx // 2] |= dots[qx % 2][qy % 4]
        previous = (px, py)
    lines = []
    for row, cell in enumerate(cells):
        label = labels[row] if row % 4 == 0 or row == height - 1 else ""
        lines.append(f"{label:>{margin}} ┤" + "".join(chr(0x2800 + bits) if bits else " " for bits in cell).rstrip())
    left, right = number(xs[0]), number(xs[-1])
    lines.append(" " * margin + " └" + "─" * columns)
    lines.append(
        " " * (margin + 2)
        + (left.center(columns).rstrip() if single else left + right.rjust(max(1, columns - len(left))))
    )
    return lines


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for i in range(steps + 1):
        yield (
            round(start[0] + (end[0] - start[0]) * i / steps),
            round(start[1] + (end[1] - start[1]) * i / steps),
        )


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    flexible: Mapping[str, int] | None = None,
    droppable: Sequence[str] = (),
    indent: int = 0,
    below: Sequence[str] = (),
) -> list[str]:
    """Columns on standard output; ``>`` before a head means to the right. Gives back the heads that had no room.

    `below` has a text for each row, empty for most, that is put under it in lines of its own. Where a terminal is too
    narrow, `flexible` columns are shortened to no less than the width they map to, then `droppable` ones left out,
    first to last: half an id is of no use to anybody. In a pipe nothing is ever cut.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(highlight=False, no_color=not use_colour() or None, width=None if terminal else 10_000)
    widths = _fitting(heads, rows, flexible or {}, droppable, console.width - indent)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", show_edge=False)
    for index, width in widths.items():
        table.add_column(
            heads[index].removeprefix(">"),
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if heads[index].startswith(">") else "left",
            width=width,
        )
    for row in rows:
        table.add_row(*(_cell(row[index], Text) for index in widths))
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, indent), expand=False))
    for number, line in enumerate(captured.get().splitlines()):
        sys.stdout.write(line.rstrip() + "\n")
        if below and number and below[number - 1]:
            sys.stdout.writelines(_under(below[number - 1], console.width, indent + _GAP))
    return [head.removeprefix(">") for index, head in enumerate(heads) if index not in widths]


def _under(text: str, width: int, indent: int) -> Iterable[str]:
    import textwrap

    pad = " " * indent
    for line in textwrap.wrap(text, max(20, width - 1), initial_indent=f"{pad}↳ ", subsequent_indent=f"{pad}  "):
        yield line + "\n"


def _fitting(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    flexible: Mapping[str, int],
    droppable: Sequence[str],
    width: int,
) -> dict[int, int]:
    """The columns that fit beside each other, by index, and how wide each may be."""
    full = {index: _width(heads, rows, index) for index in range(len(heads))}
    for name in (*droppable, None):
        least = {index: min(size, flexible.get(heads[index], size)) for index, size in full.items()}
        spare = width - sum(least.values()) - _GAP * (len(least) - 1)
        if name is None or spare >= 0:
            break
        full = {index: size for index, size in full.items() if heads[index].removeprefix(">") != name}
    for index in least:  # what is left over goes to those that had to give, the first of them first
        more = min(max(0, spare), full[index] - least[index])
        least[index] += more
        spare -= more
    return least


def _width(heads: Sequence[str], rows: Sequence[Sequence[str]], index: int) -> int:
    from rich.cells import cell_len

    return max(cell_len(heads[index].removeprefix(">")), *(cell_len(row[index]) for row in rows), 1)


def _cell(value: str, text: Any) -> Any:
    """Text, so that square brackets in a name are square brackets; states get their colour."""
    colours = {"33": "yellow", "36": "cyan", "32": "green", "31": "red", "35": "magenta", "2": "dim"}
    return text(value, style=colours.get(STATE_COLOURS.get(value, ""), ""))
