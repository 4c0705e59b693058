"""What poller, reporter and loop share about the conversation with the server: its epoch, and whether to begin anew."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from diamond.agent.link import Backoff, Link
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import Conflict, DiamondError, Unauthenticated
from diamond.core.wire import FIRST_STREAMS, STREAMS, Hello, Welcome

log = logging.getLogger(__name__)

_REPEAT_WARNING_S = 60.0
_REFUSED_S = 30.0


class Session:
    """Thread-safe."""

    def __init__(
        self,
        link: Link,
        facts: Callable[[], EndpointFacts],
        *,
        take_over: bool = False,
        on_owner: Callable[[str], None] = lambda _owner: None,
    ) -> None:
        """`take_over`: replace the agent home that spoke for this endpoint, giving up what it had. `on_owner` is told
        whose endpoint it is, before any order comes."""
        self._on_owner = on_owner
        self._link = link
        self._take_over = take_over
        self._facts = facts
        self._greeting = threading.Lock()
        self._asked = 1
        self._done = 0
        self.epoch = ""  # of the last welcome
        self.streams: tuple[str, ...] = FIRST_STREAMS  # what the server takes of what we have
        self.synced = threading.Event()  # a full answer of this epoch was taken in: offsets and orders are known

    def greet(self) -> None:
        """Say hello if there is reason to: at the start, with new facts, to a server of another epoch.

        Raises:
            DiamondError: the server could not be reached, or does not want us.
        """
        with self._greeting:
            asked = self._asked
            if self._done >= asked:
                return
            hello = Hello(facts=self._facts(), take_over=self._take_over)
            welcome = decode(Welcome, self._link.call("POST", "/agent/hello", encode(hello)))
            self._done = asked
            self._take_over = False
            self.streams = tuple(stream for stream in STREAMS if stream in welcome.streams)
            self._on_owner(welcome.owner)
            if welcome.epoch != self.epoch:
                self.synced.clear()
                self.epoch = welcome.epoch
                log.info("connected to %s as endpoint %s", self._link.where, welcome.endpoint_name)

    def take_leave(self) -> None:
        """Tell the server that this agent stops on purpose, so that nothing waits for it. Best effort."""
        if self.epoch:
            with contextlib.suppress(DiamondError):
                self._link.call("POST", "/agent/goodbye", timeout_s=2.0)

    def greet_again(self) -> None:
        """The facts changed, or the server speaks of another epoch."""
        self._asked += 1


class Patience:
    """What a thread does between failures of the link: says it once, waits, says when it is over."""

    def __init__(self, what: str, stop: threading.Event) -> None:
        self._what = what
        self._stop = stop
        self._backoff = Backoff()
        self._said_at: float | None = None
        self.problem = ""

    def failed(self, error: DiamondError) -> None:
        """Wait as long as this failure deserves, or until the agent stops."""
        now = time.monotonic()
        self.problem = error.message
        if not self._stop.is_set() and (self._said_at is None or now - self._said_at > _REPEAT_WARNING_S):
            self._said_at = now
            if isinstance(error, Unauthenticated):
                log.error("%s: the server refuses this agent: %s; %s", self._what, error.message, error.hint)
            elif isinstance(error, Conflict):
                log.error("%s: %s. %s", self._what, error.message, error.hint)
            else:
                hint = f" ({error.hint})" if error.hint else ""
                log.warning("%s: %s%s; trying again", self._what, error.message, hint)
        wait_s = max(self._backoff.next_s(), error.retry_after_s or 0.0)
        self._stop.wait(wait_s if error.transient else max(wait_s, _REFUSED_S))

    def worked(self) -> None:
        if self._said_at is not None:
            log.info("%s: works again", self._what)
        self._said_at = None
        self.problem = ""
        self._backoff.reset()
