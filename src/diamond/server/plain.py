"""JSON as bytes, from core's dataclasses."""

from __future__ import annotations

import json
from typing import Any

from diamond.core.codec import shallow


def dumps(value: Any) -> bytes:
    # Most of an answer is plain already: json itself walks it, and asks only about what it does not know.
    # Lone surrogates cannot be written as UTF-8; user text is checked on the way in, agents' detail lines may not be.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=shallow)
    return text.encode("utf-8", errors="replace")
