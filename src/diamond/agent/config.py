"""Where an enrolled agent keeps what it knows: agent.json, token and ca.pem in its home.

Homes are `$DIAMOND_HOME/agents/NAME` (`~/.diamond/agents/NAME`) unless another is named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from diamond.core.enrolment import AGENT_FILE
from diamond.core.errors import InstallationProblem, InvalidInput
from diamond.core.home import Home
from diamond.core.ids import new_id
from diamond.core.rundir import read_json, write_atomic


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What enrolment settled."""

    server: str
    name: str = ""
    endpoint_id: str = ""
    private_ca: bool = False  # trust ca.pem beside it, and nothing else
    scheduler: str = ""  # see `diamond.agent.schedulers.choice`; empty: what is found
    enrolled_with: str = ""  # names the code, so that the same line may be pasted twice

    @staticmethod
    def load(home: Path) -> AgentConfig | None:
        raw = read_json(home / "agent.json")
        server = raw.get("server")
        if not isinstance(server, str) or not server:
            return None
        return AgentConfig(
            server=server,
            name=str(raw.get("name", "")),
            endpoint_id=str(raw.get("endpoint_id", "")),
            private_ca=raw.get("private_ca") is True,
            scheduler=str(raw.get("scheduler") or ""),
            enrolled_with=str(raw.get("enrolled_with", "")),
        )

    def save(self, home: Path) -> None:
        write_atomic(home / "agent.json", json.dumps(vars(self), indent=2).encode())

    def ca_file(self, home: Path) -> Path | None:
        return home / "ca.pem" if self.private_ca else None


def token_file(home: Path) -> Path:
    return home / "token"


def own_file(home: Path) -> Path:
    """The one-file agent that this home runs, where it was enrolled with one."""
    return home / AGENT_FILE


def log_file(home: Path) -> Path:
    return home / "agent.log"


def instance_of(home: Path) -> str:
    """What this home is called, from its first start on: the server lets only one speak for an endpoint."""
    path = home / "instance"
    try:
        if name := path.read_text().strip():
            return name
    except FileNotFoundError:
        pass
    name = new_id("agt")
    write_atomic(path, name.encode())
    return name


def enrolled_homes() -> list[Path]:
    folder = Home.find().path / "agents"
    return sorted(path.parent for path in folder.glob("*/agent.json"))


def choose_home(home: Path | None, name: str | None) -> Path:
    """The home a command is about: the one named, else the only one enrolled here.

    Raises:
        InvalidInput: there are several; names them.
        InstallationProblem: there is none.
    """
    if home is not None:
        return home.expanduser().absolute()
    found = enrolled_homes()
    chosen = found if name is None else [path for path in found if path.name == name]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        names = ", ".join(path.name for path in chosen)
        raise InvalidInput(f"several agents are enrolled here: {names}", hint="say which: --name NAME", field="--name")
    raise InstallationProblem(
        f"no agent {f'called {name[:60]!r} ' if name else ''}is enrolled in {Home.find().path / 'agents'}",
        hint="enrol one with the line that `diamond endpoint create NAME` prints; or name its folder with --home",
    )
