"""A Diamond server on this machine with several people, and agents of theirs at several real sites.

    with Installation(tmp_path) as diamond:
        diamond.enrol(diamond.person("user1"), site, "alpha", env=build_envs(proxy))

Where one person and one site will do, `testing.cluster.Cluster` is simpler.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from diamond.core.home import ClientConfig, Home
from diamond.sdk.client import Client
from testing import people
from testing.cluster import SOURCE_INSIDE
from testing.minihpc import Site
from testing.minihpc.inside import SiteProcess
from testing.service import Service
from testing.waiting import eventually


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody with an account at the server; their accounts at sites have the same name."""

    name: str
    home: Home
    env: dict[str, str]

    def diamond(self, *argv: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "diamond.cli", *argv],
            env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def client(self) -> Client:
        config = ClientConfig.load(self.home)
        assert config is not None
        return Client(url=config.url, token=config.token)


class Installation:
    """The server and everybody's agents. Use as a context manager; sites are not stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._agents: dict[str, SiteProcess] = {}
        self._starts: dict[str, tuple[Site, str, list[str], dict[str, str]]] = {}
        self.service = Service(folder / "server", host="0.0.0.0", allow_remote="1", multi_user="1")  # noqa: S104

    def __enter__(self) -> Installation:
        self.service.start_server()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self._agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(20)
        self.service.stop()

    def person(self, name: str) -> Person:
        """A new account at the server, of somebody its administrator invited."""
        admin = ClientConfig.load(self.service.home)
        assert admin is not None
        home = Home(self._folder / name)
        people.save(home, self.service.url, people.invite(admin, name))
        return Person(name=name, home=home, env={**self.service.env, "DIAMOND_HOME": str(home.path)})

    def enrol(
        self, person: Person, site: Site, endpoint: str, *, env: Mapping[str, str] | None = None, policy: str = ""
    ) -> None:
        """Start that person's agent at a site, under the name of an endpoint, and wait until it knows its machine."""
        token = person.home.path / f"{endpoint}.token"
        made = person.diamond("endpoint", "create", endpoint, "--token-file", str(token))
        assert made.returncode == 0, made.stderr
        home = f"/home/{person.name}/.diamond/agents/{endpoint}"
        site.run(["mkdir", "-p", home], user=person.name)
        site.write(f"{home}/token", token.read_text(), user=person.name, mode=0o600)
        if policy:
            site.write(f"{home}/policy.toml", policy, user=person.name)
        argv = ["python3", "-m", "diamond.agent", "--scheduler", "slurm", "--home", home]
        argv += ["--server", f"http://{site.server_address}:{self.service.port}", "--token-file", f"{home}/token"]
        envs = {"PYTHONPATH": SOURCE_INSIDE, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        self._starts[endpoint] = (site, person.name, argv, envs)
        self.start_agent(endpoint)

        def is_known() -> bool:
            with person.client() as client:
                facts = client.endpoints.get(endpoint).facts
            return facts is not None and bool(facts.partitions) and bool(facts.builders)

        eventually(is_known, within_s=90, what=f"the agent of {endpoint} is online\n{self.log_of(endpoint)}")

    def start_agent(self, endpoint: str) -> None:
        site, user, argv, env = self._starts[endpoint]
        with (self._folder / f"{endpoint}.log").open("a") as log:
            self._agents[endpoint] = site.popen(argv, user=user, env=env, stdout=log, stderr=log)

    def kill_agent(self, endpoint: str) -> None:
        agent = self._agents[endpoint]
        agent.send_signal(signal.SIGKILL)
        agent.wait(20)

    def log_of(self, endpoint: str) -> str:
        path = self._folder / f"{endpoint}.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""
