"""Where Diamond keeps its things on a machine: `$DIAMOND_HOME`, by default ``~/.diamond``.

client.json         address, token and user that the CLI and the SDK go by when nothing else is said
server/             the service: database, log streams, curves, blobs, tls/, server.json while it runs
authorities/        certificates of private authorities that `diamond login` was told to trust
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
        """`{"pid", "url", "ca"}` of the running server; removed when it stops. `ca` is the file with its authority,
        where systems do not know that by themselves."""
        return self.server / "server.json"

    def own_authority(self, url: str = "") -> str:
        """The file with the authority of this home's own server, for whoever runs that server; else empty.

        Args:
            url: only if the server answers at this address, as it says; empty: wherever it answers.
        """
        try:
            said = json.loads(self.server_file.read_bytes())
            ca = str(said.get("ca", "")) if not url or said.get("url") == url else ""
            # Another's file could name an authority of theirs. Whoever can write here has the token as well.
            return ca if ca and self.server_file.stat().st_uid == os.geteuid() else ""
        except (OSError, ValueError, AttributeError):
            return ""

    def authority_file(self, host: str, port: int) -> Path:
        """Certificate of the private authority behind a server, kept by `diamond login`."""
        safe = "".join(char if char.isalnum() or char in ".-" else "_" for char in host)[:200]
        return self.path / "authorities" / f"{safe}-{port}.pem"

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
    user: str = ""  # whom `diamond login` signed in; empty: the token came otherwise

    @staticmethod
    def load(home: Home) -> ClientConfig | None:
        """DIAMOND_URL, DIAMOND_TOKEN and DIAMOND_CA win over client.json; None when there is no address."""
        url, token = os.environ.get("DIAMOND_URL", ""), os.environ.get("DIAMOND_TOKEN", "")
        ca, user = os.environ.get("DIAMOND_CA", ""), ""
        if not (url and token):
            try:
                saved = json.loads(home.client_file.read_text())
            except (OSError, ValueError):
                saved = {}
            if not isinstance(saved, dict):
                saved = {}
            if not ca and url.rstrip("/") in ("", saved.get("url")):
                ca = str(saved.get("ca", ""))
            # A saved token belongs to the saved address: it is not shown to any other server.
            own = url.rstrip("/") in ("", saved.get("url"))
            user = str(saved.get("user", "")) if own and not token else ""
            token = token or (str(saved.get("token", "")) if own else "")
            url = url or str(saved.get("url", ""))
        if not ca and url.startswith("https://"):
            ca = home.own_authority(url.rstrip("/"))
        return ClientConfig(url=url.rstrip("/"), token=token, ca=ca, user=user) if url else None

    def save(self, home: Home) -> None:
        home.make()
        said = {"url": self.url, "token": self.token}
        said |= {key: value for key, value in (("ca", self.ca), ("user", self.user)) if value}
        write_atomic(home.client_file, json.dumps(said, indent=2).encode())
