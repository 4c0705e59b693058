"""The agent as a process of its own, against an HTTP server that lies, redirects and never ends its answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from diamond.core.codec import encode
from diamond.core.states import Desired, JobState
from diamond.core.tasks import TaskSpec
from diamond.core.wire import DesiredState, JobOrder, Welcome
from testing.waiting import eventually

POLICY = 'max_nodes = 1\ndenied_envs = ["LD_*"]\nallow_secrets = false\n'
MOST_MIB = 400


class Liar:
    """What the server says next. `tricks` are done once each, to whoever asks for orders."""

    def __init__(self) -> None:
        self.tricks: list[str] = []
        self.done: list[str] = []
        self.orders: list[dict[str, Any]] = []
        self.reports: dict[str, dict[str, Any]] = {}
        self.stolen: list[str] = []
        self.epoch = "epoch-1"

    def answer(self, path: str, body: Any) -> Any:
        if path == "/agent/hello":
            return encode(Welcome(endpoint_id="end_00000001", endpoint_name="x", epoch=self.epoch, owner="alice"))
        if path == "/agent/desired":
            state = encode(DesiredState(epoch=self.epoch, revision=len(self.orders), full=True))
            return {**state, "orders": [one for one in self.orders if one["job_id"] not in self.reports]}
        if path == "/agent/reports":
            final = [job for job in body["jobs"] if JobState(job["state"]).is_final]
            self.reports |= {job["job_id"]: job for job in final}
            states = {job["job_id"]: job["state"] for job in body["jobs"]}
            received: dict[str, dict[str, int]] = {}
            for chunk in body["streams"]:
                size = chunk["offset"] + len(chunk["data"]) * 3 // 4
                received.setdefault(chunk["job_id"], {})[chunk["stream"]] = size
            return {"epoch": self.epoch, "states": states, "received": received, "unknown": []}
        return None


def _handler(liar: Liar) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path.removeprefix("/api/v1")
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            if path.startswith("/stolen"):
                liar.stolen.append(self.headers.get("Authorization", ""))
            if path == "/agent/desired" and liar.tricks:
                trick = liar.tricks.pop(0)
                with contextlib.suppress(OSError):
                    self.trick(trick)
                liar.done.append(trick)
                self.close_connection = True
                return
            if path == "/agent/desired" and "wait_s=0" not in self.path and parse_qs(urlsplit(self.path).query):
                threading.Event().wait(0.1)
            data = json.dumps(liar.answer(path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def trick(self, name: str) -> None:
            port = self.server.server_address[1]  # type: ignore[index]
            self.send_response(308 if name == "redirect" else 200)
            if name == "redirect":
                self.send_header("Location", f"http://localhost:{port}/stolen")
                self.send_header("Content-Length", "0")
            elif name == "endless":
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", "400000")
            self.end_headers()
            for _ in range(2000 if name == "endless" else 0):
                self.wfile.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
            if name == "deep":
                self.wfile.write(b"[" * 400_000)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


@pytest.fixture
def liar() -> Liar:
    return Liar()


@pytest.fixture
def agent(liar: Liar, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    listener = ThreadingHTTPServer(("127.0.0.1", 0), _handler(liar))
    listener.daemon_threads = True
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "policy.toml").write_text(POLICY)
    token = tmp_path / "home" / "token"
    token.touch(mode=0o600)
    token.write_text("the agent's token")
    url = f"http://127.0.0.1:{listener.server_address[1]}"
    argv = [sys.executable, "-m", "diamond.agent", "--server", url, "--home", str(home), "--token-file", str(token)]
    environment = {**os.environ, "HOME": str(tmp_path / "user")}
    (tmp_path / "user").mkdir()
    with open(tmp_path / "home" / "agent.log", "wb") as log:
        process = subprocess.Popen([*argv, "--scheduler", "local"], stdout=log, stderr=log, env=environment)
    yield process
    process.terminate()
    process.wait(30)
    listener.shutdown()
    listener.server_close()


def an_order(job_id: str, **spec: Any) -> dict[str, Any]:
    order = JobOrder(
        job_id=job_id, task_id="tsk_00000001", task_name="t", attempt=1, desired=Desired.RUN, user="alice",
        spec=TaskSpec.parse({"run": "true", **spec}),
    )  # fmt: skip
    return dict(json.loads(json.dumps(encode(order))))


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def test_it_survives_and_keeps_its_rules(liar: Liar, agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    before = _listing(tmp_path)
    # Those that look like trouble on the way are tried again soon; what makes no sense is given half a minute.
    liar.tricks = ["redirect", "endless"]
    eventually(lambda: len(liar.done) == 2, within_s=120, what="the tricks were played")
    ran = f"touch {tmp_path}/ran"
    liar.orders = [
        an_order("job_00000001", run=ran, num_nodes=2),
        an_order("job_00000002", run=ran, envs={"LD_PRELOAD": "x"}),
        an_order("job_00000003", run=ran, secrets={"KEY": "KEY"}),
        {**an_order("job_00000004", run=ran), "user": "mallory"},
        {**an_order("job_00000005", run=ran), "job_id": "../../job_00000005"},
        an_order("job_00000006"),
    ]
    eventually(lambda: len(liar.reports) == 5, within_s=120, what="every order is answered")
    details = {name: report["detail"] for name, report in liar.reports.items()}
    for number, rule in enumerate(("max_nodes", "denied_envs", "allow_secrets", "allow_others"), start=1):
        assert details[f"job_0000000{number}"].startswith(f"policy.toml: {rule}"), details
    assert liar.reports["job_00000006"]["state"] == "SUCCEEDED"
    assert liar.stolen == []
    assert (tmp_path / "home" / "policy.toml").read_text() == POLICY
    assert _peak_mib(agent.pid) < MOST_MIB
    assert agent.poll() is None
    assert _listing(tmp_path) == before


def _listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "home")


def test_no_answer_ends_it(liar: Liar, agent: subprocess.Popen[bytes]) -> None:
    liar.tricks = ["deep"]
    eventually(lambda: liar.done == ["deep"], within_s=60, what="the trick was played")
    liar.orders = [an_order("job_00000001")]
    eventually(lambda: "job_00000001" in liar.reports, within_s=120, what="it goes on")
    assert liar.reports["job_00000001"]["state"] == "SUCCEEDED"
    assert agent.poll() is None
