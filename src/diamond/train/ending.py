"""When a training process is to end before its work is done, and how it says that it wants to go on.

Two things announce the end: a signal (the scheduler's warning, or whoever stops the job) and the clock, where the
scheduler tells when the job ends. Standard library only, Python 3.8 syntax.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

CONTINUE = 85  # the exit code that makes Diamond start the next job
MARGIN_S = 5.0  # before the end of the job: for what nobody measured
_STOPS = (signal.SIGUSR1, signal.SIGTERM)


def job_ends_at() -> float | None:
    """When the scheduler ends this job, in seconds since 1970, where it says so."""
    for name in ("DIAMOND_ENDS_AT", "SLURM_JOB_END_TIME"):
        try:
            return float(os.environ[name])
        except (KeyError, ValueError):
            continue
    return None


class Ending:
    """Listens between `listen` and `leave_alone`; what it hears is only noted, and acted upon between two steps."""

    def __init__(self) -> None:
        self.heard = 0  # the number of the signal that came
        self._told = False
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        for number in _STOPS:
            self._handlers[number] = signal.signal(number, self._note)

    def leave_alone(self) -> None:
        """Give the signals back to whoever had them."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.heard = number

    @property
    def is_final(self) -> bool:
        """Whether to end at what was heard. Schedulers warn up to a minute early: where it is known when the job ends,
        the clock decides; who means it at once sends SIGTERM."""
        return bool(self.heard) and (self.heard != signal.SIGUSR1 or job_ends_at() is None)

    def is_news(self) -> bool:
        """Once after a warning: time to save, in case what follows leaves none (a preemption, say)."""
        news, self._told = bool(self.heard) and not self._told, self._told or bool(self.heard)
        return news

    def is_near(self, needed_s: float) -> bool:
        """Whether saving, which takes `needed_s` at worst, would not end in time if it began any later."""
        ends = job_ends_at()
        return ends is not None and time.time() + needed_s + MARGIN_S > ends


def exit_code(number: int, *, is_main: bool) -> int:
    """With which code to end, so that whoever started this process starts it again: `number` is why it ends."""
    path = os.environ.get("DIAMOND_CONTINUE_FILE")
    if path is None:
        if is_main and number == signal.SIGUSR1:
            _note_out_of_time()
        return 128 + number
    if is_main:
        Path(path).touch()
    return CONTINUE


def _note_out_of_time() -> None:
    """For the agent, to which the code alone would mean that somebody's signal ended the program."""
    folder = os.environ.get("DIAMOND_RUN_DIR")
    if folder and job_ends_at() is not None:
        with contextlib.suppress(OSError):
            Path(folder, "out-of-time").touch()
