"""Keeping an agent running after its user has logged out: by systemd, cron, tmux, or a plain process of its own.

`start` may be called any number of times, from cron too, and leaves one agent; `stop` undoes what `start` did. Jobs
never depend on either. Owns background.json, keeper.lock and the rotation of agent.log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from diamond.agent import centre, cron, systemd
from diamond.agent.config import AgentConfig, log_file, own_file
from diamond.agent.lock import LOCK_FILE, Holder, held, holder
from diamond.core.errors import Conflict, InstallationProblem, InvalidInput, Unavailable
from diamond.core.rundir import read_json, write_atomic

log = logging.getLogger(__name__)

METHODS = ("systemd", "cron", "tmux", "plain")
# What a shell of the user has and cron or systemd has not, and without which sbatch or Python may not be found.
KEPT_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "SLURM_CONF", "MODULEPATH", "MODULESHOME", "LMOD_CMD", "LANG", "LC_ALL", "TZ"),
    *("DIAMOND_HOME", "SCRATCH", "WORK", "PROJECT"),
)
START_WAIT_S = 20.0
STOP_WAIT_S = 30.0
MAX_LOG_BYTES = 10 * 1024 * 1024
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0
_SETTLED_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Started:
    """What `start` did: which way, why that one, and whether an agent ran already."""

    via: str
    why: str
    holder: Holder
    was_running: bool
    notes: tuple[str, ...] = ()


def program(home: Path) -> list[str]:
    """How to run this home's agent: its own one-file copy, else the installed package."""
    file = own_file(home)
    return [sys.executable, str(file)] if file.exists() else [sys.executable, "-m", "diamond.agent"]


def running(home: Path) -> Holder | None:
    return holder(home / LOCK_FILE)


def chosen_way(home: Path) -> str:
    """How `start` keeps this home's agent running; empty when it does not."""
    via = read_json(home / "background.json").get("via")
    return via if via in METHODS else ""


def start(home: Path, *, via: str = "auto") -> Started:
    """Have an agent run in the background, and go on running.

    Raises:
        Conflict: it runs on another machine.
        InstallationProblem: it cannot be kept running that way, or ended at once.
    """
    if via not in (*METHODS, "auto"):
        raise InvalidInput(f"{via!r} is not one of auto, {', '.join(METHODS)}", field="--via")
    config = AgentConfig.load(home)
    if config is None:
        raise InstallationProblem(
            f"no agent is enrolled in {home}", hint="enrol it with the line that `diamond endpoint enroll NAME` prints"
        )
    centre.refuse_stopped()
    with _one_at_a_time(home):
        before = running(home)
        if before is not None and not before.is_here:
            raise Conflict(
                f"this agent runs already, on {before.host}",
                hint=f"leave it there, or stop it there first: diamond agent stop --home {home}",
            )
        present = chosen_way(home)
        if before is not None and via in ("auto", present):
            return Started(via=present or "hand", why="it runs already", holder=before, was_running=True)
        if before is not None:
            raise Conflict(
                f"this agent runs already ({before}), started by {present or 'hand'}",
                hint="stop it first: diamond agent stop",
            )
        method, why = choose() if via == "auto" else (via, "as asked")
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        said = {"via": method, "host": platform.node(), "env": environment}
        write_atomic(home / "background.json", json.dumps(said, indent=2).encode())
        notes = _launch(home, config.name, method)
        found = _await(home)
    return Started(via=method, why=why, holder=found, was_running=False, notes=notes)


@contextlib.contextmanager
def _one_at_a_time(home: Path) -> Iterator[None]:
    """Two people (or cron and a person) may start and stop at the same moment; the second sees what the first did."""
    fd = os.open(home / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        ends_at = time.monotonic() + START_WAIT_S + STOP_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_at:
                    raise Unavailable(f"somebody else is starting or stopping the agent in {home}") from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(fd)


def choose() -> tuple[str, str]:
    """The first way that works here and survives a logout, and why it is that one."""
    problem = systemd.problem()
    if not problem and systemd.lingers():
        return "systemd", "systemd --user answers and keeps running after logout"
    no_systemd = problem or "systemd --user would end it at logout, since lingering is off (loginctl enable-linger)"
    if not (no_cron := cron.problem()):
        return "cron", f"{no_systemd}; crontab works"
    return "plain", f"{no_systemd}; {no_cron}"


def _launch(home: Path, name: str, method: str) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if method == "systemd":
        if problem := systemd.problem():
            raise InstallationProblem(problem, hint="leave --via out, and another way is found")
        systemd.install(systemd.unit_name(name, home), systemd.unit_text(name, home, _run_argv(home)))
        if not systemd.lingers():
            notes = ("lingering is off, so systemd will end the agent when you log out; turn it on with:"
                     " loginctl enable-linger",)  # fmt: skip
        return notes
    if method == "cron":
        if problem := cron.problem():
            raise InstallationProblem(problem, hint="leave --via out, and another way is found")
        cron.install(home, [*program(home), "start", "--from-cron", "--home", str(home)])
    else:
        notes = ("nothing starts it again when this machine is rebooted: run `diamond agent start` then",)
    if method == "tmux":
        _tmux(name, home)
    else:
        spawn_keeper(home)
    return notes


def _run_argv(home: Path) -> list[str]:
    return [*program(home), "run", "--home", str(home), "--saved-environment"]


def spawn_keeper(home: Path) -> None:
    """A process of its own session, which no terminal's end reaches."""
    with open_log(home) as out:
        subprocess.Popen(
            [*program(home), "keep", "--home", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=home,
            start_new_session=True,
        )


def _tmux(name: str, home: Path) -> None:
    session = f"diamond-agent-{name}".replace(".", "_")  # a dot means something to tmux
    argv = ["tmux", "new-session", "-d", "-s", session, *program(home), "keep", "--home", str(home)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, cwd=home, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallationProblem(f"tmux cannot be used: {error}", hint="leave --via out") from error
    if done.returncode != 0:
        raise InstallationProblem(f"tmux: {done.stderr.strip()[:200]}", hint="leave --via out")


def start_from_cron(home: Path) -> None:
    """What cron calls every few minutes: nothing when an agent runs, here or on another login node."""
    if running(home) is None and holder(home / "keeper.lock") is None and chosen_way(home) == "cron":
        spawn_keeper(home)


def _await(home: Path) -> Holder:
    ends_at = time.monotonic() + START_WAIT_S
    while time.monotonic() < ends_at:
        if (found := running(home)) is not None:
            return found
        time.sleep(0.1)
    raise InstallationProblem(
        f"the agent has not come up in {START_WAIT_S:.0f} s; the end of {log_file(home)}:\n" + log_tail(home, 5),
        hint="`diamond agent run --home DIR` runs it before your eyes",
    )


def stop(home: Path) -> bool:
    """End the agent and whatever would start it again; whether there was either. Its jobs go on.

    Raises:
        Conflict: it runs on another machine.
        Unavailable: it does not end.
    """
    with _one_at_a_time(home):
        found = running(home)
        if found is not None and not found.is_here:
            raise Conflict(f"this agent runs on {found.host}", hint=f"stop it there: diamond agent stop --home {home}")
        config, method = AgentConfig.load(home), chosen_way(home)
        if method == "systemd" and config is not None:
            systemd.remove(systemd.unit_name(config.name, home))
        elif method == "cron":
            cron.remove(home)
        was_kept = bool(method) or holder(home / "keeper.lock") is not None
        (home / "background.json").unlink(missing_ok=True)
        for lock in ("keeper.lock", LOCK_FILE):
            _end(home / lock)
    return found is not None or was_kept


def restart(home: Path, between: Callable[[], None] | None = None) -> Holder | None:
    """Stop the agent, do something, start it again the same way; None when it did not run."""
    was = running(home)
    if was is not None and not was.is_here:
        raise Conflict(f"this agent runs on {was.host}", hint="do that there")
    method = chosen_way(home)
    if was is not None:
        stop(home)
    if between is not None:
        between()
    if was is None:
        return None
    return start(home, via=method or "auto").holder


def _end(lock: Path) -> None:
    ends_at = time.monotonic() + STOP_WAIT_S
    told = 0
    while (found := holder(lock)) is not None and found.is_here:
        # The lock is held, so this number is still that process.
        if found.pid > 1 and found.pid != told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(found.pid, signal.SIGTERM)
            told = found.pid
        if time.monotonic() > ends_at:
            raise Unavailable(f"{found} has not ended in {STOP_WAIT_S:.0f} s", hint=f"see {log_file(lock.parent)}")
        time.sleep(0.1)


def keep(home: Path) -> int:
    """Run the agent as a child and start it again when it dies, until told to stop. Blocks."""
    stopping = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def on_signal(_number: int, _frame: object) -> None:
        stopping.set()
        if child is not None:
            child.terminate()

    with held(home / "keeper.lock"):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        delay_s = _FIRST_DELAY_S
        while not stopping.is_set():
            began = time.monotonic()
            with open_log(home) as out:
                child = subprocess.Popen(_run_argv(home), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=home)
            if stopping.is_set():  # told between the look and the start
                child.terminate()
            if child.wait() == 0:
                return 0  # it ended because somebody wanted that
            delay_s = _FIRST_DELAY_S if time.monotonic() - began > _SETTLED_S else min(delay_s * 2, _MAX_DELAY_S)
            stopping.wait(delay_s)
    return 0


def apply_saved_environment(home: Path) -> None:
    """Give this process the variables that the user's shell had at `start`."""
    saved = read_json(home / "background.json").get("env")
    for name, value in (saved if isinstance(saved, dict) else {}).items():
        if name in KEPT_VARIABLES and isinstance(value, str):
            os.environ[name] = value


def open_log(home: Path) -> BinaryIO:
    """agent.log to append to. One old log is kept; only between two lives of the agent, which writes while it runs."""
    path = log_file(home)
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_LOG_BYTES:
            os.replace(path, path.with_suffix(".log.1"))
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


def log_tail(home: Path, lines: int) -> str:
    """The end of agent.log, with the messages of its JSON lines taken out."""
    try:
        with open(log_file(home), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 256 * 1024))
            raw = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(map(readable, raw[-lines:]))


def readable(line: str) -> str:
    """A line of the log for people."""
    try:
        entry = json.loads(line)
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(entry["at"])))
        text = f"{at} {entry['level']:<7} {entry['message']}"
        return text + (f"\n{entry['traceback']}" if entry.get("traceback") else "")
    except (ValueError, KeyError, TypeError, OverflowError):
        return line
