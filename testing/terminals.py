"""A person at a terminal, for tests: starts a program on a pseudo-terminal, types, and reads the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping
from types import TracebackType

from testing.waiting import PATIENCE


class Typing:
    """A program on a terminal of its own. Use as a context manager: it is ended with the block.

    Attributes:
        screen: everything the program wrote so far.
    """

    def __init__(self, argv: list[str], env: Mapping[str, str], *, rows: int = 24, cols: int = 80) -> None:
        self.screen = b""
        self._seen = 0
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                os.execvpe(argv[0], argv, dict(env))  # noqa: S606 - argv, as ever
            finally:
                os._exit(127)
        self._status: int | None = None
        self.resize(rows, cols)

    def __enter__(self) -> Typing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, data: bytes) -> None:
        os.write(self._fd, data)

    def modes(self) -> list[object]:
        """The terminal's modes, to see that they were put back."""
        return termios.tcgetattr(self._fd)[:4]

    def read(self, within_s: float) -> bytes:
        """What comes within that time; empty when nothing does, or the program is gone."""
        if not select.select([self._fd], [], [], within_s)[0]:
            return b""
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # nobody holds the other end any more
            return b""
        self.screen += data
        return data

    def expect(self, pattern: bytes, *, within_s: float = 15.0) -> re.Match[bytes]:
        """Wait until the pattern is on the screen, after what was expected before."""
        until = time.monotonic() + PATIENCE * within_s
        while True:
            if found := re.compile(pattern, re.DOTALL).search(self.screen, self._seen):
                self._seen = found.end()
                return found
            left_s = until - time.monotonic()
            assert left_s > 0, f"not within {within_s:g} s: {pattern!r}; there is {self.screen[self._seen :]!r}"
            self.read(min(left_s, 0.5))

    def wait(self, within_s: float = 15.0) -> int:
        """The exit status; 128 + n for a signal. Goes on reading, or the program would wait for that."""
        until = time.monotonic() + PATIENCE * within_s
        while self._status is None:
            assert time.monotonic() < until, f"it has not ended within {within_s:g} s; there is {self.screen!r}"
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = 128 - code if code < 0 else code
        while self.read(0.0):
            pass
        return self._status
