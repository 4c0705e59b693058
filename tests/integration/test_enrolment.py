"""From the printed line to a running agent, over real TLS, with the one-file agent and a bare interpreter; and what
becomes of tokens when processes are killed in the middle of changing them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from diamond.core.errors import DiamondError, Unavailable
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing.service import Service
from testing.waiting import eventually

# Nothing else is on the login node's path: no crontab to change, no systemd to ask, no Slurm.
PROGRAMS = ("bash", "sh", "curl", "sha256sum", "cat", "date", "sleep", "mv", "rm", "mkdir", "env", "true", "hostname")


@dataclass
class Login:
    """A login node's account: a home with a hostile name, few programs, a Python with nothing installed."""

    home: Path
    path: Path

    @property
    def env(self) -> dict[str, str]:
        outside = {"TMUX_TMPDIR": str(self.path)}
        return {"HOME": str(self.home), "PATH": str(self.path), "LANG": "C.UTF-8", **outside}

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def paste(self, line: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-c", line, check=check)

    def agent(self, name: str, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("python3", str(self.folder(name) / "diamond-agent.pyz"), *argv, check=check)

    def folder(self, name: str) -> Path:
        return self.home / ".diamond" / "agents" / name

    def status(self, name: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.agent(name, "status", "--json", check=False).stdout)
        return found


def oldest_python() -> str:
    """Python 3.10 where there is one, else the interpreter behind this virtual environment."""
    places = [shutil.which("python3.10"), *map(str, Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10"))]
    return next((place for place in places if place and "shims" not in place), os.path.realpath(sys.executable))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("secure") / "home", tls="1", sqlite_synchronous="OFF")
    service.start_server()
    yield service
    service.stop()


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    path = tmp_path / "bin"
    path.mkdir()
    for name in PROGRAMS:
        if found := shutil.which(name):
            (path / name).symlink_to(found)
    (path / "python3").symlink_to(oldest_python())
    home = tmp_path / "a b'$(x)é"
    home.mkdir()
    made = Login(home=home, path=path)
    yield made
    for folder in made.home.glob(".diamond/agents/*"):
        made.agent(folder.name, "stop", check=False)


def line_for(service: Service, *argv: str) -> dict[str, str]:
    done = service.diamond("endpoint", *argv, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, str] = json.loads(done.stdout)
    return found


def wait_online(client: Client, name: str, *, online: bool = True) -> None:
    eventually(lambda: client.endpoints.get(name).online is online, what=f"{name} is {'online' if online else 'off'}")


def run_task(client: Client, name: str) -> str:
    task = client.tasks.create({"run": "echo hello", "resources": {"infra": name}})
    assert client.tasks.wait(task.id, timeout_s=30).state is TaskState.SUCCEEDED
    return b"".join(client.tasks.logs(task.id)).decode()


def test_one_pasted_line(secure: Service, login: Login) -> None:
    made = line_for(secure, "create", "cluster")
    assert "a cluster cannot reach it" in made["warnings"][0]
    pasted = login.paste(made["line"])
    assert "kept by plain" in pasted.stdout
    with secure.client() as client:
        wait_online(client, "cluster")
        assert run_task(client, "cluster") == "hello\n"
        facts = client.endpoints.get("cluster").facts
        assert facts is not None
        assert (
            facts.python
            == login.run("python3", "-c", "import platform; print(platform.python_version())").stdout.strip()
        )

        folder = login.folder("cluster")
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        token = (folder / "token").read_text()
        assert token.startswith("dmda_")
        pid = login.status("cluster")["running"]["pid"]  # type: ignore[index]
        shown = pasted.stdout + (folder / "agent.log").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
        assert token not in shown + Path(f"/proc/{pid}/environ").read_text() + made["line"]

        again = login.paste(made["line"])  # the very same line, on the same machine
        assert (folder / "token").read_text() == token
        assert "started anew" in again.stdout
        other = Login(home=login.home / "other", path=login.path)
        other.home.mkdir()
        stolen = other.paste(made["line"], check=False)
        assert (stolen.returncode, "used already" in stolen.stderr) == (1, True)
        assert not (other.folder("cluster") / "token").exists()

        # Any number of starts is one agent; a killed one comes back; a stopped one does not.
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(lambda _: login.agent("cluster", "start").stdout, range(2)))
        assert all("runs already" in text for text in said), said
        pid = login.status("cluster")["running"]["pid"]  # type: ignore[index]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: login.status("cluster")["running"] not in (None, {"pid": pid}), what="it came back")
        wait_online(client, "cluster")
        login.agent("cluster", "stop")
        wait_online(client, "cluster", online=False)
        status = login.status("cluster")
        assert (status["ok"], status["running"], status["via"]) == (False, None, "")
        assert "start it" in status["problem"]["hint"]  # type: ignore[index]


def test_a_login_node_of_another_batch_system(secure: Service, login: Login) -> None:
    """Refused before the code is spent, at the start as well; taken as a single machine by somebody who says so."""
    line = line_for(secure, "create", "pbs-site")["line"]
    for name in ("qsub", "qstat", "pbsnodes"):
        (login.path / name).write_text("#!/bin/sh\n")
        (login.path / name).chmod(0o755)
    refused = login.paste(line, check=False)
    assert refused.returncode != 0
    assert f"a cluster of PBS ({login.path}/qsub, " in refused.stderr and "--scheduler local" in refused.stderr
    assert not list(login.home.glob(".diamond/agents/*/token"))
    with secure.client() as client:
        assert not client.endpoints.get("pbs-site").online
    done = login.paste(f"{line} --scheduler local")
    assert "The agent runs in the background" in done.stdout
    with secure.client() as client:
        wait_online(client, "pbs-site")
        assert "hello" in run_task(client, "pbs-site")
    login.agent("pbs-site", "stop")
    config = login.folder("pbs-site") / "agent.json"
    config.write_text(config.read_text().replace('"scheduler": "local"', '"scheduler": ""'))  # as of an older version
    started = login.agent("pbs-site", "run", check=False)
    assert started.returncode == 1 and "a cluster of PBS" in started.stderr
    login.agent("pbs-site", "run", "--once", "--scheduler", "local")


def test_without_curl_and_with_four_starts_at_once(secure: Service, login: Login) -> None:
    (login.path / "curl").unlink()
    made = line_for(secure, "create", "quiet")
    assert (
        "diamond-agent.pyz"
        in login.paste(made["line_without_curl"].removesuffix(" --start")).stdout + "diamond-agent.pyz"
    )
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: login.agent("quiet", "start", "--via", "plain").stdout, range(4)))
    assert sum("runs in the background" in text for text in said) == 1, said
    with secure.client() as client:
        wait_online(client, "quiet")


def test_kept_by_tmux(secure: Service, login: Login) -> None:
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("tmux is not installed here")
    made = line_for(secure, "create", "window")
    login.paste(made["line"].replace(" --start", ""))
    refused = login.agent("window", "start", "--via", "tmux", check=False)
    assert (refused.returncode, "tmux cannot be used" in refused.stderr) == (1, True)
    (login.path / "tmux").symlink_to(tmux)
    assert "kept by tmux: as asked" in login.agent("window", "start", "--via", "tmux").stdout
    assert "diamond-agent-window" in login.run("tmux", "ls").stdout
    with secure.client() as client:
        wait_online(client, "window")
        login.agent("window", "stop")
        wait_online(client, "window", online=False)
    eventually(lambda: login.run("tmux", "ls", check=False).returncode, what="the session is gone")


def test_what_a_line_does_not_survive(secure: Service, login: Login) -> None:
    made = line_for(secure, "create", "careful")
    pin = made["enrolment"]["pin"]  # type: ignore[index]
    for changed, words in (
        (made["line"].replace(pin, "sha256:" + "0" * 64), "not the one pinned"),
        (made["line"].replace(f" --pin {pin}", ""), "not signed by an authority trusted here"),
        (made["line"].replace("--code ", "--code 0"), "not an enrolment code"),
        (made["line"].replace("--start", "--name other"), "the code is for endpoint careful"),
    ):
        done = login.paste(changed, check=False)
        assert done.returncode in (1, 2)
        assert words in done.stderr, (changed, done.stderr)
    digest = made["enrolment"]["agent_sha256"]  # type: ignore[index]
    tampered = login.paste(made["line"].replace(digest, "0" * 64), check=False)
    assert tampered.returncode == 1
    assert "FAILED" in tampered.stdout
    assert not login.folder("careful").exists()
    assert login.paste(made["line"].replace(" --start", "")).returncode == 0, "none of that used the code up"


def test_rotated_revoked_enrolled_anew_and_removed(secure: Service, login: Login) -> None:
    login.paste(line_for(secure, "create", "turning")["line"])
    token_file = login.folder("turning") / "token"
    with secure.client() as client:
        wait_online(client, "turning")
        before = token_file.read_text()
        rotated = secure.diamond("endpoint", "rotate", "turning")
        assert "the old one is dead" in rotated.stdout, rotated.stderr
        after = token_file.read_text()
        assert after != before
        with (
            pytest.raises(DiamondError, match="revoked"),
            Client(secure.url, before, ca_file=str(secure.ca_file)) as old,
        ):
            old.endpoints.list()
        assert run_task(client, "turning") == "hello\n"

        task = client.tasks.create({"run": "sleep 3; echo survived", "resources": {"infra": "turning"}})
        eventually(lambda: client.tasks.get(task.id).state is TaskState.RUNNING, what="it runs")
        assert secure.diamond("endpoint", "rm", "turning", "-y").returncode == 1
        assert secure.diamond("endpoint", "revoke", "turning", "-y").returncode == 0
        assert client.endpoints.get("turning").online is False
        eventually(lambda: login.status("turning")["last_error"], what="the agent says so")
        assert "revoked" in login.status("turning")["problem"]["message"]  # type: ignore[index]
        assert "token was revoked" in secure.diamond("check").stdout
        login.paste(line_for(secure, "enroll", "turning")["line"])
        assert client.tasks.wait(task.id, timeout_s=30).state is TaskState.SUCCEEDED
        assert b"".join(client.tasks.logs(task.id)) == b"survived\n"

        login.agent("turning", "stop")
        wait_online(client, "turning", online=False)
        offline = line_for(secure, "rotate", "turning")
        held = token_file.read_text()
        login.paste(offline["line"])
        wait_online(client, "turning")
        assert token_file.read_text() != held
        assert secure.diamond("endpoint", "rm", "turning", "-y").returncode == 0
        assert client.tasks.get(task.id).endpoint == "turning (removed)"


def test_killed_in_the_middle_of_a_rotation(secure: Service, login: Login) -> None:
    login.paste(line_for(secure, "create", "mortal")["line"].replace(" --start", ""))
    folder = login.folder("mortal")
    argv = ["python3", str(folder / "diamond-agent.pyz"), "run", "--home", str(folder)]

    def start(fault: str = "") -> subprocess.Popen[bytes]:
        env = {**login.env, **({"DIAMOND_FAULT": fault} if fault else {})}
        with (folder / "agent.log").open("ab") as out:
            return subprocess.Popen(argv, env=env, cwd=folder, stdout=out, stderr=out, start_new_session=True)

    with secure.client() as client:
        for point in ("agent.token_made", "agent.token_told", "agent.token_taken"):
            before = (folder / "token").read_text()
            agent = start(point)
            try:
                wait_online(client, "mortal")
                assert not client.endpoints.rotate("mortal", wait_s=0).rotated
                assert agent.wait(timeout=20) == -signal.SIGKILL, point
            finally:
                agent.kill()
            agent = start()
            try:
                assert eventually(lambda: client.endpoints.rotate("mortal", wait_s=5).rotated, what=point)
                assert run_task(client, "mortal") == "hello\n"
            finally:
                agent.terminate()
                assert agent.wait(timeout=20) == 0
            assert (folder / "token").read_text() != before


def test_a_token_that_died_before_it_was_used_does_not_stand_in_the_way(secure: Service, login: Login) -> None:
    """Killed in the middle of a rotation, revoked, enrolled anew: what the rotation left behind is of no use."""
    login.paste(line_for(secure, "create", "unlucky")["line"].replace(" --start", ""))
    folder = login.folder("unlucky")
    argv = ["python3", str(folder / "diamond-agent.pyz"), "run", "--home", str(folder)]
    env = {**login.env, "DIAMOND_FAULT": "agent.token_told"}
    agent = subprocess.Popen(argv, env=env, cwd=folder, stderr=subprocess.DEVNULL, start_new_session=True)
    with secure.client() as client:
        try:
            wait_online(client, "unlucky")
            assert not client.endpoints.rotate("unlucky", wait_s=0).rotated
            assert agent.wait(timeout=20) == -signal.SIGKILL
        finally:
            agent.kill()
        assert secure.diamond("endpoint", "revoke", "unlucky", "-y").returncode == 0
        login.paste(line_for(secure, "enroll", "unlucky")["line"])
        wait_online(client, "unlucky")
        before = (folder / "token").read_text()
        assert client.endpoints.rotate("unlucky", wait_s=10).rotated
        assert (folder / "token").read_text() != before
        assert run_task(client, "unlucky") == "hello\n"


@pytest.mark.parametrize("point", ["server.enrolling", "server.enrolled", "server.token_accepted"])
def test_a_server_killed_in_the_middle_loses_no_token(tmp_path: Path, login: Login, point: str) -> None:
    service = Service(tmp_path / "server", tls="1")
    service.start_server()
    try:
        made = line_for(service, "create", "cluster")
        command = made["line"].replace(" --start", "")
        if point == "server.token_accepted":
            login.paste(made["line"])
            with service.client() as client:
                wait_online(client, "cluster")
        service.kill(service.server)
        service.start_server(fault=point)
        if point == "server.token_accepted":
            with service.client() as client:
                wait_online(client, "cluster")
                with pytest.raises(Unavailable):
                    client.endpoints.rotate("cluster", wait_s=10)
        else:
            assert login.paste(command, check=False).returncode == 1
        assert service.server is not None
        assert service.server.wait(timeout=20) == -signal.SIGKILL
        service.start_server()
        if point != "server.token_accepted":
            login.paste(made["line"])  # the same line again
        with service.client() as client:
            wait_online(client, "cluster")
            if point == "server.token_accepted":
                assert eventually(lambda: client.endpoints.rotate("cluster", wait_s=5).rotated, what="it is rotated")
            assert run_task(client, "cluster") == "hello\n"
    finally:
        service.stop()


def test_an_old_one_file_agent_brings_itself_up_to_date(secure: Service, login: Login) -> None:
    login.paste(line_for(secure, "create", "older")["line"])
    file = login.folder("older") / "diamond-agent.pyz"
    newest = file.read_bytes()
    login.agent("older", "stop")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("diamond/of_last_year.py", "")
    login.agent("older", "start")
    assert login.status("older")["up_to_date"] is False
    assert "server's version" in login.agent("older", "upgrade").stdout
    assert file.read_bytes() == newest
    with secure.client() as client:
        wait_online(client, "older")
    assert login.status("older")["up_to_date"] is True
    assert "as new as the server" in login.agent("older", "upgrade").stdout

    # Whoever does not trust the server with that compares the digest, or carries the file there.
    odd = login.agent("older", "upgrade", "--sha256", "0" * 64, check=False)
    assert (odd.returncode, "not the one you gave" in odd.stderr) == (2, True)
    assert file.read_bytes() == newest
    carried = login.folder("older") / "carried.pyz"
    carried.write_bytes(newest)
    with zipfile.ZipFile(carried, "a") as archive:
        archive.writestr("diamond/of_next_year.py", "")
    digest = hashlib.sha256(carried.read_bytes()).hexdigest()
    said = login.agent("older", "upgrade", "--file", str(carried), "--sha256", digest).stdout
    assert "was replaced by" in said
    assert file.read_bytes() == carried.read_bytes()
    with secure.client() as client:
        wait_online(client, "older")


def test_the_same_commands_from_the_installed_package(secure: Service, tmp_path: Path) -> None:
    made = line_for(secure, "create", "installed")
    home = tmp_path / "agent"
    code, pin = made["enrolment"]["code"], made["enrolment"]["pin"]  # type: ignore[index]
    argv = ("agent", "enroll", secure.url, "--code", "-", "--pin", pin, "--home", str(home), "--scheduler", "local")
    enrolled = secure.diamond(*argv, stdin=f"{code}\n")
    assert enrolled.returncode == 0, enrolled.stderr
    try:
        assert secure.diamond("agent", "start", "--via", "plain", "--home", str(home)).returncode == 0
        status = secure.diamond("agent", "status", "--home", str(home), "--json")
        assert (status.returncode, json.loads(status.stdout)["ok"]) == (0, True)
        assert "connected to" in eventually(lambda: secure.diamond("agent", "logs", "--home", str(home)).stdout)
        upgraded = secure.diamond("agent", "upgrade", "--home", str(home))
        assert (upgraded.returncode, "installed package" in upgraded.stderr) == (1, True)
    finally:
        assert secure.diamond("agent", "stop", "--home", str(home)).returncode == 0
    file = tmp_path / "made.pyz"
    assert secure.diamond("agent", "bundle", str(file)).returncode == 0
    assert (
        f"SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
        in secure.diamond("agent", "bundle", str(file)).stdout
    )
