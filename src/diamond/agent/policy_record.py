"""Which rules were in force at an endpoint, and since when: policy.jsonl in the agent's home, a line for each change.

A change while no agent ran is noted by the next one. Must not keep an agent from its work: what cannot be written is a
warning.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from diamond.core.rundir import moment, read_small, write_atomic

log = logging.getLogger(__name__)

RECORD = "policy.jsonl"
_MAX_BYTES = 4 * 1024 * 1024
_MAX_LINES = 200


class PolicyRecord:
    """Of one home."""

    def __init__(self, home: Path) -> None:
        self._path = home / RECORD
        self.warning = ""
        self.changed_at = 0.0

    def note(self, rules: Mapping[str, str], files: Sequence[str]) -> None:
        """These rules hold from now on, if they did not before."""
        lines = (read_small(self._path, _MAX_BYTES) or b"").splitlines()[-_MAX_LINES + 1 :]
        last = _read(lines[-1]) if lines else {}
        if last.get("rules") == dict(rules) and last.get("files") == list(files):
            self.changed_at = _when(last)
            return
        self.changed_at = round(time.time(), 3)
        line = {"at": self.changed_at, "files": list(files), "rules": dict(rules)}
        log.info("rules in force: %s (from %s)", dict(rules), ", ".join(files) or "no file")
        try:
            write_atomic(self._path, b"\n".join([*lines, json.dumps(line).encode(), b""]))
            self.warning = ""
        except OSError as error:
            self.warning = f"{RECORD} cannot be written: {error.strerror}"
            log.warning("%s", self.warning)


def _read(line: bytes) -> dict[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _when(line: Mapping[str, object]) -> float:
    try:
        return moment(line.get("at"))
    except ValueError:
        return 0.0
