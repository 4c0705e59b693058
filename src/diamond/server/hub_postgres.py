"""Wake-ups between server processes that share one PostgreSQL database, through NOTIFY and LISTEN.

Two threads with a connection each, so that neither the event loop nor a request ever waits for the network here. A
wake-up may be lost while a connection is down; every waiter looks again after `recheck_s` anyway, and all of them are
woken when the connection is back. Must not carry data: payloads are topics.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from diamond.server.hub import Hub

log = logging.getLogger("diamond.hub")
_CHANNEL = "diamond_hub"
_MAX_PAYLOAD_BYTES = 7000  # PostgreSQL refuses 8000
_MAX_BACKOFF_S = 15.0


class PostgresHub(Hub):
    """A `Hub` whose notifications also reach the other processes on the same database."""

    recheck_s = 5.0

    def __init__(self, url: sa.URL) -> None:
        super().__init__()
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._sender = secrets.token_hex(8)
        self._outbox: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._hears = False

    @property
    def connected(self) -> bool:
        return self._hears

    def start(self) -> None:
        super().start()
        if not self._threads and not self._stopping.is_set():
            for name, work in (("hub-notify", self._publish), ("hub-listen", self._listen)):
                thread = threading.Thread(target=self._keep_up, args=(name, work), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._outbox.put(())
        for thread in self._threads:
            thread.join(timeout=5)
        self._threads.clear()

    def notify(self, *topics: str) -> None:
        self.wake_here(*topics)
        # Others may be waiting where nobody here is; before `start` there is nobody to carry it.
        if topics and self._threads:
            self._outbox.put(topics)

    def _keep_up(self, name: str, work: Callable[[Any], None]) -> None:
        """Run `work` on a connection, and on a fresh one whenever that breaks."""
        import psycopg  # only installations on PostgreSQL have it

        backoff_s = 0.5
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True, connect_timeout=10) as connection:
                    backoff_s = 0.5
                    work(connection)
            except psycopg.Error as error:
                log.warning("%s: %s; trying again in %.1f s", name, type(error).__name__, backoff_s)
                self._stopping.wait(backoff_s)
                backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)

    def _publish(self, connection: Any) -> None:
        while not self._stopping.is_set():
            topics = set(self._outbox.get())
            while not self._outbox.empty():
                topics.update(self._outbox.get())
            for payload in pack_topics(self._sender, topics):
                connection.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, payload))

    def _listen(self, connection: Any) -> None:
        connection.execute(f"LISTEN {_CHANNEL}")
        self._hears = True
        self.wake_all()  # whatever happened while nobody listened
        try:
            while not self._stopping.is_set():
                for notification in connection.notifies(timeout=1.0, stop_after=100):
                    sender, topics = unpack_topics(notification.payload)
                    if sender != self._sender:
                        self.wake_here(*topics)
        finally:
            self._hears = False


def pack_topics(sender: str, topics: set[str]) -> Iterator[str]:
    """Payloads PostgreSQL will take, for any number of topics."""
    batch: list[str] = []
    size = 0
    for topic in sorted(topics):
        cost = len(json.dumps(topic)) + 1
        if batch and size + cost > _MAX_PAYLOAD_BYTES:
            yield json.dumps([sender, batch])
            batch, size = [], 0
        batch.append(topic)
        size += cost
    if batch:
        yield json.dumps([sender, batch])


def unpack_topics(payload: str) -> tuple[str, list[str]]:
    """The reverse; a payload of another version wakes nobody."""
    try:
        sender, topics = json.loads(payload)
        return str(sender), [str(topic) for topic in topics]
    except (ValueError, TypeError):
        return "", []
