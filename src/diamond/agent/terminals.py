"""Starts a program with its standard streams in the agent's hands: on a terminal of its own, or through three pipes.

Owns the file descriptors and the program's end. Must not know where the bytes come from or go to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable

from diamond.agent.processes import members, scan, send
from diamond.agent.schedulers.base import ShellCommand
from diamond.core.shells import STDERR, STDOUT

READ_BYTES = 64 * 1024
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells report it
_IUTF8 = 0o40000  # the line discipline then erases characters, not bytes
_GRACE_S = 5.0
_WRITE_POLL_MS = 100
_SEPARATOR = b"\x1e"
_MARK_BYTES = 64  # more than a mark takes
_FORWARDED = frozenset({1, 2, 3, 9, 10, 12, 15, 18})  # HUP INT QUIT KILL USR1 USR2 TERM CONT

# A session gets its terminal from a process inside it, before the program begins. Done by a small program of its own:
# code between fork and exec, in an agent of many threads, can find a lock held for ever.
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores these two, and exec would pass that on
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
if sys.argv[1] == "unset":  # Python sets it by itself in a C locale; the program's environment must be as given
    os.environ.pop("LC_CTYPE", None)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    os.write(2, os.fsencode(f"{sys.argv[2]}: {error.strerror}\\n"))
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


class Started:
    """A program that was started. Reading and writing belong to one thread each; the rest may be called from any."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdin: int, outputs: dict[int, bytes], *, tty: bool, mark: str
    ) -> None:
        """`outputs`: file descriptors to read, and the kind of frame that carries what is read."""
        self._process = process
        self._tty = tty
        self._stdin = stdin
        self._lock = threading.Lock()  # a number that was closed may be another file's by the time it is used
        self.outputs = outputs
        self._mark = re.compile(rb"\x1e" + re.escape(mark).encode() + rb":(\d{1,3})\x1e") if mark else None
        self._told: int | None = None  # the status of the program itself, where the process is a middleman
        self._held: dict[int, bytes] = {}
        self.pidfd = os.pidfd_open(process.pid)
        for fd in {stdin, *outputs}:
            os.set_blocking(fd, False)
        # If memory runs out, this goes before the agent does.
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/oom_score_adj", "w") as file:
            file.write("500")

    def status(self) -> int | None:
        """As `Popen.returncode`: negative for a signal; None while it runs."""
        status = self._process.poll()
        return status if status is None or self._told is None else self._told

    def write(self, data: bytes, is_over: Callable[[], bool]) -> None:
        """Give the program input, as fast as it reads; until `is_over`. What it will never read is dropped."""
        left = memoryview(data)
        while left and not is_over():
            try:
                with self._lock:
                    if self._stdin < 0:
                        return
                    left = left[os.write(self._stdin, left) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._stdin, select.POLLOUT)
                poll.poll(_WRITE_POLL_MS)
            except OSError:  # it closed its input, or is gone
                self._close_stdin()
                return

    def end_input(self, is_over: Callable[[], bool]) -> None:
        if self._tty:
            self.write(b"\x04", is_over)
        else:
            self._close_stdin()

    def _close_stdin(self) -> None:
        with self._lock:
            if not self._tty and self._stdin >= 0:
                os.close(self._stdin)
                self._stdin = -1

    def read(self, fd: int) -> bytes:
        """What there is to read; empty at the end. Raises BlockingIOError when there is nothing now.

        What may be the beginning of the told status is kept until more is known.
        """
        try:
            data = os.read(fd, READ_BYTES)
        except OSError as error:
            if error.errno == errno.EIO:  # a terminal that nobody holds any more
                return b""
            raise
        if self._mark is None or not data:
            return data
        data = self._held.pop(fd, b"") + data
        if found := self._mark.search(data):
            self._told = int(found[1]) & 0xFF
            data = data[: found.start()] + data[found.end() :]
        elif (at := data.find(_SEPARATOR, -_MARK_BYTES)) >= 0:
            self._held[fd] = data[at:]
            data = data[:at]
        if not data:
            raise BlockingIOError
        return data

    def held(self, fd: int) -> bytes:
        """What was kept, and now turns out to be the program's own."""
        return self._held.pop(fd, b"")

    def resize(self, rows: int, cols: int) -> None:
        """Set the window; the kernel tells the program in front (SIGWINCH)."""
        if self._tty:
            with contextlib.suppress(OSError), self._lock:
                _set_size(self._stdin, rows, cols)

    def forward(self, number: int) -> None:
        """Send a signal to what runs in front."""
        if number not in _FORWARDED:
            return
        with contextlib.suppress(OSError), self._lock:
            group = os.tcgetpgrp(self._stdin) if self._tty else self._process.pid
            if group > 1 and self.status() is None:
                os.killpg(group, number)

    def end(self) -> None:
        """Make everything in the program's session end: asked at first, then made to. Blocks for seconds."""
        until = time.monotonic() + _GRACE_S
        asked = False
        while self.status() is None:
            left = time.monotonic() >= until
            for process in members(self._process.pid, scan()):
                if left:
                    send(process, signal.SIGKILL)
                elif not asked:
                    # Interactive shells ignore SIGTERM, programs that were told to stay ignore SIGHUP.
                    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
                        send(process, number)
            asked = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)

    def close(self) -> None:
        """Let go of everything. On a terminal, what still runs in front gets SIGHUP by that."""
        with self._lock:
            for fd in {self._stdin, *self.outputs, self.pidfd} - {-1}:
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._stdin, self.outputs, self.pidfd = -1, {}, -1


def start(command: ShellCommand, *, tty: bool, rows: int, cols: int) -> Started:
    """Start the program in a session of its own.

    Raises:
        OSError: it is not there or may not be run, or this machine cannot start it.
    """
    return _on_terminal(command, rows, cols) if tty else _with_pipes(command)


def _on_terminal(command: ShellCommand, rows: int, cols: int) -> Started:
    locale = "keep" if "LC_CTYPE" in command.env else "unset"
    argv = [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, locale, *command.argv]
    master, slave = os.openpty()
    try:
        _set_size(slave, rows, cols)
        modes = termios.tcgetattr(slave)
        modes[0] |= _IUTF8
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        process = subprocess.Popen(
            argv,
            cwd=command.cwd,
            env=dict(command.env),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    return Started(process, master, {master: STDOUT}, tty=True, mark=command.mark)


def _with_pipes(command: ShellCommand) -> Started:
    process = subprocess.Popen(
        command.argv,
        cwd=command.cwd,
        env=dict(command.env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    fds = []
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        fds.append(os.dup(stream.fileno()))  # the object would close its own when it is collected
        os.set_inheritable(fds[-1], False)
        stream.close()
    process.stdin = process.stdout = process.stderr = None
    outputs = {fds[1]: STDOUT, fds[2]: STDERR}
    return Started(process, fds[0], outputs, tty=False, mark=command.mark)


def _set_size(fd: int, rows: int, cols: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
