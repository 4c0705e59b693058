"""What one line of the table of symptoms holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """One thing that goes wrong.

    Attributes:
        patterns: searched line by line; the group `what` names the package, file or program it is about.
        message: one sentence; `{what}` stands for that name.
        instead: another hint for "venv" (the builder) or "batch" (where it was built).
        stages: where it can be meant; empty: anywhere.
        after: how many lines below the match belong to it.
        before: how many lines above it do.
    """

    patterns: tuple[str, ...]
    message: str
    hint: str
    instead: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    after: int = 0
    before: int = 0

    def find(self, text: str, stage: str) -> list[re.Match[str]]:
        """Where it shows, all by the first of its patterns that is there."""
        if self.stages and stage not in self.stages:
            return []
        for pattern in self.patterns:
            if found := list(re.finditer(pattern, text, re.MULTILINE | re.IGNORECASE)):
                return found
        return []
