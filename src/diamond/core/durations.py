"""Lengths of time as people write them: ``90``, ``"90s"``, ``"2h30m"``, ``"1d"``, ``"02:30:00"``, ``"1-12:00:00"``."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WORDS = re.compile(r"(?:(\d+(?:\.\d+)?)\s*([smhdw])\s*)+", re.IGNORECASE)
_WORD = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{1,2}):(\d{1,2})")
MAX_DURATION_S = 366 * 86400


def parse_duration(raw: object) -> int:
    """Seconds, rounded up to at least one.

    Raises:
        ValueError: with a sentence that shows the accepted forms.
    """
    seconds = _seconds(raw)
    if not 1 <= seconds <= MAX_DURATION_S:
        raise ValueError(f"must be between 1 second and 366 days, not {str(raw)[:40]}")
    return int(seconds)


def _seconds(raw: object) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, str) and len(raw) <= 40:
        text = raw.strip()
        if text.isdecimal():
            return float(text)
        if clock := _CLOCK.fullmatch(text):
            days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
            return days * 86400 + hours * 3600 + minutes * 60 + rest
        if _WORDS.fullmatch(text):
            return sum(float(n) * _UNITS[unit.lower()] for n, unit in _WORD.findall(text))
    raise ValueError(f'{str(raw)[:40]!r} is not a length of time; write 90 (seconds), "30m", "2h30m" or "1-12:00:00"')


def format_duration(seconds: float) -> str:
    """Short text for people: ``42s``, ``3m 05s``, ``2h 30m``, ``1d 04h``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
