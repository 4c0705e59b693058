"""Owns the metric lines a training process writes (`log`) and its view of its place in the job (`context`).

Must not slow or stop training: no network, no thread, and no error of the file system reaches the caller.
A line is ``{"step": 12, "t": 1700000000.0, "loss": 0.3}``; the agent tails the file and skips any line that is not
whole. Standard library only, Python 3.8 syntax, because this file runs in the user's environment.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import operator
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_PENDING_LINES = 1000  # kept in memory while the file cannot be written; then the oldest go
PRINT_INTERVAL_S = 1.0
_RESERVED = ("step", "t")
_LARGEST_INT = 2**63  # beyond this most JSON readers keep no integer, so a float is the honest form


@dataclass(frozen=True)
class Context:
    """Where this process stands in its job.

    Attributes:
        rank: Number of this process among all of the job, from 0.
        local_rank: Number among the processes of this node, from 0; pick the GPU with it.
        world_size: Number of processes in the job.
        node_rank: Number of this node, from 0.
        num_nodes: Number of nodes in the job.
        task_id: Diamond's task (``tsk_…``), None outside Diamond.
        job_id: Diamond's job (``job_…``), None outside Diamond.
        attempt: 1 for the first job of the task, 2 after one restart, and so on.
        run_dir: Diamond's own folder of this job, None outside Diamond.
        output_dir: Where results belong; the current directory when Diamond names none.
    """

    rank: int
    local_rank: int
    world_size: int
    node_rank: int
    num_nodes: int
    task_id: str | None
    job_id: str | None
    attempt: int
    run_dir: Path | None
    output_dir: Path


def context() -> Context:
    """Read this process's place in the job from the environment.

    Works under Diamond, under torchrun, and alone (rank 0 of 1). A variable that is missing or not a number counts
    as unset, so this never raises.
    """
    env = os.environ
    world_size = max(1, _env_int("WORLD_SIZE", 1))
    nodes_by_size = world_size // max(1, _env_int("LOCAL_WORLD_SIZE", world_size))
    run_dir = env.get("DIAMOND_RUN_DIR")
    return Context(
        rank=_env_int("RANK", 0),
        local_rank=_env_int("LOCAL_RANK", 0),
        world_size=world_size,
        node_rank=_env_int("NODE_RANK", _env_int("GROUP_RANK", 0)),  # torchrun calls it GROUP_RANK
        num_nodes=max(1, _env_int("DIAMOND_NUM_NODES", nodes_by_size)),
        task_id=env.get("DIAMOND_TASK_ID") or None,
        job_id=env.get("DIAMOND_JOB_ID") or None,
        attempt=_env_int("DIAMOND_ATTEMPT", 1),
        run_dir=Path(run_dir) if run_dir else None,
        output_dir=Path(env.get("DIAMOND_OUTPUT_DIR") or os.getcwd()),
    )


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *,
    step: Any = None,
    all_ranks: bool = False,
    **more: Any,
) -> None:
    """Record metrics of one training step.

    ``log(step=12, loss=0.3)`` and ``log({"val/error": 0.1}, step=12)`` are the same call; a dictionary allows names
    that are not identifiers. Under Diamond the values appear in the task's curves within seconds; elsewhere
    rank 0 prints them to stderr, at most once a second.

    Args:
        values: Metrics by name: numbers, or anything with ``.item()`` that gives one (0-d tensor, NumPy scalar).
        step: Training step, an integer. Left out, it is one more than the last step of this process.
        all_ranks: Record on every rank, with ``@rank<n>`` added to the names. Otherwise only rank 0 records, and
            the other ranks return at once (without synchronising with their GPU).
        **more: Metrics by keyword.

    Raises:
        TypeError: A value or the step is not a number; the message names it.
        ValueError: A metric is called ``step`` or ``t``.
    """
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"log() takes metrics by name, e.g. log(loss=0.3), not {type(values).__name__}")
    metrics = dict(values or {}, **more)
    at_step = _state.next_step(step)
    rank = _env_int("RANK", 0)
    if not metrics or (rank != 0 and not all_ranks):
        return
    suffix = f"@rank{rank}" if all_ranks else ""
    record: dict[str, Any] = {"step": at_step, "t": round(time.time(), 3)}
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"metric name {key!r} must be text, not {type(key).__name__}")
        if key in _RESERVED:
            raise ValueError(f"metric name {key!r} is reserved: choose another name")
        record[key + suffix] = _number(key, value)
    path = os.environ.get("DIAMOND_METRICS_FILE")
    if path:
        _state.append(path, json.dumps(record, allow_nan=False).encode() + b"\n")
    elif rank == 0 and os.environ.get("DIAMOND_TRAIN_QUIET") != "1":
        _state.show(record)


def _env_int(name: str, default: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def _number(key: str, value: Any) -> int | float | str:
    """The JSON form of a metric value; NaN and infinities become strings, since JSON has no such numbers."""
    if not isinstance(value, (int, float)):
        try:
            value = value.item()
        except Exception as error:
            # torch and NumPy disagree on the exception for "more than one element"; a caller should see one.
            shape = getattr(value, "shape", None)
            what = type(value).__name__ + (f" of shape {tuple(shape)}" if shape else "")
            raise TypeError(f"metric {key!r} must be a single number, not {what}") from error
        if not isinstance(value, (int, float)):
            raise TypeError(f"metric {key!r} must be a real number, not {type(value).__name__}")
    if isinstance(value, int):
        if abs(value) < _LARGEST_INT:
            return int(value)  # also makes True 1: every value in the file is something to plot
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)


class _State:
    """The process's open file, step counter and printer. One per process: a forked child starts a new one."""

    def __init__(self) -> None:
        # Reentrant, so that logging from a signal handler cannot deadlock with the code it interrupted.
        self._lock = threading.RLock()
        self._step = 0
        self._path = ""
        self._fd = -1
        self._torn = False  # the file ends in part of a line of ours
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING_LINES)
        self._warned = False
        self._shown_at = -math.inf
        self._unshown: dict[str, Any] = {}

    def next_step(self, given: Any) -> int:
        with self._lock:
            if given is None:
                step = self._step
            else:
                try:
                    step = operator.index(given.item() if hasattr(given, "item") else given)
                except Exception as error:
                    raise TypeError(f"step must be an integer, not {given!r}") from error
            self._step = step + 1
            return step

    def append(self, path: str, line: bytes) -> None:
        with self._lock:
            self._pending.append(line)
            try:
                if path != self._path:
                    self.close()
                if self._fd < 0:
                    self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                    self._path = path
                self._write_pending()
            except OSError as error:
                self._warn(path, error)

    def _write_pending(self) -> None:
        # One write for everything: O_APPEND makes it land whole, whatever other ranks write meanwhile.
        lead = b"\n" if self._torn else b""
        data = lead + b"".join(self._pending)
        written = os.write(self._fd, data)
        if written == len(data):
            self._torn = False
            self._pending.clear()
            return
        # A nearly full disk takes part of the data. What is there cannot be taken back (others append too), so the
        # torn line is ended later and written again; readers skip the torn one.
        left = written - len(lead)
        while self._pending and left >= len(self._pending[0]):
            left -= len(self._pending.popleft())
        self._torn = left > 0 or (self._torn and written == 0)
        raise OSError(errno.ENOSPC, "the disk took only part of a line")

    def _warn(self, path: str, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        reason = error.strerror or error
        _to_stderr(f"diamond.train: cannot write metrics to {path}: {reason}; training goes on, will retry")

    def show(self, record: dict[str, Any]) -> None:
        with self._lock:
            # Values of the calls in between are kept, so that a rare one (validation) is not lost to a frequent one.
            self._unshown.update(record)
            now = time.monotonic()
            if now - self._shown_at < PRINT_INTERVAL_S:
                return
            shown, self._unshown, self._shown_at = self._unshown, {}, now
        values = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in shown.items()
            if key not in _RESERVED
        )
        _to_stderr(f"step {shown['step']}  {values}")

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _to_stderr(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed or absent: there is nobody to tell, and training must go on


_state = _State()


def _after_fork_in_child() -> None:
    # A child must not repeat the parent's unwritten lines, nor wait for a lock that a parent's thread held.
    global _state
    inherited, _state = _state, _State()
    with contextlib.suppress(OSError):
        inherited.close()


if hasattr(os, "register_at_fork"):  # absent on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork_in_child)
