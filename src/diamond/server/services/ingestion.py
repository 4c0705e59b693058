"""How fast agents may send, and how full the disk may get by what they and others send.

Rates are of bytes and of calls, for each endpoint, and of bytes for each job; counted in this process, so that several
workers together let as many times as much through. Whoever has been sending for a while at less than the rate may send
much at once. An endpoint over its rate is told when to call again (429); of a job over its own, nothing is taken for a
moment while other jobs of the same report are. Agents keep what was not taken, and send it again.

Below a reserve of free space nothing large is taken (507): what is left is for the database, so that people can sign
in, launch, stop, and remove what fills the disk.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from diamond.core.errors import RateLimited, StorageFull
from diamond.core.quotas import shown
from diamond.server.services.allowances import Caps

_MAX_KEYS = 20_000
_LOOK_EVERY_S = 1.0
_RETRY_S = 15.0
_HELLOS_PER_S = 0.2
_HELLOS_AT_ONCE = 30.0
_FORGET_S = 300.0  # by then whoever was quiet may send as much as at first
RESERVE_FRACTION = 20  # of a small file system, no more than this part is kept free
BURST_S = 8.0  # so many seconds' worth may come at once


class Ingestion:
    """One per process. Thread-safe."""

    def __init__(self, caps: Caps, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._caps = caps
        self._root = root
        self._clock = clock
        self._lock = threading.Lock()
        self._left: dict[tuple[str, str], tuple[float, float]] = {}  # what may still come, as of when
        self._free = (float("-inf"), 0)

    def call(self, endpoint_id: str) -> None:
        """An agent calls.

        Raises:
            RateLimited: it has called too often lately.
        """
        wait_s = self._wait("calls", endpoint_id, 1, self._caps.calls_per_s)
        if wait_s:
            raise _too_fast(f"this endpoint's agent calls more than {self._caps.calls_per_s:g} times a second", wait_s)

    def hello(self, endpoint_id: str) -> None:
        """An agent introduces itself, which it does at its start and when its facts change; taking them in is work.

        Raises:
            RateLimited: it has done so too often lately.
        """
        wait_s = self._wait("hello", endpoint_id, 1, _HELLOS_PER_S, burst=_HELLOS_AT_ONCE)
        if wait_s:
            raise _too_fast("this endpoint's agent introduces itself again and again", wait_s)

    def report(self, endpoint_id: str, num_bytes: int) -> None:
        """An agent sends bytes of streams.

        Raises:
            RateLimited: it has sent too much lately; nothing of this was counted.
            StorageFull: there is no more room than the reserve.
        """
        if num_bytes:
            self.check_reserve(num_bytes)
            rate = self._caps.endpoint_bytes_per_s
            wait_s = self._wait("endpoint", endpoint_id, num_bytes, rate)
            if wait_s:
                text = f"this endpoint's jobs log more than {shown('storage_bytes', rate)} a second"
                raise _too_fast(text, wait_s)

    def takes(self, job_id: str, num_bytes: int) -> bool:
        """Whether these bytes of a job are taken now; not, if it has sent too much lately."""
        return not self._wait("job", job_id, num_bytes, self._caps.job_bytes_per_s)

    def check_reserve(self, more_bytes: int = 0) -> None:
        """Raises StorageFull where, with so many bytes more, less than the reserve would be free."""
        if self._free_bytes() < more_bytes:
            error = StorageFull(
                "the server's disk is nearly full: it takes no files and logs until there is room again",
                hint="what is small still works: remove tasks (`diamond rm`) or images, or have the operator make room",
            )
            error.retry_after_s = _RETRY_S
            raise error

    def _free_bytes(self) -> int:
        """Beyond the reserve; looked up once a second."""
        now = self._clock()
        looked_at, free = self._free
        if now - looked_at >= _LOOK_EVERY_S:
            found = os.statvfs(self._root if self._root.exists() else self._root.parent)
            reserve = min(self._caps.reserve_bytes, found.f_blocks * found.f_frsize // RESERVE_FRACTION)
            free = found.f_bavail * found.f_frsize - reserve
            self._free = (now, free)
        return free

    def _wait(self, what: str, key: str, amount: float, rate: float, *, burst: float | None = None) -> float:
        """Take so much of what may come; or, where that is used up, how many seconds until there is some again.

        What is left may become less than nothing: one report, however large, is never too large.
        """
        now = self._clock()
        most = rate * BURST_S if burst is None else burst
        with self._lock:
            if len(self._left) >= _MAX_KEYS:
                self._left = {known: (left, at) for known, (left, at) in self._left.items() if now - at < _FORGET_S}
            left, at = self._left.get((what, key), (most, now))
            left = min(most, left + (now - at) * rate)
            if left <= 0:
                return max(0.1, -left / rate)
            self._left[what, key] = (left - amount, now)
            return 0.0


def _too_fast(text: str, wait_s: float) -> RateLimited:
    error = RateLimited(text, hint=f"nothing is lost: send it again in {max(1, round(wait_s))} seconds")
    error.retry_after_s = wait_s
    return error
