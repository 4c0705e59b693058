"""A shell in a running task, seen from a client: what is typed goes out, what is shown comes back, byte for byte.

Connections that break are made again and both streams go on where they stopped, for as long as the server keeps a
silent client's shell. Must not touch this machine's terminal: `diamond.cli.exec` does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote

from diamond.core.codec import decode, encode
from diamond.core.errors import Conflict, DiamondError, NotFound, Unavailable
from diamond.core.shells import (
    MAX_CHUNK_BYTES,
    SIGNAL,
    STDERR,
    STDIN,
    STDIN_END,
    STDOUT,
    FrameReader,
    NewShell,
    Shell,
    ShellEnd,
    data_frames,
    frame,
    window_frame,
)
from diamond.core.states import TaskState
from diamond.core.tasks import Task
from diamond.sdk.transport import API, Transport

T = TypeVar("T")
_WAIT_S = 10.0
_LONGEST_OUTAGE_S = 60.0
_OUTAGE_DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class Completed:
    """What became of a command. `exit_code` is 128 + n when signal n ended it."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    message: str = ""


class ShellSession:
    """An open shell. Writing, reading and `close` may each be done by a thread of its own. Use as a context manager.

    Attributes:
        shell: as the server first described it.
    """

    def __init__(self, transport: Transport, shell: Shell) -> None:
        self.shell = shell
        self._transport = transport
        self._path = f"{API}/shells/{quote(shell.id, safe='')}"
        self._sending = threading.Lock()
        self._sent = 0
        self._reader = FrameReader()
        self._read = 0
        self._pending: deque[tuple[str, bytes]] = deque()
        self._end: ShellEnd | None = None
        self._over = threading.Event()

    def __enter__(self) -> ShellSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Give the program input. Waits while it reads none. What comes after its end is dropped.

        Raises:
            ServerUnreachable: for longer than a shell lives without its client.
        """
        self._send(data_frames(STDIN, data))

    def end_input(self) -> None:
        """No more input: the program reads the end of its standard input."""
        self._send(frame(STDIN_END))

    def resize(self, rows: int, cols: int) -> None:
        """The window has another size now; for shells with a terminal."""
        self._send(window_frame(rows, cols))

    def signal(self, number: int) -> None:
        """Send a signal to what runs in front."""
        self._send(frame(SIGNAL, bytes([number])))

    def output(self) -> Iterator[tuple[str, bytes]]:
        """What the program writes, as it comes: ("stdout" or "stderr", bytes). Ends with the shell; see `end`.

        Called again, it goes on where the last call was left.

        Raises:
            NotFound: the server has forgotten the shell, as it does when it is restarted.
            ServerUnreachable: for longer than a shell lives without its client.
        """
        while True:
            while self._pending:
                yield self._pending.popleft()
            if self._end is not None:
                return
            try:
                self._fetch()
            except BaseException:
                self._over.set()
                raise

    def _fetch(self) -> None:
        answer = self._patiently(
            lambda: self._transport.request(
                "GET",
                f"{self._path}/output",
                params={"offset": self._read, "wait_s": _WAIT_S},
                wait_s=_WAIT_S,
                retries=0,
            )
        )
        self._read += len(answer.content)
        names = {STDOUT: "stdout", STDERR: "stderr"}
        for kind, payload in self._reader.feed(answer.content):
            if kind in names:
                self._pending.append((names[kind], payload))
        if answer.headers.get("Diamond-Eof") == "1":
            found = self._patiently(lambda: self._transport.json("GET", self._path, retries=0))
            self._end = decode(Shell, found).end or ShellEnd()
            self._over.set()

    @property
    def end(self) -> ShellEnd:
        """How it ended; known once `output` has."""
        return self._end or ShellEnd(message="it has not ended")

    def close(self) -> None:
        """End what runs in the shell, and forget it. Harmless when it is over."""
        self._over.set()
        with suppress(DiamondError):
            self._transport.request("DELETE", self._path, repeatable=True, retries=1)

    def _send(self, data: bytes) -> None:
        with self._sending:
            while data and not self._over.is_set():
                piece, offset = data[:MAX_CHUNK_BYTES], self._sent
                try:
                    answer = self._patiently(
                        lambda piece=piece, at=offset: self._transport.request(  # type: ignore[misc]
                            "POST",
                            f"{self._path}/input",
                            params={"offset": at, "wait_s": _WAIT_S},
                            content=piece,
                            headers={"Content-Type": "application/octet-stream"},
                            repeatable=True,
                            wait_s=_WAIT_S,
                            retries=0,
                        )
                    )
                except NotFound:
                    return  # it is over; `output` says how
                taken = int(answer.json()["received"]) - offset
                self._sent += taken
                data = data[taken:]

    def _patiently(self, call: Callable[[], T]) -> T:
        failures, until = 0, time.monotonic() + _LONGEST_OUTAGE_S
        while True:
            try:
                return call()
            except Unavailable:
                if time.monotonic() > until or self._over.is_set():
                    raise
            time.sleep(_OUTAGE_DELAYS_S[min(failures, len(_OUTAGE_DELAYS_S) - 1)])
            failures += 1


def open_shell(transport: Transport, task_id: str, asked: NewShell, *, wait: bool = False) -> ShellSession:
    """A new shell; with `wait`, as soon as the task runs. Raises as `Tasks.shell` does."""
    asked.check()
    path = f"{API}/tasks/{quote(task_id, safe='')}"
    cursor = 0
    while True:
        try:
            # Not repeated by itself: the shell of a lost answer would be a second one.
            found = transport.json("POST", f"{path}/shells", body=encode(asked))
            return ShellSession(transport, decode(Shell, found))
        except Conflict as error:
            if not wait or error.field != "task":
                raise
            task = decode(Task, transport.json("GET", path))
            if task.state.is_final or task.state is TaskState.FINISHING:
                raise
        params = {"since": cursor, "limit": 500, "wait_s": _WAIT_S if cursor else None}
        with suppress(Unavailable):
            events = transport.json("GET", f"{path}/events", params=params, wait_s=_WAIT_S)["events"]
            cursor = max([cursor, *(int(event["seq"]) for event in events)])


def run(session: ShellSession, stdin: bytes | Iterable[bytes]) -> Completed:
    """Feed a program its input, and collect what it writes until it ends."""

    def feed() -> None:
        with suppress(DiamondError):  # the reader meets the same trouble, and tells
            for piece in [stdin] if isinstance(stdin, bytes) else stdin:
                session.write(piece)
            session.end_input()

    found: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    feeder = threading.Thread(target=feed, name="shell-input", daemon=True)
    feeder.start()
    for name, data in session.output():
        found[name] += data
    end = session.end
    return Completed(
        exit_code=end.status, stdout=bytes(found["stdout"]), stderr=bytes(found["stderr"]), message=end.message
    )
