"""`diamond login` against a real server with accounts: approved, refused, cancelled, expired, revoked; and HTTPS that
nobody here trusts yet. Also what administrators do from a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.home import ClientConfig, Home
from diamond.core.tls import client_context, pin_of
from diamond.server.services.sessions import csrf_of
from testing import people
from testing.service import Service
from testing.terminals import Typing
from testing.waiting import eventually
from tests.unit.server.browsing import forms_in


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("login") / "home", multi_user="1") as running:
        admin = ClientConfig.load(running.home)
        assert admin is not None
        for name in ("bob", "carol"):
            people.invite(admin, name)
        yield running


class Laptop:
    """Somebody's machine with a home of its own."""

    def __init__(self, server: Service, folder: Path) -> None:
        self.server, self.home = server, Home(folder)
        self.env = {**server.env, "DIAMOND_HOME": str(folder)}
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            self.env.pop(name, None)

    def diamond(self, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "diamond.cli", *argv],
            env=self.env, capture_output=True, text=True, timeout=60, input=stdin, check=False,
        )  # fmt: skip

    def json(self, *argv: str, stdin: str = "") -> Any:
        done = self.diamond(*argv, "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "diamond.cli", "login", *argv, "--json"],
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def saved(self) -> ClientConfig:
        config = ClientConfig.load(self.home)
        assert config is not None
        return config

    def log_in(self, browser: httpx.Client, *argv: str) -> None:
        with waiting(self.start(*argv)) as (process, code):
            assert decide(browser, code).status_code == 200
            ended(process, 0)


@pytest.fixture
def laptop(server: Service, tmp_path: Path) -> Laptop:
    return Laptop(server, tmp_path / "laptop")


@contextlib.contextmanager
def browser_of(server: Service, name: str) -> Iterator[httpx.Client]:
    """A browser that has signed in by the page, as people do."""
    with httpx.Client(base_url=server.url, timeout=30, headers={"Origin": server.url}) as browser:
        form = forms_in(browser.get("/sign-in").text)["/sign-in"]
        answer = browser.post("/sign-in", data=form.fields | {"name": name, "password": people.PASSWORD})
        assert answer.status_code == 303, answer.text
        yield browser


@pytest.fixture
def bob(server: Service) -> Iterator[httpx.Client]:
    with browser_of(server, "bob") as browser:
        yield browser


@pytest.fixture
def carol(server: Service) -> Iterator[httpx.Client]:
    with browser_of(server, "carol") as browser:
        yield browser


def decide(browser: httpx.Client, code: str, what: str = "approve") -> httpx.Response:
    csrf = csrf_of(browser.cookies["diamond_session"])
    return browser.post(f"/api/v1/logins/{code}/{what}", headers={"Diamond-CSRF": csrf})


@contextlib.contextmanager
def waiting(process: subprocess.Popen[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `diamond login` that has shown its code; it ends with the block."""
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.endswith("}\n"), line + "".join(process.communicate(timeout=10))
        said = json.loads(line)
        assert said["type"] == "code"
        assert said["user_code"] not in said["verification_url"]
        yield process, said["user_code"]
    finally:
        process.kill()
        process.communicate(timeout=10)


def ended(process: subprocess.Popen[str], code: int) -> dict[str, Any]:
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, out + err
    said: dict[str, Any] = json.loads(out) if out.strip() else {}
    return said


def test_from_a_code_to_work_and_out_again(server: Service, laptop: Laptop, bob: httpx.Client) -> None:
    with waiting(laptop.start(server.url)) as (process, code):
        seen = bob.get(f"/api/v1/logins/{code}").json()
        assert seen["name"].startswith("diamond login on ")
        assert seen["scopes"] == ["read", "launch", "agent"]
        assert decide(bob, code).json()["state"] == "approved"
        assert decide(bob, code).json()["state"] == "approved"  # a second click
        said = ended(process, 0)
    assert (said["type"], said["user"], said["url"]) == ("signed_in", "bob", server.url)
    assert laptop.home.client_file.stat().st_mode & 0o777 == 0o600
    first = laptop.saved()
    assert (first.user, first.url) == ("bob", server.url)

    me = laptop.json("whoami")
    assert (me["user"]["name"], me["token"]["scopes"]) == ("bob", ["read", "launch", "agent"])
    left_s = me["token"]["expires_at"] - time.time()
    assert 89 * 86_400 < left_s < 91 * 86_400
    assert (me["token"]["used_from"], me["token"]["used_at"] is not None) == ("127.0.0.1", True)
    assert laptop.json("endpoint", "create", "bobs-cluster")["endpoint"]["name"] == "bobs-cluster"
    # Daily work: one's own projects, notifications and secrets.
    assert laptop.json("project", "create", "bobs-lab")["name"] == "bobs-lab"
    rule = laptop.json("notify", "add", "webhook", "https://example.org/hook")
    assert laptop.diamond("notify", "rm", rule["id"]).returncode == 0
    assert laptop.diamond("secret", "set", "KEY", stdin="a value").returncode == 0
    assert laptop.diamond("secret", "rm", "KEY", "-y").returncode == 0
    for argv, scope in (
        (["project", "add", "bobs-lab", "carol"], "admin"),
        (["secret", "set", "KEY", "--project", "bobs-lab"], "admin"),
        (["user", "invite"], "admin"),
        (["token", "create", "x"], "admin"),
        (["endpoint", "rm", "bobs-cluster", "-y"], "admin"),
        (["user", "ls"], "admin"),
    ):
        refused = laptop.diamond(*argv, stdin="a value")
        assert refused.returncode == 1
        assert f"lacks the scope `{scope}`" in refused.stderr
        assert f"diamond login --scopes {scope}" in refused.stderr

    # Again, for more: the address is known, and the token that was there dies.
    laptop.log_in(bob, "--scopes", "admin", "--name", "bob's laptop")
    second = laptop.saved()
    assert second.token != first.token
    assert status_with(server, first.token) == 401
    listed = {one["name"]: one for one in laptop.json("token", "ls")["tokens"]}
    assert listed["bob's laptop"]["current"]
    assert laptop.json("endpoint", "rm", "bobs-cluster")["removed"] == "bobs-cluster"

    assert laptop.json("logout")["revoked"] is True
    assert laptop.saved() == ClientConfig(url=server.url, token="")
    assert status_with(server, second.token) == 401
    assert second.token not in "".join(path.read_text() for path in laptop.home.path.rglob("*") if path.is_file())
    out = laptop.diamond("ps")
    assert out.returncode == 1
    assert "diamond login" in out.stderr


def status_with(server: Service, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{server.url}/api/v1/tasks", headers=headers, timeout=10).status_code


def test_refused_and_cancelled(server: Service, laptop: Laptop, bob: httpx.Client) -> None:
    with waiting(laptop.start(server.url)) as (process, code):
        assert decide(bob, code, "refuse").json()["state"] == "refused"
        assert "refused" in ended(process, 1)["error"]["message"]
    with waiting(laptop.start(server.url)) as (process, code):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 130
        assert decide(bob, code).status_code == 409
    assert not laptop.home.client_file.exists()


def test_one_approval_counts(server: Service, laptop: Laptop, bob: httpx.Client, carol: httpx.Client) -> None:
    with waiting(laptop.start(server.url)) as (process, code):
        with ThreadPoolExecutor(2) as pool:
            answers = dict(
                zip(("bob", "carol"), pool.map(lambda one: decide(one, code).status_code, (bob, carol)), strict=True)
            )
        assert sorted(answers.values()) == [200, 409]
        (winner,) = [name for name, status in answers.items() if status == 200]
        assert ended(process, 0)["user"] == winner
    loser = carol if winner == "bob" else bob
    assert decide(loser, code).status_code == 409  # a replay changes nothing
    assert decide(loser, "0000-0000").status_code == 404


def test_nobody_else_approves(server: Service, laptop: Laptop, bob: httpx.Client) -> None:
    """Not without a session, not from another site's page, not with a token for less."""
    admin = ClientConfig.load(server.home)
    assert admin is not None
    with waiting(laptop.start(server.url, "--scopes", "admin")) as (process, code):
        path = f"{server.url}/api/v1/logins/{code}/approve"
        assert httpx.post(path, timeout=10).status_code == 401
        assert bob.post(path).status_code == 403  # the cookie alone
        csrf = {"Diamond-CSRF": csrf_of(bob.cookies["diamond_session"])}
        assert bob.post(path, headers={**csrf, "Origin": "https://evil.example.org"}).status_code == 403
        made = httpx.post(
            f"{server.url}/api/v1/tokens", json={"name": "less", "scopes": ["read", "launch", "agent"]},
            headers={"Authorization": f"Bearer {admin.token}"}, timeout=10,
        ).json()  # fmt: skip
        less = httpx.post(path, headers={"Authorization": f"Bearer {made['value']}"}, timeout=10)
        assert (less.status_code, "`admin`" in less.text) == (403, True)
        assert process.poll() is None
        assert decide(bob, code).status_code == 200
        ended(process, 0)


def test_a_login_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    with Service(tmp_path / "home", multi_user="1") as own:
        laptop = Laptop(own, tmp_path / "laptop")
        with browser_of(own, "alice") as alice, waiting(laptop.start(own.url)) as (process, code):
            own.kill(own.server)
            time.sleep(2.5)
            own.start_server()
            assert decide(alice, code).status_code == 200  # so does her session
            assert ended(process, 0)["user"] == "alice"
        assert laptop.json("whoami")["user"]["is_admin"] is True
        logs = own.log_tail("server.log", 10_000)
        assert laptop.saved().token not in logs


def test_people_read_what_to_do(server: Service, laptop: Laptop, bob: httpx.Client) -> None:
    argv = [sys.executable, "-m", "diamond.cli", "login", server.url]
    with Typing(argv, {**laptop.env, "TERM": "xterm"}, cols=100) as terminal:
        terminal.expect(rb"/device")
        code = terminal.expect(rb"enter this code:\s+\S*?([0-9A-Z]{4}-[0-9A-Z]{4})")[1].decode()
        terminal.expect(rb"Ctrl-C cancels")
        assert decide(bob, code.lower().replace("-", "")).status_code == 200
        terminal.expect(rb"Signed in at \S+ as bob")
        assert terminal.wait() == 0
    piped = laptop.diamond("whoami")
    assert (piped.stdout, "for read, launch, agent" in piped.stderr) == ("bob\n", True)
    with Typing(argv, {**laptop.env, "TERM": "xterm"}, cols=100) as terminal:
        terminal.expect(rb"Ctrl-C cancels")
        terminal.type(b"\x03")
        assert terminal.wait() == 130
    assert laptop.saved().user == "bob"  # as it was


@pytest.mark.parametrize("how", ["revoke", "logout", "disable"])
def test_a_dead_token_ends_its_open_stream(server: Service, laptop: Laptop, bob: httpx.Client, how: str) -> None:
    laptop.log_in(bob, server.url)
    saved = laptop.saved()
    over = threading.Event()

    def follow() -> None:
        headers = {"Authorization": f"Bearer {saved.token}"}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("GET", f"{server.url}/api/v1/events/stream", headers=headers, timeout=60) as answer,
        ):
            assert answer.status_code == 200
            begun.set()
            for _ in answer.iter_bytes():
                pass
        over.set()

    begun = threading.Event()
    thread = threading.Thread(target=follow)
    thread.start()
    assert begun.wait(10)
    assert not over.wait(0.5)
    assert status_with(server, saved.token) == 200  # now it is remembered, for some seconds
    if how == "logout":
        assert laptop.diamond("logout").returncode == 0
    elif how == "revoke":
        token = next(one for one in laptop.json("token", "ls")["tokens"] if one["current"])
        csrf = {"Diamond-CSRF": csrf_of(bob.cookies["diamond_session"])}
        assert bob.delete(f"/api/v1/tokens/{token['id']}", headers=csrf).status_code == 200
    else:
        assert server.diamond("user", "disable", "bob", "-y").returncode == 0
        assert server.diamond("user", "enable", "bob").returncode == 0
        assert bob.get("/api/v1/me").status_code == 401
    assert status_with(server, saved.token) == 401
    assert over.wait(5), "the stream goes on"
    thread.join()


def test_tokens_for_programs(server: Service, laptop: Laptop, bob: httpx.Client) -> None:
    laptop.log_in(bob, server.url, "--scopes", "admin")
    made = laptop.diamond("token", "create", "ci", "--scopes", "read", "--expires", "3s")
    value = made.stdout.strip()
    assert (made.returncode, made.stdout.count("\n"), value[:5]) == (0, 1, "dmdu_")
    assert value not in made.stderr
    program = Laptop(server, laptop.home.path.parent / "program")
    assert program.json("login", server.url, "--token-stdin", stdin=value + "\n")["user"] == "bob"
    assert program.json("whoami")["token"]["name"] == "ci"
    assert program.diamond("launch", "--help").returncode == 0
    shown = {one["name"]: one for one in laptop.json("token", "ls")["tokens"]}["ci"]
    assert (shown["used_from"], shown["value"]) == ("127.0.0.1", "")
    eventually(lambda: status_with(server, value) == 401, within_s=15, what="it expires")
    late = program.diamond("ps")
    assert (late.returncode, "expired" in late.stderr) == (1, True)
    wrong = program.diamond("login", server.url, "--token-stdin", stdin="dmdu_nothing\n")
    assert (wrong.returncode, "not valid" in wrong.stderr) == (1, True)


def test_administrators_at_the_terminal(server: Service, laptop: Laptop) -> None:
    admin = Laptop(server, server.home.path)
    invited = admin.diamond("user", "invite", "newcomer", "--email", "newcomer@example.org")
    assert invited.returncode == 0, invited.stderr
    page, _, code = invited.stdout.strip().partition("#")
    assert page == f"{server.url}/invitation"
    assert code not in invited.stderr
    (waits,) = admin.json("user", "invitations")["invitations"]
    assert (waits["name"], waits["code"]) == ("newcomer", "")
    joined = httpx.post(
        f"{server.url}/api/v1/invitations/accept",
        json={"code": code, "name": "newcomer", "password": people.PASSWORD}, timeout=30,
    )  # fmt: skip
    assert joined.status_code == 201, joined.text
    assert {one["name"] for one in admin.json("user", "ls")["users"]} >= {"alice", "bob", "carol", "newcomer"}
    assert admin.json("user", "show", "newcomer")["email"] == "newcomer@example.org"
    with browser_of(server, "newcomer") as newcomer:
        assert admin.json("user", "admin", "newcomer")["is_admin"] is True
        laptop.log_in(newcomer, server.url, "--scopes", "admin")
        (session,) = laptop.json("session", "ls")["sessions"]
        assert (session["method"], session["address"]) == ("password", "127.0.0.1")
        assert laptop.json("session", "end", session["id"]) == {"ended": session["id"]}
        assert newcomer.get("/api/v1/me").status_code == 401
    assert admin.json("user", "admin", "newcomer", "--off")["is_admin"] is False
    assert laptop.diamond("user", "ls").returncode == 1
    link = admin.diamond("user", "reset", "newcomer", "--revoke-tokens").stdout.strip()
    new = {"code": link.partition("#")[2], "password": "another long password"}
    assert httpx.post(f"{server.url}/api/v1/reset", json=new, timeout=30).status_code == 200
    assert status_with(server, laptop.saved().token) == 401
    last = admin.diamond("user", "disable", "alice", "-y")
    assert (last.returncode, "last administrator" in last.stderr) == (1, True)
    assert admin.diamond("user", "show", "nobody").returncode == 1


def test_a_private_authority_is_pinned_or_refused(tmp_path: Path) -> None:
    with Service(tmp_path / "home", multi_user="1", tls="1") as own:
        pem = own.ca_file.read_text()
        pin = pin_of(pem)
        token = ClientConfig.load(own.home)
        assert token is not None
        laptop = Laptop(own, tmp_path / "laptop")
        given = ["login", own.url, "--token-stdin"]
        refused = laptop.diamond(*given, stdin=token.token)
        assert (refused.returncode, "--pin sha256:" in refused.stderr, pin in refused.stderr) == (1, True, True)
        wrong = laptop.diamond(*given, "--pin", "sha256:" + "0" * 64, stdin=token.token)
        assert (wrong.returncode, "not the one pinned" in wrong.stderr) == (1, True)
        assert not laptop.home.client_file.exists()
        assert f"its authority is {pin}" in own.log_tail("server.log", 200)
        assert laptop.diamond(*given, "--pin", pin, stdin=token.token).returncode == 0
        kept = laptop.saved()
        assert Path(kept.ca).parent == laptop.home.path / "authorities"
        client_context(kept.ca)
        assert laptop.json("whoami")["user"]["name"] == "alice"
        assert laptop.diamond("login", "--token-stdin", stdin=token.token).returncode == 0  # known by now
        other = Laptop(own, tmp_path / "other")
        assert other.diamond(*given, "--ca", str(own.ca_file), stdin=token.token).returncode == 0
        assert Path(other.saved().ca).read_text() == pem  # a copy: the file may go
        fourth, digits = Laptop(own, tmp_path / "fourth"), pin.removeprefix("sha256:").upper()
        as_openssl = "sha256 Fingerprint=" + ":".join(digits[i : i + 2] for i in range(0, len(digits), 2))
        assert fourth.diamond(*given, "--pin", as_openssl, stdin=token.token).returncode == 0
        # In the server's own home its authority needs no pin, to sign in or with a token of the environment.
        here = Laptop(own, own.home.path)
        own.home.client_file.rename(tmp_path / "client.json")
        at_home = {**here.env, "DIAMOND_URL": own.url, "DIAMOND_TOKEN": token.token}
        who = subprocess.run(
            [sys.executable, "-m", "diamond.cli", "whoami"],
            env=at_home, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (who.returncode, who.stdout) == (0, "alice\n"), who.stderr
        assert here.diamond(*given, stdin=token.token).returncode == 0
        assert Path(here.saved().ca) == own.ca_file
        by_name = own.url.replace("127.0.0.1", "localhost")  # its certificate has this name as well
        assert here.diamond("login", by_name, "--token-stdin", stdin=token.token).returncode == 0
        not_one = tmp_path / "not one.pem"
        not_one.write_text("hello")
        assert other.diamond(*given, "--ca", str(not_one), stdin=token.token).returncode == 1
        third = Laptop(own, tmp_path / "third")
        argv = [sys.executable, "-m", "diamond.cli", "login", own.url]
        for answer, follows in ((b"n\r", rb"--pin"), (b"y\r", rb"enter this code")):
            with Typing(argv, {**third.env, "TERM": "xterm"}, cols=120) as terminal:
                terminal.expect(pin.encode())
                terminal.expect(rb"Is it the same\?")
                terminal.type(answer)
                terminal.expect(follows)
                if answer == b"y\r":
                    os.kill(terminal.pid, signal.SIGINT)
                assert terminal.wait() in (1, 130)


def test_a_server_for_one_user(tmp_path: Path) -> None:
    """Its own home needs no login; another home of the same person may have one."""
    with Service(tmp_path / "home") as own:
        before = own.home.client_file.read_text()
        refused = own.diamond("login")
        assert (refused.returncode, "nothing to sign in to" in refused.stderr) == (1, True)
        assert own.diamond("logout").returncode == 1
        assert own.home.client_file.read_text() == before
        laptop = Laptop(own, tmp_path / "laptop")
        with waiting(laptop.start(own.url)) as (process, code), own.client() as client:
            assert client.logins.find(code).state == "pending"
            client.logins.approve(code)
            assert ended(process, 0)["user"] == client.accounts.me().name
        assert laptop.json("ps")["tasks"] == []


def test_what_is_no_server_to_sign_in_to(server: Service, laptop: Laptop) -> None:
    nobody = laptop.diamond("login", "http://127.0.0.1:1")
    assert (nobody.returncode, "http://127.0.0.1:1" in nobody.stderr) == (1, True)
    wrong_scheme = laptop.diamond("login", server.url.replace("http:", "https:"))
    assert (wrong_scheme.returncode, "write http://" in wrong_scheme.stderr) == (1, True)
    not_ours = laptop.diamond("login", f"{server.url}/elsewhere")
    assert not_ours.returncode in (1, 2)
    assert "Diamond server" in not_ours.stderr
