"""With one user there is no login page: whose browser it is decides, by what the kernel knows of its connection."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from diamond.core.home import ClientConfig
from diamond.server import peers
from testing.service import Service

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None or shutil.which("curl") is None,
    reason="needs root, setpriv and curl: a client under another account",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("single") / "home")
    running.start_server()
    yield running
    running.stop()


def browser(server: Service, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=headers, timeout=30, trust_env=False)


def test_a_browser_of_the_same_account_is_signed_in_by_itself(server: Service) -> None:
    with browser(server) as client:
        for path in ("/dashboard", "/device"):
            page = client.get(path, follow_redirects=True)
            assert page.status_code == 200 and str(page.url).endswith(path)
        assert client.cookies.get("diamond_session")
        assert client.get("/api/v1/info").status_code == 200
        page = client.get("/settings/sessions").text
        assert "loopback, from 127.0.0.1" in page
        for path in ("/setup", "/invitation", "/reset"):
            assert client.get(path).headers["location"] == "/sign-in"


def test_a_browser_without_cookies_is_told(server: Service) -> None:
    path = "/dashboard"
    for _ in range(5):
        answer = httpx.get(server.url + path, timeout=30)
        if answer.status_code != 303:
            break
        path = answer.headers["location"]
    assert answer.status_code == 403 and "keeps no cookies" in answer.text


def test_signing_out_stays_so_until_asked(server: Service) -> None:
    with browser(server) as client:
        page = client.get("/dashboard", follow_redirects=True)
        csrf = page.text.split('name="csrf" value="')[1].split('"')[0]
        out = client.post("/sign-out", data={"csrf": csrf}, follow_redirects=True)
        assert "You are signed out" in out.text and not client.cookies.get("diamond_session")
        assert client.get("/api/v1/info").status_code == 401


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_another_account_on_the_same_machine_is_not(server: Service, host: str) -> None:
    """The door plate and the way in, and nothing of the user's."""
    nobody = pwd.getpwnam("nobody")
    became = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    for path in ("/dashboard", "/sign-in"):
        ask = ["curl", "-sS", "-i", "-L", "-b", "", "--noproxy", "*", f"http://{host}:{server.port}{path}"]
        done = subprocess.run([*became, *ask], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert " 403 Forbidden" in done.stdout and "under the same account as the server" in done.stdout
        assert "diamond_session=" not in done.stdout
        own = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
        assert "diamond_session=" in own.stdout


@needs_root
def test_root_is_another_account_too(tmp_path: Path) -> None:
    """What root connects with may carry anybody: proxies, VPNs and container runtimes run as root."""
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        here, peer = server.getsockname()[:2], client.getsockname()[:2]
        assert peers.uid_of(peer, here) == 0 and peers.is_own(peer, here)
        # The same question from a server that is not root's.
        nobody = pwd.getpwnam("daemon")
        child = os.fork()
        if child == 0:
            os.setuid(nobody.pw_uid)
            os._exit(10 if peers.is_own(peer, here) else 20)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20


def test_a_token_can_be_pasted_once(server: Service) -> None:
    config = ClientConfig.load(server.home)
    assert config is not None
    with browser(server, **{"X-Forwarded-For": "192.0.2.1"}) as client:
        page = client.get("/dashboard", follow_redirects=True)
        assert page.status_code == 403 and "a proxy passed the request on" in page.text
        csrf = page.text.split('name="csrf" value="')[1].split('"')[0]
        wrong = client.post("/sign-in", data={"csrf": csrf, "token": "dmdu_wrong", "next": "/dashboard"})
        assert wrong.status_code == 401 and "token-error" in wrong.text and "dmdu_wrong" not in wrong.text
        right = client.post("/sign-in", data={"csrf": csrf, "token": config.token, "next": "/dashboard"})
        assert right.status_code == 303 and client.get("/dashboard").status_code == 200
        headers = {"Authorization": f"Bearer {config.token}"}
        less = httpx.post(
            f"{server.url}/api/v1/tokens", json={"name": "less", "scopes": ["launch"]}, headers=headers, timeout=30
        )
        assert less.status_code == 201, less.text
    with browser(server, **{"X-Forwarded-For": "192.0.2.1"}) as client:
        csrf = client.get("/sign-in").text.split('name="csrf" value="')[1].split('"')[0]
        refused = client.post("/sign-in", data={"csrf": csrf, "token": less.json()["value"]})
        assert refused.status_code == 401 and "may do less" in refused.text


def test_a_picture_on_a_page_elsewhere_begins_no_session(server: Service) -> None:
    with browser(server) as client:
        answer = client.get("/sign-in", headers={"Sec-Fetch-Dest": "image", "Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 403 and "diamond_session" not in client.cookies


def test_names_that_were_made_to_point_here_get_nothing(server: Service) -> None:
    with browser(server) as client:
        for path in ("/sign-in", "/dashboard", "/api/v1/health"):
            answer = client.get(path, headers={"Host": f"evil.example:{server.port}"})
            assert answer.status_code == 403 and "set-cookie" not in answer.headers


def test_signing_out_ends_open_streams(server: Service) -> None:
    with browser(server) as client:
        page = client.get("/dashboard", follow_redirects=True)
        csrf = page.text.split('name="csrf" value="')[1].split('"')[0]
        cookies = {"diamond_session": client.cookies["diamond_session"]}
        begun, ended = threading.Event(), []

        def follow() -> None:
            with httpx.stream("GET", f"{server.url}/api/v1/events/stream", cookies=cookies, timeout=60) as stream:
                assert stream.status_code == 200
                begun.set()
                text = "".join(stream.iter_text())
            ended.append((time.monotonic(), text))

        follower = threading.Thread(target=follow)
        follower.start()
        assert begun.wait(30)
        time.sleep(0.3)
        assert follower.is_alive()
        signed_out = time.monotonic()
        client.post("/sign-out", data={"csrf": csrf})
        follower.join(30)
        assert ended and ended[0][0] - signed_out < 2
        assert "unauthenticated" in ended[0][1]


def test_ipv6(tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        here, peer = server.getsockname()[:2], client.getsockname()[:2]
        assert peers.uid_of(peer, here) == os.getuid() and peers.is_own(peer, here)


def test_an_ipv4_client_of_a_socket_for_both(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no sockets for IPv4 and IPv6 together")
    server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with server, socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client:
        accepted, peer = server.accept()
        with accepted:
            here = accepted.getsockname()[:2]
            assert peer[0] == "::ffff:127.0.0.1"
            assert peers.is_own(peer[:2], here)
        assert client


def test_what_is_no_connection_is_nobodys() -> None:
    assert peers.uid_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert not peers.is_own(None, ("127.0.0.1", 2)) and not peers.is_own(("192.0.2.1", 1), ("192.0.2.2", 2))
    assert not peers.is_own(("not an address", 1), ("127.0.0.1", 2))


def test_a_connection_that_was_closed_is_nobodys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname()[:2])
        accepted, peer = server.accept()
        with accepted:
            here = accepted.getsockname()[:2]
            assert peers.uid_of(peer, here) == os.getuid()
            client.close()
            assert peers.uid_of(peer, here) is None, "the kernel shows what nobody holds any more as root's"
