"""Identifiers: a three-letter prefix that says what it names, then time and randomness.

Ids sort by creation time, so tables keyed by them stay in insertion order; those of one process are in the very order
in which they were made, also within a millisecond.
"""

from __future__ import annotations

import re
import secrets
import threading
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u to misread
ID_PATTERN = re.compile(r"^[a-z]{3}_[0-9a-z]{8,40}$")


def _base32(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, rest = divmod(number, 32)
        digits.append(_ALPHABET[rest])
    return "".join(reversed(digits))


_CHANCE_BITS = 45
_last = 0
_lock = threading.Lock()


def _next_number() -> int:
    """Milliseconds, then chance; within one millisecond a random step beyond the last one."""
    global _last
    fresh = (time.time_ns() // 1_000_000 << _CHANCE_BITS) | secrets.randbits(_CHANCE_BITS)
    with _lock:
        is_new = fresh >> _CHANCE_BITS > _last >> _CHANCE_BITS
        _last = fresh if is_new else _last + 1 + secrets.randbits(24)
        return _last


def new_id(prefix: str) -> str:
    """A fresh id such as ``tsk_01kbx3v9qz8m2c4d6``: 9 characters of milliseconds, 9 of chance."""
    assert len(prefix) == 3 and prefix.isalpha(), prefix
    return f"{prefix}_{_base32(_next_number(), 18)}"


def is_id(text: str, prefix: str | None = None) -> bool:
    return bool(ID_PATTERN.fullmatch(text)) and (prefix is None or text.startswith(prefix + "_"))
