"""Where Diamond keeps its things on a machine: `$DIAMOND_HOME`, by default ``~/.diamond``.

client.json         address and token the CLI and the SDK use when nothing else is said
server/             the service: database, log streams, curves, blobs, tls/, server.json while it runs
agents/<name>/      an agent: agent.json, token, policy.toml, journal.jsonl, jobs/, cache/
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from diamond.core.rundir import write_atomic

DEFAULT_PORT = 7421
LOCAL_ENDPOINT = "local"


@dataclass(frozen=True)
class Home:
    path: Path

    @staticmethod
    def find() -> Home:
        chosen = os.environ.get("DIAMOND_HOME")
        return Home(Path(chosen).expanduser().absolute() if chosen else Path.home() / ".diamond")

    @property
    def client_file(self) -> Path:
        return self.path / "client.json"

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def server_file(self) -> Path:
        """`{"pid", "url"}` of the running server; removed when it stops."""
        return self.server / "server.json"

    def agent(self, name: str) -> Path:
        return self.path / "agents" / name

    def make(self) -> None:
        """Create the directory, closed to other users: it holds tokens."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    url: str
    token: str
    ca: str = ""  # file with the one authority to trust; empty: those of the system

    @staticmethod
    def load(home: Home) -> ClientConfig | None:
        """DIAMOND_URL, DIAMOND_TOKEN and DIAMOND_CA win over client.json; None when there is no address."""
        url, token = os.environ.get("DIAMOND_URL", ""), os.environ.get("DIAMOND_TOKEN", "")
        ca = os.environ.get("DIAMOND_CA", "")
        if not (url and token):
            try:
                saved = json.loads(home.client_file.read_text())
            except (OSError, ValueError):
                saved = {}
            if not isinstance(saved, dict):
                saved = {}
            if not ca and url in ("", saved.get("url")):
                ca = str(saved.get("ca", ""))
            url, token = url or str(saved.get("url", "")), token or str(saved.get("token", ""))
        return ClientConfig(url=url.rstrip("/"), token=token, ca=ca) if url else None

    def save(self, home: Home) -> None:
        home.make()
        said = {"url": self.url, "token": self.token, **({"ca": self.ca} if self.ca else {})}
        write_atomic(home.client_file, json.dumps(said, indent=2).encode())
