"""Starting and stopping a server: what it refuses, and how it ends. The life cycle runs in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diamond.core.errors import Conflict, InstallationProblem
from diamond.core.home import Home
from diamond.server.main import _url, serve, server_lock
from diamond.server.settings import load_settings

pytestmark = pytest.mark.usefixtures("root_logger")

_LIFE = """
import json, os, signal, sys, threading, time, httpx
from pathlib import Path
from subprocess import PIPE, Popen
home = Path(sys.argv[1])
env = {**os.environ, "DIAMOND_HOME": str(home), "DIAMOND_PORT": "0", "DIAMOND_SQLITE_SYNCHRONOUS": "OFF"}
for round in range(2):
    command = [sys.executable, "-W", "error", "-m", "diamond.server"]
    server = Popen(command, env=env, stdout=PIPE, stderr=PIPE, text=True)
    url = server.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), (url, server.stderr.read())
    said = json.loads((home / "server/server.json").read_text())
    assert said == {"pid": server.pid, "url": url}, said
    saved = json.loads((home / "client.json").read_text())
    assert saved["url"] == url
    if round == 0:
        second = Popen([sys.executable, "-m", "diamond.server"], env=env, stderr=PIPE, text=True)
        error = second.communicate(timeout=90)[1]
        assert second.returncode == 1 and str(server.pid) in error and "Traceback" not in error, error
    client = httpx.Client(base_url=url, headers={"Authorization": "Bearer " + saved["token"]}, timeout=60)
    assert client.get("/api/v1/health").json()["status"] == "ok"
    answers = []
    def wait(path):
        answers.append(client.get(path).status_code)
    paths = ["/api/v1/events?since=999&wait_s=50", "/api/v1/events/stream"] * 5
    waiting = [threading.Thread(target=wait, args=(path,)) for path in paths]
    for thread in waiting:
        thread.start()
    time.sleep(0.7)
    began = time.monotonic()
    server.send_signal([signal.SIGTERM, signal.SIGINT][round])
    code = server.wait(20)
    took = time.monotonic() - began
    for thread in waiting:
        thread.join(5)
    assert code == 0, (code, server.stderr.read())
    assert took < 4, took
    assert answers == [200] * 10, answers
    assert not (home / "server/server.json").exists()
    noise = [line for line in server.stderr.read().splitlines() if '"level": "INFO"' not in line]
    assert not noise, noise
print("lived")
"""


def test_it_starts_answers_and_stops_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIFE, str(tmp_path / "home")], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout.strip() == "lived", done.stderr


def test_one_server_per_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with server_lock(home), pytest.raises(Conflict, match="already runs"):
        serve(home=home, port=0)
    with server_lock(home):
        pass


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InstallationProblem, match=str(port)) as caught:
            serve(home=Home(tmp_path / "home"), port=port)
    assert "--port" in caught.value.hint


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_not_beyond_this_machine_without_being_told(tmp_path: Path, host: str) -> None:
    with pytest.raises(InstallationProblem, match="refusing to listen"):
        serve(home=Home(tmp_path / "home"), host=host, port=0)
    assert not (tmp_path / "home").exists()


def test_addresses_clients_can_use() -> None:
    assert _url("0.0.0.0", 1) == _url("127.0.0.1", 1) == "http://127.0.0.1:1"
    assert _url("::", 1) == _url("::1", 1) == "http://[::1]:1"
    assert load_settings(host="localhost").is_loopback
