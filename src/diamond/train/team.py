"""What the launchers of several nodes agree on, so that a job outlives a rank or a node.

The first node's launcher hears of every loss and says who runs the next *generation*, under a new port, so that nothing
of the old one (a store, a late message) reaches it. Copied beside launch.py into job directories: standard library
only, Python 3.8 syntax, no import of Diamond's.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

BEAT_S, SILENT_S = 1.0, 8.0
MOST_SILENCES = 5
STRANGER_S, MOST_STRANGERS = 5.0, 64
STOP_S = 20.0  # for a node to end its ranks
SAVE_S = 300.0  # for its ranks to save before that, when nothing is wrong


class Plan(NamedTuple):
    """A generation: which of how many nodes this one is (`place`), and where rank 0 listens."""

    generation: int
    place: int
    nodes: int
    addr: str
    port: int


class Team:
    """The launchers of a job. One thread-safe object in each; the first node's decides.

    Args:
        wake: called from other threads when there is something new; it must not block.
        free_port: gives a port for the next generation.
        may_go_on: whether the program can be begun anew; others are left to themselves when a node goes.
    """

    def __init__(
        self, *, node: int, nodes: int, addr: str, port: int, key: str, min_nodes: int,
        wake: Callable[[], None], free_port: Callable[[], int], may_go_on: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._node, self._addr, self._key, self._min_nodes = node, addr, key.encode(), min_nodes
        self._wake, self._free_port, self._may_go_on = wake, free_port, may_go_on
        self._lock = threading.RLock()
        self._generation = 0
        self._plans: list[Plan] = []
        self._over = -1  # the newest generation that has to end here
        self._gently = False  # its ranks are to save first
        self._final = False
        self._too_few = False  # nodes are left
        self._alive: set[int] = set(range(nodes))
        self._waiting: set[int] | None = None  # who has not stopped yet, while a generation ends
        self._stop_by = 0.0
        self._peers: dict[int, tuple[socket.socket, float]] = {}
        self._head: socket.socket | None = None
        self._closed = False
        self._strangers = 0  # connected, and not known yet
        self._looked_at = time.monotonic()
        self.is_joined = nodes == 1
        self._listener: socket.socket | None = None
        if nodes > 1 or port:
            self._open(port)

    # ---- what a launcher calls ---------------------------------------------------------------------------------------

    def failed(self, generation: int) -> None:
        """Something of this generation is lost here, and it may go on without."""
        self._hear(self._node, {"failed": generation})

    def stopped(self, generation: int) -> None:
        """None of its ranks runs here any more."""
        self._hear(self._node, {"stopped": generation})

    def finish(self) -> None:
        """There is nothing to go on with: no generation comes after this one."""
        self._hear(self._node, {"final": True})

    def must_stop(self, generation: int) -> bool:
        with self._lock:
            return self._over >= generation

    @property
    def is_gentle(self) -> bool:
        """Whether the ranks are to save before they end: a node came, none was lost."""
        with self._lock:
            return self._gently

    def is_final(self) -> bool:
        with self._lock:
            return self._final

    @property
    def is_too_small(self) -> bool:
        """Whether it is over because fewer nodes are left than it may go on with."""
        with self._lock:
            return self._too_few

    def next_plan(self) -> Plan | None:
        self.look()
        with self._lock:
            return self._plans.pop(0) if self._plans else None

    def look(self) -> None:
        """At the clock: who has been silent or does not stop is left out."""
        if self._node != 0:
            return
        now = time.monotonic()
        with self._lock:
            if now - self._looked_at > SILENT_S / 2:  # nobody looked: this process was stopped, and so were the others
                self._peers = {node: (peer, now) for node, (peer, _) in self._peers.items()}
            self._looked_at = now
            late = [node for node, (_, heard) in self._peers.items() if now - heard > SILENT_S]
            if self._waiting is not None and now > self._stop_by:
                late += [node for node in self._waiting if node != 0]
        for node in set(late):
            self._gone(node)

    def close(self) -> None:
        self._send(self._head, {"bye": 1})
        with self._lock:
            self._closed = True
            for one in [self._head, self._listener, *(peer for peer, _ in self._peers.values())]:
                if one is not None:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                    one.close()

    # ---- deciding (the first node) -----------------------------------------------------------------------------------

    def _hear(self, node: int, said: dict[str, Any]) -> None:
        if self._node != 0:
            self._send(self._head, said)
            return
        with self._lock:
            if "hello" in said:
                if node not in self._alive:  # it comes to a job that runs already
                    self._end(self._generation, gently=True)
                    self._alive.add(node)
            elif said.get("final"):
                self._final = True
                self._tell_all({"final": True})
            elif said.get("bye"):  # its ranks are done
                self._alive.discard(node)
                self._peers.pop(node, None)
            elif said.get("failed") == self._generation:
                self._end(self._generation)
            elif said.get("stopped") == self._generation and self._waiting is not None:
                self._waiting.discard(node)
                self._go_if_ready()
        self._wake()

    def _end(self, generation: int, *, gently: bool = False) -> None:
        if self._waiting is None and not self._final and self._may_go_on():
            self._waiting = set(self._alive)
            self._stop_by = time.monotonic() + (SAVE_S if gently else 0.0) + STOP_S
            self._over, self._gently = generation, gently
            self._tell_all({"over": generation, "gently": gently})

    def _go_if_ready(self) -> None:
        if self._waiting:
            return
        self._waiting = None
        order = sorted(self._alive)
        if len(order) < self._min_nodes:
            self._final = self._too_few = True
            self._tell_all({"final": True, "too_few": True})
            return
        self._generation += 1
        port = self._free_port()
        for index, node in enumerate(order):
            plan = Plan(self._generation, index, len(order), self._addr, port)
            if node == 0:
                self._plans.append(plan)
            else:
                self._send(self._peers[node][0] if node in self._peers else None, {"go": list(plan)})

    def _gone(self, node: int) -> None:
        with self._lock:
            peer = self._peers.pop(node, None)
            if node not in self._alive or self._closed:
                return
            self._alive.discard(node)
            self._gently = False
            self._end(self._generation)
            if self._waiting is not None:
                self._waiting.discard(node)
                self._go_if_ready()
        if peer is not None:
            peer[0].close()
        self._wake()

    # ---- words between nodes -----------------------------------------------------------------------------------------

    def _open(self, port: int) -> None:
        if self._node == 0:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                listener.close()
                return  # the nodes cannot talk; a loss ends the job, as it would without all this
            listener.listen(128)
            self._listener, self.is_joined = listener, True
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        else:
            threading.Thread(target=self._join, args=(port,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:  # closed; or there are too many files open for now
                if self._closed:
                    return
                time.sleep(1.0)
                continue
            if self._strangers >= MOST_STRANGERS:
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        node = self._introduced(peer)
        if node < 1:
            peer.close()
            return
        try:
            words = _Words(peer, patient=True)  # silence is judged by the clock, see `look`
            with self._lock:
                self._peers[node] = (peer, time.monotonic())
            self._hear(node, {"hello": node})
            while True:
                said = words.next()
                with self._lock:
                    if self._peers.get(node, (None,))[0] is peer:
                        self._peers[node] = (peer, time.monotonic())
                if said.get("beat"):
                    self._send(peer, {"beat": 1})
                else:
                    self._hear(node, said)
        except Exception:  # whatever it said
            with self._lock:
                is_ours = self._peers.get(node, (None,))[0] is peer
            if is_ours:
                self._gone(node)
            peer.close()

    def _introduced(self, peer: socket.socket) -> int:
        """The number of a node that knows the job's key; -1 for strangers, who have little time."""
        nonce = os.urandom(16).hex()
        with self._lock:
            self._strangers += 1
        try:
            peer.settimeout(STRANGER_S)
            self._send(peer, {"nonce": nonce})
            first = _Words(peer, ends_at=time.monotonic() + STRANGER_S).next()
            node = int(first["node"])
            known = hmac.compare_digest(str(first["proof"]), _proof(self._key, nonce))
            peer.settimeout(SILENT_S)
        except Exception:  # whatever it said
            return -1
        else:
            return node if known else -1
        finally:
            with self._lock:
                self._strangers -= 1

    def _join(self, port: int) -> None:
        while not self._closed:
            try:
                head = socket.create_connection((self._addr, port), timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        else:
            return
        try:
            head.settimeout(SILENT_S)
            words = _Words(head, patient=True)
            self._send(head, {"node": self._node, "proof": _proof(self._key, words.next()["nonce"])})
            with self._lock:
                self._head, self.is_joined = head, True
            threading.Thread(target=self._beat, args=(head,), daemon=True).start()
            while True:
                self._obey(words.next())
        except (OSError, ValueError, KeyError, TypeError):
            with self._lock:
                self._head, self._final = None, True  # nobody says how to go on
            head.close()
            self._wake()

    def _obey(self, said: dict[str, Any]) -> None:
        with self._lock:
            if "over" in said:
                self._over, self._gently = int(said["over"]), bool(said.get("gently"))
            elif "go" in said:
                self._plans.append(Plan(*said["go"]))
            elif said.get("final"):
                self._final, self._too_few = True, bool(said.get("too_few"))
            else:
                return
        self._wake()

    def _beat(self, head: socket.socket) -> None:
        while self._head is head and not self._closed:
            self._send(head, {"beat": 1})
            time.sleep(BEAT_S)

    def _tell_all(self, said: dict[str, Any]) -> None:
        for peer, _ in self._peers.values():
            self._send(peer, said)

    def _send(self, to: socket.socket | None, said: dict[str, Any]) -> None:
        if to is not None:
            with contextlib.suppress(OSError):  # whoever reads there notices
                to.sendall(json.dumps(said).encode() + b"\n")


class _Words:
    """JSON lines from a socket, each a dictionary and short."""

    def __init__(self, sock: socket.socket, *, patient: bool = False, ends_at: float | None = None) -> None:
        self._sock, self._rest = sock, b""
        self._most_silences = MOST_SILENCES if patient else 0
        self._ends_at = ends_at

    def next(self) -> dict[str, Any]:
        silences = 0
        while b"\n" not in self._rest:
            try:
                more = self._sock.recv(4096)
            except socket.timeout:  # noqa: UP041 - another name of it only since Python 3.10
                silences += 1  # a job that was suspended wakes up here
                if silences > self._most_silences:
                    raise
                continue
            if self._ends_at is not None and time.monotonic() > self._ends_at:
                raise ConnectionError("too slow")
            if not more or len(self._rest) > 4096:
                raise ConnectionError("gone")
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        said = json.loads(line)
        if not isinstance(said, dict):
            raise ValueError("not a word of ours")
        return said


def _proof(key: bytes, nonce: str) -> str:
    return hmac.new(key, nonce.encode(), hashlib.sha256).hexdigest()
