"""The layout of a job's directory on its endpoint. The only place that knows these file names.

<jobs>/<job_id>/
    order.json      what was asked, as journaled before submission
    job.sh          generated script; contains no user text
    setup.sh run.sh the user's text, byte for byte
    env             NAME=value pairs, each ended by NUL
    secrets         the same of the task's secrets; gone when the job is over, as are the next two
    secrets.sh      of a task with an image: as `export` lines
    secret-files/   those secrets that the task wants as files
    secrets.json    which value of each secret the job was given; not the values
    launch.py       starts the ranks of a node (under Slurm, and when there are several); with regroup.py, team.py and
                    lines.py it brings lost ones back
    measure.sh      under Slurm: notes what the job uses of a node, see `diamond.core.measuring`
    inside.sh       of a task with an image: starts a program in it
    enter.sh env.sh what inside.sh runs in the image, and the variables of `env` as `export` lines
    shield/         what inside.sh puts before the container runtime's own programs
    view/           of a task in an image of somebody else than the endpoint's owner: what its programs see in the
                    place of this folder, and where they leave what is not in work/; see `diamond.core.views`
    tmp/            of the same: their /tmp, by node, where the node has no better place
    masks/          of a task of the owner's, in an image: what its programs see in the place of the agent's folders
    image-work.json of a job that looks after images: what it is to do
    work/           the user's files; the job's current directory. In a job that continues another: a link to the
                    work directory of the first job of the chain
    log             stdout and stderr
    metrics.jsonl   what the program logged, and what was read from its output
    curves.json     how far its output was read for that, and what of it is being written; the agent's
    train.jsonl     what a training measured of itself, see `diamond.core.training`
    util.jsonl      what the agent sampled; under Slurm, what measure.sh noted
    util.node0.jsonl of a job on several nodes: the same per node, which the agent brings together in util.jsonl
    pilots          of a job inside pilots on several nodes: Slurm's number of each, its host, its slots there
    steward.py      of a pilot: starts what the agent lays into steps/; it says itself what pilot.json, steps/, ending
                    and end are
    started         made by job.sh with O_EXCL: "pid start_ticks boot_id"; a directory starts once
    exit.json       made by job.sh, by rename
    continue        made by a program that wants to go on in another job
    over            made by job.sh of a chain when nothing is left to do
    warning         made by job.sh on several nodes when the job's time is about to end; read by launch.py
    not-needed      made by job.sh of a successor that found `over` in the directory before it
    out-of-time     made by diamond.train outside of a chain, when it ends because the job's time is about to
    setup.done      made by job.sh of a chain; its successors need no setup
    exit.node0.json made by launch.py, per node
    hung.node0.json made by launch.py, or by diamond.train in a lone process, when a rank stood still
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diamond.core.views import VIEW

# Blanks laid down before the job starts, so that the exit status fits even on a full disk.
EXIT_ROOM_BYTES = 1024
# A job owns its directory and may put anything in place of these files; nothing honest is larger.
SMALL_BYTES = 64 * 1024
_LATEST_S = 253402300799.0  # the end of the year 9999
_LARGEST_PID = 2**22
_MAX_RANKS = 1_000_000
MAX_HUNG_NODES = 1000
LAUNCHER_FILES = ("launch.py", "regroup.py", "team.py", "lines.py")


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
    def secrets(self) -> Path:
        return self.path / "secrets"

    @property
    def secrets_script(self) -> Path:
        return self.path / "secrets.sh"

    @property
    def secret_files(self) -> Path:
        return self.path / "secret-files"

    @property
    def secret_versions(self) -> Path:
        return self.path / "secrets.json"

    @property
    def launcher(self) -> Path:
        return self.path / "launch.py"

    @property
    def measure(self) -> Path:
        return self.path / "measure.sh"

    @property
    def inside(self) -> Path:
        return self.path / "inside.sh"

    @property
    def enter(self) -> Path:
        return self.path / "enter.sh"

    @property
    def env_script(self) -> Path:
        return self.path / "env.sh"

    @property
    def shield(self) -> Path:
        return self.path / "shield"

    @property
    def view(self) -> Path:
        return self.path / VIEW

    @property
    def image_work(self) -> Path:
        return self.path / "image-work.json"

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def work_root(self) -> Path:
        """Where the work directory really is: here, or in the job that began this chain."""
        try:
            parts = Path(os.readlink(self.work)).parts
        except OSError:
            return self.work
        if len(parts) == 3 and parts[0] == ".." and parts[1] not in ("..", ".") and parts[2] == "work":
            return self.path.parent / parts[1] / "work"
        return self.work

    def link_work(self, root: Path) -> None:
        """Go on in another job's work directory."""
        os.symlink(os.path.join("..", root.parent.name, "work"), self.work)

    @property
    def not_needed(self) -> Path:
        return self.path / "not-needed"

    @property
    def out_of_time(self) -> Path:
        return self.path / "out-of-time"

    @property
    def is_out_of_time(self) -> bool:
        """Whether its program left that mark; a guest's sees `view` in the place of this folder."""
        return any(os.path.lexists(path) for path in (self.out_of_time, self.view / self.out_of_time.name))

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

    @property
    def pilots(self) -> Path:
        return self.path / "pilots"

    @property
    def steward(self) -> Path:
        return self.path / "steward.py"

    @property
    def pilot(self) -> Path:
        return self.path / "pilot.json"

    @property
    def pilot_end(self) -> Path:
        return self.path / "end"

    @property
    def pilot_ending(self) -> Path:
        return self.path / "ending"

    def step(self, name: str, kind: str) -> Path:
        """Of a pilot: a file about one of its steps, such as "json" or "done"."""
        return self.path / "steps" / f"{name}.{kind}"

    @property
    def curves(self) -> Path:
        return self.path / "curves.json"

    def node_util(self, node_rank: int) -> Path:
        return self.path / f"util.node{node_rank}.jsonl"

    def stream(self, name: str) -> Path:
        names = {"log": "log", "metrics": "metrics.jsonl", "util": "util.jsonl", "train": "train.jsonl"}
        return self.path / names[name]


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
    more: bool = False  # a link of a chain that wants to go on in another job
    warned: bool = False  # with SIGUSR1, as schedulers do before a job's time is over

    @property
    def signal(self) -> int | None:
        """The shell's way of saying "ended by a signal"."""
        return self.exit_code - 128 if 128 < self.exit_code <= 128 + 64 else None


def read_small(path: Path, limit_bytes: int = SMALL_BYTES) -> bytes | None:
    """A small file whose place a job can take with anything: a pipe is not waited for, a link not followed.

    None for what is no plain file, is larger than the limit, or cannot be read: all of it counts as absent.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit_bytes:
            return None
        data = os.read(fd, limit_bytes + 1)
    except OSError:
        return None
    finally:
        os.close(fd)
    return data if len(data) <= limit_bytes else None


def read_json(path: Path, limit_bytes: int = SMALL_BYTES) -> dict[str, Any]:
    """The object in a small file (see `read_small`); empty when there is none."""
    data = read_small(path, limit_bytes)
    try:
        raw = json.loads(data) if data else None
    except (ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def whole(raw: object, least: int, most: int) -> int:
    """A whole number within bounds. Raises ValueError for anything else."""
    if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw <= most:
        raise ValueError(f"not a whole number from {least} to {most}")
    return raw


def moment(raw: object) -> float:
    """Unix seconds that a calendar knows. Raises ValueError for anything else."""
    # Compared before it is converted: a number of a hundred digits is no float.
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= _LATEST_S:
        raise ValueError("not a time")
    return float(raw)


def clean(raw: str, limit: int) -> str:
    """Text that was found somewhere, as every reader can show it: one line, no control characters, not endless."""
    return "".join(char if char.isprintable() else "?" for char in raw[:limit])


def may_have_started(run_dir: RunDir) -> bool:
    """Whether somebody started this directory. One that cannot be looked into may have been."""
    try:
        os.lstat(run_dir.started)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def read_process_mark(run_dir: RunDir) -> ProcessMark | None:
    """Who started this directory; None when nobody did, or the mark was cut short by a crash."""
    try:
        pid, ticks, boot_id = (read_small(run_dir.started) or b"").decode().split()
        return ProcessMark(
            pid=whole(int(pid), 0, _LARGEST_PID),
            start_ticks=whole(int(ticks), 0, 2**63 - 1),
            boot_id=clean(boot_id, 64),
        )
    except ValueError:
        return None


def read_exit(run_dir: RunDir) -> ExitRecord | None:
    """The record, if it is one job.sh can have written; a job can write there too."""
    raw = read_json(run_dir.exit)
    try:
        phase, host = raw["phase"], raw["host"]
        if phase not in ("setup", "run") or not isinstance(host, str):
            return None
        return ExitRecord(
            phase=phase,
            exit_code=whole(raw["exit_code"], 0, 255),
            started_at=moment(raw["started_at"]),
            ended_at=moment(raw["ended_at"]),
            host=clean(host, 255),
            more=raw.get("more") is True,
            warned=raw.get("warned") == 1,
        )
    except (KeyError, ValueError):
        return None


def read_first_failed_rank(run_dir: RunDir, node_rank: int = 0) -> int | None:
    try:
        return whole(read_json(run_dir.node_exit(node_rank)).get("first_failed_rank"), 0, _MAX_RANKS)
    except ValueError:
        return None


def read_hang(run_dir: RunDir) -> str:
    """Who stood still and so ended the job: the rank that came least far, of all that nodes noted. Empty: nobody."""
    found: list[tuple[int, int, str]] = []
    is_final = False
    notes = [*run_dir.path.glob("hung.node*.json"), *run_dir.view.glob("hung.node*.json")]
    for path in sorted(notes)[:MAX_HUNG_NODES]:
        with contextlib.suppress(ValueError):
            raw = read_json(path)
            is_final |= raw.get("final") is True
            text, stack = str(raw.get("text", "")), str(raw.get("stack", ""))
            place = whole(raw.get("step"), 0, 2**62), whole(raw.get("phase"), 0, 100)
            found.append((*place, f"{text[:500]}\n{stack[:4000]}".strip()))
    return min(found)[2] if found and is_final else ""


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Whole or not at all, also across a power cut: write beside it, fsync, rename."""
    # Of a thread's own: two that write the same file at once would take each other's away.
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    # A new file, whatever a crash or a job has put there: writing into a pipe would wait for its reader.
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
