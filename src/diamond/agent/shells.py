"""Programs started by hand in running jobs: `diamond exec` and `diamond ssh`, at the endpoint's end.

Each shell has a thread that reads the user's input from the server, one that reads the program's output, and one that
sends it. All connections leave from here. A link that breaks is waited for; both streams go on at the byte where they
stopped. When the server says that a shell is over (its user left, or the server was restarted), or the job ends, the
program is ended.

Must not decide who may have a shell: that is the server's and policy.toml's.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from diamond.agent.link import Backoff, Link
from diamond.agent.schedulers.base import HasShells, Scheduler
from diamond.agent.terminals import NOT_EXECUTABLE, NOT_FOUND, Started, start
from diamond.core.codec import encode
from diamond.core.errors import DiamondError, ProtocolError
from diamond.core.ids import new_id
from diamond.core.shells import (
    MAX_CHUNK_BYTES,
    SIGNAL,
    STDIN,
    STDIN_END,
    WINDOW,
    FrameReader,
    ShellEnd,
    ShellOrder,
    data_frames,
    window_size,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_AT_ONCE = 64
_WAIT_S = 10.0  # that the server may hold an answer back
_SPARE_S = 15.0
_LOST_LINK_S = 120.0  # a program whose user cannot be reached for so long is ended
_SPEAK_EVERY_S = 1.0  # to the server, while the program does not read: else it would take the agent for gone
_LOOK_MS = 500
_QUIET_MS = 200  # after the program's end, so long for what it may have left in its streams
_LEFT_BYTES = 1024 * 1024  # no stream can have held more than this when the program ended


class Shells:
    """The shells of one agent process. Thread-safe."""

    def __init__(
        self,
        *,
        link: Link,
        scheduler: Scheduler,
        is_running: Callable[[str], bool],
        refusal: Callable[[ShellOrder], str],
    ) -> None:
        """`is_running` tells whether a job, by id, runs now; `refusal` the rule against a shell, or nothing."""
        self.runner = new_id("run")
        self._link = link
        self._scheduler = scheduler
        self._is_running = is_running
        self._refusal = refusal
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._closing = False

    def known(self) -> Iterable[str]:
        with self._lock:
            return list(self._sessions)

    def take(self, orders: list[ShellOrder]) -> None:
        for order in orders:
            with self._lock:
                if order.shell_id in self._sessions or self._closing:
                    continue
                session = _Session(order, self._link, self.runner, partial(self._is_running, order.job_id))
                self._sessions[order.shell_id] = session
            threading.Thread(target=self._run, args=(session,), name="shell", daemon=True).start()

    def close(self, within_s: float) -> None:
        """End every shell, and tell the server so; best effort."""
        with self._lock:
            self._closing = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.stop("the agent was stopped")
        until = time.monotonic() + within_s
        for session in sessions:
            session.done.wait(max(0.0, until - time.monotonic()))

    def _run(self, session: _Session) -> None:
        try:
            session.run(self._start)
        except Exception:  # one shell's trouble is nobody else's
            log.exception("shell %s", session.order.shell_id)
            session.report(ShellEnd(message="unexpected error in the agent; its log says more"))
        finally:
            with self._lock:
                self._sessions.pop(session.order.shell_id, None)
            session.done.set()
            self._link.release()

    def _start(self, order: ShellOrder) -> Started:
        """Raises _Refused."""
        if why := self._refusal(order):
            raise _Refused(ShellEnd(message=why))
        if len(self._sessions) > MOST_AT_ONCE:
            raise _Refused(ShellEnd(message=f"this endpoint has {MOST_AT_ONCE} shells open, as many as may be"))
        if not isinstance(self._scheduler, HasShells):
            raise _Refused(ShellEnd(message="this endpoint's scheduler cannot start a shell in a job"))
        if not self._is_running(order.job_id):
            raise _Refused(ShellEnd(message="the job does not run (any more)"))
        try:
            command = self._scheduler.shell_argv(order.job_id, order.argv, order.tty, order.node)
        except DiamondError as error:
            raise _Refused(ShellEnd(message=error.message)) from error
        if order.tty and order.term:
            command = replace(command, env={**command.env, "TERM": order.term})
        log.info("shell %s in job %s for %s", order.shell_id, order.job_id, order.user or "its owner")
        try:
            return start(command, tty=order.tty, rows=order.rows, cols=order.cols)
        except FileNotFoundError as error:
            raise _Refused(ShellEnd(exit_code=NOT_FOUND, message=f"{error.filename}: {error.strerror}")) from error
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            raise _Refused(ShellEnd(exit_code=NOT_EXECUTABLE, message=f"{order.argv[0][:200]}: {what}")) from error


class _Refused(Exception):
    def __init__(self, end: ShellEnd) -> None:
        super().__init__(end.message)
        self.end = end


class _Over(Exception):
    """The server knows this shell no more."""


class _Session:
    """One shell."""

    def __init__(self, order: ShellOrder, link: Link, runner: str, is_job_running: Callable[[], bool]) -> None:
        self.order = order
        self.done = threading.Event()
        self._link = link
        self._runner = runner
        self._is_job_running = is_job_running
        self._over = threading.Event()  # the program is to end, or has ended
        self._why = ""
        self._outbox = _Outbox()
        self._heard_at = self._speak_at = 0.0  # of and to the server, while the program does not read

    # From other threads

    def stop(self, why: str) -> None:
        """End the program; the first reason stays."""
        if not self._over.is_set():
            self._why = why
            self._over.set()

    # Its own thread

    def run(self, begin: Callable[[ShellOrder], Started]) -> None:
        try:
            # Asked for before anything starts: this tells the server who has taken the shell up.
            first = self._ask_input(0, wait_s=0.0)
            started = begin(self.order)
        except _Over:
            return
        except _Refused as refused:
            self.report(refused.end)
            return
        inward = threading.Thread(target=self._bring_input, args=(started, first), name="shell-input", daemon=True)
        outward = threading.Thread(target=self._send_output, name="shell-output", daemon=True)
        inward.start()
        outward.start()
        try:
            self._read_output(started)
        finally:
            # Whatever happened, nothing is left running that nobody listens to.
            started.end()
            self._over.set()
            status = started.status()
            started.close()
            self._outbox.finish()
        outward.join()
        self.report(self._verdict(status))

    def _verdict(self, status: int | None) -> ShellEnd:
        number = -status if status is not None and status < 0 else None
        why = self._why or ("the job has ended" if number and not self._is_job_running() else "")
        return ShellEnd(exit_code=None if number else status, signal=number, message=why)

    def report(self, end: ShellEnd) -> None:
        """Tell the server how it ended."""
        path, query = f"/agent/shells/{self.order.shell_id}/end", {"runner": self._runner}
        with contextlib.suppress(_Over):
            self._patiently(lambda: self._link.call("POST", path, encode(end), query=query, timeout_s=_SPARE_S))

    # The user's input

    def _bring_input(self, started: Started, data: bytes) -> None:
        reader, offset = FrameReader(), 0
        try:
            while not self._over.is_set():
                offset += len(data)
                for kind, payload in reader.feed(data):
                    self._apply(started, kind, payload)
                data = self._ask_input(offset, wait_s=_WAIT_S)
        except _Over:
            self.stop("its client is gone")
        except DiamondError as error:
            self.stop(error.message)
        finally:
            self._link.release()

    def _apply(self, started: Started, kind: bytes, payload: bytes) -> None:
        self._heard_at = time.monotonic()
        self._speak_at = self._heard_at + _SPEAK_EVERY_S
        if kind == STDIN:
            started.write(payload, self._is_over_meanwhile)
        elif kind == STDIN_END:
            started.end_input(self._is_over_meanwhile)
        elif kind == WINDOW:
            started.resize(*window_size(payload))
        elif kind == SIGNAL and payload:
            started.forward(payload[0])

    def _is_over_meanwhile(self) -> bool:
        """Whether to wait no more for the program to read; from time to time the server says. Raises _Over."""
        now = time.monotonic()
        if now >= self._speak_at and not self._over.is_set():
            self._speak_at = now + _SPEAK_EVERY_S
            query: dict[str, str | int | float] = {"runner": self._runner, "offset": 0, "wait_s": 0}
            try:
                path = f"/agent/shells/{self.order.shell_id}/output"
                self._link.send_bytes("POST", path, b"", query=query, timeout_s=_SPARE_S)
                self._heard_at = time.monotonic()
            except DiamondError as error:
                if not error.transient or now - self._heard_at > _LOST_LINK_S:
                    raise _Over from error
        return self._over.is_set()

    def _ask_input(self, offset: int, *, wait_s: float) -> bytes:
        path = f"/agent/shells/{self.order.shell_id}/input"
        query: dict[str, str | int | float] = {"runner": self._runner, "offset": offset, "wait_s": wait_s}
        return self._patiently(lambda: self._link.fetch_bytes(path, query=query, timeout_s=wait_s + _SPARE_S))

    # The program's output

    def _read_output(self, started: Started) -> None:
        """Until the program has ended and its streams are empty, or it must end."""
        poll = select.poll()
        open_fds = set(started.outputs)
        for fd in (*open_fds, started.pidfd):
            poll.register(fd, select.POLLIN)
        left = _LEFT_BYTES
        while not self._over.is_set():
            has_ended = started.status() is not None
            if has_ended and (not open_fds or left <= 0):
                return
            if has_ended:
                with contextlib.suppress(KeyError):
                    poll.unregister(started.pidfd)
            ready = [fd for fd, _ in poll.poll(_QUIET_MS if has_ended else _LOOK_MS) if fd != started.pidfd]
            if not ready:
                for fd, kind in started.outputs.items():
                    self._outbox.put(data_frames(kind, started.held(fd)), self._over.is_set)
                if has_ended:
                    return
            for fd in ready:
                try:
                    data = started.read(fd)
                except BlockingIOError:
                    continue
                if not data:
                    poll.unregister(fd)
                    open_fds.discard(fd)
                    data = started.held(fd)
                self._outbox.put(data_frames(started.outputs[fd], data), self._over.is_set)
                left -= len(data) if has_ended else 0
            if not has_ended and not self._is_job_running():
                self.stop("the job has ended")

    def _send_output(self) -> None:
        path = f"/agent/shells/{self.order.shell_id}/output"
        try:
            while data := self._outbox.next():
                query: dict[str, str | int | float]
                query = {"runner": self._runner, "offset": self._outbox.offset, "wait_s": _WAIT_S}

                def send(data: bytes = data, query: dict[str, str | int | float] = query) -> Any:
                    return self._link.send_bytes("POST", path, data, query=query, timeout_s=_WAIT_S + _SPARE_S)

                self._outbox.taken(_received(self._patiently(send)))
        except _Over:
            self.stop("its client is gone")
        except DiamondError as error:
            self.stop(error.message)
        finally:
            self._outbox.close()
            self._link.release()

    def _patiently(self, call: Callable[[], T]) -> T:
        """The call's answer, however often the link breaks meanwhile. Raises _Over."""
        backoff, until = Backoff(longest_s=2.0), time.monotonic() + _LOST_LINK_S
        while True:
            try:
                return call()
            except DiamondError as error:
                if not error.transient or time.monotonic() > until:
                    raise _Over from error
            time.sleep(backoff.next_s())


class _Outbox:
    """Output on its way: bounded, so that a slow reader at the far end slows the program down."""

    def __init__(self) -> None:
        self.offset = 0  # of the first byte held
        self._data = bytearray()
        self._changed = threading.Condition()
        self._finished = False
        self._closed = False

    def put(self, data: bytes, is_over: Callable[[], bool]) -> None:
        with self._changed:
            while len(self._data) >= MAX_CHUNK_BYTES and not self._closed and not is_over():
                self._changed.wait(_LOOK_MS / 1000)
            if not self._closed:
                self._data += data
                self._changed.notify_all()

    def next(self) -> bytes:
        """Some bytes, as soon as there are any; none when all was taken and no more will come."""
        with self._changed:
            while not self._data and not self._finished:
                self._changed.wait()
            return bytes(self._data[:MAX_CHUNK_BYTES])

    def taken(self, received: int) -> None:
        """The server has everything before this offset."""
        with self._changed:
            if not self.offset <= received <= self.offset + len(self._data):
                raise ProtocolError(f"the server has {received} bytes of an output of {self.offset + len(self._data)}")
            del self._data[: received - self.offset]
            self.offset = received
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody sends any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _received(answer: Any) -> int:
    received = answer.get("received") if isinstance(answer, dict) else None
    if not isinstance(received, int):
        raise ProtocolError("the server's answer to a shell's output makes no sense")
    return received
