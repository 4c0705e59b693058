"""How the value that proves a form ours is written into pages: differently each time.

Pages are compressed. Were the value the same in each, somebody who can make a browser ask for pages with words of their
choice in them, and sees how long the answers are, could guess it letter by letter (the attack known as BREACH).
"""

from __future__ import annotations

import secrets


def masked(token: str) -> str:
    """`token`, in hexadecimal digits, hidden under a mask that stands before it."""
    value = bytes.fromhex(token)
    mask = secrets.token_bytes(len(value))
    return mask.hex() + _both(mask, value).hex()


def bare(given: str) -> str:
    """The token again. What was never masked is what it is; what is neither is no token."""
    try:
        data = bytes.fromhex(given)
    except ValueError:
        return ""
    half = len(data) // 2
    return _both(data[:half], data[half:]).hex() if len(data) == 2 * _BYTES else data.hex()


_BYTES = 32  # of a SHA-256


def _both(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
