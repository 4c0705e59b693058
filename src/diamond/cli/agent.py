"""Agents: `diamond agent run`, and the child process that `diamond up` keeps alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from diamond.cli import locks
from diamond.cli.session import leave, say
from diamond.core.errors import InstallationProblem, InvalidInput
from diamond.core.home import ClientConfig, Home
from diamond.core.rundir import write_atomic

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
SETTLED_S = 60.0  # alive so long, its next death starts the delays anew
STOP_WAIT_S = 15.0
MAX_LOG_BYTES = 10 * 1024 * 1024


def run(server: str, token_file: Path, home: Path, *, ca_file: Path | None = None, take_over: bool = False) -> None:
    from diamond.agent.credentials import Credentials
    from diamond.agent.main import run as run_agent

    try:
        token = Credentials.load(token_file.expanduser().absolute())
    except InstallationProblem as error:
        raise InvalidInput(error.message, hint=error.hint, field="--token-file") from error
    folder = home.expanduser().absolute()
    leave(run_agent(server_url=server, token=token, home=folder, ca_file=ca_file, take_over=take_over))


def enroll(server: str, **options: Any) -> None:
    from diamond.agent import command

    command.enroll(server, **options)


def start(home: Path | None, name: str | None, *, via: str, foreground: bool) -> None:
    from diamond.agent import command, config

    leave(command.start(config.choose_home(home, name), via=via, foreground=foreground))


def stop(home: Path | None, name: str | None) -> None:
    from diamond.agent import command, config

    command.stop(config.choose_home(home, name))


def status(home: Path | None, name: str | None, *, as_json: bool) -> None:
    from diamond.agent import command, config

    leave(command.show_status(config.choose_home(home, name), as_json=as_json))


def logs(home: Path | None, name: str | None, *, lines: int, follow: bool) -> None:
    from diamond.agent import command, config

    command.logs(config.choose_home(home, name), lines=lines, follow=follow)


def upgrade(home: Path | None, name: str | None, *, sha256: str, source: Path | None) -> None:
    from diamond.agent import command, config

    command.show_upgrade(config.choose_home(home, name), sha256=sha256, source=source)


def policy(home: Path | None, name: str | None, *, check: Path | None, as_json: bool) -> None:
    from diamond.agent import config, policy_page

    folder = config.choose_home(home, name) if check is None else Path()
    leave(policy_page.show(folder, check=check.expanduser() if check else None, as_json=as_json))


def bundle(file: Path) -> None:
    from diamond.core import onefile

    data = onefile.build()
    try:
        write_atomic(file.expanduser().absolute(), data, mode=0o755)
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}", field="FILE") from error
    print(f"{file}: {len(data)} bytes, SHA-256 {onefile.digest()}")


def end_left_over_agent(folder: Path, *, unless_for: str | None = None) -> bool:
    """End an agent that outlived the `up` that started it (killed, say); its jobs go on.

    Args:
        unless_for: leave it be when it works for this server, as it is of use there.
    """
    lock = folder / "agent.lock"
    pid = locks.holder(lock)
    words = locks.arguments(pid) if pid else []
    # Only what `up` starts: an agent run by hand has another command line.
    if not pid or "diamond.agent" not in words or str(folder) not in words or unless_for in words:
        return False
    try:
        return locks.end(pid, lock, STOP_WAIT_S)
    except PermissionError:
        return False


def about_this_machine() -> str:
    """What somebody who starts Diamond on a cluster's login node should know; empty elsewhere."""
    from diamond.agent.schedulers import foreign

    other = foreign.find()
    if other is None:
        return ""
    return (
        f"note: this machine belongs to a cluster of {other}, which Diamond cannot submit to: tasks at the endpoint "
        f"of `diamond up` run on this machine itself, beside everybody who is signed in on it"
    )


class Supervisor:
    """Keeps one agent running beside the server, in its own session so that a terminal's Ctrl-C passes it by."""

    def __init__(self, home: Home, name: str) -> None:
        self._home = home
        self._folder = home.agent(name)
        self._url = ""
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, url: str) -> None:
        """Start the agent and a thread that restarts it; returns at once."""
        self._url = url
        self._thread = threading.Thread(target=self._watch, name="agent", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Ask the agent to end and wait for it; whether there was one to stop. Its jobs go on."""
        self._stopping.set()
        with self._lock:
            child = self._child
        if child is None or child.poll() is not None:
            return False
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            # Its journal makes this harmless, and a second agent could not start beside it.
            child.kill()
            child.wait()
        return True

    def _watch(self) -> None:
        delay_s = FIRST_DELAY_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                code = self._run_once()
            except OSError as error:
                say(f"the agent cannot be started: {error}")
                code = -1
            if code is None:
                return
            if locks.holder(self._folder / "agent.lock") is not None:
                if end_left_over_agent(self._folder, unless_for=self._url):
                    continue
                say("an agent for this machine runs already; leaving it be")
                # It was left by a server that was killed: take over once it ends.
                delay_s = MAX_DELAY_S
            elif not self._stopping.is_set():
                delay_s = FIRST_DELAY_S if time.monotonic() - began > SETTLED_S else min(delay_s * 2, MAX_DELAY_S)
                say(f"the agent ended with code {code}; starting it again in {delay_s:.0f} s (log: {self._log})")
            self._stopping.wait(delay_s)

    def _run_once(self) -> int | None:
        """Run the agent until it ends; None when stopping has begun."""
        # This machine, also where it happens to be a login node: its cluster is another endpoint.
        argv = [sys.executable, "-m", "diamond.agent", "--scheduler", "local", "--server", self._url]
        argv += ["--token-file", str(self._folder / "token"), "--home", str(self._folder)]
        config = ClientConfig.load(self._home)
        argv += ["--ca", config.ca] if config and config.ca and self._url.startswith("https:") else []
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._rotate()
        with self._lock:
            if self._stopping.is_set():
                return None
            with open(self._log, "ab") as log:
                os.fchmod(log.fileno(), 0o600)
                self._child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self._folder
                )
        return self._child.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "agent.log"

    def _rotate(self) -> None:
        """One old log is kept. Only between two lives of the agent, which writes to it while it runs."""
        try:
            if self._log.stat().st_size > MAX_LOG_BYTES:
                os.replace(self._log, self._log.with_suffix(".log.1"))
        except OSError:
            return
