"""Identifiers: a three-letter prefix that says what it names, then time and randomness.

Ids sort by creation time, so tables keyed by them stay in insertion order.
"""

from __future__ import annotations

import re
import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u to misread
ID_PATTERN = re.compile(r"^[a-z]{3}_[0-9a-z]{8,40}$")


def _base32(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, rest = divmod(number, 32)
        digits.append(_ALPHABET[rest])
    return "".join(reversed(digits))


def new_id(prefix: str) -> str:
    """A fresh id such as ``tsk_01kbx3v9qz8m2c4d6``: 9 characters of milliseconds, 9 of chance."""
    assert len(prefix) == 3 and prefix.isalpha(), prefix
    return f"{prefix}_{_base32(time.time_ns() // 1_000_000, 9)}{_base32(secrets.randbits(45), 9)}"


def is_id(text: str, prefix: str | None = None) -> bool:
    return bool(ID_PATTERN.fullmatch(text)) and (prefix is None or text.startswith(prefix + "_"))
