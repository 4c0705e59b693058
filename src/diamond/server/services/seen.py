"""Forms that change something show what it was. Whoever sends one after somebody else's change is told, not obeyed.

Where a row counts its versions (templates, drafts) those are compared; here it is what the page showed, as a mark.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from diamond.core.codec import encode
from diamond.core.errors import Conflict

FIELD = "seen"
SEND_AGAIN = "what you wrote is still below, and not saved: send it again to put it in place of that"


def mark(*values: Any) -> str:
    """The same for the same values, and for no others."""
    text = json.dumps([encode(value) for value in values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check(given: str | None, what: str, now: str, *values: Any, hint: str = SEND_AGAIN) -> None:
    """In the transaction that changes `values`, with their rows locked. None as `given`: whoever asks saw no page.

    Args:
        what: names it at the beginning of a sentence: "these limits were".
        now: how it stands, for a person.

    Raises:
        Conflict: about the field `FIELD`: what was seen is not what is there.
    """
    if given is not None and given != mark(*values):
        raise Conflict(
            f"{what} changed meanwhile; now: {now or 'nothing'}",
            hint=hint,
            field=FIELD,
        )
