"""`diamond exec` and `diamond ssh`: this terminal, or these pipes, joined to a program in a running task.

Three threads: this one reads the keyboard and takes signals, one sends, one shows. So `~.` and Ctrl-C work however long
the connection is away. Whatever happens, the terminal is put back as it was.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty as terminal_modes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli.session import connect, emit, leave, say, show_error
from diamond.core.errors import DiamondError, InvalidInput, NotFound

if TYPE_CHECKING:
    from diamond.core.tasks import Task
    from diamond.sdk.shells import ShellSession

EXIT_LINK = 255  # as ssh: the connection, not the program, is what failed
EXIT_PIPE = 128 + signal.SIGPIPE  # whoever read our output has gone
_READ_BYTES = 64 * 1024
_MOST_UNSENT_BYTES = 1024 * 1024
_CLOSE_S = 3.0
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def execute(
    ref: str | None,
    argv: Sequence[str],
    *,
    tty: bool | None,
    wait: bool,
    node: int | None,
    rank: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Run `argv`, or without one a shell, in the task. `tty` None: with a terminal if this is one at both ends."""
    try:
        "\0".join(argv).encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            "the command must be text in UTF-8", hint="send other bytes through standard input"
        ) from None
    with connect(patient=True) as client:
        task = client.tasks.resolve(ref)
        number = _node(task, node, rank)
        wants_tty = os.isatty(_STDIN) and os.isatty(_STDOUT) if tty is None else tty
        argv = argv or (("bash", "-i") if wants_tty and not as_json else ("bash",))
        if as_json:
            done = client.tasks.exec(task.id, argv, stdin=_stdin(), node=number, wait=wait)
            texts = {"stdout": done.stdout.decode(errors="replace"), "stderr": done.stderr.decode(errors="replace")}
            emit({"task_id": task.id, "exit_code": done.exit_code, **texts, "message": done.message})
            leave(done.exit_code)
        rows, cols = _window()
        session = client.tasks.shell(
            task.id,
            argv,
            tty=wants_tty,
            rows=rows,
            cols=cols,
            term=_term(),
            node=number,
            wait=wait,
        )
        if verbose or (wants_tty and os.isatty(_STDERR)):
            where = render.clean(f"{task.name} on {session.shell.endpoint}")
            say(f"In {where}." + (" ~. at the beginning of a line leaves." if wants_tty else ""))
        leave(Console(session, tty=wants_tty).run())


def _node(task: Task, node: int | None, rank: int | None) -> int:
    if node is not None and rank is not None:
        raise InvalidInput("give a node or a rank, not both", field="--rank")
    if rank is None:
        return node or 0
    per_node = task.spec.ranks_per_node if task.spec else 1
    return rank // per_node


def _stdin() -> Iterator[bytes]:
    while not os.isatty(_STDIN) and (data := os.read(_STDIN, _READ_BYTES)):
        yield data


def _window() -> tuple[int, int]:
    for fd in (_STDOUT, _STDIN, _STDERR):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        if size.lines and size.columns:
            return size.lines, size.columns
    return 24, 80


def _term() -> str:
    name = os.environ.get("TERM", "")
    plain = bool(name) and name.isascii() and all(char.isalnum() or char in "._+-" for char in name)
    return name if plain and len(name) <= 64 else "xterm-256color"


class Escape:
    """Finds ``~.`` at the beginning of a line, as ssh does; ``~~`` there is one tilde."""

    def __init__(self) -> None:
        self._at_start = True
        self._held = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What to send on, and whether to leave."""
        passed = bytearray()
        for byte in data:
            if self._held:
                self._held = False
                if byte == ord("."):
                    return bytes(passed), True
                if byte != ord("~"):
                    passed.append(ord("~"))
            elif self._at_start and byte == ord("~"):
                self._held = True
                continue
            passed.append(byte)
            self._at_start = byte in b"\r\n"
        return bytes(passed), False


class Unsent:
    """What was typed and not yet sent. Neighbouring bytes become one piece; a window size replaces an older one."""

    def __init__(self, on_room: Callable[[], None] = lambda: None) -> None:
        """`on_room` is called, by the thread that sends, whenever there is room for more."""
        self._on_room = on_room
        self._changed = threading.Condition()
        self._data: list[bytes] = []
        self._size: tuple[int, int] | None = None
        self._signals: list[int] = []
        self._ended = False
        self._closed = False

    @property
    def is_full(self) -> bool:
        with self._changed:
            return sum(map(len, self._data)) >= _MOST_UNSENT_BYTES

    def type(self, data: bytes) -> None:
        with self._changed:
            self._data.append(data)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def resize(self, rows: int, cols: int) -> None:
        with self._changed:
            self._size = (rows, cols)
            self._changed.notify()

    def signal(self, number: int) -> None:
        with self._changed:
            self._signals.append(number)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def send_all(self, session: ShellSession) -> None:
        """Send whatever comes, until closed."""
        is_ended = False
        while True:
            with self._changed:
                while not (self._data or self._size or self._signals or self._closed or self._ended > is_ended):
                    self._changed.wait()
                if self._closed:
                    return
                data, self._data = b"".join(self._data), []
                size, self._size = self._size, None
                signals, self._signals = self._signals, []
                ends = self._ended and not is_ended
            if data:
                self._on_room()
            if size:
                session.resize(*size)
            for number in signals:
                session.signal(number)
            if data:
                session.write(data)
            if ends:
                session.end_input()
                is_ended = True


class Console:
    """Joins this process's streams to a shell."""

    def __init__(self, session: ShellSession, *, tty: bool) -> None:
        self._session = session
        self._tty = tty
        self._unsent = Unsent(self._wake)
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._signals: list[int] = []
        self._failure: BaseException | None = None
        self._shown = threading.Event()

    def run(self) -> int:
        """Until the program ends or the user leaves; the exit status."""
        for work in (self._send, self._show):
            threading.Thread(target=work, daemon=True).start()
        try:
            with self._handlers(), self._raw():
                left = self._listen()
        finally:
            self._unsent.close()
            # The terminal is already itself again: a connection that is away must not hold the user up.
            closing = threading.Thread(target=self._session.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)
        if left is not None:
            return left
        if isinstance(self._failure, NotFound):
            say("diamond: the shell is gone: the server was restarted, or has not heard from here for too long")
            return EXIT_LINK
        if isinstance(self._failure, DiamondError):
            show_error(self._failure, as_json=False)
            return EXIT_LINK
        if isinstance(self._failure, BrokenPipeError):
            return EXIT_PIPE
        if self._failure is not None:
            raise self._failure
        end = self._session.end
        if end.message:
            say(f"diamond: {render.clean(end.message)}")
        return end.status

    def _listen(self) -> int | None:
        """Read keys and signals until the program ends (None) or the user leaves (the exit status)."""
        escape = Escape()
        is_open = True
        interrupted = False
        while True:
            poll = select.poll()
            poll.register(self._wake_r, select.POLLIN)
            if is_open and not self._unsent.is_full:
                poll.register(_STDIN, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_r in ready:
                os.read(self._wake_r, 1024)
            while self._signals:
                number = self._signals.pop(0)
                if number == signal.SIGWINCH:
                    self._unsent.resize(*_window())
                elif number == signal.SIGINT and not interrupted:
                    # Once to the program; whoever insists leaves.
                    self._unsent.signal(number)
                    interrupted = True
                else:
                    return 128 + number
            if self._shown.is_set():
                return None
            if _STDIN in ready:
                data = os.read(_STDIN, _READ_BYTES)
                if not data:
                    is_open = False
                    self._unsent.end()
                    continue
                if self._tty:
                    data, leaves = escape.feed(data)
                    if leaves:
                        return EXIT_LINK
                if data:
                    self._unsent.type(data)

    def _send(self) -> None:
        try:
            self._unsent.send_all(self._session)
        except DiamondError as error:
            self._fail(error)

    def _show(self) -> None:
        try:
            for name, data in self._session.output():
                _write_all(_STDERR if name == "stderr" else _STDOUT, data)
        except (DiamondError, OSError) as error:
            self._fail(error)
        self._shown.set()
        self._wake()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._shown.set()
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: whoever reads it wakes anyway
            os.write(self._wake_w, b"!")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        self._wake()

    @contextmanager
    def _handlers(self) -> Iterator[None]:
        numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH if self._tty else signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _raw(self) -> Iterator[None]:
        """Every key goes to the program, Ctrl-C too."""
        if not (self._tty and os.isatty(_STDIN)):
            yield
            return
        modes = termios.tcgetattr(_STDIN)
        try:
            terminal_modes.setraw(_STDIN, termios.TCSADRAIN)
            yield
        finally:
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, modes)
            sys.stderr.flush()


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # a stream that somebody else made non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
