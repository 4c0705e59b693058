"""Waiting for a condition instead of sleeping and hoping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Beside other suites everything takes longer. What never comes still fails, only later.
PATIENCE = 3.0 if "PYTEST_XDIST_WORKER" in os.environ else 1.0


def eventually(check: Callable[[], T], *, within_s: float = 30.0, every_s: float = 0.05, what: str = "") -> T:
    """The first truthy answer of `check`; an AssertionError naming the last answer when none came in time."""
    within_s *= PATIENCE
    deadline = time.monotonic() + within_s
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what or check}; last answer: {answer!r}")
        time.sleep(every_s)
