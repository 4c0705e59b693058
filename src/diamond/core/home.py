"""Where Diamond keeps its things on a machine: `$DIAMOND_HOME`, by default ``~/.diamond``.

client.json         address and token the CLI and the SDK use when nothing else is said
server/             the service: database, log streams, curves, blobs, server.json while it runs
agents/<name>/      an agent: token, policy.toml, journal.jsonl, jobs/, cache/
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

    @staticmethod
    def load(home: Home) -> ClientConfig | None:
        """DIAMOND_URL and DIAMOND_TOKEN win over client.json; None when there is neither."""
        url, token = os.environ.get("DIAMOND_URL", ""), os.environ.get("DIAMOND_TOKEN", "")
        if not (url and token):
            try:
                saved = json.loads(home.client_file.read_text())
            except (OSError, ValueError):
                saved = {}
            if not isinstance(saved, dict):
                saved = {}
            url, token = url or str(saved.get("url", "")), token or str(saved.get("token", ""))
        return ClientConfig(url=url.rstrip("/"), token=token) if url else None

    def save(self, home: Home) -> None:
        home.make()
        write_atomic(home.client_file, json.dumps({"url": self.url, "token": self.token}, indent=2).encode())
