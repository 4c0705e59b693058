"""A program that has torch loaded and forks its ranks, asked for one job after the other: a line each way, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Measured = Callable[..., dict[str, Any]]  # the fixture of that name


class Served:
    """Started once for many jobs: loading torch takes longer than most of them. Close it at the end."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._program = self._started()

    def _started(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", f"tests.train.{self._module}"]
        return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **given: Any) -> dict[str, Any]:
        """What the program says of this job."""
        if self._program.poll() is not None:
            self._program = self._started()
        assert self._program.stdin is not None and self._program.stdout is not None
        try:
            self._program.stdin.write(json.dumps(given) + "\n")
            self._program.stdin.flush()
            line = self._program.stdout.readline()
            assert line, "the program has ended; its error is above"
            answer: dict[str, Any] = json.loads(line)
        except BaseException:  # the time of a test is over, too: the next one must not get this one's answer
            self.close()
            raise
        return answer

    def close(self) -> None:
        self._program.kill()
        self._program.communicate()
