"""A Diamond server on this machine and its agent on the login node of a real Slurm site, as user1.

The agent runs from the source tree, which the site sees read-only, with the site's own Python: nothing is installed
there. Both ends can be killed at any moment and started again.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import IO

from diamond.core.endpoints import Endpoint
from testing.minihpc import Site
from testing.service import Service
from testing.waiting import eventually

SOURCE = Path(__file__).resolve().parents[1] / "src"
SOURCE_INSIDE = "/opt/diamond/src"
BINDS = {SOURCE_INSIDE: SOURCE}  # for Site(binds=…)
HOME_INSIDE = "/home/user1/.diamond/agents/cluster"


class Cluster:
    """A service whose one endpoint is a site. Use as a context manager; the site is not stopped.

    Args:
        site: started with `binds=BINDS`.
        policy: text of the agent's policy.toml.
        env: for the agent, e.g. a PATH with a broken squeue first.
        name: of the endpoint.
        account: of the site (`ACCOUNTS`), whose agent and jobs they are.
    """

    def __init__(
        self,
        site: Site,
        folder: Path,
        *,
        policy: str = "",
        python: str = "python3",
        env: dict[str, str] | None = None,
        home: str = HOME_INSIDE,
        name: str = "cluster",
        account: str = "user1",
        **settings: str,
    ) -> None:
        self.site = site
        self.service = Service(folder, host="0.0.0.0", allow_remote="1", multi_user="1", **settings)  # noqa: S104
        self.url_inside = f"http://{site.server_address}:{self.service.port}"
        self.agent: subprocess.Popen[str] | None = None
        self.home_inside = home
        self.name = name
        self.account = account
        self._python = python
        self._policy = policy
        self._env = dict(env or {})
        self._log: IO[str] | None = None

    def __enter__(self) -> Cluster:
        self.service.start_server()
        made = self.service.diamond("endpoint", "create", self.name, "--token-file", str(self._token))
        assert made.returncode == 0, made.stderr
        self.site.run(["mkdir", "-p", self.home_inside], user=self.account)
        self.site.write(f"{self.home_inside}/token", self._token.read_text(), user=self.account, mode=0o600)
        if self._policy:
            self.site.write(f"{self.home_inside}/policy.toml", self._policy, user=self.account)
        self.start_agent()
        self.wait_online()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_agent()
        self.site.run(["scancel", f"--user={self.account}"], check=False)
        self.service.stop()
        if self._log is not None:
            self._log.close()

    @property
    def _token(self) -> Path:
        return self.service.home.path / "cluster.token"

    def start_agent(self, fault: str = "") -> None:
        """`fault`: a point at which it kills itself (see `diamond.core.faults`)."""
        if self._log is None:
            self._log = (self.service.home.path / "cluster-agent.log").open("a")
        argv = [self._python, "-m", "diamond.agent", "--server", self.url_inside, "--home", self.home_inside]
        argv += ["--token-file", f"{self.home_inside}/token", "--scheduler", "slurm"]
        env = {"PYTHONPATH": SOURCE_INSIDE, "PYTHONDONTWRITEBYTECODE": "1", **self._env}
        if fault:
            env["DIAMOND_FAULT"] = fault
        self.agent = self.site.popen(argv, user=self.account, env=env, stdout=self._log, stderr=self._log)

    def stop_agent(self) -> None:
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(signal.SIGTERM)
            try:
                self.agent.wait(20)
            except subprocess.TimeoutExpired:
                self.kill_agent()

    def kill_agent(self) -> None:
        """SIGKILL, as the power going off would feel."""
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(signal.SIGKILL)
            self.agent.wait(20)

    def endpoint(self) -> Endpoint:
        with self.service.client() as client:
            return client.endpoints.get(self.name)

    def wait_online(self) -> None:
        def online() -> bool:
            found = self.endpoint()
            return found.online and found.facts is not None and bool(found.facts.partitions)

        eventually(online, within_s=60, what=f"the agent is online\n{self.service.log_tail('cluster-agent.log')}")
