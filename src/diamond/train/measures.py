"""Owns the lines about itself that a run writes for the planner (`write`): one JSON object each, to a file.

Must not slow or stop training: no network, no thread, no error reaches the caller. What is lost is lost: the next line
says as much a few seconds later. Standard library only, Python 3.8 syntax, because this file runs in the user's
environment.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

FILE = "DIAMOND_TRAIN_FILE"
MOST_BYTES = 8192  # of a line; readers pass over longer ones
_warned = False


def write(record: dict[str, Any]) -> bool:
    """Append a line; without a file to write to, nothing happens. Returns whether it is written."""
    path = os.environ.get(FILE)
    if not path:
        return False
    try:
        _append(path, line(record))
    except Exception as error:  # whatever it is, training is worth more than a line about it
        _warn(path, error)
        return False
    return True


def line(record: dict[str, Any]) -> bytes:
    """What is no number in JSON becomes null; if it is too long, what a long list says is left out."""
    whole = _plain(record)
    text = _text(whole)
    if len(text) > MOST_BYTES:
        text = _text({key: value for key, value in whole.items() if not isinstance(value, list)})
    if len(text) > MOST_BYTES:
        raise ValueError(f"a line of {len(text)} bytes is longer than {MOST_BYTES}")
    return text


def _text(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) and abs(value) < 1e8 else _large(value)
    return value


def _large(value: float) -> float | None:
    """Times since 1970 and counts of bytes need all their digits."""
    return value if math.isfinite(value) else None


def _append(path: str, data: bytes) -> None:
    at = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(at).st_size
        # A process that was killed, or a disk that was full, may have left part of a line: end it.
        if size and os.pread(at, 1, size - 1) != b"\n":
            data = b"\n" + data
        os.write(at, data)  # in one piece, so that lines of others do not come in between
    finally:
        os.close(at)


def _warn(path: str, error: Exception) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    reason = getattr(error, "strerror", None) or error
    try:
        sys.stderr.write(f"diamond.train: cannot write measurements to {path}: {reason}; training goes on\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed or absent: there is nobody to tell
