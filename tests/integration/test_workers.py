"""Several server processes on one socket and one PostgreSQL: they answer as one, and one that dies is replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing.people import PASSWORD
from testing.service import Service
from testing.waiting import eventually

WORKERS = 3


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, postgres_server: str) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("workers"), database_url=postgres_server, workers=str(WORKERS)) as service:
        yield service


def children(pid: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


def first_worker(service: Service) -> int:
    """The one that listens on the socket between them."""
    assert service.server is not None
    for pid in children(service.server.pid):
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if _is_link(pid, fd)]
        unix = Path("/proc/net/unix").read_text()
        listening = {line.split()[6] for line in unix.splitlines()[1:] if line.rstrip().endswith("/first")}
        if any(f"socket:[{inode}]" in links for inode in listening):
            return pid
    raise AssertionError("no worker listens for the others")


def is_running(pid: int) -> bool:
    """Not gone, and not merely waiting for somebody to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _is_link(pid: int, fd: str) -> bool:
    return os.path.islink(f"/proc/{pid}/fd/{fd}")


def test_tasks_run_and_are_followed_whoever_answers(service: Service) -> None:
    assert service.server is not None
    assert len(children(service.server.pid)) == WORKERS
    with service.client() as client:
        made = [client.tasks.create({"run": f"echo number {number}"}) for number in range(6)]
        for number, task in enumerate(made):
            assert client.tasks.wait(task.id).state == "SUCCEEDED"
            assert b"".join(client.tasks.logs(task.id)) == f"number {number}\n".encode()


def test_shells_work_whichever_worker_each_end_meets(service: Service) -> None:
    with service.client() as client:
        task = client.tasks.create({"run": "sleep 300"})
        eventually(lambda: client.tasks.get(task.id).state == "RUNNING", within_s=30, what="the task runs")
        for number in range(8):  # each connection may meet another worker
            answer = service.diamond("exec", task.id, "--", "echo", f"shell {number}")
            assert (answer.returncode, answer.stdout.strip()) == (0, f"shell {number}"), answer.stderr
        client.tasks.cancel(task.id)


@pytest.mark.parametrize("which", ["first", "another"])
def test_a_worker_that_dies_is_started_again(service: Service, which: str) -> None:
    assert service.server is not None
    before = set(children(service.server.pid))
    first = first_worker(service)
    victim = first if which == "first" else next(iter(before - {first}))
    os.kill(victim, signal.SIGKILL)
    supervisor = service.server.pid
    eventually(
        lambda: len(now := set(children(supervisor))) == WORKERS and victim not in now,
        within_s=30,
        what="another worker takes its place",
    )
    with service.client() as client:
        task = client.tasks.create({"run": "echo still here"})
        assert client.tasks.wait(task.id).state == "SUCCEEDED"


def test_a_token_that_is_revoked_is_dead_in_every_worker(service: Service) -> None:
    with service.client() as client:
        token = client.tokens.create("short-lived", scopes=["read"])
    headers = {"Authorization": f"Bearer {token.value}"}
    for _ in range(3 * WORKERS):  # a new connection each: all workers remember it
        assert httpx.get(f"{service.url}/api/v1/tasks", headers=headers).status_code == 200
    with service.client() as client:
        client.tokens.revoke(token.id)

    def is_dead() -> bool:
        return all(
            httpx.get(f"{service.url}/api/v1/tasks", headers=headers).status_code == 401 for _ in range(3 * WORKERS)
        )

    eventually(is_dead, within_s=2, what="no worker takes the token any more")


def test_counts_are_of_all_workers_together(service: Service) -> None:
    def answered() -> float:
        lines = httpx.get(f"{service.url}/metrics").text.splitlines()
        wanted = 'diamond_http_requests_total{method="GET",route="/api/v1/health",status="200"}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))

    before = answered()
    for _ in range(20):
        assert httpx.get(f"{service.url}/api/v1/health").status_code == 200
    assert answered() - before == 20


def test_nobody_pretends_to_be_another_worker(service: Service) -> None:
    """The header by which workers pass on an address is believed on their own socket only."""
    message = {"code": "0000-0000-0000", "token_sha256": "0" * 64, "instance": "agt_00000000"}
    for number in range(40):
        headers = {"diamond-forwarded-from": f"192.0.2.{number}"}
        answer = httpx.post(f"{service.url}/api/v1/enrolment", json=message, headers=headers)
    assert answer.status_code == 429, answer.text


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_cookie_that_passes_through_a_worker_stays_its_browsers(tmp_path: Path, database_url: str) -> None:
    """Workers hand sign-ins on to the first; what one browser gets must not go along with another's request."""
    with Service(tmp_path / "home", database_url=database_url, workers="2", multi_user="1") as service:
        for _ in range(8):  # some of these meet the worker that hands on
            with httpx.Client(base_url=service.url) as browser:
                page = browser.get("/sign-in").text
                fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page))
                form = {**fields, "name": "alice", "password": PASSWORD}
                assert browser.post("/sign-in", data=form, headers={"Origin": service.url}).status_code == 303
                assert browser.get("/dashboard").status_code == 200
        for _ in range(24):
            assert httpx.get(f"{service.url}/account").status_code in (302, 303)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_guesses_are_counted_for_all_workers_together(tmp_path: Path, database_url: str) -> None:
    """Whichever worker they meet: of a password at sign-in and of the old one in the settings, and logins begun."""
    with Service(tmp_path / "home", database_url=database_url, workers=str(WORKERS), multi_user="1") as service:

        def send(path: str, cookies: httpx.Cookies, page: str, **fields: str) -> int:
            """On a connection of its own, which any worker may take."""
            with httpx.Client(base_url=service.url, cookies=cookies) as browser:
                csrf = re.search(r'name="csrf" value="([^"]+)"', browser.get(page).text)
                assert csrf
                form = {"csrf": csrf[1], **fields}
                return browser.post(path, data=form, headers={"Origin": service.url}).status_code

        with httpx.Client(base_url=service.url) as browser:
            fields = dict(
                re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', browser.get("/sign-in").text)
            )
            form = {**fields, "name": "alice", "password": PASSWORD}
            assert browser.post("/sign-in", data=form, headers={"Origin": service.url}).status_code == 303
            cookies = browser.cookies
        new = {"new_password": "quite another one", "again": "quite another one"}
        inside = [send("/settings/password", cookies, "/settings", old_password="wrong", **new) for _ in range(16)]
        assert (inside.count(403), inside.count(429)) == (10, 6), inside
        outside = [send("/sign-in", httpx.Cookies(), "/sign-in", name="bob", password="wrong") for _ in range(16)]
        assert (outside.count(401), outside.count(429)) == (10, 6), outside
        wanted = {"name": "x", "token_sha256": "0" * 64, "scopes": ["read"]}
        begun = [httpx.post(f"{service.url}/api/v1/logins", json=wanted).status_code for _ in range(125)]
        assert begun.count(201) == 120, begun


def test_all_end_with_the_supervisor(tmp_path: Path, postgres_server: str) -> None:
    service = Service(tmp_path / "home", database_url=postgres_server, workers=str(WORKERS))
    service.start_server()
    assert service.server is not None
    workers = children(service.server.pid)
    os.kill(service.server.pid, signal.SIGKILL)
    service.server.wait()
    eventually(lambda: not any(is_running(pid) for pid in workers), within_s=20, what="no worker is left")
    service.stop()


def test_sqlite_has_one_worker(tmp_path: Path) -> None:
    env = {**os.environ, "DIAMOND_HOME": str(tmp_path), "DIAMOND_PORT": "0", "DIAMOND_WORKERS": "2"}
    ended = subprocess.run(
        [sys.executable, "-m", "diamond.server"], env=env, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "workers: 2 workers need PostgreSQL" in ended.stderr
