"""Where short looks at the database are done: with SQLite, in the event loop itself.

There a look takes a millisecond and waits for nobody (in WAL mode readers never wait for writers), while handing it to
a thread and back takes about as long again, and threads that all want the interpreter hold each other up. What turns
out to take long is done in threads for a while, longer if it does so again, so that no slow look keeps holding up
everybody else's requests. With PostgreSQL every look waits for another process, so all are done in threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

P = ParamSpec("P")
T = TypeVar("T")
TOO_LONG_S = 0.25
FIRST_REST_S = 10.0
LONGEST_REST_S = 600.0


class Looks:
    """One per process. For what only reads: nothing that may wait for a writer belongs here."""

    def __init__(self, *, in_loop: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            in_loop: whether looks may be done in the event loop at all.
            clock: seconds, from anywhere.
        """
        self._in_loop = in_loop
        self._clock = clock
        self._resting: dict[Callable[..., Any], tuple[float, float]] = {}  # until when, and for how long

    async def look(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `call` gives. Whether it may be done here is remembered by the function, not by what it is given."""
        began = self._clock()
        until, rest_s = self._resting.get(call, (0.0, 0.0))
        if not self._in_loop or began < until:
            return await run_in_threadpool(call, *args, **kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            now = self._clock()
            if now - began > TOO_LONG_S:
                again = now - until < rest_s  # soon after it rested
                rest_s = min(2 * rest_s, LONGEST_REST_S) if again else FIRST_REST_S
                self._resting[call] = (now + rest_s, rest_s)
