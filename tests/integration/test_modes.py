"""One user or many: real server processes, what they refuse, and how the first administrator comes in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from diamond.core.home import ClientConfig
from diamond.core.tls import pin_of
from testing import people
from testing.service import Service
from testing.waiting import eventually


def diamond(home: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    service = Service(home)
    return subprocess.run(
        [sys.executable, "-m", "diamond.cli", *argv], env={**service.env, **env}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["serve", "--host", "0.0.0.0"], {}, ["refusing to listen on 0.0.0.0", "one user", "--multi-user"]),
        (["serve", "--host", "0.0.0.0", "--tls"], {}, ["refusing to listen on 0.0.0.0", "one user", "--multi-user"]),
        (["serve", "--host", "::"], {"DIAMOND_ALLOW_REMOTE": "1"}, ["refusing to listen on ::", "--multi-user"]),
        (["serve", "--host", "0.0.0.0", "--multi-user"], {}, ["plain HTTP", "--tls", "DIAMOND_ALLOW_REMOTE"]),
        (["up", "-d", "--host", "0.0.0.0", "--tls"], {}, ["one user", "--multi-user"]),
        (["up", "-d"], {"DIAMOND_MULTI_USER": "1"}, ["tasks of others", "server's own account", "diamond serve"]),
        (["up"], {"DIAMOND_MULTI_USER": "1"}, ["tasks of others", "server's own account", "diamond serve"]),
    ],
)
def test_what_is_refused_with_the_reason(
    tmp_path: Path, argv: list[str], env: dict[str, str], words: list[str]
) -> None:
    done = diamond(tmp_path / "home", *argv, "--port", "0", **env)
    assert done.returncode != 0
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "home" / "server" / "diamond.db").exists()


def test_the_first_administrator_of_a_real_server(tmp_path: Path) -> None:
    service = Service(tmp_path / "home", multi_user="1", user="alice")
    log = service.home.path / "server.log"
    try:
        service.start_server(wait=False)
        service.wait_healthy()
        assert not service.home.client_file.exists()  # nobody's token lies about
        first = people.printed_code(log)
        assert f"{service.url}/setup" in log.read_text()
        methods = httpx.get(f"{service.url}/api/v1/sign-in-methods").json()
        assert (methods["multi_user"], methods["setup_needed"]) == (True, True)
        service.stop()
        service.start_server(wait=False)
        service.wait_healthy()
        code = eventually(
            lambda: (new := people.printed_code(log)) != first and new, what="a fresh code is printed at each start"
        )
        body = {"code": first, "name": "alice", "password": people.PASSWORD}
        assert httpx.post(f"{service.url}/api/v1/setup", json=body).status_code == 401
        token = people.set_up(service.url, code, "alice")
        config = people.save(service.home, service.url, token)
        assert '"name": "alice"' in httpx.get(
            f"{service.url}/api/v1/me", headers={"Authorization": f"Bearer {token}"}
        ).text.replace('":"', '": "')
        assert people.invite(config, "bob", email="bob@example.org") != token
        service.stop()
        before = log.read_text().count("setup code:")
        service.start_server()
        assert httpx.get(f"{service.url}/api/v1/sign-in-methods").json()["setup_needed"] is False
        assert log.read_text().count("setup code:") == before == 2
        assert code not in (service.home.server / "diamond.db").read_bytes().decode("latin-1")
        with service.client() as client:
            client.tasks.list()
    finally:
        service.stop()


def test_from_one_user_to_many(tmp_path: Path) -> None:
    """What somebody did alone is theirs still, once they have taken their account over."""
    with Service(tmp_path / "home") as alone, alone.client() as client:
        task = client.tasks.create({"run": "true", "name": "mine"})
        config = ClientConfig.load(alone.home)
        assert config is not None
        name = httpx.get(f"{alone.url}/api/v1/me", headers={"Authorization": f"Bearer {config.token}"}).json()["name"]
    many = Service(tmp_path / "home", multi_user="1")
    try:
        many.start_server(wait=False)
        many.wait_healthy()
        token = people.set_up(many.url, people.printed_code(many.home.path / "server.log"), name)
        people.save(many.home, many.url, token)
        with many.client() as client:
            assert client.tasks.get(task.id).name == "mine"
    finally:
        many.stop()


def test_what_has_accounts_is_not_opened_without_them(tmp_path: Path) -> None:
    """Whoever can start the server must not become its administrator by leaving a word away."""
    with Service(tmp_path / "home", multi_user="1"):
        pass
    alone = Service(tmp_path / "home")
    alone.start_server(wait=False)
    assert alone.server is not None
    assert alone.server.wait(timeout=30) == 1
    assert "this installation has accounts" in alone.log_tail("server.log")
    with Service(tmp_path / "home", single_user="1") as again, again.client() as client:
        assert client.accounts.me().name == "alice"


def test_serve_says_the_pin(tmp_path: Path) -> None:
    env = {**os.environ, "DIAMOND_HOME": str(tmp_path / "home")}
    argv = [sys.executable, "-m", "diamond.cli", "serve", "--multi-user", "--tls", "--port", "0"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = next(line for line in process.stderr if line.startswith("  its authority:"))
            command = next(line for line in process.stderr if "openssl" in line)
        finally:
            process.terminate()
    ca = tmp_path / "home" / "server" / "tls" / "ca.pem"
    assert told.split()[-1] == pin_of(ca.read_text()) and command.split()[-1] == str(ca)
