"""Lines that programs and samplers wrote, read into points: for each key, records of (step, time, value).

A pure function over bytes. What is unusable is counted, never guessed at. A job has a bounded number of keys, and keys
are of bounded length: a program that invents a name on every line gets the first ones drawn and the rest counted.
"""

from __future__ import annotations

import json
import math
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

MAX_KEYS = 512  # of one job, both streams together
MAX_KEY_CHARS = 200
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(slots=True)
class Parsed:
    """Columns of (step, time, value, step, time, …) by key; how many lines were understood, what was unusable.

    Attributes:
        dropped: lines that were malformed, and values that were no number or came under an unusable key.
        crowded_out: among those, values under a key that was one too many.
    """

    columns: dict[str, array[float]] = field(default_factory=dict)
    lines: int = 0
    dropped: int = 0
    crowded_out: int = 0


def parse(raw: bytes, first_line: int, known: Collection[str], room: int) -> Parsed:
    """What these complete lines say.

    Args:
        first_line: the number of lines understood before, which is the step of the first line that names none.
        known: keys there are already; `room` is for how many others.
    """
    # Bytes that are not UTF-8 become lone surrogates, which are no part of JSON and are refused in keys.
    lines = raw.decode(errors="surrogateescape").split("\n")
    # One line at a time: the decoder's errors count the lines before them, which is quadratic over a whole batch.
    decode = json.JSONDecoder().raw_decode
    found = Parsed()
    columns = found.columns
    extend: dict[str, Callable[[Iterable[float]], None]] = {}
    for line in map(str.strip, lines):
        if not line:
            continue
        try:
            record, end = decode(line)
            if end != len(line) or type(record) is not dict:
                raise ValueError("not one object")
            step, t = record.pop("step", None), record.pop("t", None)
            step = float(first_line + found.lines) if step is None else _finite(step)
            t = math.nan if t is None else _finite(t)
        except (ValueError, OverflowError, RecursionError):
            found.dropped += 1
            continue
        found.lines += 1
        for key, value in record.items():
            if type(value) is not float:
                value = _as_float(value)
                if value is None:
                    found.dropped += 1
                    continue
            add = extend.get(key)
            if add is None:
                if key not in known:
                    if not _is_usable(key) or room == 0:
                        found.crowded_out += room == 0
                        found.dropped += 1
                        continue
                    room -= 1
                columns[key] = array("d")
                add = extend[key] = columns[key].extend
            add((step, t, value))
    return found


def _finite(value: object) -> float:
    # Exact types: to Python, true is a number.
    if type(value) is float or type(value) is int:
        number = float(value)
        if math.isfinite(number):
            return number
    raise ValueError("not a finite number")


def _as_float(value: object) -> float | None:
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return None
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def _is_usable(key: str) -> bool:
    # Lone surrogates (Cs), which JSON can spell, could not be sent on as UTF-8.
    return 0 < len(key) <= MAX_KEY_CHARS and not any(unicodedata.category(char) in ("Cc", "Cs") for char in key)
