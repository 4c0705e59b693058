"""Several server processes on one socket, for installations on PostgreSQL.

The first process binds, migrates and supervises; it answers no request itself. A worker that dies is started again; all
end when it does, since each holds the other end of a pipe that then closes. What only one may do (planning, sweeping,
notices, shells) is the first worker's; see `forwarding`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from prometheus_client import multiprocess

from diamond.core.errors import InstallationProblem
from diamond.server.prometheus import WORKERS_ENV

log = logging.getLogger("diamond.server")
GRACE_S = 15.0
_LOOK_EVERY_S = 0.1
_START_WITHIN_S = 60.0
_RESTART_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a worker is told at its start, through its standard input."""

    index: int
    listener_fd: int
    first_fd: int  # of the socket the first worker listens on for the others; -1: not this one's
    first_path: str
    key: str  # by which the first knows the others
    ready_fd: int
    settings: str  # JSON

    @property
    def is_first(self) -> bool:
        return self.index == 0


def check(workers: int, *, is_sqlite: bool) -> None:
    if workers > 1 and is_sqlite:
        raise InstallationProblem(
            f"{workers} workers need PostgreSQL: SQLite has one writer, and one process is what suits it",
            hint="set DIAMOND_DATABASE_URL to postgresql://…, or leave --workers away",
            field="workers",
        )


class Supervisor:
    """Starts the workers, keeps them going, and stops them."""

    def __init__(self, num_workers: int, settings_json: str, listener: socket.socket) -> None:
        self._num_workers = num_workers
        self._settings = settings_json
        self._listener = listener
        self._folder = Path(tempfile.mkdtemp(prefix="diamond-"))  # 0700, and short enough for a socket's name
        (self._folder / "metrics").mkdir()
        self._first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._first.bind(str(self._folder / "first"))
        self._first.listen(512)
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._started_at: dict[int, float] = {}
        self._stopping = False
        self._key = secrets.token_urlsafe(32)

    def run(self, ready: Callable[[], None]) -> int:
        """Until SIGTERM or SIGINT; `ready` is called once every worker answers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            self._start_all()
            if not self._stopping:
                ready()
            while not self._stopping:
                self._restart_dead()
                time.sleep(_LOOK_EVERY_S)
        finally:
            self._end_all()
            self._first.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return 0

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values()]

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _start_all(self) -> None:
        waiting = [self._start(index) for index in range(self._num_workers)]
        deadline = time.monotonic() + _START_WITHIN_S
        for index, fd in enumerate(waiting):
            while not self._stopping and not _has_byte(fd, _LOOK_EVERY_S):
                if self._workers[index].poll() is not None or time.monotonic() > deadline:
                    raise InstallationProblem(
                        f"worker {index} did not start", hint="its own message is above; mend that and start again"
                    )
            os.close(fd)

    def _start(self, index: int) -> int:
        """Start a worker; what it writes one byte to when it answers."""
        ready, told = os.pipe()
        is_first = index == 0
        place = Place(
            index=index,
            listener_fd=self._listener.fileno(),
            first_fd=self._first.fileno() if is_first else -1,
            first_path=str(self._folder / "first"),
            key=self._key,
            ready_fd=told,
            settings=self._settings,
        )
        fds = [self._listener.fileno(), told] + ([self._first.fileno()] if is_first else [])
        worker = subprocess.Popen(
            [sys.executable, "-m", "diamond.server.worker"],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, WORKERS_ENV: str(self._folder / "metrics")},
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
        os.close(told)
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(place.__dict__).encode() + b"\n")
        worker.stdin.flush()
        self._workers[index] = worker
        self._started_at[index] = time.monotonic()
        return ready

    def _restart_dead(self) -> None:
        for index, worker in list(self._workers.items()):
            code = worker.poll()
            if code is None or time.monotonic() - self._started_at[index] < _RESTART_AFTER_S:
                continue
            log.error("worker %d (process %d) ended with %d; starting it again", index, worker.pid, code)
            multiprocess.mark_process_dead(worker.pid, str(self._folder / "metrics"))  # type: ignore[no-untyped-call]
            _close(worker)
            os.close(self._start(index))

    def _end_all(self) -> None:
        for worker in self._workers.values():
            if worker.poll() is None:
                worker.terminate()
        deadline = time.monotonic() + GRACE_S
        for worker in self._workers.values():
            try:
                worker.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            _close(worker)


def _close(worker: subprocess.Popen[bytes]) -> None:
    if worker.stdin is not None:
        worker.stdin.close()


def _has_byte(fd: int, within_s: float) -> bool:
    import select

    readable, _, _ = select.select([fd], [], [], within_s)
    return bool(readable) and bool(os.read(fd, 1))


def read_place() -> Place:
    """What the supervisor told this worker: a line, and nothing after it until the pipe closes."""
    told = b""
    while not told.endswith(b"\n"):
        if not (piece := os.read(0, 65536)):
            raise InstallationProblem("a worker is started by its supervisor alone", hint="use `diamond serve`")
        told += piece
    return Place(**json.loads(told))


def end_with_supervisor(stop: Callable[[], None]) -> None:
    """Call `stop` when the supervisor is gone, however it went."""

    def watch() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock would be held when the interpreter ends
        stop()

    threading.Thread(target=watch, name="supervisor", daemon=True).start()
