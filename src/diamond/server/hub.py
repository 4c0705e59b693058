"""Wake-ups: whoever changed something says so here; long polls and live streams wait here without holding a thread.

A wake-up carries no data, only "look again". The order *subscribe, look, wait* loses none: a change before the look is
seen by the look, a change after it finds the subscription. Must not know what a topic means, nor touch the database.

Topics in use: ``task:<id>``, ``endpoint:<id>``, ``events``, ``planning``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_MAX_TOLD = 50_000  # topics whose last wake-up is remembered


class Subscription:
    """One waiter's interest in some topics. Belongs to the event loop that made it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a wake-up since the last wait (or since subscribing); False when the time ran out.

        Returns at once, and True, while the hub is closing.
        """
        if not self._event.is_set() and not self._hub.closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._event.wait()
        woken = self._event.is_set() or self._hub.closing
        self._event.clear()
        return woken

    def _wake(self) -> None:
        self._event.set()


class Hub:
    """Wake-ups inside one process.

    `notify` and `close` may be called from any thread (not from a signal handler: they take a lock). Everything
    else belongs to the event loop. Tables of subscriptions are changed on the loop only; `notify` merely looks into
    them, which the interpreter lock makes safe.
    """

    #: A waiter looks again after this long even when nobody woke it, so that a lost wake-up costs seconds.
    recheck_s = 10.0

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._by_topic: dict[str, set[Subscription]] = {}
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._told_at: dict[str, float] = {}
        self._hears_since = time.time()

    @property
    def connected(self) -> bool:
        """Whether what other processes notify is heard here now."""
        return True

    @property
    def closing(self) -> bool:
        """True once the server is shutting down: waits end, streams should too."""
        return self._closing

    def start(self) -> None:
        """Bind to the running event loop. Calling it again on another loop, with nobody subscribed, rebinds."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            assert not self._by_topic, "a hub belongs to one event loop at a time"
            self._loop = loop

    def stop(self) -> None:
        """Let go of what `start` took. Blocks briefly; idempotent."""

    def notify(self, *topics: str) -> None:
        """Wake everybody subscribed to any of `topics`. Call it after the commit, never before."""
        self.wake_here(*topics)

    def wake_here(self, *topics: str) -> None:
        """The same, of this process alone."""
        if len(self._told_at) > _MAX_TOLD:
            self._forget()
        now = time.time()
        for topic in topics:
            self._told_at[topic] = now
        for listener in [one for topic in topics for one in self._listeners.get(topic, ())]:
            listener()
        wanted = [topic for topic in topics if topic in self._by_topic]
        if wanted:
            self._schedule(wanted)

    def told_since(self, moment: float, *topics: str) -> bool:
        """Whether somebody may have been woken for one of `topics` since then (seconds since 1970)."""
        return moment < self._hears_since or any(self._told_at.get(topic, 0.0) >= moment for topic in topics)

    def _forget(self) -> None:
        self._hears_since = time.time()
        self._told_at = {}

    def on(self, topic: str, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, before anybody is woken for `topic`. It must be quick."""
        self._listeners.setdefault(topic, []).append(listener)

    def close(self) -> None:
        """Wake everybody for good: the server is shutting down."""
        self._closing = True
        self.wake_all()

    def wake_all(self) -> None:
        """Make every waiter look again, e.g. after a connection that carried wake-ups was lost."""
        self._forget()
        for listener in [one for listeners in self._listeners.values() for one in listeners]:
            listener()
        self._schedule(list(self._by_topic))

    @contextmanager
    def subscribe(self, *topics: str) -> Iterator[Subscription]:
        """Be woken for `topics` while the block runs. Use on the event loop."""
        self.start()
        subscription = Subscription(self)
        for topic in topics:
            self._by_topic.setdefault(topic, set()).add(subscription)
        try:
            yield subscription
        finally:
            for topic in topics:
                waiters = self._by_topic.get(topic)
                if waiters is not None:
                    waiters.discard(subscription)
                    if not waiters:
                        del self._by_topic[topic]

    def _schedule(self, topics: list[str]) -> None:
        loop = self._loop
        if loop is None or not topics:
            return
        with self._lock:
            # One callback serves all topics noted before it runs, so a burst of changes costs one wake-up.
            scheduled = bool(self._pending)
            self._pending.update(topics)
        if not scheduled:
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody is left to wake
                with self._lock:
                    self._pending.clear()

    def _deliver(self) -> None:
        with self._lock:
            topics, self._pending = self._pending, set()
        for topic in topics:
            for subscription in self._by_topic.get(topic, ()):
                subscription._wake()
