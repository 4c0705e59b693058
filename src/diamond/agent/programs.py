"""Runs the machine's own small programs with a deadline, and lets go of those that cannot even be killed.

A program that touches a file system whose server is gone hangs in the kernel, where SIGKILL does not reach it. Waiting
for it would hang the agent as well, so it is left behind; it ends when the server comes back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIMEOUT_S = 5.0
_SETTLE_S = 0.5  # for a killed program to be gone
_MAX_BYTES = 1024 * 1024
_PATHS = ("/usr/lpp/mmfs/bin", "/usr/sbin", "/sbin")  # where users' PATH does not lead, and quota tools are

_left: list[subprocess.Popen[bytes]] = []
_left_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a program said. `status` is None when it did not end in time."""

    status: int | None
    out: str = ""
    err: str = ""


def find(name: str) -> str | None:
    """The program's path, or None where there is no such program."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_PATHS))


def ask(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> Said:
    return ask_all([argv], timeout_s=timeout_s)[0]


def ask_all(argvs: Iterable[Sequence[str]], *, timeout_s: float = TIMEOUT_S) -> list[Said]:
    """Run several programs side by side; all of them have `timeout_s` seconds together. Raises nothing."""
    until = time.monotonic() + timeout_s
    started = [_start(argv) for argv in argvs]
    return [_collect(process, until) for process in started]


def num_left() -> int:
    """How many programs were left behind and still hang."""
    with _left_lock:
        _left[:] = [process for process in _left if process.poll() is None]
        return len(_left)


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes] | None:
    num_left()
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None


def _collect(process: subprocess.Popen[bytes] | None, until: float) -> Said:
    if process is None:
        return Said(status=127)
    try:
        out, err = process.communicate(timeout=max(0.05, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        _let_go(process)
        return Said(status=None)
    return Said(status=process.returncode, out=_text(out), err=_text(err))


def _let_go(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_SETTLE_S)
    except subprocess.TimeoutExpired:
        with _left_lock:
            _left.append(process)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _text(raw: bytes) -> str:
    return raw[:_MAX_BYTES].decode(errors="replace")
