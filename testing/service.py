"""Real server and agent processes for tests, each with its own home, which may be killed at any moment.

Processes are started with the same entry points a user's `diamond up` uses. Only processes started here are ended here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import httpx

from diamond.agent.processes import is_running
from diamond.core.home import ClientConfig, Home
from diamond.core.rundir import RunDir, read_process_mark
from diamond.core.states import TaskState
from diamond.core.tls import client_context
from diamond.sdk.client import Client
from testing import people
from testing.postgres import free_port
from testing.waiting import eventually


class Service:
    """A server and its embedded agent over one home. Use as a context manager.

    With the setting `multi_user` there is no agent, and `user` becomes the first administrator by the code that the
    server prints; the home's client.json is theirs.

    Attributes:
        home: their $DIAMOND_HOME.
        url: where the server answers.
    """

    def __init__(self, folder: Path, *, database_url: str | None = None, user: str = "alice", **settings: str) -> None:
        self.home = Home(folder)
        self.is_multi_user = bool(settings.get("multi_user"))
        self._user = user
        self.home.make()
        self.port = free_port()
        self.url = f"{'https' if settings.get('tls') else 'http'}://127.0.0.1:{self.port}"
        settings |= {"port": str(self.port), "database_url": database_url or ""}
        settings |= {} if self.is_multi_user else {"embedded": "local"}
        self._settings = {f"DIAMOND_{key.upper()}": value for key, value in settings.items()}
        self.server: subprocess.Popen[bytes] | None = None
        self.agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Service:
        self.start_server()
        if not self.is_multi_user:
            self.start_agent()
            self.wait_online()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a user of this service."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DIAMOND_")}
        bin_dir = str(Path(sys.executable).parent)
        return {**kept, "DIAMOND_HOME": str(self.home.path), "PATH": f"{bin_dir}:{kept.get('PATH', '')}"}

    @property
    def ca_file(self) -> Path:
        """The authority to trust, where the service was given `tls`."""
        return self.home.server / "tls" / "ca.pem"

    def start_server(self, fault: str = "", *, wait: bool = True) -> None:
        self.server = self._start([sys.executable, "-m", "diamond.server"], "server.log", fault)
        if wait:
            self.wait_healthy()
            self._come_in()

    def _come_in(self) -> None:
        if self.is_multi_user and not self.home.client_file.exists():
            ca = self.ca_file if self.ca_file.exists() else None
            token = people.set_up(self.url, people.printed_code(self.home.path / "server.log"), self._user, ca=ca)
            people.save(self.home, self.url, token, ca=ca)

    def start_agent(self, fault: str = "") -> None:
        folder = self.home.agent("local")
        argv = [sys.executable, "-m", "diamond.agent", "--scheduler", "local", "--server", self.url]
        argv += ["--token-file", str(folder / "token"), "--home", str(folder)]
        argv += ["--ca", str(self.ca_file)] if self.ca_file.exists() else []
        self.agent = self._start(argv, "agent.log", fault)

    def _start(self, argv: list[str], log: str, fault: str) -> subprocess.Popen[bytes]:
        env = {**self.env, **self._settings, **({"DIAMOND_FAULT": fault} if fault else {})}
        with (self.home.path / log).open("ab") as out:
            return subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def wait_healthy(self) -> None:
        def healthy() -> bool:
            assert self.server is not None
            if self.server.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log_tail('server.log')}")
            try:
                trust = client_context(self.ca_file) if self.ca_file.exists() else True
                return httpx.get(f"{self.url}/api/v1/health", timeout=2, verify=trust).status_code == 200
            except httpx.HTTPError:
                return False

        eventually(healthy, within_s=30, what="the server answers")

    def wait_online(self) -> None:
        def online() -> bool:
            with self.client() as client:
                return any(endpoint.online for endpoint in client.endpoints.list())

        eventually(online, within_s=30, what=f"the agent is online\n{self.log_tail('agent.log')}")

    def wait_for_task(self, ref: str, state: TaskState) -> None:
        """Asks with the SDK: a process of the command line for every look would keep the machine from its work."""
        with self.client() as client:
            eventually(lambda: client.tasks.resolve(ref).state is state, what=f"{ref} is {state}")

    def client(self) -> Client:
        config = ClientConfig.load(self.home)
        assert config is not None, "the server left no client.json"
        return Client(url=config.url, token=config.token, ca_file=config.ca)

    def log_tail(self, name: str, lines: int = 40) -> str:
        path = self.home.path / name
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"

    def diamond(self, *argv: str, timeout_s: float = 60, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the CLI as a user of this service would."""
        return subprocess.run(
            [sys.executable, "-m", "diamond.cli", *argv],
            env=self.env, capture_output=True, text=True, timeout=timeout_s, input=stdin, check=False,
        )  # fmt: skip

    def kill(self, process: subprocess.Popen[bytes] | None) -> None:
        """SIGKILL, as the power going off would feel."""
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(timeout=10)

    def stop(self) -> None:
        for process in (self.agent, self.server):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self.agent, self.server):
            if process is not None:
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    self.kill(process)
        self._end_jobs()

    def _end_jobs(self) -> None:
        """Jobs outlive agents by design; in a test nothing may outlive the test."""
        for folder in self.home.agent("local").glob("jobs/*"):
            mark = read_process_mark(RunDir(folder))
            # Neither a mark of nobody (0: cancelled before the start) nor a number that has a new owner.
            if mark is not None and mark.pid > 1 and is_running(mark.pid, mark.start_ticks):
                with contextlib.suppress(OSError):
                    os.killpg(mark.pid, signal.SIGKILL)
