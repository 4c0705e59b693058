"""The layout of a job's directory on its endpoint. The only place that knows these file names.

<jobs>/<job_id>/
    order.json      what was asked, as journaled before submission
    job.sh          generated script; contains no user text
    setup.sh run.sh the user's text, byte for byte
    env             NAME=value pairs, each ended by NUL
    launch.py       starts the ranks of a node (only when there are several)
    work/           the user's files; the job's current directory
    log             stdout and stderr
    metrics.jsonl   what the program logged
    util.jsonl      what the agent sampled
    started         made by job.sh with O_EXCL: "pid start_ticks boot_id"; a directory starts once
    exit.json       made by job.sh, by rename
    exit.node0.json made by launch.py, per node
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Blanks laid down before the job starts, so that the exit status fits even on a full disk.
EXIT_ROOM_BYTES = 1024


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def order(self) -> Path:
        return self.path / "order.json"

    @property
    def script(self) -> Path:
        return self.path / "job.sh"

    @property
    def setup(self) -> Path:
        return self.path / "setup.sh"

    @property
    def run(self) -> Path:
        return self.path / "run.sh"

    @property
    def env(self) -> Path:
        return self.path / "env"

    @property
    def launcher(self) -> Path:
        return self.path / "launch.py"

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def started(self) -> Path:
        return self.path / "started"

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    @property
    def exit_room(self) -> Path:
        return self.path / "exit.tmp"

    def node_exit(self, node_rank: int) -> Path:
        return self.path / f"exit.node{node_rank}.json"

    def stream(self, name: str) -> Path:
        return self.path / {"log": "log", "metrics": "metrics.jsonl", "util": "util.jsonl"}[name]


@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """Names a process beyond doubt: pids are reused, and start times begin anew at boot."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """What job.sh wrote as its last act."""

    phase: str  # "setup" or "run"
    exit_code: int
    started_at: float
    ended_at: float
    host: str

    @property
    def signal(self) -> int | None:
        """The shell's way of saying "ended by a signal"."""
        return self.exit_code - 128 if 128 < self.exit_code <= 128 + 64 else None


def read_process_mark(run_dir: RunDir) -> ProcessMark | None:
    """Who started this directory; None when nobody did, or the mark was cut short by a crash."""
    try:
        pid, ticks, boot_id = run_dir.started.read_text().split()
        return ProcessMark(pid=int(pid), start_ticks=int(ticks), boot_id=boot_id)
    except (OSError, ValueError):
        return None


def read_exit(run_dir: RunDir) -> ExitRecord | None:
    raw = _read_json(run_dir.exit)
    try:
        return ExitRecord(
            phase=str(raw["phase"]),
            exit_code=int(raw["exit_code"]),
            started_at=float(raw["started_at"]),
            ended_at=float(raw["ended_at"]),
            host=str(raw["host"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def read_first_failed_rank(run_dir: RunDir, node_rank: int = 0) -> int | None:
    rank = _read_json(run_dir.node_exit(node_rank)).get("first_failed_rank")
    return rank if isinstance(rank, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Whole or not at all, also across a power cut: write beside it, fsync, rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
