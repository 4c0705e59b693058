"""The line between a site and the server: two network ports in a namespace of their own, and what happens between them.

Run as `unshare --net python wire.py`; takes one JSON command a line on standard input and answers each with a line.
Modes: `direct` (the kernel bridges), `cut` (frames vanish, as on a cable pulled somewhere far away: no error, no
carrier lost) and `relay` (this program carries every frame, late or not at all). It does by hand what `tc netem`
does, because many kernels, small virtual machines' above all, come without that module; this works on any.
"""

from __future__ import annotations

import heapq
import json
import random
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

PORTS = ("left", "right")
BRIDGE = "between"
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
# Offloaded frames are larger than any MTU; their header (PACKET_VNET_HDR) travels with them.
LARGEST_FRAME = 1 << 17


@dataclass
class Relay:
    """Carries frames both ways, each `delay_s` late, in the order they came."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    sockets: list[socket.socket] = field(default_factory=list)
    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    last_due: list[float] = field(default_factory=lambda: [0.0, 0.0])
    taken: int = 0

    def open(self) -> None:
        for port in PORTS:
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.htons(ETH_P_ALL))
            sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
            sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            sock.bind((port, ETH_P_ALL))
            self.sockets.append(sock)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()
        self.waiting.clear()

    def take(self, side: int) -> None:
        """Frames that have arrived on one side get the time at which they leave on the other."""
        while True:
            try:
                frame = self.sockets[side].recv(LARGEST_FRAME)
            except BlockingIOError:
                return
            if random.random() < self.loss:  # noqa: S311 - not a secret
                continue
            late = max(0.0, self.delay_s + random.uniform(-self.jitter_s, self.jitter_s))  # noqa: S311
            # A queue does not reorder: jitter delays those behind as well.
            due = self.last_due[side] = max(self.last_due[side], time.monotonic() + late)
            self.taken += 1
            heapq.heappush(self.waiting, (due, self.taken, 1 - side, frame))

    def give(self) -> float | None:
        """Send what is due; seconds until the next is, None when nothing waits."""
        while self.waiting:
            due, _, side, frame = self.waiting[0]
            if (wait := due - time.monotonic()) > 0:
                return wait
            heapq.heappop(self.waiting)
            try:
                self.sockets[side].send(frame)
            except OSError:
                continue  # a full queue or a port that goes down loses frames; networks do
        return None


def ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)


def bridge(joined: bool) -> None:
    for port in PORTS:
        ip("link", "set", port, *(("master", BRIDGE) if joined else ("nomaster",)))


def obey(command: dict[str, object], relay: Relay) -> None:
    mode = command["mode"]
    if mode == "hello":  # answered from inside the new namespace: ports can be moved here now
        return
    relay.close()
    if mode == "prepare":
        ip("link", "add", BRIDGE, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        for name in (BRIDGE, *PORTS):
            ip("link", "set", name, "up")
    bridge(mode in ("prepare", "direct"))
    if mode == "relay":
        relay.delay_s, relay.jitter_s, relay.loss = (
            float(str(command[key])) for key in ("delay_s", "jitter_s", "loss")
        )
        relay.open()


def main() -> None:
    relay = Relay()
    while True:
        wait = relay.give()
        ready, _, _ = select.select([sys.stdin, *relay.sockets], [], [], wait)
        for side, sock in enumerate(relay.sockets):
            if sock in ready:
                relay.take(side)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            try:
                obey(json.loads(line), relay)
                answer = "ok"
            except (OSError, subprocess.CalledProcessError) as error:
                answer = f"{error} {getattr(error, 'stderr', b'')!r}"
            print(answer, flush=True)


if __name__ == "__main__":
    main()
