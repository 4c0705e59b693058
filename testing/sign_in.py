"""A service that people sign in to through identity providers, all in processes of their own, and their browsers."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from diamond.core.home import ClientConfig
from testing.identity_provider import CLIENT_ID, CLIENT_SECRET
from testing.postgres import free_port
from testing.service import Service
from testing.waiting import eventually


@contextlib.contextmanager
def process(*argv: str, url: str) -> Iterator[None]:
    """A program that answers at `url`, until the end of the block."""
    started = subprocess.Popen(
        [sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:

        def answers() -> bool:
            assert started.poll() is None, f"{argv} ended"
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(url, timeout=5).status_code == 200
            return False

        eventually(answers, within_s=60, what=f"{argv} answers")
        yield
    finally:
        started.kill()
        started.wait()


def provider_toml(name: str, issuer: str, **settings: Any) -> str:
    """One entry of identity.toml. `settings` are TOML values as they stand."""
    given = {
        "name": f'"{name}"',
        "title": f'"{name.capitalize()}"',
        "issuer": f'"{issuer}"' if issuer else "",
        "client_id": f'"{CLIENT_ID}"',
        "client_secret_file": '"provider.secret"',
        "allow": "{ everybody = true }",
        **settings,
    }
    return "[[provider]]\n" + "\n".join(f"{key} = {value}" for key, value in given.items() if value) + "\n"


def write_identity_file(service: Service, text: str) -> None:
    service.home.server.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = service.home.server / "provider.secret"
    secret.touch(mode=0o600)
    secret.write_text(CLIENT_SECRET)
    (service.home.server / "identity.toml").write_text(text)


@dataclass
class Tenant:
    """One issuer of `testing.identity_provider`, to be told what to say."""

    issuer: str

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer

    def control(self, **said: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.issuer}/control", json=said, timeout=10)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


class Browser:
    """What a browser does when people sign in: it keeps cookies, and goes where it is sent, one step at a time."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.http = httpx.Client(timeout=30, headers={"User-Agent": "Mozilla/5.0 (X11; Linux) Firefox/150.0"})

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path if path.startswith("http") else self.service.url + path)

    def post(self, path: str, page: str, **fields: str) -> httpx.Response:
        """Send a form of `page`, with the value that page holds against forgery."""
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.get(page).text)
        assert found, f"{page} has no form"
        return self.http.post(self.service.url + path, data={"csrf": found[1], **fields})

    def begin(self, provider: str, next_path: str = "/dashboard") -> str:
        """To the address at the provider that the browser is sent to."""
        answer = self.get(f"/sign-in/{provider}?next={next_path}")
        assert answer.status_code == 303, (answer.status_code, answer.text)
        return answer.headers["location"]

    def sent_back(self, place: str) -> str:
        """The address that the provider sends the browser back to."""
        answer = self.http.get(place)
        assert answer.status_code == 302, (answer.status_code, answer.text)
        return answer.headers["location"]

    def sign_in(self, provider: str, next_path: str = "/dashboard") -> httpx.Response:
        """All the way, where the provider asks nothing; the last answer of ours."""
        return self.get(self.sent_back(self.begin(provider, next_path)))

    def led_on(self, answer: httpx.Response) -> str:
        """Where a page leads on to by itself."""
        found = re.search(r'<meta http-equiv="refresh" content="0; url=([^"]+)">', answer.text)
        assert answer.status_code == 200 and found, (answer.status_code, answer.text)
        return found[1].replace("&amp;", "&")

    def is_signed_in(self) -> bool:
        return self.get("/dashboard").status_code == 200

    def me(self) -> dict[str, Any]:
        answer = self.get("/api/v1/me")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def as_admin(service: Service, method: str, path: str, **body: Any) -> Any:
    """A request of the administrator, who set the service up."""
    config = ClientConfig.load(service.home)
    assert config is not None
    headers = {"Authorization": f"Bearer {config.token}"}
    answer = httpx.request(method, f"{config.url}/api/v1{path}", headers=headers, json=body or None, timeout=30)
    assert answer.is_success, answer.text
    return answer.json()


def rows(service: Service, query: str) -> list[tuple[Any, ...]]:
    """What the service's database holds, read past the service."""
    with contextlib.closing(sqlite3.connect(f"file:{service.home.server / 'diamond.db'}?mode=ro", uri=True)) as found:
        return found.execute(query).fetchall()


def parameters(url: str) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(url).query).items()}


@contextlib.contextmanager
def lying_provider() -> Iterator[str]:
    """Address of `testing.identity_provider`; what follows it names a tenant."""
    url = f"http://127.0.0.1:{free_port()}"
    with process("-m", "testing.identity_provider", str(urlsplit(url).port), url=f"{url}/any/jwks"):
        yield url


@contextlib.contextmanager
def running(folder: Path, identity_toml: str) -> Iterator[Service]:
    service = Service(folder, multi_user="1", sqlite_synchronous="OFF")
    write_identity_file(service, identity_toml)
    with service:
        yield service
