"""How often somebody may be wrong about a password or a code, by account and by address. Kept in this process.

An attempt counts before it is judged and is forgiven when it was right: many at once get no further than one by one.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diamond.core.errors import Forbidden, RateLimited, Unauthenticated

_MAX_KEYS = 20_000
_SWEEP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Limit:
    """`times` wrong ones within `within_s` seconds; then one has to wait."""

    what: str
    times: int
    within_s: float


# Of one account from one network, or in one browser that it knows: nobody elsewhere has a part in these.
PASSWORDS_OF_ACCOUNT = Limit(what="wrong passwords for this account", times=10, within_s=300.0)
PASSWORDS_OF_ACCOUNT_HOURLY = Limit(what="wrong passwords for this account in an hour", times=30, within_s=3600.0)
# From everywhere: who guesses from many networks is slowed, too. Networks and browsers the account knows are let by.
PASSWORDS_FROM_STRANGERS = Limit(
    what="wrong passwords for this account from networks it has not signed in from", times=100, within_s=3600.0
)
PASSWORDS_FROM_ADDRESS = Limit(what="wrong passwords from this address", times=30, within_s=300.0)
CODES_FROM_ADDRESS = Limit(what="wrong codes from this address", times=20, within_s=60.0)


class Throttle:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: dict[tuple[str, str], tuple[float, deque[float]]] = {}  # for how long it counts, and when it was
        self._swept_at = float("-inf")

    @contextmanager
    def trying(self, now: float, *keys: tuple[Limit, str]) -> Iterator[None]:
        """Around the judging of an attempt: Unauthenticated or Forbidden from inside counts against every key.

        Raises:
            RateLimited: one of the keys has been wrong too often lately; nothing was tried.
        """
        counted = [(limit, (limit.what, key)) for limit, key in keys]
        self._count(now, counted)
        try:
            yield
        except (Unauthenticated, Forbidden):
            raise
        except BaseException:
            self._forgive(now, counted)
            raise
        else:
            self._forgive(now, counted)

    def count(self, now: float, *keys: tuple[Limit, str]) -> None:
        """Something that counts each time it is done, right or wrong. Raises RateLimited once it is too often."""
        self._count(now, [(limit, (limit.what, key)) for limit, key in keys])

    def _count(self, now: float, counted: list[tuple[Limit, tuple[str, str]]]) -> None:
        with self._lock:
            for limit, key in counted:
                times = self._at.get(key, (0.0, deque()))[1]
                while times and now - times[0] >= limit.within_s:
                    times.popleft()
                if len(times) >= limit.times:
                    wait_s = limit.within_s - (now - times[0])
                    raise RateLimited(f"too many {limit.what}", hint=f"try again in {max(1, round(wait_s))} seconds")
            if len(self._at) >= _MAX_KEYS and now >= self._swept_at + _SWEEP_S:
                self._swept_at = now
                self._at = {key: found for key, found in self._at.items() if found[1] and now - found[1][-1] < found[0]}
            for limit, key in counted:
                self._at.setdefault(key, (limit.within_s, deque(maxlen=limit.times)))[1].append(now)

    def _forgive(self, now: float, counted: list[tuple[Limit, tuple[str, str]]]) -> None:
        with self._lock:
            for _, key in counted:
                times = self._at.get(key, (0.0, None))[1]
                if times and now in times:
                    times.remove(now)
                if not times:
                    self._at.pop(key, None)


def network_of(address: str) -> str:
    """What counts as one address: whoever has one of IPv6 has its whole /64."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network(f"{address}/64", strict=False)) if found.version == 6 else address
