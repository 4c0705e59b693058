"""A program that has torch loaded and forks its ranks, asked for one job after the other: a line each way, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
Measured = Callable[..., dict[str, Any]]  # the fixture of that name


class Served:
    """Started once for many jobs: loading torch takes longer than most of them. Close it at the end."""

    def __init__(self, program: str) -> None:
        self._program = subprocess.Popen(
            [sys.executable, str(FOLDER / program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **given: Any) -> dict[str, Any]:
        """What the program says of this job."""
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.write(json.dumps(given) + "\n")
        self._program.stdin.flush()
        line = self._program.stdout.readline()
        assert line, "the program has ended; its error is above"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.close()
        self._program.wait(30)
        self._program.stdout.close()
